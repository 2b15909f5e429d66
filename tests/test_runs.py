"""Training from Python: `jaxpg.fit`, `jaxpg.load`, the policy as a plain object, and what refuses them."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from PIL import Image
from refusals import refused

import jaxpg
from jaxpg import envs, ladder, networks, values
from jaxpg.algorithm import PolicyGradient
from jaxpg.cli.main import main
from jaxpg.errors import UserError
from jaxpg.experiments import config as configs
from jaxpg.policy_gradient import policy_gradient
from jaxpg.rollout import make_actor
from jaxpg.runs import Callback, MetricsTable, Run, TrainedPolicy, load_policy, training
from jaxpg.runs.export import export_policy, policy_program
from jaxpg.runs.fitting import _name_of
from jaxpg.runs.results import best_seed, last_evaluation, run_result, steps_per_second
from jaxpg.training import run_directory
from jaxpg.training.advance import RunState
from jaxpg.training.health import last_checkpoint
from jaxpg.types import Discrete, Env, Learner, Policy

SMALL: dict[str, Any] = {"num_envs": 4, "num_steps": 8, "evaluation_episodes": 4, "evaluations": 2, "progress": False}


def short_world(*, length: int = 4) -> Env:
    """An environment of one's own, as a function at the top of a module."""
    return tiny.counter(time_limit=length)


TABLE = MetricsTable(
    {
        "steps": np.array([[0.0, 0.0], [64.0, 80.0]]),
        "evaluation_return": np.array([[0.25, 0.1], [np.nan, 1e-7]]),
        "seconds": np.array([0.5, 1.5]),
    },
    (3, 7),
)


def test_metrics_are_one_line_for_each_row_and_seed(tmp_path: Path) -> None:
    """In pandas, and in a file of comma-separated values."""
    expected = {
        "seed": [3, 3, 7, 7],
        "steps": [0, 64, 0, 80],
        "evaluation_return": [0.25, np.nan, 0.1, 1e-7],
        "seconds": [0.5, 1.5, 0.5, 1.5],
    }
    frame = TABLE.to_pandas()
    assert list(frame.columns) == list(expected)
    for name, column in expected.items():
        np.testing.assert_array_equal(frame[name], column)
    TABLE.to_csv(tmp_path / "metrics.csv")
    header, *lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert header == "seed,steps,evaluation_return,seconds"
    assert lines == ["3,0,0.25,0.5", "3,64,,1.5", "7,0,0.1,0.5", "7,80,1e-07,1.5"]
    with pytest.raises(UserError, match=r"There is no metric 'step'. Did you mean 'steps'"):
        TABLE["step"]


def test_the_chunk_in_which_a_program_is_compiled_says_nothing_of_its_speed() -> None:
    """Two seeds; a row before training, a slow chunk, then 30 and 20 steps a second."""
    metrics = {
        "steps": np.array([[0, 0], [10, 10], [25, 25], [35, 35]]),
        "chunk_seconds": np.array([0.0, 9.0, 1.0, 1.0]),
    }
    assert steps_per_second(metrics) == 25
    assert np.isnan(steps_per_second({name: x[:2] for name, x in metrics.items()}))
    assert steps_per_second({name: x[1:3] for name, x in metrics.items()}) == 30  # without evaluations


def test_an_evaluation_counts_where_all_seeds_have_it() -> None:
    """Of three rows the last lacks one of two seeds; a state after 8 steps is older than the evaluation after 16."""
    evaluations = np.array([[1.0, 2.0], [4.0, 3.0], [5.0, 6.0], [7.0, np.nan]])
    assert last_evaluation(evaluations, 2).tolist() == [5, 6]
    assert np.isnan(last_evaluation(None, 2)).tolist() == [True, True]
    steps = np.array([[0, 0], [8, 8], [16, 16], [24, 24]])
    rows = {"steps": steps, "evaluation_return": evaluations}
    assert [best_seed(rows, np.array([n, n])) for n in (0, 8, 15, 16, 24)] == [1, 0, 0, 1, 1]
    assert best_seed({"steps": steps}, np.array([24, 24])) == 0


def test_the_score_before_training_is_of_a_row_without_steps() -> None:
    rows = {
        "steps": np.array([[0, 0], [8, 8]]),
        "iterations": np.array([[0, 0], [1, 1]]),
        "return": np.array([[np.nan, np.nan], [5.0, 6.0]]),
        "evaluation_return": np.array([[1.0, 2.0], [3.0, 4.0]]),
        "seconds": np.array([0.0, 2.0]),
        "chunk_seconds": np.array([0.0, 1.0]),
    }
    assert run_result(rows).initial.tolist() == [1, 2]
    assert run_result({name: x[1:] for name, x in rows.items()}).initial is None


