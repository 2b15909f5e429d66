"""The exception for errors caused by user input, and the hints in its messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NoReturn

RENAMED = {
    "average": "baseline_kind",
    "average_rate": "baseline_rate",
    "drop_cut_off": "overlong_filtering",
    "max_rounds": "max_resample_rounds",
    "start_pool": "reset_pool",
    "thinking": "scratchpad_share",
}
"""Settings that have been renamed: old name -> new name."""
ELSEWHERE = {
    "clip_coef": "clip",
    "clip_eps": "clip",
    "clip_range": "clip",
    "discount": "gamma",
    "ent_coef": "entropy_coefficient",
    "eps_clip": "clip",
    "lam": "gae_lambda",
    "lambda": "gae_lambda",
    "lr": "learning_rate",
    "n_envs": "num_envs",
    "n_epochs": "epochs",
    "n_steps": "num_steps",
    "num_epochs": "epochs",
    "num_generations": "group_size",
    "rollout_length": "num_steps",
    "steps": "total_steps",
    "total_timesteps": "total_steps",
    "update_epochs": "epochs",
    "vf_coef": "value_coefficient",
}
"""What other libraries call a setting (Stable-Baselines3, CleanRL, rejax, TRL): their name -> its name here."""


class UserError(ValueError):
    """An error caused by user input: the message says what was given, what was expected and what to do.

    The command line prints only the message and exits with code 2; users of the library can catch a ValueError.
    """


def excerpt(value: Any, length: int = 60) -> str:
    """A value as Python writes it, cut off after `length` characters, for the sentence that refuses it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or thousands of brackets
        return "a value too long to show"
    return text if len(text) <= length else f"{text[: length - 3]}..."


def refuse_unknown(what: str, given: str, known: Iterable[str], where: str = "") -> NoReturn:
    """Raise a UserError for an unknown name of a `what`, with a suggestion from the known names (`hint`)."""
    raise UserError(f"There is no {what} {excerpt(given)}{where}. {hint(given, known)}")


def hint(given: str, known: Iterable[str]) -> str:
    """A sentence with the new name, the most similar name, or all names if none is similar."""
    known = sorted(known)
    if not known:
        return "There is none."
    if RENAMED.get(given) in known:
        return f"It is called {RENAMED[given]!r} now."
    if ELSEWHERE.get(given) in known:
        return f"It is called {ELSEWHERE[given]!r} here."
    similar = nearest(given, known)
    return f"Did you mean {similar!r}?" if similar else f"There are: {', '.join(known)}."


def nearest(given: str, known: Iterable[str]) -> str | None:
    """The known name most similar to the given one, None if none is similar."""
    by_lower = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(given.lower(), list(by_lower), n=1, cutoff=0.5)
    return by_lower[matches[0]] if matches else None
