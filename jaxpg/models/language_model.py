"""A causal transformer as Policy, Critic and reward model: a prompt is the context, a token is an action.

One network (decoder.py) is used in three ways: on a whole batch of completions (`evaluate`, for learning), on a prompt
(`start`, which fills the KV cache) and on one token (`act`, which uses and extends it).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.errors import UserError, check_record
from jaxpg.models.decoder import DTYPES, Decoder, DecoderConfig, KeysValues, KVCache
from jaxpg.models.distributions import Categorical
from jaxpg.models.layers import apply
from jaxpg.parallel import collectives
from jaxpg.types import (
    Array,
    Critic,
    Discrete,
    Env,
    JointEvaluation,
    Key,
    PackedTexts,
    Params,
    Policy,
    Prompt,
    Rollout,
    Tree,
)
from jaxpg.user_input.domains import check_number, check_whole, domain_of


class RewardModel(NamedTuple):
    """A model of the reward of completions.

    init(key) -> params
    score(params, rollout) -> [B] float32, the output at the last real token of each completion.
    token_scores(params, rollout) -> [T, B] float32, the output at every token of each completion, which has seen the
        tokens up to it.
    """

    init: Callable[[Key], Tree]
    score: Callable[[Tree, Rollout], Array]
    token_scores: Callable[[Tree, Rollout], Array]


class ChunkedCategorical(NamedTuple):
    """Categorical distributions over the next token, `[T, B]`, whose logits are computed in chunks of columns.

    It replaces `Categorical(logits(features))` where logits `[T, B, vocabulary]` do not fit into memory, on every
    platform: they exist for one chunk of ceil(B / chunks) columns at a time and are computed again for the gradient.
    One chunk is the plain Categorical.

    logits(features) -> [..., vocabulary]: the last layer.
    features: [T, B, width], its input.
    chunks: static.
    """

    logits: Callable[[Array], Array]
    features: Array
    chunks: int

    def log_prob_and_entropy(self, action: Array) -> tuple[Array, Array]:
        """log p(action) for `action` `[T, B]`, and the entropy in nats."""

        def of_chunk(inputs: tuple[Array, Array]) -> tuple[Array, Array]:
            features, action = inputs
            return Categorical(self.logits(features)).log_prob_and_entropy(action)

        return self._by_chunks(of_chunk, (self.features, action))

    def log_prob(self, action: Array) -> Array:
        return self.log_prob_and_entropy(action)[0]

    def entropy(self) -> Array:
        return self._by_chunks(lambda x: Categorical(self.logits(x[0])).entropy(), (self.features,))

    def kl(self, other: ChunkedCategorical) -> Array:
        """KL(self ‖ other), `[T, B]`."""
        return self._by_chunks(
            lambda x: Categorical(self.logits(x[0])).kl(Categorical(other.logits(x[1]))),
            (self.features, other.features),
        )

    def _by_chunks(self, function: Callable[[Any], Any], inputs: tuple[Array, ...]) -> Any:
        """`function(inputs)` of arrays `[T, B, ...]`, on one chunk of columns after the other.

        Neighbouring columns are in different chunks: devices that hold neighbours have as much of every chunk.
        """
        if self.chunks == 1:
            return function(inputs)
        columns = self.features.shape[1]
        size = -(-columns // self.chunks)

        def split(x: Array) -> Array:
            padded = jnp.pad(x, [(0, 0), (0, -columns % size), *[(0, 0)] * (x.ndim - 2)])
            return jnp.moveaxis(padded.reshape(x.shape[0], size, -1, *x.shape[2:]), 2, 0)

        chunks = lax.map(jax.checkpoint(function), jax.tree.map(split, inputs))
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2).reshape(x.shape[1], -1)[:, :columns], chunks)


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
    """A language model as a policy over tokens, and a critic of the same architecture.

    Args:
        width: of the features between layers.
        layers: blocks of attention and SwiGLU.
        heads: queries per token and layer; must divide the width.
        kv_heads: keys and values per token and layer, each shared by heads / kv_heads queries.
        expansion: width of the SwiGLU layer, as a multiple of the width; it is rounded up to a multiple of 8.
        tied: the embedding is also the output layer.
        dtype: of the arithmetic, float32 or bfloat16; parameters, softmax and log-probabilities stay float32. Logits,
            and the values of a critic of its own, are products in this arithmetic: in bfloat16 they have 8 bits.
        remat: store only the inputs of the blocks for the gradient, and recompute the rest.
        logit_chunks: compute the logits of a batch in at most this many chunks, one at a time.
        temperature: of the policy, in acting and in learning alike.
        shared: the critic uses the policy's features and adds only a head.

    Raises:
        UserError: numbers outside of their domains, sizes that do not divide, an unknown dtype, or an environment that
            has no prompts or whose actions are not tokens.
    """
    check_whole("logit_chunks", logit_chunks)
    if not isinstance(temperature, jax.core.Tracer):
        check_number("temperature", temperature, domain_of("temperature"))
    config = DecoderConfig(width, layers, heads, kv_heads, expansion, dtype, remat)
    model = _decoder(env, config, tied=tied)

    def distribution(params: Tree, features: Array) -> Categorical:
        return Categorical(apply(model, params, features, method="read_out") / temperature)

    def act(params: Tree, cache: KVCache, token: Array) -> tuple[Categorical, KVCache]:
        features, cache = apply(model, params, cache, token, method="step")
        return distribution(params, features), cache

    def of_features(params: Tree, features: Array) -> ChunkedCategorical:
        return ChunkedCategorical(lambda x: distribution(params, x).logits, features, logit_chunks)

    def evaluate(params: Tree, rollout: Rollout) -> ChunkedCategorical:
        params = _gathered(config, params)
        return of_features(params, features_of(model, params, rollout))

    policy = Policy(
        init=partial(_init, model),
        start=partial(_prefill, model, env.time_limit),
        act=act,
        evaluate=evaluate,
        needs_trajectories=True,
        evaluates_from_context=True,
        evaluates_packed=True,
        read_prompts=partial(_read_prompts, model),
        acting_params=partial(_in_arithmetic, config),
        acts_rounded=dtype != "float32",
        with_room=_with_room,
        max_steps=env.time_limit,
    )
    if not shared:
        return policy, _separate_critic(_decoder(env, config, outputs=1))
    return policy, _shared_critic(model, evaluate, of_features)


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
    """A language model as a reward model: one number per completion, or one per token.

    The settings are those settings of `transformer` that fix the architecture.
    """
    model = _decoder(env, DecoderConfig(width, layers, heads, kv_heads, expansion, dtype, remat), outputs=1)

    def score(params: Tree, rollout: Rollout) -> Array:
        features, _ = apply(model, params, *_sequence(rollout))
        end = rollout.episodes.context.tokens.shape[-1] + rollout.steps.mask.sum(0).astype(jnp.int32)
        at_end = jnp.take_along_axis(features, end[:, None, None], 1)[:, 0]
        return _value(model, params, at_end)

    def token_scores(params: Tree, rollout: Rollout) -> Array:
        features, _ = apply(model, params, *_sequence(rollout))
        return _value(model, params, features[:, rollout.episodes.context.tokens.shape[-1] + 1 :]).T

    return RewardModel(partial(_init, model), score, token_scores)


def _shared_critic(model: Decoder, evaluate: Callable[..., Any], of_features: Callable[[Tree, Array], Any]) -> Critic:
    """A linear layer on the policy's features; `of_features(params, features)` is what `evaluate` makes of them."""
    head = nn.Dense(1)

    def init(key: Key) -> Tree:
        return head.init(key, jnp.zeros(model.config.width))

    def value(params: Params, features: Array) -> Array:
        return apply(head, params.critic, features)[..., 0]

    def values(params: Params, rollout: Rollout) -> tuple[Array, Array]:
        features = features_of(model, _gathered(model.config, params.policy), rollout)
        return _with_successors(value(params, features), rollout)

    def both(params: Params, rollout: Rollout) -> tuple[Any, Array]:
        of_policy = _gathered(model.config, params.policy)
        features = features_of(model, of_policy, rollout)
        return of_features(of_policy, features), value(params, features)

    return Critic(init, values, evaluates_packed=True, joint=JointEvaluation(evaluate, values, both))