def test_tables_and_runs_are_compared_and_shown_without_their_arrays() -> None:
    """Two tables with the same numbers are two, and whoever types the name of a run does not get its parameters."""
    assert TABLE == TABLE
    assert [*TABLE] == [*TABLE.names] == [*TABLE.columns]
    assert "steps" in TABLE
    assert MetricsTable({name: x.copy() for name, x in TABLE.columns.items()}, TABLE.seeds) != TABLE
    state = RunState({"w": np.zeros(3)}, np.zeros(1), np.zeros(1))
    config, experiment = configs.resolve_config("cartpole", "ppo", {}), None
    one, other = (Run(config, experiment, state._replace(steps=np.zeros(2)), Path("runs/ppo")) for _ in range(2))
    assert one != other
    assert "runs/ppo" in repr(one)
    assert "cartpole" in repr(one)
    assert "array" not in repr(one)


def test_pandas_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert TABLE.names == ("steps", "evaluation_return", "seconds")
    with pytest.raises(UserError, match="pip install pandas"):
        TABLE.to_pandas()


@pytest.mark.full
def test_the_network_of_action_values_may_be_the_module_itself(tmp_path: Path) -> None:
    """As `values.deep_q` takes it."""
    torso = values.mlp(envs.make("CartPole-v1"), hidden=(4,))
    small = {name: x for name, x in SMALL.items() if name != "num_steps"}
    run = jaxpg.fit("CartPole-v1", "dqn", network=torso, seeds=1, total_steps=64, **small)
    assert run.policy.act(np.zeros(4)) in (0, 1)
    with pytest.raises(UserError, match="this is a module, which has none: give the function that makes it"):
        jaxpg.fit("CartPole-v1", "dqn", network=torso, seeds=1, total_steps=64, out=tmp_path / "run", **small)
    with pytest.raises(UserError, match=r"a pair \(Policy, Critic\)"):
        jaxpg.fit("CartPole-v1", "ppo", network=torso, seeds=1, total_steps=64, **SMALL)


@pytest.mark.full
def test_fit_leaves_nothing_but_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is that of the best seed, and acts on plain arrays as its table says; the other has another table."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = jaxpg.fit("frozen_lake", "q_learning", seeds=2, total_steps=512, **SMALL)
    assert not list(tmp_path.iterdir())
    assert np.asarray(run.state.steps).tolist() == [512, 512]
    assert (run.config.task, run.config.algorithm, run.config.seeds) == ("frozen_lake", "q_learning", (0, 1))
    assert run.metrics["steps"][-1].tolist() == [512, 512]
    tables = [np.asarray(values.mean_table(run.learner_of(i))) for i in range(2)]
    np.testing.assert_array_equal(jax.vmap(values.mean_table)(run.state.learner), tables)
    np.testing.assert_array_equal(values.mean_table(run.state.learner), tables)
    assert run.best_seed_index == int(run.metrics["evaluation_return"][-1].argmax())
    obs = np.eye(16)
    for index, policy in ((run.best_seed_index, run.policy), (0, run.policy_of(0)), (1, run.policy_of(1))):
        assert policy.act(obs).tolist() == tables[index].argmax(-1).tolist()
        assert policy.act(obs[5].tolist()) == tables[index][5].argmax()
    assert not np.array_equal(*tables)
    with pytest.raises(UserError, match="seed indices 0 to 1, not 2"):
        run.policy_of(2)
    with Image.open(run.plot(tmp_path / "curve.png")) as picture:
        assert picture.width > 300
    with pytest.raises(UserError, match=r"must end in \.png"):
        run.plot(tmp_path / "curve.txt")


WRITES = pytest.mark.skipif(not importlib.util.find_spec("flatbuffers"), reason="jax.export writes with flatbuffers")


def actor_only(policy: Policy) -> Learner:
    """A learner whose state is the parameters of a policy, and that does nothing else but act."""

    def nothing(*_: Any) -> Any:
        raise AssertionError("it acts, and does nothing else")

    return Learner(nothing, nothing, partial(make_actor, policy), nothing)


def flying(env: Env, policy: Policy) -> TrainedPolicy:
    """A policy with its first parameters."""
    return TrainedPolicy(actor_only(policy), policy.init(jax.random.key(3)), env)


def test_the_policies_of_a_run_are_compiled_once() -> None:
    """Each acts with its own parameters: the second turned around takes the other action."""
    env = envs.make("CartPole-v1")
    learner = actor_only(networks.mlp(env)[0])
    traced = []
    learner = learner._replace(actor=lambda state, actor=learner.actor: traced.append(1) or actor(state))
    params = networks.mlp(env)[0].init(jax.random.key(3))
    obs = np.random.default_rng(0).normal(size=(64, 4))
    one, other = (TrainedPolicy(learner, jax.tree.map(lambda x, sign=sign: sign * x, params), env) for sign in (1, -1))
    actions, before = one.act(obs), len(traced)
    assert (other.act(obs) != actions).any()
    assert len(traced) == before > 0


