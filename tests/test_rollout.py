"""Rollouts: what is recorded where episodes end, masks, keys, shared start states, and resampling of groups."""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpg import networks, rollout
from jaxpg.errors import UserError
from jaxpg.objectives import advantages
from jaxpg.parallel import collectives
from jaxpg.parallel.machine import program_for
from jaxpg.rollout import CollectorState, RolloutStats
from jaxpg.rollout import metrics as rollout_metrics
from jaxpg.rollout.collector import step_keys
from jaxpg.rollout.segments import episode_stats
from jaxpg.types import Array, Box, Discrete, Env, Episodes, Outcome, Policy, Rollout, StepRewards, TimeStep, Transition

LIMIT, COLUMNS, STEPS = 4, 6, 9
ENV = tiny.counter(time_limit=LIMIT)
UNIFORM = tiny.softmax_policy(jnp.zeros((2, 3)))


class Echo(NamedTuple):
    """A distribution with one outcome."""

    value: Array

    def noise(self, key):
        return ()

    def at(self, noise):
        return self.value

    def log_prob(self, action):
        return jnp.zeros(())


class EchoKey(NamedTuple):
    """A distribution that shows the key it is sampled with."""

    nothing: Array

    def noise(self, key):
        return jax.random.key_data(key)

    def at(self, noise):
        return noise

    def log_prob(self, action):
        return jnp.zeros(())


# Remembers 100 times the first observation's length, plus the steps since; the action is what it remembers.
REMEMBERING = Policy(
    init=lambda key: (),
    start=lambda params, obs: 100.0 * obs[0],
    act=lambda params, memory, obs: (Echo(memory), memory + 1),
    evaluate=lambda params, rollout: None,
    needs_trajectories=True,
)
SHOWS_KEYS = Policy(
    init=lambda key: (),
    start=lambda params, obs: (),
    act=lambda params, memory, obs: (EchoKey(jnp.zeros(())), memory),
    evaluate=lambda params, rollout: None,
)


def shows_keys() -> Env:
    """Episodes of one or two steps; observations are the keys of the reset and of the step, and the time."""

    def obs(key, time):
        return jnp.append(jax.random.key_data(key), time.astype(jnp.uint32))

    def reset(key):
        time = jnp.zeros((), jnp.int32)
        return time, obs(key, time)

    def step(key, time, action):
        last = (time == 1) | (action[0] % 2 == 0)
        return time + 1, TimeStep(obs(key, time + 1), jnp.zeros(()), jnp.ones(()), last)

    space = Box(np.zeros(3, np.float32), np.full(3, np.inf, np.float32))
    return Env("keys", reset, step, space, Discrete(2), 2)  # actions are keys, which no Box would leave as they are


def test_an_environment_gets_actions_within_its_bounds():
    """Learners keep what was drawn, whose density they know; scores are of what was executed."""
    low, high = np.float32([-0.5, 0.0]), np.float32([0.25, np.inf])

    def step(key, state, action):
        inside = (action >= low).all() & (action <= high).all()
        return state, TimeStep(jnp.zeros(1), jnp.where(inside, 1.0, -9.0), jnp.ones(()), state < 0)

    unit = Box(np.zeros(1, np.float32), np.ones(1, np.float32))
    env = Env("bounds", lambda key: (jnp.zeros(()), jnp.zeros(1)), step, unit, Box(low, high), 20)
    policy, _ = networks.mlp(env)
    for collector in (rollout.continuing(num_envs=8, num_steps=8), rollout.episodic(num_envs=8)):
        ((_, part, _),) = collected(collector, env, policy)
        assert (part.steps.reward == 1).all()
        assert (part.steps.action[..., 0] > 0.25).any()
        assert (part.steps.action[..., 1] < 0.0).any()
    actor = rollout.make_actor(policy, policy.init(jax.random.key(0)))
    for greedy in (False, True):
        scored = rollout.evaluate(env, actor, jax.random.key(0), episodes=8, greedy=greedy)
        np.testing.assert_array_equal(scored.returns, 20)
    played = rollout.record_episode(env, actor, jax.random.key(0), greedy=False)
    played = np.asarray(played.actions)
    assert (played >= low).all()
    assert (played <= high).all()


