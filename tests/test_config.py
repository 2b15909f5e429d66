"""Configs: every task with every algorithm, which layer wins, and which sentence refuses what."""

from __future__ import annotations

import inspect
import re
import tomllib
from html import escape
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny

from jaxpg import envs, errors, files, ladder, networks
from jaxpg.envs.text import CHARACTERS
from jaxpg.errors import UserError, excerpt
from jaxpg.experiments import config as configs
from jaxpg.experiments import config_file, parts
from jaxpg.experiments.build import KINDS, build
from jaxpg.experiments.signatures import REQUIRED, check, options
from jaxpg.report import RunResult, comparison_page
from jaxpg.types import Box

EVERY_TASK = {
    "cartpole", "acrobot", "mountain_car", "pendulum", "mountain_car_continuous", "breakout", "asterix", "freeway",
    "space_invaders", "frozen_lake", "memory_chain", "catch",
}  # fmt: skip


def write(path: Path, text: str) -> Path:
    path = path / "task.toml"
    path.write_text('environment = "CartPole-v1"\n' + text)
    return path


def test_every_task_of_the_issue_has_a_config() -> None:
    assert set(config_file.tasks()) >= EVERY_TASK


@pytest.mark.parametrize("task", sorted(EVERY_TASK))
def test_every_algorithm_resolves_on_every_task(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its resolved form, written down and read again, is the same."""
    env = configs.make_env(configs.resolve_config(task, "ppo"))
    # Made once instead of once per algorithm.
    monkeypatch.setattr(configs, "make_env", lambda config, split="train": env)
    for algorithm in ladder.ALGORITHMS:
        resolved = configs.resolve_config(task, algorithm)
        assert resolved.environment in envs.names()
        assert resolved.settings.keys() == configs.algorithm_options(algorithm).keys()
        (tmp_path / "config.toml").write_text(files.toml_dumps(configs.to_dict(resolved)))
        assert configs.load_config(tmp_path) == resolved


@pytest.mark.parametrize("task", sorted(envs.text.TASKS))
def test_every_generated_text_has_a_config_for_all_that_it_names(task: str) -> None:
    named = configs.ALGORITHMS.keys() & tomllib.loads((config_file.TASKS / f"{task}.toml").read_text()).keys()
    assert {"sft"} < named
    for algorithm in named:
        assert configs.resolve_config(task, algorithm).environment == task


@pytest.mark.parametrize("task", ["cartpole", "pendulum", "breakout", "memory_chain"])
def test_what_is_built_is_what_the_config_says(task: str) -> None:
    resolved = configs.resolve_config(task, "ppo", {"gamma": 0.5, "learning_rate": 1})
    experiment = build(resolved)
    assert experiment.env.name == resolved.environment
    assert resolved.settings["learning_rate"] == 1.0
    assert isinstance(resolved.settings["learning_rate"], float)
    assert set(experiment.learner._fields) == {"init", "step", "actor", "with_policy", "experience"}


def test_defaults_are_those_of_the_signature(tmp_path: Path) -> None:
    resolved = configs.resolve_config(write(tmp_path, ""), "ppo")
    signature = inspect.signature(ladder.ppo)
    assert resolved.settings == {name: p.default for name, p in signature.parameters.items()}
    mlp = {name: p.default for name, p in inspect.signature(networks.mlp).parameters.items() if name != "env"}
    assert resolved.network == {"kind": "mlp", **mlp}
    assert (resolved.task, resolved.total_steps, resolved.learner["normalize_observations"]) == ("task", 500_000, False)


def test_a_config_states_numbers_where_a_caller_may_trace_them() -> None:
    kinds = {name: option.kind for name, option in options(ladder.ppo).items()}
    assert (kinds["gamma"], kinds["clip_high"], kinds["chunk_rows"]) == (float, float | None, int | None)


def test_numbers_of_numpy_are_those_of_python_at_any_depth() -> None:
    """As a loop over an array gives them; config.toml has no other."""
    resolved = configs.resolve_config(
        "CartPole-v1",
        "ppo",
        {
            "learning_rate": np.float32(0.5),
            "network": {"kind": "mlp", "hidden": (np.int64(8), 4)},
            "environment_settings": {"gravity": np.float32(5.0)},
        },
    )
    plain = configs.resolve_config(
        "CartPole-v1",
        "ppo",
        {"learning_rate": 0.5, "network.hidden": np.array([8, 4]), "environment_settings.gravity": 5.0},
    )
    assert resolved == plain
    stored = tomllib.loads(files.toml_dumps(configs.to_dict(resolved)))
    assert (stored["network"]["hidden"], stored["environment_settings"]) == ([8, 4], {"gravity": 5.0})


def test_later_layers_win(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        total_steps = 1000
        normalize_observations = true
        network = { kind = "mlp", hidden = [8], activation = "relu" }
        environment_settings = { gravity = 5 }
        [a2c]
        gamma = 0.8
        gae_lambda = 0.7
        network.hidden = [4]
        normalize_observations = false
        [grpo]
        network = { kind = "recurrent", width = 3 }
        """,
    )
    ppo, a2c, grpo = (configs.resolve_config(path, name, {"total_steps": 2000}) for name in ("ppo", "a2c", "grpo"))
    assert ppo.settings["gamma"] == 0.99
    assert (a2c.settings["gamma"], a2c.settings["gae_lambda"]) == (0.8, 0.7)
    assert ppo.learner["normalize_observations"]
    assert not a2c.learner["normalize_observations"]
    assert (ppo.network["hidden"], a2c.network["hidden"], a2c.network["activation"]) == ((8,), (4,), "relu")
    assert grpo.network == {"kind": "recurrent", "width": 3} | {
        name: o.default for name, o in options(networks.recurrent).items() if name != "width"
    }
    assert {c.total_steps for c in (ppo, a2c, grpo)} == {2000}
    won = configs.resolve_config(
        path, "a2c", {"gamma": 0.1, "network.hidden": [2, 2], "environment_settings.length": 1}
    )
    assert (won.settings["gamma"], won.settings["gae_lambda"], won.network["hidden"]) == (0.1, 0.7, (2, 2))
    assert won.environment_settings == {"gravity": 5, "length": 1}


