"""Every environment by name: shapes, the two ways to end, true successors, and what is refused."""

import inspect

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces
from gymnax.environments.classic_control.cartpole import CartPole

from jaxpg import envs, ladder, networks
from jaxpg.envs import contract, gymnax_adapter, registry, text
from jaxpg.errors import UserError
from jaxpg.policy_gradient import policy_gradient
from jaxpg.types import Box, Discrete

GYMNAX = [name for name in gymnax.registered_envs if name != "MNISTBandit-bsuite"]
TEXT = {*text.TASKS, "json_lines"}  # whose observations are tokens: test_text_environment.py
OURS = [name for name in envs.names() if name not in gymnax.registered_envs and name not in TEXT]
LIMIT = 20

# Natural ends after a known number of steps, and environments without any.
FIXED_LENGTH = {
    "Catch-bsuite": 9,
    "DeepSea-bsuite": 8,
    "MemoryChain-bsuite": 6,
    "UmbrellaChain-bsuite": 10,
    "SimpleBandit-bsuite": 1,
    "probe-value": 1,
    "probe-observation": 1,
    "probe-discount": 2,
    "probe-action": 1,
    "probe-policy": 1,
}
ENDLESS = {
    "Pendulum-v1",
    "Freeway-MinAtar",
    "DiscountingChain-bsuite",
    "BernoulliBandit-misc",
    "GaussianBandit-misc",
    "PointRobot-misc",
    "Reacher-misc",
    "Swimmer-misc",
}


def random_action(env, key):
    if isinstance(env.action_space, Discrete):
        return jax.random.randint(key, (), 0, env.action_space.n)
    return jax.random.uniform(key, env.action_space.shape, minval=-1.0, maxval=1.0)


def play(env, steps, columns, choose=None):
    """Steps of an environment that is reset where an episode ended, [steps, columns, ...], and the time of each."""
    choose = choose or (lambda key, time: random_action(env, key))

    def step(carry, key):
        state, time = carry
        step_key, reset_key, action_key = jax.random.split(key, 3)
        state, timestep = env.step(step_key, state, choose(action_key, time))
        fresh, _ = env.reset(reset_key)
        state = jax.tree.map(lambda new, old: jnp.where(timestep.last, new, old), fresh, state)
        return (state, jnp.where(timestep.last, 0, time + 1)), (timestep, time + 1)

    def column(key):
        reset_key, key = jax.random.split(key)
        state, obs = env.reset(reset_key)
        _, (timesteps, time) = jax.lax.scan(step, (state, jnp.int32(0)), jax.random.split(key, steps))
        return obs, timesteps, time

    # Each program runs once, for a few steps: compiling it well would take longer than running it.
    quickly = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    play_all = jax.jit(jax.vmap(column, out_axes=(0, 1, 1)), compiler_options=quickly)
    return play_all(jax.random.split(jax.random.key(0), columns))


@pytest.mark.parametrize(
    "name",
    [name for name in OURS + GYMNAX if name != "LunarLanderContinuous-v3"],  # but for its engines the other one
)
def test_every_environment_plays(name):
    limited = "max_steps_in_episode" in envs.default_settings(name)
    env = envs.make(name, **({"max_steps_in_episode": LIMIT} if limited else {}))
    obs, steps, time = play(env, steps=50, columns=3)

    assert env.name == name
    assert obs.shape == (3, *env.observation_space.shape)
    assert steps.obs.shape == (50, 3, *env.observation_space.shape)
    assert steps.reward.shape == steps.discount.shape == steps.last.shape == (50, 3)
    assert obs.dtype == steps.obs.dtype == steps.reward.dtype == steps.discount.dtype == jnp.float32
    assert steps.last.dtype == bool
    assert np.isfinite(steps.obs).all()
    assert np.isfinite(steps.reward).all()

    ended, terminated = np.asarray(steps.last), np.asarray(steps.discount) == 0
    assert np.isin(steps.discount, (0.0, 1.0)).all()
    assert ended[terminated].all()
    assert (np.asarray(time)[ended & ~terminated] == env.time_limit).all()  # a time-out happens at the limit only
    assert ended[np.asarray(time) == env.time_limit].all()  # and always there
    assert 1 <= env.min_truncation_step <= max(env.time_limit, LIMIT)
    if limited:
        assert env.time_limit == min(LIMIT, FIXED_LENGTH.get(name, LIMIT))
        assert env.min_truncation_step == LIMIT
    if name in FIXED_LENGTH:
        assert (np.asarray(time)[ended] == FIXED_LENGTH[name]).all()
        assert terminated[ended].all()
    if name in ENDLESS:
        assert ended.any()
        assert not terminated.any()