def test_a_recurrent_policy_remembers_until_it_is_reset() -> None:
    """Batches are episodes side by side; one that begins anew acts as in its first step, and the others go on."""
    env = tiny.target()
    policy, _ = networks.recurrent(env, hidden=(8,), orthogonal=False)
    flown, params = flying(env, policy), policy.init(jax.random.key(3))
    obs = np.asarray(jax.random.uniform(jax.random.key(0), (5, 3, 2)))

    def by_hand(observations: np.ndarray) -> list[np.ndarray]:
        memory, actions = policy.start(params, observations[0]), []
        for x in observations:
            distribution, memory = policy.act(params, memory, x)
            actions.append(np.clip(np.asarray(distribution.mode()), -1, 1))
        return actions

    flights = [flown.act(x) for x in obs]
    for b in range(3):
        np.testing.assert_allclose([x[b] for x in flights], by_hand(obs[:, b]), rtol=1e-5)
    begins = np.asarray([False, True, False])
    flown.reset(begins)
    begins[:] = False
    flown.reset([True, False, False])  # in another place; that of the first call begins anew as well
    both = flown.act(obs[0])
    for b in (0, 1):
        np.testing.assert_allclose(both[b], by_hand(obs[:1, b])[0], rtol=1e-5)
    flown.reset()
    alone = [flown.act(x) for x in obs[:, 2]]
    assert alone[0].shape == (2,)
    np.testing.assert_allclose(alone, by_hand(obs[:, 2]), rtol=1e-5)
    assert np.abs(np.asarray(alone[1]) - by_hand(obs[1:2, 2])[0]).max() > 1e-3  # it does remember
    with pytest.raises(UserError, match="remembers 1 episodes, and was given 3 observations"):
        flown.act(obs[0])
    with pytest.raises(UserError, match="a boolean for each place"):
        flown.reset([True, False])


def test_actions_stay_within_their_bounds_and_samples_differ() -> None:
    env = tiny.target()
    flown = flying(env, networks.mlp(env, hidden=(4,), initial_log_std=3.0)[0])
    sampled = np.asarray([flown.act(np.ones((2, 2)), greedy=False) for _ in range(3)])
    assert np.abs(sampled).max() == 1.0
    assert len(np.unique(sampled.round(3), axis=0)) == 3
    np.testing.assert_array_equal(flown.act(np.ones(2)), flown.act(np.ones(2)))


class Uniform(NamedTuple):
    """A distribution between -1 and 1 that says what its mode is."""

    value: jax.Array

    def mode(self) -> jax.Array:
        return self.value

    def sample(self, key: jax.Array) -> jax.Array:
        return jax.random.uniform(key, self.value.shape, minval=-1.0)


def test_places_of_a_batch_draw_samples_of_their_own() -> None:
    policy = Policy(
        init=lambda key: (),
        start=lambda params, obs: (),
        act=lambda params, memory, obs: (Uniform(obs), memory),
        evaluate=lambda params, rollout: None,
    )
    assert len(np.unique(flying(tiny.target(), policy).act(np.ones((16, 2)), greedy=False))) == 32


@pytest.mark.parametrize(
    ("obs", "sentence"),
    [
        (np.ones(3), r"has the shape \(2,\), and a batch of them one axis in front; not \(3,\)"),
        (np.ones((2, 2, 2)), r"not \(2, 2, 2\)"),
        (np.ones((0, 2)), r"not \(0, 2\)"),
        (["a", "b"], "Observations are numbers"),
        ([np.nan, 0.9], "holds NaN"),
    ],
)
def test_other_observations_are_refused(obs: Any, sentence: str) -> None:
    env = tiny.target()
    with pytest.raises(UserError, match=sentence):
        flying(env, networks.mlp(env, hidden=(4,))[0]).act(obs)


def test_an_observation_that_is_traced_is_refused() -> None:
    """In a sentence that says what acts there instead."""
    env = tiny.target()
    with pytest.raises(UserError, match=r"traced, as in a jit or a scan.*actor\(run.learner_of\(0\)\)"):
        jax.jit(flying(env, networks.mlp(env, hidden=(4,))[0]).act)(np.ones(2))


