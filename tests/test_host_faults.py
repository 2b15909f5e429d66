"""What goes wrong in environments on the host: faults, workers that die, Ctrl-C, and what `jaxpg check` says."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_gym
from refusals import refused
from test_host import POLE, SMALL, WALK, run, settings, source_of

from jaxpg import envs, networks
from jaxpg.cli import signals
from jaxpg.cli.main import main
from jaxpg.envs.battery import COLUMNS
from jaxpg.envs.host import close_what_begins
from jaxpg.envs.host.host_env import close_all, host_env
from jaxpg.errors import UserError
from jaxpg.parallel import host_callback
from jaxpg.rollout.segments import continuing
from jaxpg.sub_env import REST, WAKE, SubEnv
from jaxpg.vectorize import tree_where

pytestmark = pytest.mark.usefixtures("no_failures")


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("raise", r"raised RuntimeError: the motor is broken \(tiny_gym.py, line \d+\) at step 3 of an episode\."),
        ("exit", r"raised SystemExit: 3 \(tiny_gym.py, line \d+\) at step 3 of an episode\."),
        ("nan", r"returned an observation that is not finite in float32 at step 3 of an episode\."),
        ("reward", r"returned a reward of nan at step 3 of an episode\."),
        ("text", r"raised ValueError: could not convert string to float: 'a lot' .*at step 3 of an episode\."),
        ("integer", r"raised OverflowError: int too large to convert to float .*at step 3 of an episode\."),
        ("neither", r"raised ValueError: terminated must be True or False, not None .*at step 3 of an episode\."),
        ("panic", r"raised Panic: out of bounds \(tiny_gym.py, line \d+\) at step 3 of an episode\."),
        ("objects", r"returned an observation of dtype object, which is no number at step 3 of an episode\."),
        ("old gym", r"returned four values, .*instead of five: .* and info, at step 3 of an episode\."),
        ("shape", r"returned an observation of shape \(3,\) instead of \(2,\) at step 3 of an episode\."),
    ],
)
@pytest.mark.parametrize("limit", [pytest.param(500, id="within an episode"), pytest.param(3, id="at its last step")])
def test_a_fault_is_a_sentence_with_the_step(fault: str, sentence: str, limit: int) -> None:
    env = envs.make(WALK, fault=fault, max_episode_steps=limit)
    with pytest.raises(UserError, match=rf"^The environment {WALK} {sentence}"):
        run(env, [1, 0, 1, 0], env.reset(jax.random.key(0))[0])


def test_after_a_fault_nothing_is_stepped_until_it_is_told_and_then_everything_is() -> None:
    broken, sound = envs.make(WALK, fault="raise", at=1), envs.make(POLE)
    jax.block_until_ready(broken.step(jax.random.key(0), broken.reset(jax.random.key(0))[0], jnp.int32(1)))
    assert np.isnan(sound.reset(jax.random.key(1))[1]).all()
    with pytest.raises(UserError, match="the motor is broken"):
        host_callback.raise_failure()
    host_callback.raise_failure()
    for env in (broken, sound):
        assert np.isfinite(env.reset(jax.random.key(1))[1]).all()


def test_what_raises_as_it_is_made_is_a_sentence() -> None:
    with pytest.raises(
        UserError, match=rf"{WALK} cannot be made: it raised SystemExit: 0 \(tiny_gym.py, line \d+\)\.$"
    ):
        envs.make(WALK, fault="unmade")


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("unmade in a worker", r"cannot be made: it raised RuntimeError: no licence left \(tiny_gym.py, line \d+\)\."),
        ("panic", r"raised Panic: out of bounds \(tiny_gym.py, line \d+\) at step 3 of an episode\."),
        ("neither", r"raised ValueError: terminated must be True or False, not None .*at step 3 of an episode\."),
        ("objects", r"returned an observation of dtype object, which is no number at step 3 of an episode\."),
    ],
)
def test_a_fault_in_a_worker_is_the_same_sentence(fault: str, sentence: str) -> None:
    env = envs.make(WALK, fault=fault, vectorization="async")
    with pytest.raises(UserError, match=rf"^The environment {WALK} {sentence}"):
        run(env, [1, 0, 1, 0], env.reset(jax.random.key(0))[0])
    assert not multiprocessing.active_children()


def test_no_exception_leaves_a_callback() -> None:
    def panics(*arguments: Any) -> Any:
        raise tiny_gym.Panic

    like = (jax.ShapeDtypeStruct((), jnp.float32),)
    for call in (host_callback.call_in_place, host_callback.call):
        arguments = (jnp.zeros(2), jnp.float32(0)) if call is host_callback.call else (jnp.float32(0),)
        assert np.isnan(jax.jit(partial(call, panics, like))(*arguments)[0])
        with pytest.raises(tiny_gym.Panic):
            host_callback.raise_failure()


def test_environments_that_begin_in_a_training_end_with_it() -> None:
    """And are made again where their states are used later."""
    made = []

    def make(n: int, seed: int) -> Any:
        made.append(source.make(n, seed))
        closed.append(False)
        number = len(made) - 1
        return made[-1]._replace(close=lambda: closed.__setitem__(number, True))

    source, closed = source_of(WALK), []  # type: ignore[var-annotated]
    env = host_env(source._replace(make=make))
    env.reset(jax.random.key(0))
    with close_what_begins():
        state, _ = env.reset(jax.random.key(1))
        ((_, first),) = run(env, [1], state)
    assert closed == [False, True]
    ((_, again),) = run(env, [1], state)
    jax.tree.map(np.testing.assert_array_equal, first, again)


def test_an_environment_that_nobody_has_is_forgotten() -> None:
    """Unless the host has begun it and has not ended it: then it is kept, to be ended with the process."""
    close_all()  # those of other tests
    sources = [source_of(WALK)._replace(make=partial(source_of(WALK).make)) for _ in range(3)]
    kept = [weakref.ref(source.make) for source in sources]
    _, ended, begun = (host_env(source) for source in sources)
    with close_what_begins():
        ended.reset(jax.random.key(0))
    begun.reset(jax.random.key(0))
    del sources, ended, begun, _
    jax.clear_caches()
    gc.collect()
    assert [make() is None for make in kept] == [True, True, False]
    close_all()


def test_where_one_cannot_be_made_those_before_it_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    close_all()  # those of other tests
    made, closed = [], []
    env, begin = envs.make(WALK), tiny_gym.Walk.__init__

    def begin_two(self: Any, **settings: Any) -> None:
        if len(made) == 2:
            raise RuntimeError("no licence left")
        begin(self, **settings)
        made.append(self)

    monkeypatch.setattr(tiny_gym.Walk, "__init__", begin_two)
    monkeypatch.setattr(tiny_gym.Walk, "close", lambda self: closed.append(self))
    jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 3))
    with pytest.raises(UserError, match="no licence left"):
        host_callback.raise_failure()
    assert closed == made[::-1]


def test_what_cannot_be_closed_hides_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """All others are closed, and the fault is what is raised."""
    close_all()  # those of other tests
    closed: list[int] = []

    def close(self: Any) -> None:
        if not getattr(self, "_t", 0):
            return  # those that are made for their spaces
        closed.append(self._t)
        raise ValueError("the connection is gone")

    monkeypatch.setattr(tiny_gym.Walk, "close", close)
    env = envs.make(WALK, fault="raise")
    states, _ = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 3))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            states, _ = jax.vmap(partial(env.step, None))(states, jnp.zeros(3, jnp.int32))
    with pytest.raises(UserError, match="the motor is broken"):
        host_callback.raise_failure()
    assert closed == [2, 2, 3]  # the last is closed first
    assert f"{WALK} raised ValueError: the connection is gone" in str(said[0].message)


def test_what_cannot_be_closed_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def close(self: Any) -> None:
        raise ValueError("the connection is gone")

    monkeypatch.setattr(tiny_gym.Stairs, "close", close)
    said = r"TinyStairs-v0 raised ValueError: the connection is gone .* as it was closed"
    with pytest.warns(UserWarning, match=said):
        env = envs.make("gymnasium:tiny_gym:TinyStairs-v0")
    assert env.reset(jax.random.key(0))[1] == 0
    with pytest.warns(UserWarning, match=said):
        close_all()


@pytest.mark.full
def test_workers_whose_spaces_differ_are_ended() -> None:
    env = envs.make("gymnasium:tiny_gym:TinyUnlike-v0", vectorization="async")
    with pytest.raises(UserError, match=r"TinyUnlike-v0 raised RuntimeError: .* different observation spaces"):
        run_until_failure(env)
    assert not multiprocessing.active_children()


def test_a_time_out_that_was_not_reckoned_with_is_refused() -> None:
    env = host_env(source_of(POLE, max_episode_steps=3)._replace(min_truncation_step=9))
    run(env, [0, 1], env.reset(jax.random.key(0))[0])
    with pytest.raises(
        UserError, match="by a time-out after 3 steps, but Gymnasium's own environments do not time out before 9"
    ):
        run(env, [0, 1, 0], env.reset(jax.random.key(0))[0])


def test_a_termination_that_is_also_a_time_out_may_come_at_any_step() -> None:
    """Its successor is nobody's, so no rollout needs a place for it."""
    source = source_of(POLE)

    def make(n: int, seed: int) -> Any:
        vector, ends = source.make(n, seed), np.ones(n, bool)
        return vector._replace(step=lambda *given: vector.step(*given)._replace(terminated=ends, truncated=ends))

    env = host_env(source._replace(make=make, min_truncation_step=9))
    ((_, timestep),) = run(env, [0], env.reset(jax.random.key(0))[0])
    assert timestep.last
    assert timestep.discount == 0