def test_the_docstring_tells_which_environments_never_terminate():
    sentence = inspect.getdoc(gymnax_adapter).split("No natural end: ")[1].split(".")[0]
    assert {word.strip() for word in sentence.split(",")} == {name.split("-")[0] for name in ENDLESS}


@pytest.mark.parametrize("name", OURS + GYMNAX)
def test_states_have_one_type_so_that_loops_compile_once(name):
    env = envs.make(name)
    key = jax.random.key(0)
    action = jax.eval_shape(lambda: random_action(env, key))
    state, _ = jax.eval_shape(env.reset, key)
    after, _ = jax.eval_shape(env.step, key, state, action)
    assert after == state  # shapes, dtypes and weak types


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        (("Catch-bsuite", {"rows": 6}), 5),
        (("DeepSea-bsuite", {"size": 4}), 4),
        (("MemoryChain-bsuite", {"memory_length": 2}), 3),
        (("UmbrellaChain-bsuite", {"chain_length": 3}), 3),
    ],
)
def test_known_lengths_follow_the_settings(settings, length):
    name, settings = settings
    env = envs.make(name, **settings)
    _, steps, time = play(env, steps=2 * length, columns=2)
    assert env.time_limit == length
    assert (np.asarray(time)[np.asarray(steps.last)] == length).all()
    assert (np.asarray(steps.last).sum(0) == 2).all()


def test_a_time_out_is_no_termination():
    env = envs.make("CartPole-v1", max_steps_in_episode=10)
    _, steps, _ = play(env, steps=10, columns=4, choose=lambda key, time: time % 2)  # left, right, ... stays up
    np.testing.assert_array_equal(steps.last.sum(0), 1)
    np.testing.assert_array_equal(steps.last[-1], True)
    np.testing.assert_array_equal(steps.discount, 1.0)


def falling(**settings):
    """A pole pushed to one side only, until it has fallen."""
    env = envs.make("CartPole-v1", **settings)
    _, steps, _ = play(env, steps=15, columns=1, choose=lambda key, time: 1)
    return int(np.argmax(steps.last[:, 0])), steps


def test_falling_is_a_termination():
    end, steps = falling()
    assert end < 14
    np.testing.assert_array_equal(steps.discount[: end + 1, 0], [1.0] * end + [0.0])
    assert abs(steps.obs[end, 0, 2]) > 12 * 2 * np.pi / 360 > abs(steps.obs[end - 1, 0, 2])  # the true successor
    np.testing.assert_array_equal(steps.reward[: end + 1], 1.0)


@pytest.mark.parametrize(("slack", "discount"), [(0, 0.0), (-1, 1.0)])
def test_where_both_ends_meet_the_termination_wins(slack, discount):
    natural_end, _ = falling()
    end, steps = falling(max_steps_in_episode=natural_end + 1 + slack)
    assert end == natural_end + slack
    assert steps.discount[end, 0] == discount


