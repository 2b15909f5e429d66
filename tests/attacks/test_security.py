"""Attacks by a run of somebody else, by names and texts, and over the network.

SECURITY.md names each of these tests beside the promise that it attacks.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest
from refusals import refused
from rich.console import Console
from rich.table import Table
from test_processes import SHORT, TASK, ends, free_port, process, processes

from jaxpg import envs, report
from jaxpg.cli import devices, trust
from jaxpg.cli.main import main
from jaxpg.cli.parser import make_parser
from jaxpg.envs.mdps import Grid
from jaxpg.errors import UserError
from jaxpg.experiments import config as configs
from jaxpg.experiments.completions import Sample
from jaxpg.experiments.sections import check_name
from jaxpg.report import heatmap
from jaxpg.report.summaries import RunResult
from jaxpg.runs.terminal import heading, make_console
from jaxpg.training import checkpoint
from jaxpg.user_input import user_code
from jaxpg.user_input.printable import printable

ROOT = Path(__file__).parent.parent.parent
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e"
"""Name the terminal's window, clear it, colour it, overwrite the line and turn the direction of writing round."""
MARKUP = "[red]a[bold] :smile: $x_{$ \\$ <script>alert(1)</script> \" ' &amp;"
"""Markup of rich, formulas of matplotlib, HTML."""


class Payload(NamedTuple):
    """A module on the path that leaves a file behind if it is imported or called."""

    name: str
    marker: Path

    def executed(self) -> str | None:
        return self.marker.read_text() if self.marker.exists() else None


@pytest.fixture
def payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Payload:
    folder = tmp_path / "modules"
    folder.mkdir()
    marker, module = tmp_path / "executed", f"payload_{re.sub(r'[^0-9a-z]', '_', tmp_path.name)}"
    (folder / f"{module}.py").write_text(
        f"from pathlib import Path\nfrom jaxpg import envs\nPath({str(marker)!r}).write_text('imported')\n"
        f"def run(*arguments):\n    Path({str(marker)!r}).write_text('called')\n"
        "    return envs.make('Catch-bsuite')\n"
    )
    monkeypatch.syspath_prepend(folder)
    return Payload(f"{module}:run", marker)


def hostile_run(directory: Path, payload: Payload, how: str = "environment") -> Path:
    """The directory of a run that names the payload, as its environment or as another part."""
    directory.mkdir(parents=True)
    data = directory / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}=", "answer": str(i)}) + "\n" for i in range(40)))
    judge = json.dumps(str(data))
    settings = {
        "environment": f'environment = "{payload.name}"\n',
        "section": f'environment = "Catch-bsuite"\n[a2c]\nenvironment = "{payload.name}"\n',
        "time limit": f'environment = "{payload.name}"\n[a2c]\nanneal_steps = "time_limit"\n',
        "judge": 'environment = "json_lines"\nnetwork = { kind = "transformer" }\n'
        f'environment_settings = {{ path = {judge}, match = "{payload.name}" }}\n',
    }
    catch = 'environment = "Catch-bsuite"\n'
    for part in ("network", "optimizer", "schedule"):
        settings[part] = f'{catch}{part} = {{ kind = "{payload.name}" }}\n'
    settings["callback"] = f'{catch}callbacks."{payload.name}" = {{}}\n'
    settings["algorithm"] = catch
    algorithm = {"judge": "sft", "algorithm": payload.name}.get(how, "a2c")
    (directory / "config.toml").write_text(f'task = "catch"\nalgorithm = "{algorithm}"\n{settings[how]}')
    return directory


OPENING = [
    (how, command)
    for how, commands in {
        "environment": [
            "eval RUN",
            "play RUN --gif NEW.gif",
            "sample RUN",
            "train catch a2c --resume --out RUN",
            "train catch a2c --from RUN --out NEW",
        ],
        "section": ["eval RUN"],
        "judge": [
            "eval RUN",
            "sample RUN",
            "train sort grpo --from RUN --out NEW",
            "train summarise_toy rlhf --set initial=none --reward RUN --out NEW",
        ],
        "time limit": ["eval RUN"],
        "algorithm": ["eval RUN", "export RUN", "resume RUN"],
        "network": ["eval RUN", "export RUN"],
        "optimizer": ["eval RUN"],
        "schedule": ["play RUN --gif NEW.gif"],
        "callback": ["resume RUN"],
    }.items()
    for command in commands
]


