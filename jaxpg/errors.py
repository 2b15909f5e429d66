"""The exception for errors caused by user input, and the hints in its messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NoReturn

RENAMED = {
    "average": "baseline_kind",
    "average_rate": "baseline_rate",
    "drop_cut_off": "overlong_filtering",
    "max_rounds": "max_resample_rounds",
    "start_pool": "reset_pool",
    "thinking": "scratchpad_share",
}
"""Settings of earlier versions by the name that they had, with the name that they have now."""


class UserError(ValueError):
    """A mistake at the boundary: the message says what was given, what was expected and what to do.

    The command line prints the message alone and exits with code 2; a caller of the library catches a ValueError.
    """


def refuse_unknown(what: str, given: str, known: Iterable[str], where: str = "") -> NoReturn:
    """Raise a UserError that names the new name, the nearest valid name, or all of them where none is near."""
    raise UserError(f"There is no {what} {given!r}{where}. {hint(given, known)}")


def hint(given: str, known: Iterable[str]) -> str:
    """A sentence about the name that was probably meant."""
    known = sorted(known)
    if RENAMED.get(given) in known:
        return f"It is called {RENAMED[given]!r} now."
    near = nearest(given, known)
    return f"Did you mean {near!r}?" if near else f"There are: {', '.join(known)}."


def nearest(given: str, known: Iterable[str]) -> str | None:
    """The valid name that is most like the given one, None where none is near."""
    spelled = {name.lower(): name for name in known}
    near = difflib.get_close_matches(given.lower(), list(spelled), n=1, cutoff=0.5)
    return spelled[near[0]] if near else None
