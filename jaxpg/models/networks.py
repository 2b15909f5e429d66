"""Neural networks as Policy and Critic.

A network is a torso, which turns observations into features, and heads: one for the policy, one for the value. Each of
`mlp`, `cnn` and `recurrent` returns `(policy, critic)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.errors import UserError, refuse_unknown
from jaxpg.models.layers import (
    ACTIVATIONS,
    CELL_GAIN,
    GRU,
    HIDDEN_GAIN,
    POLICY_GAIN,
    VALUE_GAIN,
    CNNTorso,
    MinGRU,
    MLPTorso,
    PolicyHead,
    ValueHead,
)
from jaxpg.rollout.successors import bootstrap_steps, successor_values
from jaxpg.types import Array, Critic, Discrete, Env, Key, Params, Policy, Rollout, Tree


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
) -> tuple[Policy, Critic]:
    """Multi-layer perceptrons.

    Args:
        hidden: widths of the hidden layers.
        activation: one of tanh, relu, silu, gelu.
        shared: the critic reads the policy's torso and adds only a head. Saves work; the two losses then compete.
        squash: bounded actions by tanh instead of by clipping.
        initial_log_std: of a Gaussian policy, per dimension.
        state_std: the standard deviation depends on the state; by default it is learned, but the same everywhere.
        orthogonal: initial weights are orthogonal with the gains of PPO, so that the first policy is nearly uniform;
            flax's own if not.
    """
    gains = _gains(orthogonal)
    torso = MLPTorso(len(env.observation_space.shape), tuple(hidden), _checked_activation(activation), gains.hidden)
    head = _policy_head(env, squash, initial_log_std, state_std, gains.policy)
    return _feedforward(env, torso, head, ValueHead(gains.value), shared)


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
) -> tuple[Policy, Critic]:
    """Convolutions over `[H, W, C]` observations, then dense layers.

    Args:
        channels: output channels of the 3x3 convolutions.
        hidden: widths of the dense layers behind them.
        activation: one of tanh, relu, silu, gelu.
        shared: the critic reads the policy's torso and adds only a head.
        squash: bounded actions by tanh instead of by clipping.
        initial_log_std: of a Gaussian policy, per dimension.
        state_std: the standard deviation depends on the state; by default it is learned, but the same everywhere.
        orthogonal: initial weights are orthogonal with the gains of PPO, so that the first policy is nearly uniform;
            flax's own if not.

    Raises:
        UserError: the observations are not images.
    """
    shape = env.observation_space.shape
    if len(shape) != 3:
        raise UserError(
            f"A cnn reads observations of shape [height, width, channels], but {env.name} gives {shape}. Use an mlp."
        )
    gains = _gains(orthogonal)
    torso = CNNTorso(tuple(channels), tuple(hidden), _checked_activation(activation), gains.hidden)
    head = _policy_head(env, squash, initial_log_std, state_std, gains.policy)
    return _feedforward(env, torso, head, ValueHead(gains.value), shared)


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
        state_std: the standard deviation depends on the state; by default it is learned, but the same everywhere.
        orthogonal: initial weights are orthogonal with the gains of PPO, so that the first policy is nearly uniform;
            flax's own if not.
    """
    cells: dict[str, type[GRU] | type[MinGRU]] = {"gru": GRU, "min_gru": MinGRU}
    if cell not in cells:
        refuse_unknown("recurrent cell", cell, cells)
    gains = _gains(orthogonal)
    encoder = MLPTorso(len(env.observation_space.shape), tuple(hidden), _checked_activation(activation), gains.hidden)
    head = _policy_head(env, squash, initial_log_std, state_std, gains.policy)
    return _recurrent(env, encoder, cells[cell](width, gains.cell), head, ValueHead(gains.value), width)


class Gains(NamedTuple):
    """Gains of the initial weights by kind of layer, None for flax's own weights."""

    hidden: float | None = HIDDEN_GAIN
    policy: float | None = POLICY_GAIN
    value: float | None = VALUE_GAIN
    cell: float | None = CELL_GAIN


def _gains(orthogonal: bool) -> Gains:
    return Gains() if orthogonal else Gains(None, None, None, None)


