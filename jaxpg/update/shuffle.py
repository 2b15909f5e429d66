"""Random orders of `0 .. n-1`, without a sort or with a cheap one.

Shuffling by `jax.random.permutation` was a third of a whole PPO loop on a CPU. A Feistel network with a random key is a
bijection on the numbers of a fixed count of bits and costs a few integer operations per element; on other ranges the
few results that fall outside are sent through it again (cycle-walking; Black and Rogaway 2002, "Ciphers with Arbitrary
Finite Domains", section 3), which keeps it a bijection. Few elements are sorted, each a single word: random bits above
its number, so that one sort of words does what jax does by a sort of pairs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.types import Array, Key

ROUNDS = 8  # even, so that the two halves end where they began
SORT_BELOW = 256  # over 6 bits and less the network's orders are seen to be uneven in pairs (benchmarks/LOG.md)


def random_permutations(key: Key, num: int, n: int) -> Array:
    """`[num, n]` int32: every row holds every number of `0 .. n-1` once, in an order of its own."""
    if n < SORT_BELOW:
        return _sorted_permutations(key, num, n)
    return jax.vmap(lambda keys: _feistel_permutation(keys, n))(jax.random.bits(key, (num, ROUNDS), jnp.uint32))


def _sorted_permutations(key: Key, num: int, n: int) -> Array:
    """Numbers in the order of 24 random bits or more, of which two are hardly ever alike."""
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
            lambda x: outside(x).any(), lambda x: jnp.where(outside(x), _feistel(round_keys, x, bits), x), x
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
    """A 32-bit hash whose high bits depend on all bits of `x` and `key` (multipliers of MurmurHash3's finaliser)."""
    x = (x ^ key) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
