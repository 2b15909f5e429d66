"""Networks: initial gains, what is shared, memories step by step, and the values of successors."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import chex
import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.signal
import tiny

from jaxpg import envs, ladder, networks, parallel, values
from jaxpg.algorithm import make_objective
from jaxpg.errors import UserError
from jaxpg.models import layers
from jaxpg.models.cells import GRU
from jaxpg.models.distributions import Categorical, DiagonalGaussian, SquashedGaussian
from jaxpg.models.layers import Dense
from jaxpg.parallel.machine import machine
from jaxpg.policy_gradient import policy_gradient
from jaxpg.rollout.episodes import episodic
from jaxpg.types import Box, Discrete, Env, Episodes, Params, Rollout, Transition
from jaxpg.update.objective import COUNTED, Batch

COUNTER, TARGET = tiny.counter(), tiny.target()
SHAPE = (6, 5, 3)
IMAGES = COUNTER._replace(observation_space=Box(np.zeros(SHAPE, np.float32), np.ones(SHAPE, np.float32)))
CELLS = ["gru", "min_gru"]


def leaves(params):
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in flat}


def kernels(params):
    """Names and kernels of all layers, as matrices from inputs to outputs."""
    return {name: x.reshape(-1, x.shape[-1]) for name, x in leaves(params).items() if "kernel" in name}


def singular_values(kernel):
    return np.linalg.svd(kernel, compute_uv=False)


def test_weights_that_are_there_are_not_made_again():
    made = []

    def initial(key, shape, dtype):
        made.append(shape)
        return jnp.ones(shape, dtype)

    layer = Dense(2, initial)
    params = layer.init(jax.random.key(0), jnp.ones(3))
    assert made == [(3, 2)]
    np.testing.assert_array_equal(layer.apply(params, jnp.ones(3)), [3, 3])
    assert made == [(3, 2)]
    with pytest.raises(flax.errors.ScopeParamShapeError):
        layer.apply(params, jnp.ones(4))


def test_two_of_three_keys_are_those_of_two():
    """Where three are made for the sake of compile time, the draws are those of a plain split."""
    two, three = (jax.random.key_data(jax.random.split(jax.random.key(5), n)) for n in (2, 3))
    np.testing.assert_array_equal(three[:2], two)


@pytest.mark.parametrize("network", [partial(networks.mlp, COUNTER, hidden=(8, 4)), partial(networks.cnn, IMAGES)])
def test_initial_weights_are_orthogonal_with_the_gains_of_ppo(network):
    policy, critic = network(shared=False)
    for part, head_gain in ((policy.init(jax.random.key(0)), 0.01), (critic.init(jax.random.key(1)), 1.0)):
        layers = kernels(part)
        assert len(layers) == 3
        for name, kernel in layers.items():
            gain = head_gain if "head" in name else np.sqrt(2)
            np.testing.assert_allclose(singular_values(kernel), gain, rtol=1e-4)
        biases = [
            x for path, x in jax.tree_util.tree_flatten_with_path(part)[0] if "bias" in jax.tree_util.keystr(path)
        ]
        assert len(biases) == 3
        assert not any(b.any() for b in biases)


@pytest.mark.parametrize("network", ["mlp", "cnn", "gru", "min_gru"])
def test_without_orthogonal_initial_weights_are_those_of_flax(network):
    """LeCun's: of variance 1 / inputs, in every layer; with them, the first policy is nearly uniform."""
    make_network = {
        "mlp": partial(networks.mlp, COUNTER, hidden=(64, 64)),
        "cnn": partial(networks.cnn, IMAGES),
        "gru": partial(networks.recurrent, COUNTER),
        "min_gru": partial(networks.recurrent, COUNTER, cell="min_gru"),
    }[network]
    plain, careful = (make_network(orthogonal=own)[0].init(jax.random.key(0)) for own in (False, True))
    for name, kernel in kernels(plain).items():
        recurrent = name.split("'")[-4] in ("hr", "hz", "hn")  # orthogonal by default in flax too
        assert (np.ptp(singular_values(kernel)) < 1e-4) == (recurrent or min(kernel.shape) == 1), name
        if kernel.size > 1000 and not recurrent:
            np.testing.assert_allclose(kernel.std() * np.sqrt(kernel.shape[0]), 1.0, rtol=0.1)
    for name, kernel in kernels(careful).items():
        assert np.ptp(singular_values(kernel)) < 1e-4, name


