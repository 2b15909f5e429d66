"""A trained run, opened: its config, its metrics, its state, and its policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpg.errors import UserError, excerpt
from jaxpg.experiments import completions
from jaxpg.experiments.build import Experiment, kind_of, writes_text
from jaxpg.experiments.config import Config, load_config, to_dict
from jaxpg.experiments.sections import check_table
from jaxpg.experiments.signatures import options
from jaxpg.experiments.warm_start import build_experiment, check_vocabulary
from jaxpg.models.generation import check_sampling
from jaxpg.parallel import host_callback
from jaxpg.runs.policy import TrainedPolicy
from jaxpg.runs.results import MetricsTable, best_seed, curve_units, training_returns
from jaxpg.training import run_directory
from jaxpg.training.advance import RunState
from jaxpg.training.loop import restore
from jaxpg.user_input.domains import ANY, COUNT, COUNT_OR_0, check_whole


@dataclass(frozen=True, eq=False)
class Run:
    """A run that was trained, of S seeds. It is shown without its arrays, and equals itself alone.

    config: its settings.
    experiment: what they describe: the environment, the learner, the evaluation.
    state: of all seeds, every array [S, ...].
    directory: where it is.
    """

    config: Config
    experiment: Experiment = field(repr=False)
    state: RunState = field(repr=False)
    directory: Path

    @cached_property
    def metrics(self) -> MetricsTable:
        """The metrics, in rows from the first to the last."""
        return MetricsTable(run_directory.load_metrics(self.directory), self.config.seeds)

    @property
    def best_seed_index(self) -> int:
        """The index of the seed that was best in the last evaluation that `state` includes."""
        return best_seed(self.metrics.columns, np.asarray(self.state.steps))

    @cached_property
    def policy(self) -> TrainedPolicy:
        """The policy of the best seed, see `policy_of`."""
        return self.policy_of(self.best_seed_index)

    def policy_of(self, seed_index: int) -> TrainedPolicy:
        """The policy of a seed, by its index in `config.seeds`.

        Raises:
            UserError: there is no such seed, or what was trained does not act on observations.
        """
        self.refuse_without_actions()
        experiment = self.experiment
        return TrainedPolicy(experiment.learner, self.learner_of(seed_index), experiment.env)

    def refuse_without_actions(self) -> None:
        """Raise a UserError unless the run has learned a policy that acts on observations."""
        if not kind_of(self.config).has_policy:
            raise UserError(f"A run of {self.config.algorithm} learns no policy.")
        if self.experiment.env.context:
            raise UserError(f"{self.config.task} is a text task: its policy writes, see Run.complete and jaxpg sample.")

    def seed_index(self, chosen: int | None) -> int:
        """The index of the seed that was chosen, or of the best where none was."""
        return self.best_seed_index if chosen is None else chosen

    def learner_of(self, seed_index: int) -> Any:
        """The learner's state of a seed, by its index in `config.seeds`.

        Raises:
            UserError: there is no such seed.
        """
        seed_index, seeds = check_whole("seed_index", seed_index, ANY), len(self.config.seeds)
        if not 0 <= seed_index < seeds:
            raise UserError(f"The run has the seed indices 0 to {seeds - 1}, not {seed_index}.")
        return jax.tree.map(lambda x: x[seed_index], self.state.learner)

    def complete(
        self, prompt: str, *, number: int = 1, seed: int = 0, seed_index: int | None = None, **settings: Any
    ) -> list[str]:
        """Completions of a prompt, each with the prompt in front.

        Args:
            prompt: what to complete.
            number: how many completions.
            seed: of the tokens that are sampled.
            seed_index: whose policy, by the index in `config.seeds`; the best one's if not given.
            **settings: those of `models.generation.generate`: temperature, top_k, top_p, greedy.

        Raises:
            UserError: the run writes no text, there is no such seed, the prompt is not one of its task (see
                `completions.prompt_completer`), or a setting is not what it may be.
        """
        self.refuse_without_text()
        if not isinstance(prompt, str):
            raise UserError(f"The prompt must be a text, not {excerpt(prompt)}.")
        number, seed = check_whole("number", number, COUNT), check_whole("seed", seed, COUNT_OR_0)
        kinds = {name: option._replace(domain=ANY) for name, option in options(check_sampling).items()}
        settings = check_table(settings, kinds, " of complete")
        check_sampling(**settings)
        params, key = self.learner_of(self.seed_index(seed_index)).params.policy, jax.random.key(seed)
        with jax.enable_x64(False):  # as it was trained
            chosen = tuple(sorted(settings.items()))
            if chosen not in self._completers:  # each has a compiled program
                self._completers[chosen] = completions.prompt_completer(self.config, self.experiment, **settings)
            return self._completers[chosen](params, prompt, key, number)

    @cached_property
    def _completers(self) -> dict[tuple[tuple[str, Any], ...], Callable[..., list[str]]]:
        """By the settings of a sampler, what completes prompts with them."""
        return {}

    def refuse_without_text(self) -> None:
        """Raise a UserError unless the run writes text."""
        if not writes_text(self.config, self.experiment.env):
            config = self.config
            raise UserError(f"{self.directory} is a run of {config.algorithm} on {config.task}, which writes no text.")

    def plot(self, path: str | Path = "learning_curve.png") -> Path:
        """Draw the learning curve into a file: PNG, SVG or PDF, by its suffix; returns the path.

        Raises:
            UserError: another suffix.
        """
        from jaxpg import report

        columns, config = self.metrics.columns, self.config
        curves = {config.algorithm: (columns["steps"], training_returns(columns))}
        units = curve_units(to_dict(config))
        report.learning_curve(curves, path, title=config.task, threshold=config.threshold, units=units)
        return Path(path)


def load(run: str | Path, *, checkpoint: str = "best", trust_code: bool = False) -> Run:
    """Open the directory of a run that `jaxpg train` or `jaxpg.fit` has written.

    Args:
        run: the directory.
        checkpoint: which state: "best", of the best evaluation, or "last".
        trust_code: whether the functions "module:function" that the run names may be imported and called.

    Raises:
        UserError: it is no run, it is damaged or names code that is not trusted, or there is no such checkpoint.
    """
    if not isinstance(run, str | Path):
        raise UserError(f"load takes the directory of a run, as text or a Path, not {excerpt(run)}.")
    if checkpoint not in ("best", "last"):
        raise UserError(f'checkpoint is "best" or "last", not {checkpoint!r}.')
    config = load_config(Path(run), trust_code=trust_code)
    return open_run(config, Path(run), checkpoint)


def open_run(config: Config, directory: Path, checkpoint: str = "best") -> Run:
    """The run of a config that has been read.

    Raises:
        UserError: as `load`.
    """
    check_vocabulary(config, directory)
    host_callback.clear_failures()
    with jax.enable_x64(False):  # as it was trained
        experiment = build_experiment(config)
        return Run(config, experiment, restore(experiment.learner, directory, config.seeds, checkpoint), directory)
