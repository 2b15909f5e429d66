"""`jaxpg check`: environments with one mistake each, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg import envs
from jaxpg.cli.main import main
from jaxpg.envs.battery import COLUMNS, _bounds, _Episode, _successors
from jaxpg.types import Box, Discrete, Env, TimeStep

LIMIT = 12


def line(**changes: Any) -> Env:
    """Walks up a line from a place below 1, by the action and a little noise; over above 6, and cut off at LIMIT."""

    def observe(place: Any) -> Any:
        return jnp.stack([place, -place])

    def reset(key: Any) -> Any:
        place = jax.random.uniform(key)
        return (place, jnp.int32(0)), observe(place)

    def step(key: Any, state: Any, action: Any) -> Any:
        place, time = state[0] + action + 0.1 * jax.random.uniform(key), state[1] + 1
        over = place > 6
        timestep = TimeStep(observe(place), place, 1.0 - over.astype(jnp.float32), over | (time >= LIMIT))
        return (place, time), timestep

    box = Box(np.array([0.0, -9.0], np.float32), np.array([9.0, 0.0], np.float32))
    env = Env("line", reset, step, box, Discrete(2), LIMIT, min_truncation_step=LIMIT)
    return env._replace(**changes)


def changed(change: Any, env: Env | None = None) -> Env:
    """`env`, or `line`, whose every step is changed by `change(env, key, state, timestep) -> state, timestep`."""
    env = env or line()

    def step(key: Any, state: Any, action: Any) -> Any:
        return change(env, key, *env.step(key, state, action))

    return env._replace(step=step)


def resets_itself(env: Env, key: Any, state: Any, timestep: TimeStep) -> Any:
    fresh, obs = env.reset(key)
    state = jax.tree.map(lambda x, y: jnp.where(timestep.last, x, y), fresh, state)
    return state, timestep._replace(obs=jnp.where(timestep.last, obs, timestep.obs))


def resets_itself_at_a_time_out(env: Env, key: Any, state: Any, timestep: TimeStep) -> Any:
    reset, fresh = resets_itself(env, key, state, timestep)
    timed_out = timestep.last & (timestep.discount > 0)
    return jax.tree.map(lambda x, y: jnp.where(timed_out, x, y), (reset, fresh), (state, timestep))


def pays_too_much(env: Env, key: Any, state: Any, timestep: TimeStep) -> Any:
    return state, timestep._replace(reward=jnp.where(timestep.last, -3e38, timestep.reward))


def takes_a_time_out_for_an_end(env: Env, key: Any, state: Any, timestep: TimeStep) -> Any:
    return state, timestep._replace(discount=1.0 - timestep.last.astype(jnp.float32))


def is_seldom_nan(env: Env, key: Any, state: Any, timestep: TimeStep) -> Any:
    return state, timestep._replace(reward=jnp.where(jax.random.uniform(key) < 0.02, jnp.nan, timestep.reward))


def ends_early(env: Env, key: Any, state: Any, timestep: TimeStep) -> Any:
    return state, timestep._replace(last=timestep.last | (jax.random.uniform(key) < 0.1))


def ends_at_once(env: Env, key: Any, state: Any, timestep: TimeStep) -> Any:
    return state, timestep._replace(last=jnp.ones((), bool))


def hides_its_randomness(env: Env, key: Any, state: Any, timestep: TimeStep) -> Any:
    return state, timestep._replace(reward=timestep.reward + np.float32(np.random.default_rng().uniform()))


@jax.custom_batching.custom_vmap
def doubled_in_company(x: Any) -> Any:
    return x


@doubled_in_company.def_vmap
def _(axis_size: int, in_batched: Any, x: Any) -> Any:
    return 2 * x, True


def behaves_otherwise_in_company(env: Env, key: Any, state: Any, timestep: TimeStep) -> Any:
    return state, timestep._replace(reward=doubled_in_company(timestep.reward))


def anywhere(**changes: Any) -> Env:
    """`line` whose episodes begin at any place, so that no place tells a reset from a step."""

    def reset(key: Any) -> Any:
        place = 6 * jax.random.uniform(key)
        return (place, jnp.int32(0)), jnp.stack([place, -place])

    return line(reset=reset, **changes)


def seldom_empty(obs: Any) -> Any:
    return jnp.broadcast_to(jnp.abs(obs[..., :1] - 3) > 0.02, obs.shape)


def findings(env: Env) -> tuple[list[str], list[str]]:
    """What has passed and what has not."""
    found = list(envs.battery(env, "line"))
    return [x.sentence for x in found if x.passed], [x.sentence for x in found if not x.passed]


@pytest.mark.full
def test_a_sound_environment_passes() -> None:
    assert findings(anywhere())[1] == []
    passed, wrong = findings(line())
    assert wrong == []
    assert len(passed) == 12
    assert passed[5].endswith("it was reached")
    assert "0 of them" not in passed[7]  # there are terminations
    assert not passed[7].endswith(", and 0 time-outs")


MISTAKES: dict[str, tuple[Env, str]] = {
    "reset": (changed(resets_itself), "looks like that of a reset"),
    "reset at a time-out": (
        changed(resets_itself_at_a_time_out),
        "at a time-out the last obs looks like that of a reset",
    ),
    "reset anywhere": (changed(resets_itself, anywhere()), "looks like that of a reset"),
    "huge": (changed(pays_too_much), "a reward has the magnitude 3e+38"),
    "nan": (changed(is_seldom_nan), "finite"),
    "early": (changed(ends_early), "before min_truncation_step = 12"),
    "always early": (changed(ends_at_once), "at step 1 of an episode of random actions, before min_truncation_step"),
    "hidden": (changed(hides_its_randomness), "draw random numbers from the key alone"),
    "company": (changed(behaves_otherwise_in_company), "other steps among others (vmap) than alone"),
    "bounds": (line(observation_space=Box(np.full(2, -9, np.float32), np.full(2, 3, np.float32))), "obs[0] went from"),
    "endless": (line(time_limit=5), "although time_limit = 5"),
    "record": (line(time_limit=0), "an int from 1"),
    "mask": (line(action_mask=lambda obs: obs > 3), "the action_mask allows no action at reset"),
    "seldom a mask": (line(action_mask=seldom_empty), "the action_mask allowed no action somewhere in"),
    "one mask": (line(action_mask=lambda obs: obs[:2] > -9), "of observations with the axes (5,) must return bool"),
    "flat": (line(action_space=Box(np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32))), "have one axis"),
    "empty": (line(observation_space=Box(np.zeros(0, np.float32), np.ones(0, np.float32))), "which has no numbers"),
}


@pytest.mark.full
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_the_one_thing_that_is_found(mistake: str) -> None:
    env, sentence = MISTAKES[mistake]
    _, wrong = findings(env)
    assert len(wrong) == 1, wrong
    assert not any(finding.passed is None for finding in envs.battery(env, "line"))
    assert sentence in wrong[0]


def ended(**fields: Any) -> _Episode:
    """The ends of 64 episodes of five steps by a time-out, with these fields."""
    zeros, ones = np.zeros(COLUMNS), np.ones(COLUMNS)
    plain = _Episode(
        t=5 * ones, state=zeros, timestep=TimeStep(zeros, zeros, ones, ones > 0), state_before=zeros, obs_before=zeros,
        low=zeros, high=zeros, always_allowed=ones > 0, finite=ones > 0, largest_reward=zeros,
    )  # fmt: skip
    return plain._replace(**fields)


@pytest.mark.parametrize(("at_once", "jump", "passed"), [(0, 58, False), (0, 57, True), (32, 32, False)])
def test_most_episodes_of_more_than_a_step_have_to_jump_back(at_once: int, jump: int, passed: bool) -> None:
    """Of 64 some end with their first step, before which they are where they began, and of the others some jump."""
    i = np.arange(COLUMNS)
    begins = i / COLUMNS
    before, last = np.where(i < at_once, begins, 9.0), np.where(i < at_once + jump, 0.5, 9.0)
    end = ended(t=np.where(i < at_once, 1, 5), state=last, state_before=before, obs_before=before)
    end = end._replace(timestep=end.timestep._replace(obs=last))
    assert _successors((begins, begins), end).passed is passed


@pytest.mark.parametrize(
    ("low", "high", "passed"),
    [(0.0, 8.0, True), (0.007, 9.0, True), (0.009, 9.0, False), (0.0, 7.993, True), (0.0, 7.991, False)],
)
def test_both_bounds_hold_but_for_rounding(low: float, high: float, passed: bool) -> None:
    """A thousandth of the distance between what was least and greatest, here in one of 64 episodes: 0 and 8."""
    seen = np.full((2, COLUMNS, 2), 4.0)
    seen[0, 3], seen[1, 5] = 0.0, 8.0
    space = Box(np.array([0.0, low], np.float32), np.array([8.0, high], np.float32))
    found = _bounds(line(observation_space=space), ended(low=seen[0], high=seen[1]))
    assert found.passed is passed
    assert passed or f"obs[1] went from 0 to 8, and the observation_space says {low:g} to {high:g}" in found.sentence


def shows_little(env: Env, key: Any, state: Any, timestep: TimeStep) -> Any:
    """A cue is shown in the middle of an episode alone."""
    shown = jnp.where(timestep.last, 0.0, timestep.obs)
    return state, timestep._replace(obs=shown)


def holds_gamma(env: Env, key: Any, state: Any, timestep: TimeStep) -> Any:
    return state, timestep._replace(discount=jnp.where(timestep.discount > 0, 0.99, 0.0))


@pytest.mark.full
@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        (changed(shows_little)._replace(reset=lambda key: (line().reset(key)[0], jnp.zeros(2))), "right only if the"),
        (changed(takes_a_time_out_for_an_end), "right only if the task itself is over then"),
        (changed(holds_gamma), "a discount is 0.99: right only if it is to multiply gamma"),
    ],
)
def test_what_may_be_right_is_no_mistake(env: Env, sentence: str) -> None:
    unsure = [x.sentence for x in envs.battery(env, "line") if x.passed is not True]
    assert len(unsure) == 1, unsure
    assert sentence in unsure[0]
    assert all(x.passed is not False for x in envs.battery(env, "line"))


@pytest.mark.full
def test_the_command_prints_a_line_each_and_says_by_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What passes is in test_readme.py."""
    (tmp_path / "mine_checked.py").write_text(
        "from jaxpg import envs\n\ndef short(*, steps: int = 9):\n"
        "    env = envs.make('CartPole-v1', max_steps_in_episode=9)\n    return env._replace(time_limit=steps)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check", "mine_checked:short", "--set", "steps=3"]) == 2
    *passed, wrong = capsys.readouterr().out.splitlines()
    assert len(passed) == 2
    assert all(x.startswith("✓ ") for x in passed)
    assert wrong.startswith("✗ mine_checked:short: no `last`")


@pytest.mark.full
def test_what_may_be_right_does_not_fail_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_unsure.py").write_text(
        "import test_battery\n\ndef line():\n    return test_battery.changed(test_battery.holds_gamma)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check", "mine_unsure:line"]) == 0
    marks = [line[0] for line in capsys.readouterr().out.splitlines()]
    assert (marks.count("?"), set(marks)) == (1, {"✓", "?"})
