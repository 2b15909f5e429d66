"""Helpers over trees of arrays, for code that runs under `vmap` and inside loops."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

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


def copy_tree(params: Tree) -> Tree:
    """A copy in new buffers. A state that is donated to a jitted function must not hold a buffer twice."""
    return jax.tree.map(jnp.copy, params)


def polyak_update(reference: Tree, params: Tree, rate: Array | float) -> Tree:
    """reference + rate (params - reference) of every leaf; `()` if the reference is `()`."""
    if not jax.tree.leaves(reference):
        return reference
    return jax.tree.map(lambda old, new: old + rate * (new - old), reference, params)
