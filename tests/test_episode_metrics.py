"""Numbers of an environment's own about its episodes: their means are metrics, in training and in evaluations.

The number here is the time at the end of an episode, which is its length, a metric of every run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_parallel import by_shard_map, on_one

import jaxpg
from jaxpg import envs, ladder, networks, report, values
from jaxpg.envs import wrappers
from jaxpg.envs.contract import check_env
from jaxpg.errors import UserError
from jaxpg.parallel.machine import program_for
from jaxpg.policy_gradient import policy_gradient
from jaxpg.report.diagnostics import diagnostics_figure
from jaxpg.report.drawing import inline_svg
from jaxpg.training.metrics_writer import tag_of
from jaxpg.types import Env, Learner


def timed(env: Env) -> Env:
    return env._replace(episode_metrics=lambda state: {"time": state.time})


ENV = timed(tiny.counter())


def of_ladder(algorithm: Any) -> Learner:
    return policy_gradient(ENV, *networks.mlp(ENV, hidden=(4,)), algorithm)


def of_family(algorithm: Any) -> Learner:
    return values.deep_q(ENV, values.mlp(ENV, hidden=(4,)), algorithm)


LEARNERS: dict[str, Callable[[], Learner]] = {
    "a2c": lambda: of_ladder(ladder.a2c(num_envs=4, num_steps=7)),
    "ppo": lambda: of_ladder(ladder.ppo(num_envs=4, num_steps=9, num_minibatches=2, reset_pool=2)),
    "reinforce": lambda: of_ladder(ladder.reinforce(num_envs=4)),
    "dapo": lambda: of_ladder(ladder.dapo(num_envs=8, group_size=4, max_resample_rounds=2, num_minibatches=1)),
    "dqn": lambda: of_family(values.dqn(num_envs=4, repeats=4, buffer_size=64, batch_size=4, learning_starts=4)),
    "pqn": lambda: of_family(values.pqn(num_envs=4, num_steps=8, num_minibatches=2)),
    "q_learning": lambda: values.tabular_control(timed(envs.make("frozen_lake")), values.q_learning(num_steps=32)),
}


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("name", LEARNERS)
def test_the_mean_over_episodes_is_a_metric(name: str, platform: str) -> None:
    with program_for(platform):
        learner = LEARNERS[name]()
        state, step = learner.init(jax.random.key(0)), tiny.jit(learner.step)
        for i in range(3):
            state, metrics = step(state, jax.random.key(i))
            assert metrics["episodes"] > 0
            np.testing.assert_allclose(metrics["env_time"], metrics["length"], rtol=1e-6)


@pytest.mark.parametrize("name", ["a2c", "reinforce"])
def test_devices_add_up_their_episodes(name: str) -> None:
    learner = LEARNERS[name]()
    state = learner.init(jax.random.key(0))
    (_, one), (_, four) = on_one(learner, state), by_shard_map(learner, state)
    np.testing.assert_allclose(one["env_time"], one["length"], rtol=1e-6)
    np.testing.assert_allclose(four["env_time"], one["env_time"], rtol=1e-6)


def test_rows_and_evaluations_have_it() -> None:
    """Where no episode ended in a row there is no number, and a row of several iterations counts each episode once."""
    settings: dict[str, Any] = {"num_envs": 2, "num_steps": 1, "evaluations": 3, "evaluation_episodes": 6}
    run = jaxpg.fit(
        ENV, "a2c", network=partial(networks.mlp, hidden=(4,)), seeds=2, total_steps=900, progress=False, **settings
    )
    metrics = run.metrics
    assert metrics["iterations"].max() > 1
    assert np.isnan(metrics["env_time"]).any()
    np.testing.assert_allclose(metrics["env_time"], metrics["length"], rtol=1e-5)
    np.testing.assert_allclose(metrics["evaluation_env_time"], metrics["evaluation_length"], rtol=1e-6)
    assert tag_of("env_time") == "episodes/env_time"
    runs = {"a2c": report.RunResult(metrics["steps"], metrics["return"], [0.0, 0.0], 1.0, 1.0, metrics=metrics.columns)}
    assert "time, mean over episodes" in report.comparison_page(runs, title="x", details={})


@pytest.mark.parametrize(
    "wrap",
    [
        partial(wrappers.time_limit, steps=3),
        partial(wrappers.frame_stack, num=2),
        partial(wrappers.sticky_actions, probability=0.5),
        wrappers.flatten,
    ],
)
def test_wrappers_hand_it_on(wrap: Callable[[Env], Env]) -> None:
    env = wrap(ENV)
    learner = policy_gradient(env, *networks.mlp(env, hidden=(4,)), ladder.a2c(num_envs=4, num_steps=8))
    _, metrics = tiny.jit(learner.step)(learner.init(jax.random.key(0)), jax.random.key(1))
    np.testing.assert_allclose(metrics["env_time"], metrics["length"], rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (3, "episode_metrics must be a function, not 3"),
        (lambda state: state.time, "episode_metrics of counter must return a number by each name, in a dictionary"),
        (lambda state: {"time": jnp.stack([state.time] * 2)}, "must return a number by each name"),
        (lambda state: {0: state.time}, "must return a number by each name"),
        (lambda state: {"time": state.tiem}, "episode_metrics of counter raised AttributeError"),
    ],
)
def test_what_is_no_number_is_refused(given: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_env(ENV._replace(episode_metrics=given), "counter")
    check_env(ENV, "counter")


def test_the_lander_counts_its_landings() -> None:
    """A state whose bodies have rested for half a second is one of a landing; at the start none has."""
    env = envs.make("LunarLander-v3")
    state, _ = env.reset(jax.random.key(0))
    assert env.episode_metrics
    assert not env.episode_metrics(state)["landed"]
    rested = state._replace(craft=state.craft._replace(still=(jnp.float32(0.5),) * 3))
    assert env.episode_metrics(rested)["landed"]


@pytest.mark.filterwarnings("error")
def test_a_name_of_any_length_is_drawn_as_it_is() -> None:
    """The figure keeps its layout, and the page its structure."""
    name = "env_<script>$x_{" + "a" * 300
    values = np.linspace(0.0, 1.0, 60).reshape(20, 3)
    figure = diagnostics_figure({"ppo": (np.arange(20.0), {name: values, "entropy": values})})
    assert figure is not None
    assert "<script" not in inline_svg(figure)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert max(map(len, titles)) < 50
    assert titles[1].startswith(r"<script>\$x_{aaa")