@pytest.mark.parametrize(("how", "command"), OPENING, ids=[f"{how}: {command}" for how, command in OPENING])
def test_opening_a_run_executes_nothing_that_it_names(
    how: str, command: str, payload: Payload, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence says what would be imported and called, and how to allow it."""
    run = hostile_run(tmp_path / "run", payload, how)
    arguments = [word.replace("RUN", str(run)).replace("NEW", str(tmp_path / "new")) for word in command.split()]
    message = refused(capsys, *arguments)
    module, _, function = payload.name.partition(":")
    assert f"{payload.name} is named by a run and not on this command line" in message
    assert f"import {module} and call {function}" in message
    assert "add --trust-code" in message
    assert payload.executed() is None
    assert not (tmp_path / "new").exists()


def test_a_stage_of_a_run_executes_nothing_that_it_names(
    payload: Payload, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finished first stage lies where the run looks for its own."""
    stage = hostile_run(tmp_path / "run" / "sft", payload, "judge")
    about = {"bytes": 0, "checksum": 0, "seconds": 0.0, "config": {}}
    checkpoint.save(stage / "checkpoints", {"w": np.zeros(2)}, steps=10**9, about=about)
    command = ["train", "sort", "grpo", "--out", str(tmp_path / "run"), "--quiet"]
    assert "sft has another config" in refused(capsys, *command)
    assert payload.executed() is None


def test_a_plot_of_ones_own_run_needs_no_trust(payload: Payload, tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "run", payload)
    row = {"steps": [10], "return": [1.0], "seconds": 1.0, "chunk_seconds": 1.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row | {"steps": [i]}) + "\n" for i in (10, 20)))
    assert main(["plot", str(run), "--out", str(tmp_path / "curve.svg")]) == 0
    assert payload.executed() is None


def test_trust_is_given_by_name(payload: Payload, tmp_path: Path) -> None:
    """On this command line or in a task's file that it names; a run directory gives none, --trust-code gives all."""
    (tmp_path / "mine.toml").write_text(f'environment = "catch"\n[a2c]\nenvironment = "{payload.name}"\n')
    run = str(hostile_run(tmp_path / "run", payload))
    trusting = [
        ["eval", run, "--trust-code"],
        ["train", "catch", "a2c", "--set", f"environment={payload.name}"],
        ["train", "catch", "a2c", "--out", run, "--resume", "--trust-code"],
        ["train", str(tmp_path / "mine.toml"), "a2c"],
        ["sweep", "catch", "a2c", "--grid", f"network.kind={payload.name},mlp"],
        ["train", "catch", payload.name],
        ["train", "catch", "a2c", "--set", f"network.kind={payload.name}"],
        ["train", "catch", "a2c", "--set", f"callbacks.{payload.name}.patience=3"],
        ["list", "options", payload.name],
    ]
    for command in trusting:
        assert trust.trusted_by(make_parser().parse_args(command))(payload.name), command
    for command in (
        ["eval", run],
        ["plot", run],
        ["train", "catch", "a2c", "--out", run, "--resume"],
        ["train", "catch", "a2c", "--from", run],
        ["sweep", "catch", "a2c", "--grid", f"network.kind={payload.name}2,mlp"],
    ):
        is_trusted = trust.trusted_by(make_parser().parse_args(command))
        assert not is_trusted(payload.name), command
        with user_code.trust(is_trusted), pytest.raises(UserError, match="add --trust-code"):
            envs.default_settings(payload.name)
    assert payload.executed() is None


