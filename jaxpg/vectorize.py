"""Helpers over trees of arrays, for code that runs under `vmap` and inside loops."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxpg.types import Array, Tree


def tree_where(condition: Array, on_true: Tree, on_false: Tree) -> Tree:
    """`jnp.where` of every leaf."""
    return jax.tree.map(partial(jnp.where, condition), on_true, on_false)


@custom_vmap
def any_in_batch(waiting: Array) -> Array:
    """Whether any is true; under `vmap` whether any is true in any of the runs side by side.

    As the condition of a while loop it stays one number then. A condition per run would make the loop select, in every
    iteration, between the old and the new of all that it carries.
    """
    return waiting.any()


@any_in_batch.def_vmap
def _(axis_size: int, in_batched: list[bool], waiting: Array) -> tuple[Array, bool]:
    return any_in_batch(waiting), False


def copy_tree(params: Tree) -> Tree:
    """Buffers of their own: a state may be donated, and none must be given away twice."""
    return jax.tree.map(jnp.copy, params)


def polyak_update(reference: Tree, params: Tree, rate: Array | float) -> Tree:
    """old + rate (new - old) of every leaf; an empty reference stays empty."""
    if not jax.tree.leaves(reference):
        return reference
    return jax.tree.map(lambda old, new: old + rate * (new - old), reference, params)