def _checked_activation(activation: str) -> str:
    if activation not in ACTIVATIONS:
        refuse_unknown("activation", activation, ACTIVATIONS)
    return activation


def _policy_head(env: Env, squash: bool, initial_log_std: float, state_std: bool, gain: float | None) -> PolicyHead:
    space = env.action_space
    if squash and not isinstance(space, Discrete) and not np.isfinite([space.low, space.high]).all():
        raise UserError(
            f"squash needs finite bounds, but the actions of {env.name} are unbounded. Do not clip them too."
        )
    return PolicyHead(space, squash, initial_log_std, state_std, gain)


def _init_chain(modules: dict[str, nn.Module], key: Key, x: Array) -> Tree:
    """Parameters of modules applied one after the other, by name."""
    params = {}
    for (name, module), module_key in zip(modules.items(), jax.random.split(key, len(modules)), strict=True):
        x, params[name] = module.init_with_output(module_key, x)
    return params


def _apply(module: nn.Module, params: Tree, *inputs: Array, **options: Any) -> Any:
    """`module.apply` of modules that change nothing but their output."""
    return module.apply(params, *inputs, **options)


def _zero_obs(env: Env) -> Array:
    return jnp.zeros(env.observation_space.shape)


def _feedforward(
    env: Env, torso: nn.Module, head: PolicyHead, value_head: ValueHead, shared: bool
) -> tuple[Policy, Critic]:
    def policy_init(key: Key) -> Tree:
        return _init_chain({"torso": torso, "head": head}, key, _zero_obs(env))

    def distribution(params: Tree, obs: Array) -> Any:
        return _apply(head, params["head"], _apply(torso, params["torso"], obs))

    def critic_init(key: Key) -> Tree:
        params = _init_chain({"torso": torso, "head": value_head}, key, _zero_obs(env))
        return {"head": params["head"]} if shared else params

    def values(params: Params, rollout: Rollout) -> tuple[Array, Array]:
        torso_params = params.policy["torso"] if shared else params.critic["torso"]

        def value(obs: Array) -> Array:
            return _apply(value_head, params.critic["head"], _apply(torso, torso_params, obs))

        v_tm1 = value(rollout.steps.obs)
        return v_tm1, successor_values(rollout, v_tm1, value)

    policy = Policy(
        init=policy_init,
        start=lambda params, obs: (),
        act=lambda params, memory, obs: (distribution(params, obs), memory),
        evaluate=lambda params, rollout: distribution(params, rollout.steps.obs),
    )
    return policy, Critic(critic_init, values)


def _recurrent(
    env: Env, encoder: nn.Module, cell: GRU | MinGRU, head: PolicyHead, value_head: ValueHead, width: int
) -> tuple[Policy, Critic]:
    def policy_init(key: Key) -> Tree:
        encoder_key, cell_key, head_key = jax.random.split(key, 3)
        memory = jnp.zeros(width)
        x, encoder_params = encoder.init_with_output(encoder_key, _zero_obs(env))
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
        return _apply(cell, params["cell"], rollout.episodes.memory, x, first, method="unroll")

    def values(params: Params, rollout: Rollout) -> tuple[Array, Array]:
        memory = memories(params.policy, rollout)
        value = partial(_apply, value_head, params.critic["head"])

        def at_final_obs(final_obs: Array) -> Array:
            before = memory[bootstrap_steps(rollout.steps, final_obs.shape[0]), jnp.arange(final_obs.shape[1])]
            x = _apply(encoder, params.policy["encoder"], final_obs)
            return value(_apply(cell, params.policy["cell"], before, x))

        v_tm1 = value(memory)
        return v_tm1, successor_values(rollout, v_tm1, at_final_obs)

    policy = Policy(
        init=policy_init,
        start=lambda params, obs: jnp.zeros(width),
        act=act,
        evaluate=lambda params, rollout: _apply(head, params["head"], memories(params, rollout)),
        needs_trajectories=True,
    )
    return policy, Critic(lambda key: {"head": value_head.init(key, jnp.zeros(width))}, values)