def test_trusted_code_is_executed(payload: Payload, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the option the run is built, and fails later, since it has no checkpoint. The next command trusts nobody."""
    run = hostile_run(tmp_path / "run", payload)
    assert "has no checkpoint" in refused(capsys, "eval", str(run), "--trust-code")
    assert payload.executed() == "called"
    payload.marker.unlink()
    assert "add --trust-code" in refused(capsys, "eval", str(run))
    assert payload.executed() is None


def test_a_python_program_says_that_it_trusts_a_run(payload: Payload, tmp_path: Path) -> None:
    for how in ("environment", "section", "time limit", "judge", "algorithm", "network", "optimizer", "callback"):
        run = hostile_run(tmp_path / how, payload, how)
        with pytest.raises(UserError, match=r"names code .* would import payload_\w+ and call run.* trust_code=True"):
            configs.load_config(run)
        assert payload.executed() is None
    configs.make_env(configs.load_config(tmp_path / "environment", trust_code=True))
    assert payload.executed() == "called"


def test_the_code_that_a_run_would_run_is_named_once() -> None:
    names = {"algorithm": "mine:call", "network": {"kind": "mine:call"}, "mine:call": {"schedule": "mine:other"}}
    with pytest.raises(UserError, match=r"this would import mine and call call, and import mine and call other\. If"):
        user_code.refuse_code_of_run(Path("run"), names)


def test_a_config_is_read_once(payload: Payload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is built is what was found to name no code, also if another file has taken its place since."""
    refuse_code, run = user_code.refuse_code_of_run, tmp_path / "run"
    hostile = hostile_run(tmp_path / "hostile", payload)
    run.mkdir()
    (run / "config.toml").write_text('algorithm = "ppo"\nenvironment = "CartPole-v1"\n')

    def check_then_swap(*arguments: Any) -> None:
        refuse_code(*arguments)
        (hostile / "config.toml").replace(run / "config.toml")

    monkeypatch.setattr(user_code, "refuse_code_of_run", check_then_swap)
    assert configs.load_config(run).environment == "CartPole-v1"
    assert payload.executed() is None


def test_code_is_imported_by_name_in_one_place() -> None:
    """Nothing else in jaxpg can execute what a file names; the package's own face imports its own modules."""
    dangerous = {"import_module", "__import__", "eval", "exec", "compile", "system", "Popen", "run_path", "pickle",
                 "marshal", "load_module", "loads_pickle"}  # fmt: skip
    found = {
        (path.name, name)
        for path in (ROOT / "jaxpg").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call | ast.Import)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [getattr(node.func, "id", getattr(node.func, "attr", ""))]
        )
        if name in dangerous and not (isinstance(node, ast.Call) and "re." in ast.unparse(node.func))
    }
    # `compile` of compiled programs is jax's; table.py imports those of jaxpg's own adapters that stand in its table
    found -= {("memory.py", "compile"), ("table.py", "import_module")}
    assert found == {("user_code.py", "import_module"), ("__init__.py", "import_module")}


def test_restoring_a_checkpoint_executes_nothing(payload: Payload, tmp_path: Path) -> None:
    """Every class and type that the checkpoint's own files name is the payload."""
    path = checkpoint.save(tmp_path, {"w": np.arange(3.0)}, steps=1, about={}).path
    forged = 0
    for file in [file for file in path.rglob("*") if file.is_file()]:
        with contextlib.suppress(ValueError):
            text = json.dumps(_renamed(json.loads(file.read_text()), payload.name.replace(":", ".")))
            forged += payload.name.replace(":", ".") in text
            file.write_text(text)
    assert forged >= 2
    with contextlib.suppress(Exception), checkpoint._orbax() as checkpointer:
        checkpointer.restore(path.absolute() / "state")
    assert payload.executed() is None


def _renamed(tree: Any, name: str) -> Any:
    if isinstance(tree, Mapping):
        return {key: _renamed(value, name) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_renamed(value, name) for value in tree]
    return name if isinstance(tree, str) and re.search("orbax|ndarray|Array", tree) else tree


@pytest.mark.parametrize(
    ("text", "keep", "shown"),
    [
        ("a\x1b[31mb", "", r"a\x1b[31mb"),
        ("a\nb\tc\r", "", r"a\nb\tc\r"),
        ("a\nb\tc\r", "\n\t", "a\nb\tc\\r"),
        ("\x9b2J \u202e \u2028 \ufeff \x7f", "", r"\x9b2J \u202e \u2028 \ufeff \x7f"),
        ("bytes that are no text: \udcff", "", r"bytes that are no text: \udcff"),
        ("Grüße, 漢字 λ ✓ 1\u202f000 \\x1b", "", "Grüße, 漢字 λ ✓ 1\u202f000 \\x1b"),
        (Path("a/b"), "", "a/b"),
    ],
)
def test_printable(text: object, keep: str, shown: str) -> None:
    assert printable(text, keep) == shown


