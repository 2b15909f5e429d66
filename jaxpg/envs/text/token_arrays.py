"""Text of varying length in arrays of fixed size: written with gaps of padding, which `pack` moves to the end."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxpg.envs.text.vocabulary import CHARACTERS, PAD
from jaxpg.parallel.machine import machine
from jaxpg.types import Array

ZERO, A = CHARACTERS.id("0"), CHARACTERS.id("a")


def pack(*pieces: Array | str, size: int | None = None) -> Array:
    """The pieces concatenated, with all padding moved to the end; `[size]`, by default the sum of their sizes.

    Short texts compare all places with all slots, in place of a scatter: `Machine.few_slots`.
    """
    tokens = jnp.concatenate([tokens_of(piece) if isinstance(piece, str) else piece for piece in pieces])
    tokens = tokens.astype(jnp.int32)  # under double precision the pieces of a task may have 64 bits
    real = tokens != PAD
    size = len(tokens) if size is None else size
    place = jnp.where(real, jnp.cumsum(real) - 1, size)
    if max(len(tokens), size) <= machine().few_slots:
        return jnp.where(place[None] == jnp.arange(size)[:, None], tokens[None], PAD).max(-1)
    return jnp.full(size, PAD, jnp.int32).at[place].set(tokens, mode="drop")


def tokens_of(text: str) -> Array:
    """A constant text, [its length] int32; "<eos>" is the end token."""
    return jnp.array(CHARACTERS.encode(text, special_tokens=True), jnp.int32)


def numeral(number: Array, width: int) -> Array:
    """A number >= 0 of at most `width` digits, without leading zeros: `[width]`, padded on the left."""
    power = 10 ** np.arange(width - 1, -1, -1, dtype=np.int32)
    leading = (number < power) & (power > 1)
    return jnp.where(leading, PAD, ZERO + number // power % 10).astype(jnp.int32)


def join_rows(rows: Array, present: Array, separator: str) -> Array:
    """Rows of tokens `[K, w]` as one line with gaps, `[K * (w + 1)]`, with a separator before each but the first.

    present: [K] bool, the rows to include; the first must be among them.
    """
    separators = jnp.full((len(rows), 1), CHARACTERS.id(separator)).at[0].set(PAD)
    lines = jnp.concatenate([separators, rows], axis=1)
    return jnp.where(present[:, None], lines, PAD).astype(jnp.int32).reshape(-1)


def fingerprint(tokens: Array) -> Array:
    """A hash of the tokens `[n]` and their positions, [] uint32, which does not depend on the padding (0) after them.

    Each token is mixed with its position, and their sum once more, by the finalizer of MurmurHash3 (Appleby 2011).
    """
    place = jnp.arange(1, len(tokens) + 1, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    mixed = _mix(tokens.astype(jnp.uint32) + place)
    return _mix(jnp.where(tokens == PAD, jnp.uint32(0), mixed).sum(dtype=jnp.uint32))


def _mix(x: Array) -> Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def non_negative(hashed: Array) -> Array:
    """A uint32 hash as an int32 that is not negative."""
    return (hashed >> 1).astype(jnp.int32)
