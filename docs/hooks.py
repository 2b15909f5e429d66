"""What mkdocs does to the pages: mathematics as MathML, code and diffs of the ladder, files from outside of docs/.

In a page, `<!-- code: jaxpg.module.function ... -->` becomes the source of these functions, `<!-- diff: ppo -->` what a
rung replaces in its parent's record, and `<!-- outcome: ppo -->` the command of its exercise with what came out of it
(docs/line/results.json). So none of them is written down twice.
"""

from __future__ import annotations

import html
import importlib
import inspect
import json
import posixpath
import re
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from jaxpg import ladder, values
from jaxpg.experiments.config import resolve_config
from jaxpg.ladder_settings import PARENTS
from jaxpg.objectives.kl import ReferenceKL
from jaxpg.objectives.surrogates import PerEpisode
from jaxpg.rollout import Collector

ROOT = Path(__file__).parent.parent
OUTSIDE = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "README.md", "benchmarks/*.md")
OUTSIDE += ("benchmarks/results/*.md", "benchmarks/results/*.png")
"""Pages and pictures of the repository that are part of the site."""
ROOMS = sorted(path.parent.name for path in ROOT.glob("jaxpg/*/__init__.py") if path.parent.name != "cli")
ALGORITHMS: dict[str, Callable[..., Any]] = {
    **ladder.ALGORITHMS,
    **values.TABULAR_ALGORITHMS,
    **values.ALGORITHMS,
}
REQUIRED = {"max_length": 500}
"""Settings without a default, as a diff shows them."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside of docs/, and a page of reference for each room."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix().replace("README.md", "readme.md")  # README.md would be an index
            files.append(File.generated(config, name, abs_src_path=str(path)))
    for room in ("ladder", "policy_gradient", "types", *ROOMS):
        files.append(File.generated(config, f"reference/{room}.md", content=reference(room)))
    return files


def reference(room: str) -> str:
    """The page of a room: what its face has, and where these are modules, what they have."""
    module = importlib.import_module(f"jaxpg.{room}")
    inner = [name for name in getattr(module, "__all__", ()) if inspect.ismodule(getattr(module, name))]
    text = f"# `jaxpg.{room}`\n\n::: jaxpg.{room}\n"
    for name in inner:
        text += f"\n## `{room}.{name}`\n\n::: jaxpg.{room}.{name}\n    options: {{ heading_level: 3 }}\n"
    return text


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Fill in what a page takes from the source, and lead its links to where the site has their files.

    What stands between `<!-- in the repository -->` and `<!-- end -->` is for who reads the files themselves.
    """
    markdown = re.sub(r"^<!-- in the repository -->$.*?^<!-- end -->$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    for name, fill in (("code", code), ("diff", diff), ("outcome", outcome)):
        markdown = re.sub(rf"^<!-- {name}: (.*) -->$", partial(_filled, fill), markdown, flags=re.MULTILINE)
    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", partial(_link, page.file.src_uri, files), markdown)


def _filled(fill: Callable[..., str], found: re.Match[str]) -> str:
    return fill(*found[1].split())


def on_page_content(content: str, **_: Any) -> str:
    """TeX, as pymdownx.arithmatex has marked it, as MathML, which browsers draw without a script or a font of ours."""
    content = re.sub(r'<span class="arithmatex">\\\((.*?)\\\)</span>', partial(_math, "inline"), content, flags=re.S)
    return re.sub(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', partial(_math, "block"), content, flags=re.S)


def _math(display: str, found: re.Match[str]) -> str:
    return convert(html.unescape(found[1]).strip(), display=display)


def _link(source: str, files: Files, found: re.Match[str]) -> str:
    """A link of a page of the repository as one of the site; the bare path where the site lacks the file."""
    image, text, address = found.groups()
    if re.match(r"[a-z]+:|#", address):
        return found[0]
    path, _, anchor = address.partition("#")
    of_page = source if _is_outside(source) else f"docs/{source}"
    target = posixpath.normpath(posixpath.join(posixpath.dirname(of_page), path))
    in_site = target.removeprefix("docs/").replace("README.md", "readme.md")
    if target.startswith("../") or files.get_file_from_path(in_site) is None:
        return f"`{target}`" if text in (target, path) else f"{text} (`{target}`)"
    relative = posixpath.relpath(in_site, posixpath.dirname(source) or ".")
    return f"{image}[{text}]({relative}{'#' + anchor if anchor else ''})"


def _is_outside(source: str) -> bool:
    return any(Path(source.replace("readme.md", "README.md")).match(pattern) for pattern in OUTSIDE)


def code(*names: str) -> str:
    """The source of functions, in one block, each under a comment with its file."""
    return "```python\n" + "\n\n\n".join(map(_source, names)) + "\n```"


def _source(name: str) -> str:
    module, _, attribute = name.rpartition(".")
    function = inspect.unwrap(getattr(importlib.import_module(module), attribute))
    return f"# {module.replace('.', '/')}.py\n{textwrap.dedent(inspect.getsource(function)).rstrip()}"


def diff(name: str) -> str:
    """The settings and the fields of the record in which an algorithm differs from its parent, as a diff."""
    child, parent = ALGORITHMS[name], ALGORITHMS[PARENTS[name]]
    theirs, ours = (inspect.signature(algorithm).parameters for algorithm in (parent, child))
    lines = [f"  # {name} is {PARENTS[name]} with"]
    for setting in dict.fromkeys((*theirs, *ours)):
        before, after = (known[setting].default if setting in known else None for known in (theirs, ours))
        if setting not in ours:
            lines.append(f"- setting {setting}")
        elif setting not in theirs:
            lines.append(f"+ setting {setting}" + ("" if after is inspect.Parameter.empty else f" = {after!r}"))
        elif before != after:
            lines += [f"- {setting} = {before!r}", f"+ {setting} = {after!r}"]
    settings = {key: REQUIRED[key] for key in ours if key in REQUIRED}
    made = child(**settings)
    shared = {key: p.default for key, p in ours.items() if key in theirs and p.default is not inspect.Parameter.empty}
    base = parent(**shared)
    for field in made._fields:
        before, after = described(getattr(base, field)), described(getattr(made, field))
        if before != after:
            lines += [f"- .{field} = {before}", f"+ .{field} = {after}"]
    return "```diff\n" + "\n".join(lines) + "\n```"


def described(part: Any) -> str:
    """A field of a record: a function by its name, with the settings that are bound to it."""
    if isinstance(part, partial):
        bound = ", ".join(f"{key}={described(x)}" for key, x in part.keywords.items() if key != "chunk_rows")
        return f"{described(part.func)}({bound})"
    if isinstance(part, Collector):
        return described(part.collect)
    if isinstance(part, PerEpisode):
        return f"PerEpisode({described(part.surrogate)})"
    if isinstance(part, ReferenceKL):
        return described(part.in_reward or part.in_loss)
    return part.__name__.removeprefix("_") if inspect.isfunction(part) else repr(part)


def outcome(name: str) -> str:
    """The command of a rung's exercise, and the scores with it and without."""
    results = json.loads((ROOT / "docs" / "line" / "results.json").read_text(encoding="utf-8"))[name]
    broken, whole = results["broken"], results.get("whole", results["child"])
    rows = [("as it is", whole), ("broken", broken)]
    table = "\n".join(f"| {kind} | {_score(*run['score'])} |" for kind, run in rows)
    commit, seeds = results["machine"]["commit"][:7], broken["command"].split("--seeds ")[1].split()[0]
    episodes = resolve_config(*broken["command"].split()[2:4]).evaluation_episodes
    what = f"Interquartile means over {seeds} seeds of the last evaluation, {episodes} episodes each"
    made = f"{what}, with 95 % intervals; `{results['made by']}`"
    return f"```bash\n{broken['command']}\n```\n\n| | return |\n|---|---|\n{table}\n\n{made}, commit {commit}."


def _score(value: float, low: float, high: float) -> str:
    digits = 1 if abs(value) >= 1 else 3
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
