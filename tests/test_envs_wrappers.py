"""Wrappers against sequences written by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg import envs
from jaxpg.errors import UserError
from jaxpg.types import Box, Discrete, Env, Outcome, StepRewards, TimeStep


def counter(length=5, shape=(2,), actions=None):
    """Counts steps and terminates after `length`; observes the count everywhere, pays the action it was given."""

    def observe(time):
        return jnp.full(shape, time, jnp.float32)

    def reset(key):
        return jnp.int32(0), observe(0)

    def step(key, state, action):
        time = state + 1
        done = time >= length
        reward = jnp.float32(jnp.sum(action))
        return time, TimeStep(observe(time), reward, 1.0 - done.astype(jnp.float32), done)

    bound = np.full(shape, 100.0, np.float32)
    return Env("counter", reset, step, Box(-bound, bound), actions or Discrete(4), time_limit=1000)


def play(env, actions):
    """The first observation, then the time steps under these actions; stops for no end."""
    state, obs = env.reset(jax.random.key(0))
    step = jax.jit(env.step)
    timesteps = []
    for i, action in enumerate(actions):
        state, timestep = step(jax.random.key(i), state, action)
        timesteps.append(timestep)
    return obs, jax.tree.map(lambda *x: np.stack(x), *timesteps), state


CHOSEN = [1, 2, 3, 1, 2]


@pytest.mark.parametrize(("probability", "executed"), [(0.0, CHOSEN), (1.0, [0] * 5)])
def test_sticky_actions_at_the_extremes(probability, executed):
    _, steps, _ = play(envs.sticky_actions(counter(), probability=probability), CHOSEN)
    np.testing.assert_array_equal(steps.reward, executed)


def test_sticky_actions_repeat_what_was_executed_not_what_was_chosen():
    steps, probability = 20_000, 0.25
    box = Box(np.zeros(1, np.float32), np.ones(1, np.float32))
    env = envs.sticky_actions(counter(actions=box), probability=probability)
    chosen = jax.random.uniform(jax.random.key(1), (steps, 1))

    def step(state, x):
        state, timestep = env.step(*x[:1], state, x[1])
        return state, timestep.reward

    state, _ = env.reset(jax.random.key(0))
    _, executed = jax.lax.scan(step, state, (jax.random.split(jax.random.key(2), steps), chosen))
    executed, chosen = np.asarray(executed), np.asarray(chosen)[:, 0]
    stuck = executed != chosen
    before = np.concatenate([[0.0], executed[:-1]])
    np.testing.assert_array_equal(executed[stuck], before[stuck])
    assert abs(stuck.mean() - probability) < 4 * np.sqrt(probability * (1 - probability) / steps)


def test_the_action_before_the_first_lies_within_the_bounds():
    """Nothing is remembered yet; 0 where a Box has it, else the bound nearest to it."""
    box = Box(np.array([1, -1, -3], np.float32), np.array([2, 1, -2], np.float32))
    env = envs.sticky_actions(counter(actions=box), probability=1.0)
    _, steps, _ = play(env, [jnp.array([1.5, 0.5, -2.5])] * 2)
    np.testing.assert_array_equal(steps.reward, [1 + 0 - 2] * 2)


WITH_MEMORY = {
    "sticky_actions": {"probability": 0.0},
    "time_limit": {"steps": 2},
    "frame_stack": {"num": 2},
    "flatten": {},
}


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_context_and_outcome_are_those_of_the_state_inside(name):
    """A pair, as a wrapper's own state is: read instead of it, that would be the wrapper's memory."""

    def reset(key):
        state, obs = plain.reset(key)
        return (state, jnp.float32(42)), obs

    def step(key, state, action):
        time, timestep = plain.step(key, state[0], action)
        return (time, state[1]), timestep

    def outcome(state):
        return Outcome(state[1], {"time": state[0]}, step_rewards=StepRewards(jnp.arange(9.0), jnp.ones(9)))

    plain = counter()
    own = plain._replace(reset=reset, step=step, context=lambda state: state[1], outcome=outcome, time_limit=9)
    env = envs.wrap(envs.wrap(own, name, **WITH_MEMORY[name]), name, **WITH_MEMORY[name])
    _, _, state = play(env, [1, 1])
    found = env.outcome(state)
    assert (float(found.reward), int(found.parts["time"]), float(env.context(state))) == (42.0, 2, 42.0)
    np.testing.assert_array_equal(found.step_rewards.reward, np.arange(env.time_limit))
    envs.check_env(env, name)


@pytest.mark.parametrize(
    ("limit", "last", "discount"),
    [
        (3, [0, 0, 1], [1, 1, 1]),  # a time-out
        (5, [0, 0, 0, 0, 1], [1, 1, 1, 1, 0]),  # both at once: the termination wins
        (7, [0, 0, 0, 0, 1], [1, 1, 1, 1, 0]),  # a termination
    ],
)
def test_time_limit(limit, last, discount):
    env = envs.time_limit(counter(), steps=limit)
    _, steps, _ = play(env, [0] * len(last))
    np.testing.assert_array_equal(steps.last, np.array(last, bool))
    np.testing.assert_array_equal(steps.discount, discount)
    assert env.time_limit == limit
    assert envs.time_limit(env, steps=1000).time_limit == limit
    late = envs.time_limit(counter()._replace(min_truncation_step=9), steps=limit)  # from whichever cuts first
    assert (late.min_truncation_step, envs.time_limit(late, steps=2).min_truncation_step) == (limit, 2)


def test_frame_stack_holds_the_last_observations_oldest_first():
    env = envs.frame_stack(counter(shape=(2,)), num=3)
    obs, steps, _ = play(env, [0, 0, 0])
    np.testing.assert_array_equal(obs, [0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(steps.obs, [[0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 2, 2], [1, 1, 2, 2, 3, 3]])
    assert env.observation_space.shape == (6,)


def test_frame_stack_stacks_channels_of_images():
    env = envs.frame_stack(counter(shape=(4, 5, 2)), num=2)
    _, steps, _ = play(env, [0, 0])
    assert steps.obs.shape == (2, 4, 5, 4)
    assert env.observation_space.shape == (4, 5, 4)
    np.testing.assert_array_equal(steps.obs[1, 2, 3], [1, 1, 2, 2])


def test_flatten():
    env = envs.flatten(envs.make("Catch-bsuite"))
    obs, steps, _ = play(env, [1, 1])
    whole, whole_steps, _ = play(envs.make("Catch-bsuite"), [1, 1])
    np.testing.assert_array_equal(obs, whole.reshape(50))
    np.testing.assert_array_equal(steps.obs, whole_steps.obs.reshape(2, 50))
    assert env.observation_space.shape == (50,)


@pytest.mark.parametrize(("wrap", "shape"), [(partial(envs.frame_stack, num=3), (2, 4)), (envs.flatten, (2, 4))])
def test_a_mask_is_read_off_the_newest_observation(wrap, shape):
    """Here the action that is the count is allowed, and no other."""

    def count(obs):
        return jax.nn.one_hot(obs[..., 0, 0].astype(jnp.int32), 4, dtype=bool)

    wrapped = wrap(counter(shape=shape)._replace(action_mask=count))
    obs, steps, _ = play(wrapped, [0, 0, 0])
    np.testing.assert_array_equal(wrapped.action_mask(obs), np.eye(4)[0])
    np.testing.assert_array_equal(wrapped.action_mask(steps.obs), np.eye(4)[1:])


def test_sticky_actions_are_not_for_actions_that_may_be_forbidden():
    masked = counter()._replace(action_mask=lambda obs: jnp.ones((*obs.shape[:-1], 4), bool))
    with pytest.raises(UserError, match="counter forbids actions"):
        envs.sticky_actions(masked)


def test_wrappers_compose_and_unwrap():
    env = envs.frame_stack(
        envs.time_limit(envs.sticky_actions(envs.make("Breakout-MinAtar"), probability=0.1), steps=4), num=2
    )
    obs, steps, state = play(env, [0, 1, 2, 0])
    assert obs.shape == env.observation_space.shape == (10, 10, 8)
    np.testing.assert_array_equal(steps.last, [False, False, False, True])
    assert int(envs.unwrap(state).time) == 4
    assert envs.unwrap(envs.unwrap(state)) is envs.unwrap(state)
    fresh, _ = env.reset(jax.random.key(0))
    assert jax.tree.map(jnp.asarray, fresh)._fields == state._fields
    assert [x.dtype for x in jax.tree.leaves(fresh)] == [x.dtype for x in jax.tree.leaves(state)]


def test_sizes_may_be_numpys_and_are_whole():
    env = envs.frame_stack(envs.time_limit(counter(), steps=np.int64(2)), num=np.int32(2))
    assert (env.time_limit, env.observation_space.shape) == (2, (4,))
    assert type(env.time_limit) is int
    with pytest.raises(UserError, match=r"num must be a whole number, not 2\.5"):
        envs.frame_stack(counter(), num=2.5)
    with pytest.raises(UserError, match=r"steps must be a whole number, not 2\.5"):
        envs.time_limit(counter(), steps=2.5)


def test_wrap_by_name():
    env = envs.wrap(envs.wrap(counter(), "time_limit", steps=2), "frame_stack", num=2)
    assert env.time_limit == 2
    assert env.observation_space.shape == (4,)


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("frame_stak", {}, "no wrapper 'frame_stak'. Did you mean 'frame_stack'"),
        ("frame_stack", {"number": 2}, "no setting 'number'. Did you mean 'num'"),
        ("frame_stack", {"num": 2.0}, "num must be like its default 4"),
        ("frame_stack", {"num": 0}, "num must be at least 1"),
        ("frame_stack", {"env": 0}, "no setting 'env'"),
        ("time_limit", {}, "time_limit needs a value for steps"),
        ("time_limit", {"steps": 0}, "steps must be at least 1"),
        ("time_limit", {"steps": "many"}, "steps must be a whole number"),
        ("sticky_actions", {"probability": 2}, "probability must be in"),
        ("flatten", {"axis": 1}, "no setting 'axis'. It has none"),
    ],
)
def test_bad_wrappers_are_refused(name, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        envs.wrap(counter(), name, **settings)
