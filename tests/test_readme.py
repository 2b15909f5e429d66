"""The README, docs/ and ARCHITECTURE.md match the package: code, commands, tables and the tree of files."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpg import ladder, values
from jaxpg.cli.main import main
from jaxpg.cli.options import overrides_of
from jaxpg.cli.parser import make_parser
from jaxpg.experiments import resolve_config
from jaxpg.experiments.build import build
from jaxpg.experiments.config import task_options
from jaxpg.experiments.parts import ALGORITHMS
from jaxpg.ladder_settings import PARENTS

ROOT = Path(__file__).parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
README = PAGES["README.md"]
KEY = jax.eval_shape(lambda: jax.random.key(0))


def blocks(language: str, page: str = README) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [text for named, text in fenced if named == language]


def commands(block: str) -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in block.splitlines() if line.startswith("jaxpg ")]


def code_of(page: str) -> list[str]:
    """The blocks of Python of a page that are programs, and not the module of a user's."""
    return [block for block in blocks("python", PAGES[page]) if not re.match(r"# \w+\.py\n", block)]


@pytest.mark.parametrize(
    "block", [code_of("README.md")[0], *code_of("docs/python.md")[-3:], *code_of("docs/algorithm.md")]
)
def test_code_runs_as_it_stands(block: str) -> None:
    exec(compile(block, "a page", "exec"), {"__name__": "__main__"})


@pytest.mark.full
def test_code_for_language_runs_as_it_stands() -> None:
    blocks_of_page = code_of("docs/language.md")
    assert len(blocks_of_page) == 2
    for block in blocks_of_page:
        exec(compile(block, "docs/language.md", "exec"), {"__name__": "__main__"})


