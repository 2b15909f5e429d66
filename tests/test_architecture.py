"""The rooms of ARCHITECTURE.md: imports run downward only, without a circle, and every room has a face."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jaxpg"
ROOMS = """
types errors
parallel.collectives parallel.machine
objectives
user_input
files vectorize parallel
rollout update sub_env
models
algorithm
algorithm_checks
policy_gradient
ladder_settings
ladder
envs.text
envs
values
report
preferences values
training
experiments
runs
cli
__main__
"""
"""From the ground up. A room imports from lines above its own, and from nothing on its own line or below.

The order states the rules. objectives knows types, errors and collectives; report does not know how training records;
no room of the library knows training, experiments or cli; experiments does not know cli; only __main__ knows cli.
"""
FLOOR = {room: floor for floor, line in enumerate(ROOMS.splitlines()) for room in line.split()}


def name_of(path: Path) -> str:
    """`jaxpg/objectives/kl.py` -> "objectives.kl"; a room's face has the room's name."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


def sources() -> dict[str, str]:
    """The text of every module; `jaxpg/__init__.py`, which imports nothing until it is used, is left out."""
    return {name_of(path): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if name_of(path)}


def imports(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """The modules of jaxpg that each module imports, at its top or inside of a function."""
    found: dict[str, set[str]] = {}
    for module, text in modules.items():
        names: list[str] = []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                names += [name if name[6:] in modules or node.module == "jaxpg" else str(node.module) for name in inner]
        found[module] = {name[6:] for name in names if name.startswith("jaxpg.")}
    return found


def room_of(module: str) -> str:
    return max((room for room in FLOOR if f"{module}.".startswith(f"{room}.")), key=len)


def upward(modules: Mapping[str, str]) -> list[str]:
    """Imports of a room that does not lie below."""
    arrows = [(module, target) for module, targets in imports(modules).items() for target in targets]
    rooms = [(room_of(module), room_of(target)) for module, target in arrows]
    wrong = [a != b and FLOOR[a] <= FLOOR[b] for a, b in rooms]
    return [f"{a} -> {b}" for (a, b), found in zip(arrows, wrong, strict=True) if found]


def test_arrows_run_downward_only() -> None:
    assert upward(sources()) == []


def test_files_form_no_circle() -> None:
    TopologicalSorter(imports(sources())).prepare()


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("objectives.kl", "from jaxpg import files"),
        ("report.page", "def late():\n    from jaxpg.training.run_directory import load_metrics"),
        ("experiments.build", "import jaxpg.cli.commands"),
    ],
)
def test_a_forged_import_is_found(module: str, line: str) -> None:
    modules = sources()
    assert len(upward(modules | {module: f"{modules[module]}\n{line}\n"})) == 1


def test_a_forged_circle_is_found() -> None:
    modules = sources()
    modules["objectives.returns"] += "\nfrom jaxpg.objectives import advantages\n"
    with pytest.raises(CycleError):
        TopologicalSorter(imports(modules)).prepare()


@pytest.mark.parametrize("folder", sorted({path.parent for path in PACKAGE.rglob("*.py")}), ids=lambda x: x.name)
def test_every_room_has_a_face(folder: Path) -> None:
    """A sorted `__all__`; that of cli imports nothing, so that `jaxpg --help` is instant."""
    body = ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body
    if folder.name == "cli":
        assert not any(isinstance(node, ast.Import | ast.ImportFrom) for node in body)
        return
    (names,) = (ast.literal_eval(x.value) for x in body if isinstance(x, ast.Assign) and "__all__" in ast.dump(x))
    assert names
    assert names == sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