def collected(collector, env, policy, calls=1, seed=0):
    """Results of some calls in a row: [(runner before, Rollout, RolloutStats)]."""

    @tiny.jit
    def run(key):
        params = policy.init(key)
        runner, results = collector.init(env, policy, params, jax.random.fold_in(key, calls)), []
        for i in range(calls):
            after, steps, stats = collector.collect(env, policy, params, runner, jax.random.fold_in(key, i))
            results.append((runner, steps, stats))
            runner = after
        return results

    return run(jax.random.key(seed))


@pytest.fixture(scope="module")
def segments():
    collector = rollout.continuing(num_envs=COLUMNS, num_steps=STEPS)
    results = collected(collector, ENV, UNIFORM, calls=3)
    steps = jax.tree.map(lambda *parts: np.concatenate(parts), *(part.steps for _, part, _ in results))
    return results, steps, np.concatenate([tiny.next_obs(part) for _, part, _ in results])


def check_steps(steps: Transition, successors, real):
    """Every real step follows from its observation by the rules of the counter."""
    length, time = np.moveaxis(steps.obs, -1, 0)
    known = real & (steps.discount > 0)
    np.testing.assert_array_equal(successors[known], np.stack([length, time + 1], -1)[known])
    np.testing.assert_allclose(steps.reward[real], (10 * length + time + 0.1 * steps.action)[real], rtol=1e-6)
    terminated = time + 1 >= length
    np.testing.assert_array_equal(steps.discount[real], 1.0 - terminated[real])
    np.testing.assert_array_equal(steps.last[real], (terminated | (time + 1 >= LIMIT))[real])
    np.testing.assert_allclose(steps.log_prob[real], np.log(1 / 3), rtol=1e-6)
    assert set(steps.action[real].tolist()) == {0, 1, 2}