def random_rollout(env, batch=4, steps=7, ends=0.3, seed=0, memory=()):
    """Steps with ends and terminations at random places, and a final observation for every step."""
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(steps + 1, batch, *env.observation_space.shape)).astype(np.float32)
    last = rng.random((steps, batch)) < ends
    discount = 1.0 - (last & (rng.random((steps, batch)) < 0.5))
    final_obs = rng.normal(size=obs[1:].shape).astype(np.float32)
    zeros = np.zeros((steps, batch), np.float32)
    steps = Transition(
        obs=obs[:-1],
        action=zeros.astype(np.int32),
        log_prob=zeros,
        reward=zeros,
        discount=discount.astype(np.float32),
        last=last,
        mask=zeros + 1,
    )
    return jax.tree.map(jnp.asarray, Rollout(steps, zeros + 1, final_obs, Episodes(memory=memory)))


@tiny.jit
def loud(tree):
    """Parameters plus noise, so that the heads are not nearly 0."""
    flat, unravel = jax.flatten_util.ravel_pytree(tree)
    return unravel(flat + 0.5 * jax.random.normal(jax.random.key(9), flat.shape))


def make(network, env, **settings):
    policy, critic = network(env, **settings)
    keys = jax.random.split(jax.random.key(0))
    return policy, critic, loud(tiny.jit(lambda: Params(policy.init(keys[0]), critic.init(keys[1])))())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("network", "env"), [(networks.mlp, COUNTER), (networks.cnn, IMAGES)])
def test_the_critic_reads_the_policys_torso_only_if_it_is_shared(network, env, shared):
    _, critic, params = make(network, env, hidden=(4,), shared=shared)
    part = random_rollout(env)
    gradient = jax.grad(lambda p: sum(v.sum() for v in critic.values(p, part)))(params)
    touched = {name for name, g in kernels(gradient.policy).items() if g.any()}
    torso = {name for name in kernels(params.policy) if "torso" in name}
    assert touched == (torso if shared else set())
    assert set(params.critic) == ({"head"} if shared else {"head", "torso"})


def test_the_spread_of_real_actions_is_a_parameter_not_a_function_of_the_state():
    policy, _, params = make(networks.mlp, TARGET, hidden=(4,), initial_log_std=-1.0)
    assert (policy.init(jax.random.key(0))["head"]["params"]["log_std"] == -1.0).all()
    distribution = policy.evaluate(params.policy, random_rollout(TARGET))
    assert isinstance(distribution, DiagonalGaussian)
    assert distribution.mean.shape == distribution.log_std.shape == (7, 4, 2)
    assert np.ptp(distribution.log_std, (0, 1)).max() == 0 < np.ptp(distribution.mean, (0, 1)).min()


def test_the_spread_of_real_actions_may_depend_on_the_state():
    policy, _, params = make(networks.mlp, TARGET, hidden=(4,), initial_log_std=-1.0, state_std=True)
    log_std = np.asarray(policy.evaluate(params.policy, random_rollout(TARGET)).log_std)
    assert np.ptp(log_std, (0, 1)).min() > 0
    first = policy.evaluate(policy.init(jax.random.key(0)), random_rollout(TARGET)).log_std
    np.testing.assert_allclose(first, -1.0, atol=0.2)  # the head begins small


def test_squashing_keeps_actions_inside_their_bounds():
    space = Box(np.array([-3.0, 1.0], np.float32), np.array([-1.0, 7.0], np.float32))
    policy, _, params = make(networks.mlp, TARGET._replace(action_space=space), hidden=(4,), squash=True)
    distribution = policy.evaluate(params.policy, random_rollout(TARGET))
    assert isinstance(distribution, SquashedGaussian)
    sample = distribution.sample(jax.random.key(0))
    assert (np.asarray(sample) > space.low).all()
    assert (np.asarray(sample) < space.high).all()


def test_squashing_into_no_bounds_is_refused():
    space = Box(np.array([-np.inf], np.float32), np.array([np.inf], np.float32))
    with pytest.raises(UserError, match="finite bounds, but the actions of target are unbounded"):
        networks.mlp(TARGET._replace(action_space=space), squash=True)