@pytest.mark.parametrize("name", ["CartPole-v1", "Catch-bsuite", "MountainCarContinuous-v0"])
def test_steps_equal_gymnax_and_the_successor_is_the_true_one(name):
    """Against gymnax's own `step`, which resets by itself and hands the true successor out beside it."""
    theirs, params = gymnax.make(name)
    params = params.replace(max_steps_in_episode=12)
    ours = envs.make(name, max_steps_in_episode=12)
    step = jax.jit(ours.step)
    key = jax.random.key(3)
    obs, state = theirs.reset(key, params)
    our_state, our_obs = jax.jit(ours.reset)(key)
    np.testing.assert_allclose(our_obs, obs, rtol=1e-6)
    for i in range(13):
        key, action_key = jax.random.split(jax.random.fold_in(key, i))
        action = random_action(ours, action_key)
        _, state, reward, terminated, truncated, info = theirs.step(key, state, action, params)
        our_state, timestep = step(jax.random.split(key)[0], our_state, action)
        np.testing.assert_allclose(timestep.obs, info["final_observation"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(timestep.reward, reward, rtol=1e-5)
        assert bool(timestep.last) == bool(terminated | truncated)
        assert float(timestep.discount) == 1.0 - float(terminated)
        if timestep.last:
            break
    assert timestep.last
    assert jax.tree.structure(our_state) == jax.tree.structure(state)


def test_discrete_observations_are_one_hot():
    env = envs.make("FrozenLake-misc", is_slippery=False)
    state, obs = env.reset(jax.random.key(0))
    np.testing.assert_array_equal(obs, np.eye(16)[0])
    _, timestep = env.step(jax.random.key(1), state, jnp.int32(2))
    np.testing.assert_array_equal(timestep.obs, np.eye(16)[1])
    np.testing.assert_array_equal(env.observation_space.low, np.zeros(16))
    np.testing.assert_array_equal(env.observation_space.high, np.ones(16))


def test_spaces_keep_their_bounds():
    cartpole = envs.make("CartPole-v1").observation_space
    np.testing.assert_array_equal(np.isinf(cartpole.high), [False, True, False, True])
    np.testing.assert_allclose(cartpole.high[0], 4.8)
    torque = envs.make("Pendulum-v1", max_torque=3.0).action_space
    np.testing.assert_array_equal((torque.low, torque.high), ([-3.0], [3.0]))
    assert envs.make("Breakout-MinAtar", use_minimal_action_set=False).action_space == Discrete(6)
    assert isinstance(envs.make("Breakout-MinAtar").observation_space, Box)


def test_other_spaces_are_refused():
    class Paired(gymnax.environments.CartPole):
        def observation_space(self, params):
            return spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)])

    with pytest.raises(UserError, match="Only Discrete and Box"):
        envs.from_gymnax(Paired(), Paired().default_params, name="paired")


def test_settings_reach_the_environment():
    key = jax.random.key(0)

    def velocity(**settings):
        env = envs.make("CartPole-v1", **settings)
        state, _ = env.reset(key)
        state, _ = env.step(key, state, jnp.int32(1))
        return float(state.theta_dot)

    assert velocity(gravity=9.8) == velocity()
    assert velocity(gravity=0) != velocity()
    assert envs.make("FrozenLake-misc", map_name="8x8").time_limit == 200
    assert envs.make("FrozenLake-misc", map_name="8x8", max_steps_in_episode=7).time_limit == 7
    assert envs.make("BernoulliBandit-misc", max_steps_in_episode=7).time_limit == 7  # an int where it has a float
    acrobot = envs.make("Acrobot-v1", available_torque=[0, 0, 0])
    left, right = (acrobot.step(key, acrobot.reset(key)[0], jnp.int32(a))[1].obs for a in (0, 2))
    np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("CartPol-v1", {}, "no environment 'CartPol-v1'. Did you mean 'CartPole-v1'"),
        ("cartpole-v1", {}, "Did you mean 'CartPole-v1'"),
        ("gridworld", {}, "Did you mean 'grid_world'"),
        ("CartPole-v1", {"gravty": 1.0}, "no setting 'gravty'. Did you mean 'gravity'"),
        ("CartPole-v1", {"gravity": "high"}, "gravity must be like its default 9.8, not 'high'"),
        ("CartPole-v1", {"gravity": True}, "gravity must be like"),
        ("CartPole-v1", {"max_steps_in_episode": 1e3}, "must be like its default 500, not 1000.0"),
        ("CartPole-v1", {"max_steps_in_episode": 0}, "must be at least 1, not 0"),
        ("CartPole-v1", {"max_steps_in_episode": -5}, "must be at least 1, not -5"),
        ("PointRobot-misc", {"dense_reward": 1}, "dense_reward must be like its default False"),
        ("Acrobot-v1", {"available_torque": [1.0, 2.0]}, "available_torque must be like"),
        ("FrozenLake-misc", {"map_name": "5x5"}, "cannot be made with .*map_name must be '4x4' or '8x8'"),
        ("FrozenLake-misc", {"reward_schedule": 3}, "reward_schedule must be like"),
        ("MetaMaze-misc", {"maze_size": 4}, "cannot be made with .*do not fit together"),
        ("grid_world", {"slip": 1.5}, "slip in"),
        ("grid_world", {"colums": 3}, "Did you mean 'columns'"),
        ("frozen_lake", {"size": 5}, "size must be 4 or 8"),
        ("frozen_lake", {"time_limit": 0}, "time_limit must be at least 1"),
        ("probe-value", {"size": 5}, "no setting 'size'. It has none"),
        ("MNISTBandit-bsuite", {}, "not downloaded for you: put train-images"),
    ],
)
def test_bad_names_and_settings_are_refused(name, settings, sentence, monkeypatch, tmp_path):
    monkeypatch.setattr(gymnax_adapter, "_MNIST_DIRECTORY", tmp_path)
    with pytest.raises(UserError, match=sentence):
        envs.make(name, **settings)


