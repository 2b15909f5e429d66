"""Training from Python in one call: names or objects in, a trained run out."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from rich.console import Console

from jaxpg import parallel
from jaxpg.algorithm import PolicyGradient
from jaxpg.envs.contract import of_gymnasium
from jaxpg.envs.host import is_of_this_script
from jaxpg.errors import UserError, excerpt
from jaxpg.experiments.config import check_seeds, resolve_config
from jaxpg.experiments.parts import ALGORITHMS, NETWORKS, Q_NETWORKS, algorithm_options
from jaxpg.experiments.stages import Stage, check_plan, is_finished, plan_stages
from jaxpg.files import explain_os_error
from jaxpg.runs import training
from jaxpg.runs.callbacks import Callback, check_callback
from jaxpg.runs.interrupts import saving_first
from jaxpg.runs.loggers import check_loggers
from jaxpg.runs.terminal import make_console
from jaxpg.runs.trained import Run, open_run
from jaxpg.training import run_directory
from jaxpg.training.health import UNKEPT
from jaxpg.training.loop import NO_HOOKS, TrainingHooks
from jaxpg.types import Critic, Env, Policy
from jaxpg.user_input import user_code
from jaxpg.values.deep_q import DeepQ

Made = tuple[Policy, Critic | None] | nn.Module
"""What a network is: a pair, or, of the DQN family, a flax module."""
Network = str | Mapping[str, Any] | Made | Callable[..., Made]
Seeds = int | Sequence[int] | np.ndarray | jax.Array


def fit(
    env: str | Env | Callable[..., Env],
    algorithm: str | PolicyGradient | DeepQ | Callable[..., Any],
    *,
    network: Network | None = None,
    seeds: Seeds = 8,
    total_steps: int | None = None,
    out: str | Path | None = None,
    callbacks: Sequence[Callback] | Mapping[str, Any] = (),
    loggers: Sequence[str] = (),
    progress: bool = True,
    **settings: Any,
) -> Run:
    """Train an algorithm on an environment, several seeds at once on all devices that divide them, with progress.

    With `out` it is the run that `jaxpg train` writes: every command and `jaxpg.load` read it, and `jaxpg resume` goes
    on with it. Its parts then need names: strings, or functions at the top of a module. Without `out`, records do too.

    Args:
        env: a task ("cartpole", with its settings for each algorithm), an environment ("CartPole-v1", "brax:ant",
            "module:function"), a function that returns an Env, or an Env.
        algorithm: its name ("ppo"), a PolicyGradient, or a function of settings that returns one; or a DeepQ (values),
            or a function whose annotation says that it returns one.
        network: its kind ("mlp"), a table {"kind": "mlp", "hidden": [64]}, a function (env, *, ...) -> (Policy,
            Critic), or such a pair (of the DQN family, both with a flax module from observations to features); by
            default that of the task, or one that fits the observations.
        seeds: how many, numbered from 0, or their numbers.
        total_steps: environment steps of each seed; by default the task's.
        out: the directory to write; None to keep nothing on disk.
        callbacks: what sees the metrics and the policy during training, and may end it; Callback records, or a table
            of names "module:function" with their settings, which the run then names.
        loggers: where the run is also logged: "wandb", "tensorboard", which needs `out`.
        progress: show it.
        **settings: of the algorithm, the task and the environment, as in a config: learning_rate=1e-3,
            environment_settings={"gravity": 5.0}.

    Returns:
        The run with its last state; `jaxpg.load(out)` has the state of the best evaluation.

    Raises:
        UserError: something that cannot be trained or written, in a sentence, before anything is compiled.
        KeyboardInterrupt: after Ctrl-C; with `out` the current chunk is trained and saved first.
    """
    if jax.process_count() > 1:
        raise UserError("fit trains in one process; several hosts take the command: jaxpg train ... --distributed.")
    if not isinstance(out, str | Path | None):
        raise UserError(f"out is the directory to write, or None, not {excerpt(out)}.")
    named = _Named(is_kept=out is not None)
    overrides = {**settings, **_overrides(named, network, seeds, total_steps)}
    if isinstance(callbacks, Mapping):
        overrides["callbacks"], callbacks = dict(callbacks), ()
    task, name = named.env(env), named.algorithm(algorithm)
    if isinstance(algorithm, PolicyGradient | DeepQ):
        _refuse_settings_of_record(algorithm, settings)
    _check_callbacks(callbacks)
    check_loggers(loggers)
    if out is None and "tensorboard" in loggers:
        raise UserError("TensorBoard's events are in the directory of the run: give out=DIRECTORY to have them.")
    console = make_console(quiet=not progress, soft_wrap=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(user_code.give(named.functions))
        stack.enter_context(jax.enable_x64(False))  # the bits of the command line, whatever the session has
        config = resolve_config(task, name, overrides)
        if out is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=UNKEPT)))
        else:
            directory = Path(out)
            _check_kept(directory, config.environment)
        plan = plan_stages(config, directory, directory, task=task, overrides=overrides)
        if len(plan) > 1:
            check_plan(plan)
        for stage in plan:
            if not is_finished(stage):
                watching = callbacks if stage is plan[-1] else ()
                goes_on = f"the command jaxpg resume {directory}" if stage is plan[-1] else "the same call of fit"
                with saving_first(goes_on) if out else contextlib.nullcontext(NO_HOOKS.should_stop) as interrupted:
                    _train(stage, console, watching, loggers, stage.directory if out else None, interrupted)
        run = open_run(plan[-1].config, directory, "last")
        run.metrics  # noqa: B018 - read while the directory is there
        return run


def _refuse_settings_of_record(record: PolicyGradient | DeepQ, settings: Mapping[str, Any]) -> None:
    """Refuse settings of an algorithm that is given as a record, which was made with its settings."""
    of_algorithms = {name for algorithm in ALGORITHMS for name in algorithm_options(algorithm)}
    if given := next((name for name in settings if name in of_algorithms), None):
        made_by = "values.dqn" if isinstance(record, DeepQ) else "ladder.ppo"
        value = excerpt(settings[given])
        raise UserError(
            f"{given} is a setting of an algorithm, and this one is a record, a {type(record).__name__}, which has its "
            f"settings already: give it to the function that makes the record, as in {made_by}({given}={value}), or "
            f"give fit that function itself, as in fit(env, {made_by}, {given}={value})."
        )


def _check_kept(directory: Path, environment: str) -> None:
    """Refuse what is no directory or has a run, and an environment that commands would not find when they read it."""
    if is_of_this_script(environment):
        raise UserError(
            f"With out, commands have to find {environment}, and this script registers it: register it in a module of "
            "its own and name that too, gymnasium:MODULE:ID."
        )
    with explain_os_error(directory), contextlib.suppress(FileNotFoundError):
        os.listdir(directory)
    remedy = f"Go on with it by the command jaxpg resume {directory}, or choose another out."
    run_directory.refuse_begun(directory, remedy)


def _train(
    stage: Stage,
    console: Console,
    callbacks: Sequence[Callback],
    loggers: Sequence[str],
    shown: Path | None,
    interrupted: Callable[[], bool],
) -> None:
    """Train one run of the plan, whose directory is `shown` unless it is temporary."""
    config = stage.config
    mesh = parallel.make_mesh(len(config.seeds), config.batch_size, training.devices_of(config))
    train = training.prepare(config, stage.directory, mesh, console, callbacks=callbacks, loggers=loggers)
    with training.progress(console, training.header(stage, mesh, shown), config.total_steps) as show:
        train(TrainingHooks(on_row=show, should_stop=interrupted))
    known = dataclasses.replace(config, callbacks={}) if callbacks else config  # a record has no name
    if end := training.end_by_callback(known, stage.directory):
        console.print(f"{config.algorithm}: {end}.")


def _overrides(named: _Named, network: Network | None, seeds: Seeds, total_steps: int | None) -> dict[str, Any]:
    """The arguments of `fit` that are settings of a config."""
    seeds = seeds.tolist() if isinstance(seeds, np.ndarray | np.integer | jax.Array) else seeds
    if type(seeds) is int and seeds < 1:
        raise UserError(f"seeds must be at least 1, not {seeds}.")
    numbers: Any = range(seeds) if type(seeds) is int else seeds  # True is no number
    if not isinstance(numbers, range) and not _are_integers(numbers):
        raise UserError(f"seeds must be the number of seeds or a list of ints, not {excerpt(seeds)}.")
    check_seeds(numbers)
    overrides: dict[str, Any] = {"seeds": list(numbers)}
    if total_steps is not None:
        overrides["total_steps"] = total_steps
    if network is not None:
        overrides["network"] = named.network(network)
    return overrides


def _are_integers(numbers: Any) -> bool:
    return isinstance(numbers, Sequence) and all(type(x) is int for x in numbers)


def _check_callbacks(callbacks: Any) -> None:
    if isinstance(callbacks, Callback):  # whose fields would be taken for callbacks
        raise UserError("callbacks are a list of jaxpg.Callback records, and this is one itself: give [callback].")
    if not isinstance(callbacks, Sequence):
        raise UserError(f"callbacks are a list of jaxpg.Callback records, or a table, not {excerpt(callbacks)}.")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise UserError(f"callbacks are a list of jaxpg.Callback records, not of {type(callback).__name__}.")
        check_callback(callback)


class _Named:
    """Names for the parts of a run that are objects of a program, for its config; `functions` has what they stand for.

    Args:
        is_kept: whether the run is written for other programs, which find a part only by a name "module:function".
    """

    def __init__(self, *, is_kept: bool) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}
        self._is_kept = is_kept

    def env(self, env: str | Env | Callable[..., Env]) -> str:
        if isinstance(env, str | Path):
            return str(env)
        if isinstance(env, Env):
            return self._give(
                "environment", lambda: env, "an Env, which has none: give its name, or the function that makes it"
            )
        return self._function("environment", env, {})

    def algorithm(self, algorithm: str | PolicyGradient | DeepQ | Callable[..., Any]) -> str:
        if isinstance(algorithm, str):
            return algorithm
        if not isinstance(algorithm, PolicyGradient | DeepQ):
            return self._function("algorithm", algorithm, ALGORITHMS)
        record, kind = algorithm, type(algorithm)

        def constant(*, num_envs: int = record.collector.num_envs) -> Any:
            return record

        constant.__annotations__["return"] = kind
        return self._give("algorithm", constant, f"a {kind.__name__}, which has none: give the function that makes it")

    def network(self, network: Network) -> dict[str, Any]:
        if isinstance(network, str):
            return {"kind": network}
        if isinstance(network, Mapping):
            return {**network, **(self.network(network["kind"]) if "kind" in network else {})}
        if isinstance(network, nn.Module):
            problem = "a module, which has none: give the function that makes it"
            return {"kind": self._give("network", lambda env: network, problem)}
        if callable(network):
            return {"kind": self._function("network", network, NETWORKS | Q_NETWORKS)}
        if not isinstance(network, tuple):
            raise UserError(f"The network must be a name, a table, a function or a pair, not {excerpt(network)}.")
        name = self._give("network", lambda env: network, "a pair, which has none: give the function that makes it")
        return {"kind": name}

    def _function(self, what: str, function: Callable[..., Any], own: Mapping[str, Callable[..., Any]]) -> str:
        """The name of a function: that of jaxpg's own, or "module:function"."""
        if not callable(function):
            problem = f"The {what} must be a name, a function or a record, not {excerpt(function)}."
            raise UserError(problem + of_gymnasium(function))
        if known := next((name for name, x in own.items() if x is function), None):
            return known
        name = _name_of(function)
        if name is None:
            return self._give(what, function, "a function that cannot be imported: move it to the top of a module")
        self.functions[name] = function
        return name

    def _give(self, what: str, function: Callable[..., Any], problem: str) -> str:
        """A name that only this program knows."""
        if self._is_kept:
            raise UserError(f"With out, commands have to find the {what} by a name, and this is {problem}.")
        name = f"python:{what}"
        self.functions[name] = function
        return name


def _name_of(function: Callable[..., Any]) -> str | None:
    """The name "module:function" of a function at the top of a module's file, which can be imported; else None."""
    if not inspect.isfunction(function) or not function.__qualname__.isidentifier():
        return None
    module = sys.modules.get(function.__module__)
    if module is None:  # code that was run without being imported
        return None
    script = Path(vars(module).get("__file__") or "").stem
    name = f"{script if function.__module__ == '__main__' else function.__module__}:{function.__qualname__}"
    return name if user_code.is_code_name(name) else None  # a script may be called `my script.py`
