"""A causal transformer as Policy, Critic and reward model: a prompt is the context, a token is an action.

The network is today's standard decoder: RMSNorm before every part (Zhang and Sennrich 2019), rotary positions (Su et
al. 2021), grouped-query attention (Ainslie et al. 2023), SwiGLU (Shazeer 2020), no biases. One code runs it in three
ways: over a whole batch of completions (`evaluate`, to learn from), over a prompt (`start`, which fills the KV cache)
and for one token (`act`, which reads and extends it). In all three, token j of a column lies in slot j of
`[prompt | completion]`, may look at the real tokens before it, and counts its position among these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.distributions import Categorical
from jaxpg.errors import UserError
from jaxpg.types import Array, Critic, Discrete, Env, Key, Params, Policy, Prompt, Rollout, Transition, Tree

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class Cache(NamedTuple):
    """What a decoding transformer remembers of one column, its KV cache.

    keys, values: [layers, slots, kv_heads, head_width].
    seen: [slots] bool, which slots hold a real token.
    slot: [] int32, where the next token goes.
    """

    keys: Array
    values: Array
    seen: Array
    slot: Array


class Scorer(NamedTuple):
    """A reward model.

    init(key) -> params
    score(params, rollout) -> [B] float32, read at the last real token of each completion.
    """

    init: Callable[[Key], Tree]
    score: Callable[[Tree, Rollout], Array]


def rotated(x: Array, position: Array, base: float = 10_000.0) -> Array:
    """Pairs of features turned by an angle that grows with the position (RoPE, Su et al. 2021, equation 34).

    `x` is `[..., S, heads, width]`, `position` `[..., S]`. Feature i and i + width/2 make a pair and turn by
    position / base^(2i/width), so that the product of a query and a key depends on their distance alone.
    """
    half = x.shape[-1] // 2
    frequency = base ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angle = position[..., None, None].astype(jnp.float32) * frequency
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    turned = jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)
    return turned.astype(x.dtype)


def attended(query: Array, keys: Array, values: Array, mask: Array) -> Array:
    """softmax(q k / sqrt(width)) v over the slots that `mask` allows, the softmax in float32.

    `query` `[..., S, heads, width]`, `keys` and `values` `[..., L, kv_heads, width]`, `mask` `[..., S, L]`; a group of
    heads / kv_heads queries shares a key. Rows that may see nothing give a mean of all values, never NaN.
    """
    kv_heads, width = keys.shape[-2:]
    query = query.reshape(*query.shape[:-2], kv_heads, -1, width)
    score = jnp.einsum("...skgd,...lkd->...kgsl", query, keys, preferred_element_type=jnp.float32)
    score = jnp.where(mask[..., None, None, :, :], score * width**-0.5, jnp.finfo(jnp.float32).min)
    weight = jax.nn.softmax(score).astype(values.dtype)
    out = jnp.einsum("...kgsl,...lkd->...skgd", weight, values)
    return out.reshape(*out.shape[:-3], -1)


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
        """Queries, keys and values of tokens `[..., S, width]`, the first two turned by their position."""
        x = self.attention_norm(x)
        query = self.query(x).reshape(*x.shape[:-1], self.heads, -1)
        key, value = jnp.split(self.key_value(x).reshape(*x.shape[:-1], 2 * self.kv_heads, -1), 2, -2)
        return rotated(query, position), rotated(key, position), value

    def write(self, x: Array, attention: Array) -> Array:
        """What leaves the block, from what entered it and what its attention found."""
        x = x + self.out(attention)
        gate, up = jnp.split(self.gate_up(self.mlp_norm(x)), 2, -1)
        return x + self.down(nn.silu(gate) * up)

    def __call__(self, x: Array, position: Array, mask: Array) -> tuple[Array, tuple[Array, Array]]:
        query, key, value = self.read(x, position)
        return self.write(x, attended(query, key, value, mask)), (key, value)


class Transformer(nn.Module):
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

    def __call__(self, tokens: Array, real: Array) -> tuple[Array, tuple[Array, Array]]:
        """Features `[..., S, width]` of tokens `[..., S]`; keys and values `[layers, ..., S, kv_heads, head_width]`."""
        x, position = self.embed(tokens), positions(real)
        slot = jnp.arange(tokens.shape[-1])
        mask = (slot[:, None] >= slot[None, :]) & real[..., None, :]
        cached = []
        for block in self.blocks:
            x, key_value = block(x, position, mask)
            cached.append(key_value)
        return self.norm(x), jax.tree.map(lambda *layers: jnp.stack(layers), *cached)

    def step(self, cache: Cache, token: Array) -> tuple[Array, Cache]:
        """Features `[width]` of one more token, and the cache that remembers it."""
        seen = cache.seen.at[cache.slot].set(True)
        position = (seen.sum() - 1)[None]
        x, (keys, values) = self.embed(token)[None], (cache.keys, cache.values)
        for i, block in enumerate(self.blocks):
            query, key, value = block.read(x, position)
            keys, values = (all_.at[i, cache.slot].set(new[0]) for all_, new in ((keys, key), (values, value)))
            x = block.write(x, attended(query, keys[i], values[i], seen[None]))
        return self.norm(x)[0], Cache(keys, values, seen, cache.slot + 1)

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


class Tokens(NamedTuple):
    """The distributions over the next token at `[T, B]` places, as features and the weights that read logits off them.

    Logits are made for a `1/chunks` share of the columns at a time, and made again for the gradient, so that
    `[T, B, vocabulary]` never exists whole.

    logits(features) -> [..., vocabulary]: the last layer.
    features: [T, B, width].
    chunks: static.
    """

    logits: Callable[[Array], Array]
    features: Array
    chunks: int

    def log_prob_and_entropy(self, action: Array) -> tuple[Array, Array]:
        """Of `action` `[T, B]`, and of the whole distribution in nats."""

        def of_some(inputs: tuple[Array, Array]) -> tuple[Array, Array]:
            features, action = inputs
            return Categorical(self.logits(features)).log_prob_and_entropy(action)

        return self._by_chunks(of_some, (self.features, action))

    def log_prob(self, action: Array) -> Array:
        return self.log_prob_and_entropy(action)[0]

    def entropy(self) -> Array:
        return self._by_chunks(lambda x: Categorical(self.logits(x[0])).entropy(), (self.features,))

    def kl(self, other: Tokens) -> Array:
        """KL(self ‖ other) at every place."""
        return self._by_chunks(
            lambda x: Categorical(self.logits(x[0])).kl(Categorical(other.logits(x[1]))),
            (self.features, other.features),
        )

    def _by_chunks(self, function: Callable[[Any], Any], inputs: tuple[Array, ...]) -> Any:
        if self.chunks == 1:
            return function(inputs)
        split = jax.tree.map(lambda x: x.reshape(x.shape[0], self.chunks, -1, *x.shape[2:]).swapaxes(0, 1), inputs)
        joined = lax.map(jax.checkpoint(function), split)
        return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(x.shape[1], -1), joined)


def transformer(
    env: Env,
    *,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    expansion: float = 2.67,
    tied: bool = False,
    dtype: str = "float32",
    remat: bool = False,
    logit_chunks: int = 1,
    temperature: float = 1.0,
    shared: bool = False,
) -> tuple[Policy, Critic]:
    """A language model as a policy over tokens, and a critic of the same make.

    Args:
        width: of the features that pass through the layers.
        layers: blocks of attention and SwiGLU.
        heads: queries per token and layer; they divide the width.
        kv_heads: keys and values per token and layer, each shared by heads / kv_heads queries.
        expansion: width of the SwiGLU layer, in widths.
        tied: logits are read off by the embedding itself.
        dtype: of the arithmetic, float32 or bfloat16; parameters, softmax and log-probabilities stay float32.
        remat: keep only what enters each block for the gradient, and compute the rest again.
        logit_chunks: make the logits of a batch in so many parts, never all at once.
        temperature: of the policy, in acting and in learning alike.
        shared: the critic reads the policy's features and adds only a head.

    Raises:
        UserError: sizes that do not divide, an environment whose actions are no tokens.
    """
    build = _builder(env, width, layers, heads, kv_heads, expansion, dtype, remat)
    model, judge = build(outputs=_vocabulary(env), tied=tied), build(outputs=1, tied=False)

    def distribution(params: Tree, features: Array) -> Categorical:
        return Categorical(_apply(model, params, features, method="read_out") / temperature)

    def act(params: Tree, cache: Cache, token: Array) -> tuple[Categorical, Cache]:
        features, cache = _apply(model, params, cache, token, method="step")
        return distribution(params, features), cache

    def evaluate(params: Tree, rollout: Rollout) -> Tokens:
        return Tokens(lambda x: distribution(params, x).logits, features_of(model, params, rollout), logit_chunks)

    def critic_init(key: Key) -> Tree:
        if shared:
            return nn.Dense(1).init(key, jnp.zeros(width))
        return _init(judge, key)

    def values(params: Params, rollout: Rollout) -> tuple[Array, Array]:
        if shared:
            features = features_of(model, params.policy, rollout)
            value = _apply(nn.Dense(1), params.critic, features)[..., 0]
        else:
            value = _value(judge, params.critic, features_of(judge, params.critic, rollout))
        # Behind the last token, and where the budget of tokens is spent, nothing more is to be gained.
        return value, jnp.concatenate([value[1:], jnp.zeros_like(value[:1])])

    policy = Policy(
        init=partial(_init, model),
        start=partial(_prefill, model, env.time_limit),
        act=act,
        evaluate=evaluate,
        sequential=True,
        rereads=True,
    )
    return policy, Critic(critic_init, values)


def scorer(
    env: Env,
    *,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    expansion: float = 2.67,
    dtype: str = "float32",
    remat: bool = False,
) -> Scorer:
    """A language model as a reward model: one number per completion. Settings are those of `transformer`."""
    judge = _builder(env, width, layers, heads, kv_heads, expansion, dtype, remat)(outputs=1, tied=False)

    def score(params: Tree, rollout: Rollout) -> Array:
        features, _ = _apply(judge, params, *_laid_out(rollout))
        end = rollout.context.tokens.shape[-1] + rollout.steps.mask.sum(0).astype(jnp.int32)
        at_end = jnp.take_along_axis(features, end[:, None, None], 1)[:, 0]
        return _value(judge, params, at_end)

    return Scorer(partial(_init, judge), score)


def completions(prompt: Prompt, tokens: Array, *, end: int) -> Rollout:
    """Completions as a policy would have collected them.

    Args:
        prompt: leaves `[B, P]`.
        tokens: `[B, T]`; what lies behind the first `end` is padding.
        end: the token that ends a completion. A row without one was cut off, and is real throughout.
    """
    action = tokens.T
    ended = jnp.cumsum(action == end, 0)
    mask = (ended - (action == end) == 0).astype(jnp.float32)
    first = jnp.take_along_axis(prompt.tokens, last_real(prompt.mask)[:, None], 1).T
    steps = Transition(
        obs=jnp.concatenate([first, action[:-1]]),
        action=action,
        log_prob=jnp.zeros_like(mask),
        reward=jnp.zeros_like(mask),
        discount=mask * (action != end),
        last=(ended > 0).at[-1].set(True),
        next_obs=action,
        mask=mask,
    )
    return Rollout(steps, memory=(), trains=mask, context=prompt)


def last_real(mask: Array) -> Array:
    """Index of the last true entry along the last axis."""
    return mask.shape[-1] - 1 - jnp.argmax(mask[..., ::-1], -1)


def features_of(model: Transformer, params: Tree, rollout: Rollout) -> Array:
    """The features from which step t of column b chose its token, `[T, B, width]`."""
    tokens, real = _laid_out(rollout)
    features, _ = _apply(model, params, tokens[:, :-1], real[:, :-1])
    return features[:, rollout.context.tokens.shape[-1] :].swapaxes(0, 1)


def _laid_out(rollout: Rollout) -> tuple[Array, Array]:
    """Tokens `[B, P + 1 + T]` and which of them are real: prompts, their last token once more, and completions.

    The last token of a prompt is the first that is acted on, so it is taken out of the prompt.
    """
    prompt, steps = rollout.context, rollout.steps
    written = jnp.concatenate([steps.obs[:1], steps.action]).T
    real = jnp.concatenate([_before_last(prompt.mask), jnp.ones(written.shape, bool)], 1)
    return jnp.concatenate([prompt.tokens, written], 1), real


def _before_last(mask: Array) -> Array:
    """The mask without its last true entry."""
    slots = lax.broadcasted_iota(jnp.int32, mask.shape, mask.ndim - 1)
    return mask & (slots != last_real(mask)[..., None])


def _prefill(model: Transformer, max_tokens: int, params: Tree, prompt: Prompt) -> Cache:
    """The cache after all of a prompt but its last token, with room for a completion."""
    real = _before_last(prompt.mask)
    _, (keys, values) = _apply(model, params, prompt.tokens, real)
    room = [(0, 0), (0, max_tokens), (0, 0), (0, 0)]
    slot = jnp.asarray(prompt.tokens.shape[-1], jnp.int32)
    return Cache(jnp.pad(keys, room), jnp.pad(values, room), jnp.pad(real, (0, max_tokens)), slot)


def _builder(
    env: Env, width: int, layers: int, heads: int, kv_heads: int, expansion: float, dtype: str, remat: bool
) -> Callable[..., Transformer]:
    """(outputs, tied) -> Transformer, the sizes checked."""
    if width % heads or heads % kv_heads or (width // heads) % 2:
        raise UserError(
            f"heads must divide the width into even parts and kv_heads must divide heads; width = {width}, "
            f"heads = {heads} and kv_heads = {kv_heads} were given."
        )
    if dtype not in DTYPES:
        raise UserError(f"dtype is one of {', '.join(DTYPES)}, not {dtype!r}.")
    return partial(
        Transformer,
        vocabulary=_vocabulary(env),
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        expansion=expansion,
        remat=remat,
        dtype=DTYPES[dtype],
    )


def _vocabulary(env: Env) -> int:
    if not isinstance(env.action_space, Discrete) or env.context is None:
        raise UserError(
            f"A transformer completes prompts, and {env.name} has none. Use an mlp, a cnn or a recurrent network."
        )
    return env.action_space.n


def _init(model: Transformer, key: Key) -> Tree:
    return model.init(key, jnp.zeros(2, jnp.int32), method="whole")


def _value(model: Transformer, params: Tree, features: Array) -> Array:
    return _apply(model, params, features, method="read_out")[..., 0]


def _apply(model: nn.Module, params: Tree, *inputs: Any, **options: Any) -> Any:
    return model.apply(params, *inputs, **options)
