"""The picture of architecture.py: rooms as boxes, the ground at the bottom, every arrow pointing down.

A row is a floor: a room stands one above the highest of those that it imports. An arrow that passes floors goes through
an invisible box on each of them, so that it does not cross a room. Within a row a box stands where its neighbours do.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

Rooms = Mapping[str, set[str]]
Files = Mapping[str, list[str]]
WIDTH, MARGIN, FLOOR_GAP, TITLE, LINE = 1180, 20, 34, 26, 13
CHARACTERS = 26  # of a line of file names
STYLE = """
.room { fill: #eef3fa; stroke: #41608c; } .name { fill: #14233a; } .file { fill: #4a5a70; }
.way { fill: none; stroke: #7b8ca6; } .head { fill: #7b8ca6; }
@media (prefers-color-scheme: dark) {
  .room { fill: #1d2838; stroke: #7ea0cf; } .name { fill: #e8eef7; } .file { fill: #a9b8cc; }
}
text { font-family: ui-monospace, Menlo, Consolas, monospace; }
.name { font-size: 14px; font-weight: 600; } .file { font-size: 10px; }
"""


def reachable(rooms: Rooms, start: Iterable[str]) -> set[str]:
    """The rooms that can be reached from some rooms by their arrows, themselves included."""
    found: set[str] = set()
    waiting = list(start)
    while waiting:
        room = waiting.pop()
        waiting += rooms[room] - found
        found |= {room} | rooms[room]
    return found


class Box(NamedTuple):
    """A room in the picture: its name, the names of its files in lines, where its upper left corner is, its size."""

    name: str
    lines: list[str]
    x: float
    y: float
    width: float
    height: float


def floors_of(rooms: Rooms) -> dict[str, int]:
    """The number of arrows on the longest way down from each room."""
    floors: dict[str, int] = {}
    for room in TopologicalSorter(rooms).static_order():
        floors[room] = max((floors[other] + 1 for other in rooms[room]), default=0)
    return floors


def without_ways_back(rooms: Rooms) -> Rooms:
    """The rooms without arrows from a folder to the one that it lies in, where that imports it: one stands for both."""
    return {
        room: {other for other in others if not (room.startswith(f"{other}/") and room in rooms[other])}
        for room, others in rooms.items()
    }


def drawn_arrows(rooms: Rooms) -> list[tuple[str, str]]:
    """The arrows that no longer way implies."""
    implied = {room: reachable(rooms, set().union(*(rooms[other] for other in rooms[room]))) for room in rooms}
    return [(a, b) for a in rooms for b in rooms[a] - implied[a]]


def with_ways(arrows: list[tuple[str, str]], floors: dict[str, int]) -> tuple[dict[str, int], list[list[str]]]:
    """Floors with an invisible room wherever an arrow passes one, and each arrow as its way from room to room."""
    places, ways = dict(floors), []
    for a, b in sorted(arrows):
        passed = {f"{a}>{b}@{floor}": floor for floor in range(floors[a] - 1, floors[b], -1)}
        places |= passed
        ways.append([a, *passed, b])
    return places, ways


def ordered(places: dict[str, int], ways: list[list[str]]) -> list[list[str]]:
    """The rooms of each floor from left to right: each, again and again, at the mean place of its neighbours."""
    rows: dict[int, list[str]] = defaultdict(list)
    for room, floor in sorted(places.items()):
        rows[floor].append(room)
    near: dict[str, list[str]] = defaultdict(list)
    for way in ways:
        for a, b in pairwise(way):
            near[a].append(b)
            near[b].append(a)
    for turn in range(24):
        order = sorted(rows) if turn % 2 else sorted(rows, reverse=True)
        at = {room: (i + 0.5) / len(row) for row in rows.values() for i, room in enumerate(row)}
        for floor in order:
            centre = {r: sum(at[n] for n in near[r]) / len(near[r]) if near[r] else at[r] for r in rows[floor]}
            rows[floor].sort(key=centre.__getitem__)
            at |= {room: (i + 0.5) / len(rows[floor]) for i, room in enumerate(rows[floor])}
    return [rows[floor] for floor in sorted(rows, reverse=True)]


def boxes_of(rows: list[list[str]], files: Files) -> dict[str, Box]:
    """Where everything stands; invisible rooms are narrow."""
    boxes, y = {}, float(MARGIN)
    for row in rows:
        size = {room: [] if "@" in room else textwrap.wrap(" ".join(files[room]), CHARACTERS) for room in row}
        widths = {r: 4.0 if "@" in r else max(len(r) * 8.6, *(len(x) * 6.1 for x in [*size[r], ""])) + 22 for r in row}
        height = max(TITLE + LINE * len(lines) for lines in size.values())
        gap = (WIDTH - sum(widths.values())) / (len(row) + 1)
        x = gap
        for room in row:
            own = float(TITLE) + LINE * len(size[room])
            boxes[room] = Box(room, size[room], x, y + (height - own) / 2, widths[room], own)
            x += widths[room] + gap
        y += height + FLOOR_GAP
    return boxes


def picture(rooms: Rooms, files: Files) -> str:
    """The rooms, with the names of their files, as SVG for light and dark pages."""
    rooms = without_ways_back(rooms)
    places, ways = with_ways(drawn_arrows(rooms), floors_of(rooms))
    boxes = boxes_of(ordered(places, ways), files)
    height = max(box.y + box.height for box in boxes.values()) + MARGIN
    parts = [f'<path class="way" d="{path(way, boxes)}" marker-end="url(#head)"/>' for way in ways]
    for box in boxes.values():
        if "@" not in box.name:
            parts.append(
                f'<rect class="room" x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{box.height:.0f}" '
                f'rx="5"/><text class="name" x="{box.x + 11:.0f}" y="{box.y + 18:.0f}">{box.name}</text>'
            )
            parts += [
                f'<text class="file" x="{box.x + 11:.0f}" y="{box.y + 33 + LINE * i:.0f}">{line}</text>'
                for i, line in enumerate(box.lines)
            ]
    head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">\n'
        f"<title>The rooms of jaxpg and the arrows between them</title>\n<style>{STYLE}</style>\n"
        f'<defs>{head}<path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def path(way: list[str], boxes: Mapping[str, Box]) -> str:
    """A curve from the lower edge of a room through the invisible ones to the upper edge of the other."""
    stops = [boxes[room] for room in way]
    text = f"M{stops[0].x + stops[0].width / 2:.0f} {stops[0].y + stops[0].height:.0f}"
    for a, b in pairwise(stops):
        (x0, y0), (x1, y1) = (a.x + a.width / 2, a.y + a.height), (b.x + b.width / 2, b.y)
        bend = (y1 - y0) * 0.5
        text += f" L{x0:.0f} {y0:.0f} C{x0:.0f} {y0 + bend:.0f} {x1:.0f} {y1 - bend:.0f} {x1:.0f} {y1:.0f}"
    return text
