"""Completions of a trained policy as data: JSON lines that `json_lines` tasks and fine-tuning read.

Those that are right are demonstrations (rejection sampling): for expert iteration, or for a smaller model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg import files, preferences
from jaxpg.envs.text import completion_text
from jaxpg.errors import UserError
from jaxpg.experiments.build import Experiment, kind_of, networks, text_task
from jaxpg.experiments.completions import completion_outcome
from jaxpg.experiments.config import Config
from jaxpg.experiments.pair_sampling import SIDE_BY_SIDE, sample_pairs
from jaxpg.experiments.signatures import options
from jaxpg.experiments.warm_start import build_experiment, check_writer
from jaxpg.models.generation import generate
from jaxpg.parallel import host_callback
from jaxpg.training.program import Program
from jaxpg.types import Array, Key, Outcome, Tree

SAMPLED_FILES = {"demonstrations": "demonstrations.jsonl", "pairs": "pairs.npz"}
"""The files in the directory of a run that hold what was sampled for it, by the table whose `sampled_from` asks."""


class Line(NamedTuple):
    """A line of the file.

    answer: a right answer to the prompt, None where the task has none.
    reward: as the run was rewarded for it.
    accuracy: of the task's verifier; right is 1 or more.
    ended: whether the completion has its end token, and is not truncated.
    """

    prompt: str
    completion: str
    answer: str | None
    reward: float
    accuracy: float
    ended: bool


class Counts(NamedTuple):
    """What went into a file: prompts, completions written for them, right and ended ones among them, and lines kept."""

    prompts: int
    completions: int
    right: int
    ended: int
    lines: int

    def sentence(self, only: str) -> str:
        """In words."""
        right = f"{self.right:,} of {self.completions:,} completions of {self.prompts:,} prompts are right"
        if only == "right":
            return f"{right}, {self.lines:,} different ones kept"
        truncated = self.completions - self.ended
        if not truncated:
            return right
        return f"{right}, {truncated:,} truncated ones {'left out' if only == 'ended' else 'among them'}"


def sample_to_file(
    path: Path,
    config: Config,
    experiment: Experiment,
    params: Tree,
    key: Key,
    *,
    prompts: int,
    number: int,
    only: str,
    **settings: Any,
) -> Counts:
    """Write completions of training prompts into a file of JSON lines, whole or not at all.

    The prompts are those that the run was trained on, never held-out ones. Of right completions, equal ones of one
    prompt are kept once.

    Args:
        path: the file.
        config: of the run.
        experiment: of the run.
        params: of its policy.
        key: the source of all randomness; completion j of prompt i depends on it, on i and on j alone.
        prompts: how many prompts to draw.
        number: completions of each.
        only: "right" for completions that are right, "ended" for those that have their end token, "all" for truncated
            ones too, on which nothing can be fine-tuned.
        **settings: those of `generate`.

    Raises:
        UserError: there are none of them, the file cannot be written, or a reward function of the user's fails.
    """
    drawn = list(_draw(config, experiment, params, key, prompts=prompts, number=number, **settings))
    right, ended = [x for x in drawn if x.accuracy >= 1], [x for x in drawn if x.ended]
    kept = {"right": list(dict.fromkeys(right)), "ended": ended, "all": drawn}[only]
    if not kept:
        raise UserError(
            f"None of the {len(drawn):,} completions that {config.algorithm} on {config.task} wrote for {prompts:,} "
            f"prompts {'is right' if only == 'right' else 'has ended'}, so there is nothing to learn from: train that "
            "policy for longer, or draw more."
        )
    rows = [{name: x for name, x in line._asdict().items() if x is not None} for line in kept]
    with files.explain_os_error(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace_file(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return Counts(prompts, len(drawn), len(right), len(ended), len(kept))


def sampled_table(config: Config) -> str | None:
    """The table of a config that names a run of whose completions it learns; None where it names none."""
    table = kind_of(config).data
    return table if table in SAMPLED_FILES and getattr(config, table).get("sampled_from") else None


def sample_data(config: Config, run_dir: Path) -> None:
    """Write the data that a run wants sampled from another one into its directory, unless they are there.

    The policy is the last one of that run's first seed. They depend on that policy and on the settings alone, so that
    a command that was stopped in between goes on with the same ones.

    Raises:
        UserError: as `sample_to_file`, `sample_pairs` and `check_writer`; the config names a file elsewhere, where
            nothing is written.
    """
    table = sampled_table(config)
    if table is None or (file := Path(getattr(config, table)["file"])).exists():
        return
    if file != run_dir / SAMPLED_FILES[table]:
        raise UserError(
            f"There is no file {file}, and {table} are sampled into the directory of their own run, {run_dir}, alone: "
            f"leave {table}.file out."
        )
    host_callback.clear_failures()
    if table == "pairs":
        sample_pairs(file, config)
    else:
        _sample_demonstrations(file, config)


def _sample_demonstrations(file: Path, config: Config) -> None:
    settings = config.demonstrations
    defaults = {name: option.default for name, option in options(preferences.make_demonstrations).items()}
    earlier, params = check_writer(settings["sampled_from"], config)
    sampled = {name: settings.get(name, defaults[name]) for name in ("prompts", "number", "temperature")}
    policy, key = jax.tree.map(lambda x: x[0], params.policy), jax.random.key(0)
    sample_to_file(file, earlier, build_experiment(earlier), policy, key, only="right", **sampled)


def _draw(
    config: Config, experiment: Experiment, params: Tree, key: Key, *, prompts: int, number: int, **settings: Any
) -> Iterator[Line]:
    """The completions, `number` neighbours of each prompt."""
    policy, _ = networks(config, experiment.env)
    env, task = experiment.env, text_task(config, "train")
    assert env.context
    context, end = env.context, task.vocabulary.end

    def complete(params: Tree, key: Key) -> tuple[Tree, Array, Outcome]:
        reset_key, write_key = jax.random.split(key)
        state, _ = env.reset(reset_key)
        prompt = context(state)

        def write(key: Key) -> Array:
            return generate(policy, params, prompt, key, end=end, max_tokens=env.time_limit, **settings)

        tokens = jax.vmap(write)(jax.random.split(write_key, number))
        return (state.problem, prompt), *jax.vmap(partial(completion_outcome, env, state, end=end))(tokens)

    at_once = max(1, min(prompts, SIDE_BY_SIDE // number))
    program = Program(lambda params, keys: jax.vmap(partial(complete, params))(keys))
    for first in range(0, prompts, at_once):
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(first, first + at_once))
        (problems, shown), tokens, outcomes = jax.device_get(program(params, keys))
        host_callback.raise_failure()
        answers = task.answers(problems) if task.answers else [None] * at_once
        for i in range(min(at_once, prompts - first)):
            prompt = task.vocabulary.decode(shown.tokens[i][shown.mask[i]].tolist())
            for j in range(number):
                yield Line(
                    prompt=prompt,
                    completion=completion_text(task.vocabulary, tokens[i, j].tolist()),
                    answer=answers[i],
                    reward=float(outcomes.total()[i, j]),
                    accuracy=float(outcomes.parts["accuracy"][i, j]),
                    ended=bool(np.any(tokens[i, j] == end)),
                )
