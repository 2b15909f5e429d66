"""Neural networks as Policy and Critic.

A network is a torso, which turns observations into features, and two heads, one for the policy and one for the value.
Each of `mlp`, `cnn` and `recurrent` returns `(policy, critic)`. The settings that they share are listed in each
signature, because configs and `jaxpg list options` read settings, defaults and meanings from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.errors import UserError, check_record, excerpt, refuse_unknown
from jaxpg.models.cells import GRU, MinGRU
from jaxpg.models.layers import (
    ACTIVATIONS,
    FLAX_GAINS,
    IMAGE,
    PPO_GAINS,
    CNNTorso,
    Gains,
    MLPTorso,
    PolicyHead,
    ValueHead,
    apply,
)
from jaxpg.parallel.machine import machine, rows_of_all
from jaxpg.rollout.successors import bootstrap_steps, rollout_values, successor_values
from jaxpg.types import (
    Array,
    Critic,
    Discrete,
    Env,
    JointEvaluation,
    Key,
    Params,
    Policy,
    Rollout,
    Tree,
    space_leaves,
    space_struct,
)
from jaxpg.user_input.domains import check_whole
from jaxpg.vectorize import stacked


def mlp(
    env: Env,
    *,
    hidden: Sequence[int] = (64, 64),
    activation: str = "tanh",
    shared: bool = False,
    squash: bool = False,
    initial_log_std: float = 0.0,
    state_std: bool = False,
    orthogonal: bool = True,
    layer_norm: bool = False,
) -> tuple[Policy, Critic]:
    """Multi-layer perceptrons, on observations of any shape; those of a Discrete space are one-hot vectors.

    Observations of several arrays are put side by side, in the order of `jax.tree.leaves`.

    Args:
        hidden: widths of the hidden layers.
        activation: one of tanh, relu, silu, gelu.
        shared: the critic uses the policy's torso and adds only a head. This saves time, but the losses compete.
        squash: keep continuous actions within their bounds by tanh instead of by clipping.
        initial_log_std: initial log standard deviation of continuous actions, per dimension.
        state_std: the standard deviation depends on the state; by default it is learned but the same in all states.
        orthogonal: orthogonal initial weights with the gains of PPO, so that the first policy is nearly uniform; flax's
            default if false.
        layer_norm: normalise each layer before its activation (Ba et al. 2016).

    Raises:
        UserError: an unknown activation, widths that are no list, `squash` with unbounded actions, or a setting of
            continuous actions for discrete ones.
    """
    gains = _gains(orthogonal)
    torso = mlp_torso(env, hidden, activation, gains, layer_norm)
    policy_head = _policy_head(env, squash, initial_log_std, state_std, gains)
    return _feedforward(env, torso, policy_head, ValueHead(gains.value), shared)


def cnn(
    env: Env,
    *,
    channels: Sequence[int] = (16,),
    hidden: Sequence[int] = (128,),
    activation: str = "relu",
    shared: bool = True,
    squash: bool = False,
    initial_log_std: float = 0.0,
    state_std: bool = False,
    orthogonal: bool = True,
    layer_norm: bool = False,
    kernels: Sequence[int] = (3,),
    strides: Sequence[int] = (1,),
) -> tuple[Policy, Critic]:
    """Convolutions over `[H, W, C]` observations, then dense layers.

    If an observation is several arrays, one of them is the image; the others join it after the convolutions.

    Args:
        channels: output channels of the convolutions, which are not padded.
        hidden: widths of the dense layers after them.
        activation: one of tanh, relu, silu, gelu.
        shared: the critic uses the policy's torso and adds only a head.
        squash: keep continuous actions within their bounds by tanh instead of by clipping.
        initial_log_std: initial log standard deviation of continuous actions, per dimension.
        state_std: the standard deviation depends on the state; by default it is learned but the same in all states.
        orthogonal: orthogonal initial weights with the gains of PPO, so that the first policy is nearly uniform; flax's
            default if false.
        layer_norm: normalise each layer before its activation (Ba et al. 2016).
        kernels: height and width of each convolution, or one number for all.
        strides: steps between its places, or one number for all.

    Raises:
        UserError: the observations are not images, an unknown activation, `squash` with unbounded actions, a setting
            of continuous actions for discrete ones, `kernels` and `strides` that are not as many as `channels`, or a
            kernel that is larger than what is left of the image.
    """
    gains = _gains(orthogonal)
    torso = cnn_torso(env, channels, hidden, activation, gains, layer_norm, kernels, strides)
    policy_head = _policy_head(env, squash, initial_log_std, state_std, gains)
    return _feedforward(env, torso, policy_head, ValueHead(gains.value), shared)


def recurrent(
    env: Env,
    *,
    hidden: Sequence[int] = (64,),
    width: int = 64,
    cell: str = "gru",
    activation: str = "tanh",
    squash: bool = False,
    initial_log_std: float = 0.0,
    state_std: bool = False,
    orthogonal: bool = True,
    layer_norm: bool = False,
) -> tuple[Policy, Critic]:
    """Dense layers, a recurrent cell, and on its memory the heads for policy and value.

    The memory starts at zero and is cleared at the end of every episode. `gru` is evaluated by a scan over time. The
    gates of `min_gru` do not depend on the memory (Feng et al. 2024, "Were RNNs All We Needed?", section 3.1), so it is
    a linear recurrence, evaluated in parallel in O(log T) steps.

    Args:
        hidden: widths of the dense layers before the cell.
        width: size of the memory.
        cell: gru or min_gru.
        activation: one of tanh, relu, silu, gelu.
        squash: keep continuous actions within their bounds by tanh instead of by clipping.
        initial_log_std: initial log standard deviation of continuous actions, per dimension.
        state_std: the standard deviation depends on the state; by default it is learned but the same in all states.
        orthogonal: orthogonal initial weights with the gains of PPO, so that the first policy is nearly uniform; flax's
            default if false.
        layer_norm: normalise each layer before its activation (Ba et al. 2016).

    Raises:
        UserError: an unknown cell or activation, a width that is no whole number, `squash` with unbounded actions, or a
            setting of continuous actions for discrete ones.
    """
    cells: dict[str, type[GRU] | type[MinGRU]] = {"gru": GRU, "min_gru": MinGRU}
    if cell not in cells:
        refuse_unknown("recurrent cell", cell, cells)
    check_whole("width", width)
    gains = _gains(orthogonal)
    encoder = mlp_torso(env, hidden, activation, gains, layer_norm)
    policy_head = _policy_head(env, squash, initial_log_std, state_std, gains)
    return _recurrent(env, encoder, cells[cell](width, gains.cell), policy_head, ValueHead(gains.value))


def _gains(orthogonal: bool) -> Gains:
    return PPO_GAINS if orthogonal else FLAX_GAINS


def _check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        refuse_unknown("activation", activation, ACTIVATIONS)


def _check_sizes(**settings: Any) -> None:
    """Refuse what is no list of whole numbers from 1 on, such as `hidden=64`."""
    for name, sizes in settings.items():
        listed = isinstance(sizes, Sequence | np.ndarray) and not isinstance(sizes, str)
        if not listed or not all(isinstance(x, int | np.integer) and x > 0 for x in sizes):
            raise UserError(
                f"{name} must be a list of whole numbers from 1 on, such as (64, 64), not {excerpt(sizes)}."
            )


def mlp_torso(env: Env, hidden: Sequence[int], activation: str, gains: Gains, layer_norm: bool) -> MLPTorso:
    """The torso of `mlp`; see there."""
    check_record("A network", env, Env, 'envs.make("CartPole-v1")')
    _check_activation(activation)
    _check_sizes(hidden=hidden)
    return MLPTorso(_arrays(env), tuple(hidden), activation, gains.hidden, layer_norm)


def cnn_torso(
    env: Env,
    channels: Sequence[int],
    hidden: Sequence[int],
    activation: str,
    gains: Gains,
    layer_norm: bool,
    kernels: Sequence[int] = (3,),
    strides: Sequence[int] = (1,),
) -> CNNTorso:
    """The torso of `cnn`; see there."""
    check_record("A network", env, Env, 'envs.make("Breakout-MinAtar")')
    arrays, shapes = _arrays(env), [space.shape for _, space in space_leaves(env.observation_space)]
    if arrays.count(IMAGE) != 1:
        raise UserError(
            f"A cnn reads observations of shape [height, width, channels], or one such array among others, but those "
            f"of {env.name} have shape {', '.join(map(str, shapes))}. Use an mlp."
        )
    _check_activation(activation)
    _check_sizes(channels=channels, hidden=hidden, kernels=kernels, strides=strides)
    for name, sizes in (("kernels", kernels), ("strides", strides)):
        if len(sizes) not in (1, len(channels)):
            raise UserError(
                f"{name} has a number for each of the {len(channels)} channels, or one for all, not {excerpt(sizes)}."
            )
    torso = CNNTorso(
        *(arrays, tuple(channels), tuple(hidden), activation, gains.hidden, layer_norm), tuple(kernels), tuple(strides)
    )
    _check_kernels(env, shapes[arrays.index(IMAGE)], torso)
    return torso


def _check_kernels(env: Env, image: tuple[int, ...], torso: CNNTorso) -> None:
    """Refuse a kernel that is larger than what it reads: nothing of the image would reach the dense layers."""
    height, width, _ = image
    for i, (_, size, stride) in enumerate(torso.convolutions(), start=1):
        if size > min(height, width):
            raise UserError(
                f"The images of {env.name} are {image[0]} x {image[1]}, of which {height} x {width} are left for the "
                f"kernel of {size} of convolution {i}. Use fewer channels, smaller kernels or smaller strides."
            )
        height, width = ((x - size) // stride + 1 for x in (height, width))


def _policy_head(env: Env, squash: bool, initial_log_std: float, state_std: bool, gains: Gains) -> PolicyHead:
    space = env.action_space
    if isinstance(space, Discrete):
        _refuse_continuous(env, squash=squash, initial_log_std=initial_log_std, state_std=state_std)
    elif squash and not np.isfinite([space.low, space.high]).all():
        raise UserError(
            f"squash needs finite bounds, but the actions of {env.name} are unbounded. Set squash = false, and do not "
            "clip them either."
        )
    return PolicyHead(space, squash, initial_log_std, state_std, gains.policy)


def _refuse_continuous(env: Env, **given: float) -> None:
    """Refuse settings of continuous actions, each with a default of 0 or false, for discrete ones."""
    for name, value in given.items():
        if value:
            raise UserError(f"{name} is about continuous actions, and those of {env.name} are discrete: leave it out.")


def _masked(env: Env, distribution: Any, obs: Tree) -> Any:
    """The distribution over the actions that the environment allows."""
    return distribution if env.action_mask is None else distribution.masked(env.action_mask(obs))


def _arrays(env: Env) -> tuple[int | Discrete, ...]:
    """What a torso has to know of the arrays of an observation; see MLPTorso."""
    spaces = [space for _, space in space_leaves(env.observation_space)]
    return tuple(space if isinstance(space, Discrete) else len(space.shape) for space in spaces)


def zero_obs(env: Env) -> Tree:
    """An observation of the right shape and dtype, to make parameters for."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), space_struct(env.observation_space))