def test_a_continuing_rollout_records_true_successors_and_both_kinds_of_ends(segments):
    _, steps, successors = segments
    check_steps(steps, successors, np.ones_like(steps.last))
    assert (steps.mask == 1).all()
    assert set(steps.discount[steps.last].tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("num_steps", [LIMIT - 1, 2 * LIMIT])
def test_as_many_time_outs_as_there_can_be_have_their_successors(num_steps):
    """Beside the end of the segment: one in a segment that is shorter than an episode, two in one of two episodes."""
    collector = rollout.continuing(num_envs=40, num_steps=num_steps)
    for _, part, _ in collected(collector, ENV, UNIFORM, calls=3)[1:]:
        steps = jax.tree.map(np.asarray, part.steps)
        check_steps(steps, np.asarray(tiny.next_obs(part)), np.ones_like(steps.last))
        breaks_off = steps.last & (steps.discount > 0)
        breaks_off[-1] = True
        assert breaks_off.sum(0).max() == num_steps // LIMIT + (num_steps % LIMIT > 0) + (num_steps % LIMIT != 1)


def test_environments_are_reset_after_an_end_and_continue_otherwise_also_across_calls(segments):
    _, steps, successors = segments
    begins = steps.last[:-1]
    length, time = steps.obs[1:, :, 0], steps.obs[1:, :, 1]
    np.testing.assert_array_equal(steps.obs[1:][~begins], successors[:-1][~begins])
    assert (time[begins] == 0).all()
    assert (steps.obs[0, :, 1] == 0).all()
    assert set(length[begins].tolist()) == {2.0, 3.0, 4.0, 5.0}  # drawn afresh


@pytest.mark.parametrize(("num_steps", "calls"), [(STEPS, 3), (1, 8)], ids=["segments", "single steps"])
def test_rollout_stats_equal_a_loop_over_the_steps(num_steps, calls):
    """An episode counts where it ends, with its rewards of earlier calls, even if it is longer than a segment."""
    results = collected(rollout.continuing(num_envs=COLUMNS, num_steps=num_steps), ENV, UNIFORM, calls=calls)
    returns, lengths = np.zeros(COLUMNS), np.zeros(COLUMNS)
    for _, part, stats in results:
        ended = []
        for reward, last in zip(np.asarray(part.steps.reward), np.asarray(part.steps.last), strict=True):
            returns, lengths = returns + reward, lengths + 1
            ended += [(returns[b], lengths[b]) for b in np.flatnonzero(last)]
            returns, lengths = np.where(last, 0, returns), np.where(last, 0, lengths)
        expected = num_steps * COLUMNS, len(ended), *np.sum([(0, 0), *ended], 0)
        np.testing.assert_allclose(stats[:4], expected, rtol=1e-6)


@pytest.fixture(scope="module")
def episodes():
    ((_, part, stats),) = collected(rollout.episodic(num_envs=40, group_size=4), ENV, UNIFORM)
    return jax.tree.map(np.asarray, part), stats


def test_an_episodic_rollout_is_whole_episodes_and_padding(episodes):
    part, _ = episodes
    steps, real = part.steps, part.steps.mask == 1
    check_steps(steps, tiny.next_obs(part), real)
    lengths = np.minimum(steps.obs[0, :, 0], LIMIT)
    assert steps.mask.shape == (LIMIT, 40)
    np.testing.assert_array_equal(real, np.arange(LIMIT)[:, None] < lengths[None])
    np.testing.assert_array_equal(steps.obs[real][:, 1], np.nonzero(real)[0])  # the time counts up from 0
    assert (steps.reward[~real] == 0).all()
    assert (steps.discount[~real] == 0).all()
    assert steps.last[~real].all()
    np.testing.assert_array_equal(part.loss_mask, steps.mask)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_rows_that_no_episode_reaches_are_padding(platform):
    """Collecting stops when the last episode is over; the rows behind it are as those behind any other episode."""
    with program_for(platform):
        ((_, part, _),) = collected(rollout.episodic(num_envs=5), tiny.counter(time_limit=40), UNIFORM)
    steps, reached = part.steps, int(part.steps.mask.any(1).sum())
    assert reached < 8
    assert steps.last[reached:].all()
    assert not any(x[reached:].any() for x in (steps.mask, steps.reward, steps.discount))
    assert steps.reward[:reached].any()


def noisy_counter(time_limit: int) -> Env:
    """A counter whose reward is drawn at every step."""
    env = tiny.counter(shortest=1, longest=time_limit, time_limit=time_limit)

    def step(key, state, action):
        state, timestep = env.step(key, state, action)
        return state, timestep._replace(reward=jax.random.uniform(key))

    return env._replace(step=step)


@pytest.mark.device
@pytest.mark.parametrize(("question", "drawn"), [(1, 5), (1, 12), (4, 3), (4, 6), (5, 5), (50, 3)])
def test_random_numbers_drawn_for_a_few_steps_are_those_drawn_for_all(machine_with, question, drawn):
    env = noisy_counter(time_limit=12)
    policy, _ = networks.mlp(env, hidden=(4,))
    collector = rollout.episodic(num_envs=6, group_size=2)
    machine_with(steps_drawn=1_000, steps_per_question=1)
    ((_, expected, _),) = collected(collector, env, policy)
    machine_with(steps_drawn=drawn, steps_per_question=question)
    ((_, found, _),) = collected(collector, env, policy)
    real = np.asarray(expected.steps.mask) > 0
    assert real.sum(0).max() > 5 > real.sum(0).min()
    np.testing.assert_array_equal(found.steps.mask, expected.steps.mask)
    for name in ("action", "reward", "log_prob"):
        ours, usual = (np.asarray(getattr(part.steps, name))[real] for part in (found, expected))
        np.testing.assert_allclose(ours, usual, rtol=1e-6, err_msg=name)
    rewards = np.asarray(expected.steps.reward)[real]
    assert len(np.unique(rewards)) == len(rewards)


def test_a_long_time_limit_draws_no_more_than_a_short_one(machine_with):
    """On a CPU; the number of its random numbers, of actions and of environments, is in the program."""
    machine_with(steps_drawn=64)
    programs = []
    for time_limit in (100, 10_000):
        env = noisy_counter(time_limit)
        policy, _ = networks.mlp(env, hidden=(4,))
        collect = partial(rollout.episodic(num_envs=6).collect, env, policy, policy.init(jax.random.key(0)), ())
        programs.append(str(jax.make_jaxpr(collect)(jax.random.key(1))))
    drawn = [sorted({int(n) for n in re.findall(r"key<fry>\[(\d+)\]", program)}) for program in programs]
    assert drawn[0] == drawn[1]
    assert max(drawn[0]) == 64 * 6 * 2


@pytest.mark.parametrize("unfinished", [0.0, -1e8])
def test_a_reward_of_the_episode_in_progress_takes_nothing_from_those_that_ended(unfinished):
    """Two columns: one whose episode of before ends and a new one begins, and one that only goes on."""
    reward = jnp.array([[0.25, 1.0], [0.5, 1.0], [unfinished, unfinished]])
    last = jnp.array([[False, False], [True, False], [False, False]])
    blank = jnp.zeros((3, 2))
    steps = Transition(blank, blank, blank, reward, blank, last, blank + 1)
    before = CollectorState((), (), (), jnp.array([4.0, 5.0]), jnp.array([6, 7]))
    after, stats = episode_stats(before, before, steps)
    assert stats.return_sum.tolist() == [4.75, 0]
    assert stats.length_sum.tolist() == [8, 0]
    np.testing.assert_allclose(after.episode_return, [unfinished, 7 + unfinished])
    assert after.episode_length.tolist() == [1, 10]


def test_what_is_reported_of_episodes_are_means_over_those_that_ended():
    stats = RolloutStats(*map(jnp.float32, (50, 4, 30.0, 44)))
    assert rollout_metrics.episode_metrics(stats) == {"episodes": 4, "return": 7.5, "length": 11}
    none = rollout_metrics.episode_metrics(RolloutStats(*map(jnp.float32, (50, 0, 0, 0))))
    assert none["episodes"] == 0
    assert np.isnan([none["return"], none["length"]]).all()
    outcome = Outcome(jnp.zeros(4), {"accuracy": jnp.array([1, 0, 0, 0])})
    assert rollout_metrics.outcome_metrics(outcome) == {"accuracy": 0.25}
    assert rollout_metrics.outcome_metrics(()) == {}


def test_stats_of_whole_episodes_count_real_steps_only(episodes):
    part, stats = episodes
    real = part.steps.mask.sum()
    np.testing.assert_allclose(stats[:4], (real, 40, part.steps.reward.sum(), real), rtol=1e-6)


def test_rewards_by_step_count_up_to_the_end_of_an_episode():
    """An outcome has them for as many steps as the longest episode: 10, 20, 30 and 40 here, and 1000 for its end."""

    def outcome(state):
        return Outcome(
            jnp.float32(1000.0), {}, step_rewards=StepRewards(10.0 * jnp.arange(1, LIMIT + 1), jnp.ones(LIMIT))
        )

    ((_, part, _),) = collected(rollout.episodic(num_envs=12), ENV._replace(outcome=outcome), UNIFORM)
    steps, t = jax.tree.map(np.asarray, part.steps), np.arange(LIMIT)[:, None]
    longest, time = np.moveaxis(steps.obs, -1, 0)
    length = np.minimum(longest[0], LIMIT)
    assert len(set(length.tolist())) > 1
    own = 10 * longest + time + 0.1 * steps.action  # see `check_steps`
    expected = np.where(t < length, own + 10 * (t + 1) + 1000 * (t == length - 1), 0)
    np.testing.assert_allclose(steps.reward, expected, rtol=1e-6)
    np.testing.assert_array_equal(steps.step_end, t < length)


def test_overlong_filtering_masks_truncated_episodes_in_the_loss_alone():
    """With a limit of 4, episodes of length 5 are truncated; those of length 4 terminate at the limit."""
    collector = rollout.episodic(num_envs=40)
    ((_, plain, stats),) = collected(collector, ENV, UNIFORM)
    ((_, part, same_stats),) = collected(rollout.with_overlong_filtering(collector), ENV, UNIFORM)
    jax.tree.map(np.testing.assert_array_equal, (part.steps, same_stats), (plain.steps, stats))
    lengths = part.steps.obs[0, :, 0]
    assert {4.0, 5.0} < set(lengths.tolist())
    np.testing.assert_array_equal(part.loss_mask, part.steps.mask * (lengths <= LIMIT)[None])


def test_what_the_mask_hides_is_no_time_out():
    """The second of two episodes ended before, whatever stands behind its end."""
    blank, last = jnp.zeros((2, 2)), jnp.array([[False, True], [True, True]])
    discount, mask = jnp.array([[1.0, 0.0], [1.0, 1.0]]), jnp.array([[1.0, 1.0], [1.0, 0.0]])
    steps = Transition(blank, blank, blank, blank, discount, last, mask)
    assert rollout.truncated(steps).tolist() == [True, False]


def test_a_group_shares_its_start_and_nothing_else(episodes):
    part, _ = episodes
    starts = part.steps.obs[0, :, 0].reshape(10, 4)
    assert (starts == starts[:, :1]).all()
    assert len(set(starts[:, 0].tolist())) > 2
    actions = part.steps.action[0].reshape(10, 4)
    assert (actions != actions[:, :1]).any(1).mean() > 0.6


def seen_keys(part):
    """All keys that were used in a rollout as 64-bit numbers: of resets, of actions and of steps."""
    steps = jax.tree.map(np.asarray, part.steps)
    real = steps.mask == 1
    first = real & (steps.obs[..., 2] == 0)
    used = {"reset": steps.obs[..., :2][first], "act": steps.action[real], "step": tiny.next_obs(part)[..., :2][real]}
    return {purpose: keys.astype(np.uint64) @ np.array([2**32, 1], np.uint64) for purpose, keys in used.items()}


def children(keys):
    """The first keys that would be split off these, which are also the bits they would sample."""
    data = jnp.asarray(np.stack([keys >> np.uint64(32), keys & np.uint64(2**32 - 1)], -1).astype(np.uint32))
    split = jax.vmap(lambda k: jax.random.split(k, 16))(jax.random.wrap_key_data(data))
    return np.asarray(jax.random.key_data(split)).astype(np.uint64) @ np.array([2**32, 1], np.uint64)


@pytest.mark.parametrize("reset_pool", [0, 9])
def test_no_key_is_used_twice_nor_drawn_from_a_used_one(reset_pool):
    collector = rollout.continuing(num_envs=8, num_steps=9, reset_pool=reset_pool)
    for _, part, _ in collected(collector, shows_keys(), SHOWS_KEYS, calls=2):
        used = np.concatenate(list(seen_keys(part).values()))
        assert len(set(used.tolist())) == len(used)
        assert not set(used.tolist()) & set(children(used).ravel().tolist())


def test_start_states_of_a_pool_are_used_in_turn():
    collector = rollout.continuing(num_envs=8, num_steps=24, reset_pool=2)
    ((_, part, _),) = collected(collector, shows_keys(), SHOWS_KEYS)
    obs = np.asarray(part.steps.obs)
    for column in range(8):
        starts = obs[1:, column][obs[1:, column, 2] == 0]
        assert len(starts) > 4
        assert (starts[0] != starts[1]).any()
        np.testing.assert_array_equal(starts[2:], starts[:-2])


def test_a_group_shares_the_key_of_its_start_alone():
    ((_, part, _),) = collected(rollout.episodic(num_envs=12, group_size=3), shows_keys(), SHOWS_KEYS)
    keys = seen_keys(part)
    assert len(set(keys["reset"].tolist())) == 4
    others = np.concatenate([keys["act"], keys["step"]])
    assert len(set(others.tolist()) - set(keys["reset"].tolist())) == len(others)


@pytest.mark.parametrize("group_size", [1, 2])
def test_columns_get_the_same_keys_however_they_are_split_over_devices(group_size):
    keys = rollout.env_keys(jax.random.key(0), 8, group_size)
    shards = jax.vmap(lambda _: rollout.env_keys(jax.random.key(0), 2, group_size), axis_name=collectives.DATA)
    np.testing.assert_array_equal(jax.random.key_data(shards(jnp.arange(4))).reshape(8, -1), jax.random.key_data(keys))
    assert len({tuple(k) for k in jax.random.key_data(keys).tolist()}) == 8 // group_size


def test_every_key_of_a_column_is_its_own_and_the_same_on_any_device():
    each = partial(rollout.env_keys, jax.random.key(0), group_size=2, shape=(5, 3))
    keys = np.asarray(jax.random.key_data(each(8)))
    shards = jax.vmap(lambda _: each(2), axis_name=collectives.DATA)(jnp.arange(4))
    np.testing.assert_array_equal(jax.random.key_data(shards).reshape(keys.shape), keys)
    assert len(np.unique(keys.reshape(-1, 2), axis=0)) == 8 // 2 * 5 * 3


@pytest.mark.parametrize("with_reset", [False, True])
def test_keys_of_some_steps_are_those_of_all_at_their_places(with_reset):
    keys = partial(step_keys, jax.random.key(0), num_columns=4, num_steps=9, with_reset=with_reset)
    steps = jnp.array([5, 6, 8])
    of_some, of_all = (jax.tree.map(jax.random.key_data, each) for each in (keys(steps=steps), keys()))
    jax.tree.map(lambda some, every: np.testing.assert_array_equal(some, every[steps]), of_some, of_all)


def test_columns_that_do_not_divide_into_groups_are_refused():
    """At once where all of them do not, and while it is traced where those of a device do not."""
    with pytest.raises(UserError, match="num_envs = 6 cannot be cut into groups of group_size = 4"):
        rollout.episodic(num_envs=6, group_size=4)
    collector = rollout.episodic(num_envs=12, group_size=4)
    shards = jax.vmap(lambda _: collected(collector, ENV, UNIFORM), axis_name=collectives.DATA)
    with pytest.raises(
        UserError, match="num_envs = 6 on each of 2 devices cannot be cut into groups of group_size = 4"
    ):
        shards(jnp.arange(2))


@pytest.mark.parametrize(
    "collector", [rollout.continuing(num_envs=5, num_steps=7), rollout.episodic(num_envs=5)], ids=["segment", "whole"]
)
def test_memory_begins_with_an_episode_and_is_carried_through_it(collector):
    for runner, part, _ in collected(collector, ENV, REMEMBERING, calls=3):
        length, time = np.moveaxis(part.steps.obs, -1, 0)
        real = part.steps.mask == 1
        np.testing.assert_array_equal(part.steps.action[real], (100 * length + time)[real])
        np.testing.assert_array_equal(part.episodes.memory, part.steps.action[0])
        if runner:
            np.testing.assert_array_equal(part.episodes.memory, runner.memory)


GROUPS = [
    [[1, 1], [0, 1], [0, 0]],  # the first and the last carry no signal
    [[2, 2], [3, 4], [5, 5]],  # one to replace the first
    [[6, 7], [8, 9], [1, 0]],  # more than are needed
    [[20, 21], [22, 23], [24, 25]],  # never sampled
]


def scripted(key):
    """An episodic collector whose round i gives the returns GROUPS[i] in a first step; the second is real above 5."""
    rounds = jax.random.key_data(jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(GROUPS))))
    returns = jnp.array(GROUPS, jnp.float32).reshape(len(GROUPS), 6)

    def collect(env, policy, params, runner, round_key):
        which = (rounds == jax.random.key_data(round_key)[None]).all(1).argmax()
        mask = jnp.stack([jnp.ones(6), returns[which] > 5])
        poison = 50.0 * jnp.arange(6.0) * (1 - mask[1])  # what the mask hides is no return
        reward = jnp.stack([returns[which], poison])
        zeros = jnp.zeros((2, 6))
        obs = jnp.broadcast_to(returns[which][None, :, None], (2, 6, 1))
        goes_on = jnp.stack([mask[1], jnp.zeros(6)])
        steps = Transition(obs, zeros, zeros, reward, goes_on, goes_on == 0, mask)
        return (
            runner,
            Rollout(steps, mask, episodes=Episodes(memory=returns[which])),
            rollout.RolloutStats(*map(jnp.float32, (6, 6, 1, 6))),
        )

    return rollout.Collector(init=lambda *args: (), collect=collect, num_envs=6, group_size=2, whole_episodes=True)