@pytest.mark.parametrize("obs", [5, -1, 0.5, [0, 7], np.eye(6)[5] * 5])
def test_an_integer_beyond_its_space_is_refused(obs: Any) -> None:
    """Its one-hot vector would be zeros, which no training had."""
    env = tiny.counter()._replace(observation_space=Discrete(5))
    with pytest.raises(UserError, match="is an integer from 0 to 4, not "):
        flying(env, networks.mlp(env, hidden=(4,))[0]).act(obs)


def watching(**found: Any) -> Callback:
    """A callback that notes what it sees, and ends the run at 256 steps."""
    rows, looks = found["rows"], found["looks"]

    def look(run: Run) -> None:
        looks.append((len(run.metrics["steps"]), int(run.policy.act(np.eye(16)[0]))))

    return Callback(rows.append, look, lambda: rows[-1]["steps"].min() >= 256)


@pytest.mark.full
def test_callbacks_see_rows_and_evaluations_and_end_the_run(tmp_path: Path) -> None:
    """What was trained until then is there, and its last state is in a checkpoint."""
    rows: list[Any] = []
    looks: list[Any] = []
    kept: list[Run] = []
    careless = Callback(lambda row: row.clear(), kept.append)
    run = jaxpg.fit(
        "frozen_lake",
        "q_learning",
        seeds=1,
        total_steps=512,
        out=tmp_path / "run",
        callbacks=[careless, watching(rows=rows, looks=looks)],
        **SMALL | {"evaluations": 4},
    )
    assert np.asarray(run.state.steps).tolist() == [256]
    assert [int(row["steps"][0]) for row in rows] == run.metrics["steps"][:, 0].tolist()
    evaluated = np.flatnonzero(np.isfinite(run.metrics["evaluation_return"][:, 0]))
    assert [number - 1 for number, _ in looks] == evaluated.tolist()  # the row of the evaluation is there already
    assert len(looks) == 3
    assert [len(run.metrics["steps"]) for run in kept] == [number for number, _ in looks]  # then, and not now
    again = jaxpg.load(tmp_path / "run", checkpoint="last")
    jax.tree.map(np.testing.assert_array_equal, again.state, run.state)
    with pytest.raises(UserError, match="holds a run already"):
        jaxpg.fit("frozen_lake", "q_learning", out=tmp_path / "run", **SMALL)


TWO_STAGES = """
environment = "sort"
environment_settings = { length = 3, letters = 6 }
network = { kind = "transformer", width = 8, layers = 1, heads = 2 }
evaluation_episodes = 4
[sft]
total_steps = 300
batch_size = 8
[grpo]
initial = "sft"
num_envs = 8
group_size = 4
"""


@pytest.mark.full
def test_callbacks_see_the_run_and_not_the_stages_before_it(tmp_path: Path) -> None:
    (tmp_path / "task.toml").write_text(TWO_STAGES)
    seen: list[Any] = []
    task = tmp_path / "task.toml"
    run = jaxpg.fit(task, "grpo", seeds=1, total_steps=200, callbacks=[Callback(seen.append)], progress=False)
    assert [int(row["steps"][0]) for row in seen] == run.metrics["steps"][:, 0].tolist()


def test_fit_returns_the_last_state_and_load_the_best(tmp_path: Path) -> None:
    out, settings = tmp_path / "run", SMALL | {"evaluations": 4}
    last = jaxpg.fit("random_mdp", "q_learning", seeds=[1], total_steps=512, out=out, **settings)
    returns = last.metrics["evaluation_return"][:, 0]
    best = int(last.metrics["steps"][np.nanargmax(np.where(last.metrics["steps"][:, 0] > 0, returns, np.nan)), 0])
    assert 0 < best < 512  # numbers of one seed, of which the last is not the best
    assert last.state.steps.tolist() == [512]
    assert jaxpg.load(out).state.steps.tolist() == [best]


