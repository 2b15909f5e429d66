"""Functions by name, "package.module:function", and the arguments that a function takes.

To import a module runs its code, and "os:system" is such a name too. A name that a Python program or the user of the
command line states is the user's own; a name in the directory of a run was written by the author of the directory.
`import_user_module` is the only place that imports by name. Inside of `trust`, which the command line enters before it
reads anything, it refuses every name that the user did not state. Outside, in a Python program, the function that reads
the config of a run refuses (`refuse_code_of_run`).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from jaxpg.errors import UserError, nearest

_NAME = re.compile(r"(?!(gymnasium|envpool):)[^\s/\\:]+:[^\s/\\:]+|gymnasium:[^\s/\\:]+:[^\s\\:]+")
"""What names code: "module:function", and "gymnasium:module:id"; an environment of an installed package does not."""
SUITE_PREFIXES = frozenset({"brax", "craftax", "jaxtari", "jumanji", "navix", "pgx", "playground"})
"""`brax:ant` is an environment of a suite (envs/suites) and never a function of a module, so it is no code of a run."""
MOST_LISTED = 10
"""At most this many functions of a module are listed where it lacks the one that was named."""
_is_trusted: ContextVar[Callable[[str], bool] | None] = ContextVar("is_trusted", default=None)
"""Which names may be imported; None in a Python program that has not entered `trust`."""
_given: ContextVar[Mapping[str, Callable[..., Any]]] = ContextVar("given", default=MappingProxyType({}))
"""What a Python program has handed over under a name, see `give`."""
_FOLDERS = (str(Path(__file__).parent.parent), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
_NOT_THE_USERS = (*(f"{folder}{os.sep}" for folder in _FOLDERS), "<")
"""How the names of source files begin that are jaxpg's own, or of Python and installed packages."""


@contextlib.contextmanager
def trust(is_trusted: Callable[[str], bool]) -> Iterator[None]:
    """Let `import_user_code` import the names for which this is true, and no others."""
    token = _is_trusted.set(is_trusted)
    try:
        yield
    finally:
        _is_trusted.reset(token)


@contextlib.contextmanager
def give(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let these names stand for functions of this program, so that `import_user_code` need not import them."""
    token = _given.set({**_given.get(), **functions})
    try:
        yield
    finally:
        _given.reset(token)


def refuse_code_of_run(run_dir: Path, settings: Mapping[str, Any]) -> None:
    """In a Python program, raise a UserError if the settings of a run name code; `trust` asks when code is imported."""
    if _is_trusted.get() is None and (names := code_names(settings)):
        raise UserError(
            f"The run in {run_dir} names code that is not part of jaxpg: {_would_run(*names)}. If you trust the code "
            "and the run, pass trust_code=True, or work inside of jaxpg.user_input.user_code.trust."
        )


def code_names(settings: Any) -> list[str]:
    """The keys and values of nested tables and lists that have the form of a name, "package.module:function"."""
    return [text for text in strings_in(settings) if _NAME.fullmatch(text) and not _is_of_a_suite(text)]


def is_code_name(text: str) -> bool:
    """Whether a text has the form of a name, "package.module:function"."""
    return bool(code_names(text))


def _is_of_a_suite(name: str) -> bool:
    return name.partition(":")[0] in SUITE_PREFIXES


def strings_in(settings: Any) -> Iterator[str]:
    """Every string among the keys and the values of nested tables and lists."""
    if isinstance(settings, str):
        yield settings
    elif isinstance(settings, Mapping | list | tuple):
        if isinstance(settings, Mapping):
            yield from settings
            settings = list(settings.values())
        for value in settings:
            yield from strings_in(value)


def import_user_code(name: str, what: str) -> Callable[..., Any]:
    """The function that `name`, "package.module:function", stands for. Importing its module runs code.

    Args:
        name: the name as the user gave it.
        what: what the function is used as, for the message of an error: "environment", "reward function".

    Raises:
        UserError: the name is not trusted, it cannot be imported, or is not a function; its module has the name of a
            suite.
    """
    module, _, function = name.partition(":")
    if _is_of_a_suite(name):
        raise UserError(f"The {what} {name} cannot be imported: {module}: is the prefix of a suite of environments.")
    if name in _given.get():
        return _given.get()[name]
    imported = import_user_module(module, name, what)
    try:
        found = getattr(imported, function)
    except AttributeError as error:
        raise _not_imported(name, what, error) from error
    if not callable(found):
        raise UserError(f"{name} must be a function, not {found!r}.")
    return found


def import_user_module(module: str, name: str, what: str) -> ModuleType:
    """The module of the code that `name` stands for; arguments and errors as in `import_user_code`."""
    is_trusted = _is_trusted.get()
    if is_trusted is not None and not is_trusted(name):
        raise UserError(
            f"The {what} {name} is named by a run and not on this command line: {_would_run(name)}. If you trust the "
            "code and the run, add --trust-code."
        )
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise _not_imported(name, what, error) from error


def _not_imported(name: str, what: str, error: BaseException) -> UserError:
    prefix, _, rest = name.partition(":")
    meant = (
        nearest(prefix, SUITE_PREFIXES) if isinstance(error, ModuleNotFoundError) and what == "environment" else None
    )
    hint = f" Did you mean '{meant}:{rest}'?" if meant else ""
    module = sys.modules.get(prefix.rpartition(":")[2]) if isinstance(error, AttributeError) else None
    if module and not hasattr(module, rest):
        near = nearest(rest, [n for n in vars(module) if not n.startswith("_")])
        like = f" Did you mean '{prefix}:{near}'?" if near else _functions_of(module)
        return UserError(f"The {what} {name} cannot be imported: {module.__name__} has no {rest!r}.{like}")
    return UserError(
        f"The {what} {name} cannot be imported: {describe_failure(error)}.{hint} Install its module, or add the "
        "folder that contains it to PYTHONPATH."
    )


def _functions_of(module: ModuleType) -> str:
    """A sentence with the functions that a module defines, of many the first."""
    found = [name for name, x in vars(module).items() if inspect.isfunction(x) and x.__module__ == module.__name__]
    public = [name for name in found if not name.startswith("_")]
    listed = public if len(public) <= MOST_LISTED else [*public[:MOST_LISTED], f"and {len(public) - MOST_LISTED} more"]
    return f" It has: {', '.join(listed)}." if listed else " It has no function of its own."


def _would_run(*names: str) -> str:
    parts = [name.removeprefix("gymnasium:").partition(":") for name in names]
    calls = dict.fromkeys(f"import {module} and call {function}" for module, _, function in parts)
    return f"this would {', and '.join(calls)}"


def argument_defaults(factory: Callable[..., Any]) -> dict[str, Any]:
    """Names of the arguments of a function or class, with their defaults (`inspect.Parameter.empty` without one)."""
    parameters = inspect.signature(factory).parameters.values()
    return {p.name: p.default for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


@contextlib.contextmanager
def explain_failure(what: str) -> Iterator[None]:
    """Raise what a user's code raises as a UserError, "WHAT raised ...", all but Ctrl-C: `sys.exit` and panics too.

    Only the user's code may run inside, and what traces or calls it.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UserError(f"{what} raised {describe_failure(error)}.") from error


def describe_failure(error: BaseException) -> str:
    """Type, first line and place of an exception: "ValueError: too long (bandit.py, line 12)"."""
    message = (str(error).strip().splitlines() or [""])[0].removesuffix(".")
    frames = [x for x in traceback.extract_tb(error.__traceback__) if not x.filename.startswith(_NOT_THE_USERS)]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{f': {message}' if message else ''}{place}"