@pytest.mark.parametrize(
    ("network", "env"), [(networks.mlp, COUNTER), (networks.recurrent, COUNTER), (networks.cnn, IMAGES)]
)
@pytest.mark.parametrize("given", [{"squash": True}, {"initial_log_std": -1.0}, {"state_std": True}])
def test_settings_of_continuous_actions_are_refused_for_discrete_ones(
    network: Any, env: Env, given: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=f"^{min(given)} is about continuous actions, and those of .* are discrete"):
        network(env, **given)


def by_hand(cell, params, memory, x):
    """One step of a cell in numpy, from its equations."""
    p = jax.tree.map(np.asarray, params["params"])

    def dense(layer, x):
        return x @ layer["kernel"] + layer.get("bias", 0.0)

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    if cell == "min_gru":
        z = sigmoid(dense(p["gate"], x))
        return (1 - z) * memory + z * dense(p["candidate"], x)
    p = p["cell"]
    r = sigmoid(dense(p["ir"], x) + dense(p["hr"], memory))
    z = sigmoid(dense(p["iz"], x) + dense(p["hz"], memory))
    n = np.tanh(dense(p["in"], x) + r * dense(p["hn"], memory))
    return (1 - z) * n + z * memory


@pytest.fixture(scope="module", params=CELLS)
def remembering(request):
    """A recurrent network, a rollout that begins in the middle of episodes, and its memories step by step by hand."""
    network = partial(networks.recurrent, hidden=(4,), width=3, cell=request.param)
    policy, critic, params = make(network, COUNTER)
    part = random_rollout(COUNTER, memory=np.random.default_rng(5).normal(size=(4, 3)).astype(np.float32))
    layer = jax.tree.map(np.asarray, params.policy["encoder"]["params"]["Dense_0"])
    step = partial(by_hand, request.param, params.policy["cell"])

    def encoded(obs):
        return np.tanh(np.asarray(obs) @ layer["kernel"] + layer["bias"])

    memory, memories, successors = np.asarray(part.episodes.memory), [], []
    next_obs = tiny.next_obs(part)
    for t in range(7):
        memory = step(memory, encoded(part.steps.obs[t]))
        memories.append(memory)
        successors.append(step(memory, encoded(next_obs[t])))
        memory = np.where(part.steps.last[t][:, None], 0.0, memory)
    return policy, critic, params, part, np.stack(memories), np.stack(successors)


@pytest.mark.parametrize("columns", [4, 80])
def test_an_unrolled_gru_has_the_derivative_of_flaxs_cell(columns):
    """With respect to parameters, first memory and inputs, where episodes end, also at the first and last step."""
    assert 4 < machine().many_columns <= 80 or machine().many_columns == np.inf
    rng, steps, width = np.random.default_rng(2), 6, 3
    x, weights = rng.normal(size=(steps, columns, 5)), rng.normal(size=(steps, columns, width))
    memory = jnp.asarray(rng.normal(size=(columns, width)), jnp.float32)
    first = np.zeros((steps, columns), bool)
    first[[0, 2, 3, 5], [1, 0, 0, 2]] = True
    gru, cell = GRU(width, gain=1.0), nn.GRUCell(width)
    params = loud(gru.init(jax.random.key(0), memory, jnp.float32(x[0])))

    def unrolled(params, memory, x):
        return (weights * gru.apply(params, memory, x, first, method="unroll")).sum()

    def by_steps(params, memory, x):
        total = 0.0
        for t in range(steps):
            memory = jnp.where(first[t][:, None], 0.0, memory)
            memory = cell.apply({"params": params["params"]["cell"]}, memory, x[t])[0]
            total += (weights[t] * memory).sum()
        return total

    arguments = params, memory, jnp.float32(x)
    got, expected = (jax.jit(jax.grad(f, argnums=(0, 1, 2)))(*arguments) for f in (unrolled, by_steps))
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)
    assert not np.asarray(got[1])[1].any()  # its column begins with a cleared memory
    assert np.asarray(got[1])[0].all()


def linear(layer, x):
    return x @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"])


def test_a_batch_is_evaluated_as_step_by_step_with_the_memory_cleared_at_ends(remembering):
    policy, _, params, part, memories, _ = remembering
    distribution = policy.evaluate(params.policy, part)
    assert isinstance(distribution, Categorical)
    expected = linear(params.policy["head"]["params"]["Dense_0"], memories)
    np.testing.assert_allclose(distribution.logits, expected, rtol=1e-4, atol=1e-5)


