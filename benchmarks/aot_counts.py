"""Counting a compiled program: what its loops do each time round, from XLA's own text.

Two texts are read. The scheduled HLO, which every platform has: its operations, its exchanges between devices, and on
TPUs the cycles that the compiler estimates for each operation. And on CUDA the sequence of thunks, XLA's word for what
the host hands to the GPU one after the other: kernels, library calls and copies, alone or as a graph of many.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Loop(NamedTuple):
    """A loop, or a whole program.

    trips: how often it goes round, None where that depends on the data; 1 for a program.
    each: what one round counts by itself.
    inner: the loops within it.
    """

    trips: int | None
    each: Counter[str]
    inner: list[Loop]

    def round(self, unknown: int = 1) -> Counter[str]:
        """What one round counts with the loops within it; those of unknown length go round `unknown` times."""
        total = Counter(self.each)
        for loop in self.inner:
            trips = unknown if loop.trips is None else loop.trips
            total.update({name: trips * n for name, n in loop.round(unknown).items()})
        return total

    def walk(self) -> Iterator[Loop]:
        """The loops within, the outer ones first."""
        yield from self.inner
        for loop in self.inner:
            yield from loop.walk()

    def find(self, path: Sequence[int | None], key: str) -> Loop | None:
        """The loop at the end of a path of trips, at any depth; of several the one that counts most `key` a round."""
        found = [loop for loop in self.walk() if loop.trips == path[0]]
        for trips in path[1:]:
            found = [inner for loop in found for inner in loop.inner if inner.trips == trips]
        return max(found, key=lambda loop: loop.round()[key], default=None)


COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^  (?:ROOT )?%([\w.\-]+) = (.*)$")
OPCODE = re.compile(r"(?:^|[\])}] )([a-z][a-z0-9\-]*)\(")
KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
SHAPE = re.compile(r"\b(pred|[suf]\d+|bf16|f8\w*|c\d+)\[([\d,]*)\]")
HANDLES = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id")
CONTROL = ("while", "conditional", "call")
ENDS = ("copy-done", "slice-done", "async-done", "async-update", "all-reduce-done", "all-gather-done")
FREE = frozenset([*HANDLES, *CONTROL, *ENDS, "collective-permute-done"])
EXCHANGES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


class _Instruction(NamedTuple):
    name: str
    opcode: str
    text: str


def from_hlo(text: str) -> Loop:
    """The loops of a scheduled program with `operations`, `cycles`, `bytes`, `exchanges` and `exchanged_bytes`.

    bytes: what operations read and write, each of them from and to memory; of an array that is sliced, gathered from or
    updated in place, the part alone. Caches make it less.
    """
    computations, entry = _computations(text)

    def loop(name: str, trips: int | None) -> Loop:
        each: Counter[str] = Counter()
        inner = []
        for instruction in computations[name]:
            if instruction.opcode == "while":
                body, condition = (re.search(rf"{x}=%([\w.\-]+)", instruction.text)[1] for x in ("body", "condition"))
                inner.append(loop(body, _trips(instruction, computations[condition])))
            elif instruction.opcode in ("conditional", "call"):
                for called in _called(instruction):
                    branch = loop(called, 1)
                    each.update(branch.each)
                    inner += branch.inner
            elif instruction.opcode not in FREE and "AllocateBuffer" not in instruction.text:
                each.update(_counts(instruction))
                each["bytes"] += _moved(instruction, computations[name], computations)
        return Loop(trips, each, inner)

    return loop(entry, 1)


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """The instructions of every computation, and the name of the first one."""
    found: dict[str, list[_Instruction]] = {}
    current, entry = None, ""
    for line in text.splitlines():
        if head := COMPUTATION.match(line):
            current = found.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line == "}":
            current = None
        elif current is not None and (match := INSTRUCTION.match(line)):
            opcode = OPCODE.search(re.sub(r"\{[^{}]*\}", "", match[2]).split(", metadata=")[0])
            current.append(_Instruction(match[1], opcode[1] if opcode else "", match[2]))
    return found, entry


def _trips(loop: _Instruction, condition: list[_Instruction]) -> int | None:
    """How often a loop goes round: as XLA says, or where its condition is nothing but `counter < constant`."""
    if known := KNOWN_TRIPS.search(loop.text):
        return int(known[1])
    limits = [int(x[1]) for i in condition if i.opcode == "constant" and (x := re.search(r"constant\((\d+)\)", i.text))]
    rest = [i for i in condition if i.opcode not in ("parameter", "get-tuple-element", "constant", "bitcast")]
    counted = len(rest) == 1 and rest[0].opcode == "compare" and "direction=LT" in rest[0].text
    return limits[0] if counted and len(limits) == 1 else None


def _called(instruction: _Instruction) -> list[str]:
    """The computations that a conditional or a call runs."""
    listed = re.search(r"(?:branch_computations|calls)=\{([^}]*)\}", instruction.text)
    single = re.findall(r"(?:to_apply|true_computation|false_computation)=%([\w.\-]+)", instruction.text)
    return single + (re.findall(r"%([\w.\-]+)", listed[1]) if listed else [])


def _counts(instruction: _Instruction) -> Counter[str]:
    cycles = CYCLES.search(instruction.text)
    counts = Counter(operations=1, cycles=int(cycles[1]) if cycles else 0)
    if any(instruction.opcode in (name, f"{name}-start") for name in EXCHANGES):
        shape = instruction.text.split(f" {instruction.opcode}(")[0]
        counts.update(exchanges=1, exchanged_bytes=_bytes(shape))
    return counts


def _moved(instruction: _Instruction, around: list[_Instruction], computations: dict[str, list[_Instruction]]) -> int:
    """The `bytes` of one operation: its arguments and its results, see `from_hlo`."""
    of_around = {x.name: x for x in around}
    fused = re.search(r"calls=%([\w.\-]+)", instruction.text) if instruction.opcode == "fusion" else None
    if fused is None:  # an operation by itself is read as a fusion of one
        arguments = [of_around[x] for x in _operands(instruction) if x in of_around]
        return _read(arguments, [instruction]) + _written(instruction, of_around)
    inside = computations[fused[1]]
    parameters = [x for x in inside if x.opcode == "parameter"]
    return _read(parameters, inside) + _written(inside[-1], {x.name: x for x in inside})


PARTS = ("dynamic-slice", "slice", "gather")


def _read(arguments: list[_Instruction], users: list[_Instruction]) -> int:
    """The bytes of arguments that are read; `users` are the operations among which they are used."""
    read = 0
    for argument in arguments:
        names, using = {argument.name}, []
        for user in users:  # in their order: a bitcast comes before its own users
            operands = _operands(user)
            if user.opcode == "bitcast" and operands[0] in names:
                names.add(user.name)
            elif names & set(operands):
                using.append((user, bool(operands) and operands[0] in names))
        if all(first and user.opcode in (*PARTS, "dynamic-update-slice") for user, first in using):
            read += sum(_bytes(_shape(user)) for user, _ in using if user.opcode in PARTS)
        else:
            read += _bytes(_shape(argument))
    return read


def _written(result: _Instruction, known: dict[str, _Instruction]) -> int:
    """The bytes of a result; of one that is updated in place, the update. cuBLAS's scratch memory is int8."""
    operands = [known[x] for x in _operands(result) if x in known]
    if result.opcode == "tuple":
        return sum(_written(x, known) for x in operands)
    if result.opcode == "bitcast" and operands:
        return _written(operands[0], known)
    if result.opcode == "dynamic-update-slice" and len(operands) > 1:
        return _bytes(_shape(operands[1]))
    shape = _shape(result)
    return _bytes(re.sub(r"\bs8\[[\d,]*\]", "", shape) if result.opcode == "custom-call" else shape)


