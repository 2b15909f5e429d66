"""The README and ARCHITECTURE.md match the package: code runs, commands work, tables and the file tree are true."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from jaxpg import ladder, values
from jaxpg.cli.main import main
from jaxpg.experiments import resolve_config
from jaxpg.ladder_settings import PARENTS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, page: str = README) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [text for named, text in fenced if named == language]


def commands(block: str) -> list[list[str]]:
    return [shlex.split(line) for line in block.splitlines() if line.startswith("jaxpg ")]


@pytest.mark.parametrize("block", blocks("python"))
def test_code_runs_as_it_stands(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.full
def test_an_environment_of_ones_own_is_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/environments.md: its code as a module, under the commands that the page shows for it."""
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    (code,) = blocks("python", page)
    assert len([line for line in code.split("def corridor")[1].splitlines() if line.strip()]) <= 20
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shown = [command for block in blocks("", page) for command in commands(block) if "mine:corridor" in command]
    assert [command[1] for command in shown] == ["check", "train"]
    for command in shown:
        assert main([*command[1:], *(["--steps", "4000", "--quiet"] if command[1] == "train" else [])]) == 0


@pytest.mark.full
def test_the_page_for_python_is_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/python.md: its code and its commands in order; the file of a task is resolved. tests/test_runs.py flies."""
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    first, mine, _ = blocks("python", page)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "mine", None)  # put back afterwards, whatever is imported here
    del sys.modules["mine"]
    exec(compile(first, "docs/python.md", "exec"), {"__name__": "__main__"})
    (tmp_path / "mine.py").write_text(mine)
    for command in commands(blocks("bash", page)[0]):
        assert main([*command[1:], *(["--quiet"] if command[1] == "train" else [])]) == 0
    (tmp_path / "task.toml").write_text(blocks("toml", page)[0])
    assert resolve_config(tmp_path / "task.toml", "mine:spo").settings["radius"] == 0.1


@pytest.mark.full
@pytest.mark.parametrize("block", [block for block in blocks("bash") if "jaxpg train" in block and "venv" not in block])
def test_commands_work_in_order(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a block in one directory, as written but for fewer environment steps and seeds."""
    monkeypatch.chdir(tmp_path)
    for command in commands(block):
        fewer = ["--steps", "4000", "--seeds", "2"] if command[1] in ("train", "compare") else []
        assert main([*command[1:], *fewer]) == 0, shlex.join(command)
    made = {path for path in re.findall(r"[\w/]+\.(?:gif|png)", block) if not path.startswith("runs/")}
    begin = {path: (tmp_path / path).read_bytes()[:4] for path in made}
    assert begin == {path: b"GIF8" if path.endswith("gif") else b"\x89PNG" for path in made}


def test_every_kind_of_command_is_shown() -> None:
    shown = [command for block in blocks("bash") for command in commands(block)]
    assert {command[1] for command in shown} == {
        "train",
        "eval",
        "play",
        "sample",
        "compare",
        "sweep",
        "plot",
        "plan",
        "gridworld",
        "list",
    }


def test_two_set_up_commands_on_one_line_each() -> None:
    assert len([line for block in blocks("bash") for line in block.splitlines() if line.startswith("python3 ")]) == 2


def test_ladder_table_is_the_ladder() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`|–) \|", README, re.MULTILINE)
    names = [*ladder.ALGORITHMS, *values.TABULAR_ALGORITHMS, *values.ALGORITHMS]
    assert [name for name, _ in rows] == names
    assert {name: parent or None for name, parent in rows} == {name: PARENTS.get(name) for name in names}


def tree() -> list[str]:
    """The paths of the README's tree, in its order: a line's folder is the last one above it that is indented less."""
    paths: list[str] = []
    for line in blocks("")[0].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        folder = "" if depth == 0 else next(x for x in reversed(paths) if x.endswith("/") and x.count("/") == depth)
        paths.append(folder + line.split()[0])
    return paths


def test_file_tree_is_the_package() -> None:
    """Every folder and every file of jaxpg/ once; the face of a folder goes with it."""
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "jaxpg").rglob("*.py")}
    folders = {name.removesuffix("__init__.py") for name in files if name.endswith("__init__.py")}
    there = {name for name in files if not name.endswith("/__init__.py")} | folders | {"jaxpg/__init__.py"}
    assert sorted(path for path in tree() if path.startswith("jaxpg/")) == sorted(there)
    assert all((ROOT / path).is_dir() for path in tree() if not path.startswith("jaxpg/"))


def test_every_line_of_the_tree_says_what_is_there() -> None:
    assert [line for line in blocks("")[0].splitlines()[1:] if len(line.split()) < 2] == []


def test_files_that_answer_questions_are_there() -> None:
    """The table of ARCHITECTURE.md: each file is in the README's tree, and has what stands in brackets behind it."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    answers = [line.split("|")[2] for line in page.splitlines() if re.search(r"\| `jaxpg/", line)]
    assert len(answers) == 19
    for answer in answers:
        paths = re.findall(r"`(jaxpg/[\w/]+\.py)`", answer)
        assert set(paths) <= set(tree())
        for name in re.findall(r"\.py` \(`(?:\w+\.)?(\w+)`\)", answer):
            assert re.search(rf"\b{name}\b", (ROOT / paths[0]).read_text(encoding="utf-8"))
