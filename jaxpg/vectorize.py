"""Helpers over trees of arrays, for code that runs under `vmap` and inside loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend import core

from jaxpg.parallel import collectives
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


def compute_once(tree: Tree) -> Tree:
    """`tree`, whose arrays of float32 and bool are computed once, however many others are made of them.

    It replaces `lax.optimization_barrier` on a CPU (`Machine.recomputes`), whose compiler removes barriers before it
    fuses, and then writes the whole history of a value into each of its users, unless a division is on the way. So
    this is one, by x == x: a one that no compiler may assume, since it is none for NaN. The values stay the same to the
    last bit. On other machines it does nothing.
    """

    def once(x: Array) -> Array:
        if x.dtype == bool:
            return once(x.astype(jnp.float32)) != 0
        return x / (x == x).astype(x.dtype) if x.dtype == jnp.float32 else x

    return jax.tree.map(once, tree) if machine().recomputes else tree


def set_slot(x: Array, slot: Array, value: Any, *, axis: int = -1) -> Array:
    """`x` with `value` at index `slot`, `[]` int32, of an axis; `value` has 1 or nothing there.

    Where the axis is short (`Machine.few_slots`) it is rewritten whole. An index beyond the axis changes nothing.
    """
    slots, shape = x.shape[axis], [1] * x.ndim
    shape[axis] = slots
    if slots <= machine().few_slots:
        return jnp.where(jnp.arange(slots).reshape(shape) == slot, value, x)
    index: list[Any] = [slice(None)] * x.ndim
    index[axis] = slot[None]
    return x.at[tuple(index)].set(value)


ROUND = 16
"""Steps that one round of a loop takes where `Machine.round_equations` allows more than one."""


def scan_packed(
    step: Callable[[Any, Any], tuple[Any, Tree]], init: Any, xs: Tree, *, in_rounds: bool = False
) -> tuple[Any, Tree]:
    """`lax.scan`, whose outputs of a step are stored as `RowStorage` says.

    in_rounds: a round of the loop takes ROUND steps where the machine gains by it (`Machine.round_equations`).
    """
    found: list[RowStorage] = []

    def packed(carry: Any, x: Any) -> tuple[Any, Tree]:
        carry, outputs = step(carry, x)
        found[:] = [row_storage(outputs)]
        return carry, found[0].pack(outputs)

    unroll = ROUND if in_rounds and _is_small(step, init, xs) else 1
    carry, rows = lax.scan(packed, init, xs, unroll=unroll)
    return carry, found[0].unpack(rows)


def _is_small(step: Callable[[Any, Any], Any], init: Any, xs: Tree) -> bool:
    """Whether a step has at most `Machine.round_equations` equations; where that is 0 it is not traced for this."""
    limit = machine().round_equations
    return limit > 0 and count_equations(jax.make_jaxpr(step)(init, jax.tree.map(lambda x: x[0], xs)).jaxpr) <= limit


def count_equations(jaxpr: core.Jaxpr) -> int:
    """The equations of a jaxpr and of all that are in it, those of a loop's body once."""
    return sum(1 + sum(map(count_equations, inner_jaxprs(equation))) for equation in jaxpr.eqns)


def inner_jaxprs(equation: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """Those that an equation's parameters hold, such as the body of a loop."""
    for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
        if _is_jaxpr(value):
            yield value.jaxpr if isinstance(value, core.ClosedJaxpr) else value


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)


class RowStorage(NamedTuple):
    """How a loop stores what each of its steps leaves behind, arrays `[B, ...]`.

    One of more than two axes becomes `[B, n]`. A TPU would otherwise keep it in another order of its axes than that in
    which columns are gathered later, and sort every step's pictures by a copy of its own: an update of PPO on Breakout
    takes 0.8 of the cycles (benchmarks/LOG.md, "rows of pictures").

    Where the machine gains by it, the arrays of a step that have at most two axes and consist of 32-bit words or of
    bools become one vector, which replaces an operation per array, and are taken apart again after the last step
    (`Machine.packs_outputs`).

    structure: of the outputs of a step.
    shapes: the shapes and types of their arrays.
    is_small: of each of them, whether it goes into the vector.
    """

    structure: Any
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    is_small: tuple[bool, ...]

    def pack(self, outputs: Tree) -> Tree:
        """The arrays that a loop stores for the outputs of a step."""
        leaves = jax.tree.leaves(outputs)
        words = [_as_words(x) for x, chosen in zip(leaves, self.is_small, strict=True) if chosen]
        others = [as_row(x) for x, chosen in zip(leaves, self.is_small, strict=True) if not chosen]
        return jnp.concatenate(words) if words else (), others

    def unpack(self, rows: Tree) -> Any:
        """`[T, ...]` of what `pack` gave as `[T, ...]` of the outputs."""
        words, others = rows
        rest, begin, leaves = iter(others), 0, []
        for like, chosen in zip(self.shapes, self.is_small, strict=True):
            if chosen:
                leaves.append(_from_words(words[:, begin : begin + like.size], like))
                begin += like.size
            else:
                stored = next(rest)
                leaves.append(stored.reshape(len(stored), *like.shape))
        return jax.tree.unflatten(self.structure, leaves)


