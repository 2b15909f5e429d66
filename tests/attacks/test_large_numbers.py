"""Runs that cannot fit any machine: one sentence with the setting, before anything is compiled or written."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpg import parallel
from jaxpg.cli.main import main
from jaxpg.errors import UserError
from jaxpg.experiments.build import build
from jaxpg.experiments.config import resolve_config, to_dict
from jaxpg.training import advance, memory


def check(task: str, algorithm: str, num_seeds: int = 1, **settings: object) -> None:
    config = resolve_config(task, algorithm, settings)
    experiment = build(config)
    mesh = parallel.make_mesh(num_seeds, 1, jax.devices()[:1])
    state = advance.abstract_state(experiment.learner, num_seeds)
    programs = advance.compile_programs(experiment.learner, experiment.evaluate, state, mesh)
    memory.check_memory(programs, state, mesh, to_dict(config), evaluates=True)


TOO_LARGE = {
    "environments": ("cartpole", "ppo", {"num_envs": 10**7}, "num_envs = 10,000,000"),
    "environments of whole episodes": ("cartpole", "reinforce", {"num_envs": 10**6}, "num_envs = 1,000,000"),
    "steps": ("cartpole", "ppo", {"num_steps": 10**8}, "num_steps = 100,000,000"),
    "evaluation": ("cartpole", "ppo", {"evaluation_episodes": 10**9}, "evaluation_episodes = 1,000,000,000"),
    "network": ("cartpole", "ppo", {"network.hidden": [10**9, 64]}, "hidden = 1,000,000,000"),
    "seeds": ("cartpole", "ppo", {"num_seeds": 10**8}, "seeds = 100,000,000"),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=() if x in ("seeds", "steps") else pytest.mark.full) for x in TOO_LARGE]
)
def test_what_is_too_large_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task, algorithm, settings, named = TOO_LARGE[kind]
    monkeypatch.setattr(memory, "memory_limit", lambda mesh: 2.0**34)
    with pytest.raises(UserError, match=rf"(needs at least .* GiB|2\^31 - 1 entries).*Its largest sizes are {named}"):
        check(task, algorithm, **settings)


@pytest.mark.full
@pytest.mark.parametrize(("task", "algorithm"), [("cartpole", "ppo"), ("cartpole", "reinforce"), ("sort", "grpo")])
def test_the_bound_is_below_what_xla_needs(task: str, algorithm: str) -> None:
    """And above half of what the state and the rollout take, for it to be of use."""
    config = resolve_config(
        task, algorithm, {"num_envs": 128, "initial": "none"} if task == "sort" else {"num_envs": 128}
    )
    learner, mesh = build(config).learner, parallel.make_mesh(1, 1, jax.devices()[:1])
    state = advance.abstract_state(learner, 1)
    traced = advance.compile_programs(learner, None, state, mesh).advance.trace(
        advance.abstract_keys(1), state, np.int32(1)
    )
    needed = memory.memory_per_device(learner, 1, mesh)
    key = jax.random.key(0)
    one = jax.eval_shape(learner.init, key)
    assert learner.experience
    rollout, _ = jax.eval_shape(learner.experience.collect, one, key)
    assert 0.5 * memory.bytes_of((one, rollout)) < memory.least_bytes(traced.jaxpr.jaxpr, mesh) <= needed
    assert memory.memory_per_device(learner, 1, mesh, limit=1) < needed  # without compiling


def test_a_device_without_memory_is_one_sentence() -> None:
    """The bound is a lower one: what passes it may still be too much. Other errors of jax are not touched."""
    named = pytest.raises(UserError, match=r"run out of memory.*num_envs = 4,000,000")
    with named, memory.explain_exhaustion({"num_envs": 4_000_000}, 2):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 140737488355328 bytes.")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), memory.explain_exhaustion({}, 1):
        raise jax.errors.JaxRuntimeError("INTERNAL: other")


def test_a_text_run_that_is_refused_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "sort", "grpo", "--set", "initial=none", "--set", "num_envs=102400000", "--quiet"]
    assert main([*command, "--out", str(tmp_path / "run")]) == 2
    assert "num_envs = 102,400,000" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_sweep_that_is_too_large_is_refused_without_compiling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", "cartpole", "ppo", "--grid", "gamma=0.9,0.99", "--set", "num_envs=10000000", "--quiet"]
    assert main([*command, "--out", str(tmp_path / "run")]) == 2
    assert "One run takes" in capsys.readouterr().err
