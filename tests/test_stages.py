"""The stages of a run: which are planned, in which order, with which settings, and which are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpg.cli import stage_report
from jaxpg.cli.planning import RESULTS
from jaxpg.cli.record import RECORD
from jaxpg.errors import UserError
from jaxpg.experiments import stages, warm_start
from jaxpg.experiments.build import build
from jaxpg.experiments.config import resolve_config
from jaxpg.experiments.data_files import CHECKSUMS
from jaxpg.experiments.sampling import SAMPLED_FILES
from jaxpg.experiments.stages import Stage
from jaxpg.experiments.warm_start import VOCABULARY, check_initial
from jaxpg.training import checkpoint, run_directory
from jaxpg.training.lock import LOCK

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


CHAIN = """
environment = "sort"
network = { kind = "transformer", width = 8, layers = 1, heads = 2, kv_heads = 1 }
pairs = { slip_rate = 0.1 }

[grpo]
initial = "sft"
num_envs = 16
group_size = 8

[stages.cold_start]
algorithm = "sft"
total_steps = 70
demonstrations = { num_demonstrations = 5 }

[stages.rules]
algorithm = "grpo"
initial = "cold_start"
rewards = { accuracy = 1.0, format = 0.2 }

[stages.tuned]
algorithm = "sft"
initial = "cold_start"
demonstrations = { sampled_from = "rules", prompts = 3 }