def test_acting_is_one_step_from_a_clear_memory(remembering):
    policy, _, params, part, *_ = remembering
    memory = policy.start(params.policy, part.steps.obs[0, 0])
    assert memory.shape == (3,)
    assert not memory.any()
    fresh = policy.evaluate(
        params.policy, part._replace(episodes=Episodes(memory=jnp.zeros_like(part.episodes.memory)))
    )
    distribution, memory = policy.act(params.policy, memory, part.steps.obs[0, 0])
    np.testing.assert_allclose(distribution.logits, fresh.logits[0, 0], rtol=1e-5, atol=1e-5)
    assert memory.any()


def test_a_critic_with_a_memory_looks_one_step_ahead_from_it(remembering):
    """Also at a time-out, where V(next_obs) is the value of the old episode going on."""
    _, critic, params, part, memories, successors = remembering
    v_tm1, v_t = critic.values(params, part)
    head = params.critic["head"]["params"]["Dense_0"]
    np.testing.assert_allclose(v_tm1, linear(head, memories)[..., 0], rtol=1e-4, atol=1e-5)
    known = np.asarray(part.steps.discount) > 0
    np.testing.assert_allclose(v_t[known], linear(head, successors)[..., 0][known], rtol=1e-4, atol=1e-5)
    goes_on = ~np.asarray(part.steps.last[:-1])
    np.testing.assert_allclose(v_t[:-1][goes_on], v_tm1[1:][goes_on], rtol=1e-4, atol=1e-5)


def test_gradients_reach_the_memory_through_time_but_not_across_ends(remembering):
    policy, _, params, part, *_ = remembering

    def last_logits(memory):
        return policy.evaluate(params.policy, part._replace(episodes=Episodes(memory=memory))).logits[-1].sum(-1)

    influence = np.abs(jax.jacobian(last_logits)(part.episodes.memory)).sum((-1, -2))
    ended = np.asarray(part.steps.last[:-1]).any(0)
    assert ended.any()
    assert (influence[ended] == 0).all()
    goes_on = part._replace(steps=part.steps._replace(last=jnp.zeros_like(part.steps.last)))
    grown = jax.grad(
        lambda m: policy.evaluate(params.policy, goes_on._replace(episodes=Episodes(memory=m))).logits[-1].sum()
    )(part.episodes.memory)
    assert (np.abs(grown).sum(1) > 0).all()


@pytest.mark.parametrize("cuts", [0, 1, 2])
def test_values_of_successors_are_those_of_their_observations(cuts):
    """With no, one, or several time-outs inside a column, wherever the discount is not 0."""
    _, critic, params = make(networks.mlp, COUNTER, hidden=(4,))
    part = random_rollout(COUNTER, ends=0.0, seed=1)
    last, discount = np.zeros((7, 4), bool), np.ones((7, 4), np.float32)
    last[[1, 4][:cuts], 2] = True  # time-outs, of one column only
    last[[2, 3, 6], [0, 2, 1]] = True  # terminations
    discount[[2, 3, 6], [0, 2, 1]] = 0
    last[6, 3] = True  # a time-out in the last row
    steps = part.steps._replace(last=jnp.asarray(last), discount=jnp.asarray(discount))
    part = part._replace(steps=steps, final_obs=part.final_obs[: 1 + max(1, cuts)])  # no more than it can need
    _, v_t = critic.values(params, part)
    next_obs = jnp.asarray(np.nan_to_num(tiny.next_obs(part)), jnp.float32)
    expected, _ = critic.values(params, part._replace(steps=steps._replace(obs=next_obs)))
    np.testing.assert_allclose(v_t[discount > 0], expected[discount > 0], rtol=1e-5, atol=1e-6)
    assert np.isfinite(v_t).all()
    runs = jax.tree.map(lambda x: jnp.stack([x, x]), part)
    np.testing.assert_allclose(
        jax.vmap(partial(critic.values, params))(runs)[1][1][discount > 0], v_t[discount > 0], rtol=1e-5
    )


