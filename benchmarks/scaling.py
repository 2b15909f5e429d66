"""How the time and the memory of training grow, one quantity at a time.

    python benchmarks/scaling.py [--only environments] [--rounds 3]

PPO on CartPole (workloads.py) with more and more environments, agents by vmap (of 4 environments each), environment
steps in one program, and devices (which on a CPU share the same cores); GRPO with larger and larger transformers. Every
point is a process of its own, timed as in throughput.py. Time is that of one call, memory what XLA says the program
holds at once. Growth is read as t(n) = a + b n, fitted to the relative error: where n is far below a / b, the bend, the
constant part rules and more is nearly free; far above it, the exponent of the last points should be 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import NamedTuple

import matplotlib
import numpy as np
from command_lines import out_file
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullFormatter
from result_files import put, read
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.optimize import nnls
from throughput import busy_machine
from turns import Peers, Row, interleave, workers
from work import PPO

from jaxpg.report.drawing import STYLE
from jaxpg.report.palette import COLORS

HERE = Path(__file__).resolve().parent
KINDS = {"wall": "wall seconds", "cpu": "CPU seconds", "bytes": "bytes"}


class Point(NamedTuple):
    """One size of what grows, and the program that has it."""

    size: float
    row: Row
    case: tuple[str, int, int]


def one_iteration(num_envs: int) -> int:
    """Environment steps of one PPO iteration."""
    return PPO.num_steps * num_envs


AXES: dict[str, list[Point]] = {
    "environments": [
        Point(n, Row("jaxpg"), ("CartPole-v1", n, one_iteration(n))) for n in (4, 16, 64, 256, 1024, 4096, 16384, 65536)
    ],
    "agents": [
        Point(n, Row("jaxpg", agents=n), ("CartPole-v1", 4, one_iteration(4 * n)))
        for n in (1, 4, 16, 64, 256, 1024, 4096)
    ],
    "steps": [Point(n, Row("jaxpg"), ("CartPole-v1", 64, n)) for n in (2**13, 2**15, 2**17, 2**19, 2**21)],
    "devices": [Point(n, Row("jaxpg", devices=n), ("CartPole-v1", 2048, one_iteration(2048))) for n in (1, 2, 4, 8)],
    "weights": [
        Point(n, Row("jaxpg_language"), (size, 64, 1))
        for size, n in (("0.01M", 1e4), ("0.1M", 1e5), ("1M", 1e6), ("10M", 1e7))
    ],
}
"""What grows; of the weights the nominal number."""


def measure(point: Point, rounds: int) -> dict[str, float]:
    """Seconds of a call, medians, and bytes."""
    with workers([point.row], Peers(), *point.case) as running:
        samples = interleave(running, "run", rounds)[point.row]
        seconds = {kind: median(sample[kind] for sample in samples) for kind in ("wall", "cpu")}
        return {"size": point.size, **seconds, "bytes": running[point.row].bytes}


class Growth(NamedTuple):
    """How a quantity grows with n: t(n) = constant + slope n, where that bends, and the exponent of the last points."""

    constant: float
    slope: float
    exponent: float

    @property
    def bend(self) -> float:
        """The n at which what grows is as much as what does not; infinite where nothing grows."""
        return self.constant / self.slope if self.slope else float("inf")


def growth(sizes: np.ndarray, values: np.ndarray) -> Growth:
    """Fit t(n) = a + b n, a and b not negative, by relative error; the exponent is that of the last half of points."""
    (constant, slope), _ = nnls(np.stack([1 / values, sizes / values], 1), np.ones(len(values)))
    last = slice(len(sizes) // 2, None)
    exponent = np.polyfit(np.log(sizes[last]), np.log(values[last]), 1)[0]
    return Growth(float(constant), float(slope), float(exponent))


def figure(found: dict[str, list[dict[str, float]]]) -> Figure:
    """Log-log plots: a column for what grows, time above, memory below; dotted what would be in proportion to it."""
    with matplotlib.rc_context(STYLE):
        page = Figure((3 * len(found), 5.4), layout="constrained")
        axes = page.subplots(2, len(found), squeeze=False, sharex="col")
        for column, (axis, points) in enumerate(found.items()):
            for row, kinds in enumerate((("wall", "cpu"), ("bytes",))):
                curves(axes[row, column], points, kinds, proportional=axis != "devices")
            axes[1, column].set_xlabel(axis)
            if axis == "devices":
                axes[1, column].set_xticks([p["size"] for p in points], [f"{p['size']:.0f}" for p in points])
        axes[0, 0].set_ylabel("seconds of a call")
        axes[1, 0].set_ylabel("bytes")
        axes[0, 0].legend(frameon=False)
    return page


def curves(ax: Axes, points: list[dict[str, float]], kinds: tuple[str, ...], *, proportional: bool) -> None:
    """One of the plots, over at least a decade."""
    sizes = np.asarray([point["size"] for point in points])
    measured = {kind: np.asarray([point[kind] for point in points]) for kind in kinds}
    for i, (kind, values) in enumerate(measured.items()):
        ax.loglog(sizes, values, "o-", color=COLORS[i % len(COLORS)], markersize=4, label=KINDS[kind])
        if proportional:
            ax.loglog(sizes, values[-1] * sizes / sizes[-1], ":", color=COLORS[i % len(COLORS)], linewidth=1)
    low, high = (reach(list(map(reach, measured.values()))) for reach in (np.min, np.max))
    margin = max(2.0, (10 * low / high) ** 0.5)
    ax.set_ylim(low / margin, high * margin)
    if high / low < 10:  # few powers of ten, which would leave the axis with one number
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(LogFormatterSciNotation(labelOnlyBase=False, minor_thresholds=(9, 9)))
    for which in (ax.xaxis, ax.yaxis):
        which.set_minor_formatter(NullFormatter())
    ax.grid(True)


def table(axis: str, points: list[dict[str, float]]) -> Table:
    """The points of one axis and, below, how each column grows."""
    found = Table(axis, "wall s", "CPU s", "MiB", title=f"Growth with {axis}", title_justify="left")
    for point in points:
        mebibytes = point["bytes"] / 2**20
        found.add_row(f"{point['size']:,.0f}", f"{point['wall']:.3g}", f"{point['cpu']:.3g}", f"{mebibytes:,.1f}")
    found.add_section()
    sizes = np.asarray([point["size"] for point in points])
    grown = [growth(sizes, np.asarray([point[kind] for point in points])) for kind in KINDS]
    found.add_row("exponent at the end", *(f"{g.exponent:.2f}" for g in grown))
    found.add_row("bends at", *(where(g.bend, sizes) for g in grown))
    return found


def where(bend: float, sizes: np.ndarray) -> str:
    """The bend, as far as it was measured: outside of the sizes a fit says no more than on which side."""
    if bend < sizes.min():
        return f"below {sizes.min():,.0f}"
    return f"{bend:,.0f}" if bend <= sizes.max() else f"above {sizes.max():,.0f}"


FEWEST = 3
"""Sizes that say how something grows."""


def sizes_up_to(axis: str, most: float) -> list[Point]:
    """The points of an axis without larger sizes; with too few of them the program ends with a sentence."""
    points = [point for point in AXES[axis] if point.size <= most]
    if len(points) < FEWEST:
        least = AXES[axis][FEWEST - 1].size
        left = f"--most {most:g} leaves {len(points)} of the sizes of {axis}, and growth needs {FEWEST}"
        raise SystemExit(f"{left}: give {least:g} or more.")
    return points


def main() -> None:
    """Measure, print, draw, write the JSON; what is not measured now stays in both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--rounds", type=int, default=3, help="timed calls, of which the median is taken (default 3)")
    parser.add_argument("--most", type=float, default=float("inf"), help="leave out larger sizes; with --out alone")
    parser.add_argument(
        "--out", type=out_file, default=HERE / "results" / "scaling.json", help="and a picture beside it"
    )
    args = parser.parse_args()
    if args.most < float("inf") and args.out == parser.get_default("out"):
        parser.error("--most leaves sizes out, which would be missing from the results: give another file with --out")
    chosen = {axis: sizes_up_to(axis, args.most) for axis in args.only}
    console, about = Console(), {"machine": busy_machine()}
    for axis, points in chosen.items():
        found = [measure(p, args.rounds) for p in track(points, axis, console=console, transient=True)]
        put(args.out, "axes", axis, {"points": found}, about)
        console.print(table(axis, found))
    known = read(args.out)["axes"]
    drawn = figure({axis: known[axis]["points"] for axis in AXES if axis in known})
    drawn.savefig(args.out.with_suffix(".png"), dpi=150)
    console.print(f"Written to {args.out} and {args.out.with_suffix('.png')}")


if __name__ == "__main__":
    main()
