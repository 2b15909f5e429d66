"""Helpers over trees of arrays, for code that runs under `vmap` and inside loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jaxpg.parallel.machine import machine
from jaxpg.types import Array, Tree


def tree_where(condition: Array, on_true: Tree, on_false: Tree) -> Tree:
    """`jnp.where` of every leaf."""
    return jax.tree.map(partial(jnp.where, condition), on_true, on_false)


@custom_vmap
def any_in_batch(condition: Array) -> Array:
    """Whether any entry is true; under `vmap`, whether any entry of any batch member is true.

    It replaces `condition.any()` as the condition of a while loop, on every platform. Under `vmap`, over seeds for
    instance, the condition stays one number: with one per member, every iteration would select between the old and the
    new value of all that the loop carries. In return all members run as long as the longest.
    """
    return condition.any()


@any_in_batch.def_vmap
def _(axis_size: int, in_batched: list[bool], condition: Array) -> tuple[Array, bool]:
    return any_in_batch(condition), False


@custom_vmap
def largest_in_batch(x: Array) -> Array:
    """`x`; under `vmap`, the largest of all batch members, one number. For the bounds of loops, see `any_in_batch`."""
    return x


@largest_in_batch.def_vmap
def _(axis_size: int, in_batched: list[bool], x: Array) -> tuple[Array, bool]:
    return largest_in_batch(x.max(0)), False


@custom_vmap
def where_in_batch(condition: Array, on_true: Tree, on_false: Tree) -> Tree:
    """`tree_where(condition, on_true, on_false)` where `any_in_batch(condition)` is known to be true.

    Of a batch, every member chooses for itself. Without `vmap` it is `on_true`, and nothing is left to compute.
    """
    return on_true


@where_in_batch.def_vmap
def _(axis_size: int, in_batched: list[Any], condition: Array, on_true: Tree, on_false: Tree) -> tuple[Tree, Tree]:
    axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(in_batched))
    chosen = jax.vmap(tree_where, axes, axis_size=axis_size)(condition, on_true, on_false)
    return chosen, jax.tree.map(lambda _: True, chosen)


def scan_packed(step: Callable[[Any, Any], tuple[Any, Tree]], init: Any, xs: Tree) -> tuple[Any, Tree]:
    """`lax.scan`, whose outputs of a step are stored by one operation where the machine gains by it.

    Replaces an operation per array: the arrays of a step that have at most two axes and consist of 32-bit words or of
    bools become one vector, and are taken apart again after the last step (`Machine.packs_outputs`).
    """
    if not machine().packs_outputs:
        return lax.scan(step, init, xs)
    parts: list[Any] = []

    def packed(carry: Any, x: Any) -> tuple[Any, tuple[Array, list[Array]]]:
        carry, outputs = step(carry, x)
        leaves, structure = jax.tree.flatten(outputs)
        is_small = [x.ndim <= 2 and (x.dtype == bool or x.dtype.itemsize == 4) for x in leaves]
        small = [x for x, chosen in zip(leaves, is_small, strict=True) if chosen]
        parts[:] = [structure, is_small, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in small]]
        words = jnp.concatenate([_as_words(x) for x in small]) if small else jnp.zeros(0, jnp.uint32)
        return carry, (words, [x for x, chosen in zip(leaves, is_small, strict=True) if not chosen])

    carry, (words, others) = lax.scan(packed, init, xs)
    structure, is_small, shapes = parts
    ends = list(accumulate(x.size for x in shapes))
    small = iter([_from_words(words[:, end - x.size : end], x) for end, x in zip(ends, shapes, strict=True)])
    rest = iter(others)
    return carry, jax.tree.unflatten(structure, [next(small) if chosen else next(rest) for chosen in is_small])


def _as_words(x: Array) -> Array:
    bits = x.astype(jnp.uint32) if x.dtype == bool else lax.bitcast_convert_type(x, jnp.uint32)
    return bits.ravel()


def _from_words(words: Array, like: jax.ShapeDtypeStruct) -> Array:
    """`[T, n]` words as the arrays `[T, ...]` that they were."""
    words = words.reshape(len(words), *like.shape)
    return words != 0 if like.dtype == bool else lax.bitcast_convert_type(words, like.dtype)


def copy_tree(params: Tree) -> Tree:
    """A copy in new buffers. A state that is donated to a jitted function must not hold a buffer twice."""
    return jax.tree.map(jnp.copy, params)


def polyak_update(reference: Tree, params: Tree, rate: Array | float) -> Tree:
    """reference + rate (params - reference) of every leaf; `()` if the reference is `()`."""
    if not jax.tree.leaves(reference):
        return reference
    return jax.tree.map(lambda old, new: old + rate * (new - old), reference, params)
