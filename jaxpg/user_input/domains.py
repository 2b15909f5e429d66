"""Which numbers a setting may be: an interval for every setting, and the one check of a number that a user gives.

Only numbers are here. What else a value must be follows from the type of the setting (experiments/signatures.py).
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxpg.errors import UserError, excerpt

INT32_MAX = 2**31 - 1
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
FLOAT32_TINY = 2.0**-126
"""The smallest positive number that float32 holds with all of its digits; on many devices less is 0."""
LARGEST_REWARD = 1e15
"""In size: float32 ends at 3e38, and statistics and losses sum squares over many steps."""


class Domain(NamedTuple):
    """An interval of numbers, all of which int32 or float32 can hold.

    low, high: its ends.
    above: whether it excludes `low`.
    below: whether it excludes `high`.
    """

    low: float = -FLOAT32_MAX
    high: float = FLOAT32_MAX
    above: bool = False
    below: bool = False


ANY = Domain()
COUNT = Domain(1, INT32_MAX)
COUNT_OR_0 = Domain(0, INT32_MAX)
POSITIVE = Domain(0, above=True)
NOT_NEGATIVE = Domain(0)
FRACTION = Domain(0, 1)
SHARE = Domain(0, 1, above=True)
SAMPLING_TEMPERATURE = Domain(1e-6, 1e6)
"""Logits divided by less or more leave float32, or are all the same in it."""

DOMAINS: dict[str, Domain] = {
    # policy-gradient algorithms
    "learning_rate": NOT_NEGATIVE,
    "max_grad_norm": POSITIVE,
    "adam_eps": POSITIVE,  # at 0 a weight without gradient moves by 0 / 0
    "gamma": FRACTION,
    "gae_lambda": FRACTION,
    "entropy_coefficient": NOT_NEGATIVE,
    "value_coefficient": NOT_NEGATIVE,
    "baseline_rate": FRACTION,
    "group_size": Domain(2, INT32_MAX),  # one episode has no others to be compared with
    "reset_pool": COUNT_OR_0,
    "max_kl": POSITIVE,
    "damping": NOT_NEGATIVE,
    "clip": POSITIVE,
    "clip_high": POSITIVE,
    "dual_clip": Domain(1, above=True),
    "value_clip": POSITIVE,
    "target_kl": POSITIVE,
    "kl_coefficient": NOT_NEGATIVE,
    "reference_rate": FRACTION,
    "reference_kl_target": POSITIVE,
    "kl_gain": Domain(0, 5, above=True, below=True),  # from 5 on one iteration could take the whole weight away
    "anneal_steps": COUNT,
    # value-based algorithms
    "epsilon_steps": COUNT,
    "beta_steps": COUNT,
    "epsilon_start": FRACTION,
    "epsilon_end": FRACTION,
    "target_rate": FRACTION,
    "priority_alpha": FRACTION,
    "priority_beta": FRACTION,
    "huber_threshold": POSITIVE,
    "initial_value": ANY,
    # learning from examples and from preference pairs
    "margin": NOT_NEGATIVE,
    "centring": NOT_NEGATIVE,
    "beta": POSITIVE,
    "label_smoothing": Domain(0, 0.5, below=True),  # from one half on the labels say nothing, or the opposite
    "sharpness": NOT_NEGATIVE,
    "slip_rate": FRACTION,
    "label_noise": FRACTION,
    "earlier_share": FRACTION,
    # networks
    "initial_log_std": Domain(-20, 20),  # beyond, squares of the standard deviation leave float32
    "expansion": POSITIVE,
    "temperature": POSITIVE,
    # tasks
    "seeds": COUNT_OR_0,
    "threshold": ANY,
}
"""The domain of every setting whose value is not a COUNT, and of what schedules divide by: algorithms check these when
they are called as functions. A name means the same thing wherever it is a setting."""


def domain_of(name: str) -> Domain:
    """The domain of the setting with this name."""
    return DOMAINS.get(name, COUNT)


def as_reward(value: Any) -> float | None:
    """What a user gave as a reward or its weight, if it is a number of at most LARGEST_REWARD in size; else None."""
    import numpy as np  # here, since `jaxpg --help` needs the domains and is instant

    if not isinstance(value, numbers.Real | np.bool_):
        if getattr(value, "shape", None) != () or not hasattr(value, "item"):
            return None
        value = value.item()  # an array without axes, of NumPy's, jax's or torch's
        if not isinstance(value, numbers.Real):
            return None
    try:
        number = float(value)
    except OverflowError:  # an integer or a fraction of hundreds of digits
        return None
    return number if abs(number) <= LARGEST_REWARD else None  # false of NaN


def check_number(name: str, number: float, domain: Domain = ANY) -> None:
    """Check that a number lies in a domain.

    Args:
        name: what the number is, for the sentence.
        number: an int or a float, of any size.
        domain: where it must lie; an integer beyond int32 is refused in any.

    Raises:
        UserError: it does not, it is not finite, or it is not 0 but float32 would round it to 0.
    """
    low, high = domain.low, min(domain.high, INT32_MAX) if isinstance(number, int) else domain.high
    if isinstance(number, float) and not math.isfinite(number):
        rule = "be finite"
    elif number < low or (domain.above and number == low):
        rule = f"be {'above' if domain.above else 'at least'} {_in_words(low)}"
    elif number > high or (domain.below and number == high):
        rule = f"be {'below' if domain.below else 'at most'} {_in_words(high)}"
    elif 0 < abs(number) < FLOAT32_TINY:
        zero = "" if domain.above and low == 0 else "0 or "
        rule = f"be {zero}at least {FLOAT32_TINY:.3g} in size, or float32 rounds it to 0"
    else:
        return
    raise UserError(f"{name} must {rule}, not {excerpt(number)}.")


def check_whole(name: str, number: Any, domain: Domain = COUNT) -> int:
    """A whole number, also one of NumPy's or of jax's, as one of Python's.

    Raises:
        UserError: it is none, or traced, or lies outside of its domain.
    """
    try:
        whole = None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        whole = None
    if whole is None:
        why = " The program depends on it, so it cannot be traced or mapped over." if _is_traced(number) else ""
        raise UserError(f"{name} must be a whole number, not {excerpt(number)}.{why}")
    check_number(name, whole, domain)
    return whole


def check_scalars(settings: Mapping[str, Any]) -> None:
    """Refuse numbers that a setting cannot be (DOMAINS). What is traced, as under `jax.vmap`, is not known here.

    Raises:
        UserError: a number outside of its domain, or an array of several.
    """
    for name, value in settings.items():
        if name not in DOMAINS:
            continue  # a setting of the user's may be anything
        if shape := getattr(value, "shape", ()):
            raise UserError(f"{name} must be one number, not an array of shape {shape}: jax.vmap maps over several.")
        if _is_traced(value):
            continue
        if hasattr(value, "item"):  # of NumPy's or jax's
            value = value.item()
        no_limit = DOMAINS[name] == POSITIVE and value == math.inf  # such as clip = inf
        if isinstance(value, int | float) and not no_limit:
            check_number(name, value, DOMAINS[name])


def _is_traced(value: Any) -> bool:
    return type(value).__name__.endswith("Tracer")  # jax is not imported here


def _in_words(end: float) -> str:
    return {INT32_MAX: "2^31 - 1", FLOAT32_MAX: "3.4e38, which float32 can hold"}.get(end, f"{end:g}")