def test_in_a_worker_steps_are_those_of_the_episode_and_rest_has_an_end() -> None:
    """What runs there, run here: a fault in its second episode, and an environment that is woken."""
    env = SubEnv(tiny_gym.Walk(fault="raise", at=3), WALK)
    for _ in range(2):
        env.reset(seed=0)
        env.step(1)
        env.step(2)
    with pytest.raises(UserError, match=r"the motor is broken .* at step 3 of an episode"):
        env.step(1)
    env = SubEnv(tiny_gym.Walk(), WALK)
    first, _ = env.reset(seed=0)
    env.reset(options=REST)
    obs, *numbers = env.step(1)
    assert numbers == [0.0, False, False, {}]
    np.testing.assert_array_equal(obs, first)
    env.reset(options=WAKE)
    obs, reward, *_ = env.step(1)
    assert reward != 0
    assert (obs != first).all()


@pytest.mark.full
def test_check_sees_what_an_episode_leaves_behind() -> None:
    found = list(envs.battery(envs.make("gymnasium:tiny_gym:TinySticky-v0"), "sticky"))
    assert not found[-1].passed or any("reset must forget" in x.sentence for x in found if not x.passed)
    assert sum("reset must forget" in x.sentence for x in found if x.passed is False) == 1
    assert all(x.passed for x in envs.battery(envs.make(WALK), "walk"))