def test_after_ctrl_c_the_run_is_saved_and_goes_on_from_there(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The chunk ends first; a second Ctrl-C would be Python's own; without a directory the first is."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, old))
    settings = {"seeds": 1, "total_steps": 512, "progress": False, **SMALL}

    def at_the_third_row(row: Any) -> None:
        rows.append(row)
        if len(rows) == 3:
            signal.raise_signal(signal.SIGINT)

    rows: list[Any] = []
    once, twice = tmp_path / "once", tmp_path / "twice"
    with pytest.raises(KeyboardInterrupt, match=re.escape(f"jaxpg resume {twice}")):
        jaxpg.fit("frozen_lake", "q_learning", out=twice, callbacks=[Callback(at_the_third_row)], **settings)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(rows) == 3
    stopped = jaxpg.load(twice, checkpoint="last")
    assert stopped.state.steps.tolist() == rows[-1]["steps"].tolist()
    assert main(["resume", str(twice), "--quiet"]) == 0

    whole = jaxpg.fit("frozen_lake", "q_learning", out=once, **settings)
    jax.tree.map(np.testing.assert_array_equal, jaxpg.load(twice, checkpoint="last").state, whole.state)
    rows.clear()
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        jaxpg.fit("frozen_lake", "q_learning", callbacks=[Callback(at_the_third_row)], **settings)


SETTINGS = {"num_envs": 4, "evaluation_episodes": 8, "evaluations": 2}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two seeds that was written."""
    out = tmp_path_factory.mktemp("fitted") / "run"
    return jaxpg.fit("cartpole", "a2c", seeds=2, total_steps=1500, out=out, progress=False, **SETTINGS)


def test_double_precision_of_the_session_changes_nothing(tmp_path: Path) -> None:
    """`jax_enable_x64` is the user's: training, loading and acting go on in float32, with the same bits."""

    def trained(out: Path) -> tuple[Any, np.ndarray]:
        jaxpg.fit("frozen_lake", "q_learning", seeds=2, total_steps=512, out=out, **SMALL)
        run = jaxpg.load(out)
        return run.state.learner, run.policy.act(np.eye(16)[:5])

    expected = trained(tmp_path / "single")
    with jax.enable_x64(True):
        got = trained(tmp_path / "double")
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(expected)]


def test_double_precision_of_the_session_changes_no_sample() -> None:
    """Nor where observations are integers, whose one-hot vectors would have the precision of the session."""
    env = tiny.counter()._replace(observation_space=Discrete(5))
    policy = networks.mlp(env, hidden=(4,))[0]

    def samples() -> list[np.ndarray]:
        flown = flying(env, policy)
        return [flown.act(np.arange(5), greedy=False) for _ in range(4)]

    expected = samples()
    with jax.enable_x64(True):
        np.testing.assert_array_equal(samples(), expected)


@pytest.mark.full
def test_double_precision_of_the_session_changes_nothing_of_an_exported_policy(tmp_path: Path) -> None:
    lake = envs.make("frozen_lake")

    def reset(key: Any) -> Any:
        state, obs = lake.reset(key)
        return state, obs.argmax()

    def step(key: Any, state: Any, action: Any) -> Any:
        state, timestep = lake.step(key, state, action)
        return state, timestep._replace(obs=timestep.obs.argmax())

    numbered = lake._replace(reset=reset, step=step, observation_space=Discrete(16))
    run = jaxpg.fit(numbered, ladder.a2c(num_envs=4), seeds=1, total_steps=64, evaluation_episodes=4, progress=False)
    export_policy(run, tmp_path / "one")
    with jax.enable_x64(True):
        export_policy(run, tmp_path / "other")
    one, other = (load_policy.load(tmp_path / name / "policy.jax") for name in ("one", "other"))
    for seed in range(3):
        samples = [np.asarray(act(np.arange(16), greedy=False, seed=seed)[0]) for act in (one, other)]
        np.testing.assert_array_equal(*samples)
        assert samples[0].dtype == samples[1].dtype
    with pytest.raises(ValueError, match=r"are a batch, \[b\], not \[\]"):
        one(3)


@pytest.mark.parametrize("name", ["reinforce", "a2c", "trpo", "ppo", "grpo"])
def test_a_learner_keeps_its_dtypes_under_double_precision(name: str) -> None:
    """A scan over `step` needs that; parameters are float32, biases too."""
    env = tiny.counter(time_limit=4)
    with jax.enable_x64(True):
        policy, critic = networks.mlp(env, hidden=(4,))
        algorithm = getattr(ladder, name)(num_envs=8)
        learner = policy_gradient(env, policy, critic if algorithm.value_loss else None, algorithm)
        before = jax.eval_shape(learner.init, jax.random.key(0))
        after, _ = jax.eval_shape(learner.step, before, jax.random.key(1))
    assert {x.dtype for x in jax.tree.leaves(before.params)} == {np.dtype("float32")}
    assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(before)]


