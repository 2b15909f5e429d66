"""The decoder: today's standard causal transformer.

RMSNorm before every part (Zhang and Sennrich 2019), rotary positions (Su et al. 2021), grouped-query attention (Ainslie
et al. 2023), SwiGLU (Shazeer 2020), no biases. A token sits in a slot, may look at the real tokens in the slots before
it, and counts its position among these; so padding may stand anywhere.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxpg.types import Array


class Cache(NamedTuple):
    """What a decoding transformer remembers of one column, its KV cache.

    keys: of each layer [kv_heads, head_width, slots], so that the products with a query run along the slots.
    values: of each layer [kv_heads, slots, head_width].
    seen: [slots] bool, which slots hold a real token.
    slot: [] int32, where the next token goes.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    seen: Array
    slot: Array


def rotary_embedding(x: Array, position: Array, base: float = 10_000.0) -> Array:
    """Pairs of features turned by an angle that grows with the position (RoPE, Su et al. 2021, equation 34).

    `x` is `[..., S, heads, width]`, `position` `[..., S]`. Feature i and i + width/2 make a pair and turn by
    position / base^(2i/width), so that the product of a query and a key depends on their distance alone.
    """
    half = x.shape[-1] // 2
    frequency = base ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.multiply.outer(position.astype(jnp.float32), frequency)[..., None, :]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    turned = jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)
    return turned.astype(x.dtype)


def attention(query: Array, keys: Array, values: Array, mask: Array) -> Array:
    """softmax(q k / sqrt(width)) v over the slots that `mask` allows, the softmax in float32.

    `query` `[..., S, heads, width]`, `keys` `[..., kv_heads, width, L]`, `values` `[..., kv_heads, L, width]`, `mask`
    `[..., S, L]`; a group of heads / kv_heads queries shares a key, and is a row each in one product with it. Rows that
    may see nothing give a mean of all values, never NaN.
    """
    length, heads, width = query.shape[-3:]
    kv_heads, slots = keys.shape[-3], keys.shape[-1]
    query = query.reshape(*query.shape[:-3], length, kv_heads, -1, width).swapaxes(-4, -3)
    rows = query.reshape(*query.shape[:-3], -1, width)
    score = jnp.matmul(rows, keys, preferred_element_type=jnp.float32).reshape(*query.shape[:-1], slots)
    score = jnp.where(mask[..., None, :, None, :], score * width**-0.5, jnp.finfo(jnp.float32).min)
    weight = jax.nn.softmax(score).astype(values.dtype)
    out = jnp.matmul(weight.reshape(*rows.shape[:-1], slots), values).reshape(query.shape)
    return out.swapaxes(-4, -3).reshape(*out.shape[:-4], length, heads * width)


