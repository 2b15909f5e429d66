"""Completions: generating them token by token, and arranging given ones as a rollout."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.errors import UserError
from jaxpg.models.decoder import KVCache
from jaxpg.models.distributions import Categorical
from jaxpg.types import Array, Episodes, Key, Policy, Prompt, Rollout, Transition, Tree
from jaxpg.user_input.domains import COUNT_OR_0, INT32_MAX, SAMPLING_TEMPERATURE, SHARE, check_number, check_whole
from jaxpg.vectorize import any_in_batch


class _GenerationState(NamedTuple):
    """What the loop over tokens carries: tokens so far, the policy's memory, the last token, and all tokens."""

    t: Array
    cache: KVCache
    token: Array
    completion: Array


def completion_rollout(prompt: Prompt, tokens: Array, *, end: int) -> Rollout:
    """The rollout of a policy that wrote these completions; log-probabilities and rewards are 0.

    Args:
        prompt: leaves `[B, P]`.
        tokens: `[B, T]`; what comes after the first `end` is padding.
        end: the token that ends a completion. A row without it is truncated, and all of its steps are real.
    """
    action = tokens.T
    ended = jnp.cumsum(action == end, 0)
    mask = (ended - (action == end) == 0).astype(jnp.float32)
    first = jnp.take_along_axis(prompt.tokens, prompt.last()[:, None], 1).T
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


def one_completion(prompt: Prompt, tokens: Array, *, end: int) -> Rollout:
    """`completion_rollout` of a single one, of a prompt with leaves `[P]` and tokens `[T]`."""
    return completion_rollout(*jax.tree.map(lambda x: x[None], (prompt, tokens)), end=end)


def evaluate_completions(policy: Policy, params: Tree, rollout: Rollout, noise: Tree = ()) -> Any:
    """π of a `completion_rollout`, `[T, B]`, as `Policy.evaluate`; no memory was collected with it: each is initial.

    noise: of `Policy.noise`, for a loss; `()` without.
    """
    if not policy.evaluates_from_context:
        memory = jax.vmap(partial(policy.start, policy.for_acting(params)))(rollout.episodes.context)
        rollout = rollout._replace(episodes=rollout.episodes._replace(memory=memory))
    return policy.evaluate(params, rollout, *((noise,) if jax.tree.leaves(noise) else ()))


def check_sampling(*, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, greedy: bool = False) -> None:
    """Check the settings with which a user samples, those of `generate`, before anything is compiled.

    Raises:
        UserError: temperature is too low or too high for float32, top_k is negative, top_p is not above 0 and at most
            1, or one of them is given together with `greedy`, which needs none.
    """
    if isinstance(temperature, int | float) and temperature == 0:  # as others ask for the most likely token
        raise UserError("temperature must be above 0: greedy always takes the most likely token.")
    check_number("temperature", temperature, SAMPLING_TEMPERATURE)
    check_whole("top_k", top_k, COUNT_OR_0)
    check_number("top_p", top_p, SHARE)
    if greedy and (temperature, top_k, top_p) != (1.0, 0, 1.0):
        raise UserError(
            "greedy always takes the most likely token, so temperature, top_k and top_p have no effect: leave them or "
            "greedy out."
        )


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
    """One completion `[max_tokens]` of one prompt, padded with `end`.

    Args:
        policy: of a transformer.
        params: its parameters.
        prompt: leaves `[P]`.
        key: the source of all randomness.
        end: the token that ends a completion.
        max_tokens: at most the time limit of the policy's environment.
        temperature: logits are divided by it, in addition to the policy's own temperature.
        top_k: sample from the `top_k` most likely tokens; 0 for all.
        top_p: sample from the most likely tokens whose probabilities sum to at least `top_p`.
        greedy: always take the most likely token.

    Raises:
        UserError: as `check_sampling`, where the settings are not traced, or a `max_tokens` for which there is no room.
    """
    settings: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "greedy": greedy}
    check_sampling(**{name: x for name, x in settings.items() if not isinstance(x, jax.core.Tracer)})
    params = policy.for_acting(params)
    cache = policy.start(params, prompt)
    room = INT32_MAX if policy.max_steps is None else policy.max_steps
    if check_whole("max_tokens", max_tokens) > room:
        raise UserError(f"max_tokens must be at most {room}, the time limit of the environment, not {max_tokens}.")

    def unfinished(state: _GenerationState) -> Array:
        return (state.t < max_tokens) & any_in_batch((state.token != end) | (state.t == 0))

    def step(state: _GenerationState) -> _GenerationState:
        t, last = state.t, state.token
        distribution, cache = policy.act(params, state.cache, last)
        truncated = Categorical(distribution.logits / temperature).truncated(top_k=top_k, top_p=top_p)
        token = distribution.mode() if greedy else truncated.sample(jax.random.fold_in(key, t))
        token = jnp.where((last == end) & (t > 0), end, token)
        return _GenerationState(t + 1, cache, token, state.completion.at[t].set(token))

    start = _GenerationState(
        t=jnp.zeros((), jnp.int32),
        cache=cache,
        token=prompt.tokens[prompt.last()],
        completion=jnp.full(max_tokens, end, jnp.int32),
    )
    return lax.while_loop(unfinished, step, start).completion
