"""The text of a config: TOML files and `--set` assignments, and how their tables are merged.

Nothing here knows which settings exist; config.py checks names and values.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpg import envs
from jaxpg.errors import UserError, excerpt, nearest

_PACKAGED = Path(__file__).parent.parent / "configs"  # in an installed package; a checkout has them beside the package
DEEPEST = 20
"""No setting needs more tables or lists inside of each other; functions that call themselves rely on it."""
_ENVIRONMENT = re.compile(r"[^\s:]+:\S+")
TASKS = _PACKAGED if _PACKAGED.is_dir() else _PACKAGED.parent.parent / "configs"


def tasks() -> list[str]:
    """The tasks that have a config."""
    return sorted(path.stem for path in TASKS.glob("*.toml"))


def read_task(task: str | Path) -> tuple[dict[str, Any], Path]:
    """The tables of a task, and what they were read from.

    Args:
        task: as in `find_task`, or the name of an environment, "CartPole-v1", "brax:ant" or "module:function", which is
            a task without further settings.

    Raises:
        UserError: there is no such file or task, or it is not valid TOML.
    """
    if names_environment(task):
        return {"task": file_name(str(task)), "environment": str(task)}, Path(task)
    path = find_task(task)
    return read_toml(path), path


def file_name(name: str) -> str:
    """The name of a task, an algorithm or an environment as part of the names of files."""
    return re.sub(r"[^\w.-]", "-", name)


def find_task(task: str | Path) -> Path:
    """The file of a task: a path that ends in .toml, or one of `tasks()`.

    Raises:
        UserError: there is no such file or task.
    """
    if str(task).endswith(".toml"):
        if not Path(task).exists():
            raise UserError(f"There is no file {task}.")
        return Path(task)
    if task not in tasks():
        near = nearest(str(task), [*tasks(), *envs.names()])  # CartPole-v2 means CartPole-v1 and not cartpole
        meant = f"Did you mean {near!r}?" if near else f"There are: {', '.join(tasks())}."
        raise UserError(
            f"There is no task {excerpt(task)}. {meant} Environments of other libraries have a "
            "prefix, such as brax:ant or gymnasium:Ant-v5: see jaxpg list environments."
        )
    return TASKS / f"{task}.toml"


def names_environment(task: str | Path) -> bool:
    """Whether a task is the name of an environment: `CartPole-v1`, `gymnasium:CartPole-v1` or `module:function`."""
    if str(task).endswith(".toml"):
        return False
    return _ENVIRONMENT.fullmatch(str(task)) is not None or (task not in tasks() and str(task) in envs.names())


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        UserError: it is not valid TOML.
        OSError: it cannot be read.
    """
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid TOML, which is text in UTF-8: {error}.") from None
    except RecursionError:
        raise _too_deep(str(path)) from None
    except ValueError as error:  # also an integer of more digits than Python converts
        raise UserError(f"{path} is not valid TOML: {error}.") from None
    refuse_deep(str(path), sections)
    return sections


def parse_overrides(assignments: Sequence[str]) -> dict[str, Any]:
    """`["learning_rate=3e-4", "network.hidden=[64, 64]"]` as settings; a value that is not TOML is a string.

    Raises:
        UserError: an assignment without a key or an equals sign.
    """
    overrides: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set takes key=value, such as learning_rate=3e-4, not {excerpt(assignment)}.")
        value = parse_value(text, otherwise=text.strip())
        refuse_deep(f"--set {excerpt(key)}", nested({key: value}))
        overrides[key.strip()] = value
    return overrides


def parse_value(text: str, otherwise: Any) -> Any:
    """The TOML value that a text is, or `otherwise`, where it is none."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return otherwise
    return document["value"] if len(document) == 1 else otherwise  # a line break begins another setting


def refuse_deep(where: str, tree: Any) -> None:
    """Raise a UserError if tables and lists are nested more than DEEPEST levels deep."""
    level = [tree]
    for _ in range(DEEPEST):
        tables = [x.values() if isinstance(x, Mapping) else x for x in level if isinstance(x, Mapping | list)]
        level = [inner for table in tables for inner in table]
    if level:
        raise _too_deep(where)


def _too_deep(where: str) -> UserError:
    return UserError(f"{where} has tables or lists in more than {DEEPEST} others.")


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two layers of settings, the second of which wins; tables are merged key by key, unless one has a new `kind`."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and "kind" not in value:
            value = merge(old, value)
        merged[key] = value
    return merged


def nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """`{"network.hidden": [64]}` as `{"network": {"hidden": [64]}}`; "package.module:function" is one key."""
    tree: dict[str, Any] = {}
    for name, value in dotted.items():
        for key in reversed(_keys(name)):
            value = {key: value}
        tree = merge(tree, value)
    return tree


def _keys(name: str) -> list[str]:
    """The keys that a dotted name leads through."""
    table, _, rest = name.partition(".")
    if ":" not in rest:
        return name.split(".")
    module, _, tail = rest.partition(":")
    function, *inner = tail.split(".")
    return [table, f"{module}:{function}", *inner]