def _separate_critic(model: Decoder) -> Critic:
    """A decoder that shares no parameters with the policy."""

    def values(params: Params, rollout: Rollout) -> tuple[Array, Array]:
        of_critic = _gathered(model.config, params.critic)
        return _with_successors(_value(model, of_critic, features_of(model, of_critic, rollout)), rollout)

    return Critic(partial(_init, model), values, evaluates_packed=True)


def _with_successors(value: Array, rollout: Rollout) -> tuple[Array, Array]:
    """V(obs) and V of the successors. After the last row it is 0: the completion ended or has used up its tokens."""
    following = jnp.concatenate([value[1:], jnp.zeros_like(value[:1])])
    if isinstance(rollout.episodes.context, PackedTexts):
        text = rollout.episodes.context.text.T
        following = following.at[:-1].multiply(text[1:] == text[:-1])
    return value, following


def features_of(model: Decoder, params: Tree, rollout: Rollout) -> Array:
    """The features from which step t of column b chose its token, `[T, B, width]`."""
    if isinstance(rollout.episodes.context, PackedTexts):
        return apply(model, params, rollout.episodes.context, method="packed").swapaxes(0, 1)
    tokens, real = _sequence(rollout)
    features, _ = apply(model, params, tokens[:, :-1], real[:, :-1])
    return features[:, rollout.episodes.context.tokens.shape[-1] :].swapaxes(0, 1)