@pytest.mark.parametrize(
    ("max_resample_rounds", "rounds", "returns"),
    [
        (1, 1, [1, 1, 0, 1, 0, 0]),
        (2, 2, [3, 4, 0, 1, 0, 0]),
        (3, 3, [3, 4, 0, 1, 6, 7]),
        (4, 3, [3, 4, 0, 1, 6, 7]),
    ],
)
def test_groups_without_signal_are_refilled_until_all_are_full_or_the_rounds_spent(
    max_resample_rounds, rounds, returns
):
    key = jax.random.key(0)
    collector = rollout.with_dynamic_sampling(scripted(key), max_resample_rounds=max_resample_rounds, gamma=0.9)
    _, part, stats = collector.collect(ENV, UNIFORM, (), (), key)
    for column in (part.steps.reward[0], part.steps.obs[1, :, 0], part.episodes.memory):
        np.testing.assert_array_equal(column, returns)
    np.testing.assert_array_equal(stats[:4], [6 * rounds, 6 * rounds, rounds, 6 * rounds])
    pairs = np.reshape(returns, (3, 2))
    signal = np.repeat(pairs[:, 0] != pairs[:, 1], 2)
    real = np.stack([np.ones(6), np.array(returns) > 5])
    np.testing.assert_array_equal(part.steps.mask, real)  # a group left over is real all the same
    np.testing.assert_array_equal(part.loss_mask, signal * real)


@pytest.mark.parametrize(("gamma", "signal"), [(1.0, [False, True]), (0.9, [True, True])])
def test_signal_is_a_difference_in_what_is_credited(gamma, signal):
    """Two episodes with one point, early and late, and one with a point beside one without."""
    reward = jnp.array([[1.0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0]])
    last = jnp.array([[True, False, False, False], [True, False, False, True], [True, True, True, True]])
    mask = jnp.concatenate([jnp.ones((1, 4)), 1.0 - last[:-1]])
    steps = Transition(mask[..., None], mask, mask, reward, 1.0 - last, last, mask)
    part = Rollout(steps, mask)
    np.testing.assert_array_equal(rollout.has_signal(part, 2, gamma), signal)
    credit = advantages.group_relative(steps, 0 * mask, 0 * mask, jnp.zeros(()), gamma=gamma, group_size=2)
    np.testing.assert_array_equal((credit.advantage[0].reshape(2, 2) != 0).all(1), signal)
