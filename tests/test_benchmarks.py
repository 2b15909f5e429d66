"""What the programs in benchmarks/ ask of each other, where nothing has to be measured to see it."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import pytest
from rich.console import Console

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import before_after  # noqa: E402
import mutations  # noqa: E402
import padding_worker  # noqa: E402
import result_files  # noqa: E402
import throughput  # noqa: E402
from workloads import WORKLOADS  # noqa: E402


def test_every_row_of_a_table_is_a_program_that_there_is() -> None:
    rows = [row for case in (*throughput.CASES, *throughput.ONE_AGENT) for row in case.programs]
    rows += [*throughput.COLLECTING, *map(throughput.Row, throughput.LEARNERS), *throughput.QUICK.programs]
    rows += [row for *_, row in before_after.CASES]
    assert {row.workload for row in rows} <= set(WORKLOADS)


def test_every_deliberate_fault_still_finds_its_text() -> None:
    found = {mutation.name: mutations.applies(mutation, mutations.ROOT) for mutation in mutations.MUTATIONS}
    assert [name for name, applies in found.items() if not applies] == []


@pytest.mark.full
def test_a_run_of_the_padding_benchmark_goes_on_until_its_steps_and_no_further(monkeypatch, capsys):
    """`steps` of an iteration count all so far: their sum would end it after a few iterations."""
    monkeypatch.setattr(padding_worker, "STEPS", 600)
    monkeypatch.setattr(padding_worker, "SEEDS", 2)
    settings = {"num_envs": 8, "group_size": 4, "epochs": 1, "num_minibatches": 1, "kl": None}
    monkeypatch.setattr(sys, "argv", ["padding_worker.py", json.dumps(settings)])
    monkeypatch.setattr(sys, "stdin", ["run"])
    padding_worker.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    of_iteration = found["steps"] / found["iterations"]
    assert 600 <= found["steps"] < 600 + 2 * of_iteration
    assert found["iterations"] == pytest.approx(600 / of_iteration, abs=1)
    assert found["cpu"] > 0


def test_the_steps_to_a_return_are_those_at_which_each_agent_first_reaches_it(monkeypatch):
    """Whoever falls and rises again had reached it before; whoever never does has taken as many steps as there were."""
    scores = [[0, 475, 0], [500, 0, 474], [0, 500, 0]]
    asked = []

    class Worker:
        def ask(self, what):
            asked.append(what)
            return {"return": scores[min(asked.count("score"), 3) - 1]}

    def workers(programs, peers, environment, num_envs, steps):
        assert steps == 3 * throughput.EVERY  # of three agents together
        return contextlib.nullcontext({program: Worker() for program in programs})

    monkeypatch.setattr(throughput, "workers", workers)
    found = throughput.steps_to_return(throughput.Row("jaxpg", agents=3), throughput.Peers())
    assert found == [2 * throughput.EVERY, throughput.EVERY, throughput.PATIENCE]
    assert asked.count("run") == throughput.PATIENCE // throughput.EVERY - 1
    asked.clear()
    scores[1][2] = 475
    throughput.steps_to_return(throughput.Row("jaxpg", agents=3), throughput.Peers())
    assert asked == ["compile", *["run", "score"] * 2]  # on seeds of their own; all have


def program(name: str) -> ModuleType:
    """A program as a module, without what it says to its environment when it is imported."""
    with mock.patch.dict(os.environ):
        return importlib.import_module(name)


def run(name: str, arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program with a command line."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *shlex.split(arguments)])
    program(name).main()


WRITERS = {
    **dict.fromkeys(("aot", "architecture", "cold_start", "language", "memory", "multichip"), "--out"),
    **dict.fromkeys(("phases", "scaling", "throughput"), "--out"),
    "before_after": "x --out",
    "same_bits": "",
}
"""Programs that write a file, and what comes before its name on their command lines."""


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("before_after", ". --only NOTHING", "No case fits --only 'NOTHING'. There are: jaxpg CartPole-v1 4; "),
        (
            "throughput",
            "--only NOTHING",
            "No case fits --only 'NOTHING'. There are: PPO, CartPole-v1, 4 environments; ",
        ),
        ("throughput", "--one-agent --only NOTHING", "No case fits --only 'NOTHING'."),
        ("throughput", "--only [", "argument --only: '[' is not a regular expression: "),
        ("throughput", "--peer-python /nope", "--peer-python: there is no /nope"),
        ("throughput", "--purejaxrl .", "--purejaxrl needs --peer-python, the Python that runs it"),
        ("throughput", "--quick --only CartPole", "--quick does not read --only: leave it out"),
        ("throughput", "--quick --compiles 1", "--quick does not read --compiles: leave it out"),
        ("throughput", "--quick --peer-python python", "--quick does not read --peer-python: leave it out"),
        ("throughput", "--to-return --only CartPole", "--to-return does not read --only: leave it out"),
        ("throughput", "--quick --to-return", "not allowed with argument --quick"),
        ("aot", "--purejaxrl .", "--purejaxrl needs --peer-python, the Python that runs it"),
        ("padding", "/nope", "/nope is no checkout of jaxpg"),
        ("clipping", "--only NOTHING", "No case fits --only 'NOTHING'. There are: CartPole-v1; "),
        ("clipping", "--only [", "argument --only: '[' is not a regular expression: "),
        ("lunar_lander", "--only [", "argument --only: '[' is not a regular expression: "),
        ("suites", "--only [", "argument --only: '[' is not a regular expression: "),
        (
            "scaling",
            "--only environments --most 1 --out x",
            "--most 1 leaves 0 of the sizes of environments, and growth",
        ),
        ("scaling", "--most 64", "--most leaves sizes out, which would be missing from the results"),
        ("learning", "--tasks nope", "No cell of the table fits. The tasks are cartpole, "),
        ("language", "--columns 7", "argument --columns: 7 completions are not groups of 8: give a multiple of 8"),
        ("memory", "--columns 7", "argument --columns: 7 completions are not groups of 8: give a multiple of 8"),
        ("planning", "foo", "invalid choice: 'foo' (choose from "),
        ("claims", "foo", "invalid choice: 'foo' (choose from "),
        ("host", "--environments Acrobot-v1", "invalid choice: 'Acrobot-v1' (choose from "),
        ("same_bits", "", "give the file to write the hashes to, or --compare with two of them"),
        ("same_bits", "x --only cartpole/nope", "--only: there is no run cartpole/nope; there are "),
        ("same_bits", "--compare /nope /nope", "--compare: there is no /nope"),
        ("beside", "--only CleanRL", "CleanRL's code needs --cleanrl, a checkout of it"),
        ("beside", "--only rejax --python /nope", "--python: there is no /nope"),
        ("architecture", "--before nope", "--before: git has no jaxpg/ at 'nope' ("),
        *(
            (name, f"{arguments} .", ". is a folder: name the file to write, such as results.json")
            for name, arguments in WRITERS.items()
        ),
        ("multichip", f"--out {__file__}/x/y", f"/x/y cannot be written: {__file__} is not a folder"),
    ],
)
def test_a_mistake_is_a_sentence(
    name: str, arguments: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(name, arguments, monkeypatch)
    said = capsys.readouterr().err if ended.value.code == 2 else str(ended.value.code)
    assert sentence in said


def test_tasks_of_other_libraries_that_no_pattern_fits_are_named(monkeypatch, capsys):
    beside = program("beside")
    monkeypatch.setattr(beside, "require_package", lambda *_: None)
    with pytest.raises(SystemExit):
        run("beside", "--only rejax --match NOTHING", monkeypatch)
    assert "--match: no task fits; there are " in capsys.readouterr().err


def valid(path: Path) -> Any:
    """What a file says in JSON, which knows no NaN and no infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{path} has {constant}")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_results_are_valid_json() -> None:
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert len(files) > 30
    for path in files:
        valid(path)