@pytest.mark.full
@pytest.mark.parametrize(
    "page",
    [
        "network",
        "verifier",
        "policies",
        pytest.param("text_task", marks=pytest.mark.skipif("JAXPG_LONG" not in os.environ, reason="JAXPG_LONG=1")),
    ],
)
def test_the_pages_of_ones_own_are_as_they_say(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their blocks in order: modules and tasks become files, programs and commands run, with fewer steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", PAGES[f"docs/{page}.md"], re.MULTILINE | re.DOTALL):
        if named := re.match(r"# (\w+\.(?:py|toml))\n", block):
            (tmp_path / named[1]).write_text(block, encoding="utf-8")
        elif language == "python" and "load_policy" not in block:  # tests/test_runs.py flies that one
            exec(compile(block, page, "exec"), {"__name__": "__main__"})
        elif language == "bash":
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                if words[0] == "export":
                    assert words[1:] == ["PYTHONPATH=."]  # as `syspath_prepend` above
                elif words[0] == "python":
                    exec(compile((tmp_path / words[1]).read_text(), words[1], "exec"), {"__name__": "__main__"})
                else:
                    fewer = ["--steps", "600", "--set", "evaluations=1", "--quiet"] if words[1] == "train" else []
                    assert main([*words[1:], *fewer]) == 0, line


SHOWN = [
    (page, command) for page, text in PAGES.items() for block in blocks("bash", text) for command in commands(block)
]


@pytest.mark.parametrize("page", sorted({page for page, _ in SHOWN}))
def test_every_command_of_a_page_is_understood(page: str) -> None:
    """The parser knows its arguments, and jaxpg its task, algorithms and settings; a user's own are not looked at."""
    for command in (command for where, command in SHOWN if where == page):
        arguments = make_parser().parse_args(command[1:])
        trains = arguments.command in ("train", "compare", "sweep")
        if trains and not re.search(r"\w+:[a-zA-Z]|[.]toml", shlex.join(command)):
            for algorithm in arguments.algorithms:
                resolve_config(arguments.task, algorithm, overrides_of(arguments))


@pytest.mark.full
def test_an_environment_of_ones_own_is_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/environments.md: its code as a module, under the commands that the page shows for it."""
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    (code,) = blocks("python", page)
    assert len([line for line in code.split("def corridor")[1].splitlines() if line.strip()]) <= 20
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shown = [command for block in blocks("bash", page) for command in commands(block) if "mine:corridor" in command]
    assert [command[1] for command in shown] == ["check", "train"]
    for command in shown:
        assert main([*command[1:], *(["--steps", "4000", "--quiet"] if command[1] == "train" else [])]) == 0


@pytest.mark.full
def test_the_page_for_python_is_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/python.md: its code and its commands in order; the file of a task is resolved. tests/test_runs.py flies."""
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    first, mine, *_ = blocks("python", page)  # the others run by themselves, above
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


LANGUAGE = ("docs/command_line.md", "docs/language.md")


@pytest.mark.full
@pytest.mark.parametrize(
    "block", [block for page in LANGUAGE for block in blocks("bash", PAGES[page]) if "jaxpg train" in block]
)
def test_commands_work_in_order(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a block in one directory, as written but for fewer environment steps and seeds."""
    monkeypatch.chdir(tmp_path)
    for command in commands(block):
        fewer = ["--steps", "4000", "--seeds", "2"] if command[1] in ("train", "compare") else []
        assert main([*command[1:], *fewer]) == 0, shlex.join(command)
    made = {path for path in re.findall(r"[\w/]+\.(?:gif|png)", block) if not path.startswith("runs/")}
    begin = {path: (tmp_path / path).read_bytes()[:4] for path in made}
    assert begin == {path: b"GIF8" if path.endswith("gif") else b"\x89PNG" for path in made}


def test_the_readme_shows_what_the_pages_show() -> None:
    """So its commands need no run of their own, nor have its programs."""
    fit, fly = code_of("README.md")
    assert code_of("docs/index.md") == [fit]
    assert code_of("docs/gymnasium.md") == [fly.replace("runs/ppo", "runs/host")]
    there = {
        shlex.join(command) for page in LANGUAGE for block in blocks("bash", PAGES[page]) for command in commands(block)
    }
    assert {shlex.join(command) for block in blocks("bash") for command in commands(block)} <= there


@pytest.mark.parametrize("block", blocks("toml", PAGES["docs/config.md"]))
def test_files_of_tasks_are_read_as_they_stand(block: str, tmp_path: Path) -> None:
    """Every section and every stage of docs/config.md, by the reader that the commands have."""
    path, tables = tmp_path / "task.toml", tomllib.loads(block)
    path.write_text(block, encoding="utf-8")
    trained = [*(name for name in tables if name in ALGORITHMS), *tables.get("stages", {})]
    assert trained
    for name in trained:
        resolve_config(path, name)


def test_every_key_of_a_task_is_on_the_page() -> None:
    """With its default: of a table, that it is empty."""
    page = PAGES["docs/config.md"].partition("## Keys of the top level")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE))
    assert rows.pop("environment") == "required"
    assert rows.pop("task") == "name of the file"
    assert rows.pop("stages") == "`{}`"
    expected = {name: {} if option.kind is dict else option.default for name, option in task_options().items()}
    del expected["environment"]
    written = {name: tomllib.loads(f"x = {default.strip('`')}")["x"] for name, default in rows.items()}
    assert written == {name: _plain(default) for name, default in expected.items()}


def _plain(default: Any) -> Any:
    """A default as TOML has it."""
    return list(default) if isinstance(default, tuple) else "none" if default is None else default


def test_every_kind_of_command_is_shown() -> None:
    shown = {command[1] for page, command in SHOWN if page in LANGUAGE}
    kinds = {"train", "eval", "play", "sample", "compare", "sweep", "plot", "plan", "gridworld", "list"}
    assert shown == kinds


LOOP = {"steps", "iteration", "iterations", "seconds", "chunk_seconds"}
"""What the training loop writes beside the metrics of a learner."""
LEARNERS = (
    ("cartpole", "trpo"),
    ("cartpole", "dqn"),
    ("modular_chain", "process_grpo"),
    ("summarise_toy", "dpo"),
    ("cartpole", "rlhf"),
    ("lunar_lander", "ppo"),
)


@pytest.mark.full
def test_the_table_of_metrics_has_what_is_written() -> None:
    """Every metric of a learner and of its evaluation is in docs/metrics.md, and every line of it is written by one."""
    table = re.findall(r"^\| `([^`]+)` \|", PAGES["docs/metrics.md"], re.MULTILINE)
    patterns = {name: re.sub("[A-Z]+", r"[\\w@]+", name) for name in table}
    written = set(LOOP)
    for task, algorithm in LEARNERS:
        overrides = {
            "process_grpo": {"kl": "loss_k3", "rewards": {"accuracy": 1.0, "format": 0.1}},
            "rlhf": {"reference_kl_target": 1.0},
        }.get(algorithm, {})
        experiment = build(resolve_config(task, algorithm, overrides))
        state = jax.eval_shape(experiment.learner.init, KEY)
        written |= set(jax.eval_shape(experiment.learner.step, state, KEY)[1])
        written |= {f"evaluation_{name}" for name in jax.eval_shape(experiment.evaluate, state, KEY)}
    lacking = {name for name in written if not any(re.fullmatch(pattern, name) for pattern in patterns.values())}
    assert lacking == set()
    plain = written | {name.removeprefix("evaluation_") for name in written}
    assert [name for name in table if not any(re.fullmatch(patterns[name], x) for x in plain)] == []


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_lines_of_user_code_are_those_of_the_page() -> None:
    """docs/beside.md counts what it shows: neither empty lines nor comments nor one-line docstrings."""
    head, *tasks = re.split(r"^## (.*)$", PAGES["docs/beside.md"], flags=re.MULTILINE)
    rows = {cells[1].strip(): cells[2:-1] for cells in (x.split("|") for x in head.splitlines() if x.startswith("|"))}
    libraries = [name.strip() for name in rows["task"]]
    for title, text in zip(tasks[::2], tasks[1::2], strict=True):
        for library, cell in zip(libraries, rows[title], strict=True):
            _, _, code = text.partition(f"**{library}**\n")
            shown = re.findall(r"^```\w+\n(.*?)^```$", code.partition("\n**")[0], re.MULTILINE | re.DOTALL)
            lines = [line.strip() for block in shown for line in block.splitlines()]
            count = len([line for line in lines if line and not line.startswith(("#", '"""'))])
            assert not shown or int(cell) == count, (title, library)
            assert max(map(len, "".join(shown).splitlines()), default=0) <= 100, (title, library)
    assert len(rows) - 2 == len(tasks) / 2


def test_every_rung_has_a_page() -> None:
    """In the navigation and in the list of the line, with its diff and its code, and no other page has them."""
    listed = re.findall(r"\]\((\w+)\.md\)", PAGES["docs/line/index.md"])
    pages = {page.removeprefix("docs/line/").removesuffix(".md") for page in PAGES if page.startswith("docs/line/")}
    assert set(listed) == pages - {"index"}
    assert set(ladder.ALGORITHMS) <= pages
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [name for name in (*listed, "index") if f"line/{name}.md" not in navigation] == []
    for name in ladder.ALGORITHMS:
        assert f"<!-- code: jaxpg.ladder.{name}" in PAGES[f"docs/line/{name}.md"]
        assert (f"<!-- diff: {name} -->" in PAGES[f"docs/line/{name}.md"]) == (name in PARENTS)


def test_two_set_up_commands_on_one_line_each() -> None:
    assert len([line for block in blocks("bash") for line in block.splitlines() if line.startswith("python3 ")]) == 2


def test_ladder_table_is_the_ladder() -> None:
    """Policy gradients in the README, action values on the first page of the line."""
    text = README + PAGES["docs/line/index.md"]
    rows = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`|–) \|", text, re.MULTILINE)
    names = [*ladder.ALGORITHMS, *values.TABULAR_ALGORITHMS, *values.ALGORITHMS]
    assert [name for name, _ in rows] == names
    assert {name: parent or None for name, parent in rows} == {name: PARENTS.get(name) for name in names}


def test_counts_of_programs_are_those_of_the_results() -> None:
    """The table of README.md about accelerators, and benchmarks/results/aot.json."""
    results = json.loads((ROOT / "benchmarks" / "results" / "aot.json").read_text(encoding="utf-8"))["programs"]
    found = {(x["target"], x["library"], x["case"]): x for x in results}
    rows = README.split("TPU v5e, M cycles", 1)[1].splitlines()[2:5]
    for row, library in zip(rows, ("rejax", "purejaxrl", "jaxpg"), strict=True):
        gpu = found["cuda H100", library, "PPO, CartPole, 64"]
        cycles = [found["tpu v5e", library, f"PPO, CartPole, {n}"]["update"]["cycles"] for n in ("64", "2,048")]
        counts = [gpu["step"], gpu["minibatch"], gpu["update"]["kernels"], gpu["update"]["launches"]]
        expected = [f"{x:,}" for x in counts] + [f"{x / 1e6:.1f}" for x in cycles]
        assert [x.strip() for x in row.split("|")[2:-1]] == expected, library


def test_all_counts_of_programs_are_those_of_the_results() -> None:
    """The tables of benchmarks/README.md about accelerators, a row per program of benchmarks/results/aot.json."""
    results = json.loads((ROOT / "benchmarks" / "results" / "aot.json").read_text(encoding="utf-8"))["programs"]
    libraries = {"jaxpg": "jaxpg", "rejax": "rejax 0.1.3", "purejaxrl": "PureJaxRL"}
    expected = []
    for x in results:
        update, gpu = x["update"], x["unit"] == "kernels"
        counts = [x["step"], x["minibatch"], update[x["unit"]], *([update["launches"]] if gpu else [])]
        waits = [str(update["waits"]) if x["library"] == "jaxpg" else ""] if gpu else []
        cycles = [] if gpu else [f"{update['cycles'] / 1e6:,.1f}"]
        row = [f"{x['target'].split()[1]}, {x['case']}: {libraries[x['library']]}"]
        row += ["" if n is None else f"{n:,}" for n in counts] + waits + [str(update.get("exchanges", 0)), *cycles]
        expected.append([*row, f"{x['temporary_bytes'] / 1e6:,.1f}"])
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    rows = [
        [x.strip() for x in line.split("|")[1:-1]] for line in re.findall(r"^\| (?:H100|V100|v5e|v6e), .*", page, re.M)
    ]
    assert sorted(rows) == sorted(expected)


def tree() -> list[str]:
    """The paths of the tree in docs/files.md, in its order; a folder is the last line above that is indented less."""
    paths: list[str] = []
    for line in blocks("", PAGES["docs/files.md"])[0].splitlines():
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
    assert [line for line in blocks("", PAGES["docs/files.md"])[0].splitlines()[1:] if len(line.split()) < 2] == []


def test_files_that_answer_questions_are_there() -> None:
    """The table of ARCHITECTURE.md: its files are in the tree, and have what stands in brackets behind them."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    answers = [line.split("|")[2] for line in page.splitlines() if re.search(r"\| `jaxpg/", line)]
    assert len(answers) == 19
    for answer in answers:
        paths = re.findall(r"`(jaxpg/[\w/]+\.py)`", answer)
        assert set(paths) <= set(tree())
        for path, name in re.findall(r"`(jaxpg/[\w/]+\.py)` \(`(?:\w+\.)?(\w+)`\)", answer):
            assert re.search(rf"\b{name}\b", (ROOT / path).read_text(encoding="utf-8"))
