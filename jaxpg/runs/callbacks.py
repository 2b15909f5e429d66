"""Callbacks: what a user's own code sees of a training run, and how it ends one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

from jaxpg.errors import UserError, excerpt
from jaxpg.experiments.config import Config
from jaxpg.experiments.parts import make_part
from jaxpg.training.metrics_writer import Row
from jaxpg.user_input.user_code import explain_failure


class Callback(NamedTuple):
    """Functions of the user's that are called between the chunks of a training run; by default they do nothing.

    A run is logged in about 200 chunks, each a row of metrics. Of several processes each calls `on_row` and
    `should_stop`, and the first alone `on_evaluation`.

    on_row(row): called with every row, metrics by name, [S] for S seeds; the first has the evaluation at step 0 alone.
    on_evaluation(run): called before training and after every evaluation with the run so far, as `jaxpg.load` gives it.
    should_stop(): called after every row; if true, the run is evaluated and over: a checkpoint says so, and it goes on
        only where `jaxpg resume` is given other --steps.
    """

    on_row: Callable[[Row], None] = lambda row: None
    on_evaluation: Callable[[Any], None] | None = None
    should_stop: Callable[[], bool] = lambda: False


def check_callback(callback: Callback) -> None:
    """Raise a UserError unless the fields of a callback are functions; `on_evaluation` may be None."""
    for field, given in callback._asdict().items():
        if not callable(given) and (field != "on_evaluation" or given is not None):
            raise UserError(f"The {field} of a jaxpg.Callback is a function, not {excerpt(given)}.")


def named_callbacks(config: Config) -> list[Callback]:
    """The callbacks that a config names; what they raise is reported in a sentence.

    Raises:
        UserError: one cannot be imported or made, or is no Callback.
    """
    return [_named_callback(name, settings) for name, settings in config.callbacks.items()]


def _named_callback(name: str, settings: dict[str, Any]) -> Callback:
    made = make_part("callback", name, settings)
    if not isinstance(made, Callback):
        raise UserError(f"The callback {name} must return a jaxpg.Callback, not a {type(made).__name__}.")
    check_callback(made)

    def explained(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any) -> Any:
            with explain_failure(f"The callback {name}"):
                return function(*arguments)

        return call

    look = made.on_evaluation
    return Callback(explained(made.on_row), explained(look) if look else None, explained(made.should_stop))


class Watched:
    """Several callbacks as one."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)
        self.has_stopped = False  # whether one of them has ended the run; asked again, it may answer otherwise

    def on_row(self, row: Row) -> None:
        """Show a row to all of them, to each in a table of its own, which it may change."""
        for callback in self._callbacks:
            callback.on_row(dict(row))

    def on_evaluation(self, make_run: Callable[[], Any]) -> None:
        """Show them the run, which is made only if one of them looks."""
        if watching := [callback.on_evaluation for callback in self._callbacks if callback.on_evaluation]:
            run = make_run()
            for look in watching:
                look(run)

    def should_stop(self) -> bool:
        """Whether one of them ends the run."""
        self.has_stopped = any(callback.should_stop() for callback in self._callbacks)
        return self.has_stopped