def test_integers_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, 'environment_settings.max_steps_in_episode = 77\n[dr_grpo]\nmax_length = "time_limit"')
    resolved = configs.resolve_config(path, "dr_grpo", {"anneal_steps": "total_steps", "total_steps": 123})
    assert (resolved.settings["max_length"], resolved.settings["anneal_steps"]) == (77, 123)


@pytest.mark.parametrize(
    ("overrides", "anneals"),
    [
        ({"total_steps": 9000}, None),
        ({"total_steps": 9000, "anneal_steps": "total_steps"}, 9000),
        ({"total_steps": 9000, "anneal_steps": 3000}, 3000),
        ({"total_steps": 3000}, 3000),
        ({"total_steps": 2000}, 3000),
        ({"learning_rate": 0.5}, 3000),
    ],
)
def test_the_config_of_a_run_is_not_trained_for_longer_at_a_learning_rate_of_zero(
    tmp_path: Path, overrides: dict[str, Any], anneals: int | None
) -> None:
    """It states a number for "total_steps", which is asked for; a task that states a number means it."""
    run = configs.resolve_config("cartpole", "ppo", {"total_steps": 3000})
    path = tmp_path / "config.toml"
    path.write_text(files.toml_dumps(configs.to_dict(run)))
    if anneals is None:
        with pytest.raises(UserError, match=r"zero over 3,000 steps, .* from there to 9,000\. Set anneal_steps too"):
            configs.resolve_config(path, "ppo", overrides)
    else:
        assert configs.resolve_config(path, "ppo", overrides).settings["anneal_steps"] == anneals
    path = write(tmp_path, "total_steps = 3000\n[ppo]\nanneal_steps = 3000")
    assert configs.resolve_config(path, "ppo", {"total_steps": 9000}).settings["anneal_steps"] == 3000


