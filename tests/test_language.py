"""The transformer: three ways of running it that must agree, and each part against a slow reference."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import Mesh

from jaxpg import envs, ladder, language, rollout, update, vectorize
from jaxpg.errors import UserError
from jaxpg.models import decoder, generation
from jaxpg.models.distributions import Categorical
from jaxpg.parallel import collectives
from jaxpg.policy_gradient import policy_gradient
from jaxpg.types import Critic, Discrete, Env, Outcome, Params, Policy, Prompt, Rollout, TimeStep, Tree

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
    return tiny.jit(lambda key: collector.collect(env, policy, params, (), key))(jax.random.key(seed))


def initial(policy, scale=3.0):
    """Parameters far enough from uniform for differences to show."""
    return jax.tree.map(lambda x: scale * x, tiny.jit(policy.init)(jax.random.key(0)))


def log_prob_by(policy):
    """The compiled `params, part -> log-probabilities` of the actions of a rollout, [T, B]."""
    return tiny.jit(lambda params, part: policy.evaluate(params, part).log_prob(part.steps.action))


class Model(NamedTuple):
    """What most tests look at: a transformer, completions it has written, and how it reads them."""

    policy: Policy
    critic: Critic
    params: Tree
    part: Rollout
    log_prob: Callable


@pytest.fixture(scope="module")
def model():
    policy, critic = language.transformer(ENV, **SIZES)
    params = initial(policy)
    _, part, _ = collected(policy, params)
    return Model(policy, critic, params, part, log_prob_by(policy))


@pytest.mark.optimised
@pytest.mark.parametrize(
    ("tied", "side"),
    [
        (True, "left"),
        (False, "right"),
        pytest.param(True, "right", marks=pytest.mark.full),
        pytest.param(False, "left", marks=pytest.mark.full),
    ],
)
def test_what_acting_said_is_what_evaluation_says(side, tied):
    env = make_env(side)
    policy, _ = language.transformer(env, **SIZES, tied=tied, temperature=1.5)
    params = initial(policy, 1.0 if tied else 3.0)
    _, part, _ = collected(policy, params, env)

    @tiny.jit
    def evaluated(params, part):
        return policy.evaluate(params, part).log_prob_and_entropy(part.steps.action)

    log_prob, entropy = evaluated(params, part)
    lengths = part.steps.mask.sum(0)
    assert len(set(np.asarray(lengths))) > 3
    assert len(set(np.asarray(part.episodes.context.mask.sum(1)))) == P
    told, said = (np.asarray(x * part.steps.mask) for x in (log_prob, part.steps.log_prob))
    np.testing.assert_allclose(told, said, rtol=1e-5, atol=1e-5)
    assert np.ptp(np.asarray(entropy)) > 0.1


def with_context(part, context):
    return part._replace(episodes=part.episodes._replace(context=context))


def test_padding_is_never_read(model):
    part = model.part
    mask = part.episodes.context.mask
    poisoned = with_context(part, Prompt(jnp.where(mask, part.episodes.context.tokens, 3), mask))
    behind = jnp.where(part.steps.mask > 0, part.steps.action, 4)
    poisoned = poisoned._replace(steps=part.steps._replace(action=behind))
    before, after = (model.log_prob(model.params, x) * part.steps.mask for x in (part, poisoned))
    np.testing.assert_array_equal(before, after)


def test_the_side_of_the_padding_changes_nothing(model):
    part = model.part
    length = part.episodes.context.mask.sum(1)
    shifted = jax.vmap(lambda x, n: jnp.roll(x, P - n))
    left = Prompt(shifted(part.episodes.context.tokens, length), shifted(part.episodes.context.mask, length))
    right, moved = (
        model.log_prob(model.params, with_context(part, context)) for context in (part.episodes.context, left)
    )
    np.testing.assert_allclose(right * part.steps.mask, moved * part.steps.mask, atol=1e-5)


def test_a_token_knows_nothing_of_those_behind_it(model):
    part = model.part

    @tiny.jit
    def log_prob(actions):
        steps = part.steps._replace(action=actions)
        return model.policy.evaluate(model.params, part._replace(steps=steps)).log_prob(part.steps.action)

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
        of_heads = np.split(h @ block["qkv"]["kernel"], kv_heads, 1)  # of each key: its queries, the key, the value
        pieces = [x.reshape(len(tokens), -1, d) for x in of_heads]
        query = np.concatenate([x[:, :-2] for x in pieces], 1)
        key, value = (np.stack([x[:, i] for x in pieces], 1) for i in (-2, -1))
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


def test_the_decoder_against_loops(model):
    part, params = model.part, initial(model.policy, 2.0)
    log_prob = model.log_prob(params, part)
    for b in range(4):
        prompt = np.asarray(part.episodes.context.tokens[b])[np.asarray(part.episodes.context.mask[b])]
        action = np.asarray(part.steps.action[:, b])
        logits = slow_forward(params, np.concatenate([prompt, action[:-1]]), SIZES)[len(prompt) - 1 :]
        slow = logits[np.arange(T), action] - np.log(np.exp(logits).sum(-1))
        np.testing.assert_allclose(log_prob[:, b], slow, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("at_once", [7, 6, 3, 1])
def test_attention_beside_the_one_of_jax(at_once, machine_with):
    """All queries at once, and in 2, 3 and 7 blocks, of which the last is filled up; its result and its derivatives."""
    machine_with(queries_at_once=at_once)
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 7, heads, 8)) for i, heads in enumerate((4, 2, 2)))
    mask = jax.random.bernoulli(jax.random.key(3), 0.6, (2, 7, 7)) | jnp.eye(7, dtype=bool)[None]

    def ours(q, k, v):
        return decoder.attention(q, jnp.moveaxis(k, -3, -1), v.swapaxes(-3, -2), mask)

    def theirs(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None]).reshape(2, 7, -1)

    def with_gradient(function):
        weighted = lambda *x: (function(*x) * jnp.arange(32.0)[None, None]).sum()  # noqa: E731
        return function(q, k, v), tiny.jit(jax.grad(weighted, argnums=(0, 1, 2)))(q, k, v)

    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-4), with_gradient(ours), with_gradient(theirs))
    np.testing.assert_allclose(ours(q, k, v), theirs(q, k, v), atol=1e-5)
    nowhere = decoder.attention(q, jnp.moveaxis(k, -3, -1), v.swapaxes(-3, -2), jnp.zeros_like(mask))
    assert np.isfinite(nowhere).all()


@pytest.mark.full
def test_the_scores_of_a_long_text_are_never_whole(machine_with):
    """The gradient by 2,048 queries of two heads, whose scores are 34 MB."""
    shapes = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((2048, 2, 8), (2, 8, 2048), (2, 2048, 8))]
    mask = jax.ShapeDtypeStruct((2048, 2048), bool)

    def temporary_bytes(at_once):
        machine_with(queries_at_once=at_once)
        gradient = jax.grad(lambda *x: (decoder.attention(*x) ** 2).sum(), argnums=(0, 1, 2))  # traced anew
        return jax.jit(gradient).lower(*shapes, mask).compile().memory_analysis().temp_size_in_bytes

    whole, in_blocks = temporary_bytes(2048), temporary_bytes(256)
    assert whole > 2 * 2048**2 * 4
    assert in_blocks < 0.2 * whole


def test_the_decoder_begins_with_weights_of_its_widths():
    """What a block adds is smaller the more blocks there are; a SwiGLU layer has a multiple of 8 features."""
    policy, _ = language.transformer(ENV, width=64, layers=2, heads=4, kv_heads=2)
    params = tiny.jit(policy.init)(jax.random.key(0))["params"]
    inward, outward = 64**-0.5, (2 * 2 * 64) ** -0.5
    for i in range(2):
        block = {name: x["kernel"] for name, x in params[f"blocks_{i}"].items() if "kernel" in x}
        assert block["gate_up"].shape == (64, 2 * 176)  # 2.67 x 64 is nearly 171
        for name, std in {"qkv": inward, "gate_up": inward, "out": outward, "down": outward}.items():
            np.testing.assert_allclose(block[name].std(), std, rtol=0.05)
    np.testing.assert_allclose(params["embedding"]["embedding"].std(), inward, rtol=0.15)
    np.testing.assert_allclose(params["head"]["kernel"].std(), 0.1 * inward, rtol=0.15)


def test_rotation_sees_distances_only():
    q, k = (jax.random.normal(jax.random.key(i), (1, 1, 8)) for i in range(2))

    def rotated(x, at):
        return decoder.rotary_embedding(x, decoder.rotation_at(jnp.array([at]), 8))

    def product(a, b):
        return float((rotated(q, a) * rotated(k, b)).sum())

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)
    assert abs(product(9, 4) - product(9, 5)) > 1e-3
    np.testing.assert_allclose(jnp.linalg.norm(rotated(q, 7)), jnp.linalg.norm(q), rtol=1e-5)


def loss_of(policy, part, params):
    log_prob, entropy = policy.evaluate(params, part).log_prob_and_entropy(part.steps.action)
    return (part.steps.mask * (log_prob + 0.1 * entropy)).sum()


@pytest.fixture(scope="module")
def loss_and_gradient(model):
    return tiny.jit(jax.value_and_grad(partial(loss_of, model.policy, model.part)))(model.params)


@pytest.mark.parametrize(
    ("setting", "loops"),
    [
        *(({"logit_chunks": n}, True) for n in (4, 5, 30)),
        *(({"remat": True}, loops) for loops in (True, False)),
    ],
    ids=str,
)
def test_saving_memory_changes_nothing(model, loss_and_gradient, machine_with, setting, loops):
    machine_with(loops_over_blocks=loops)
    frugal, _ = language.transformer(ENV, **SIZES, **setting)
    (a, da) = loss_and_gradient
    (b, db) = tiny.jit(jax.value_and_grad(partial(loss_of, frugal, model.part)))(model.params)
    np.testing.assert_allclose(a, b, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), da, db)


def kept_for_the_gradient(part, params, **setting):
    """The sizes of what the forward pass leaves for the backward pass."""
    policy, _ = language.transformer(ENV, **SIZES, **setting)
    _, backward = jax.eval_shape(lambda p: jax.vjp(partial(loss_of, policy, part), p), params)
    return [x.size for x in jax.tree.leaves(backward)]


@pytest.mark.parametrize("loops", [True, False])
def test_only_what_enters_a_block_is_kept_for_the_gradient(model, machine_with, loops):
    machine_with(loops_over_blocks=loops)
    plain, remat = (sum(kept_for_the_gradient(model.part, model.params, remat=x)) for x in (False, True))
    assert remat < 0.5 * plain


def test_devices_that_share_the_parameters_loop_over_the_blocks_on_every_machine(model, machine_with):
    """Otherwise the weights of several blocks are gathered at the same time."""
    machine_with(loops_over_blocks=False)

    def loops() -> int:
        policy, _ = language.transformer(ENV, **SIZES, remat=True)
        return str(jax.make_jaxpr(partial(loss_of, policy, model.part))(model.params)).count("scan[")

    assert loops() == 0
    token = collectives.auto_mesh.set(Mesh(np.array(jax.devices()[:1]), (collectives.SHARD,)))
    try:
        assert loops() == 1
    finally:
        collectives.auto_mesh.reset(token)


def test_logits_never_exist_whole(model):
    """Neither on the way forward nor on the way back, nor chunk by chunk in between."""

    def widest(chunks):
        policy, _ = language.transformer(ENV, **SIZES, logit_chunks=chunks)
        program = str(jax.make_jaxpr(jax.grad(partial(loss_of, policy, model.part)))(model.params))
        shapes = [tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", program)]
        return max(math.prod(shape) for shape in shapes if shape[-1] == VOCABULARY)

    assert widest(1) == T * 24 * VOCABULARY
    assert widest(4) == T * 6 * VOCABULARY
    assert widest(5) == T * 5 * VOCABULARY  # which does not divide 24


def test_divergence_of_two_models(model):
    policy, _ = language.transformer(ENV, **SIZES, logit_chunks=2)

    @tiny.jit
    def chunked_and_whole(params, other):
        p, q = policy.evaluate(params, model.part), policy.evaluate(other, model.part)
        whole_p, whole_q = (Categorical(x.logits(x.features)) for x in (p, q))
        return (p.kl(q), p.entropy()), (whole_p.kl(whole_q), whole_p.entropy())

    (kl, entropy), (whole_kl, whole_entropy) = chunked_and_whole(model.params, initial(policy, 2.0))
    np.testing.assert_allclose(kl, whole_kl, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(entropy, whole_entropy, rtol=1e-5)


def test_half_precision_is_near_and_its_parameters_are_whole():
    exact, half = (language.transformer(ENV, **SIZES, dtype=dtype)[0] for dtype in ("float32", "bfloat16"))
    params, read_by_half = tiny.jit(exact.init)(jax.random.key(0)), log_prob_by(half)
    _, part, _ = collected(exact, params)
    a, b = log_prob_by(exact)(params, part), read_by_half(params, part)
    assert b.dtype == jnp.float32
    features = jax.eval_shape(lambda params: half.evaluate(params, part).features, params)
    assert features.dtype == jnp.bfloat16  # not float16, in which gradients vanish
    assert 0 < float(jnp.abs(a - b).max()) < 0.05
    assert {x.dtype for x in jax.tree.leaves(jax.eval_shape(half.init, jax.random.key(0)))} == {jnp.dtype("float32")}
    _, part, _ = collected(half, params)
    b = read_by_half(params, part)
    assert float((jnp.abs(b - part.steps.log_prob) * part.steps.mask).max()) < 0.05


def test_completions_are_what_the_policy_would_have_collected(model):
    part = model.part
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
    params, score_of = tiny.jit(scorer.init)(jax.random.key(1)), tiny.jit(scorer.score)
    prompt = Prompt(jnp.full((3, P), 2), jnp.ones((3, P), bool))
    rows = jnp.array([[5, END, 8, 8, 8, 8, 8], [5, END, 9, 9, 9, 9, 9], [6, END, 8, 8, 8, 8, 8]])
    score = score_of(params, generation.completion_rollout(prompt, rows, end=END))
    assert score[0] == score[1]
    assert abs(float(score[0] - score[2])) > 1e-4
    # A completion that fills its width ends with its last action, which no later step has seen.
    full = jnp.full((3, T), 5).at[1, -1].set(6)
    score = score_of(params, generation.completion_rollout(prompt, full, end=END))
    assert abs(float(score[0] - score[1])) > 1e-4


@pytest.mark.parametrize("shared", [True, False])
def test_values_shift_by_one_and_end_in_nothing(model, shared):
    policy, critic = language.transformer(ENV, **SIZES, shared=shared)
    part, params = model.part, Params(initial(policy), tiny.jit(critic.init)(jax.random.key(2)))

    def summed(p):
        before, after = critic.values(p, part)
        return before.sum(), (before, after)

    gradient, (before, after) = tiny.jit(jax.grad(summed, has_aux=True))(params)
    assert before.shape == (T, 24)
    assert float(jnp.std(before)) > 0
    np.testing.assert_array_equal(after[:-1], before[1:])
    np.testing.assert_array_equal(after[-1], 0)
    assert any(np.asarray(x).any() for x in jax.tree.leaves(gradient.policy)) == shared


@pytest.mark.parametrize(("dtype", "by_evaluate"), [("float32", True), ("bfloat16", True), ("bfloat16", False)])
def test_a_first_step_of_gspo_is_inside_of_its_clip_range(dtype, by_evaluate):
    """Its range is 3e-4 wide, and what half precision makes of one token, written or read, differs by hundredths."""
    env = envs.make("sort", length=6, min_length=6, rewards={"length": 1.0})
    policy, _ = language.transformer(env, width=32, layers=1, dtype=dtype)
    assert policy.acts_rounded == (dtype == "bfloat16")
    policy = policy._replace(acts_rounded=policy.acts_rounded and by_evaluate)
    learner = policy_gradient(env, policy, None, ladder.gspo(num_envs=64, epochs=1, num_minibatches=1, kl=None))
    state = tiny.jit(learner.init)(jax.random.key(0))
    state = state._replace(params=jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, state.params))  # far from uniform
    _, metrics = tiny.jit(learner.step)(state, jax.random.key(1))
    clipped = metrics["clipped_high"] + metrics["clipped_low"]
    assert clipped == 0 if by_evaluate else clipped > 0.1


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"temperature": 0.0}, "temperature must be above 0: greedy always"),
        ({"temperature": 1e-9}, "temperature must be at least"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"top_k": -3}, "top_k must be at least 0"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"top_p": 2.0}, "top_p must be at most 1"),
        ({"greedy": True, "top_k": 2}, "greedy always takes the most likely token"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": T + 1}, f"max_tokens must be at most {T}, the time limit"),
    ],
)
def test_nothing_is_generated_with_impossible_settings(model, settings, sentence):
    prompt = jax.tree.map(lambda x: x[0], model.part.episodes.context)
    settings = {"end": END, "max_tokens": T} | settings
    with pytest.raises(UserError, match=sentence):
        generation.generate(model.policy, model.params, prompt, jax.random.key(0), **settings)


@pytest.mark.parametrize("use", ["train", "evaluate", "record"])
def test_no_episode_is_longer_than_the_room_of_its_policy(model, use):
    longer = ENV._replace(time_limit=T + 1)

    def used(params: Tree, key: jax.Array) -> Tree:
        if use == "train":
            learner = policy_gradient(longer, model.policy, None, ladder.grpo(num_envs=4, group_size=2))
            return learner.step(learner.init(key), key)
        run = {"evaluate": partial(rollout.evaluate, episodes=2), "record": rollout.record_episode}[use]
        return run(longer, rollout.make_actor(model.policy, params), key, greedy=True)

    with pytest.raises(UserError, match=f"room for episodes of {T} steps, and those of .* up to {T + 1}: make"):
        jax.eval_shape(used, model.params, jax.random.key(0))


def test_completions_are_written_with_the_parameters_of_acting(model):
    """And the memory of `evaluate_completions` begins with them, where a policy has one."""
    given = []

    def start(params, prompt):
        given.append(params)
        return model.policy.start(params["copy"], prompt)

    policy = model.policy._replace(
        start=start,
        act=lambda params, cache, token: model.policy.act(params["copy"], cache, token),
        acting_params=lambda params: {"copy": params},
        evaluates_from_context=False,
    )
    prompt = jax.tree.map(lambda x: x[0], model.part.episodes.context)
    key, settings = jax.random.key(0), {"end": END, "max_tokens": T}
    written = generation.generate(policy, model.params, prompt, key, **settings)
    np.testing.assert_array_equal(written, generation.generate(model.policy, model.params, prompt, key, **settings))
    generation.evaluate_completions(policy, model.params, model.part)
    assert len(given) == 2


def test_every_token_is_a_draw_of_its_own(model):
    """Of a policy that says the same everywhere: else a completion would be one token, again and again."""
    logits = jnp.log(jnp.array([0.0, 0.1, 0.2, 0.3, 0.4]))  # token 0, the end, never
    always = {"start": lambda *_: (), "act": lambda *_: (Categorical(logits), ())}
    policy = model.policy._replace(**always, acting_params=None, max_steps=None)
    prompt = jax.tree.map(lambda x: x[0], model.part.episodes.context)
    tokens = np.asarray(generation.generate(policy, (), prompt, jax.random.key(0), end=0, max_tokens=2000))
    np.testing.assert_allclose(np.bincount(tokens, minlength=5) / 2000, jnp.exp(logits), atol=0.04)
    pairs = np.histogram2d(tokens[:-1], tokens[1:], bins=range(1, 6), density=True)[0]
    np.testing.assert_allclose(pairs, np.outer(*[jnp.exp(logits[1:])] * 2), atol=0.03)


def test_settings_of_sampling_may_be_traced(model):
    prompt = jax.tree.map(lambda x: x[0], model.part.episodes.context)

    def written(temperature, top_p):
        write = partial(generation.generate, model.policy, model.params, prompt, jax.random.key(2))
        return write(end=END, max_tokens=T, temperature=temperature, top_p=top_p)

    np.testing.assert_array_equal(tiny.jit(written)(1.5, 0.9), tiny.jit(lambda: written(1.5, 0.9))())


def test_generation_is_a_rollout_without_its_bookkeeping(model):
    policy, params, part = model.policy, model.params, model.part

    def written(key, **settings):
        def write(prompt):
            return generation.generate(policy, params, prompt, key, end=END, max_tokens=T, **settings)

        return tiny.jit(jax.vmap(write))(part.episodes.context)

    greedy = written(jax.random.key(0), greedy=True)
    made = generation.completion_rollout(part.episodes.context, greedy, end=END)

    @tiny.jit
    def modes_of(made):
        distribution = policy.evaluate(params, made)
        return Categorical(distribution.logits(distribution.features)).mode()

    modes = modes_of(made)
    np.testing.assert_array_equal(greedy.T * made.loss_mask, modes * made.loss_mask)
    np.testing.assert_array_equal(written(jax.random.key(1), top_k=1), greedy)
    np.testing.assert_array_equal(written(jax.random.key(1), temperature=1e-4), greedy)
    np.testing.assert_array_equal(written(jax.random.key(1), top_p=1e-6), greedy)
    assert (np.asarray(written(jax.random.key(1))) != np.asarray(greedy)).any()
    behind = np.cumsum(np.asarray(greedy) == END, 1) > 0
    assert (np.asarray(greedy)[behind] == END).all()


def test_collecting_ends_with_the_last_episode(model):
    _, part, stats = collected(model.policy, model.params, columns=2)
    longest = int(part.steps.mask.sum(0).max())
    assert longest < T  # or this seed shows nothing
    np.testing.assert_array_equal(part.steps.action[longest:], 0)
    lengths = np.asarray(part.steps.mask.sum(0))
    np.testing.assert_array_equal(part.episodes.outcome.parts["tokens"], lengths)
    reward = np.asarray(part.steps.reward)
    np.testing.assert_array_equal(reward.sum(0), lengths)
    np.testing.assert_array_equal(reward[lengths.astype(int) - 1, np.arange(2)], lengths)
    assert float(stats.return_sum) == lengths.sum() == float(stats.steps)


@pytest.mark.device
@pytest.mark.parametrize(("columns", "steps_per_question", "rooms"), [(24, 2, [4, 6, 7]), (2, 1, [3, 5, 7])])
def test_a_cache_that_grows_says_the_same(model, columns, steps_per_question, rooms, machine_with):
    """Also where the completions, two of this seed, end before it has grown."""
    seen = []

    def act(params, cache, token):
        seen.append(cache.real.shape[-1] - P)
        assert {x.shape[-1] for x in cache.keys} == {x.shape[-2] for x in cache.values} == {cache.real.shape[-1]}
        return model.policy.act(params, cache, token)

    machine_with(steps_of_room=T, steps_per_question=1)
    _, expected, _ = collected(model.policy, model.params, columns=columns)
    machine_with(steps_of_room=2, steps_per_question=steps_per_question, steps_drawn=2)
    _, found, _ = collected(model.policy._replace(act=act), model.params, columns=columns)
    assert sorted(set(seen)) == rooms
    longest = int(expected.steps.mask.sum(0).max())
    assert longest == T if columns == 24 else longest <= rooms[1]
    real = np.asarray(expected.steps.mask) > 0
    np.testing.assert_array_equal(found.steps.mask, expected.steps.mask)
    for name in ("action", "reward", "last", "log_prob"):
        ours, usual = (np.asarray(getattr(part.steps, name))[real] for part in (found, expected))
        np.testing.assert_allclose(ours, usual, rtol=1e-5, atol=1e-6)


def test_seeds_side_by_side_wait_for_the_longest_and_change_nothing(model):
    collector = rollout.episodic(num_envs=3)
    keys = jax.random.split(jax.random.key(5), 4)

    def one(key):
        return collector.collect(ENV, model.policy, model.params, (), key)[1].steps

    together, alone = tiny.jit(jax.vmap(one))(keys), tiny.jit(partial(jax.lax.map, one))(keys)
    real = np.asarray(alone.mask) > 0
    np.testing.assert_array_equal(together.mask, alone.mask)
    np.testing.assert_array_equal(np.asarray(together.action)[real], np.asarray(alone.action)[real])
    assert " select_n" not in str(jax.make_jaxpr(jax.vmap(vectorize.any_in_batch))(jnp.zeros((4, 2), bool)))


@pytest.mark.parametrize(
    "algorithm", ["dapo", *(pytest.param(name, marks=pytest.mark.full) for name in ("grpo", "rlhf"))]
)
def test_parts_of_a_batch_give_the_gradient_of_the_whole(algorithm):
    """Whatever the split, with completions of all lengths: the weights count tokens of the whole batch."""
    networks = language.transformer(ENV, **SIZES)
    settings = {"num_envs": 16, "epochs": 1, "num_minibatches": 1, "learning_rate": 0.1, "max_grad_norm": None}

    def updated(chunk_rows):
        record = ladder.ALGORITHMS[algorithm](**settings, chunk_rows=chunk_rows)._replace(optimizer=update.sgd)
        learner = policy_gradient(ENV, *networks, record)
        return tiny.jit(lambda key: learner.step(learner.init(key), key)[0].params)(jax.random.key(0))

    whole = updated(16)
    near = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(near, updated(3), whole)  # 3 does not divide: parts of 2 then
    start = tiny.jit(networks[0].init)(jax.random.split(jax.random.key(0), 3)[0])
    moved = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), whole.policy, start)
    assert max(jax.tree.leaves(moved)) > 1e-3


def test_a_trust_region_holds_for_a_transformer():
    """Its distribution computes logits by a function, in chunks, which no tree of arrays is."""
    policy, critic = language.transformer(ENV, **{**SIZES, "layers": 1}, logit_chunks=2)
    of_critic = {"value_minibatches": 1, "value_epochs": 1}
    algorithm = ladder.trpo(num_envs=16, num_steps=None, max_kl=0.01, conjugate_steps=4, **of_critic)
    learner = policy_gradient(ENV, policy, critic, algorithm)
    state = tiny.jit(learner.init)(jax.random.key(0))
    after, metrics = tiny.jit(learner.step)(state, jax.random.key(1))
    assert metrics["accepted"] == 1
    assert 0.002 < metrics["kl"] <= 0.01
    change = jax.tree.map(lambda x, y: jnp.abs(x - y).max(), after.params.policy, state.params.policy)
    assert 0 < max(jax.tree.leaves(change)) < 1


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"width": 18}, "heads must divide the width"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads must divide heads"),
        ({"dtype": "float16"}, "no dtype 'float16'. Did you mean 'bfloat16'"),
        ({"layers": 0}, "layers must be at least 1, not 0"),
        ({"heads": 0}, "heads must be at least 1, not 0"),
        ({"expansion": -1.0}, "expansion must be"),
        ({"logit_chunks": 0}, "logit_chunks must be at least 1, not 0"),
        ({"temperature": 0.0}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be finite"),
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
