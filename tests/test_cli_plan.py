"""`jaxpg plan`: what it prints, draws and refuses."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jaxpg.cli.main import main


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def world(**settings: str) -> str:
    lines = "".join(f"{name} = {value}\n" for name, value in settings.items())
    Path("world.toml").write_text(f'environment = "grid_world"\ntotal_steps = 1000\n[environment_settings]\n{lines}')
    return "world.toml"


def test_every_method_finds_the_same_start_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "frozen_lake", "--gamma", "0.99"]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"0\.542026", printed)) == 4
    assert re.search(r"within the 100 steps of an episode, without discount: 0\.740", printed)
    assert "hole" in printed
    assert Path("plan.png").stat().st_size > 10_000


def test_a_picture_of_what_changes_with_a_setting(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "environment_settings.living_cost=0.0", "--set", "environment_settings.slip=0.0"]
    assert main(["plan", world(rows="3", columns="4"), "--gamma", "0.9", "--out", "map.svg", *settings]) == 0
    assert "0.656100" in capsys.readouterr().out  # four steps before the one that earns 1
    drawn = [text.strip() for text in ElementTree.parse("map.svg").getroot().itertext()]
    assert "sweep 1" in drawn  # below the name of the method, a line of its own


@pytest.mark.full
def test_an_evaluation_that_ends_at_its_limit_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A walk at random along the cliff falls a thousand times before it ends. A program per sweep takes minutes."""
    assert main(["plan", "cliff_walking", "--gamma", "1", "--out", "map.svg"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("policy iteration: an evaluation ended at the limit of 100,000 sweeps, before the values") == 1
    assert printed.count(" ended at the limit ") == 1  # modified policy iteration is meant to
    drawn = [text.strip() for text in ElementTree.parse("map.svg").getroot().itertext()]
    assert {"sweep 1", "sweep 2", "sweep 4", "sweep 15", "improvement 1, 100000 sweeps"} <= {*drawn}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["cartpole"], "cartpole cannot be planned: P and R of CartPole-v1 are not known"),
        (["frozen_lake", "--gamma", "1.5"], "--gamma must be"),
        (["frozen_lake", "--gamma", "nan"], "--gamma must be"),
        (["frozen_lake", "--tolerance", "0"], "--tolerance must be"),
        (["frozen_lake", "--out", "map.txt"], "map.txt"),
        (["frozen_lake", "--set", "environment_settings.size=5"], "size must be 4 or 8"),
        (["frozen_lake", "--set", "gamma=0.9"], "There is no setting 'gamma' of a plan. There are: environment, "),
        (["nowhere"], "There is no task 'nowhere'"),
    ],
)
def test_mistakes_are_refused_with_a_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    printed, message = capsys.readouterr()
    assert printed == ""  # nothing has been solved
    assert re.fullmatch(r"jaxpg: .*\n", message)
    assert sentence in message
    assert not list(Path.cwd().glob("*.png"))


def test_a_world_without_an_end_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", world(rows="4", columns="4", walls="[[2, 0], [2, 1], [3, 1]]")]) == 2
    assert "No terminal state is within reach of the start" in capsys.readouterr().err