def test_wrappers_are_applied_in_order(tmp_path: Path) -> None:
    path = write(tmp_path, "[wrappers.time_limit]\nsteps = 9\n[wrappers.frame_stack]\nnum = 3")
    env = build(configs.resolve_config(path, "reinforce")).env
    assert (env.time_limit, env.observation_space.shape) == (9, (12,))


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("a=3", 3),
        ("a=3e-4", 3e-4),
        ("a = true", True),
        ("a=relu", "relu"),
        ('a="relu"', "relu"),
        ("a=[1, 2]", [1, 2]),
        ("a=none", "none"),
        ("a=x=y", "x=y"),
    ],
)
def test_assignments(assignment: str, expected: Any) -> None:
    assert config_file.parse_overrides([assignment]) == {"a": expected}


REFUSED = [
    ("cartpol", "ppo", {}, "no task 'cartpol'. Did you mean 'cartpole'"),
    ("cartpole", "poo", {}, "no algorithm 'poo'. Did you mean 'ppo'"),
    ("nowhere.toml", "ppo", {}, "no file nowhere.toml"),
    ("cartpole", "ppo", {"lerning_rate": 1}, "no setting 'lerning_rate' of ppo on cartpole. Did you mean 'learn"),
    ("cartpole", "reinforce", {"clip": 0.2}, "no setting 'clip' of reinforce on cartpole"),
    ("cartpole", "ppo", {"hidden": [8]}, "Did you mean 'network.hidden'"),
    ("cartpole", "ppo", {"network.hiden": [8]}, "no setting 'hiden' of the network mlp. Did you mean 'hidden'"),
    ("cartpole", "ppo", {"network.kind": "cnnn"}, "no kind of network 'cnnn' for ppo. Did you mean 'cnn'"),
    ("cartpole", "ppo", {"network.kind": "cnn"}, "cnn reads observations of shape"),
    ("cartpole", "ppo", {"network": 3}, "network must be a table, not 3"),
    ("cartpole", "ppo", {"network.hidden": [64, 0]}, "hidden must be at least 1, not 0"),
    ("cartpole", "ppo", {"network.hidden": [64, 6.5]}, "hidden must be a list of integers"),
    ("cartpole", "ppo", {"network.hidden": 64}, "hidden must be a list of integers, not 64"),
    ("cartpole", "ppo", {"network.activation": "tan"}, "no activation 'tan'. Did you mean 'tanh'"),
    ("cartpole", "ppo", {"network.shared": 1}, "shared must be true or false, not 1"),
    ("cartpole", "ppo", {"learning_rate": "fast"}, "learning_rate must be a number, not 'fast'"),
    ("cartpole", "ppo", {"learning_rate": -1.0}, "learning_rate must be at least 0, not -1.0"),
    ("cartpole", "ppo", {"learning_rate": float("nan")}, "learning_rate must be finite"),
    ("cartpole", "ppo", {"learning_rate": True}, "learning_rate must be a number, not True"),
    ("cartpole", "ppo", {"learning_rate": "none"}, "learning_rate must be a number, not 'none'"),
    ("cartpole", "ppo", {"max_grad_norm": "no"}, "max_grad_norm must be a number or none, not 'no'"),
    ("cartpole", "ppo", {"num_envs": -8}, "num_envs must be at least 1, not -8"),
    ("cartpole", "ppo", {"num_envs": 0}, "num_envs must be at least 1, not 0"),
    ("cartpole", "ppo", {"num_envs": 8.0}, "num_envs must be an integer, not 8.0"),
    ("cartpole", "ppo", {"chunk_rows": 0}, "chunk_rows must be at least 1, not 0"),
    ("cartpole", "ppo", {"reset_pool": -1}, "reset_pool must be at least 0, not -1"),
    ("cartpole", "ppo", {"reset_pool": 2, "num_steps": "none"}, "num_steps is none: leave out 2"),
    ("cartpole", "ppo", {"gamma": 1.5}, "gamma must be at most 1, not 1.5"),
    ("cartpole", "ppo", {"num_minibatches": 3}, "num_minibatches = 3 does not divide the batch of 8 environments"),
    ("cartpole", "trpo", {"value_minibatches": 3}, "value_minibatches = 3 does not divide"),
    ("cartpole", "grpo", {"num_envs": 12}, "num_envs = 12 cannot be cut into groups of group_size = 8"),
    ("cartpole", "grpo", {"group_size": 1}, "group_size must be at least 2, not 1"),
    ("cartpole", "grpo", {"kl": "k9"}, "k9"),
    ("cartpole", "grpo", {"kl_coefficient": 0.5}, "kl_coefficient has no effect while kl is none: set kl too, or"),
    ("cartpole", "dr_grpo", {"reference_rate": 0.5}, "reference_rate has no effect while kl is none"),
    ("cartpole", "ppo", {"pairs.judge": "length"}, "pairs is about texts, and CartPole-v1 is not a text task: remove"),
    ("sort", "rlhf", {"kl_gain": 0.5}, "kl_gain has no effect while reference_kl_target is none"),
    ("cartpole", "reinforce_baseline", {"baseline_rate": 0.5}, "has no effect while baseline_kind is batch"),
    ("cartpole", "ppo", {"adam_eps": 1e-8, "optimizer.kind": "a:b"}, "adam_eps has no effect beside optimizer.kind"),
    *(
        (task, algorithm, {name: True}, f"{algorithm} has no {name}: set {name} = false")
        for task, algorithm in (("sort", "sft"), ("summarise_toy", "dpo"), ("summarise_toy", "reward_model"))
        for name in ("scale_rewards", "normalize_observations")
    ),
    ("cartpole", "ppo", {"network.kind": "recurrent", "num_minibatches": 16}, "divide the batch of 8 environments."),
    ("cartpole", "ppo", {"total_steps": 0}, "total_steps must be at least 1, not 0"),
    ("cartpole", "ppo", {"evaluation_greedy": "yes"}, "evaluation_greedy must be true or false"),
    ("cartpole", "ppo", {"threshold": "high"}, "threshold must be a number or none"),
    ("cartpole", "ppo", {"environment": "CartPol-v1"}, "no environment 'CartPol-v1'. Did you mean 'CartPole-v1'"),
    ("cartpole", "ppo", {"environment_settings.gravitty": 1.0}, "Did you mean 'gravity'"),
    ("cartpole", "ppo", {"environment_settings.gravity": "low"}, "gravity must be"),
    ("cartpole", "ppo", {"wrappers.sticky": {}}, "no wrapper 'sticky'. Did you mean 'sticky_actions'"),
    ("sort", "grpo", {"wrappers.time_limit.steps": 3}, "takes no wrappers: remove wrappers.time_limit. How long"),
    ("sort", "grpo", {"wrappers.flatten": {}, "reward": "runs/x"}, "sort is a text task, which takes no"),
    ("sort", "grpo", {"rewards": {"mine": abs}}, 'mine must name its function, {"function": "module:function"}'),
    ("sort", "grpo", {"environment_settings.rewards": {"mine": {"function": abs}}}, "rewards.mine must name its"),
    ("sort", "grpo", {"environment_settings.tokenizer": CHARACTERS}, "a list or a table, not Vocabulary("),
    ("summarise_toy", "reward_model", {"network.kind": "mlp"}, "trains a transformer, not the network mlp"),
    ("parity", "sft", {"environment_settings.thinking": 0.5}, "'thinking'. It is called 'scratchpad_share' now."),
]  # fmt: skip