def row_storage(outputs: Tree) -> RowStorage:
    """How the machine had better store outputs like these, arrays or their shapes and types.

    No vector on the devices of SHARD, which would have to exchange the columns of all at every step.
    """
    leaves, structure = jax.tree.flatten(outputs)
    packs = machine().packs_outputs and collectives.auto_mesh.get() is None
    is_small = tuple(packs and x.ndim <= 2 and (x.dtype == bool or x.dtype.itemsize == 4) for x in leaves)
    return RowStorage(structure, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves), is_small)


def as_row(x: Array) -> Array:
    """`[B, ...]` as `[B, n]`; one of at most two axes as it is."""
    return x.reshape(len(x), -1) if x.ndim > 2 else x


def _as_words(x: Array) -> Array:
    """The 32-bit words of an array as floats: those that are float32 as they are, so that they keep their gradient."""
    if x.dtype == bool:
        x = x.astype(jnp.uint32)
    return (x if x.dtype == jnp.float32 else lax.bitcast_convert_type(x, jnp.float32)).ravel()


def _from_words(words: Array, like: jax.ShapeDtypeStruct) -> Array:
    """`[T, n]` words as the arrays `[T, ...]` that they were."""
    words = words.reshape(len(words), *like.shape)
    if like.dtype == jnp.float32:
        return words
    if like.dtype == bool:
        return lax.bitcast_convert_type(words, jnp.uint32) != 0
    return lax.bitcast_convert_type(words, like.dtype)


def sums(terms: dict[str, Array]) -> dict[str, Array]:
    """The sum of each array, all of one shape: of their stack by one reduction, where the machine gains by it.

    It replaces a reduction per array, see `Machine.sums_at_once`.
    """
    if not machine().sums_at_once:
        return {name: x.sum() for name, x in terms.items()}
    stack = jnp.stack([*terms.values()])
    return dict(zip(terms, stack.reshape(len(terms), -1).sum(1), strict=True))


def count_chunks(num_rows: int, chunk_rows: int | None) -> int:
    """The smallest number of equal chunks of at most `chunk_rows` rows; 1 without a limit.

    Of a number of rows with few divisors the chunks are small, and slow: 521 rows in chunks of 512 at most are 521.
    """
    if chunk_rows is None or num_rows <= chunk_rows:
        return 1
    return next(n for n in range(-(-num_rows // chunk_rows), num_rows + 1) if num_rows % n == 0)


def over_chunks(
    of_chunk: Callable[[Array], Tree],
    num_chunks: Array | int,
    begin: Callable[[jax.ShapeDtypeStruct], Array],
    put: Callable[[Array, Tree, Tree], Tree],
) -> Tree:
    """`found = put(i, found, of_chunk(i))` for every chunk i, one after the other.

    Args:
        of_chunk: the number of a chunk, [] int32 -> what is computed of it.
        num_chunks: how many; where it is no traced number, a gradient finds its way through.
        begin: shape and dtype of an array that `of_chunk` gives -> the array that it is put into.
        put: i, what was found so far, that of chunk i -> what is found then.
    """
    of_chunk = jax.jit(of_chunk)  # traced once for both `eval_shape` and the loop
    found = jax.tree.map(begin, jax.eval_shape(of_chunk, jax.ShapeDtypeStruct((), jnp.int32)))

    def put_chunk(i: Array, found: Tree) -> Tree:
        number = jnp.asarray(i, jnp.int32)  # a loop's own count may be of another type, and would be traced again
        return put(number, found, of_chunk(number))

    return lax.fori_loop(0, num_chunks, put_chunk, found)


def stacked(trees: Sequence[Tree]) -> Tree:
    """Trees of the same structure as one, with a first axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def copy_tree(params: Tree) -> Tree:
    """A copy in new buffers. A state that is donated to a jitted function must not hold a buffer twice."""
    return jax.tree.map(jnp.copy, params)


def polyak_update(reference: Tree, params: Tree, rate: Array | float) -> Tree:
    """reference + rate (params - reference) of every leaf; `()` if the reference is `()`."""
    if not jax.tree.leaves(reference):
        return reference
    return jax.tree.map(lambda old, new: old + rate * (new - old), reference, params)