def _operands(instruction: _Instruction) -> list[str]:
    """The names of what an operation reads."""
    listed = instruction.text.split(f" {instruction.opcode}(", 1)[-1].split(")", 1)[0]
    return re.findall(r"%([\w.\-]+)", listed)


def _shape(instruction: _Instruction) -> str:
    return instruction.text.split(f" {instruction.opcode}(", 1)[0]


def _bytes(shape: str) -> int:
    """The bytes of a shape, or of a tuple of shapes."""
    sizes = {"pred": 1, "bf16": 2}
    return sum(
        sizes.get(kind, int(re.sub(r"\D", "", kind)[:2] or 8) // 8)
        * math.prod(int(n) for n in dimensions.split(",") if n)
        for kind, dimensions in SHAPE.findall(shape)
    )


THUNK = re.compile(r"^(\s*)(\d+): (k\w+)")
CONTAINERS = ("kSequential", "kCommandBuffer", "kDynamicSliceFusion", "kConditional", "kWhile")
WAITING = ("AsyncDone", "AllReduceDone", "WaitForStreams")


class _Thunk(NamedTuple):
    number: int
    kind: str
    children: list[_Thunk]
    condition: list[_Thunk]  # of a while


def from_thunks(text: str, metadata: str, hlo: str) -> Loop:
    """The loops of a CUDA program with `kernels`, `launches` and `waits`.

    kernels: what runs on the GPU: kernels, library calls, copies.
    launches: what the host hands over, one kernel or one graph of several.
    waits: how often the host waits for a number of the GPU, to know whether a loop goes on.

    Args:
        text: XLA's thunk_sequence_after_thunk_passes.txt, or where no graph is made thunk_sequence.txt.
        metadata: XLA's thunk_metadata.txt.
        hlo: the scheduled program, which knows how long loops are.
    """
    names = {int(n): name for name, n in re.findall(r'profile_annotation: "([^"]+)"\s*thunk_id: (\d+)', metadata)}
    trips = {}
    for line in hlo.splitlines():
        if (match := INSTRUCTION.match(line)) and " while(" in line:
            known = KNOWN_TRIPS.search(line)
            trips[match[1]] = int(known[1]) if known else None

    def loop(thunks: list[_Thunk], number: int | None, in_graph: bool) -> Loop:
        each: Counter[str] = Counter()
        inner: list[Loop] = []
        for thunk in thunks:
            if thunk.kind == "kWhile":
                times = trips[names[thunk.number]]
                found = loop(thunk.children, times, in_graph)
                if times is None:
                    asked = loop(thunk.condition, 1, in_graph)
                    found.each.update(asked.each + Counter(waits=0 if in_graph else 1))
                inner.append(found)
            elif thunk.kind in CONTAINERS:
                graph = in_graph or thunk.kind == "kCommandBuffer"
                within = loop(thunk.children, 1, graph)
                each.update(within.each)
                inner += within.inner
                each["launches"] += graph and not in_graph
            elif not thunk.kind.endswith(WAITING):
                each.update(kernels=1, launches=0 if in_graph else 1)
        return Loop(number, each, inner)

    return loop(_thunks(text), 1, in_graph=False)


def _thunks(text: str) -> list[_Thunk]:
    """The thunks as a tree, by their indentation; a while has those of its condition and of its body."""
    top: list[_Thunk] = []
    stack: list[tuple[int, list[_Thunk]]] = [(-1, top)]  # indentation of a thunk, where those within it go
    loops: list[_Thunk] = []  # whose body has not begun
    for line in text.splitlines():
        if line.strip() == "condition:":
            stack[-1] = (stack[-1][0], loops[-1].condition)
        elif line.strip() == "body:":
            loop = loops.pop()
            while stack[-1][1] is not loop.condition:
                stack.pop()
            stack[-1] = (stack[-1][0], loop.children)
        elif match := THUNK.match(line):
            depth = len(match[1])
            while stack[-1][0] >= depth:
                stack.pop()
            thunk = _Thunk(int(match[2]), match[3], [], [])
            stack[-1][1].append(thunk)
            stack.append((depth, thunk.children))
            if thunk.kind == "kWhile":
                loops.append(thunk)
    return top