@pytest.mark.parametrize(("task", "algorithm", "overrides", "words"), REFUSED, ids=lambda x: str(x)[:40])
def test_invalid_settings_are_refused_in_words(
    task: str, algorithm: str, overrides: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as error:
        build(configs.resolve_config(task, algorithm, overrides))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gamma = 0.9", "There is no setting 'gamma' of a task"),
        ("[pppo]\ngamma = 0.9", "'pppo' of a task"),
        ("[trpo]\nclip = 0.9", "no setting 'clip' of trpo"),
        ("[dr_grpo]\n", "dr_grpo needs a value for max_length"),
        ("ppo = 3", "ppo must be a table, not 3"),
        ("total_steps = ", "is not valid TOML"),
    ],
)
def test_mistakes_in_a_file_are_found(tmp_path: Path, text: str, words: str) -> None:
    """Also in sections of other algorithms than the one to be trained."""
    with pytest.raises(UserError) as error:
        configs.resolve_config(write(tmp_path, text), "dr_grpo")
    assert words in str(error.value)


RENAMED = [
    ("reinforce_baseline", "average", "baseline_kind"),
    ("reinforce_baseline", "average_rate", "baseline_rate"),
    ("dapo", "drop_cut_off", "overlong_filtering"),
    ("dapo", "max_rounds", "max_resample_rounds"),
    ("ppo", "start_pool", "reset_pool"),
]


