"""A causal transformer as Policy, Critic and reward model: a prompt is the context, a token is an action.

One network (decoder.py) runs in three ways: over a whole batch of completions (`evaluate`, to learn from), over a
prompt (`start`, which fills the KV cache) and for one token (`act`, which reads and extends it).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.errors import UserError, refuse_unknown
from jaxpg.models.decoder import Cache, Decoder
from jaxpg.models.distributions import Categorical
from jaxpg.models.generation import last_real
from jaxpg.types import Array, Critic, Discrete, Env, Key, Params, Policy, Prompt, Rollout, Tree

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class RewardModel(NamedTuple):
    """A reward model.

    init(key) -> params
    score(params, rollout) -> [B] float32, read at the last real token of each completion.
    """

    init: Callable[[Key], Tree]
    score: Callable[[Tree, Rollout], Array]


class ChunkedCategorical(NamedTuple):
    """The distributions over the next token at `[T, B]` places, as features and the weights that read logits off them.

    Logits are made for a `1/chunks` share of the columns at a time, rounded up, and made again for the gradient, so
    that `[T, B, vocabulary]` never exists whole.

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

    def kl(self, other: ChunkedCategorical) -> Array:
        """KL(self ‖ other) at every place."""
        return self._by_chunks(
            lambda x: Categorical(self.logits(x[0])).kl(Categorical(other.logits(x[1]))),
            (self.features, other.features),
        )

    def _by_chunks(self, function: Callable[[Any], Any], inputs: tuple[Array, ...]) -> Any:
        if self.chunks == 1:
            return function(inputs)
        columns = self.features.shape[1]
        size = -(-columns // self.chunks)

        def split(x: Array) -> Array:
            padded = jnp.pad(x, [(0, 0), (0, -columns % size), *[(0, 0)] * (x.ndim - 2)])
            return padded.reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)

        joined = lax.map(jax.checkpoint(function), jax.tree.map(split, inputs))
        return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(x.shape[1], -1)[:, :columns], joined)


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
        logit_chunks: make the logits of a batch in at most so many parts, never all at once.
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

    def evaluate(params: Tree, rollout: Rollout) -> ChunkedCategorical:
        return ChunkedCategorical(
            lambda x: distribution(params, x).logits, features_of(model, params, rollout), logit_chunks
        )

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
        needs_trajectories=True,
        evaluates_from_context=True,
    )
    return policy, Critic(critic_init, values)


def transformer_reward_model(
    env: Env,
    *,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    expansion: float = 2.67,
    dtype: str = "float32",
    remat: bool = False,
) -> RewardModel:
    """A language model as a reward model: one number per completion. Settings are those of `transformer`."""
    judge = _builder(env, width, layers, heads, kv_heads, expansion, dtype, remat)(outputs=1, tied=False)

    def score(params: Tree, rollout: Rollout) -> Array:
        features, _ = _apply(judge, params, *_sequence(rollout))
        end = rollout.episodes.context.tokens.shape[-1] + rollout.steps.mask.sum(0).astype(jnp.int32)
        at_end = jnp.take_along_axis(features, end[:, None, None], 1)[:, 0]
        return _value(judge, params, at_end)

    return RewardModel(partial(_init, judge), score)


def features_of(model: Decoder, params: Tree, rollout: Rollout) -> Array:
    """The features from which step t of column b chose its token, `[T, B, width]`."""
    tokens, real = _sequence(rollout)
    features, _ = _apply(model, params, tokens[:, :-1], real[:, :-1])
    return features[:, rollout.episodes.context.tokens.shape[-1] :].swapaxes(0, 1)


def _sequence(rollout: Rollout) -> tuple[Array, Array]:
    """Tokens `[B, P + 1 + T]` and which of them are real: prompts, their last token once more, and completions.

    The last token of a prompt is the first that is acted on, so it is taken out of the prompt.
    """
    prompt, steps = rollout.episodes.context, rollout.steps
    written = jnp.concatenate([steps.obs[:1], steps.action]).T
    real = jnp.concatenate([_before_last(prompt.mask), jnp.ones(written.shape, bool)], 1)
    return jnp.concatenate([prompt.tokens, written], 1), real


def _before_last(mask: Array) -> Array:
    """The mask without its last true entry."""
    slots = lax.broadcasted_iota(jnp.int32, mask.shape, mask.ndim - 1)
    return mask & (slots != last_real(mask)[..., None])


def _prefill(model: Decoder, max_tokens: int, params: Tree, prompt: Prompt) -> Cache:
    """The cache after all of a prompt but its last token, with room for a completion."""
    real = _before_last(prompt.mask)
    _, cached = _apply(model, params, prompt.tokens, real)
    room = (0, max_tokens)
    keys = tuple(jnp.pad(key, [(0, 0), (0, 0), room]) for key, _ in cached)
    values = tuple(jnp.pad(value, [(0, 0), room, (0, 0)]) for _, value in cached)
    slot = jnp.asarray(prompt.tokens.shape[-1], jnp.int32)
    return Cache(keys, values, jnp.pad(real, room), slot)


def _builder(
    env: Env, width: int, layers: int, heads: int, kv_heads: int, expansion: float, dtype: str, remat: bool
) -> Callable[..., Decoder]:
    """(outputs, tied) -> Decoder, the sizes checked."""
    if width % heads or heads % kv_heads or (width // heads) % 2:
        raise UserError(
            f"heads must divide the width into even parts and kv_heads must divide heads; width = {width}, "
            f"heads = {heads} and kv_heads = {kv_heads} were given."
        )
    if dtype not in DTYPES:
        refuse_unknown("dtype", dtype, DTYPES)
    return partial(
        Decoder,
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


def _init(model: Decoder, key: Key) -> Tree:
    return model.init(key, jnp.zeros(2, jnp.int32), method="whole")


def _value(model: Decoder, params: Tree, features: Array) -> Array:
    return _apply(model, params, features, method="read_out")[..., 0]


def _apply(model: nn.Module, params: Tree, *inputs: Any, **options: Any) -> Any:
    return model.apply(params, *inputs, **options)