@pytest.mark.full
def test_fit_writes_the_run_that_the_command_writes(
    fitted: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same numbers, the same config; and the commands read it."""
    words = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    command = ["train", "cartpole", "a2c", "--seeds", "2", "--steps", "1500", "--out", str(tmp_path / "command")]
    assert main([*command, *words]) == 0
    ours, theirs = (run_directory.load_metrics(path) for path in (fitted.directory, tmp_path / "command"))
    assert ours.keys() == theirs.keys()
    for name in ours.keys() - {"seconds", "chunk_seconds"}:
        np.testing.assert_array_equal(ours[name], theirs[name])
    assert configs.load_config(fitted.directory) == configs.load_config(tmp_path / "command")
    out = str(fitted.directory)
    assert main(["eval", out, "--episodes", "8"]) == 0
    capsys.readouterr()
    assert main(["play", out, "--gif", str(tmp_path / "x.gif"), "--seed-index", "1"]) == 0
    assert "seed 1, " in capsys.readouterr().out
    assert main(["plot", out, "--out", str(tmp_path / "x.svg")]) == 0
    assert main(["resume", out, "--quiet"]) == 0  # it is at its end
    assert jaxpg.load(out).policy.act(np.zeros(4)).shape == ()
    assert fitted.policy.act(np.zeros((3, 4))).shape == (3,)


@pytest.mark.full
def test_objects_of_a_program_are_trained_as_they_are() -> None:
    """An Env, a PolicyGradient and a pair of networks; nobody could find them by a name."""
    env = tiny.counter()
    seen: list[float] = []

    def surrogate(log_prob: Any, old_log_prob: Any, advantage: Any) -> Any:
        seen.append(1.0)
        return -jnp.exp(log_prob - old_log_prob) * advantage

    record = ladder.ppo(num_envs=4, num_steps=8)._replace(surrogate=surrogate)
    pair = networks.mlp(env, hidden=(4,))
    run = jaxpg.fit(env, record, network=pair, seeds=1, total_steps=64, evaluation_episodes=4, progress=False)
    assert seen
    theirs = pair[0].init(jax.random.key(0))
    assert jax.tree.map(jnp.shape, run.learner_of(0).params.policy) == jax.tree.map(jnp.shape, theirs)
    assert run.policy.act(np.zeros(2)) in (0, 1, 2)
    with pytest.raises(UserError, match="With out, commands have to find the environment by a name"):
        jaxpg.fit(env, "ppo", out="nowhere")


@pytest.mark.parametrize(
    ("module", "file", "name"),
    [
        ("mine", None, None),
        ("__main__", "/home/me/my script.py", None),
        ("__main__", "/home/me/script.py", "script:corridor"),
        ("__main__", None, None),
        ("tiny", tiny.__file__, "tiny:corridor"),
    ],
)
def test_what_cannot_be_imported_has_no_name(
    module: str, file: str | None, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that was run without being imported, and a script whose name is none in Python."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", file, raising=False)
    code: dict[str, Any] = {"__name__": module}
    exec("def corridor(): pass", code)
    assert _name_of(code["corridor"]) == name


def test_a_function_within_another_has_no_name() -> None:
    def corridor() -> None:
        pass

    assert _name_of(test_a_function_within_another_has_no_name) is not None
    assert _name_of(corridor) is None
    assert _name_of(Run.complete) is None  # of a class


def not_an_algorithm(*, num_envs: int = 4) -> int:
    return 3


def too_many(*, num_envs: int = 4) -> PolicyGradient:
    return ladder.ppo()


def positional(num_envs: int = 4) -> PolicyGradient:
    return ladder.ppo(num_envs=num_envs)


def a_network(env: Env, *, width: int = 4) -> Any:
    return ladder.ppo()


def nameless() -> PolicyGradient:
    return ladder.ppo()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("cartpol", "ppo"), "There is no task 'cartpol'. Did you mean 'cartpole'"),
        (("ant", "ppo"), "There is no task 'ant'.*have a prefix, such as brax:ant"),
        (("cartpole", "pp"), "There is no algorithm 'pp'. Did you mean 'ppo'"),
        (("cartpole", 3), "The algorithm must be a name, a function or a record, not 3"),
        ((7, "ppo"), "The environment must be a name, a function or a record, not 7"),
        ((gymnasium.make("CartPole-v1"), "ppo"), "An environment of Gymnasium is given by its id"),
        ((lambda: gymnasium.make("CartPole-v1"), "ppo"), "An environment of Gymnasium is given by its id"),
        (("cartpole", "ppo", {"lr": 1e-3}), "'lr'.*It is called 'learning_rate' here"),
        (("cartpole", "ppo", {"gamma": 2.0}), "gamma must be"),
        (("cartpole", "ppo", {"seeds": []}), "seeds are different numbers, from one"),
        (("cartpole", "ppo", {"seeds": 0}), "seeds must be at least 1, not 0"),
        (("cartpole", "ppo", {"seeds": -1}), "seeds must be at least 1, not -1"),
        (("cartpole", "ppo", {"seeds": "8"}), "seeds must be the number of seeds or a list of ints, not '8'"),
        (("cartpole", "ppo", {"seeds": [0, 0]}), "seeds are different numbers"),
        (("cartpole", "ppo", {"total_steps": -5}), "total_steps"),
        (("cartpole", "ppo", {"network": "mpl"}), "There is no kind of network 'mpl'.*Did you mean 'mlp'"),
        (("cartpole", "ppo", {"network": 5}), "The network must be"),
        (("cartpole", "ppo", {"network": lambda env: 5}), "must return a pair"),
        (("cartpole", "ppo", {"network": lambda env: (1, 2)}), r"a pair \(Policy, Critic\), not \(int, int\)"),
        (("cartpole", "ppo", {"network": {"hidden": "x"}}), "hidden must be a list of integers"),
        (("cartpole", "ppo", {"callbacks": [print]}), "callbacks are a list of jaxpg.Callback"),
        (
            ("cartpole", "ppo", {"callbacks": [jaxpg.Callback(on_row=3)]}),
            "The on_row of a jaxpg.Callback is a function",
        ),
        (("cartpole", "ppo", {"callbacks": jaxpg.Callback()}), r"and this is one itself: give \[callback\]"),
        (("cartpole", "ppo", {"num_minibatches": 7}), "num_minibatches = 7 does not divide"),
        (("cartpole", not_an_algorithm), "must return a PolicyGradient"),
        (("cartpole", too_many), "collects from 64 environments where its setting num_envs is 4"),
        (
            ("cartpole", a_network),
            "a_network is no algorithm: its first argument is env.* --set network.kind=.*:a_netw",
        ),
        (("cartpole", positional), "must be keyword-only: write a \\* in front of num_envs"),
        (("cartpole", nameless), "has no setting num_envs"),
        (("cartpole", lambda *, num_envs=4: 1 / 0), "raised ZeroDivisionError"),
        (("cartpole", lambda *, num_envs=4: None, {"out": "x"}), "With out, commands have to find the algorithm"),
        ((lambda: None, "ppo"), "environment"),
        (("CartPole-v1", "ppo", {"environment_settings": {"gravty": 1.0}}), "Did you mean 'gravity'"),
    ],
)
def test_mistakes_are_told_in_a_sentence_before_anything_is_written(
    arguments: tuple[Any, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    env, algorithm, settings = (*arguments, {})[:3]
    with pytest.raises(UserError, match=sentence):
        jaxpg.fit(env, algorithm, **{"progress": False, **settings})
    assert not list(tmp_path.iterdir())


def test_without_out_no_checkpoint_is_said_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory is deleted before anybody reads the sentence."""

    def prepare(config: Any, out: Path, *_: Any, **__: Any) -> None:
        raise UserError(last_checkpoint(out))

    monkeypatch.setattr(training, "prepare", prepare)
    with pytest.raises(UserError, match=r"^Nothing was kept: give out=DIRECTORY"):
        jaxpg.fit("cartpole", "ppo", progress=False)


def test_a_run_is_not_written_into_a_file(tmp_path: Path) -> None:
    (tmp_path / "a_file.py").touch()
    for out in ("a_file.py", "a_file.py/run"):
        with pytest.raises(UserError, match=r"to: .*a_file\.py is not a directory\. .* in Python with out="):
            jaxpg.fit("cartpole", "ppo", out=tmp_path / out, progress=False)


def test_what_is_no_run_is_not_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the directory of a run"):
        jaxpg.load(tmp_path)
    with pytest.raises(UserError, match='"best" or "last"'):
        jaxpg.load(tmp_path, checkpoint="first")


def test_of_a_directory_with_runs_it_is_said_what_to_name(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / "compared" / name).mkdir(parents=True)
        (tmp_path / "compared" / name / "config.toml").touch()
    with pytest.raises(UserError, match=r"There are runs in it: a, b. Name one, such as .*compared/a\.$"):
        jaxpg.load(tmp_path / "compared")
    (tmp_path / "sweep.json").touch()
    with pytest.raises(UserError, match=r"It is that of a sweep, .* look at its sweep.json, or train best.toml\.$"):
        jaxpg.load(tmp_path)


@WRITES
@pytest.mark.parametrize("network", [networks.recurrent, networks.mlp])
def test_an_exported_policy_acts_as_the_policy_does(network: Any, tmp_path: Path) -> None:
    """For any size of the batch, with its memory and with episodes that begin anew."""
    env = tiny.target()
    policy = network(env, hidden=(8,), orthogonal=False, initial_log_std=1.0)[0]
    (tmp_path / "policy.jax").write_bytes(policy_program(actor_only(policy), policy.init(jax.random.key(3)), env))
    act, flown = load_policy.load(tmp_path / "policy.jax"), flying(env, policy)
    obs = np.asarray(jax.random.uniform(jax.random.key(0), (4, 3, 2)))
    memory = None
    for step, x in enumerate(obs):
        begins = np.array([False, step == 2, False])
        if step == 2:
            flown.reset(begins)
        actions, memory = act(x, memory, begins.astype(int) if step == 2 else begins)  # 0 and 1, as some give them
        np.testing.assert_allclose(actions, flown.act(x), rtol=1e-5, atol=1e-7)
    assert act(obs[0][:1])[0].shape == (1, 2)
    with jax.enable_x64(True):  # of whoever loads it
        np.testing.assert_array_equal(act(obs[0].astype(float))[0], act(obs[0])[0])
    samples = [np.asarray(act(obs[0], greedy=False, seed=seed)[0]) for seed in (0, 1, 1)]
    assert np.abs(samples[0]).max() <= 1
    np.testing.assert_array_equal(samples[1], samples[2])
    assert np.abs(samples[0] - samples[1]).max() > 0.01
    first, second = (np.asarray(act(obs[0], greedy=False)[0]) for _ in range(2))
    assert np.abs(first - second).max() > 0.01  # without a seed every call draws anew


@WRITES
def test_an_exported_policy_begins_with_the_memory_of_its_first_observation(tmp_path: Path) -> None:
    """Here that is the observation itself, and the action ever after: zeros would be no memory of this policy."""
    env = tiny.target()
    policy = Policy(
        init=lambda key: (),
        start=lambda params, obs: obs,
        act=lambda params, memory, obs: (Uniform(memory), memory),
        evaluate=lambda params, rollout: None,
    )
    (tmp_path / "policy.jax").write_bytes(policy_program(actor_only(policy), (), env))
    act, obs = load_policy.load(tmp_path / "policy.jax"), np.linspace(-0.9, 0.9, 12, dtype=np.float32).reshape(2, 3, 2)
    actions, memory = act(obs[0])
    np.testing.assert_array_equal(actions, obs[0])
    actions, memory = act(obs[1], memory)
    np.testing.assert_array_equal(actions, obs[0])
    actions, _ = act(obs[1], memory, [False, True, False])
    np.testing.assert_array_equal(actions, obs[[0, 1, 0], [0, 1, 2]])


@WRITES
@pytest.mark.full
def test_a_policy_is_exported_and_flies_in_gymnasium_without_jaxpg(
    fitted: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the code of docs/policies.md, as far as the policy of the run; the metrics are there as a table."""
    out, there = fitted.directory, tmp_path / "there"
    assert main(["export", str(out), "--seed-index", "1", "--out", str(there)]) == 0
    assert "policy.jax: seed 1; load_policy.py beside it" in capsys.readouterr().out
    assert {path.name for path in there.iterdir()} == {"metrics.csv", "policy.jax", "load_policy.py"}
    lines = (there / "metrics.csv").read_text().splitlines()
    assert lines[0].startswith("seed,steps,")
    assert len(lines) - 1 == 2 * len(run_directory.load_metrics(out)["steps"])
    page = (Path(__file__).parent.parent / "docs" / "policies.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (flight,) = (block for block in blocks if "act = load" in block)
    alone = f"import sys\nsys.modules['jaxpg'] = None\n{flight}"  # it could not be imported
    loaded = "assert not [name for name in sys.modules if name.startswith(('jaxpg.', 'flax', 'gymnax'))]"
    ended = subprocess.run([sys.executable, "-c", alone + loaded], cwd=there, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    policy, env = jaxpg.load(out).policy_of(1), gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    total, over = 0.0, False
    while not over:
        obs, reward, terminated, truncated, _ = env.step(policy.act(obs))
        total, over = total + float(reward), terminated or truncated
    assert float(ended.stdout) == total
    assert "seed indices 0 to 1, not 5" in refused(capsys, "export", str(out), "--seed-index", "5")
    assert not (out / "export").exists()


def test_a_run_without_a_checkpoint_is_exported_as_a_table(
    fitted: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that has diverged at its beginning."""
    shutil.copytree(fitted.directory, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "there")]) == 0
    assert capsys.readouterr().out.endswith("No policy exported: the run has no checkpoint.\n")
    lines = (tmp_path / "there" / "metrics.csv").read_text().splitlines()
    assert len(lines) - 1 == 2 * len(run_directory.load_metrics(fitted.directory)["steps"])


def test_the_loader_is_a_few_lines_that_need_only_jax() -> None:
    """Of its 20, half refuse what would be another mistake in silence."""
    source = Path(load_policy.__file__).read_text(encoding="utf-8")
    body = [x for x in source.split("import jax.numpy as jnp")[1].splitlines() if x.strip() and '"""' not in x]
    assert len(body) <= 20
    imported = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)}  # fmt: skip
    assert imported == {"itertools", "pathlib", "typing", "jax.export", "jax.numpy"}


def test_what_cannot_be_exported_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not the directory of a run" in refused(capsys, "export", str(tmp_path))
    assert "unrecognized arguments" in refused(capsys, "export", str(tmp_path), "--format", "onnx")