def init_torso_and_head(torso: nn.Module, head: nn.Module, env: Env, key: Key) -> Tree:
    """New parameters of a torso, and of a head on its features."""
    torso_key, head_key, _ = jax.random.split(key, 3)  # three for compile time alone, see `policy_gradient._step`
    features, torso_params = torso.init_with_output(torso_key, zero_obs(env))
    return {"torso": torso_params, "head": head.init(head_key, features)}


def _feedforward(
    env: Env, torso: nn.Module, policy_head: PolicyHead, value_head: ValueHead, shared: bool
) -> tuple[Policy, Critic]:
    """Policy and critic without a memory; with `shared`, the critic's parameters are those of its head alone."""

    def head_of_policy(params: Tree, features: Array, obs: Tree) -> Any:
        return _masked(env, apply(policy_head, params["head"], features), obs)

    def distribution(params: Tree, obs: Tree) -> Any:
        return head_of_policy(params, apply(torso, params["torso"], obs), obs)

    def evaluate(params: Tree, rollout: Rollout) -> Any:
        return distribution(params, rollout.steps.obs)

    def critic_init(key: Key) -> Tree:
        params = init_torso_and_head(torso, value_head, env, key)
        return {"head": params["head"]} if shared else params

    def values(params: Params, rollout: Rollout) -> tuple[Array, Array]:
        torso_params = params.policy["torso"] if shared else params.critic["torso"]

        def value(obs: Tree) -> Array:
            return apply(value_head, params.critic["head"], apply(torso, torso_params, obs))

        return rollout_values(rollout, value)

    def both(params: Params, rollout: Rollout) -> tuple[Any, Array]:
        obs = rollout.steps.obs
        torsos = (params.policy["torso"], *(() if shared else (params.critic["torso"],)))
        features = _features_of_each(torso, torsos, obs, rows=rollout.steps.last.size)
        return head_of_policy(params.policy, features[0], obs), apply(value_head, params.critic["head"], features[-1])

    policy = Policy(
        init=partial(init_torso_and_head, torso, policy_head, env),
        start=lambda params, obs: (),
        act=lambda params, memory, obs: (distribution(params, obs), memory),
        evaluate=evaluate,
    )
    return policy, Critic(critic_init, values, joint=JointEvaluation(evaluate, values, both))


