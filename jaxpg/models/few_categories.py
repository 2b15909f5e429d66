"""The arithmetic of `Categorical` for few categories, one after the other, for speed alone.

It replaces reductions over the last axis, on accelerators. A reduction over two numbers is a kernel of its own on a GPU
and splits the arithmetic around it; single numbers per step are computed together with what comes before and after
them. `Machine.few_categories` says up to how many categories, and what it gains.
"""

from __future__ import annotations

from functools import reduce
from itertools import accumulate

import jax.numpy as jnp
from jax import lax

from jaxpg.parallel.machine import machine
from jaxpg.types import Array


def are_few(logits: Array) -> bool:
    """Whether the machine had better take categories like these, `[..., n]`, one after the other."""
    return logits.shape[-1] <= machine().few_categories


def at(logits: Array, noise: Array) -> Array:
    """`Categorical.at`, `[..., n]` and `[...]` -> `[...]`: the first category with a cumulative weight above the noise.

    Added up one by one, the sums never fall, so a category of weight 0 is never the first.
    """
    *cumulative, total = accumulate(jnp.exp(x) for x in _below_zero(logits))
    category = jnp.full(noise.shape, len(cumulative), jnp.int32)
    for i, weight in reversed([*enumerate(cumulative)]):
        category = jnp.where(weight > noise * total, i, category)
    return category


def log_softmax(logits: Array) -> Array:
    """`jax.nn.log_softmax` over the last axis."""
    shifted = _below_zero(logits)
    normalizer = jnp.log(reduce(jnp.add, [jnp.exp(x) for x in shifted]))
    return jnp.stack([x - normalizer for x in shifted], -1)


def pick(log_p: Array, action: Array) -> Array:
    """The entry at each action, `[..., n]` and `[...]` -> `[...]`."""
    picked, *others = _entries(log_p)
    for i, entry in enumerate(others, start=1):
        picked = jnp.where(action == i, entry, picked)
    return picked


def total(x: Array) -> Array:
    """`x.sum(-1)`."""
    return reduce(jnp.add, _entries(x))


def _below_zero(logits: Array) -> list[Array]:
    entries = _entries(logits)
    largest = lax.stop_gradient(reduce(jnp.maximum, entries))
    return [x - largest for x in entries]


def _entries(x: Array) -> list[Array]:
    return [x[..., i] for i in range(x.shape[-1])]
