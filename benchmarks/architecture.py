"""The rooms of the package and the arrows between them, read from its imports: a table and a picture.

    python benchmarks/architecture.py                     # the rooms, and docs/architecture.svg
    python benchmarks/architecture.py --before REVISION   # this checkout beside another commit, as Markdown

A room is a folder, or a file that lies beside the folders; an arrow is an import from one room by another, at the top
of a file or inside a function. The picture leaves out an arrow where a longer way says the same. The length of a
function is without its docstring. A line is cloned if it belongs to eight or more successive lines that stand somewhere
else too; blank lines, comments, docstrings and imports are not counted.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from architecture_picture import picture, reachable
from command_lines import out_file

ROOT = Path(__file__).resolve().parent.parent
CLONE = 8  # lines of the shortest repeated block that counts
LONG_FILE, LONG_FUNCTION = 300, 50

Sources = Mapping[str, str]
"""The text of every file, by its path in jaxpg/ without ".py"."""
Rooms = dict[str, set[str]]
"""Of every room the rooms that it imports."""


def checkout() -> Sources:
    """The files of this checkout."""
    return named({path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.glob("jaxpg/**/*.py")})


def commit(revision: str) -> Sources:
    """The files of a commit."""
    archive = subprocess.run(["git", "-C", ROOT, "archive", revision, "jaxpg"], check=False, capture_output=True)
    if archive.returncode:
        raise SystemExit(f"--before: git has no jaxpg/ at {revision!r} ({archive.stderr.decode().strip()}).")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        files = {x.name: tar.extractfile(x) for x in tar.getmembers() if x.name.endswith(".py")}
        return named({name: file.read().decode() for name, file in files.items() if file})


def named(files: Mapping[str, str]) -> Sources:
    """Without `jaxpg/__init__.py`, which imports nothing until it is used."""
    short = {name.removeprefix("jaxpg/").removesuffix(".py"): text for name, text in files.items()}
    return {name: short[name] for name in sorted(short) if name != "__init__"}


def room_of(name: str) -> str:
    """The folder of a file, or the file itself where it lies beside the folders."""
    return name.rpartition("/")[0] or name


def imported(text: str, sources: Sources) -> set[str]:
    """The files that a file imports."""
    paths: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            paths += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            paths += [path if as_file(path, sources) else str(node.module) for path in inner]
    return {name for path in paths if (name := as_file(path, sources))}


def as_file(path: str, sources: Sources) -> str | None:
    """The file of a module, as envs/text/__init__ of jaxpg.envs.text; None if there is none."""
    name = path.removeprefix("jaxpg.").replace(".", "/")
    return next((found for found in (name, f"{name}/__init__") if found in sources), None)


def rooms_of(sources: Sources) -> Rooms:
    """The arrows between rooms."""
    rooms: Rooms = {room_of(name): set() for name in sources}
    for name, text in sources.items():
        rooms[room_of(name)] |= {room_of(other) for other in imported(text, sources)} - {room_of(name)}
    return rooms


def in_circles(rooms: Rooms) -> set[str]:
    """The rooms that import themselves by way of others."""
    return {room for room, others in rooms.items() if room in reachable(rooms, others)}


class Block(NamedTuple):
    """A file or a function, and how many lines it has."""

    lines: int
    name: str


def functions(sources: Sources) -> list[Block]:
    """All functions that do not lie in another one, without their docstrings."""

    def below(node: ast.AST, name: str) -> Iterable[Block]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                begin, end = span(child)
                yield Block(end - begin + 1 - docstring_lines(child), f"{child.name} in {name}")
            else:
                yield from below(child, name)

    return [found for name, text in sources.items() for found in below(ast.parse(text), f"{name}.py")]


def span(node: ast.stmt) -> tuple[int, int]:
    """First and last line of a statement."""
    return node.lineno, node.end_lineno or node.lineno


def docstring_lines(node: ast.FunctionDef) -> int:
    """How many lines a function's docstring has."""
    if ast.get_docstring(node) is None:
        return 0
    begin, end = span(node.body[0])
    return end - begin + 1


def code_lines(text: str) -> list[str]:
    """The lines of a file without blank lines, comments, strings that stand alone (docstrings) and imports."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.stmt) and is_text):
            begin, end = span(node)
            left_out |= set(range(begin, end + 1))
    lines = [re.sub(r"(^|\s+)#.*$", "", line).strip() for line in text.splitlines()]
    return [line for number, line in enumerate(lines, 1) if line and number not in left_out]


def cloned_share(sources: Sources) -> float:
    """The share of code lines in blocks of CLONE or more lines that occur more than once."""
    files = [code_lines(text) for text in sources.values()]
    blocks = [[tuple(lines[i : i + CLONE]) for i in range(len(lines) - CLONE + 1)] for lines in files]
    seen = Counter(block for found in blocks for block in found)
    cloned = {
        (file, start + k)
        for file, found in enumerate(blocks)
        for start, block in enumerate(found)
        if seen[block] > 1
        for k in range(CLONE)
    }
    return len(cloned) / sum(map(len, files))


def measures(sources: Sources) -> dict[str, str]:
    """The rows of the table of before and after."""
    rooms, code = rooms_of(sources), sum(len(code_lines(text)) for text in sources.values())
    folders = Counter(f"jaxpg/{name}".rpartition("/")[0] for name in sources)
    files = [Block(len(text.splitlines()), f"{name}.py") for name, text in sources.items()]
    written = functions(sources)
    largest, most = folders.most_common(1)[0]
    longest_file, longest = max(files), max(written)
    return {
        "files": str(len(sources)),
        "code lines": f"{code:,}",
        "folders": str(len(folders)),
        "files in the largest folder": f"{most} (`{largest}/`)",
        "rooms": str(len(rooms)),
        "arrows between rooms": str(sum(map(len, rooms.values()))),
        "imports between files": str(sum(len(imported(text, sources)) for text in sources.values())),
        "rooms in a circle": str(len(in_circles(rooms))),
        "longest file, lines": f"{longest_file.lines} (`{longest_file.name}`)",
        f"files above {LONG_FILE} lines": str(sum(file.lines > LONG_FILE for file in files)),
        "longest function, lines": f"{longest.lines} (`{longest.name}`)",
        f"functions above {LONG_FUNCTION} lines": str(sum(function.lines > LONG_FUNCTION for function in written)),
        f"lines in repeated blocks of {CLONE} and more": f"{cloned_share(sources):.1%}",
    }


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table."""
    head = list(head)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def main() -> None:
    """Print the tables, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="REVISION", help="a commit to compare this checkout with")
    parser.add_argument(
        "--out", type=out_file, default=ROOT / "docs" / "architecture.svg", help="where the picture goes"
    )
    arguments = parser.parse_args()
    sources = checkout()
    rooms = rooms_of(sources)
    if arguments.before:
        before, after = measures(commit(arguments.before)), measures(sources)
        print(markdown(["", "before", "after"], ([name, before[name], after[name]] for name in after)))
        return
    print(markdown(["room", "imports"], ([f"`{room}`", ", ".join(sorted(rooms[room]))] for room in sorted(rooms))))
    print()
    print(markdown(["", "now"], measures(sources).items()))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    files = {room: [name.rpartition("/")[2] for name in sources if room_of(name) == room != name] for room in rooms}
    files = {room: [name for name in names if name != "__init__"] for room, names in files.items()}
    arguments.out.write_text(picture(rooms, files))


if __name__ == "__main__":
    main()