@pytest.mark.parametrize(
    "command",
    [
        ["train", f"{ESCAPES}.toml", "ppo"],
        ["train", f"{ESCAPES}", "ppo"],
        ["train", "catch", ESCAPES],
        ["train", "catch", "a2c", "--set", f"environment={ESCAPES}"],
        ["train", "catch", "a2c", "--set", f"{ESCAPES}=3"],
        ["eval", ESCAPES],
        ["sweep", "catch", "a2c", "--grid", f"{ESCAPES}=3"],
        ["list", "options", ESCAPES],
        [ESCAPES],
        ["list", "tasks", "ppo", f"--{ESCAPES}"],
        ["train", "catch", "a2c", "--seeds", ESCAPES],
    ],
    ids=lambda command: " ".join(command).replace(ESCAPES, "ESCAPES"),
)
def test_errors_show_escape_codes_and_do_not_send_them(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(SystemExit):  # of argparse
        assert main(command) == 2
    printed = "".join(capsys.readouterr())
    assert r"\x1b" in printed
    assert not set(ESCAPES) & set(printed) - set(printable(ESCAPES))


def shown(renderable: object) -> str:
    """What a console of rich's own shows, without colours and in a wide window."""
    stream = io.StringIO()
    Console(file=stream, width=1000, color_system=None, force_terminal=True).print(renderable)
    return stream.getvalue()


def test_names_act_neither_as_markup_nor_as_escape_codes_in_the_terminal() -> None:
    name = MARKUP + ESCAPES
    sample = Sample(name, f"{name}\n[/red]", 1.0, 1.0)
    result = RunResult(np.array([1, 2]), np.ones((2, 2)), np.ones(2), 1.0, 1.0)
    summaries = report.summarize({name: result})
    for renderable in (
        heading(name, name, Path(f"{name}/[/red]")),
        sample.line(),
        report.comparison_table(summaries, title=f"{name}[/red]"),
        report.sweep_table({name: [f"{name}[/red]", 1]}, np.ones((2, 3)), title=f"{name}[/red]"),
    ):
        text = shown(renderable)
        assert MARKUP in text
        assert not set("\x1b\x07\x9b\r\u202e") & set(text)


def test_consoles_of_the_command_line_read_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Also not in the cells of a table; every console of the command line is such a one."""
    table = Table("[/x] [red]", title=":smile:")
    table.add_row("[red]cell[/x]")
    for console in (make_console(), make_console(soft_wrap=True)):
        console.print("[/x][red] :smile:")
        console.print(table)
        printed = capsys.readouterr().out
        assert all(text in printed for text in ("[/x][red] :smile:", "[/x] [red]", "[red]cell[/x]"))
        assert printed.count(":smile:") == 2
    rooms = [path for room in ("cli", "runs") for path in (ROOT / "jaxpg" / room).glob("*.py")]
    makers = [path.name for path in rooms if re.search(r"Console\(", path.read_text("utf-8"))]
    assert makers == ["terminal.py"]


def test_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    """A formula between two dollar signs, or half of one, which matplotlib refuses."""
    name, other = "[red]$x_{$\x1b[2J\u202e", "$\\alpha$"
    curves = {key: (np.array([1, 2]), np.ones((2, 2))) for key in (name, other)}
    report.learning_curve(curves, tmp_path / "curve.svg", title=name)
    broken = {f"{i}{'a' * 22}$x_{{$": curve for i, curve in enumerate([curves[name]] * 7)}  # within a formula
    report.learning_curve(curves | broken, tmp_path / "panels.svg", title=name)
    grid = {name: [other, name], other: [1, 2], "[x] $y$": [name]}
    heatmap.sweep_figure(grid, np.arange(8.0).reshape(4, 2), tmp_path / "map.svg", title=name)
    heatmap.sweep_figure({name: [other, name]}, np.ones((2, 2)), tmp_path / "line.svg", title=name)
    maps = {key: report.ValueMap(np.ones(4), np.ones((4, 4))) for key in (name, other)}
    report.value_figure(maps, Grid(2, 2, {}), tmp_path / "values.svg", title=name)
    for file, times in (("curve.svg", 2), ("panels.svg", 2), ("map.svg", 4), ("line.svg", 3), ("values.svg", 2)):
        drawn = " ".join(ElementTree.parse(tmp_path / file).getroot().itertext())
        assert drawn.count(r"[red]$x_{$\x1b[2J\u202e") >= times, file
        assert other in drawn


class Tags(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_pages_show_names_and_completions_as_text() -> None:
    name = "</title></pre><script>'\"$x_{$\x1b[2J\udcff"
    run = RunResult(np.array([1, 2]), np.ones((2, 2)), np.ones(2), 1.0, 1.0)

    def page(name: str) -> Tags:
        details = {name: name, "table": {name: name, "inner": {name: name}}}
        written = {name: {name: [Sample(name, name, 1.0, 1.0)]}}
        units = report.Units(name, name)
        runs = {name: run._replace(warnings=[name])}
        html = report.comparison_page(
            runs, title=name, threshold=0.5, details=details, completions=written, units=units
        )
        html.encode()
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", html)
        return Tags(html)

    hostile, harmless = page(name), page("name")
    assert (hostile.tags, hostile.attributes) == (harmless.tags, harmless.attributes)
    assert hostile.text.count(printable(name)) >= 9


def test_output_that_is_not_utf_8_shows_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    written = {}
    for encoding in ("utf-8", "ascii", "latin-1"):
        with monkeypatch.context() as patch:
            stream = io.BytesIO()
            patch.setattr(sys, "stdout", io.TextIOWrapper(stream, encoding=encoding))
            assert main(["list", "options", "dapo"]) == 0
            make_console().print(Sample("漢", "字", 1.0, 1.0).line())
            sys.stdout.flush()
            written[encoding] = stream.getvalue().decode(encoding)
    assert "✓ 漢字" in written["utf-8"]
    assert r"\u2713 \u6f22\u5b57" in written["ascii"]
    assert r"\u2713 \u6f22\u5b57" in written["latin-1"]


@pytest.mark.full
def test_a_text_run_ends_well_where_output_is_not_utf_8(tmp_path: Path) -> None:
    """In a locale that is not UTF-8 either: prompts and answers with letters that it lacks."""
    rows = [json.dumps({"prompt": f"λ{i}→", "answer": "ü" * (1 + i % 2)}, ensure_ascii=False) for i in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows), "utf-8")
    path = json.dumps(str(tmp_path / "data.jsonl"))
    (tmp_path / "x.toml").write_text(
        f'task = "ü"\nenvironment = "json_lines"\nenvironment_settings = {{ path = {path} }}\n'
        'network = { kind = "transformer", width = 16, layers = 1 }\nevaluations = 1\nevaluation_episodes = 4\n'
        "total_steps = 200\n[sft]\nbatch_size = 8\n",
        "utf-8",
    )
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = os.environ | plain | {"JAX_PLATFORMS": "cpu"}
    out = str(tmp_path / "run")
    for command in (
        ["train", "x.toml", "sft", "--out", out],
        ["sample", out],
        ["train", "x.toml", "sft", "--out", out, "--resume", "--steps", "400"],
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "jaxpg", *command], env=environment, cwd=tmp_path, capture_output=True, check=False
        )
        assert (ended.returncode, ended.stderr) == (0, b""), (command, ended.stderr)
        assert ended.stdout.isascii()


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/b", "a\\b", "..", ".x", "", "a\nb", "a\x1b[2J", "x" * 101, 3])
def test_a_task_name_that_leaves_the_directory_of_runs_is_refused(
    name: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is written."""
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "deeper")
    Path("x.toml").write_text(f'task = {json.dumps(name)}\nenvironment = "Catch-bsuite"\n', encoding="utf-8")
    message = refused(capsys, "train", "x.toml", "a2c")
    assert "The name of a task" in message
    assert printable(repr(name)) in message
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["x.toml"]


