"""The generated tasks by name."""

from __future__ import annotations

from collections.abc import Callable

from jaxpg.envs.text.countdown import countdown
from jaxpg.envs.text.problems import addition, modular_chain, reverse, sort
from jaxpg.envs.text.summarise import summarise_toy
from jaxpg.envs.text.task import Task
from jaxpg.envs.text.tracking import parity, permutations

TASKS: dict[str, Callable[..., Task]] = {
    "reverse": reverse,
    "sort": sort,
    "addition": addition,
    "modular_chain": modular_chain,
    "parity": parity,
    "permutations": permutations,
    "countdown": countdown,
    "summarise_toy": summarise_toy,
}
"""Task factories; all have `split` and `max_tokens` among their keyword-only settings."""