def test_a_convolution_slides_three_by_three_over_the_board():
    policy, _ = networks.cnn(IMAGES, channels=(2,), hidden=(4,), activation="relu")
    params = loud(policy.init(jax.random.key(0)))
    obs = np.asarray(random_rollout(IMAGES, batch=1).steps.obs[0, 0])
    torso = jax.tree.map(np.asarray, params["torso"]["params"])
    kernel = torso["Dense_0"]["kernel"].reshape(3, 3, 3, 2)
    convolved = np.stack(
        [sum(scipy.signal.correlate2d(obs[..., c], kernel[..., c, k], "valid") for c in range(3)) for k in range(2)], -1
    )
    features = np.maximum(convolved + torso["Dense_0"]["bias"], 0).reshape(-1)
    features = np.maximum(linear(torso["MLPTorso_0"]["Dense_0"], features), 0)
    expected = linear(params["head"]["params"]["Dense_0"], features)
    np.testing.assert_allclose(policy.act(params, (), jnp.asarray(obs))[0].logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "stride"), [(2, 1), (3, 2), (5, 3)])
def test_a_convolution_strides_over_the_picture(size, stride):
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 11, 9, 3)), rng.normal(size=(size, size, 3, 5))
    expected = np.zeros((2, (11 - size) // stride + 1, (9 - size) // stride + 1, 5))
    for row, column in np.ndindex(expected.shape[1:3]):
        i, j = stride * row, stride * column
        expected[:, row, column] = np.einsum("bijc,ijck->bk", x[:, i : i + size, j : j + size], kernel)
    found = np.asarray(tiny.jit(partial(layers.patches, size=size, stride=stride))(x), np.float64) @ kernel.reshape(
        -1, 5
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", networks.ACTIVATIONS)
def test_activations_differ(activation):
    policy, _ = networks.mlp(COUNTER, hidden=(4,), activation=activation)
    params = loud(policy.init(jax.random.key(0)))
    torso = params["torso"]["params"]["Dense_0"]
    obs = jnp.array([0.3, -0.7])
    features = getattr(jax.nn, activation)(obs @ torso["kernel"] + torso["bias"])
    expected = linear(params["head"]["params"]["Dense_0"], np.asarray(features))
    np.testing.assert_allclose(policy.act(params, (), obs)[0].logits, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: networks.mlp(COUNTER, activation="swish"), "no activation 'swish'. There are: gelu, relu, silu, tanh"),
        (lambda: networks.mlp(COUNTER, activation=None), "no activation None. There are: gelu, relu, silu, tanh"),
        (lambda: networks.recurrent(COUNTER, cell="lstm"), "no recurrent cell 'lstm'. There are: gru, min_gru"),
        (lambda: networks.cnn(COUNTER), r"counter have shape \(2,\)\. Use an mlp"),
        (lambda: networks.cnn(IMAGES, kernels=(6,)), "6 x 5 are left for the kernel of 6 of convolution 1"),
        (lambda: networks.cnn(IMAGES, channels=(2, 2), strides=(2,)), "2 x 2 are left for the kernel of 3 of conv"),
        (lambda: networks.cnn(IMAGES, channels=[8] * 3), "2 x 1 are left for the kernel of 3 of convolution 3"),
        (lambda: values.cnn(IMAGES, channels=[8] * 3), "2 x 1 are left for the kernel of 3 of convolution 3"),
        (lambda: networks.recurrent(COUNTER, width=0), "width must be at least 1, not 0"),
    ],
)
def test_invalid_settings_are_refused(build, message):
    with pytest.raises(UserError, match=message):
        build()


@pytest.mark.parametrize("cell", CELLS)
def test_a_memory_is_float32_where_jax_counts_by_64_bits(cell):
    policy, _ = networks.recurrent(COUNTER, hidden=(4,), width=3, cell=cell)
    part = random_rollout(COUNTER, memory=np.zeros((4, 3), np.float32))
    with jax.enable_x64(True):
        params, obs = policy.init(jax.random.key(0)), jnp.zeros(2, jnp.float32)
        memory = policy.start(params, obs)
        _, after = policy.act(params, memory, obs)
        assert memory.dtype == after.dtype == jnp.float32
        assert policy.evaluate(params, part).logits.dtype == jnp.float32


def masked_counter():
    """`counter` whose observations end in a mask: at time t all actions are allowed but t % 3."""
    env = tiny.counter(longest=9, time_limit=6)

    def with_mask(obs):
        return jnp.concatenate([obs, (jnp.arange(3) != obs[1] % 3).astype(jnp.float32)])

    def reset(key):
        state, obs = env.reset(key)
        return state, with_mask(obs)

    def step(key, state, action):
        state, timestep = env.step(key, state, action)
        return state, timestep._replace(obs=with_mask(timestep.obs))

    space = Box(np.zeros(5, np.float32), np.full(5, 99, np.float32))
    return env._replace(reset=reset, step=step, observation_space=space, action_mask=lambda obs: obs[..., 2:] > 0.5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("network", "wrap"),
    [(networks.mlp, partial(envs.frame_stack, num=2)), (networks.recurrent, envs.flatten)],
    ids=["mlp", "recurrent"],
)
def test_what_is_not_allowed_is_never_done_and_updates_see_the_same_probabilities(network, wrap):
    env = wrap(masked_counter())
    policy, critic = network(env, hidden=(8,))
    learner = policy_gradient(env, policy, critic, ladder.ppo(num_envs=8, num_steps=16, num_minibatches=2))
    state = learner.init(jax.random.key(0))
    for i in range(2):
        before, state = state, tiny.jit(learner.step)(state, jax.random.key(i))[0]
    rollout, _ = tiny.jit(learner.experience.collect)(before, jax.random.key(1))
    steps = rollout.steps
    allowed = np.asarray(env.action_mask(steps.obs))
    np.testing.assert_array_equal(allowed.sum(-1), 2)
    assert np.take_along_axis(allowed, np.asarray(steps.action)[..., None], -1).all()
    again = policy.evaluate(before.params.policy, rollout)
    np.testing.assert_allclose(again.log_prob(steps.action), steps.log_prob, atol=1e-5)
    assert (again.entropy() <= np.log(2) + 1e-6).all()
    assert (again.entropy() > 0).all()


@pytest.mark.parametrize("network", [networks.mlp, networks.recurrent], ids=["mlp", "recurrent"])
def test_what_is_not_allowed_is_not_done_where_policy_and_critic_are_evaluated_together(network):
    env = masked_counter()
    policy, critic, params = make(network, env, hidden=(8,))
    rollout = tiny.jit(lambda key: episodic(num_envs=8).collect(env, policy, params.policy, (), key)[1])(
        jax.random.key(1)
    )
    together, apart = critic.joint.both(params, rollout)[0].logits, policy.evaluate(params.policy, rollout).logits
    allowed = env.action_mask(rollout.steps.obs)
    real = rollout.steps.mask > 0
    np.testing.assert_allclose(jnp.where(allowed, jax.nn.softmax(together), 0.0).sum(-1)[real], 1.0, rtol=1e-6)
    np.testing.assert_allclose(together[real], apart[real], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_action_values_explore_and_choose_what_is_allowed(epsilon):
    env = masked_counter()
    network = values.q_network(env, values.mlp(env, hidden=(8,)), values.dqn().head)
    policy = values.epsilon_greedy_policy(network, epsilon)
    params = loud(policy.init(jax.random.key(0)))
    rollout = tiny.jit(lambda key: episodic(num_envs=32).collect(env, policy, params, (), key)[1])(jax.random.key(1))
    steps = rollout.steps
    real = np.asarray(steps.mask) > 0
    allowed, action = np.asarray(env.action_mask(steps.obs)), np.asarray(steps.action)
    assert np.take_along_axis(allowed, action[..., None], -1)[real].all()
    again = tiny.jit(lambda rollout: policy.evaluate(params, rollout).log_prob(rollout.steps.action))(rollout)
    np.testing.assert_allclose(again[real], steps.log_prob[real], rtol=1e-4, atol=1e-6)
    if epsilon == 1:
        assert all((action[real] == a).sum() > 20 for a in range(3))
        np.testing.assert_allclose(np.exp(steps.log_prob)[real], 0.5, rtol=1e-3)


def test_a_mask_inside_of_observations_cannot_be_normalised():
    env = masked_counter()
    with pytest.raises(UserError, match="hold the mask of allowed actions"):
        policy_gradient(env, *networks.mlp(env), ladder.ppo(), normalize_observations=True)


def together(network, env, **settings):
    """`make`, and the losses of PPO evaluated together and each by itself."""
    policy, critic, params = make(network, env, **settings)
    joint = make_objective(policy, critic, ladder.ppo())
    assert joint.joint_loss is not None
    return params, joint, joint._replace(joint_loss=None)


def losses_of(params, batch, objective):
    return tiny.jit(jax.value_and_grad(objective.loss, has_aux=True)).lower(params, batch).compile()


@pytest.mark.parametrize(
    ("network", "env", "settings"),
    [
        pytest.param(networks.mlp, COUNTER, {"hidden": (8, 4)}, id="side by side"),
        pytest.param(networks.mlp, TARGET, {"hidden": (8,), "activation": "relu"}, id="side by side, real actions"),
        pytest.param(networks.mlp, COUNTER, {"hidden": (8, 4), "shared": True}, id="mlp"),
        pytest.param(networks.mlp, COUNTER, {"hidden": (8, 4), "layer_norm": True}, id="layer norm"),
        pytest.param(networks.cnn, IMAGES, {"hidden": (8,), "shared": False}, id="cnn side by side"),
        pytest.param(networks.cnn, IMAGES, {"hidden": (8,), "shared": True}, id="cnn"),
        pytest.param(networks.recurrent, COUNTER, {"hidden": (8,), "width": 6}, id="gru"),
        pytest.param(networks.recurrent, COUNTER, {"hidden": (8,), "width": 6, "cell": "min_gru"}, id="min_gru"),
    ],
)
def test_policy_and_critic_evaluated_together_are_what_they_are_apart(machine_with, network, env, settings):
    """Loss, metrics and gradient; a torso or a memory that both read is computed, and differentiated, once."""
    machine_with(torsos_at_once=64)
    params, joint, apart = together(network, env, **settings)
    memory = jnp.ones((4, settings["width"])) if "width" in settings else ()
    rollout = random_rollout(env, memory=memory)
    steps = rollout.steps
    if env is TARGET:
        rollout = rollout._replace(steps=steps._replace(action=steps.obs[..., :2]))
    per_step = jnp.cos(jnp.arange(steps.reward.size)).reshape(steps.reward.shape)
    batch = Batch(rollout, per_step, per_step + 1, per_step - 1, per_step**2, per_step**2, ())
    one, several = losses_of(params, batch, joint), losses_of(params, batch, apart)

    def close(x, y):  # sums of large terms are as exact as the terms are
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=max(1e-5, 1e-6 * np.abs(y).max()))

    jax.tree.map(close, one(params, batch), several(params, batch))
    shares = settings.get("shared") or network is networks.recurrent
    assert (one.cost_analysis()["flops"] < 0.85 * several.cost_analysis()["flops"]) == bool(shares)


def test_one_of_n_integers_is_a_one_hot_vector():
    """An observation of a Discrete space; one number would say that 2 is twice 1."""
    numbered = COUNTER._replace(observation_space=Discrete(3))
    policy, _ = networks.mlp(numbered, hidden=(4,))
    params = policy.init(jax.random.key(0))
    assert (3, 4) in [x.shape for x in jax.tree.leaves(params["torso"])]
    one_hot, _ = networks.mlp(COUNTER._replace(observation_space=Box(np.zeros(3), np.ones(3))), hidden=(4,))
    for i in range(3):
        found = policy.act(params, (), jnp.asarray(i))[0].logits
        np.testing.assert_array_equal(found, one_hot.act(params, (), jnp.eye(3)[i])[0].logits)


def test_what_reads_one_of_n_integers_is_made_for_integers():
    """Also with a memory, and for action values."""
    numbered = COUNTER._replace(observation_space=Discrete(3))
    policy, _ = networks.recurrent(numbered, hidden=(4,), width=2)
    assert (3, 4) in [x.shape for x in jax.tree.leaves(policy.init(jax.random.key(0)))]
    network = values.q_network(numbered, values.mlp(numbered, hidden=(4,)), values.dqn().head)
    assert (3, 4) in [x.shape for x in jax.tree.leaves(network.init(jax.random.key(0)))]


@pytest.mark.parametrize(("limit", "steps"), [(24, 6), (23, 3), (8, 2), (7, 1), (3, 1)])
def test_values_of_many_observations_are_computed_a_few_steps_at_a_time(machine_with, limit, steps):
    """Of 6 steps of 4 columns: all of them, some, or one; the same values, and those of their successors."""
    _, critic = networks.mlp(COUNTER, hidden=(5,))
    rollout = random_rollout(COUNTER)
    rollout = rollout._replace(steps=jax.tree.map(lambda x: x[:6], rollout.steps))
    params = Params((), critic.init(jax.random.key(0)))
    whole = critic.values(params, rollout)
    machine_with(rows_evaluated=limit)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), critic.values(params, rollout), whole)
    program = str(jax.make_jaxpr(lambda *x: critic.values(*x))(params, rollout))
    of_final_obs = "7,4,5"
    assert set(re.findall(r"f32\[([\d,]+)\] = tanh", program)) == {f"{steps},4,5", of_final_obs}