@pytest.mark.parametrize("name", ["x", "CartPole-v1", "[red] $x$ ü 漢", "2024-01-01 12.30", "a..b"])
def test_a_task_may_be_named_freely(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    ("coordinator", "address"),
    [
        ("127.0.0.1:1234", "127.0.0.1:1234"),
        ("localhost:1234", "127.0.0.1:1234"),
        ("0.0.0.0:1234", "0.0.0.0:1234"),
        ("192.0.2.77:1234", None),  # of no machine
        ("some-host:1234", None),
        (None, None),
    ],
)
def test_process_0_listens_where_it_was_told(coordinator: str | None, address: str | None) -> None:
    assert devices.bind_address(coordinator) == address


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs Linux")
def test_the_coordinator_of_loopback_listens_on_loopback_alone(tmp_path: Path) -> None:
    """Read off the open sockets: local addresses end in 0100007F for 127.0.0.1, also within IPv6."""
    port = free_port()
    code = f"""
from pathlib import Path
from jaxpg.cli import devices

devices.start_jax(devices.DeviceOptions(
    distributed=True, coordinator="127.0.0.1:{port}", processes=1, process=0, out=Path("unused")
))
lines = [line.split() for table in ("tcp", "tcp6") for line in open(f"/proc/self/net/{{table}}").readlines()[1:]]
print(*[fields[1] for fields in lines if fields[3] == "0A" and fields[1].endswith(":{port:04X}")])
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    listening = ended.stdout.split()
    assert listening, ended.stderr
    assert all(address.split(":")[0].endswith("0100007F") for address in listening), listening


def test_processes_that_differ_are_named() -> None:
    same = {"task": "catch", "devices": "4", "out": "/runs/a"}
    devices.refuse_different([same, same, dict(same)])
    with pytest.raises(UserError, match="devices is 4 in process 0 and 2 in process 2"):
        devices.refuse_different([same, same, same | {"devices": "2"}])
    with pytest.raises(UserError, match="out is /runs/a in process 0 and /runs/b in process 1"):
        devices.refuse_different([same, same | {"out": "/runs/b"}])


@pytest.mark.full
def test_processes_with_other_devices_end_with_a_sentence(tmp_path: Path) -> None:
    port, run, began = free_port(), [], time.monotonic()
    try:
        for i, number in enumerate(("4", "2")):
            several = ["--distributed", "--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process", str(i)]
            command = [*TASK, *SHORT, "--out", str(tmp_path / "run"), "--devices", number, *several]
            run.append(process(command, JAX_NUM_CPU_DEVICES="2"))
        endings = ends(run)
    finally:
        for one in run:
            one.kill()
            one.wait()
    expected = "jaxpg: The processes of this run got different arguments: devices is 4 in process 0 and 2 in process 1."
    assert [(code, out, errors[: len(expected)], errors.count("\n")) for code, out, errors in endings] == [
        (2, "", expected, 1)
    ] * 2
    assert time.monotonic() - began < 60
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_process_with_another_directory_ends_with_a_sentence(tmp_path: Path) -> None:
    with processes(2, tmp_path / "a", each=[[], ["--out", str(tmp_path / "b")]]) as run:
        endings = ends(run)
    assert [(code, out) for code, out, _ in endings] == [(2, "")] * 2
    for _, _, errors in endings:
        assert f"out is {tmp_path / 'a'} in process 0 and {tmp_path / 'b'} in process 1" in errors
    assert not list(tmp_path.iterdir())


def test_every_promise_names_a_test_that_is_there() -> None:
    """Each item of SECURITY.md that begins in bold, before the section on what is not promised."""
    promised, _, _ = (ROOT / "SECURITY.md").read_text("utf-8").partition("## Not promised")
    tests = {path.name: path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    promises = [item for item in promised.split("\n- ")[1:] if item.startswith("**")]
    assert len(promises) >= 12
    for promise in promises:
        names = re.findall(r"`(test_\w+)`", promise)
        files = [Path(name).name for name in re.findall(r"`(tests/[\w/]+\.py)`", promise.partition("\n\n")[0])]
        assert names or files, promise
        assert set(files) <= set(tests)
        assert all(any(f"def {name}(" in text for text in tests.values()) for name in names), names