class Block(nn.Module):
    """Attention and a SwiGLU layer, each added to what passes through."""

    width: int
    heads: int
    kv_heads: int
    expansion: float
    depth: int
    dtype: Any

    def setup(self) -> None:
        head_width = self.width // self.heads
        dense = partial(nn.Dense, use_bias=False, dtype=self.dtype)
        inward = nn.initializers.normal(self.width**-0.5)
        outward = nn.initializers.normal(
            (2 * self.depth * self.width) ** -0.5
        )  # so that the sum over layers keeps its scale
        hidden = -(-round(self.expansion * self.width) // 8) * 8
        self.query = dense(self.heads * head_width, kernel_init=inward)
        self.key_value = dense(2 * self.kv_heads * head_width, kernel_init=inward)
        self.out = dense(self.width, kernel_init=outward)
        self.gate_up = dense(2 * hidden, kernel_init=inward)
        self.down = dense(self.width, kernel_init=outward)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dtype=self.dtype), nn.RMSNorm(dtype=self.dtype)

    def read(self, x: Array, position: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values of tokens `[..., S, width]`, the first two turned by their position.

        In the layouts that `attention` takes.
        """
        x = self.attention_norm(x)
        query = self.query(x).reshape(*x.shape[:-1], self.heads, -1)
        key, value = jnp.split(self.key_value(x).reshape(*x.shape[:-1], 2 * self.kv_heads, -1), 2, -2)
        return (
            rotary_embedding(query, position),
            jnp.moveaxis(rotary_embedding(key, position), -3, -1),
            value.swapaxes(-3, -2),
        )

    def write(self, x: Array, attention: Array) -> Array:
        """What leaves the block, from what entered it and what its attention found."""
        x = x + self.out(attention)
        gate, up = jnp.split(self.gate_up(self.mlp_norm(x)), 2, -1)
        return x + self.down(nn.silu(gate) * up)

    def __call__(self, x: Array, position: Array, mask: Array) -> tuple[Array, tuple[Array, Array]]:
        query, key, value = self.read(x, position)
        return self.write(x, attention(query, key, value, mask)), (key, value)


class Decoder(nn.Module):
    """Tokens to features; `outputs` numbers are read off the features of a token by `read_out`."""

    vocabulary: int
    outputs: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    expansion: float
    tied: bool
    remat: bool
    dtype: Any

    def setup(self) -> None:
        self.embedding = nn.Embed(
            self.vocabulary, self.width, embedding_init=nn.initializers.normal(self.width**-0.5), dtype=self.dtype
        )
        block = nn.remat(Block) if self.remat else Block
        shape = self.width, self.heads, self.kv_heads, self.expansion, self.layers, self.dtype
        self.blocks = [block(*shape) for _ in range(self.layers)]
        self.norm = nn.RMSNorm(dtype=self.dtype)
        if not self.tied:
            initial = nn.initializers.normal(0.1 * self.width**-0.5)
            self.head = nn.Dense(self.outputs, use_bias=False, kernel_init=initial, dtype=self.dtype)

    def embed(self, tokens: Array) -> Array:
        return self.embedding(tokens) * jnp.asarray(self.width**0.5, self.dtype)

    def __call__(self, tokens: Array, real: Array) -> tuple[Array, list[tuple[Array, Array]]]:
        """Features `[..., S, width]` of tokens `[..., S]`; keys and values of each layer as `Block.read` gives them."""
        x, position = self.embed(tokens), positions(real)
        before = jnp.tril(jnp.broadcast_to(real[..., None, :], (*real.shape, real.shape[-1])))
        cached = []
        for block in self.blocks:
            x, key_value = block(x, position, before)
            cached.append(key_value)
        return self.norm(x), cached

    def step(self, cache: Cache, token: Array) -> tuple[Array, Cache]:
        """Features `[width]` of one more token, and the cache that remembers it."""
        seen = cache.seen.at[cache.slot].set(True)
        position = (seen.sum() - 1)[None]
        x, keys, values = self.embed(token)[None], list(cache.keys), list(cache.values)
        for i, block in enumerate(self.blocks):
            query, key, value = block.read(x, position)
            keys[i] = keys[i].at[..., cache.slot].set(key[..., 0])
            values[i] = values[i].at[:, cache.slot].set(value[:, 0])
            x = block.write(x, attention(query, keys[i], values[i], seen[None]))
        return self.norm(x)[0], Cache(tuple(keys), tuple(values), seen, cache.slot + 1)

    def read_out(self, features: Array) -> Array:
        """[..., width] -> [..., outputs], float32."""
        head = self.embedding.attend if self.tied else self.head
        return head(features).astype(jnp.float32)

    def whole(self, tokens: Array) -> Array:
        """Touches every parameter, to initialise them."""
        return self.read_out(self(tokens, jnp.ones(tokens.shape, bool))[0])


def positions(real: Array) -> Array:
    """Positions of tokens `[..., S]` among the real ones, from 0; those of padding mean nothing."""
    return jnp.maximum(jnp.cumsum(real, -1) - 1, 0)
