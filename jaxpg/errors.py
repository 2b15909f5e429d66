"""The exception for errors caused by user input, and the hints in its messages."""

from __future__ import annotations

import difflib
import errno
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

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
    "anneal_lr": "anneal_steps",
    "beta": "kl_coefficient",
    "cg_damping": "damping",
    "cg_max_steps": "conjugate_steps",
    "clip_coef": "clip",
    "clip_eps": "clip",
    "clip_range": "clip",
    "clip_range_vf": "value_clip",
    "clip_vloss": "value_clip",
    "cliprange": "clip",
    "cliprange_value": "value_clip",
    "delta": "dual_clip",
    "discount": "gamma",
    "ent_coef": "entropy_coefficient",
    "eps_clip": "clip",
    "epsilon": "clip",
    "epsilon_high": "clip_high",
    "exploration_final_eps": "epsilon_end",
    "exploration_initial_eps": "epsilon_start",
    "gradient_accumulation_steps": "micro_batches, chunk_rows",
    "kl_coef": "kl_coefficient",
    "lam": "gae_lambda",
    "lambda": "gae_lambda",
    "loss_type": "loss",
    "lr": "learning_rate",
    "mask_truncated_completions": "overlong_filtering",
    "max_completion_length": "environment_settings.max_tokens",
    "max_prompt_length": "environment_settings.prompt_length",
    "max_steps": "total_steps",
    "n_critic_updates": "value_epochs",
    "n_envs": "num_envs",
    "n_epochs": "epochs",
    "n_steps": "num_steps",
    "norm_adv": "normalize_advantages",
    "normalize_advantage": "normalize_advantages",
    "num_epochs": "epochs",
    "num_generations": "group_size",
    "num_iterations": "epochs",
    "per_device_train_batch_size": "num_envs, batch_size",
    "policy_kwargs": "network",
    "ref_model_mixup_alpha": "reference_rate",
    "reward_weights": "rewards",
    "rollout_length": "num_steps",
    "steps": "total_steps",
    "target_network_frequency": "target_period",
    "target_update_interval": "target_period",
    "tau": "target_rate",
    "temperature": "network.temperature",
    "total_timesteps": "total_steps",
    "update_epochs": "epochs",
    "vf_coef": "value_coefficient",
}
"""What other libraries call a setting (Stable-Baselines3, CleanRL, rejax, TRL): their name -> its names here."""
COUNTED = {
    "anneal_steps": ", and counts environment steps",
    "batch_size": ", and is that of all devices together",
    "chunk_rows": ", and counts rows",
    "num_envs": ", and is that of all devices together",
    "reference_rate": ", and applies after every iteration",
    "target_period": ", and counts gradient steps",
    "total_steps": ", and counts environment steps, which are tokens in a text",
}
"""Settings that other libraries count in another unit."""
OF_ONE_STEP = {"initial_value": "n_step_sarsa", "buffer_size": "n_step_dqn"}
"""What algorithms with targets of one reward have as a setting -> the one of their ladder with `n_steps` of them."""
OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of printing, which come without the name of a file: a full disk, a lost terminal."""
FEW = 5
"""Up to this many names are all listed, even where one of them is similar: that one may not be meant."""


class UserError(ValueError):
    """An error caused by user input: the message says what was given, what was expected and what to do.

    The command line prints only the message and exits with code 2; users of the library can catch a ValueError.
    """


def excerpt(value: Any, length: int = 60) -> str:
    """A value as Python writes it, on one line of at most `length` characters, for the sentence that refuses it."""
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # an integer of thousands of digits, or thousands of brackets
        return "a value too long to show"
    return text if len(text) <= length else f"{text[: length - 3]}..."


def describe_os_error(error: OSError) -> str:
    """A file that cannot be used, in a sentence."""
    reason = error.strerror or str(error)
    if error.filename:
        return f"{error.filename} cannot be read or written ({reason})."
    return f"The output cannot be written to ({reason})." if error.errno in OF_OUTPUT else f"{reason}."


def checked_by(check: Callable[[str, Mapping[str, Any]], None]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: `check(name of the function, its arguments by name)`, and then the function.

    For what `jax.jit` compiles: inside of it arrays have no numbers that could be refused.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            check(function.__name__, signature.bind(*args, **kwargs).arguments)
            return function(*args, **kwargs)

        return checked

    return decorate


def check_record(taker: str, given: object, kind: type, example: str) -> None:
    """Refuse what is no record of this kind, such as a name or a function in its place.

    Args:
        taker: the function that takes it, for the sentence.
        given: what was passed.
        kind: the class of the record.
        example: what makes such a record.

    Raises:
        UserError: `given` is of another kind.
    """
    if not isinstance(given, kind):
        raise UserError(f"{taker} takes a record {kind.__name__}: {example}, not {excerpt(given)}.")


def check_functions(algorithm: Any, fields: Iterable[str]) -> None:
    """Raise a UserError for a field of an algorithm that must be a function and is none."""
    for field in fields:
        if not callable(function := getattr(algorithm, field)):
            advice = " Algorithms make a constant one: learning_rate=3e-4." if field == "learning_rate" else ""
            raise UserError(f"The {field} of an algorithm is a function, not {excerpt(function)}.{advice}")


def check_numbers(algorithm: Any, fields: Iterable[str]) -> None:
    """Raise a UserError for a field of an algorithm that must be one number, traced or not, and is none."""
    for field in fields:
        given = getattr(algorithm, field)
        if callable(given):
            raise UserError(
                f"The {field} of an algorithm is a number, not {excerpt(given)}. One that changes while training is "
                "set by the `adaptation` of a PolicyGradient (docs/algorithm.md)."
            )
        is_number = isinstance(given, int | float) or hasattr(given, "dtype")
        if not is_number or getattr(given, "shape", ()) != ():
            raise UserError(f"The {field} of an algorithm is one number, not {excerpt(given)}.")


def refuse_unknown(what: str, given: object, known: Iterable[str], where: str = "") -> NoReturn:
    """Raise a UserError for an unknown name of a `what`, with a suggestion from the known names (`hint`)."""
    suggestion = hint(given if isinstance(given, str) else "", known)
    raise UserError(f"There is no {what} {excerpt(given)}{where}. {suggestion}")


def hint(given: str, known: Iterable[str]) -> str:
    """A sentence with the new name, the most similar name, or all names if none is similar."""
    known = sorted(known)
    if not known:
        return "There is none."
    if RENAMED.get(given) in known:
        return f"It is called {RENAMED[given]!r} now."
    for setting, of_more in OF_ONE_STEP.items():
        if given == "n_steps" and setting in known:
            return f"Its targets have one reward; those of {of_more} have as many as its n_steps says."
    for name in ELSEWHERE.get(given, "").split(", "):
        if name.partition(".")[0] in known:  # a setting, or one in a table
            return f"It is called {name!r} here{COUNTED.get(name, '')}."
    similar, every = nearest(given, known), f"There are: {', '.join(known)}."
    if similar is None:
        return every
    return f"Did you mean {similar!r}? {every}" if len(known) <= FEW else f"Did you mean {similar!r}?"


def nearest(given: str, known: Iterable[str]) -> str | None:
    """The known name most similar to the given one, None if none is similar."""
    by_lower = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(given.lower(), list(by_lower), n=1, cutoff=0.5)
    return by_lower[matches[0]] if matches else None