def _features_of_each(torso: nn.Module, torsos: Sequence[Tree], obs: Tree, rows: int) -> Sequence[Array]:
    """The features of a torso with each of these parameters, by one product per layer where the machine gains by it.

    That is up to `Machine.torsos_at_once` rows.
    """
    if len(torsos) == 1 or rows_of_all(rows) > machine().torsos_at_once:
        return [apply(torso, params, obs) for params in torsos]
    return jax.vmap(partial(apply, torso), (0, None))(stacked(torsos), obs)


def _recurrent(
    env: Env, encoder: nn.Module, cell: GRU | MinGRU, policy_head: PolicyHead, value_head: ValueHead
) -> tuple[Policy, Critic]:
    """Policy and critic with one memory, `[width]`: it belongs to the policy, and the critic adds a head."""

    def initial_memory() -> Array:
        return jnp.zeros(cell.width, jnp.float32)

    def policy_init(key: Key) -> Tree:
        encoder_key, cell_key, head_key = jax.random.split(key, 3)
        x, encoder_params = encoder.init_with_output(encoder_key, zero_obs(env))
        return {
            "encoder": encoder_params,
            "cell": cell.init(cell_key, initial_memory(), x),
            "head": policy_head.init(head_key, initial_memory()),
        }

    def act(params: Tree, memory: Array, obs: Tree) -> tuple[Any, Array]:
        memory = apply(cell, params["cell"], memory, apply(encoder, params["encoder"], obs))
        return of_memory(params, memory, obs), memory

    def memories(params: Tree, rollout: Rollout) -> Array:
        """The memory after each step's observation, `[T, B, width]`."""
        last = rollout.steps.last
        first = jnp.concatenate([jnp.zeros_like(last[:1]), last[:-1]])  # row 0 goes on from the rollout's memory
        x = apply(encoder, params["encoder"], rollout.steps.obs)
        return apply(cell, params["cell"], rollout.episodes.memory, x, first, method="unroll")

    def values(params: Params, rollout: Rollout) -> tuple[Array, Array]:
        memory = memories(params.policy, rollout)
        value = partial(apply, value_head, params.critic["head"])

        def value_after_last_memory(final_obs: Tree) -> Array:
            x = apply(encoder, params.policy["encoder"], final_obs)
            before = memory[bootstrap_steps(rollout.steps, x.shape[0]), jnp.arange(x.shape[1])]
            return value(apply(cell, params.policy["cell"], before, x))

        v_tm1 = value(memory)
        return v_tm1, successor_values(rollout, v_tm1, value_after_last_memory)

    def of_memory(params: Tree, memory: Array, obs: Tree) -> Any:
        return _masked(env, apply(policy_head, params["head"], memory), obs)

    def evaluate(params: Tree, rollout: Rollout) -> Any:
        return of_memory(params, memories(params, rollout), rollout.steps.obs)

    def both(params: Params, rollout: Rollout) -> tuple[Any, Array]:
        memory = memories(params.policy, rollout)  # once, and differentiated once
        return of_memory(params.policy, memory, rollout.steps.obs), apply(value_head, params.critic["head"], memory)

    policy = Policy(
        init=policy_init,
        start=lambda params, obs: initial_memory(),
        act=act,
        evaluate=evaluate,
        needs_trajectories=True,
    )
    return policy, Critic(
        lambda key: {"head": value_head.init(key, initial_memory())},
        values,
        joint=JointEvaluation(evaluate, values, both),
    )
