"""Parameters loaded from an earlier run: an initial policy or a reward model, with checks that they fit."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxpg.envs import task_factory
from jaxpg.envs.text import TokenTable, token_table
from jaxpg.errors import UserError
from jaxpg.experiments import config as configs
from jaxpg.experiments.build import (
    KINDS,
    Experiment,
    Judge,
    build,
    kind_of,
    reward_network,
    text_task,
)
from jaxpg.experiments.config import Config, make_env
from jaxpg.parallel import processes
from jaxpg.training import run_directory, run_files
from jaxpg.training.loop import restore
from jaxpg.training.run_files import read_file
from jaxpg.types import Params, Tree

VOCABULARY = "vocabulary.json"
SAME_SHAPES = ("heads", "kv_heads", "activation", "squash", "strides")
"""Settings of a network that can make another function of parameters of the same shapes."""
STORED_TABLE = run_files.record(
    tokens=run_files.list_of(run_files.optional(run_files.text)), checksum=run_files.optional(run_files.text)
)


def build_experiment(config: Config, shards: int = 1) -> Experiment:
    """`build`, with the parameters of the reward models that the config names.

    Raises:
        UserError: as `build` and `reward_params`.
    """
    return build(config, shards, reward_params(config))


def initial_policies(config: Config, experiment: Experiment) -> Tree:
    """The policies to begin with, one for each seed, `[S, ...]`; None where the config names no run.

    Every seed takes the policy of the same seed; the policy of a run of one seed goes to all. A reward model may begin
    with another one instead of a policy, and is then trained on.

    Raises:
        UserError: there is no such run, it holds no policy or lacks a seed, or has another vocabulary or network.
    """
    if config.initial is None:
        return None
    earlier, params = load_params(config.initial, config)
    check_initial(config, earlier)
    begun = params.policy if kind_of(earlier).has_policy else params.critic
    policies = _for_seeds(begun, earlier.seeds, config)
    learner = experiment.learner
    state = jax.eval_shape(learner.init, jax.random.key(0))
    begun = jax.eval_shape(learner.with_policy, state, jax.tree.map(lambda x: x[0], policies))
    same_shapes = jax.tree.map(jnp.shape, begun.params) == jax.tree.map(jnp.shape, state.params)
    if not (same_shapes and _reads_alike(earlier, config)):
        raise _different_network(f"The policy of {config.initial}", earlier, config)
    return policies


def check_initial(config: Config, earlier: Config) -> None:
    """Refuse a run to begin with that holds no policy, unless both are reward models, or one of normalised numbers."""
    if any(normalises := [x.learner["normalize_observations"] for x in (earlier, config)]):
        whose = f"{config.initial} normalises" if normalises[0] else "This run normalises"
        raise UserError(
            f"{whose} its observations by means of its own, without which the parameters of a policy are another "
            "policy: set normalize_observations = false in both, or go on with the run itself (jaxpg resume)."
        )
    trained_on = earlier.algorithm == config.algorithm == "reward_model"
    if not (kind_of(earlier).has_policy or trained_on):
        raise UserError(f"{config.initial} is a run of {earlier.algorithm} and contains no policy: use a run of sft.")


def reward_params(config: Config, *, planned: Collection[str] = ()) -> dict[str, Tree]:
    """Parameters of the reward models that the config names, by the setting, of the first seeds of their runs.

    Those of runs that are `planned` do not exist yet and are left out.

    Raises:
        UserError: as `load_reward_model`, or a model that judges something else than the setting takes.
    """
    runs = {setting: run for setting, run in config.reward_models.items() if run not in planned}
    return {setting: _model_for(setting, run, config) for setting, run in runs.items()}


def load_reward_model(run_dir: str, config: Config) -> tuple[Judge, Tree]:
    """A reward model for the completions of `config`: what it is good for, and the parameters of its first seed.

    Raises:
        UserError: there is no such run, it holds no reward model, or has another vocabulary or network.
    """
    earlier, params = load_params(run_dir, config)
    judge = kind_of(earlier).judge
    if judge is None:
        judging = ", ".join(name for name, kind in KINDS.items() if kind.judge)
        raise UserError(f"{run_dir} is a run of {earlier.algorithm} and holds no reward model. Those of {judging} do.")
    model = jax.tree.map(lambda x: x[0], params.critic)
    expected = jax.eval_shape(reward_network(config, make_env(config)).init, jax.random.key(0))
    same_shapes = jax.tree.map(jnp.shape, model) == jax.tree.map(jnp.shape, expected)
    if not (same_shapes and _reads_alike(earlier, config)):
        raise _different_network(f"The reward model of {run_dir}", earlier, config)
    return judge, model


def _model_for(setting: str, run_dir: str, config: Config) -> Tree:
    judge, params = load_reward_model(run_dir, config)
    if (judge.role == "process_reward") != (setting == "process_reward"):
        raise UserError(
            f"{run_dir} holds a reward model for the setting {judge.role}, not for {setting}: name it there."
        )
    return params


def check_writer(run: str, config: Config) -> tuple[Config, Params]:
    """The config and the last parameters `[S, ...]` of the run from which a config samples its data.

    Raises:
        UserError: there is no such run, it writes no text, or it has another vocabulary.
    """
    earlier, params = load_params(run, config)
    if not (kind_of(earlier).has_policy and task_factory(earlier.environment)):
        raise UserError(f"{run} is a run of {earlier.algorithm} on {earlier.task}, which writes no text.")
    return earlier, params


def save_vocabulary(config: Config, run_dir: Path) -> None:
    """Write the meaning of the tokens into the directory of a new run; compare it with that of a run that goes on.

    Raises:
        UserError: as `check_vocabulary`; or there is no run, but another file by a name that a run writes.
    """
    if run_directory.has_begun(run_dir):
        check_vocabulary(config, run_dir)
    elif (vocabulary := _token_table(config)) is not None and processes.is_main_process():
        run_directory.add_file(run_dir, VOCABULARY, json.dumps(vocabulary._asdict()) + "\n")


def check_vocabulary(config: Config, run_dir: Path) -> None:
    """Check that the tokens of a text task are what they were when the run in `run_dir` began.

    Raises:
        UserError: a token, or how the tokenizer's file cuts texts into tokens, has changed; the table of the run cannot
            be read.
    """
    path = run_dir / VOCABULARY
    if path.exists() and (changed := _difference(_load_table(path), _token_table(config))):
        source = {"tokenizer": "characters", "path": config.environment} | config.environment_settings
        file = source["path"] if source["tokenizer"] == "characters" else source["tokenizer"]
        raise UserError(
            f"The vocabulary of {file} has changed since the run in {run_dir} began ({changed}), so its parameters "
            "are of no use. Restore the earlier file, or train a new run."
        )


def _token_table(config: Config) -> TokenTable | None:
    """What the tokens of a text task are; None where the environment is not a text task."""
    return token_table(text_task(config, "train").vocabulary) if task_factory(config.environment) else None


def _load_table(path: Path) -> TokenTable:
    return TokenTable(**read_file(path, partial(run_files.parse_json, check=STORED_TABLE), run_directory.ADVICE))


def _difference(theirs: TokenTable | None, ours: TokenTable | None) -> str | None:
    """The first difference between two vocabularies, None if they are the same."""
    if theirs is None or ours is None:
        return None if theirs is ours else "one of them is not a text task"
    if len(theirs.tokens) != len(ours.tokens):
        return f"{len(theirs.tokens)} tokens there, {len(ours.tokens)} here"
    for i, (a, b) in enumerate(zip(theirs.tokens, ours.tokens, strict=True)):
        if a != b:
            return f"token {i} is {a!r} there, {b!r} here"
    if theirs.checksum != ours.checksum:
        return "the tokens are the same, but another tokenizer.json cuts texts into them in another way"
    return None


def _reads_alike(earlier: Config, config: Config) -> bool:
    """Whether the networks of two configs make the same function of parameters that fit both."""
    both = earlier.network.keys() & config.network.keys() & set(SAME_SHAPES)
    return all(earlier.network[name] == config.network[name] for name in both)


def _different_network(what: str, earlier: Config, config: Config) -> UserError:
    """The error for parameters of another shape, with its cause: the network, or the environment."""
    if earlier.network == config.network:
        return UserError(
            f"{what} is for other observations or actions ({earlier.environment}, {earlier.environment_settings}) than "
            f"this run has ({config.environment}, {config.environment_settings})."
        )
    return UserError(
        f"{what} has another network ({earlier.network}) than this run ({config.network}). Give this run the same one."
    )


def load_params(run_dir: str, config: Config) -> tuple[Config, Params]:
    """The config of a run and its last parameters, `[S, ...]`; its vocabulary must be that of `config`."""
    earlier = configs.load_config(Path(run_dir))
    check_vocabulary(earlier, Path(run_dir))
    if difference := _difference(_token_table(earlier), _token_table(config)):
        raise UserError(f"The run in {run_dir} has another vocabulary than this one: {difference}.")
    learner = build_experiment(earlier).learner
    return earlier, restore(learner, Path(run_dir), earlier.seeds, "last").learner.params


def _for_seeds(policies: Tree, seeds: Sequence[int], config: Config) -> Tree:
    """The policies of a run with these seeds, rearranged for the seeds of `config`."""
    if len(seeds) == 1:
        return jax.tree.map(lambda x: jnp.repeat(x, len(config.seeds), 0), policies)
    missing = set(config.seeds) - set(seeds)
    if missing:
        raise UserError(
            f"{config.initial} has the seeds {list(seeds)}, this run also {sorted(missing)}: choose from those, or "
            "begin with a run of one seed."
        )
    index = jnp.asarray([list(seeds).index(seed) for seed in config.seeds])
    return jax.tree.map(lambda x: x[index], policies)