@pytest.mark.parametrize(("algorithm", "old", "new"), RENAMED)
def test_a_renamed_setting_is_answered_with_its_new_name(tmp_path: Path, algorithm: str, old: str, new: str) -> None:
    """In the section of a file and on the command line, where the new name is a setting of the algorithm."""
    assert new in configs.algorithm_options(algorithm)
    sentence = f"no setting '{old}' of {algorithm}.*It is called '{new}' now."
    with pytest.raises(UserError, match=sentence):
        configs.resolve_config("cartpole", algorithm, {old: 1})
    with pytest.raises(UserError, match=sentence):
        configs.resolve_config(write(tmp_path, f"[{algorithm}]\n{old} = 1"), algorithm)


def test_names_of_other_libraries_are_names_of_settings_here() -> None:
    """None is a setting of its own where it is answered, and every answer is the name of one, or of one in a table."""
    known = [{*configs.algorithm_options(name), *configs.task_options()} for name in configs.ALGORITHMS]
    for theirs, names in errors.ELSEWHERE.items():
        for ours in names.split(", "):
            assert any(ours.partition(".")[0] in of_one and theirs not in of_one for of_one in known), theirs


@pytest.mark.parametrize(
    ("algorithm", "theirs", "ours"),
    [
        ("grpo", "num_iterations", "epochs"),
        ("grpo", "beta", "kl_coefficient"),
        ("grpo", "max_completion_length", "environment_settings.max_tokens"),
        ("grpo", "per_device_train_batch_size", "num_envs"),
        ("dpo", "per_device_train_batch_size", "batch_size"),
        ("dapo", "mask_truncated_completions", "overlong_filtering"),
        ("dpo", "loss_type", "loss"),
    ],
)
def test_a_name_of_trl_is_answered_with_the_name_here(algorithm: str, theirs: str, ours: str) -> None:
    with pytest.raises(
        UserError, match=f"no setting '{theirs}' of {algorithm}.*It is called '{re.escape(ours)}' here."
    ):
        configs.resolve_config("sort", algorithm, {theirs: 1})


@pytest.mark.parametrize(
    ("task", "algorithm", "theirs", "sentence"),
    [
        ("cartpole", "dqn", "target_update_interval", "'target_period' here, and counts gradient steps."),
        ("cartpole", "dqn", "target_network_frequency", "'target_period' here, and counts gradient steps."),
        ("cartpole", "ppo", "anneal_lr", "'anneal_steps' here, and counts environment steps."),
        ("sort", "grpo", "max_steps", "'total_steps' here, and counts environment steps, which are tokens in a text."),
        ("sort", "grpo", "ref_model_mixup_alpha", "'reference_rate' here, and applies after every iteration."),
        ("sort", "grpo", "gradient_accumulation_steps", "'chunk_rows' here, and counts rows."),
        ("sort", "sft", "gradient_accumulation_steps", "'micro_batches' here."),
        ("sort", "sft", "per_device_train_batch_size", "'batch_size' here, and is that of all devices together."),
        ("sort", "grpo", "per_device_train_batch_size", "'num_envs' here, and is that of all devices together."),
    ],
)
def test_a_setting_that_others_count_in_another_unit_says_so(
    task: str, algorithm: str, theirs: str, sentence: str
) -> None:
    with pytest.raises(UserError, match=re.escape(f"It is called {sentence}")):
        configs.resolve_config(task, algorithm, {theirs: 1})