def test_true_is_no_number_for_a_setting_without_default():
    def environment(steps: int, limit: int | None = None):
        raise AssertionError("made")

    for settings in ({"steps": True}, {"steps": 3, "limit": True}):
        with pytest.raises(UserError, match=r"must be int.*, not True"):
            registry._check_annotated("mine", settings, environment)
    registry._check_annotated("mine", {"steps": 3, "limit": None}, environment)


def test_mnist_plays_where_its_files_are(monkeypatch, tmp_path):
    images, labels = np.zeros((10, 28, 28), np.uint8), np.arange(10, dtype=np.uint8)
    monkeypatch.setattr(gymnax_adapter, "_MNIST_DIRECTORY", tmp_path)
    for file in gymnax_adapter._MNIST_FILES:
        (tmp_path / file).touch()
    monkeypatch.setattr("gymnax.utils.load_mnist.load_mnist", lambda: ((images, labels), (images, labels)))
    env = envs.make("MNISTBandit-bsuite")
    _, steps, time = play(env, steps=20, columns=2, choose=lambda key, time: 4)
    assert env.time_limit == 1
    np.testing.assert_array_equal(time, 1)
    np.testing.assert_array_equal(steps.discount, 0.0)
    assert set(np.unique(steps.reward)) == {-1.0, 1.0}


def test_an_environment_that_cuts_by_a_rule_of_its_own_may_cut_at_any_step():
    class Whimsical(CartPole):
        def is_truncated(self, state, params):
            return state.x > 1

    env = Whimsical()
    assert gymnax_adapter.from_gymnax(env, env.default_params, name="whimsical").min_truncation_step == 1
    assert gymnax_adapter.from_gymnax(CartPole(), env.default_params, name="usual").min_truncation_step == 500


def test_a_registered_environment_is_made_by_name(monkeypatch):
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))

    def short_lake(time_limit: int = 5):
        return envs.as_env(envs.frozen_lake(), time_limit, "short_lake")

    envs.register("short_lake", short_lake)
    assert "short_lake" in envs.names()
    assert envs.default_settings("short_lake") == {"time_limit": 5}
    assert envs.make("short_lake", time_limit=3).time_limit == 3
    with pytest.raises(UserError, match="Did you mean 'time_limit'"):
        envs.make("short_lake", timelimit=3)
    for taken in ("short_lake", "CartPole-v1"):
        with pytest.raises(UserError, match="already taken"):
            envs.register(taken, short_lake)


# What each probe asks for: observations in {obs}, and reward of (sign of the observation, time, action).
PROBES = [
    ("probe-value", {0.0}, lambda sign, time, action: 1.0),
    ("probe-observation", {-1.0, 1.0}, lambda sign, time, action: sign),
    ("probe-discount", {0.0}, lambda sign, time, action: float(time == 1)),
    ("probe-action", {0.0}, lambda sign, time, action: [-1.0, 1.0][action]),
    ("probe-policy", {-1.0, 1.0}, lambda sign, time, action: [-sign, sign][action]),
]