def test_a_case_takes_the_place_of_its_own_and_of_no_other(tmp_path: Path) -> None:
    """Each says what it was measured by, as an older file did once for all."""
    path = tmp_path / "new" / "results.json"
    result_files.write(path, {"machine": "old", "what": "x", "cases": {"a": {"s": 1.0}, "b": {"s": 2.0}}})
    result_files.put(path, "cases", "b", {"s": float("nan")}, {"machine": "new"})
    b = {"machine": "new", "s": None}
    assert valid(path) == {"what": "x", "cases": {"a": {"machine": "old", "s": 1.0}, "b": b}}
    result_files.put(path, "cases", "c", {"s": 3.0}, {"machine": "newer"})
    assert list(valid(path)["cases"]) == ["a", "b", "c"]
    assert valid(path)["cases"]["b"] == b


def test_a_row_takes_the_place_of_its_own_and_of_no_other(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    result_files.write(path, {"rounds": 1, "rows": [{"x": 1, "y": 1, "s": 1.0}, {"x": 1, "y": 2, "s": 2.0}]})
    for y in (1, 3):
        result_files.put_row(path, "rows", ("x", "y"), {"x": 1, "y": y, "s": 9.0}, {"rounds": 5})
    rows = valid(path)["rows"]
    assert [(row["y"], row["s"], row["rounds"]) for row in rows] == [(1, 9.0, 5), (2, 2.0, 1), (3, 9.0, 5)]


def test_titles_of_cases_are_different() -> None:
    for cases in (throughput.CASES, throughput.ONE_AGENT):
        assert len({case.title for case in cases}) == len(cases)


def once_only(found: Any) -> Callable[..., Any]:
    """A measurement that is interrupted when it is asked for again."""
    answers = iter([found])

    def measure(*_: Any, **__: Any) -> Any:
        for answer in answers:
            return answer
        raise KeyboardInterrupt

    return measure


LOOP = {"workload": "rejax", "label": "rejax", "agents": 1, "threads": None, "peak_bytes": 0, "iteration_steps": 0}
LOOP |= {f"{k}_s_per_million": [1.0] for k in ("cpu", "wall")} | {f"compile_{k}_s": [] for k in ("cpu", "wall")}
GREEDY = {"task": "taxi", "algorithm": "sarsa", "steps": 1, "optimum": 1.0, "while learning": 0.0, "seconds": 0.0}
GREEDY["greedy"] = {"mean": 0.0, "worst": 0.0}
NORMS = {"whole run": [[1.0, 0.1]] * 5}
RATE = {"ratio": 1.0, "ours": 1.0, "theirs": 1.0}
devices = program("devices")
SPREAD = devices.Spread(mock.Mock(**{"as_text.return_value": "", "return_value.params": {}}), ())
BLOCK = {"at_once": 80, "ratio": 1.0, "temporary_bytes": 1}
INTERRUPTED = {
    "throughput --one-agent": ("cases", {"measure": once_only([LOOP])}),
    "throughput --to-return": ("cases", {"measure": once_only([LOOP, LOOP]), "steps_to_return": once_only([1])}),
    "clipping": ("results", {"returns": lambda case: None, "summary": once_only(NORMS)}),
    "scaling": ("axes", {"measure": once_only({}), "sizes_up_to": lambda *_: [0], "table": lambda *_: ""}),
    "language": ("sizes", {"measure": once_only({})}),
    "host": ("results", {"compare": once_only(RATE), "vector": mock.Mock(), "peers": mock.Mock(), "jax": mock.Mock()}),
    "memory": ("bytes", {"update_bytes": once_only({"state": 1}), "cases": lambda *_: {"a": int, "b": int}}),
    "attention": ("results", {"measure": once_only([BLOCK])}),
    "tabular": (
        "learning",
        {"speed": lambda _: {}, "cliff": lambda _: {}, "learn": lambda _: map(once_only(GREEDY), "ab")},
    ),
    "devices": (
        "algorithms",
        {
            "learner_of": lambda *_, **__: None,
            "spread": lambda *_: SPREAD,
            "difference": lambda *_: 0.0,
            "least": once_only(devices.Traffic(1, 1)),
        },
    ),
}


@pytest.mark.parametrize("command", INTERRUPTED)
def test_what_was_finished_before_an_interruption_is_written(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, fakes = INTERRUPTED[command]
    name, _, arguments = command.partition(" ")
    module = program(name)
    for fake, function in fakes.items():
        monkeypatch.setattr(module, fake, function)
    path = tmp_path / f"{name}.json"
    if name in ("host", "tabular"):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    elif hasattr(module, "RESULTS"):
        monkeypatch.setattr(module, "RESULTS", path)
    else:
        arguments += f" --out {path}"
    with pytest.raises(KeyboardInterrupt):
        run(name, arguments, monkeypatch)
    assert len(valid(path)[part]) == 1


def test_the_steps_to_a_return_are_a_median_with_quartiles_and_those_that_were_not_enough() -> None:
    console = Console(width=200)
    with console.capture() as printed:
        console.print(throughput.return_table([LOOP | {"steps": [10**6, 10**6, 1_300_000, throughput.PATIENCE]}]))
    assert [x.strip() for x in printed.get().splitlines()[-2].split("│")[-3:-1]] == ["1,000,000 to 1,368,216", "1"]


def test_an_estimate_of_few_seeds_has_no_interval() -> None:
    format_estimate = program("learning").format_estimate
    assert format_estimate({"value": 1.5, "low": None, "high": None}) == "1.500"
    assert format_estimate({"value": 1.5, "low": 1.0, "high": 2.0}) == "1.500 [1.000, 2.000]"


def test_tables_and_picture_lie_beside_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learning = program("learning")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "metrics.jsonl").touch()
    drawn: list[Path] = []
    monkeypatch.setattr(learning, "RESULTS", tmp_path)
    monkeypatch.setattr(learning, "run_folder", lambda cell: tmp_path)
    monkeypatch.setattr(learning.run_directory, "load_metrics", lambda run: {"steps": None, "return": None})
    monkeypatch.setattr(learning.report, "learning_curve", lambda curves, path, **_: drawn.append(path))
    learning.publish({}, elsewhere / "mine.json", Console(quiet=True))
    learning.draw_ladder(elsewhere)
    assert (elsewhere / "mine.md").exists()
    assert drawn == [elsewhere / "cartpole_ladder.png"]


def test_a_run_that_is_missing_is_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    compare = program("same_bits").compare
    whole = {"cartpole/ppo": {"metrics": ["a"]}, "cartpole/a2c": {"metrics": ["b"]}}
    assert compare(whole, whole) == 0
    assert compare(whole, {"cartpole/ppo": {"metrics": ["a"]}}) == 1
    assert "cartpole/a2c: missing\n" in capsys.readouterr().out
    assert compare(whole, {**whole, "cartpole/ppo": {"metrics": ["c"]}}) == 1


@pytest.mark.parametrize(
    ("library", "commit", "jax", "holds"),
    [
        ("jaxpg", "abc", "1", True),
        ("jaxpg", "abd", "1", False),
        ("jaxpg", "abc", "2", False),
        ("jaxpg", "abc-dirty", "1", False),
        ("jaxpg", None, "1", False),
        ("rejax", "abd", "1", True),
        ("rejax", "abc", "2", False),
    ],
)
def test_a_count_is_kept_of_the_same_code_and_packages_only(
    library: str, commit: str | None, jax: str, holds: bool
) -> None:
    known = {"library": library, "commit": commit if str(commit).endswith(("-dirty", "None")) else "abc"}
    known["versions"] = {"jax": "1"}
    assert program("aot").still_holds(known, commit, {"jax": jax, "flax": "1"}) == holds


def test_resets_of_gymnasium_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps of a second, of which every second ends a flight, and two resets of half a second."""
    speed, clock = program("lunar_lander_speed"), [0.0]

    class Env:
        def __init__(self) -> None:
            self.steps = 0

        def step(self, action: int) -> tuple[Any, ...]:
            clock[0] += 1.0
            self.steps += 1
            return None, 0.0, self.steps % 2 == 0, False, {}

        def reset(self) -> None:
            clock[0] += 0.5

    monkeypatch.setattr(speed.time, "process_time", lambda: clock[0])
    assert speed.gymnasium_rates(Env(), range(4)) == (4 / 5, 1.0)


def test_phases_act_with_continuous_actions() -> None:
    """The loop over steps begins with what a step gives."""
    phases = program("phases").phases

    def act() -> Any:
        function, arguments = phases("Pendulum-v1", 2, {"num_steps": 2, "epochs": 1, "num_minibatches": 1})["acting"]
        return function(*arguments)

    action, _ = jax.eval_shape(act)  # nothing is compiled
    assert action.shape == (2, 1)
