"""The modules, the style and the markup of the grid world in one file that loads nothing else."""

from __future__ import annotations

import re
from pathlib import Path

MODULES = ("solver", "learners", "board", "chart", "settings", "solve", "editing", "page")
"""The JavaScript modules of this folder, each after those that it imports from."""
_FOLDER = Path(__file__).parent


def gridworld_page() -> str:
    """The page as HTML. Its content security policy forbids every request."""
    page = _read("page.html").replace("/*STYLE*/", _read("page.css"))
    return page.replace("/*SCRIPT*/", script(*MODULES))


def script(*modules: str) -> str:
    """Modules one after the other as one module: without imports among them, and without exports.

    Args:
        modules: of MODULES, in its order.
    """
    joined = "\n".join(_read(f"{name}.js") for name in modules)
    return re.sub(r'^import \{[^}]*\} from "\./\w+\.js";\n|^export ', "", joined, flags=re.MULTILINE)


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
