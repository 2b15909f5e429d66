"""Learning, as a user starts it: whole runs by the command line, and what their policies earn at the end of them.

Scores are means over seeds of a hundred whole episodes each, which one lost seed of ten shows, and the bounds come from
published results: CleanRL's PPO reaches 490 on CartPole-v1, and openai/baselines' 497.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny import LONG

from jaxpg import report
from jaxpg.cli.main import main
from jaxpg.training import run_directory

pytestmark = [pytest.mark.learning, pytest.mark.full]


def score(out: Path, *arguments: str) -> float:
    """The mean over seeds at the end of a run."""
    settings = ["--set", "evaluations=1", "--set", "evaluation_episodes=100", "--quiet", "--out", str(out)]
    assert main(["train", *arguments, *settings]) == 0
    final = run_directory.load_metrics(out)["evaluation_return"][-1]
    print(np.sort(final))
    return float(report.mean(final))


@pytest.mark.parametrize(
    ("algorithm", "least"),
    [("ppo", 475.0), pytest.param("a2c", 470.0, marks=LONG), pytest.param("grpo", 450.0, marks=LONG)],
)
def test_cart_pole(algorithm: str, least: float, tmp_path: Path) -> None:
    assert score(tmp_path / "run", "cartpole", algorithm, "--seeds", "10") >= least


@LONG
def test_four_devices_that_share_the_environments_learn(tmp_path: Path) -> None:
    """Three seeds do not divide among them, so each device has a quarter of every seed's environments."""
    assert score(tmp_path / "run", "catch", "ppo", "--seeds", "3", "--devices", "4", "--steps", "50000") >= 0.9
