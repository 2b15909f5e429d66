"""The decoder: a causal transformer as is standard today.

RMSNorm before attention and MLP (Zhang and Sennrich 2019), rotary position embedding (Su et al. 2021), grouped-query
attention (Ainslie et al. 2023), SwiGLU (Shazeer 2020), no biases. A sequence has slots, each with a token that is real
or padding. A token attends to the real tokens in its own and earlier slots, and its position is its index among them,
so padding may be anywhere.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.errors import UserError, refuse_unknown
from jaxpg.models.layers import RMSNorm, apply, dot_rows
from jaxpg.parallel import collectives
from jaxpg.parallel.machine import machine
from jaxpg.types import Array, PackedTexts, SharedPrompts, Tree
from jaxpg.user_input.domains import check_number, check_whole, domain_of
from jaxpg.vectorize import set_slot, stacked

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class DecoderConfig(NamedTuple):
    """Sizes and arithmetic of a decoder.

    width: of the features between layers.
    layers: blocks of attention and SwiGLU.
    heads, kv_heads: queries, and keys and values, per token and layer.
    expansion: width of the SwiGLU layer, as a multiple of `width`; it is rounded up to a multiple of 8.
    dtype: of the arithmetic, a name in DTYPES.
    remat: store only the inputs of the blocks for the gradient, and recompute the rest.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    expansion: float
    dtype: str
    remat: bool

    def check(self) -> None:
        """Raise a UserError if the sizes are none or do not divide, or the dtype is unknown."""
        for name in ("width", "layers", "heads", "kv_heads"):
            check_whole(name, getattr(self, name))
        check_number("expansion", self.expansion, domain_of("expansion"))
        if self.width % self.heads or self.heads % self.kv_heads or (self.width // self.heads) % 2:
            raise UserError(
                "heads must divide the width into even parts and kv_heads must divide heads; "
                f"width = {self.width}, heads = {self.heads} and kv_heads = {self.kv_heads} were given."
            )
        if self.dtype not in DTYPES:
            refuse_unknown("dtype", self.dtype, DTYPES)


class KVCache(NamedTuple):
    """The keys and values of the tokens so far, of one sequence.

    keys: of each layer [kv_heads, head_width, slots]. With the slots last, XLA on a CPU multiplies queries and keys
        without a transposition at every token (benchmarks/LOG.md, "writing, against the right bound").
    values: of each layer [kv_heads, slots, head_width].
    real: [slots] bool, which slots hold a real token.
    slot: [] int32, the slot of the next token.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    real: Array
    slot: Array


KeysValues = tuple[Array, Array]
"""Keys and values of a layer as `attention` takes them: `[..., kv_heads, width, L]` and `[..., kv_heads, L, width]`."""


class Rotation(NamedTuple):
    """What `rotary_embedding` multiplies features by, and their partners: `[..., S, 1, width]` float32 each."""

    cos: Array
    sin: Array


def rotation_at(position: Array, width: int) -> Rotation:
    """The rotation of features at these positions, `[..., S]`: all layers have the same.

    Features i and i + width/2 are a pair, rotated by position / 10000^(2i/width).
    """
    half = width // 2
    frequency = 10_000.0 ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.multiply.outer(position.astype(jnp.float32), frequency)[..., None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return Rotation(jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1))


def rotary_embedding(x: Array, rotation: Rotation) -> Array:
    """Pairs of features rotated by an angle that grows with the position (RoPE, Su et al. 2021, equation 34).

    `x` is `[..., S, heads, width]`. The product of a query and a key, both rotated, depends on their distance alone.
    """
    partner = jnp.roll(x, x.shape[-1] // 2, -1).astype(jnp.float32)
    return (x.astype(jnp.float32) * rotation.cos + partner * rotation.sin).astype(x.dtype)


def attention(query: Array, keys: Array, values: Array, mask: Array) -> Array:
    """softmax(q k / sqrt(width)) v over the slots that `mask` allows, with the softmax in float32.

    Shapes: `query` `[..., S, heads, width]`, `keys` `[..., kv_heads, width, L]`, `values` `[..., kv_heads, L, width]`,
    `mask` `[..., S, L]`, result `[..., S, heads * width]`. A row whose mask is all false gives the mean of all values,
    never NaN.

    More than `Machine.queries_at_once` are worked through in blocks, whose scores are computed again for the gradient,
    so that the scores of a long text are never stored whole (Rabe and Staats 2021, Self-attention Does Not Need O(n^2)
    Memory). The result is the same.
    """
    length, at_once = query.shape[-3], machine().queries_at_once
    if length <= at_once:
        return _attention_at_once(query, keys, values, mask)
    blocks = -(-length // at_once)
    size = -(-length // blocks)

    def split(x: Array, axis: int) -> Array:
        """The blocks of an axis, counted from the end, in front; with zeros behind the last."""
        axis += x.ndim
        padded = jnp.pad(x, [(0, blocks * size - length if i == axis else 0) for i in range(x.ndim)])
        return jnp.moveaxis(padded.reshape(*x.shape[:axis], blocks, size, *x.shape[axis + 1 :]), axis, 0)

    def of_block(queries: tuple[Array, Array]) -> Array:
        query, mask = queries
        return _attention_at_once(query, keys, values, mask)

    out = lax.map(jax.checkpoint(of_block, prevent_cse=False), (split(query, -3), split(mask, -2)))
    out = jnp.moveaxis(out, 0, -3)
    return out.reshape(*out.shape[:-3], blocks * size, -1)[..., :length, :]


def _attention_at_once(query: Array, keys: Array, values: Array, mask: Array) -> Array:
    """`attention` with all scores in memory.

    The heads / kv_heads queries that share a key are the rows of one matrix product with it.
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
    """Attention and a SwiGLU layer, each with a residual connection."""

    config: DecoderConfig

    def setup(self) -> None:
        width, dtype = self.config.width, DTYPES[self.config.dtype]
        outward_std = (2 * self.config.layers * width) ** -0.5  # the sum over all layers keeps its scale
        head_width = width // self.config.heads
        hidden = -(-round(self.config.expansion * width) // 8) * 8
        dense = partial(nn.Dense, use_bias=False, dtype=dtype, dot_general=dot_rows)
        initial = nn.initializers.normal(width**-0.5)
        initial_out = nn.initializers.normal(outward_std)
        self.qkv = dense((self.config.heads + 2 * self.config.kv_heads) * head_width, kernel_init=initial)
        self.out = dense(width, kernel_init=initial_out)
        self.gate_up = dense(2 * hidden, kernel_init=initial)
        self.down = dense(width, kernel_init=initial_out)
        self.attention_norm, self.mlp_norm = RMSNorm(dtype), RMSNorm(dtype)

    def query_key_value(self, x: Array, rotation: Rotation) -> tuple[Array, Array, Array]:
        """Queries, keys and values of tokens `[..., S, width]` as `attention` takes them, the first two rotated.

        They are one product. Its columns are, for each of the kv_heads, the queries that share a key, the key and the
        value, so that devices can share them by heads (Shoeybi et al. 2019, section 3).
        """
        kv_heads, sharing = self.config.kv_heads, self.config.heads // self.config.kv_heads
        of_heads = self.qkv(self.attention_norm(x)).reshape(*x.shape[:-1], kv_heads, sharing + 2, -1)
        query, key, value = jnp.split(of_heads, [sharing, sharing + 1], -2)
        query = query.reshape(*x.shape[:-1], kv_heads * sharing, -1)
        return (
            rotary_embedding(query, rotation),
            jnp.moveaxis(rotary_embedding(key[..., 0, :], rotation), -3, -1),
            value[..., 0, :].swapaxes(-3, -2),
        )

    def output(self, x: Array, attention: Array) -> Array:
        """The output of the block, from its input and the result of its attention."""
        x = x + self.out(attention)
        gate, up = jnp.split(self.gate_up(self.mlp_norm(x)), 2, -1)
        return x + self.down(nn.silu(gate) * up)

    def __call__(
        self, x: Array, rotation: Rotation, mask: Array, before: KeysValues | None = None
    ) -> tuple[Array, KeysValues]:
        query, key, value = self.query_key_value(x, rotation)
        if before is not None:
            key = jnp.concatenate([before[0].astype(key.dtype), key], -1)
            value = jnp.concatenate([before[1].astype(value.dtype), value], -2)
        return self.output(x, attention(query, key, value, mask)), (key, value)


class Decoder(nn.Module):
    """Tokens to features; `read_out` gives `outputs` numbers from the features of a token.

    tied: the embedding is also the output layer.
    """

    config: DecoderConfig
    vocabulary: int
    outputs: int
    tied: bool

    def setup(self) -> None:
        width, dtype = self.config.width, DTYPES[self.config.dtype]
        initial = nn.initializers.normal(width**-0.5)
        self.embedding = nn.Embed(self.vocabulary, width, embedding_init=initial, dtype=dtype)
        self.blocks = [Block(self.config) for _ in range(self.config.layers)]
        self.norm = RMSNorm(dtype)
        if not self.tied:
            initial_head = nn.initializers.normal(0.1 * width**-0.5)
            self.head = nn.Dense(
                self.outputs, use_bias=False, kernel_init=initial_head, dtype=dtype, dot_general=dot_rows
            )

    def embed(self, tokens: Array) -> Array:
        return self.embedding(tokens) * jnp.asarray(self.config.width**0.5, DTYPES[self.config.dtype])

    def __call__(self, tokens: Array, real: Array) -> tuple[Array, list[KeysValues]]:
        """Features `[..., S, width]` of tokens `[..., S]`, and the keys and values of each layer.

        `real`, `[..., S]` bool, is false on padding.
        """
        return self._through_blocks(
            tokens, positions(real), jnp.tril(jnp.broadcast_to(real[..., None, :], (*real.shape, real.shape[-1])))
        )

    def packed(self, texts: PackedTexts) -> Array:
        """Features `[R, S, width]` of texts side by side: a token attends to its own text alone, and to its prompt."""
        mask = jnp.tril(texts.text[:, :, None] == texts.text[:, None, :])
        if not isinstance(texts.prompts, SharedPrompts):
            return self._through_blocks(texts.tokens, texts.position, mask)[0]
        real = texts.prompts.real[:, None, :]
        mask = jnp.concatenate([jnp.broadcast_to(real, (*mask.shape[:-1], real.shape[-1])), mask], -1)
        return self._through_blocks(texts.tokens, texts.position, mask, texts.prompts.memory)[0]

    def _through_blocks(
        self, tokens: Array, position: Array, mask: Array, before: list[KeysValues] | None = None
    ) -> tuple[Array, list[KeysValues]]:
        """The same, of tokens at these positions `[..., S]`, each attending where `mask`, `[..., S, L]`, is true.

        The L slots are the S tokens, or those whose keys and values are `before`, per layer, and then these.
        """
        x, rotation = self.embed(tokens), self._rotation_at(position)
        recomputes = self.config.remat and not self.is_initializing()
        if recomputes and (machine().loops_over_blocks or collectives.auto_mesh.get() is not None):
            x, keys_values = self._scan_blocks(x, rotation, mask, before)
            return self.norm(x), keys_values
        keys_values, unbound = [], Block(self.config, parent=None)
        for i, block in enumerate(self.blocks):
            run = jax.checkpoint(partial(apply, unbound, block.variables)) if recomputes else block
            x, key_value = run(x, rotation, mask, before[i] if before else None)
            keys_values.append(key_value)
        return self.norm(x), keys_values

    def _scan_blocks(
        self, x: Array, rotation: Rotation, mask: Array, before: list[KeysValues] | None
    ) -> tuple[Array, list[KeysValues]]:
        """All blocks by a loop over their stacked parameters, so that only the input of each is kept for the gradient.

        Replaces `jax.checkpoint` of block by block where the machine saves nothing by it (`Machine.loops_over_blocks`),
        and on the devices of SHARD: without a loop XLA gathers several blocks at a time, and beside its eighth of 1.5 B
        weights an H100 holds 15.7 instead of 9.7 GB (benchmarks/LOG.md, "`remat` without a loop").
        """
        block = Block(self.config, parent=None)
        of_blocks = stacked([b.variables["params"] for b in self.blocks])

        def one_block(x: Array, inputs: tuple[Tree, KeysValues | None]) -> tuple[Array, KeysValues]:
            params, before = inputs
            if x.ndim == 2:  # a prompt: what writes has the parameters as a whole
                return apply(block, {"params": collectives.whole(params)}, x, rotation, mask)
            x, keys_values = apply(block, {"params": collectives.gathered(params)}, x, rotation, mask, before)
            return collectives.shard_columns(x), keys_values

        loop = jax.checkpoint(one_block, prevent_cse=False)
        x, keys_values = lax.scan(loop, x, (of_blocks, stacked(before) if before else None))
        return x, [jax.tree.map(lambda of_layers, i=i: of_layers[i], keys_values) for i in range(self.config.layers)]

    def step(self, cache: KVCache, token: Array) -> tuple[Array, KVCache]:
        """Features `[width]` of the next token, `[]`, and the cache with its keys and values."""
        real = set_slot(cache.real, cache.slot, True)
        rotation = self._rotation_at((real.sum() - 1)[None])
        x, keys, values = self.embed(token)[None], list(cache.keys), list(cache.values)
        for i, block in enumerate(self.blocks):
            query, key, value = block.query_key_value(x, rotation)
            keys[i] = set_slot(keys[i], cache.slot, key, axis=-1)
            values[i] = set_slot(values[i], cache.slot, value, axis=-2)
            x = block.output(x, attention(query, keys[i], values[i], real[None]))
        return self.norm(x)[0], KVCache(tuple(keys), tuple(values), real, cache.slot + 1)

    def _rotation_at(self, position: Array) -> Rotation:
        return rotation_at(position, self.config.width // self.config.heads)

    def read_out(self, features: Array) -> Array:
        """`[..., width] -> [..., outputs]`, logits or a value, as float32; the product is in the config's dtype."""
        head = self.embedding.attend if self.tied else self.head
        return head(features).astype(jnp.float32)

    def outputs_of(self, tokens: Array) -> Array:
        """`[..., S] -> [..., S, outputs]`: uses every parameter, to initialise them."""
        return self.read_out(self(tokens, jnp.ones(tokens.shape, bool))[0])


def positions(real: Array) -> Array:
    """Index of each token, `[..., S]`, among the real ones, from 0; meaningless on padding."""
    return jnp.maximum(jnp.cumsum(real, -1) - 1, 0)