def test_huge_numbers_are_finite() -> None:
    """Although their squares are not, and tell so by a warning."""
    env = envs.make(WALK, fault="huge")
    rows = run(env, [1, 0, 1, 0], env.reset(jax.random.key(0))[0])
    assert rows[-1][1].obs[0] == np.float32(1e30)


def test_ctrl_c_inside_of_a_step_ends_the_program_and_is_raised_after_it() -> None:
    env = envs.make(WALK, fault="interrupt")
    with pytest.raises(KeyboardInterrupt):
        run(env, [1, 0, 1, 0], env.reset(jax.random.key(0))[0])


def test_ctrl_c_ends_a_program_that_has_nothing_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the outside, which the main thread would notice after the last step."""
    steps = 0

    def step(self: Any, action: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1e-3)
        return np.zeros(2), 0.0, False, False, {}

    monkeypatch.setattr(tiny_gym.Walk, "step", step)
    monkeypatch.setattr(signals, "SECONDS_TO_CLOSE", 100.0)  # the process would end
    env, key = envs.make("gymnasium:tiny_gym:TinyEndless-v0", max_episode_steps=10_000), jax.random.key(0)
    many = jax.jit(lambda state: jax.lax.scan(lambda s, a: env.step(key, s, a), state, jnp.zeros(5_000, jnp.int32)))
    state, _ = env.reset(key)
    host_callback.clear_failures()
    with pytest.raises(KeyboardInterrupt), signals.ends_at_once():
        jax.block_until_ready(many(state))
    assert 3 <= steps < 1_000
    host_callback.clear_failures()


@pytest.mark.full
def test_ctrl_c_leaves_no_worker_that_hangs(tmp_path: Path) -> None:
    """A second one while training waits for the end of a chunk, which is to be saved; the first one elsewhere."""
    of_env = ("vectorization=async", "fault=hang")
    train = ["train", WALK, "ppo", *SMALL, *settings(*(f"environment_settings.{x}" for x in of_env))]
    for command, signals_to_send in ((train, 2), (["check", WALK, *settings(*of_env)], 1)):
        hangs = tmp_path / command[0]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "HANGS": str(hangs)}
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxpg", *command],
            start_new_session=True,
            cwd=tmp_path,
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        wait_until(hangs.exists)
        for _ in range(signals_to_send):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(1)
        _, error = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "Traceback" not in error
        wait_until(lambda group=process.pid: not is_alive(group))


def wait_until(holds: Any) -> None:
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def is_alive(group: int) -> bool:
    """Whether a group has a process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_check_says_once_what_the_host_raised(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", WALK, "--set", "fault=raise"]) == 2
    said = capsys.readouterr()
    assert said.out.count("the motor is broken") == 1
    assert said.err == ""
    host_callback.clear_failures()


def test_show_says_what_the_host_raised_while_it_measured(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, *settings("environment_settings.fault=raise")]
    assert "the motor is broken" in refused(capsys, "show", WALK, "ppo", "--time", *words)


@pytest.mark.parametrize("older", range(3))
def test_the_step_of_a_fault_is_that_of_its_own_environment_and_episode(older: int) -> None:
    """Of three side by side, one is a step older when the host makes them again, and begins anew a step later."""
    env, key, action = envs.make(WALK, fault="raise"), jax.random.key(0), jnp.zeros(3, jnp.int32)
    assert env.host
    step, which = jax.vmap(env.step, (None, 0, 0)), jnp.arange(3) == older
    begun, _ = jax.vmap(env.reset)(jax.random.split(key, 3))
    moved, _ = step(key, begun, action)
    mixed = jax.vmap(tree_where)(which, moved, begun)
    moved, _ = step(key, mixed, action)
    fresh, _ = jax.vmap(env.host.restart)(jax.random.split(key, 3), which, moved)
    moved, timestep = step(key, jax.vmap(tree_where)(which, fresh, moved), action)
    assert not timestep.last.any()
    host_callback.raise_failure()
    step(key, moved, action)
    with pytest.raises(UserError, match="at step 3 of an episode"):
        host_callback.raise_failure()


def test_what_cannot_be_made_is_refused() -> None:
    for name, changes, sentence in (
        ("gymnasium:CartPole-v7", {}, "no environment 'gymnasium:CartPole-v7'. Did you mean 'gymnasium:CartPole-v"),
        ("gymnasium:no_module:X-v0", {}, "cannot be imported: ModuleNotFoundError: No module named 'no_module'"),
        (POLE, {"sutton_reward": True}, "no setting 'sutton_reward'. Did you mean 'sutton_barto_reward'"),
        (POLE, {"vectorization": "asink"}, "no vectorization 'asink' of gymnasium:CartPole-v1. Did you"),
        (POLE, {"max_episode_steps": 0}, "max_episode_steps must be an integer, at least 1, not 0"),
        ("gymnasium:tiny_gym:TinyEndless-v0", {}, "Give it to a run by --set environment_settings.max_episode_steps="),
        ("gymnasium:tiny_gym:TinyPictures-v0", {"shape": (0,)}, "(0,), uint8), which has no numbers"),
        ("gymnasium:tiny_gym:TinyMission-v0", {}, "and what Gymnasium's FlattenObservation can flatten. Wrap"),
        ("gymnasium:Blackjack-v9", {}, "Did you mean 'gymnasium:Blackjack-v1'"),
        ("gymnasium:ALE/Pong-v5", {}, "Name its module, gymnasium:MODULE:ALE/Pong-v5, as in gymnasium:ale_py:"),
    ):  # fmt: skip
        with pytest.raises(UserError) as refused:
            envs.make(name, **changes)
        assert sentence in str(refused.value)
    with pytest.raises(UserError, match="lives on the host and keeps its own time; set max_episode_steps"):
        envs.time_limit(envs.make(WALK), steps=3)
    pooled = continuing(num_envs=2, num_steps=3, reset_pool=2)
    env = envs.make(WALK)
    policy, _ = networks.mlp(env)
    params = policy.init(jax.random.key(0))
    runner = jax.eval_shape(partial(pooled.init, env, policy), params, jax.random.key(0))
    with pytest.raises(UserError, match="reset_pool copies start states"):
        jax.eval_shape(partial(pooled.collect, env, policy), params, runner, jax.random.key(0))


def test_what_an_environment_must_not_return_is_refused() -> None:
    with pytest.raises(UserError, match=r"returned the observation -1, which is not one of Discrete\(4\)"):
        run_until_failure(envs.make("gymnasium:tiny_gym:TinyPictures-v0"))
    with pytest.raises(UserError, match=r"returned something else than the pair .* at the reset of an episode"):
        run_until_failure(envs.make("gymnasium:tiny_gym:TinyBare-v0"))
    for vectorization in ("sync", "async"):
        for late, when in ((False, "at the reset"), (True, "at step 1")):
            make = partial(envs.make, "gymnasium:tiny_gym:TinyShares-v0", vectorization=vectorization, late=late)
            with pytest.raises(UserError, match=f"of float64, and those of its space are uint8 {when} of an episode"):
                run(env := make(), [0], env.reset(jax.random.key(0))[0])
    with pytest.raises(UserError, match="an image has two axes, or three"):
        envs.make("gymnasium:tiny_gym:TinyPictures-v0", shape=(4, 8, 8, 3))
    with pytest.raises(UserError, match="registered without an entry_point"):
        envs.make("gymnasium:tiny_gym:TinyVector-v0")


def run_until_failure(env: Any) -> None:
    host_callback.clear_failures()
    jax.block_until_ready(env.reset(jax.random.key(0)))
    host_callback.raise_failure()


def test_the_battery_has_no_more_environments_than_it_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    close_all()
    made: list[Any] = []
    of_the_class = tiny_gym.Walk.__init__

    def init(self: Any, **settings: Any) -> None:
        of_the_class(self, **settings)
        made.append(self)

    env = envs.make_unchecked(WALK)
    monkeypatch.setattr(tiny_gym.Walk, "__init__", init)
    assert all(finding.passed for finding in envs.battery(env, "walk"))
    assert len(made) < 2 * COLUMNS


@pytest.mark.parametrize(("after", "lines"), [(3, 2), (700, 4), (1500, 10)])
def test_check_says_what_the_host_raised(after: int, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whichever of the programs of the battery it is."""
    steps = 0

    def step(self: Any, action: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == after:
            raise RuntimeError("broken")
        return of_the_class(self, action)

    of_the_class = tiny_gym.Walk.step
    monkeypatch.setattr(tiny_gym.Walk, "step", step)
    host_callback.clear_failures()
    found = list(envs.battery(envs.make_unchecked(WALK), "walk"))
    assert not found[-1].passed
    assert "raised RuntimeError: broken" in found[-1].sentence
    assert all(finding.passed for finding in found[:-1])
    assert len(found) >= lines


def test_a_worker_that_dies_at_once_points_to_the_guard_of_a_script() -> None:
    """A worker imports the script anew, which trains anew where nothing guards it, and dies before a step."""

    def dies(n: int, seed: int) -> Any:
        raise EOFError

    with pytest.raises(UserError, match=r"died before it took a step.*__main__"):
        run_until_failure(host_env(source_of(WALK)._replace(make=dies)))


@pytest.mark.full
@pytest.mark.parametrize("fault", ["die", "pipe"])
def test_a_worker_that_dies_is_a_sentence_with_the_step(fault: str) -> None:
    """Also where its pipe is closed a while before it."""
    env = envs.make(WALK, fault=fault, vectorization="async")
    with pytest.raises(UserError, match="has died at step 3 of all environments side by side"):
        run(env, [1, 0, 1, 0], env.reset(jax.random.key(0))[0])
    assert not multiprocessing.active_children()


@pytest.mark.full
@pytest.mark.parametrize(("fault", "vectorization"), [("raise", "sync"), ("die", "async")])
def test_a_fault_ends_a_run_and_its_processes(
    fault: str, vectorization: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, one sentence, the last checkpoint as it was, no process left."""
    of_env = [f"environment_settings.{x}" for x in (f"vectorization={vectorization}", f"fault={fault}", "at=3")]
    out = str(tmp_path / "run")
    train = ["train", WALK, "ppo", *SMALL, *settings(*of_env, "evaluation_episodes=2")]
    assert main([*train, "--steps", "600", "--out", out, "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxpg: ")
    assert WALK in error
    assert "step" in error
    assert "Traceback" not in error
    assert error.count("\n") == 1
    assert not multiprocessing.active_children()


def test_of_several_failures_the_first_is_raised_and_all_are_forgotten() -> None:
    for text in ("first", "second"):
        host_callback.fail(ValueError(text))
    with pytest.raises(ValueError, match="first"):
        host_callback.raise_failure()
    host_callback.raise_failure()