@pytest.mark.parametrize(("limit", "seeds"), [(27, 1), (28, 1), (83, 3), (84, 3)])
def test_torsos_of_many_rows_are_apart(machine_with, limit, seeds):
    """28 rows: one product for each of two layers of both, or two. Those of all seeds count."""
    machine_with(torsos_at_once=limit, seeds_at_once=True)
    params, joint, _ = together(networks.mlp, COUNTER, hidden=(8, 4))
    rollout = random_rollout(COUNTER)
    zeros = jnp.zeros(rollout.steps.reward.shape)
    batch = Batch(rollout, zeros, zeros, zeros, zeros, zeros, ())
    several = jax.tree.map(lambda x: jnp.stack([x] * seeds), (params, batch))
    jaxpr = jax.make_jaxpr(parallel.map_seeds(joint.loss))(*several)
    assert str(jaxpr).count("dot_general") == 2 + (2 if limit == 28 * seeds else 4)  # two heads


@pytest.mark.parametrize("limit", [2, 3])
def test_a_layer_of_few_outputs_has_the_derivatives_of_a_product(machine_with, limit):
    """Three outputs: by `vmap`, forwards and backwards; its derivative by the inputs holds no product."""
    machine_with(few_outputs=limit)
    x, weights = jax.random.normal(jax.random.key(0), (4, 6, 5)), jax.random.normal(jax.random.key(1), (5, 3))
    slope, x_dot = jnp.cos(jnp.arange(72.0).reshape(4, 6, 3)), jnp.sin(x)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)

    y, pull = jax.vjp(lambda *arguments: jax.vmap(layers._dot, (0, None))(*arguments), x, weights)
    close(y, np.einsum("abi,ij->abj", x, weights))
    of_x, of_weights = pull(slope)
    close(of_x, np.einsum("abj,ij->abi", slope, weights))
    close(of_weights, np.einsum("abi,abj->ij", x, slope))
    _, forwards = jax.jvp(layers._dot, (x, weights), (x_dot, 2 * weights))
    close(forwards, np.einsum("abi,ij->abj", np.asarray(x_dot) + 2 * np.asarray(x), weights))
    backwards = str(jax.make_jaxpr(jax.grad(lambda x: layers._dot(x, weights).sum()))(x))
    assert ("f32[4,6,5] = dot_general" in backwards) == (limit == 2)


