"""The transformer: three ways of running it that must agree, and each part against a slow reference."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg import ladder, language, rollout, update, vectorize
from jaxpg.errors import UserError
from jaxpg.models import decoder, generation
from jaxpg.models.distributions import Categorical
from jaxpg.policy_gradient import policy_gradient
from jaxpg.types import Discrete, Env, Outcome, Params, Prompt, TimeStep

P, T, VOCABULARY, END = 5, 7, 11, 1
SIZES = {"width": 16, "layers": 2, "heads": 4, "kv_heads": 2}


def make_env(side="right"):
    """Prompts of 1 to P random tokens, padded with poison on one side; completions of up to T."""

    def reset(key):
        length_key, token_key = jax.random.split(key)
        length = jax.random.randint(length_key, (), 1, P + 1)
        tokens = jax.random.randint(token_key, (P,), 2, VOCABULARY)
        mask = jnp.arange(P) < length if side == "right" else jnp.arange(P) >= P - length
        prompt = Prompt(jnp.where(mask, tokens, VOCABULARY - 1), mask)
        return (prompt, jnp.zeros((), jnp.int32)), tokens[length - 1] if side == "right" else tokens[-1]

    def step(key, state, action):
        prompt, time = state
        ended = action == END
        last = ended | (time + 1 >= T)
        return (prompt, time + 1), TimeStep(action, jnp.zeros(()), 1.0 - ended, last)

    def outcome(state):
        return Outcome(state[1].astype(jnp.float32), {"tokens": state[1]})

    tokens = Discrete(VOCABULARY)
    return Env("toy", reset, step, tokens, tokens, T, context=lambda state: state[0], outcome=outcome)


ENV = make_env()


def collected(policy, params, env=ENV, seed=0, columns=24):
    collector = rollout.episodic(num_envs=columns)
    return jax.jit(lambda key: collector.collect(env, policy, params, (), key))(jax.random.key(seed))


def initial(policy, scale=3.0):
    """Parameters far enough from uniform for differences to show."""
    return jax.tree.map(lambda x: scale * x, jax.jit(policy.init)(jax.random.key(0)))


@pytest.mark.optimised
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_acting_said_is_what_evaluation_says(side, tied):
    env = make_env(side)
    policy, _ = language.transformer(env, **SIZES, tied=tied, temperature=1.5)
    params = initial(policy, 1.0 if tied else 3.0)
    _, part, _ = collected(policy, params, env)
    log_prob, entropy = policy.evaluate(params, part).log_prob_and_entropy(part.steps.action)
    lengths = part.steps.mask.sum(0)
    assert len(set(np.asarray(lengths))) > 3
    assert len(set(np.asarray(part.episodes.context.mask.sum(1)))) == P
    np.testing.assert_allclose(*(np.asarray(x * part.steps.mask) for x in (log_prob, part.steps.log_prob)), atol=1e-5)
    assert np.ptp(np.asarray(entropy)) > 0.1


def with_context(part, context):
    return part._replace(episodes=part.episodes._replace(context=context))


def test_padding_is_never_read():
    policy, _critic = language.transformer(ENV, **SIZES)
    params = initial(policy)
    _, part, _ = collected(policy, params)
    mask = part.episodes.context.mask
    poisoned = with_context(part, Prompt(jnp.where(mask, part.episodes.context.tokens, 3), mask))
    behind = jnp.where(part.steps.mask > 0, part.steps.action, 4)
    poisoned = poisoned._replace(steps=part.steps._replace(action=behind))
    for a, b in ((part, poisoned),):
        before, after = (policy.evaluate(params, x).log_prob(part.steps.action) * part.steps.mask for x in (a, b))
        np.testing.assert_array_equal(before, after)


def test_the_side_of_the_padding_changes_nothing():
    policy, _ = language.transformer(ENV, **SIZES)
    params = initial(policy)
    _, part, _ = collected(policy, params)
    length = part.episodes.context.mask.sum(1)
    shifted = jax.vmap(lambda x, n: jnp.roll(x, P - n))
    left = Prompt(shifted(part.episodes.context.tokens, length), shifted(part.episodes.context.mask, length))
    right, moved = (
        policy.evaluate(params, with_context(part, context)).log_prob(part.steps.action)
        for context in (part.episodes.context, left)
    )
    np.testing.assert_allclose(right * part.steps.mask, moved * part.steps.mask, atol=1e-5)


def test_a_token_knows_nothing_of_those_behind_it():
    policy, _ = language.transformer(ENV, **SIZES)
    params = initial(policy)
    _, part, _ = collected(policy, params)

    def log_prob(actions):
        steps = part.steps._replace(action=actions)
        return policy.evaluate(params, part._replace(steps=steps)).log_prob(part.steps.action)

    changed = part.steps.action.at[3].add(1) % VOCABULARY
    before, after = log_prob(part.steps.action), log_prob(changed)
    np.testing.assert_array_equal(before[:4], after[:4])
    assert (jnp.abs(before[4] - after[4]) > 1e-4).all()


def slow_forward(params, tokens, sizes, base=10_000.0):
    """Logits of one sequence without padding, in float64 and with loops."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params["params"])
    width, heads, kv_heads = sizes["width"], sizes["heads"], sizes["kv_heads"]
    d = width // heads

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    def turn(vector, position):
        pairs = vector[: d // 2] + 1j * vector[d // 2 :]
        pairs = pairs * np.exp(1j * position * base ** (-2 * np.arange(d // 2) / d))
        return np.concatenate([pairs.real, pairs.imag])

    x = p["embedding"]["embedding"][tokens] * width**0.5
    for i in range(sizes["layers"]):
        block = p[f"blocks_{i}"]
        h = norm(x, block["attention_norm"]["scale"])
        query = (h @ block["query"]["kernel"]).reshape(len(tokens), heads, d)
        key, value = np.split((h @ block["key_value"]["kernel"]).reshape(len(tokens), 2 * kv_heads, d), 2, 1)
        out = np.zeros((len(tokens), heads, d))
        for s in range(len(tokens)):
            for head in range(heads):
                mine = head // (heads // kv_heads)
                q = turn(query[s, head], s)
                score = np.array([q @ turn(key[j, mine], j) for j in range(s + 1)]) / d**0.5
                weight = np.exp(score - score.max())
                out[s, head] = weight / weight.sum() @ value[: s + 1, mine]
        x = x + out.reshape(len(tokens), -1) @ block["out"]["kernel"]
        gate, up = np.split(norm(x, block["mlp_norm"]["scale"]) @ block["gate_up"]["kernel"], 2, -1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ block["down"]["kernel"]
    return norm(x, p["norm"]["scale"]) @ p["head"]["kernel"]


def test_the_decoder_against_loops():
    policy, _ = language.transformer(ENV, **SIZES)
    params = initial(policy, 2.0)
    _, part, _ = collected(policy, params, columns=4)
    log_prob = policy.evaluate(params, part).log_prob(part.steps.action)
    for b in range(4):
        prompt = np.asarray(part.episodes.context.tokens[b])[np.asarray(part.episodes.context.mask[b])]
        action = np.asarray(part.steps.action[:, b])
        logits = slow_forward(params, np.concatenate([prompt, action[:-1]]), SIZES)[len(prompt) - 1 :]
        slow = logits[np.arange(T), action] - np.log(np.exp(logits).sum(-1))
        np.testing.assert_allclose(log_prob[:, b], slow, rtol=1e-4, atol=1e-4)


def test_attention_beside_the_one_of_jax():
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 6, heads, 8)) for i, heads in enumerate((4, 2, 2)))
    mask = jax.random.bernoulli(jax.random.key(3), 0.6, (2, 6, 6)) | jnp.eye(6, dtype=bool)[None]
    theirs = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
    k, v = jnp.moveaxis(k, -3, -1), v.swapaxes(-3, -2)
    np.testing.assert_allclose(decoder.attention(q, k, v, mask), theirs.reshape(2, 6, -1), atol=1e-5)
    assert np.isfinite(decoder.attention(q, k, v, jnp.zeros_like(mask))).all()


def test_rotation_sees_distances_only():
    q, k = (jax.random.normal(jax.random.key(i), (1, 1, 8)) for i in range(2))

    def product(a, b):
        a, b = (decoder.rotary_embedding(x, jnp.array([at])) for x, at in ((q, a), (k, b)))
        return float((a * b).sum())

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)
    assert abs(product(9, 4) - product(9, 5)) > 1e-3
    np.testing.assert_allclose(
        jnp.linalg.norm(decoder.rotary_embedding(q, jnp.array([7]))), jnp.linalg.norm(q), rtol=1e-5
    )


def loss_of(policy, part, params):
    log_prob, entropy = policy.evaluate(params, part).log_prob_and_entropy(part.steps.action)
    return (part.steps.mask * (log_prob + 0.1 * entropy)).sum()


@pytest.mark.parametrize("setting", [{"logit_chunks": 4}, {"logit_chunks": 5}, {"logit_chunks": 30}, {"remat": True}])
def test_saving_memory_changes_nothing(setting):
    plain, frugal = (language.transformer(ENV, **SIZES, **more)[0] for more in ({}, setting))
    params = initial(plain)
    _, part, _ = collected(plain, params)
    (a, da), (b, db) = (jax.jit(jax.value_and_grad(partial(loss_of, x, part)))(params) for x in (plain, frugal))
    np.testing.assert_allclose(a, b, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), da, db)


