"""Random permutations of `0 .. n-1`, without a sort or with a cheap one.

Replaces `jax.random.permutation`, which took a third of a whole PPO loop on a CPU (benchmarks/LOG.md). From SORT_BELOW
elements on, a Feistel network with a random key: a bijection on the numbers of a fixed number of bits, at a few integer
operations per element. For other ranges, results that fall outside go through it again (cycle-walking; Black and
Rogaway 2002, "Ciphers with Arbitrary Finite Domains", section 4), which keeps it a bijection. Fewer elements are
sorted, each as a single word with random bits above its number: one sort of words in place of jax's sort of pairs.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.types import Array, Key
from jaxpg.vectorize import any_in_batch

ROUNDS = 8  # even, so that the two halves end where they began
SORT_BELOW = 256  # at 32 and 64 elements the network's orders are measurably uneven in pairs (benchmarks/LOG.md)


def random_permutations(key: Key, num: int, n: int) -> Array:
    """`[num, n]` int32: every row is an independent random permutation of `0 .. n-1`."""
    if n < SORT_BELOW:
        return _sorted_permutations(key, num, n)
    return jax.vmap(lambda keys: _feistel_permutation(keys, n))(jax.random.bits(key, (num, ROUNDS), jnp.uint32))


def random_permutations_below(key: Key, num: int, n: Array) -> Callable[[Array], Array]:
    """`num` independent random permutations of `0 .. n-1`, n traced: numbers `[m]` -> their places `[num, m]` int32.

    So those of a few numbers can be had without all the others. What is not below n is taken for n - 1. Of fewer than a
    dozen numbers some permutations are rarer than others (of seven, from 0.1 to 2.8 times as frequent). The same
    network and walk on the cells of a rectangle that holds n and hardly more: bits, of which n may fill just over half,
    would walk again and again until the last number is inside. Source: Black and Rogaway 2002, section 5 ("generalized
    Feistel").
    """
    n = jnp.maximum(n, 1).astype(jnp.uint32)
    rows = jnp.ceil(jnp.sqrt(n.astype(jnp.float32))).astype(jnp.uint32)
    columns = (n + rows - 1) // rows
    all_keys = jax.random.bits(key, (num, ROUNDS), jnp.uint32)

    def number(cell: tuple[Array, Array]) -> Array:
        return cell[0] * columns + cell[1]

    def permuted(keys: Array, start: tuple[Array, Array]) -> Array:
        def again(cell: tuple[Array, Array]) -> tuple[Array, Array]:
            outside, moved = number(cell) >= n, _move_in_rectangle(keys, cell, rows, columns)
            return jnp.where(outside, moved[0], cell[0]), jnp.where(outside, moved[1], cell[1])

        first = _move_in_rectangle(keys, start, rows, columns)
        return number(lax.while_loop(lambda cell: any_in_batch(number(cell) >= n), again, first)).astype(jnp.int32)

    def places(numbers: Array) -> Array:
        numbers = jnp.minimum(numbers.astype(jnp.uint32), n - 1)
        return jax.vmap(permuted, (0, None))(all_keys, (numbers // columns, numbers % columns))

    return places


def _move_in_rectangle(
    round_keys: Array, cell: tuple[Array, Array], rows: Array, columns: Array
) -> tuple[Array, Array]:
    """A keyed bijection on the cells of a rectangle: row and column in turn move on by a hash of the other."""
    row, column = cell
    for i in range(0, ROUNDS, 2):
        row = _add_below(row, _mix(column, round_keys[i]), rows)
        column = _add_below(column, _mix(row, round_keys[i + 1]), columns)
    return row, column


def _add_below(x: Array, random: Array, n: Array) -> Array:
    """x + a random number below n, modulo n, for n < 2^16."""
    moved = x + ((random >> 16) * n >> 16)
    return jnp.where(moved >= n, moved - n, moved)


def _sorted_permutations(key: Key, num: int, n: int) -> Array:
    """Numbers sorted by 24 or more random bits each, so that ties are rare."""
    number_bits = (n - 1).bit_length()
    number = jnp.arange(n, dtype=jnp.uint32)[None]
    keyed = jax.random.bits(key, (num, n), jnp.uint32) >> number_bits << number_bits | number
    return (lax.sort(keyed, dimension=1) & ((1 << number_bits) - 1)).astype(jnp.int32)


def _feistel_permutation(round_keys: Array, n: int) -> Array:
    bits = (n - 1).bit_length()

    def outside(x: Array) -> Array:
        return x >= n

    x = _feistel(round_keys, jnp.arange(n, dtype=jnp.uint32), bits)
    if n < 1 << bits:
        x = lax.while_loop(
            lambda x: any_in_batch(outside(x)), lambda x: jnp.where(outside(x), _feistel(round_keys, x, bits), x), x
        )
    return x.astype(jnp.int32)


def _feistel(round_keys: Array, x: Array, bits: int) -> Array:
    """A keyed bijection on the numbers below 2^bits: each round replaces the left half by left ^ f(right) and swaps."""
    left_bits = bits // 2
    right_bits = bits - left_bits
    left, right = x >> right_bits, x & ((1 << right_bits) - 1)
    for i in range(ROUNDS):
        left, right = right, left ^ (_mix(right, round_keys[i]) >> (32 - left_bits))
        left_bits, right_bits = right_bits, left_bits
    return (left << right_bits) | right


def _mix(x: Array, key: Array) -> Array:
    """A 32-bit hash whose high bits depend on all bits of `x` and `key`; no other is used.

    Up to its last shift it is the finaliser of MurmurHash3, which would carry high bits into low ones.
    """
    x = (x ^ key) * jnp.uint32(0x85EBCA6B)
    return (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