def _sequence(rollout: Rollout) -> tuple[Array, Array]:
    """Tokens `[B, P + 1 + T]` and which of them are real: prompts, their last token again, and completions.

    The last token of a prompt is the first observation, so it is masked in the prompt.
    """
    prompt, steps = rollout.episodes.context, rollout.steps
    following = jnp.concatenate([steps.obs[:1], steps.action]).T
    real = jnp.concatenate([prompt.mask_before_last(), jnp.ones(following.shape, bool)], 1)
    return jnp.concatenate([prompt.tokens, following], 1), real


def _in_arithmetic(config: DecoderConfig, params: Tree) -> Tree:
    """The parameters with all matrices in the dtype of the arithmetic, to which every layer would cast its own.

    With bfloat16 there are half as many bytes to read at every token, and to gather once, as with float32.
    """
    return jax.tree.map(lambda x: x.astype(DTYPES[config.dtype]) if x.ndim > 1 else x, params)


def _gathered(config: DecoderConfig, params: Tree) -> Tree:
    """The parameters with all of them on every device of SHARD, as a batch is worked through; others stay as they are.

    Where blocks are recomputed, to save memory, theirs are gathered one after the other (`Decoder._scan_blocks`).
    """
    if not config.remat:
        return collectives.gathered(params)
    top = {name: x if name.startswith("blocks_") else collectives.gathered(x) for name, x in params["params"].items()}
    return {"params": top}


def _read_prompts(model: Decoder, params: Tree, prompts: Prompt) -> list[KeysValues]:
    """The keys and values of all tokens but the last of prompts, `[N, P]`."""
    return apply(model, _gathered(model.config, params), prompts.tokens, prompts.mask_before_last())[1]


def _prefill(model: Decoder, max_tokens: int, params: Tree, prompt: Prompt) -> KVCache:
    """The cache of all tokens of a prompt but the last, with room for a completion."""
    real = prompt.mask_before_last()
    _, keys_values = apply(model, params, prompt.tokens, real)
    keys, values = zip(*keys_values, strict=True)
    return _with_room(KVCache(keys, values, real, jnp.asarray(prompt.tokens.shape[-1], jnp.int32)), max_tokens)


def _with_room(cache: KVCache, tokens: int) -> KVCache:
    """The cache of one sequence or of several with this many slots more, or less, at its end."""

    def pad(x: Array, axis: int) -> Array:
        ends = [(0, 0, 0)] * x.ndim
        ends[axis] = (0, tokens, 0)
        return lax.pad(x, jnp.zeros((), x.dtype), ends)

    keys, values = tuple(pad(x, -1) for x in cache.keys), tuple(pad(x, -2) for x in cache.values)
    return KVCache(keys, values, pad(cache.real, -1), cache.slot)


def _decoder(env: Env, config: DecoderConfig, *, outputs: int | None = None, tied: bool = False) -> Decoder:
    """A decoder of the environment's tokens with `outputs` numbers per token, by default a logit for every token.

    Raises:
        UserError: the config is not valid, or the environment has no prompts or its actions are not tokens.
    """
    config.check()
    check_record("A transformer", env, Env, 'envs.make("sort")')
    if not isinstance(env.action_space, Discrete) or env.context is None:
        raise UserError(
            f"A transformer completes prompts, and {env.name} has none. Use an mlp, a cnn or a recurrent network."
        )
    vocabulary = env.action_space.n
    return Decoder(config, vocabulary, outputs or vocabulary, tied)


def _init(model: Decoder, key: Key) -> Tree:
    return model.init(key, jnp.zeros(2, jnp.int32), method="outputs_of")


def _value(model: Decoder, params: Tree, features: Array) -> Array:
    """The only output of the model, from its features."""
    return apply(model, params, features, method="read_out")[..., 0]