@pytest.mark.parametrize(("name", "observed", "reward"), PROBES)
def test_probes_pay_what_their_table_says(name, observed, reward):
    env = envs.make(name)
    states, obs = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 64))
    assert set(np.unique(obs)) == observed
    for action in range(env.action_space.n):
        state = states
        for time in range(env.time_limit):
            state, timestep = jax.vmap(env.step, (None, 0, None))(jax.random.key(1), state, jnp.int32(action))
            expected = [reward(float(sign), time, action) for sign in obs[:, 0]]
            np.testing.assert_array_equal(timestep.reward, expected)
            np.testing.assert_array_equal(timestep.last, time + 1 == env.time_limit)
            np.testing.assert_array_equal(timestep.discount, float(time + 1 < env.time_limit))
            if name == "probe-discount":
                np.testing.assert_array_equal(timestep.obs, time + 1)


@pytest.mark.parametrize("name", ["CartPole-v1", "Breakout-MinAtar", "random_mdp", "reverse"])
def test_made_while_something_is_traced(name):
    """As a sweep does, whose settings are traced."""
    spaces = []

    @jax.jit
    def program(key):
        env = envs.make(name)
        spaces.append(env.observation_space)
        return env.reset(key)[1]

    assert np.isfinite(program(jax.random.key(0))).all()
    assert jax.tree.all(jax.tree.map(np.array_equal, spaces[0], envs.make(name).observation_space))


@pytest.mark.parametrize("name", ["sort", "Pendulum-v1"])
def test_an_environment_can_be_a_static_argument(name):
    env = envs.make(name)
    longest = jax.jit(lambda env, x: env.time_limit * x, static_argnums=0)
    assert longest(env, 2) == longest(env._replace(), 2) == 2 * env.time_limit
    assert longest._cache_size() == 1
    assert longest(env._replace(time_limit=7), 2) == 14


def test_a_learner_can_be_a_static_argument():
    env = envs.make("Pendulum-v1")
    learner = policy_gradient(env, *networks.mlp(env), ladder.ppo(num_envs=2))
    state = jax.jit(lambda learner, key: learner.init(key), static_argnums=0)(learner, jax.random.key(0))
    assert state.steps == 0


def test_boxes_are_equal_where_their_bounds_are():
    box, same = (Box(low, np.ones(2)) for low in (np.zeros(2), -np.zeros(2)))
    assert (box == same, box != same, hash(box) == hash(same)) == (True, False, True)
    for other in (Box(np.zeros(2), np.array([1, 2])), Box(np.zeros(3), np.ones(3)), Discrete(2), (box.low, box.high)):
        assert (box == other, box != other) == (False, True)


def test_random_actions_lie_in_every_box_and_are_uniform_there():
    """Beside the only bound where there is one, within [-1, 1] without any; a box may be as large as float32."""
    infinite, largest = np.inf, np.float32(3.4e38)
    bounds = [
        (-infinite, infinite, -1, 1),
        (0, infinite, 0, 1),
        (5, infinite, 5, 6),
        (-infinite, -2, -3, -2),
        (-largest, largest, -largest, largest),
        (2, 2.5, 2, 2.5),
    ]
    low, high, least, most = np.array(bounds, np.float32).T
    env = envs.make("Pendulum-v1")._replace(action_space=Box(low, high))
    drawn = jax.vmap(lambda key: contract.random_action(env, key, None))(jax.random.split(jax.random.key(0), 4_000))
    place = (np.asarray(drawn, float) - least) / (most.astype(float) - least)
    assert place.min() >= 0
    assert place.max() <= 1
    np.testing.assert_allclose(np.quantile(place, [0.25, 0.5, 0.75], axis=0).T, [[0.25, 0.5, 0.75]] * 6, atol=0.03)


def test_random_actions_of_ordinary_boxes_are_those_of_jax_bit_for_bit():
    env, key = envs.make("Pendulum-v1"), jax.random.key(3)
    for low, high in ((-2.0, 2.0), (0.1, 0.7), (-1e-20, 1e20), (3.0, 3.0)):
        box = Box(np.full(100, low, np.float32), np.full(100, high, np.float32))
        plain = jax.random.uniform(key, (100,), minval=low, maxval=high)
        np.testing.assert_array_equal(contract.random_action(env._replace(action_space=box), key, None), plain)
