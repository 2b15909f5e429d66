"""Where else a run is logged: Weights & Biases, and TensorBoard with every seed, the settings and completions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event

from jaxpg.errors import UserError, excerpt, refuse_unknown
from jaxpg.experiments.completions import Sample
from jaxpg.experiments.config import Config, to_dict
from jaxpg.files import explain_os_error, flatten
from jaxpg.training.health import is_kept
from jaxpg.training.metrics_writer import TENSORBOARD, Row, open_events, tag_of
from jaxpg.user_input.user_code import describe_failure


class Logger(NamedTuple):
    """Functions that a training run calls in its main process.

    on_row(row): with every row of metrics.
    on_completions(steps, samples): with completions of the first seed, after an evaluation of a text task.
    close(): at the end.
    """

    on_row: Callable[[Row], None]
    on_completions: Callable[[int, Sequence[Sample]], None]
    close: Callable[[], None]


def check_loggers(names: Any) -> None:
    """Raise a UserError unless these are names of LOGGERS, whose packages are installed."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise UserError(f'loggers are a list of names, such as ["wandb"], not {excerpt(names)}.')
    for name in names:
        if name not in LOGGERS:
            refuse_unknown("logger", str(name), LOGGERS)
    if "wandb" in names:
        _import_wandb()


class Loggers:
    """The loggers of a run, opened with its first row, when its directory is there.

    Args:
        names: of LOGGERS.
        config: of the run.
        out: its directory.
    """

    def __init__(self, names: Sequence[str], config: Config, out: Path) -> None:
        self._names, self._config, self._out = dict.fromkeys(names), config, out
        self._open: list[Logger] = []
        self._closing = contextlib.ExitStack()

    def on_row(self, row: Row) -> None:
        """Log a row of metrics.

        Raises:
            UserError: a logger cannot be opened, or cannot log.
        """
        if not self._open:
            for name in self._names:
                logger = LOGGERS[name](self._config, self._out)
                self._closing.callback(logger.close)
                self._open.append(logger)
        for logger in self._open:
            logger.on_row(row)

    def on_completions(self, steps: int, samples: Sequence[Sample]) -> None:
        """Log completions of the first seed."""
        for logger in self._open:
            logger.on_completions(steps, samples)

    def close(self) -> None:
        """Nothing more is logged, whichever of them cannot be closed."""
        self._closing.close()


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError("wandb is not installed, to which this run is to be logged: pip install wandb.") from None
    return wandb


def _values(row: Row) -> Iterator[tuple[str, np.ndarray]]:
    """The metrics of a row by tag, each [S]; without wall times and steps."""
    return ((tag_of(name), np.asarray(x, float)) for name, x in row.items() if name != "steps" and np.ndim(x))


def _settings(config: Config) -> dict[str, Any]:
    """The settings of a run in one table, each a number, a boolean or text."""
    plain = int | float | str | bool
    return {name: x if isinstance(x, plain) else str(x) for name, x in flatten(to_dict(config)).items()}


def _wandb(config: Config, out: Path) -> Logger:
    """A run of Weights & Biases in `out`; WANDB_MODE=offline needs neither an account nor a network.

    Where `out` will be deleted it is in the folder that wandb chooses, as its files would be lost.
    It has the means over finite seeds, and each seed in a section of its own. A run that is resumed is another run
    of the same group.
    """
    wandb = _import_wandb()
    kept = is_kept(out)
    explained = partial(_explained, "Weights & Biases", "WANDB_MODE=offline logs without an account")
    with explained():
        run = wandb.init(
            project="jaxpg",
            name=f"{config.task} {config.algorithm}",
            group=out.name if kept else None,
            dir=str(out) if kept else None,
            config=_settings(config),
            reinit="create_new",
        )

    def on_row(row: Row) -> None:
        logged: dict[str, float] = {}
        for tag, values in _values(row):
            known = np.isfinite(values)
            logged |= {tag: float(values[known].mean())} if known.any() else {}
            logged |= {
                f"seed {seed}/{tag}": float(x)
                for seed, x in zip(config.seeds, values, strict=True)
                if len(values) > 1 and np.isfinite(x)
            }
        with explained():
            run.log(logged, step=int(np.min(row["steps"])))

    def on_completions(steps: int, samples: Sequence[Sample]) -> None:
        with explained():
            table = wandb.Table(columns=list(Sample._fields), data=[list(sample) for sample in samples])
            run.log({"completions": table}, step=steps)

    def close() -> None:
        with explained():
            run.finish()

    return Logger(on_row, on_completions, close)


@contextlib.contextmanager
def _explained(what: str, advice: str) -> Iterator[None]:
    """Raise what a package raises as a UserError with advice."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{what} cannot log this run ({describe_failure(error)}). {advice}.") from error


def _tensorboard(config: Config, out: Path) -> Logger:
    """Beside the means that every run has in `tensorboard/`: a folder for each seed, the settings, and completions."""
    folder = out / TENSORBOARD
    writers: dict[str, EventsWriter] = {}

    def write(name: str, steps: int, *summaries: Any) -> None:
        with explain_os_error(out):
            if name not in writers:
                writers[name] = open_events(folder / name, steps)
                if name == "settings":
                    for one in summary.hparams(_settings(config), {tag_of("evaluation_return"): 0}):
                        writers[name].write_event(Event(wall_time=time.time(), summary=one))
            for one in summaries:
                writers[name].write_event(Event(step=steps, wall_time=time.time(), summary=one))
            writers[name].flush()

    def on_row(row: Row) -> None:
        write("settings", int(np.min(row["steps"])))
        for i, seed in enumerate(config.seeds):
            values = [(tag, float(x[i])) for tag, x in _values(row) if np.isfinite(x[i])]
            write(f"seed-{seed}", int(row["steps"][i]), _scalars(values))

    def on_completions(steps: int, samples: Sequence[Sample]) -> None:
        lines = [f"    {sample.line().plain.replace(chr(10), chr(10) + '    ')}" for sample in samples]
        write("settings", steps, summary.text("completions", "\n".join(lines)))  # indented: as it is, no Markdown

    def close() -> None:
        for writer in writers.values():
            with contextlib.suppress(OSError):
                writer.close()

    return Logger(on_row, on_completions, close)


def _scalars(values: Sequence[tuple[str, float]]) -> Any:
    return summary.Summary(value=[summary.Summary.Value(tag=tag, simple_value=x) for tag, x in values])


LOGGERS: Mapping[str, Callable[[Config, Path], Logger]] = {"wandb": _wandb, "tensorboard": _tensorboard}
"""By the name of its option: the logger of a run in a directory."""
