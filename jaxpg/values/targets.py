"""Targets and losses of action values, which network chooses the successor's action, and how the target network moves.

R rows of a batch, A actions, N estimates per action (`q_networks.QNetwork`); everything is an array over rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpg.errors import UserError
from jaxpg.types import Array, Scalar, Tree


def by_target_network(q_online: Array, q_target: Array) -> Array:
    """The values by which the successor's action is chosen, `[R, A]`: those of the target network.

    With them the target is r + gamma max_a Q_target(s', a): Mnih et al. 2015, algorithm 1.
    """
    return q_target


def by_online_network(q_online: Array, q_target: Array) -> Array:
    """The values by which the successor's action is chosen, `[R, A]`: those of the network that learns.

    With them the target is r + gamma Q_target(s', argmax_a Q(s', a)): one network chooses and the other rates, so that
    a value is not large because its own error is. Source: van Hasselt et al. 2016 (Double DQN).
    """
    return q_online


def pick(x: Array, action: Array) -> Array:
    """The estimates of one action per row, `[..., A, N]` and `[...]` -> `[..., N]`, as a masked sum.

    It replaces `take_along_axis`, whose derivative is a scatter, as in `distributions`.
    """
    chosen = jax.nn.one_hot(action, x.shape[-2], dtype=bool)
    return jnp.where(chosen[..., None], x, 0.0).sum(-2)


def per_action(name: str, x: Array, values: Array) -> Array:
    """`x`, which a function of the algorithm gave for these values, `[R, A]`.

    Raises:
        UserError: it has another shape, such as that of one action per row.
    """
    if jnp.shape(x) != values.shape:
        raise UserError(
            f"The algorithm's {name} must give a number per action, {list(values.shape)} here, not an array of shape "
            f"{list(jnp.shape(x))}."
        )
    return x


def huber(error: Array, threshold: Scalar = 1.0) -> Array:
    """error^2 / 2 up to `threshold`, from there on linear with that slope. Source: Huber 1964; Mnih et al. 2015."""
    size = jnp.abs(error)
    return jnp.where(size <= threshold, 0.5 * error**2, threshold * (size - 0.5 * threshold))


def huber_loss(prediction: Array, target: Array, *, threshold: Scalar = 1.0) -> Array:
    """`[R]`, the Huber loss of one estimate per row, `[R, 1]` each.

    Raises:
        UserError: there are several estimates.
    """
    return huber(_error_of_one("huber_loss", prediction, target), threshold)


def squared_loss(prediction: Array, target: Array) -> Array:
    """`[R]`, half the squared error of one estimate per row, `[R, 1]` each.

    Raises:
        UserError: there are several estimates.
    """
    return 0.5 * _error_of_one("squared_loss", prediction, target) ** 2


def _error_of_one(loss: str, prediction: Array, target: Array) -> Array:
    """target - prediction, `[R]`, of one estimate per row."""
    if (estimates := max(prediction.shape[-1], target.shape[-1])) != 1:
        raise UserError(
            f"{loss} is of one estimate per action, and the head gives {estimates}, whose mean is the action's value: "
            "take quantile_huber_loss, or a head of one."
        )
    return (target - prediction)[..., 0]


def quantile_huber_loss(prediction: Array, target: Array, *, threshold: Scalar = 1.0) -> Array:
    """`[R]`, sum_i mean_j |tau_i - 1(u_ij < 0)| huber(u_ij) / threshold, with u_ij = target_j - prediction_i.

    `prediction` `[R, N]` are the quantiles at tau_i = (2i - 1) / 2N, and `target` `[R, M]` samples of the distribution.
    With N = M = 1 it is half the Huber loss over the threshold. Source: Dabney et al. 2018 (QR-DQN), equations 9 and
    10, algorithm 1, over the threshold as in Dabney et al. 2018 (IQN).
    """
    quantiles = prediction.shape[-1]
    tau = (jnp.arange(quantiles, dtype=prediction.dtype) + 0.5)[None, :, None] / quantiles
    error = target[..., None, :] - prediction[..., :, None]
    share = jnp.abs(tau - (error < 0).astype(prediction.dtype))
    return (share * huber(error, threshold) / threshold).mean(-1).sum(-1)


def move_target(target: Tree, params: Tree, updates: Array, *, period: int, rate: Scalar) -> Tree:
    """target + rate (params - target) after every `period` updates; in between the target stays.

    A period above 1 with rate 1 is that of Mnih et al. 2015; period 1 with a small rate is Polyak averaging (Lillicrap
    et al. 2016). `updates` [] counts the updates so far.
    """
    step = jnp.where(updates % period == 0, rate, 0.0)
    return jax.tree.map(lambda old, new: (1 - step) * old + step * new, target, params)
