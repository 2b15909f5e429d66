"""The stages of a run: which are planned, in which order, with which settings, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxpg.errors import UserError
from jaxpg.experiments import stages
from jaxpg.experiments.config import resolve_config
from jaxpg.experiments.stages import Stage
from jaxpg.training import checkpoint

OUT = Path("out")


def plan(
    algorithm: str, overrides: dict[str, Any] | None = None, finished: tuple[str, ...] = (), task: str = "summarise_toy"
) -> list[Stage]:
    overrides = overrides or {}
    return stages.plan_stages(
        resolve_config(task, algorithm, overrides),
        OUT,
        OUT / "shared",
        task=task,
        overrides=overrides,
        finished=lambda stage: stage.name in finished,
    )


def test_what_a_run_needs_comes_first_and_once() -> None:
    """RLHF needs a reward model, and both need fine-tuning."""
    planned = plan("rlhf")
    assert [stage.name for stage in planned] == ["sft", "reward_model", "rlhf"]
    assert [stage.directory for stage in planned] == [OUT / "shared" / "sft", OUT / "shared" / "reward_model", OUT]
    named = [(stage.config.initial, stage.config.reward) for stage in planned]
    sft, model = "out/shared/sft", "out/shared/reward_model"
    assert named == [(None, None), (sft, None), (sft, model)]


@pytest.mark.parametrize(
    ("algorithm", "overrides", "finished", "names"),
    [
        ("sft", {}, (), ["sft"]),
        ("dpo", {}, (), ["sft", "dpo"]),
        ("rlhf", {"initial": "none"}, (), ["sft", "reward_model", "rlhf"]),
        ("rlhf", {"initial": "none"}, ("reward_model",), ["reward_model", "rlhf"]),
        ("rlhf", {}, ("reward_model",), ["reward_model", "sft", "rlhf"]),
        ("rlhf", {"reward": "runs/model"}, (), ["sft", "rlhf"]),
        ("rlhf", {"reward": "runs/model", "initial": "runs/policy"}, (), ["rlhf"]),
    ],
)
def test_what_is_there_already_is_not_planned_for(
    algorithm: str, overrides: dict[str, Any], finished: tuple[str, ...], names: list[str]
) -> None:
    assert [stage.name for stage in plan(algorithm, overrides, finished)] == names


def test_stages_take_over_the_task_and_the_seeds_but_no_settings_of_the_algorithm() -> None:
    overrides = {"network.width": 32, "pairs.sharpness": 3.0, "seeds": [4, 7], "learning_rate": 0.5, "total_steps": 9}
    tuning, model, last = plan("rlhf", overrides)
    for stage in (tuning, model, last):
        assert (stage.config.network["width"], stage.config.seeds) == (32, (4, 7))
        assert stage.config.pairs["sharpness"] == 3.0
    assert (last.config.settings["learning_rate"], last.config.total_steps) == (0.5, 9)
    assert (tuning.config.settings["learning_rate"], tuning.config.total_steps) == (2e-3, 300_000)


def test_a_run_that_needs_itself_is_refused(tmp_path: Path) -> None:
    task = tmp_path / "task.toml"
    task.write_text('environment = "sort"\n[sft]\ninitial = "dpo"\n[dpo]\ninitial = "sft"\n[grpo]\ninitial = "sft"')
    with pytest.raises(UserError, match=r"sft needs dpo needs sft: there is no first stage\. Set initial to"):
        plan("grpo", task=str(task))


def test_every_stage_is_checked_before_the_first_is_trained() -> None:
    """The run itself, then a stage; a finished stage is not checked."""
    good = plan("rlhf")
    stages.check_plan(good, finished=lambda stage: False)
    spoiled = good[1]._replace(config=resolve_config("cartpole", "sft"))
    with pytest.raises(UserError, match="learns from texts"):
        stages.check_plan([good[0], spoiled, good[2]], finished=lambda stage: False)
    stages.check_plan([good[0], spoiled, good[2]], finished=lambda stage: stage is spoiled)


def test_a_stage_is_finished_when_its_last_checkpoint_says_so(tmp_path: Path) -> None:
    """A stage that was killed between its last row and its last checkpoint has lost what it learned in between."""
    stage = Stage("sft", resolve_config("sort", "sft", {"total_steps": 100}), tmp_path)
    assert not stages.is_finished(stage)
    (tmp_path / "metrics.jsonl").write_text('{"steps": [100], "loss": [0.5]}\n')
    assert not stages.is_finished(stage)
    for steps, finished in ((90, False), (104, True)):
        checkpoint.save(tmp_path / checkpoint.CHECKPOINTS, {"x": jnp.zeros(2)}, steps=steps, about={})
        assert stages.is_finished(stage) is finished