def test_networks_that_do_not_belong_together_are_evaluated_apart():
    """A policy or a critic that has been replaced in part is not the one that the other knows."""
    policy, critic = networks.mlp(COUNTER, hidden=(4,))
    others = [
        (policy._replace(evaluate=lambda params, rollout: policy.evaluate(params, rollout)), critic),
        (policy, critic._replace(values=lambda params, rollout: critic.values(params, rollout))),
        (networks.mlp(COUNTER, hidden=(4,))[0], critic),
        (policy._replace(noise=lambda key, shape: jnp.zeros(shape)), critic),
    ]
    for pair in others:
        assert make_objective(*pair, ladder.ppo()).joint_loss is None
    joint = make_objective(policy, critic, ladder.ppo())
    assert joint.joint_loss is not None
    nothing = lambda params, batch: (jnp.zeros(()), {})  # noqa: E731
    batch = SimpleNamespace(minibatch_weight=jnp.ones((1, 2)) / 2)
    assert joint._replace(policy_loss=nothing, value_loss=nothing).loss((), batch) == (0.0, {COUNTED: 1.0})


@pytest.mark.parametrize("shape", [(), (2, 1)])
def test_actions_of_a_box_have_one_axis(shape: tuple[int, ...]) -> None:
    """Of two axes the policy had one number for each entry of the last, and clipping made copies of it."""
    bound = np.ones(shape, np.float32)
    env = tiny.target()._replace(action_space=Box(-bound, bound))
    with pytest.raises(UserError, match="Actions of a Box have one axis"):
        networks.mlp(env)[0].init(jax.random.key(0))
