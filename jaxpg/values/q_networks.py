"""Networks of action values: a torso, and a head with one or several numbers per action."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxpg.errors import UserError
from jaxpg.models.distributions import MASKED, Categorical
from jaxpg.models.layers import FLAX_GAINS, apply, dense
from jaxpg.models.networks import cnn_torso, init_torso_and_head, mlp_torso
from jaxpg.types import Array, Discrete, Env, Key, Policy, Rollout, Scalar, Tree

LARGEST_EPSILON = 1 - 2.0**-20
"""A little below 1, so that the greedy action is the mode of every epsilon-greedy policy."""


def mlp(env: Env, *, hidden: Sequence[int] = (64, 64), activation: str = "relu", layer_norm: bool = False) -> nn.Module:
    """The torso of an action-value network on observations of any shape: dense layers.

    Args:
        hidden: widths of the hidden layers.
        activation: one of tanh, relu, silu, gelu.
        layer_norm: normalise each layer before its activation (Ba et al. 2016).

    Raises:
        UserError: an unknown activation.
    """
    return mlp_torso(env, hidden, activation, FLAX_GAINS, layer_norm)


def cnn(
    env: Env,
    *,
    channels: Sequence[int] = (16,),
    hidden: Sequence[int] = (128,),
    activation: str = "relu",
    layer_norm: bool = False,
) -> nn.Module:
    """The torso of an action-value network over `[H, W, C]` observations: convolutions, then dense layers.

    Args:
        channels: output channels of the 3x3 convolutions.
        hidden: widths of the dense layers after them.
        activation: one of tanh, relu, silu, gelu.
        layer_norm: normalise each layer before its activation (Ba et al. 2016).

    Raises:
        UserError: the observations are not images, or smaller than the kernels take; an unknown activation.
    """
    return cnn_torso(env, channels, hidden, activation, FLAX_GAINS, layer_norm)


class LinearHead(nn.Module):
    """`[..., width] -> [..., actions, quantiles]`, the estimates of every action's return."""

    num_actions: int
    quantiles: int = 1

    @nn.compact
    def __call__(self, features: Array) -> Array:
        x = dense(self.num_actions * self.quantiles, None)(features)
        return x.reshape(*features.shape[:-1], self.num_actions, self.quantiles)


class DuelingHead(nn.Module):
    """Q(s, a) = V(s) + A(s, a) - mean_a' A(s, a'), `[..., width] -> [..., actions, quantiles]`.

    Each stream has a hidden layer as wide as the features. Source: Wang et al. 2016, equation 9; with quantiles,
    that sum for each of them (Hessel et al. 2018, section "The Integrated Agent").
    """

    num_actions: int
    quantiles: int = 1

    @nn.compact
    def __call__(self, features: Array) -> Array:
        def stream(outputs: int) -> Array:
            hidden = nn.relu(dense(features.shape[-1], None)(features))
            x = dense(outputs * self.quantiles, None)(hidden)
            return x.reshape(*features.shape[:-1], outputs, self.quantiles)

        value, advantage = stream(1), stream(self.num_actions)
        return value + advantage - advantage.mean(-2, keepdims=True)


class QNetwork(NamedTuple):
    """Estimates of the return of every action.

    init(key) -> params
    returns(params, obs) -> `[..., A, N]`: N estimates of the return of each action, whose mean is Q(obs, a); with N > 1
        they are quantiles of its distribution.
    action_mask(obs) -> `[..., A]` bool, as that of the environment; None where every action is always allowed.
    """

    init: Callable[[Key], Tree]
    returns: Callable[[Tree, Tree], Array]
    action_mask: Callable[[Tree], Array] | None = None

    def values(self, params: Tree, obs: Tree) -> Array:
        """Q(obs, a), `[..., A]`; a large negative number where an action is not allowed."""
        return self.masked(self.returns(params, obs).mean(-1), obs)

    def masked(self, q: Array, obs: Tree) -> Array:
        """Values `[..., A]` whose largest is that of an action allowed in `obs`."""
        allowed = self.allowed(obs)
        return q if allowed is None else jnp.where(allowed, q, MASKED)

    def allowed(self, obs: Tree) -> Array | None:
        """`[..., A]` bool, the actions to choose from: all where none is allowed, as after the end of an episode."""
        if self.action_mask is None:
            return None
        mask = self.action_mask(obs)
        return mask | ~mask.any(-1, keepdims=True)


def q_network(env: Env, torso: nn.Module, head: Callable[..., nn.Module]) -> QNetwork:
    """The network of a torso and a head (`LinearHead`, `DuelingHead`).

    Raises:
        UserError: the actions of the environment are not discrete.
    """
    space = env.action_space
    if not isinstance(space, Discrete):
        raise UserError(f"Action values need discrete actions, but those of {env.name} are real numbers. Use ppo.")
    top = head(space.n)

    def returns(params: Tree, obs: Tree) -> Array:
        return apply(top, params["head"], apply(torso, params["torso"], obs))

    return QNetwork(partial(init_torso_and_head, torso, top, env), returns, env.action_mask)


def epsilon_greedy(q: Array, epsilon: Scalar, allowed: Array | None = None) -> Categorical:
    """With probability 1 - epsilon the action of the largest value, else any action: `[..., A]` values.

    The first of several largest values is the greedy action, and the mode. With `allowed`, `[..., A]` bool, any of the
    allowed actions, of which at least one must be. Source: Sutton & Barto 2018, section 2.2.
    """
    actions = q.shape[-1]
    best = q if allowed is None else jnp.where(allowed, q, MASKED)
    greedy = jax.nn.one_hot(best.argmax(-1), actions, dtype=q.dtype)
    epsilon = jnp.minimum(epsilon, LARGEST_EPSILON)  # [] for all rows
    explored = epsilon / actions if allowed is None else epsilon * allowed / allowed.sum(-1, keepdims=True)
    return Categorical(jnp.log(explored + (1 - epsilon) * greedy))


def epsilon_greedy_policy(network: QNetwork, epsilon: Scalar) -> Policy:
    """The epsilon-greedy policy of a network of action values; its parameters are those of the network."""

    def act(params: Tree, memory: Tree, obs: Tree) -> tuple[Categorical, Tree]:
        return epsilon_greedy(network.values(params, obs), epsilon, network.allowed(obs)), memory

    def evaluate(params: Tree, rollout: Rollout) -> Categorical:
        obs = rollout.steps.obs
        return epsilon_greedy(network.values(params, obs), epsilon, network.allowed(obs))

    return Policy(init=network.init, start=lambda params, obs: (), act=act, evaluate=evaluate)