def test_what_a_text_needs_is_advised_as_it_can_be_done() -> None:
    """actor_critic_td always collects segments, so that `num_steps = none` is no advice for it."""
    for algorithm in ("actor_critic_td", "trpo"):
        learner = build(configs.resolve_config("sort", algorithm)).learner
        with pytest.raises(UserError, match=r"num_steps = none, which a2c, trpo and ppo take, .*_mc or grpo"):
            jax.eval_shape(learner.init, jax.random.key(0))
    for algorithm, overrides in (
        ("a2c", {"num_steps": "none"}),
        ("trpo", {"num_steps": "none"}),
        ("ppo", {"num_steps": "none"}),
        ("actor_critic_mc", {}),
        ("grpo", {"initial": "none"}),
    ):
        learner = build(configs.resolve_config("sort", algorithm, overrides)).learner
        jax.eval_shape(learner.init, jax.random.key(0))


def test_few_names_are_listed_beside_the_most_similar_one() -> None:
    with pytest.raises(UserError, match=r"no loss 'simpo' .*There are: hinge, ipo, sigmoid\."):
        build(configs.resolve_config("summarise_toy", "dpo", {"loss": "simpo", "initial": "none"}))


def test_scale_rewards_is_not_that_of_trl(tmp_path: Path) -> None:
    """There false leaves out the division by the standard deviation of a group."""
    for algorithm in ("grpo", "dapo"):
        with pytest.raises(UserError, match=f"changes nothing for {algorithm}.*dr_grpo"):
            configs.resolve_config("sort", algorithm, {"scale_rewards": False})
    assert not configs.resolve_config("pendulum", "grpo", {"scale_rewards": False}).learner["scale_rewards"]
    assert not configs.resolve_config("sort", "ppo", {"scale_rewards": False}).learner["scale_rewards"]
    resolved = configs.resolve_config("sort", "grpo")  # and what a run writes is a config again
    assert configs.resolve_tables(configs.to_dict(resolved), "grpo", source=tmp_path) == resolved


def test_an_old_name_of_another_algorithm_is_not_answered_with_the_new_one() -> None:
    with pytest.raises(UserError) as error:
        configs.resolve_config("cartpole", "reinforce", {"max_rounds": 3})
    assert "is called" not in str(error.value)


def test_a_file_must_name_its_environment(tmp_path: Path) -> None:
    (tmp_path / "task.toml").write_text("total_steps = 3")
    with pytest.raises(UserError, match="does not say which environment"):
        configs.resolve_config(tmp_path / "task.toml", "ppo")


def test_shares_of_devices_must_be_even() -> None:
    resolved = configs.resolve_config("cartpole", "grpo", {"num_envs": 16})
    build(resolved, shards=2)
    with pytest.raises(
        UserError, match="num_envs = 4 on each of 4 devices cannot be cut into groups of group_size = 8"
    ):
        build(resolved, shards=4)
    with pytest.raises(UserError, match="num_envs = 16 cannot be split evenly over 3 devices"):
        build(resolved, shards=3)


def test_every_setting_has_a_meaning_and_a_default() -> None:
    """What `jaxpg list options` shows is complete for every algorithm."""
    for algorithm in ladder.ALGORITHMS:
        for option in configs.algorithm_options(algorithm).values():
            assert option.meaning, f"{algorithm}.{option.name} has no line under Args"
            if option.default is not REQUIRED:
                assert check(option, option.default) == option.default
    for function in (*parts.NETWORKS.values(), configs.Config):
        for option in options(function).values():
            assert option.meaning, option.name


def test_every_algorithm_has_a_kind() -> None:
    assert KINDS.keys() == configs.ALGORITHMS.keys()


def test_settings_of_layers_do_not_collide() -> None:
    """One flat namespace for the task, the learner and the algorithm: no name means two things."""
    for algorithm in ladder.ALGORITHMS:
        assert not configs.task_options().keys() & configs.algorithm_options(algorithm).keys()
    assert not configs.task_options().keys() & ladder.ALGORITHMS.keys()


@pytest.mark.parametrize("text", ["rocket🚀", 'a "b" \\', "\x7f", "tab\t", "é\u2028"])
def test_any_text_is_read_as_it_was_written(text: str) -> None:
    """TOML has no surrogate pairs, as JSON writes characters above U+FFFF, and wants DEL escaped."""
    assert tomllib.loads(files.toml_dumps({"task": text, "table": {text: 1}})) == {"task": text, "table": {text: 1}}


