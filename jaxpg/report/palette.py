"""The colour of every algorithm, the same wherever it appears: in curves, tables and pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple
from zlib import crc32

from jaxpg.user_input.printable import printable

# The palette of Okabe and Ito for colour-blind readers, without the colours that are invisible on white or on black.
BLUE, VERMILION, GREEN, PINK, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
COLORS = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY)
DASHES: tuple[str | tuple, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (9, 2)))
COLOR_OF = {
    **{"reinforce": PINK, "reinforce_to_go": ORANGE, "reinforce_baseline": SKY},
    **{"actor_critic_mc": VERMILION, "actor_critic_td": ORANGE, "a2c": GREEN, "trpo": SKY, "ppo": BLUE, "rlhf": PINK},
    **{"grpo": VERMILION, "process_grpo": ORANGE, "rloo": SKY, "dr_grpo": GREEN, "gspo": ORANGE},
    **{"dapo": BLUE, "cispo": PINK},
    **{"dqn": BLUE, "double_dqn": VERMILION, "dueling_dqn": GREEN, "n_step_dqn": PINK, "prioritized_dqn": ORANGE},
    **{"qr_dqn": SKY, "rainbow": PINK, "pqn": GREEN},
    **{"sarsa": VERMILION, "expected_sarsa": ORANGE, "q_learning": BLUE, "double_q_learning": SKY},
    **{"n_step_sarsa": GREEN, "sft": GREEN, "reward_model": ORANGE, "process_reward_model": SKY, "dpo": PINK},
}
"""Parent and child never have the same one. An algorithm of the user's has the colour that its name hashes to."""


class LineStyle(NamedTuple):
    """How the line of an algorithm is drawn: colour and dashes."""

    color: str
    dashes: Any


def color_of(label: str) -> str:
    """The colour of an algorithm; `label` is its name, or begins with its name and a comma."""
    name = label.partition(",")[0]
    return COLOR_OF.get(name) or COLORS[crc32(printable(name).encode()) % len(COLORS)]


def line_styles(labels: Iterable[str]) -> dict[str, LineStyle]:
    """By label, how its line is drawn in one figure: solid, and dashed where an earlier label has the same colour."""
    styles, seen = {}, Counter[str]()
    for label in labels:
        color = color_of(label)
        styles[label] = LineStyle(color, DASHES[seen[color] % len(DASHES)])
        seen[color] += 1
    return styles
