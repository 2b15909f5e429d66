"""A run that begins with what another one learned: its policy, or its reward model; and whether that fits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxpg import files
from jaxpg.errors import UserError
from jaxpg.experiments import config as configs
from jaxpg.experiments.build import TEXT_TASKS, Experiment, build, reward_network, text_task
from jaxpg.experiments.config import Config, make_env
from jaxpg.parallel import processes
from jaxpg.training import run_directory
from jaxpg.training.loop import restore
from jaxpg.types import Params, Tree

VOCABULARY = "vocabulary.json"


def build_experiment(config: Config, shards: int = 1) -> Experiment:
    """`build`, with the reward model that the config names.

    Raises:
        UserError: there is no such run, or it is of another kind.
    """
    return build(config, shards, reward_params(config))


def initial_policies(config: Config, setup: Experiment) -> Tree:
    """The policies to begin with, one for each seed, `[S, ...]`; None where the config names none.

    A run of one seed gives its policy to all; else every seed takes that of the same number.

    Raises:
        UserError: there is no such run, it holds no policy, lacks a seed, or its vocabulary or network is another one.
    """
    if config.initial is None:
        return None
    earlier, params = _params(config.initial, config)
    if earlier.algorithm == "reward_model":
        raise UserError(f"{config.initial} is a run of reward_model and holds no policy: take one of sft.")
    policies = _for_seeds(params.policy, earlier.seeds, config)
    state = jax.eval_shape(setup.learner.init, jax.random.key(0))
    mine = jax.eval_shape(setup.learner.with_policy, state, jax.tree.map(lambda x: x[0], policies)).params
    expected = jax.tree.map(jnp.shape, jax.eval_shape(setup.learner.init, jax.random.key(0)).params)
    if jax.tree.map(jnp.shape, mine) != expected:
        raise _another_network(f"The policy of {config.initial}", earlier, config)
    return policies


def reward_params(config: Config) -> Tree:
    """Parameters of the reward model that the config names: those of its run's first seed; None where it names none.

    Raises:
        UserError: there is no such run, it is of another kind, or its vocabulary or network is another one.
    """
    if config.reward is None:
        return None
    earlier, params = _params(config.reward, config)
    if earlier.algorithm != "reward_model":
        raise UserError(f"{config.reward} is a run of {earlier.algorithm}; reward takes one of reward_model.")
    model = jax.tree.map(lambda x: x[0], params.critic)
    expected = jax.eval_shape(reward_network(config, make_env(config)).init, jax.random.key(0))
    if jax.tree.map(jnp.shape, model) != jax.tree.map(jnp.shape, expected):
        raise _another_network(f"The reward model of {config.reward}", earlier, config)
    return model


def save_vocabulary(config: Config, run_dir: Path) -> None:
    """Write down what the tokens of a run that begins stand for; of one that goes on, see that it is so still.

    Raises:
        UserError: they stand for something else by now.
    """
    if (run_dir / run_directory.CONFIG).exists():
        check_vocabulary(config, run_dir)
    elif config.environment in TEXT_TASKS and processes.is_main_process():
        run_dir.mkdir(parents=True, exist_ok=True)
        files.replace_file(run_dir / VOCABULARY, json.dumps(_vocabulary(config)) + "\n")


def check_vocabulary(config: Config, run_dir: Path) -> None:
    """Raise a UserError if the tokens of a run on a text stand for something else than when it began."""
    path = run_dir / VOCABULARY
    if path.exists() and (changed := _difference(json.loads(path.read_text()), _vocabulary(config))):
        source = {"tokenizer": "characters", "path": config.environment} | config.environment_settings
        file = source["path"] if source["tokenizer"] == "characters" else source["tokenizer"]
        raise UserError(
            f"The vocabulary of {file} has changed since the run in {run_dir} began ({changed}), so what that learned "
            "no longer means anything. Bring the file back as it was, or train anew."
        )


def _vocabulary(config: Config) -> list[str]:
    """What each token of a text task stands for; nothing where there are no texts."""
    if config.environment not in TEXT_TASKS:
        return []
    vocabulary = text_task(config, "train").vocabulary
    return [vocabulary.decode([i]) for i in range(vocabulary.size)]


def _difference(theirs: Sequence[str], ours: Sequence[str]) -> str | None:
    """Where two vocabularies differ, None if they do not."""
    if len(theirs) != len(ours):
        return f"{len(theirs)} tokens there, {len(ours)} here"
    different = [i for i in range(len(ours)) if theirs[i] != ours[i]]
    return f"token {different[0]} is {theirs[different[0]]!r} there, {ours[different[0]]!r} here" if different else None


def _another_network(what: str, earlier: Config, config: Config) -> UserError:
    if earlier.network == config.network:
        return UserError(
            f"{what} is for other observations or actions ({earlier.environment}, {earlier.environment_settings}) than "
            f"this run has ({config.environment}, {config.environment_settings})."
        )
    return UserError(
        f"{what} has another network ({earlier.network}) than this run ({config.network}). Give this run the same one."
    )


def _params(directory: str, config: Config) -> tuple[Config, Params]:
    """The config of a run, and what it learned, `[S, ...]`; its vocabulary must be that of `config`."""
    earlier = configs.load_config(Path(directory))
    check_vocabulary(earlier, Path(directory))
    if difference := _difference(_vocabulary(earlier), _vocabulary(config)):
        raise UserError(f"The run in {directory} has another vocabulary than this one: {difference}.")
    learner = build_experiment(earlier).learner
    return earlier, restore(learner, Path(directory), earlier.seeds, "last").learner.params


def _for_seeds(policies: Tree, seeds: Sequence[int], config: Config) -> Tree:
    if len(seeds) == 1:
        return jax.tree.map(lambda x: jnp.repeat(x, len(config.seeds), 0), policies)
    missing = set(config.seeds) - set(seeds)
    if missing:
        raise UserError(
            f"{config.initial} has the seeds {list(seeds)}, this run also {sorted(missing)}: choose from those, or "
            "begin with a run of one seed."
        )
    places = jnp.asarray([list(seeds).index(seed) for seed in config.seeds])
    return jax.tree.map(lambda x: x[places], policies)
