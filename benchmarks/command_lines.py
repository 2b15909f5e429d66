"""What the command lines of the programs have in common: cases by a pattern, files to write, Pythons of others."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def pattern(text: str) -> re.Pattern[str]:
    """A regular expression, as the type of an option."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


def out_file(text: str) -> Path:
    """A file to write to, as the type of an option: what cannot be one is refused before anything is measured."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name the file to write, such as {path / 'results.json'}")
    there = next(parent for parent in path.absolute().parents if parent.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {there} is not a folder")
    return path


def chosen(cases: Mapping[str, T], only: re.Pattern[str]) -> dict[str, T]:
    """The cases in whose name the pattern is found; without any the program ends with a sentence."""
    found = {name: case for name, case in cases.items() if only.search(name)}
    if not found:
        raise SystemExit(f"No case fits --only {only.pattern!r}. There are: {'; '.join(cases)}.")
    return found


def require_package(parser: argparse.ArgumentParser, option: str, python: str, package: str) -> None:
    """End with status 2 where there is no such Python, or where it lacks the package."""
    if shutil.which(python) is None:
        parser.error(f"{option}: there is no {python}")
    asked = [python, "-c", f"import importlib.metadata; importlib.metadata.version({package!r})"]
    if subprocess.run(asked, capture_output=True, check=False).returncode:
        parser.error(f"{option}: {python} has no {package}")


def require_peers(parser: argparse.ArgumentParser, python: str | None, purejaxrl: Path | None) -> None:
    """End with status 2 where rejax or PureJaxRL were asked for and cannot run."""
    if python:
        require_package(parser, "--peer-python", python, "rejax")
    if purejaxrl and not python:
        parser.error("--purejaxrl needs --peer-python, the Python that runs it")
    if purejaxrl and not (purejaxrl / "purejaxrl" / "ppo.py").exists():
        parser.error(f"--purejaxrl: there is no {purejaxrl / 'purejaxrl' / 'ppo.py'}")