[stages.r1]
algorithm = "grpo"
initial = "tuned"
rewards = { accuracy = 1.0, liked = { model = "reward_model", weight = 0.5, standardize = "running" } }
"""


@pytest.fixture
def chain(tmp_path: Path) -> str:
    path = tmp_path / "chain.toml"
    path.write_text(CHAIN)
    return str(path)


def test_stages_with_names_of_their_own_are_planned_from_the_last_one(chain: str) -> None:
    planned = plan("r1", task=chain)
    assert [stage.name for stage in planned] == ["reward_model", "cold_start", "rules", "tuned", "grpo"]
    algorithms = [stage.config.algorithm for stage in planned]
    assert algorithms == ["reward_model", "sft", "grpo", "sft", "grpo"]
    _, cold_start, rules, tuned, last = (stage.config for stage in planned)
    assert (cold_start.total_steps, tuned.total_steps, rules.settings["num_envs"]) == (70, 500_000, 16)
    assert (rules.initial, tuned.initial, last.initial) == tuple(
        f"out/shared/{x}" for x in ("cold_start",) * 2 + ("tuned",)
    )
    assert rules.rewards == {"accuracy": 1.0, "format": 0.2}
    assert last.rewards["liked"] == {"model": "out/shared/reward_model", "weight": 0.5, "standardize": "running"}
    file = "out/shared/tuned/demonstrations.jsonl"
    assert tuned.demonstrations == {"sampled_from": "out/shared/rules", "prompts": 3, "file": file}
    assert [stage.name for stage in plan("r1", task=chain, finished=("tuned",))] == ["reward_model", "tuned", "grpo"]


def test_the_chain_of_a_shipped_task() -> None:
    planned = plan("r1", task="modular_chain")
    assert [stage.name for stage in planned] == ["base", "judge", "cold_start", "rules", "tuned", "grpo"]
    assert len({str(stage.config.environment_settings.get("modulus")) for stage in planned}) == 1
    assert planned[-1].config.rewards.keys() == {"accuracy", "format", "language", "preference"}


def test_settings_of_a_stage_are_overridden_from_the_command_line(chain: str) -> None:
    planned = plan("r1", {"stages.rules.total_steps": 9, "total_steps": 8}, task=chain)
    assert [stage.config.total_steps for stage in planned] == [500_000, 70, 9, 500_000, 8]
    with pytest.raises(UserError, match=r"no stage 'rulse' of chain. Did you mean 'rules'"):
        plan("r1", {"stages.rulse.total_steps": 9}, task=chain)


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ('"rules", prompts', '"r1", prompts', "tuned needs r1 needs tuned: there is no first stage. Set initial"),
        ('initial = "cold_start"\nrewards', 'initial = "tuned"\nrewards', "tuned needs rules needs tuned"),
        ("[stages.r1]", "[stages.dpo]", "The stage dpo, in .* has the name of an algorithm"),
        ('algorithm = "sft"\ntotal', "total", "The stage cold_start, in .* needs an algorithm, .* not none"),
        ('algorithm = "sft"\ntotal', 'algorithm = "rules"\ntotal', "needs an algorithm, .* not 'rules'"),
        ("num_demonstrations", "demos", "no setting 'demos' of demonstrations"),
        ("total_steps = 70", "total_stepps = 70", "no setting 'total_stepps' of the stage cold_start.* 'total_steps'"),
        ("[stages.r1]", '[stages."a/b"]', "becomes part of the names"),
    ],
)
def test_stages_that_cannot_be_are_refused(chain: str, before: str, after: str, sentence: str) -> None:
    Path(chain).write_text(CHAIN.replace(before, after))
    with pytest.raises(UserError, match=sentence):
        plan("r1", task=chain)


@pytest.mark.parametrize(
    "name",
    [
        *(run_directory.CONFIG, *run_directory.WRITTEN, LOCK, "export"),
        *(VOCABULARY, CHECKSUMS, *SAMPLED_FILES.values(), RECORD, *RESULTS["compare"][:2], *RESULTS["sweep"]),
    ],
)
def test_a_stage_has_no_name_of_what_is_written_beside_it(chain: str, name: str) -> None:
    Path(chain).write_text(CHAIN.replace("[stages.r1]", f'[stages."{name}"]'))
    with pytest.raises(UserError, match=rf"The stage {name}, in .* has the name of what a run writes"):
        resolve_config(chain, "sft", {})


def test_every_seed_begins_with_the_policy_of_the_same_seed() -> None:
    config = resolve_config("catch", "a2c", {"seeds": [9, 4, 7]})
    begun = warm_start._for_seeds({"w": jnp.array([[40.0], [50.0], [70.0], [90.0]])}, [4, 5, 7, 9], config)
    assert begun["w"].tolist() == [[90.0], [40.0], [70.0]]
    of_one_seed = warm_start._for_seeds({"w": jnp.array([[50.0]])}, [5], config)
    assert of_one_seed["w"].tolist() == [[50.0]] * 3


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("heads", 2, 4),
        ("kv_heads", 2, 1),
        ("activation", "relu", "tanh"),
        ("squash", True, False),
        ("strides", (2, 1), (1, 2)),
    ],
)
def test_parameters_of_the_same_shapes_may_be_of_another_network(name: str, theirs: Any, ours: Any) -> None:
    config = resolve_config("catch", "a2c")
    earlier, other, without = (
        replace(config, network=network)
        for network in ({name: theirs, "orthogonal": True}, {name: ours, "orthogonal": True}, {"orthogonal": False})
    )
    assert not warm_start._reads_alike(earlier, other)
    assert warm_start._reads_alike(earlier, without)  # what only one of two kinds has says nothing


def test_a_report_has_the_first_and_the_last_evaluation_of_a_stage(tmp_path: Path) -> None:
    """As means over its seeds; the last row was not evaluated."""
    accuracy = [[0.1, 0.3], [0.2, 0.2], [0.5, 0.7], [None, None]]
    rows = [
        {"steps": [i, i], "seconds": i, "chunk_seconds": 1, "evaluation_accuracy": x, "evaluation_length": [4.0, i]}
        for i, x in enumerate(accuracy)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (row,) = stage_report.stage_rows([Stage("tuning", resolve_config("sort", "sft"), tmp_path)])
    assert row.evaluation == {"accuracy": "0.2 → 0.6", "length": "2 → 3.5"}
    assert (row.name, row.algorithm, row.policy, row.steps) == ("tuning", "sft", "new parameters", 3)


@pytest.mark.full
def test_stages_are_checked_before_what_they_need_is_there(chain: str, tmp_path: Path) -> None:
    """Neither the reward model nor the demonstrations exist; a wrong reward in a stage is found all the same."""
    stages.check_plan(plan("r1", task=chain), finished=lambda stage: False)
    Path(chain).write_text(CHAIN.replace("format = 0.2", "formatt = 0.2"))
    with pytest.raises(UserError, match=r"no reward 'formatt' of sort. Did you mean 'format'"):
        stages.check_plan(plan("r1", task=chain), finished=lambda stage: False)
    Path(chain).write_text(CHAIN.replace('sampled_from = "rules"', f'sampled_from = "{tmp_path}"'))
    with pytest.raises(UserError, match=r"is not the directory of a run: it has no config\.toml"):
        stages.check_plan(plan("r1", task=chain), finished=lambda stage: False)


def test_every_stage_is_checked_before_the_first_is_trained() -> None:
    """The run itself, then a stage; a finished stage is not checked."""
    good = plan("rlhf")
    stages.check_plan(good, finished=lambda stage: False)
    spoiled = good[1]._replace(config=resolve_config("cartpole", "sft"))
    with pytest.raises(UserError, match="no texts to learn from"):
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


def test_a_report_counts_the_records_of_a_file_and_does_without_it(tmp_path: Path) -> None:
    """Blank lines are no records, the last line needs no end, and the file of a trained stage may be gone."""
    file = tmp_path / "demo.jsonl"
    overrides: dict[str, Any] = {"demonstrations.file": str(file)}
    config = resolve_config("sort", "sft", overrides)
    file.write_text('\n{"prompt": "1", "completion": "1"}\n \n{"prompt": "2", "completion": "2"}')
    assert stage_report._data(config) == "2 demonstrations of a file"
    file.unlink()
    assert stage_report._data(config) == "demonstrations of a file"
    sampled = resolve_config("sort", "sft", overrides | {"demonstrations.sampled_from": "runs/rules"})
    assert stage_report._data(sampled) == "right completions of rules"


def test_dpo_is_evaluated_by_what_it_writes_and_on_pairs() -> None:
    small = {"network.width": 8, "network.layers": 1, "network.heads": 2, "evaluation_episodes": 8}
    experiment = build(resolve_config("sort", "dpo", {"initial": None, "pairs.slip_rate": 0.5, **small}))
    key = jax.random.key(0)
    found = jax.eval_shape(experiment.evaluate, jax.eval_shape(experiment.learner.init, key), key)
    assert {"return", "pair_loss", "pair_accuracy", "pair_margin"} <= found.keys()


@pytest.mark.parametrize(
    ("earlier", "ours", "who"), [(True, True, "runs/x"), (True, False, "runs/x"), (False, True, "This run")]
)
def test_a_policy_without_its_moments_is_another_policy(earlier: bool, ours: bool, who: str) -> None:
    first, second = (
        resolve_config("cartpole", "ppo", {"normalize_observations": x, "initial": "runs/x"}) for x in (earlier, ours)
    )
    with pytest.raises(UserError, match=f"^{who} normalises .*set normalize_observations = false in both"):
        check_initial(second, first)
    check_initial(resolve_config("cartpole", "ppo", {"initial": "runs/x"}), resolve_config("cartpole", "ppo"))
