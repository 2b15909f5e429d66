"""Neural networks as Policy and Critic.

A network is a torso, which turns observations into features, and heads: one for the policy, one for the value. Each of
`mlp`, `cnn` and `recurrent` returns `(policy, critic)`. Initial weights are orthogonal with the gains of PPO's
reference code (Huang et al. 2022, "The 37 Implementation Details of PPO", detail 2): sqrt(2) in the torso, so that
activations keep their scale; 0.01 for the policy head, so that the first policy is nearly uniform; 1 for the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpg.distributions import Categorical, DiagonalGaussian, SquashedGaussian
from jaxpg.errors import UserError
from jaxpg.types import Array, Critic, Discrete, Env, Key, Params, Policy, Rollout, Space, Transition, Tree

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"tanh": nn.tanh, "relu": nn.relu, "silu": nn.silu, "gelu": nn.gelu}
HIDDEN_GAIN, POLICY_GAIN, VALUE_GAIN = 2.0**0.5, 0.01, 1.0


def orthogonal(gain: float) -> Callable[..., Array]:
    """Initial weights `[..., out]`: as a matrix, `gain` times one with orthonormal columns (or rows), uniformly drawn.

    Gram-Schmidt on a normal matrix, every projection taken twice against rounding (Saxe et al. 2014, section 3). A QR
    decomposition gives the same, but several of jaxlib's at once, as `vmap` over seeds makes them, can wait for each
    other for ever on a CPU: each holds a thread of the pool that it wants to share its work with.
    """

    def initialise(key: Key, shape: Sequence[int], dtype: Any = jnp.float32) -> Array:
        rows, columns = math.prod(shape[:-1]), shape[-1]
        normal = jax.random.normal(key, (max(rows, columns), min(rows, columns)), dtype)

        def add_column(i: Array, q: Array) -> Array:
            column = normal[:, i]
            for _ in range(2):
                column -= q @ (q.T @ column)
            return q.at[:, i].set(column / jnp.linalg.norm(column))

        q = lax.fori_loop(0, normal.shape[1], add_column, jnp.zeros_like(normal))
        return gain * (q if rows >= columns else q.T).reshape(shape)

    return initialise


def dense(features: int, gain: float) -> nn.Dense:
    """A dense layer with orthogonal weights scaled by `gain` and no initial bias."""
    return nn.Dense(features, kernel_init=orthogonal(gain))


class MLPTorso(nn.Module):
    """`[..., *event] -> [..., hidden[-1]]`: the event axes flattened, then dense layers."""

    event_ndim: int
    hidden: Sequence[int]
    activation: str

    @nn.compact
    def __call__(self, obs: Array) -> Array:
        x = obs.reshape(*obs.shape[: obs.ndim - self.event_ndim], -1)
        for width in self.hidden:
            x = ACTIVATIONS[self.activation](dense(width, HIDDEN_GAIN)(x))
        return x


class CNNTorso(nn.Module):
    """`[..., H, W, C] -> [..., hidden[-1]]`: one 3x3 convolution per entry of `channels`, then dense layers.

    MinAtar's ten-by-ten boards want no more than one (Young and Tian 2019, section 4).
    """

    channels: Sequence[int]
    hidden: Sequence[int]
    activation: str

    @nn.compact
    def __call__(self, obs: Array) -> Array:
        x = obs
        for channels in self.channels:
            x = ACTIVATIONS[self.activation](dense(channels, HIDDEN_GAIN)(patches(x)))
        return MLPTorso(3, self.hidden, self.activation)(x)


def patches(x: Array) -> Array:
    """`[..., H, W, C] -> [..., H-2, W-2, 9C]`: the 3x3 neighbourhood of every inner cell, row by row.

    A dense layer on top of it is a convolution without padding. XLA's own convolution, differentiated inside a
    compiled loop on a CPU, took 15 times as long as this matrix product.
    """
    height, width = x.shape[-3] - 2, x.shape[-2] - 2
    return jnp.concatenate([x[..., i : i + height, j : j + width, :] for i in range(3) for j in range(3)], -1)


class PolicyHead(nn.Module):
    """Features to a distribution over the action space.

    Discrete: logits. Box: a mean per dimension and a log standard deviation that does not depend on the state
    (detail 2 of the continuous-control part of the 37), squashed into the bounds where `squash` is set.
    """

    space: Space
    squash: bool
    initial_log_std: float

    @nn.compact
    def __call__(self, features: Array) -> Any:
        if isinstance(self.space, Discrete):
            return Categorical(dense(self.space.n, POLICY_GAIN)(features))
        size = self.space.shape[-1]
        mean = dense(size, POLICY_GAIN)(features)
        log_std = self.param("log_std", nn.initializers.constant(self.initial_log_std), (size,))
        log_std = jnp.broadcast_to(log_std, mean.shape)
        if not self.squash:
            return DiagonalGaussian(mean, log_std)
        low, high = (jnp.broadcast_to(jnp.asarray(bound, mean.dtype), mean.shape) for bound in self.space)
        return SquashedGaussian(mean, log_std, low, high)


class ValueHead(nn.Module):
    """Features to a scalar, the last axis dropped."""

    @nn.compact
    def __call__(self, features: Array) -> Array:
        return dense(1, VALUE_GAIN)(features)[..., 0]


def mlp(
    env: Env,
    *,
    hidden: Sequence[int] = (64, 64),
    activation: str = "tanh",
    shared: bool = False,
    squash: bool = False,
    initial_log_std: float = 0.0,
) -> tuple[Policy, Critic]:
    """Multi-layer perceptrons.

    Args:
        hidden: widths of the hidden layers.
        activation: one of tanh, relu, silu, gelu.
        shared: the critic reads the policy's torso and adds only a head. Saves work; the two losses then compete.
        squash: bounded actions by tanh instead of by clipping.
        initial_log_std: of a Gaussian policy, per dimension.
    """
    torso = MLPTorso(len(env.observation_space.shape), tuple(hidden), _known(activation))
    return _feedforward(env, torso, _policy_head(env, squash, initial_log_std), shared)


def cnn(
    env: Env,
    *,
    channels: Sequence[int] = (16,),
    hidden: Sequence[int] = (128,),
    activation: str = "relu",
    shared: bool = True,
    squash: bool = False,
    initial_log_std: float = 0.0,
) -> tuple[Policy, Critic]:
    """Convolutions over `[H, W, C]` observations, then dense layers.

    Args:
        channels: output channels of the 3x3 convolutions.
        hidden: widths of the dense layers behind them.
        activation: one of tanh, relu, silu, gelu.
        shared: the critic reads the policy's torso and adds only a head.
        squash: bounded actions by tanh instead of by clipping.
        initial_log_std: of a Gaussian policy, per dimension.

    Raises:
        UserError: the observations are not images.
    """
    shape = env.observation_space.shape
    if len(shape) != 3:
        raise UserError(
            f"A cnn reads observations of shape [height, width, channels], but {env.name} gives {shape}. Use an mlp."
        )
    torso = CNNTorso(tuple(channels), tuple(hidden), _known(activation))
    return _feedforward(env, torso, _policy_head(env, squash, initial_log_std), shared)


def recurrent(
    env: Env,
    *,
    hidden: Sequence[int] = (64,),
    width: int = 64,
    cell: str = "gru",
    activation: str = "tanh",
    squash: bool = False,
    initial_log_std: float = 0.0,
) -> tuple[Policy, Critic]:
    """A policy that remembers: dense layers, a recurrent cell, and heads for the policy and the value on top of it.

    The memory starts at zero and is cleared at the end of every episode. `gru` is evaluated by a scan over time;
    `min_gru`, whose gates do not read the memory (Feng et al. 2024, "Were RNNs All We Needed?", section 3.1), is a
    linear recurrence and is evaluated in parallel, in O(log T) steps.

    Args:
        hidden: widths of the dense layers before the cell.
        width: size of the memory.
        cell: gru or min_gru.
        activation: one of tanh, relu, silu, gelu.
        squash: bounded actions by tanh instead of by clipping.
        initial_log_std: of a Gaussian policy, per dimension.
    """
    cells: dict[str, type[GRU] | type[MinGRU]] = {"gru": GRU, "min_gru": MinGRU}
    if cell not in cells:
        raise UserError(f"The recurrent cell is one of {', '.join(cells)}; {cell!r} was given.")
    encoder = MLPTorso(len(env.observation_space.shape), tuple(hidden), _known(activation))
    return _remembering(env, encoder, cells[cell](width), _policy_head(env, squash, initial_log_std), width)


def _known(activation: str) -> str:
    if activation not in ACTIVATIONS:
        raise UserError(f"The activation is one of {', '.join(ACTIVATIONS)}; {activation!r} was given.")
    return activation


def _policy_head(env: Env, squash: bool, initial_log_std: float) -> PolicyHead:
    space = env.action_space
    if squash and not isinstance(space, Discrete) and not np.isfinite([space.low, space.high]).all():
        raise UserError(
            f"squash needs finite bounds, but the actions of {env.name} are unbounded. Do not clip them too."
        )
    return PolicyHead(space, squash, initial_log_std)


def _initialise(modules: dict[str, nn.Module], key: Key, x: Array) -> Tree:
    """Parameters of modules applied one after the other, by name."""
    params = {}
    for (name, module), module_key in zip(modules.items(), jax.random.split(key, len(modules)), strict=True):
        x, params[name] = module.init_with_output(module_key, x)
    return params


def _apply(module: nn.Module, params: Tree, *inputs: Array, **options: Any) -> Any:
    """`module.apply` of modules that change nothing but their output."""
    return module.apply(params, *inputs, **options)


def _blank(env: Env) -> Array:
    return jnp.zeros(env.observation_space.shape)


def _feedforward(env: Env, torso: nn.Module, head: PolicyHead, shared: bool) -> tuple[Policy, Critic]:
    value_head = ValueHead()

    def policy_init(key: Key) -> Tree:
        return _initialise({"torso": torso, "head": head}, key, _blank(env))

    def distribution(params: Tree, obs: Array) -> Any:
        return _apply(head, params["head"], _apply(torso, params["torso"], obs))

    def critic_init(key: Key) -> Tree:
        params = _initialise({"torso": torso, "head": value_head}, key, _blank(env))
        return {"head": params["head"]} if shared else params

    def values(params: Params, rollout: Rollout) -> tuple[Array, Array]:
        torso_params = params.policy["torso"] if shared else params.critic["torso"]

        def value(obs: Array) -> Array:
            return _apply(value_head, params.critic["head"], _apply(torso, torso_params, obs))

        v_tm1 = value(rollout.steps.obs)
        return v_tm1, successor_values(value, rollout.steps, v_tm1)

    policy = Policy(
        init=policy_init,
        start=lambda params, obs: (),
        act=lambda params, memory, obs: (distribution(params, obs), memory),
        evaluate=lambda params, rollout: distribution(params, rollout.steps.obs),
    )
    return policy, Critic(critic_init, values)


def successor_values(value: Callable[[Array], Array], steps: Transition, v_tm1: Array) -> Array:
    """V(next_obs) `[T, B]` wherever the discount is not 0, for little more than the V(obs) that is known.

    Between two steps of an episode, next_obs is the obs of the step after. What is left to evaluate is the end of the
    segment and the time-outs inside it, of which a column seldom has two; if one does, all of next_obs is evaluated.
    """
    cut = (steps.last & (steps.discount > 0)).at[-1].set(False)
    first_cut = cut.argmax(0)

    def at_ends(_: None) -> Array:
        columns = jnp.arange(cut.shape[1])
        obs = jnp.stack([steps.next_obs[first_cut, columns], steps.next_obs[-1]])
        v_cut, v_end = value(obs)
        following = jnp.concatenate([v_tm1[1:], v_end[None]])
        return jnp.where(cut, v_cut[None], following)

    return lax.cond((cut.sum(0) > 1).any(), lambda _: value(steps.next_obs), at_ends, None)


class GRU(nn.Module):
    """Gated recurrent unit (Cho et al. 2014). `__call__` is one step, `unroll` a scan over `[T, B, ...]`."""

    width: int

    def setup(self) -> None:
        self.cell = nn.GRUCell(self.width, recurrent_kernel_init=orthogonal(1.0))

    def __call__(self, memory: Array, x: Array) -> Array:
        return self.cell(memory, x)[0]

    def unroll(self, memory: Array, x: Array, first: Array) -> Array:
        def step(cell: nn.Module, memory: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
            x_t, first_t = inputs
            memory = cell(jnp.where(first_t[:, None], 0.0, memory), x_t)[0]
            return memory, memory

        scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})
        return scan(self.cell, memory, (x, first))[1]


class MinGRU(nn.Module):
    """h_t = (1 - z_t) h_{t-1} + z_t c_t with gate z_t and candidate c_t functions of x_t alone."""

    width: int

    def setup(self) -> None:
        self.gate, self.candidate = nn.Dense(self.width), nn.Dense(self.width)

    def __call__(self, memory: Array, x: Array) -> Array:
        gate = nn.sigmoid(self.gate(x))
        return (1 - gate) * memory + gate * self.candidate(x)

    def unroll(self, memory: Array, x: Array, first: Array) -> Array:
        gate = nn.sigmoid(self.gate(x))
        keep = jnp.where(first[..., None], 0.0, 1 - gate)
        new = gate * self.candidate(x)
        new = new.at[0].add(keep[0] * memory)

        def compose(earlier: tuple[Array, Array], later: tuple[Array, Array]) -> tuple[Array, Array]:
            return earlier[0] * later[0], later[0] * earlier[1] + later[1]

        return lax.associative_scan(compose, (keep, new))[1]


def _remembering(
    env: Env, encoder: nn.Module, cell: GRU | MinGRU, head: PolicyHead, width: int
) -> tuple[Policy, Critic]:
    value_head = ValueHead()

    def policy_init(key: Key) -> Tree:
        encoder_key, cell_key, head_key = jax.random.split(key, 3)
        memory = jnp.zeros(width)
        x, encoder_params = encoder.init_with_output(encoder_key, _blank(env))
        return {
            "encoder": encoder_params,
            "cell": cell.init(cell_key, memory, x),
            "head": head.init(head_key, memory),
        }

    def act(params: Tree, memory: Array, obs: Array) -> tuple[Any, Array]:
        memory = _apply(cell, params["cell"], memory, _apply(encoder, params["encoder"], obs))
        return _apply(head, params["head"], memory), memory

    def memories(params: Tree, rollout: Rollout) -> Array:
        """The memory after each step's observation, `[T, B, width]`."""
        last = rollout.steps.last
        first = jnp.concatenate([jnp.zeros_like(last[:1]), last[:-1]])  # the rollout carried its memory in
        x = _apply(encoder, params["encoder"], rollout.steps.obs)
        return _apply(cell, params["cell"], rollout.memory, x, first, method="unroll")

    def values(params: Params, rollout: Rollout) -> tuple[Array, Array]:
        memory = memories(params.policy, rollout)
        x = _apply(encoder, params.policy["encoder"], rollout.steps.next_obs)
        successor = _apply(cell, params.policy["cell"], memory, x)
        value = partial(_apply, value_head, params.critic["head"])
        return value(memory), value(successor)

    policy = Policy(
        init=policy_init,
        start=lambda params, obs: jnp.zeros(width),
        act=act,
        evaluate=lambda params, rollout: _apply(head, params["head"], memories(params, rollout)),
        sequential=True,
    )
    return policy, Critic(lambda key: {"head": value_head.init(key, jnp.zeros(width))}, values)
