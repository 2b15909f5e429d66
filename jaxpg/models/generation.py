"""Completions: writing them token by token, and laying given ones out as a rollout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.models.decoder import Cache
from jaxpg.models.distributions import Categorical
from jaxpg.types import Array, Episodes, Key, Policy, Prompt, Rollout, Transition, Tree
from jaxpg.vectorize import any_in_batch


def completion_rollout(prompt: Prompt, tokens: Array, *, end: int) -> Rollout:
    """Completions as a policy would have collected them.

    Args:
        prompt: leaves `[B, P]`.
        tokens: `[B, T]`; what lies behind the first `end` is padding.
        end: the token that ends a completion. A row without one was cut off, and is real throughout.
    """
    action = tokens.T
    ended = jnp.cumsum(action == end, 0)
    mask = (ended - (action == end) == 0).astype(jnp.float32)
    first = jnp.take_along_axis(prompt.tokens, last_real(prompt.mask)[:, None], 1).T
    steps = Transition(
        obs=jnp.concatenate([first, action[:-1]]),
        action=action,
        log_prob=jnp.zeros_like(mask),
        reward=jnp.zeros_like(mask),
        discount=mask * (action != end),
        last=(ended > 0).at[-1].set(True),
        mask=mask,
    )
    return Rollout(steps, mask, episodes=Episodes(context=prompt))


def generate(
    policy: Policy,
    params: Tree,
    prompt: Prompt,
    key: Key,
    *,
    end: int,
    max_tokens: int,
    temperature: Array | float = 1.0,
    top_k: int = 0,
    top_p: Array | float = 1.0,
    greedy: bool = False,
) -> Array:
    """One completion `[max_tokens]` of one prompt, with `end` behind its end.

    Args:
        policy: a transformer's.
        params: its parameters.
        prompt: leaves `[P]`.
        key: the source of all randomness.
        end: the token that ends a completion.
        max_tokens: not more than the policy's environment allows.
        temperature: logits are divided by it, on top of the policy's own.
        top_k: sample among so many of the likeliest tokens, 0 for all.
        top_p: sample among the likeliest tokens that make up this much of the probability.
        greedy: always the likeliest token.
    """

    def unfinished(carry: tuple[Array, Cache, Array, Array]) -> Array:
        t, _, token, _ = carry
        return (t < max_tokens) & any_in_batch((token != end) | (t == 0))

    def step(carry: tuple[Array, Cache, Array, Array]) -> tuple[Array, Cache, Array, Array]:
        t, cache, token, written = carry
        distribution, cache = policy.act(params, cache, token)
        chosen = Categorical(distribution.logits / temperature).truncated(top_k=top_k, top_p=top_p)
        following = distribution.mode() if greedy else chosen.sample(jax.random.fold_in(key, t))
        following = jnp.where((token == end) & (t > 0), end, following)
        return t + 1, cache, following, written.at[t].set(following)

    start = jnp.zeros((), jnp.int32), policy.start(params, prompt), prompt.tokens[last_real(prompt.mask)]
    return lax.while_loop(unfinished, step, (*start, jnp.full(max_tokens, end, jnp.int32)))[-1]


def last_real(mask: Array) -> Array:
    """Index of the last true entry along the last axis."""
    return mask.shape[-1] - 1 - jnp.argmax(mask[..., ::-1], -1)