def test_a_task_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """Some editors write one."""
    (tmp_path / "task.toml").write_text('environment = "CartPole-v1"\n', encoding="utf-8-sig")
    assert configs.resolve_config(tmp_path / "task.toml", "ppo", {}).environment == "CartPole-v1"


def test_what_a_message_quotes_is_on_one_line() -> None:
    assert excerpt(np.arange(6).reshape(2, 3)) == "array([[0, 1, 2], [3, 4, 5]])"
    assert excerpt("x" * 100, 20) == "'" + "x" * 16 + "..."


def test_a_resolved_config_is_a_task_file(tmp_path: Path) -> None:
    resolved = configs.resolve_config("cartpole", "ppo", {"max_grad_norm": None, "seeds": [0, 5]})
    text = files.toml_dumps(configs.to_dict(resolved))
    assert tomllib.loads(text)["ppo"]["max_grad_norm"] == "none"
    (tmp_path / "config.toml").write_text(text)
    assert configs.load_config(tmp_path) == resolved
    again = configs.resolve_config(tmp_path / "config.toml", "ppo", {"gamma": 0.5})
    assert (again.task, again.settings["gamma"], again.seeds) == ("cartpole", 0.5, (0, 5))
    with pytest.raises(UserError, match="is not the directory of a run"):
        configs.load_config(tmp_path / "absent")
    with pytest.raises(UserError, match=rf"config\.toml is not the .* but a file of one: name {tmp_path}\."):
        configs.load_config(tmp_path / "config.toml")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((64, 64), "[64, 64]"),
        (None, "none"),
        (False, "false"),
        ("mlp", "mlp"),
        ({"a": (True, None)}, '{ a = [true, "none"] }'),
        ({}, "{}"),
    ],
)
def test_a_setting_is_shown_as_it_is_typed(value: Any, text: str) -> None:
    assert files.setting_text(value) == text
    run = RunResult([1], [[1.0]], [1.0], 1.0, 1.0)
    page = comparison_page({"ppo": run}, title="x", details={"config": {"a": value}})
    assert isinstance(value, dict) or f"<dt>a</dt><dd><code>{escape(text)}</code></dd>" in page


@pytest.mark.parametrize(
    ("wrappers", "kind"), [({}, "cnn"), ({"frame_stack": {"num": 2}}, "cnn"), ({"flatten": {}}, "mlp")]
)
def test_the_network_of_an_environment_without_a_config_is_for_what_its_wrappers_show(
    wrappers: dict[str, Any], kind: str
) -> None:
    assert configs.resolve_config("Breakout-MinAtar", "ppo", {"wrappers": wrappers}).network["kind"] == kind


@pytest.mark.parametrize(("size", "strides"), [((36, 40), [4, 2, 1]), ((35, 40), None), ((40, 35), None)])
def test_images_of_36_pixels_a_side_have_the_network_of_atari(
    size: tuple[int, int], strides: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fewer its kernels and strides, 8 and 4 first, would leave next to nothing."""
    space = Box(np.zeros((*size, 3), np.float32), np.ones((*size, 3), np.float32))
    monkeypatch.setattr(envs, "make", lambda name, **settings: tiny.counter()._replace(observation_space=space))
    network = configs._network_for("mine:pictures", "ppo", {})["network"]
    assert (network["kind"], network.get("strides")) == ("cnn", strides)


@pytest.mark.parametrize("rewards", [{}, {"accuracy": 1.0}])
def test_runs_are_evaluated_on_problems_that_they_do_not_train_on(rewards: dict[str, float]) -> None:
    """With the rewards of the task, and with a list of them."""
    experiment = build(configs.resolve_config("addition", "grpo", {"rewards": rewards}))
    keys = jax.random.split(jax.random.key(0), 300)
    prompts = [
        {tuple(text) for text in np.asarray(jax.vmap(lambda key, env=env: env.context(env.reset(key)[0]))(keys).tokens)}
        for env in (experiment.env, experiment.held_out)
    ]
    assert min(map(len, prompts)) > 20
    assert not prompts[0] & prompts[1]