def kept_for_the_gradient(part, params, **setting):
    """The sizes of what the forward pass leaves for the backward pass."""
    policy, _ = language.transformer(ENV, **SIZES, **setting)
    _, backward = jax.eval_shape(lambda p: jax.vjp(partial(loss_of, policy, part), p), params)
    return [x.size for x in jax.tree.leaves(backward)]


def test_only_what_enters_a_block_is_kept_for_the_gradient():
    policy, _ = language.transformer(ENV, **SIZES)
    params = initial(policy)
    _, part, _ = collected(policy, params)
    plain, remat = (sum(kept_for_the_gradient(part, params, remat=x)) for x in (False, True))
    assert remat < 0.5 * plain


def test_logits_never_exist_whole():
    """Neither on the way forward nor on the way back, nor chunk by chunk in between."""
    policy, _ = language.transformer(ENV, **SIZES)
    params = initial(policy)
    _, part, _ = collected(policy, params)

    def widest(chunks):
        policy, _ = language.transformer(ENV, **SIZES, logit_chunks=chunks)
        program = str(jax.make_jaxpr(jax.grad(partial(loss_of, policy, part)))(params))
        shapes = [tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", program)]
        return max(math.prod(shape) for shape in shapes if shape[-1] == VOCABULARY)

    assert widest(1) == T * 24 * VOCABULARY
    assert widest(4) == T * 6 * VOCABULARY
    assert widest(5) == T * 5 * VOCABULARY  # which does not divide 24


def test_divergence_of_two_models():
    policy, _ = language.transformer(ENV, **SIZES, logit_chunks=2)
    params, other = initial(policy), initial(policy, 2.0)
    _, part, _ = collected(policy, params)
    p, q = policy.evaluate(params, part), policy.evaluate(other, part)
    whole = Categorical(p.logits(p.features)).kl(Categorical(q.logits(q.features)))
    np.testing.assert_allclose(p.kl(q), whole, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(p.entropy(), Categorical(p.logits(p.features)).entropy(), rtol=1e-5)


def test_half_precision_is_near_and_its_parameters_are_whole():
    exact, half = (language.transformer(ENV, **SIZES, dtype=dtype)[0] for dtype in ("float32", "bfloat16"))
    params = jax.jit(exact.init)(jax.random.key(0))
    _, part, _ = collected(exact, params)
    a, b = (x.evaluate(params, part).log_prob(part.steps.action) for x in (exact, half))
    assert b.dtype == jnp.float32
    features = jax.eval_shape(lambda params: half.evaluate(params, part).features, params)
    assert features.dtype == jnp.bfloat16  # not float16, in which gradients vanish
    assert 0 < float(jnp.abs(a - b).max()) < 0.05
    assert {x.dtype for x in jax.tree.leaves(half.init(jax.random.key(0)))} == {jnp.dtype("float32")}
    _, part, _ = collected(half, params)
    b = half.evaluate(params, part).log_prob(part.steps.action)
    assert float((jnp.abs(b - part.steps.log_prob) * part.steps.mask).max()) < 0.05


def test_completions_are_what_the_policy_would_have_collected():
    policy, _ = language.transformer(ENV, **SIZES)
    params = initial(policy)
    _, part, _ = collected(policy, params)
    tokens = jnp.where(part.steps.mask > 0, part.steps.action, 0).T
    made = generation.completion_rollout(part.episodes.context, tokens, end=END)
    real = np.asarray(part.steps.mask) > 0
    for name in ("obs", "action", "discount", "last", "mask"):
        ours, theirs = (np.asarray(getattr(x.steps, name)) for x in (made, part))
        np.testing.assert_array_equal(ours[real], theirs[real], err_msg=name)
    np.testing.assert_array_equal(made.steps.mask, part.steps.mask)
    assert (np.asarray(rollout.truncated(made.steps)) == np.asarray((tokens != END).all(1))).all()


def test_the_end_is_real_even_if_it_doubles_as_padding():
    prompt = Prompt(jnp.full((2, P), 2), jnp.ones((2, P), bool))
    made = generation.completion_rollout(prompt, jnp.array([[5, 6, END, END, END], [5, 6, 7, 8, 9]]), end=END)
    np.testing.assert_array_equal(made.loss_mask.T, [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(made.steps.last.T[:, :3], [[0, 0, 1], [0, 0, 0]])
    np.testing.assert_array_equal(rollout.truncated(made.steps), [False, True])


def test_a_reward_model_reads_the_last_real_token():
    scorer = language.transformer_reward_model(ENV, **SIZES)
    params = jax.jit(scorer.init)(jax.random.key(1))
    prompt = Prompt(jnp.full((3, P), 2), jnp.ones((3, P), bool))
    rows = jnp.array([[5, END, 8, 8, 8, 8, 8], [5, END, 9, 9, 9, 9, 9], [6, END, 8, 8, 8, 8, 8]])
    score = scorer.score(params, generation.completion_rollout(prompt, rows, end=END))
    assert score[0] == score[1]
    assert abs(float(score[0] - score[2])) > 1e-4
    # A completion that fills its width ends with its last action, which no later step has seen.
    full = jnp.full((2, T), 5).at[1, -1].set(6)
    score = scorer.score(params, generation.completion_rollout(Prompt(*(x[:2] for x in prompt)), full, end=END))
    assert abs(float(score[0] - score[1])) > 1e-4


@pytest.mark.parametrize("shared", [True, False])
def test_values_shift_by_one_and_end_in_nothing(shared):
    policy, critic = language.transformer(ENV, **SIZES, shared=shared)
    params = Params(initial(policy), critic.init(jax.random.key(2)))
    _, part, _ = collected(policy, params.policy)
    before, after = critic.values(params, part)
    assert before.shape == (T, 24)
    assert float(jnp.std(before)) > 0
    np.testing.assert_array_equal(after[:-1], before[1:])
    np.testing.assert_array_equal(after[-1], 0)
    policy_gradient = jax.grad(lambda p: critic.values(p, part)[0].sum())(params).policy
    assert any(np.asarray(x).any() for x in jax.tree.leaves(policy_gradient)) == shared


def test_generation_is_a_rollout_without_its_bookkeeping():
    policy, _ = language.transformer(ENV, **SIZES)
    params = initial(policy)
    _, part, _ = collected(policy, params, columns=8)

    def written(key, **settings):
        return jax.vmap(
            lambda prompt: generation.generate(policy, params, prompt, key, end=END, max_tokens=T, **settings)
        )(part.episodes.context)

    greedy = written(jax.random.key(0), greedy=True)
    made = generation.completion_rollout(part.episodes.context, greedy, end=END)
    distribution = policy.evaluate(params, made)
    modes = Categorical(distribution.logits(distribution.features)).mode()
    np.testing.assert_array_equal(greedy.T * made.loss_mask, modes * made.loss_mask)
    np.testing.assert_array_equal(written(jax.random.key(1), top_k=1), greedy)
    np.testing.assert_array_equal(written(jax.random.key(1), temperature=1e-4), greedy)
    np.testing.assert_array_equal(written(jax.random.key(1), top_p=1e-6), greedy)
    assert (np.asarray(written(jax.random.key(1))) != np.asarray(greedy)).any()
    behind = np.cumsum(np.asarray(greedy) == END, 1) > 0
    assert (np.asarray(greedy)[behind] == END).all()


def test_collecting_ends_with_the_last_episode():
    policy, _ = language.transformer(ENV, **SIZES)
    params = initial(policy)
    _, part, stats = collected(policy, params, columns=2, seed=2)
    longest = int(part.steps.mask.sum(0).max())
    assert longest < T  # or this seed shows nothing
    np.testing.assert_array_equal(part.steps.action[longest:], 0)
    lengths = np.asarray(part.steps.mask.sum(0))
    np.testing.assert_array_equal(part.episodes.outcome.parts["tokens"], lengths)
    reward = np.asarray(part.steps.reward)
    np.testing.assert_array_equal(reward.sum(0), lengths)
    np.testing.assert_array_equal(reward[lengths.astype(int) - 1, np.arange(2)], lengths)
    assert float(stats.return_sum) == lengths.sum() == float(stats.steps)


def test_seeds_side_by_side_wait_for_the_longest_and_change_nothing():
    policy, _ = language.transformer(ENV, **SIZES)
    params = initial(policy)
    collector = rollout.episodic(num_envs=3)
    keys = jax.random.split(jax.random.key(5), 4)

    def one(key):
        return collector.collect(ENV, policy, params, (), key)[1].steps

    together, alone = jax.jit(jax.vmap(one))(keys), jax.lax.map(jax.jit(one), keys)
    real = np.asarray(alone.mask) > 0
    np.testing.assert_array_equal(together.mask, alone.mask)
    np.testing.assert_array_equal(np.asarray(together.action)[real], np.asarray(alone.action)[real])
    assert " select_n" not in str(jax.make_jaxpr(jax.vmap(vectorize.any_in_batch))(jnp.zeros((4, 2), bool)))


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "rlhf"])
def test_parts_of_a_batch_give_the_gradient_of_the_whole(algorithm):
    """Whatever the split, with completions of all lengths: the weights count tokens of the whole batch."""
    networks = language.transformer(ENV, **SIZES)
    settings = {"num_envs": 16, "epochs": 1, "num_minibatches": 1, "learning_rate": 0.1, "max_grad_norm": None}

    def updated(chunk_rows):
        record = ladder.ALGORITHMS[algorithm](**settings, chunk_rows=chunk_rows)._replace(optimizer=update.sgd)
        learner = policy_gradient(ENV, *networks, record)
        return jax.jit(lambda key: learner.step(learner.init(key), key)[0].params)(jax.random.key(0))

    whole = updated(16)
    near = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(near, updated(3), whole)  # 3 does not divide: parts of 2 then
    start = networks[0].init(jax.random.split(jax.random.key(0), 3)[0])
    moved = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), whole.policy, start)
    assert max(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"width": 18}, "heads must divide the width"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads must divide heads"),
        ({"dtype": "float16"}, "no dtype 'float16'. Did you mean 'bfloat16'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        language.transformer(ENV, **{**SIZES, **settings})


def test_an_environment_without_prompts_is_refused():
    with pytest.raises(UserError, match="completes prompts"):
        language.transformer(ENV._replace(context=None))
    policy, _ = language.transformer(ENV, **SIZES)
    with pytest.raises(UserError, match="num_steps = none"):
        rollout.continuing(num_envs=2, num_steps=3).init(ENV, policy, (), jax.random.key(0))
