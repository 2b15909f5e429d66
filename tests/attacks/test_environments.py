"""Environments of a user's own that break the contract: one sentence each, and nothing left behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_environments import BAD, State, at, line, returned

from jaxpg import envs, ladder, networks, parallel, values
from jaxpg.algorithm import PolicyGradient
from jaxpg.cli.main import main
from jaxpg.envs import check_env, wrappers
from jaxpg.errors import UserError
from jaxpg.policy_gradient import policy_gradient
from jaxpg.rollout.evaluation import RecordedEpisode, evaluate, evaluation_metrics, record_episodes
from jaxpg.training import memory
from jaxpg.training.advance import RunState
from jaxpg.training.diagnosis import CheckedRollout, Fault, Rerun, _finite_successors
from jaxpg.training.health import EVALUATED, Diverged
from jaxpg.training.loop import train
from jaxpg.types import Actor, Array, Box, Env, Episodes, Experience, Learner, Rollout, TimeStep, Transition


@pytest.fixture(autouse=True)
def own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs.registry, "_user_factories", {})


PLAYED = list(BAD).index("reward NaN")
EARLY = {kind: i < PLAYED for i, kind in enumerate(BAD)} | {"reward NaN": True, "never ends": True}
"""The quick lane has all that is found without compiling, and some of the rest."""


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=() if quick else pytest.mark.full) for x, quick in EARLY.items()]
)
def test_a_bad_environment_is_refused_by_its_cause(kind: str) -> None:
    factory, sentence = BAD[kind]
    envs.register("bad", factory)
    with pytest.raises(UserError) as error:
        envs.make("bad")
    text = str(error.value)
    print(text)
    assert "bad" in text
    assert re.search(sentence, text)
    assert "\n" not in text
    assert len(text) < 400


def test_a_good_environment_passes_and_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    def check(env: Env, name: str) -> Env:
        checked.append(name)
        return check_env(env, name)

    monkeypatch.setattr(envs.registry, "check_env", check)
    envs.register("fine", line)
    for limit in (60, 60, 70):
        assert envs.make("fine", time_limit=limit).time_limit == limit
    assert checked == ["fine", "fine"]


@pytest.mark.parametrize("name", ["Pendulum-v1", "probe-discount"])
def test_environments_of_jaxpg_keep_the_contract(name: str) -> None:
    check_env(envs.make(name), name)


@pytest.mark.full
@pytest.mark.parametrize("name", [x for x in envs.names() if x not in ("MNISTBandit-bsuite", "json_lines")])
def test_all_environments_of_jaxpg_keep_the_contract(name: str) -> None:
    check_env(envs.make(name), name)


@pytest.mark.full
def test_constants_of_python_are_scalars_too() -> None:
    """A reward of 1.0 and a `last` of False, in every loop that runs environments."""

    def plain(state: State, timestep: TimeStep) -> tuple[State, TimeStep]:
        return state, timestep._replace(reward=1.0, discount=1.0, last=False)

    env = check_env(wrappers.time_limit(line(at_step=plain), steps=5)._replace(name="plain"), "plain")
    unwrapped = line(at_step=plain, time_limit=2_000)
    check_env(unwrapped, "unwrapped")
    actor = Actor(start=lambda obs: (), act=lambda memory, obs, key, greedy: (jnp.int32(1), memory))
    for each in (env, unwrapped._replace(time_limit=3)):
        settings = {"episodes": 2, "greedy": True}
        result = evaluate(each, actor, jax.random.key(0), **settings)
        assert result.returns.tolist() == [each.time_limit] * 2
        recorded = record_episodes(each, actor, jax.random.key(0), **settings)
        assert recorded.rewards.sum(1).tolist() == [each.time_limit] * 2
    policy, critic = networks.mlp(unwrapped, hidden=(4,))
    for algorithm in (ladder.a2c(num_envs=2, num_steps=4), ladder.reinforce(num_envs=2)):
        learner = policy_gradient(unwrapped._replace(time_limit=6), policy, critic, algorithm)
        jax.eval_shape(lambda key, learner=learner: learner.step(learner.init(key), key), jax.random.key(0))


def test_the_last_observation_of_a_termination_is_nobodys_successor() -> None:
    """Nothing is read there, so nothing is said of it; at a time-out and at the end of a segment it is read."""
    t, one = np.zeros((3, 3), np.float32), np.ones((3, 3), np.float32)
    last, discount = np.zeros((3, 3), bool), one.copy()
    last[2, 0], discount[2, 0] = True, 0  # terminated in the last row
    last[1, 1] = True  # timed out in the row before
    steps = Transition(obs=t, action=t, log_prob=t, reward=t, discount=discount, last=last, mask=one)
    final_obs = np.array([[np.nan, np.nan, np.nan], [0, 0, 0]], np.float32)  # two slots a column
    found = _finite_successors(jax.tree.map(jnp.asarray, Rollout(steps, one, final_obs, Episodes())))
    assert found.tolist() == [[True, True, True], [True, False, True], [True, True, False]]


TASK = """
environment = "{environment}"
total_steps = 200
evaluations = 1
evaluation_episodes = 2
[a2c]
num_envs = {num_envs}
num_steps = 4
"""


def write_task(folder: Path, environment: str, num_envs: int = 2) -> Path:
    (folder / "task.toml").write_text(TASK.format(environment=environment, num_envs=num_envs))
    return folder / "task.toml"


@pytest.mark.parametrize(
    ("environment", "num_envs", "sentence"),
    [
        ("bad_environments:exits", 2, "SystemExit: 3 (bad_environments.py, line"),
        ("bad_environments:branching", 2, "The step of bad_environments:branching raised Tracer"),
        pytest.param("bad_environments:good", 10**7, "GiB on each device", marks=pytest.mark.full),
    ],
)
def test_a_command_that_is_refused_leaves_nothing_and_the_mended_one_runs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    environment: str,
    num_envs: int,
    sentence: str,
) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda mesh: 2.0**27)
    out = tmp_path / "run"

    def run(environment: str, num_envs: int) -> int:
        task = str(write_task(tmp_path, environment, num_envs))
        return main(["train", task, "a2c", "--out", str(out), "--quiet", "--steps", "8"])

    assert run(environment, num_envs) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert told.count("\n") == 1
    assert not out.exists()
    if num_envs > 2:
        assert "num_envs = 10,000,000" in told
        assert run("bad_environments:good", 2) == 0


def learner_in(env: Env, algorithm: PolicyGradient) -> Learner:
    policy, critic = networks.mlp(env, hidden=(4,))
    return policy_gradient(env, policy, critic, algorithm)


def a2c(**settings: float) -> PolicyGradient:
    return ladder.a2c(num_envs=2, num_steps=16, **settings)


def sentence_of(run_dir: Path, learner: Learner, **settings: Any) -> str:
    """How a training of two seeds ends that cannot go well."""
    with pytest.raises(UserError) as error:
        train(learner, seeds=[5, 6], total_steps=3_200, run_dir=run_dir, **{"log_every": 320, **settings})
    print(error.value)
    return str(error.value)


def when_high(state: State) -> Array:
    """A reward of NaN at step 37 of those episodes, one in four or so, that have gone up."""
    return jnp.where((state.time == 37) & (state.x > 0.8), jnp.nan, 0.0)


IN_3 = "seed 5, iteration 3, environment step"
NOT_FINITE: dict[str, tuple[Env, PolicyGradient, str]] = {
    "reward": (returned(reward=at(37, jnp.nan, 0.0))(), a2c(), f"a reward of nan at step 37 .* {IN_3} 73"),
    "infinite reward": (returned(reward=at(37, jnp.inf, 0.0))(), a2c(), f"a reward of inf at step 37 .* {IN_3} 73"),
    "obs at reset": (
        line(at_reset=lambda s, o: (s, o * jnp.nan)),
        a2c(),
        "an observation that is not finite at the reset .* seed 5, iteration 1, environment step 0",
    ),
    "obs at step 37": (
        returned(obs=lambda s: jnp.full(2, at(37, jnp.nan, 0.0)(s)))(),
        a2c(),
        f"an observation that is not finite at step 37 .* {IN_3} 74",
    ),
    "last obs of a segment": (
        returned(obs=lambda s: jnp.full(2, at(16, jnp.nan, 0.0)(s)))(),
        a2c(),
        "an observation that is not finite at step 16 .* seed 5, iteration 1, environment step 31",
    ),
    "reward whose square overflows": (
        returned(reward=at(37, 3e38, 0.0))(),
        a2c(),
        rf"a reward of 3e\+38 \(too large to square and sum in float32\) at step 37 .* {IN_3} 73",
    ),
    "discount": (returned(discount=at(37, jnp.nan, 1.0))(), a2c(), f"a discount of nan at step 37 .* {IN_3} 73"),
    "reward of whole episodes": (
        returned(reward=at(37, jnp.nan, 0.0))(),
        ladder.reinforce(num_envs=2),
        "a reward of nan at step 37 .* seed 5, iteration 1, environment step 73",
    ),
}


QUICK = ("obs at step 37", "reward whose square overflows")


@pytest.mark.parametrize("kind", [pytest.param(x, marks=() if x in QUICK else pytest.mark.full) for x in NOT_FINITE])
def test_what_is_not_finite_is_named_at_its_source(tmp_path: Path, kind: str) -> None:
    """The environment, the field, and the step at which it happens, which is known here."""
    env, algorithm, expected = NOT_FINITE[kind]
    told = sentence_of(tmp_path, learner_in(env, algorithm))
    assert re.search(rf"^The environment line returned {expected}. There was no checkpoint yet in .*\. Fix", told)


OF_VALUES = {
    "dqn": values.dqn(num_envs=2, repeats=16, learning_starts=2, buffer_size=64, batch_size=64),
    "pqn": values.pqn(num_envs=2, num_steps=16, num_minibatches=1),
}


@pytest.mark.full
@pytest.mark.parametrize("algorithm", OF_VALUES)
@pytest.mark.parametrize("kind", ["reward", "last obs of a segment"])
def test_what_is_not_finite_is_named_where_action_values_are_learned(tmp_path: Path, kind: str, algorithm: str) -> None:
    """The iterations of DQN consist of several rollouts, with gradient steps in between."""
    env, _, expected = NOT_FINITE[kind]
    told = sentence_of(tmp_path, values.deep_q(env, values.mlp(env, hidden=(4,)), OF_VALUES[algorithm]))
    assert re.search(rf"^The environment line returned {expected}. There was no checkpoint yet in .*\. Fix", told)


@pytest.mark.full
@pytest.mark.parametrize("devices_per_seed", [None, 2])
def test_the_source_is_found_again_from_a_checkpoint_in_the_middle_of_episodes(
    tmp_path: Path, devices_per_seed: int | None
) -> None:
    """Episodes last 50 steps, a rollout has 16; on one device, and with seeds and environments split over four."""
    mesh = parallel.make_mesh(2, 2, jax.devices()[:4], 2) if devices_per_seed else None
    learner = learner_in(returned(reward=when_high)(), a2c())
    told = sentence_of(tmp_path, learner, checkpoint_seconds=0.0, log_every=32, mesh=mesh)
    expected = (
        r"a reward of nan at step 37 of an episode: seed [56], iteration (\d+), environment step (\d+)\. The last good"
    )
    match = re.search(expected, told)
    assert match
    iteration, step = map(int, match.groups())
    assert iteration > 1  # so that the episode had begun before the checkpoint
    assert (step - 1) // 2 % 50 == 36  # two environments side by side
    assert (step - 1) // 32 == iteration - 1


@pytest.mark.parametrize(
    ("unsound", "expected"),
    [
        ({}, None),
        ({"reward": (1, 0)}, ("a reward of nan", 4, 12 + 2 + 0 + 1)),
        ({"reward": (1, 0), "obs": (1, 1)}, ("an observation that is not finite", 3, 12 + 2 + 1)),
        ({"reward": (1, 0), "action": (1, 1)}, None),
        ({"reward": (1, 0), "discount": (0, 1)}, ("a discount of nan", 3, 12 + 0 + 1 + 1)),
        ({"successor": (2, 1), "last": (0, 1)}, ("an observation that is not finite", 2, 12 + 4 + 1 + 1)),
        ({"reward": (2, 0), "mask": (2, 0)}, None),
    ],
)
def test_the_first_fault_in_time_is_named(unsound: dict, expected: tuple[str, int, int] | None) -> None:
    """In three steps of two environments, whose episodes have lasted for two steps before."""
    good = {"obs": True, "action": True, "reward": 1.0, "discount": 1.0, "successor": True, "last": False, "mask": 1.0}
    bad = {"reward": np.nan, "discount": np.nan, "mask": 0.0, "last": True}
    fields = {name: np.full((3, 2), value) for name, value in good.items()}
    for name, place in unsound.items():
        fields[name][place] = bad.get(name, False)
    checked = CheckedRollout(**fields, elapsed=np.full(2, 2))
    fault = checked.first_fault(iteration=7, steps=12) if checked.faults().any() else None
    assert fault == (expected and Fault(expected[0], expected[1], 7, expected[2]))


def test_the_first_fault_of_an_evaluation_is_named(tmp_path: Path) -> None:
    """Of three episodes: what is behind the end of the first is none; the second acts on an observation of NaN at step
    3, of which its reward is NaN too; the reward of step 5 of the third is NaN.
    """
    observations, rewards = np.zeros((3, 7, 2), np.float32), np.zeros((3, 6), np.float32)
    rewards[0, 1:], observations[0, 2:] = np.nan, np.nan
    rewards[1, 3:], observations[1, 3:, 1] = np.nan, np.nan
    rewards[2, 4:] = np.nan
    lengths = np.array([1, 6, 6], np.int32)
    episodes = RecordedEpisode((), *map(jnp.asarray, (observations, rewards, rewards, lengths)))
    state = RunState((), np.array([3, 9]), np.array([96, 288]))
    experience = Experience(line(), lambda state, key: (None, None))
    rerun = Rerun(lambda: state, lambda state, steps: state, experience, lambda *_: episodes, [5, 6], tmp_path)
    told = str(rerun.explain(Diverged("", quantity=EVALUATED, index=0, iteration=3)))
    expected = "at step 3 of an episode: seed 5, evaluation after iteration 3, environment step 96. There was no"
    assert told.startswith(f"The environment line returned an observation that is not finite {expected}")


@pytest.mark.full
def test_the_optimisation_is_not_blamed_on_the_environment(tmp_path: Path) -> None:
    """A step size of 1e30 makes parameters, actions and then observations of a bounded walk NaN."""
    space = Box(np.full(1, -1, np.float32), np.full(1, 1, np.float32))
    env = line(action_space=space)
    env = env._replace(step=lambda key, state, action, step=env.step: step(key, state, action[0]))
    told = sentence_of(tmp_path, learner_in(env, a2c(learning_rate=1e30)))
    assert re.search(r"^Training diverged: .* of seed [56] is .* Try a smaller learning_rate", told)


@pytest.mark.full
def test_an_evaluation_that_is_not_finite_is_named_at_its_source(tmp_path: Path) -> None:
    """The held-out environment is broken, the one of training is not; what was learned is saved."""
    learner, broken = learner_in(line(), a2c()), returned(reward=at(37, jnp.nan, 0.0))()
    settings = {"episodes": 2, "greedy": False}
    told = sentence_of(
        tmp_path,
        learner,
        evaluate=lambda state, key: evaluation_metrics(broken, learner.actor(state), key, **settings),
        record=lambda state, key: record_episodes(broken, learner.actor(state), key, **settings),
        evaluate_every=640,
    )
    assert "line returned a reward of nan at step 37 of an episode: seed 5, evaluation after iteration 20, " in told
    assert f"The last good checkpoint is {tmp_path}" in told
