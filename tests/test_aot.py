"""Programs compiled for TPUs and GPUs that are not here (benchmarks/aot.py): the counting, and ceilings of the counts.

The ceilings hold what was gained on machines that no test runs on. They are of one version of jax and of its compilers,
those of the extra `aot`, and at most a tenth above what was counted.
"""

from __future__ import annotations

import importlib
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from jaxpg import vectorize

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))
from aot_counts import from_hlo, from_thunks  # noqa: E402
from aot_worker import ROUND, compile_elsewhere, missing  # noqa: E402

HLO = """
%g (p0: f32[8]) -> f32[8] {
  %p0 = f32[8]{0} parameter(0)
  ROOT %y = f32[8]{0} tanh(%p0)
}

%body.1 (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %f = f32[8]{0:T(8)} fusion(%x), calls=%g, metadata={op_name="w(a)"}, backend_config={"estimated_cycles":"100"}
  %r = f32[8]{0} all-reduce(%f), replica_groups={{0,1}}, to_apply=%add
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %r)
}

%condition.1 (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%body.2 (q: (pred[], f32[8])) -> (pred[], f32[8]) {
  %q = (pred[], f32[8]{0}) parameter(0)
  %w = (s32[], f32[8]{0}) while(%q), condition=%condition.1, body=%body.1
  %c = f32[8]{0} copy(%q), backend_config={"estimated_cycles":"7"}
  ROOT %t = (pred[], f32[8]{0}) tuple(%w, %c)
}

%condition.2 (q: (pred[], f32[8])) -> pred[] {
  %q = (pred[], f32[8]{0}) parameter(0)
  ROOT %go = pred[] get-tuple-element(%q), index=0
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %s = (f32[8]{0}, bf16[4]{0}) all-reduce-start(%a), to_apply=%add
  ROOT %outer = (pred[], f32[8]{0}) while(%a), condition=%condition.2, body=%body.2
}
"""


def test_operations_are_counted_by_loop() -> None:
    program = from_hlo(HLO)
    started = {"bytes": 32 + 40, "exchanges": 1, "exchanged_bytes": 8 * 4 + 4 * 2}
    assert program.each == {"operations": 1, "cycles": 0, **started}
    (outer,) = program.inner
    (inner,) = outer.inner
    assert (outer.trips, inner.trips) == (None, 5)
    each = {"operations": 2, "cycles": 100, "exchanges": 1, "exchanged_bytes": 32}
    assert inner.each == {**each, "bytes": 2 * (32 + 32)}
    whole = {"operations": 11, "cycles": 507, "exchanges": 5, "exchanged_bytes": 160}
    assert outer.round() == {**whole, "bytes": 5 * 128 + 33 + 32}  # of a tuple of 33 bytes to 32
    assert program.round(3)["operations"] == 1 + 3 * 11
    assert program.find((None, 5), "operations") is inner


MOVED = """
%in_place (p0: f32[100,8], p1: f32[1,8], p2: s32[]) -> f32[100,8] {
  %p0 = f32[100,8]{1,0} parameter(0)
  %p1 = f32[1,8]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %z = s32[] constant(0)
  %y = f32[1,8]{1,0} negate(%p1)
  ROOT %u = f32[100,8]{1,0} dynamic-update-slice(%p0, %y, %p2, %z)
}

%sliced (p0: f32[800], p1: s32[], p2: bf16[8]) -> (f32[1,8], bf16[8]) {
  %p0 = f32[800]{0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = bf16[8]{0} parameter(2)
  %b = f32[100,8]{1,0} bitcast(%p0)
  %z = s32[] constant(0)
  %s = f32[1,8]{1,0} dynamic-slice(%b, %p1, %z), dynamic_slice_sizes={1,8}
  ROOT %t = (f32[1,8]{1,0}, bf16[8]{0}) tuple(%s, %p2)
}

ENTRY %main (a: f32[100,8], r: f32[1,8], i: s32[], c: f32[800], h: bf16[8]) -> f32[8,8] {
  %a = f32[100,8]{1,0} parameter(0)
  %r = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %c = f32[800]{0} parameter(3)
  %h = bf16[8]{0} parameter(4)
  %f1 = f32[100,8]{1,0} fusion(%a, %r, %i), kind=kLoop, calls=%in_place
  %f2 = (f32[1,8]{1,0}, bf16[8]{0}) fusion(%c, %i, %h), kind=kLoop, calls=%sliced
  ROOT %d = (f32[8,8]{1,0}, s8[4096]{0}) custom-call(%r, %r), custom_call_target="__cublas$gemm"
}
"""


def test_bytes_are_those_of_the_parts_that_are_read_and_written() -> None:
    """A row of 32 bytes updated in place at an index of 4, a row cut out, and a product without its scratch memory."""
    in_place, sliced, product = (32 + 4) + 32, (32 + 4 + 16) + (32 + 16), 2 * 32 + 256
    assert from_hlo(MOVED).each["bytes"] == in_place + sliced + product


THUNKS = """\
000: kCopy          [source       | next=001 (1)] kCopy
001: kWhile         [prev=000 (1) | sink        ]
condition:
    002: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1]
  body:
    000: kCommandBuffer      [source       | next=005 (1)]
        003: kCublasLtMatmul [source       | next=004 (1)] kCublasLtMatmul
        004: kCustomKernel   [prev=003 (1) | sink        ] wrapped_tanh grid: [1, 1, 1]
    005: kWhile              [prev=003 (1) | sink        ]
condition:
        006: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
      body:
        007: kCustomKernel       [source | sink] loop_add_fusion grid: [1, 1, 1]
        008: kDynamicSliceFusion [source | sink] params=1, results=1
            009: kCopy [source | sink] kCopy
    010: kCopy               [prev=005 (1) | sink        ] kCopy
"""
NAMES = 'thunk_info {\n profile_annotation: "outer"\n thunk_id: 1\n}\n profile_annotation: "inner"\n thunk_id: 5\n'
LOOPS = """
  %inner = (s32[]) while(%a), condition=%c, body=%b, backend_config={"known_trip_count":{"n":"4"}}
  %outer = (s32[]) while(%a), condition=%c, body=%b
"""


def test_kernels_launches_and_waits_are_counted_by_loop() -> None:
    program = from_thunks(THUNKS, NAMES, LOOPS)
    (outer,) = program.inner
    (inner,) = outer.inner
    assert program.each == {"kernels": 1, "launches": 1}
    assert (inner.trips, inner.each) == (4, {"kernels": 2, "launches": 2})  # its condition is never computed
    # Of its own: a graph of two, a copy, and the condition, for whose answer the host waits.
    assert (outer.trips, outer.each) == (None, {"kernels": 4, "launches": 3, "waits": 1})
    assert outer.round() == {"kernels": 12, "launches": 11, "waits": 1}


CEILINGS: dict[tuple[str, str], dict[str, float]] = {
    ("cuda H100", "PPO, CartPole, 64"): {"step": 8.5, "minibatch": 37, "kernels": 1_750, "launches": 48, "waits": 1},
    ("cuda H100", "PPO, CartPole, 64, GRU"): {"step": 9, "minibatch": 800, "kernels": 14_200, "launches": 230},
    ("cuda H100", "PPO, CartPole, 65,536"): {"kernels": 2_300, "bytes": 420_000_000_000},
    ("cuda H100", "GRPO, sort"): {"step": 40, "kernels": 400, "launches": 15, "waits": 2},
    ("cuda H100", "GRPO, 0.5B weights, 8 completions, 1 chip"): {"temporary_bytes": 3_700_000_000},
    ("cuda H100", "PPO, CartPole, 64, 8 chips"): {"kernels": 1_850, "exchanges": 18, "minibatch_exchanges": 1},
    ("tpu v5e", "PPO, CartPole, 64"): {"step": 16, "minibatch": 115, "cycles": 5_100_000, "temporary_bytes": 2_550_000},
    ("tpu v5e", "PPO, CartPole, 2,048"): {"step": 19, "minibatch": 195, "cycles": 12_700_000},
}


def test_a_round_is_as_long_as_the_package_makes_it() -> None:
    assert ROUND == vectorize.ROUND


def test_what_is_counted_of_this_commit_is_not_compiled_again_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # importing the program sets it, for good without this
    aot = importlib.import_module("aot")
    compiled: list[str] = []

    def compile_one(target: str, library: str, case: str, **_: Any) -> dict[str, Any]:
        compiled.append(f"{library}: {case}")
        return {"failed": "no"} if case == "bad" else {"number": len(compiled), "versions": {"jax": "1"}}

    monkeypatch.setattr(aot, "missing", lambda target: [])
    monkeypatch.setattr(aot, "compile_elsewhere", compile_one)
    monkeypatch.setattr(aot, "installed", lambda python: {"python": "3", "jax": "1"})
    out, wanted = tmp_path / "aot.json", [("v5e", "jaxpg", "a"), ("v5e", "rejax", "a"), ("v5e", "jaxpg", "bad")]

    def numbers(commit: str, *, fresh: bool = False) -> tuple[list[str], list[Any]]:
        """What is compiled, and what the file says of it then."""
        monkeypatch.setattr(aot, "describe_machine", lambda: {"commit": commit})
        compiled.clear()
        aot.compile_missing(wanted, out, lambda library: (None, ""), fresh=fresh)
        return list(compiled), [x.get("number") for x in json.loads(out.read_text())["programs"]]

    assert numbers("1") == (["jaxpg: a", "rejax: a", "jaxpg: bad"], [1, 2, None])
    assert numbers("1") == (["jaxpg: bad"], [1, 2, None])  # what failed is tried again
    assert numbers("2") == (["jaxpg: a", "jaxpg: bad"], [1, 2, None])  # a peer is what it was
    for _ in range(2):  # of a changed checkout nothing is kept
        assert numbers("2-dirty") == (["jaxpg: a", "jaxpg: bad"], [1, 2, None])
    assert numbers("2") == (["jaxpg: a", "jaxpg: bad"], [1, 2, None])
    wanted = wanted[1:2]
    assert numbers("2", fresh=True) == (["rejax: a"], [1, 1])  # the other case is kept


def counted(target: str, case: str) -> dict[str, Any]:
    """What the program of a case consists of; skips where there is nothing to compile it with."""
    if absent := missing(target):
        pytest.skip(f"to compile for {target} takes {', '.join(absent)}: pip install -e '.[aot]'")
    if metadata.version("jax") != "0.10.2":
        pytest.skip("the ceilings are of jax 0.10.2")
    found = compile_elsewhere(target, "jaxpg", case, python=sys.executable, path=str(BENCHMARKS.parent))
    assert "failed" not in found, found["failed"]
    return found


@pytest.mark.full
@pytest.mark.parametrize(("target", "case"), CEILINGS, ids=[": ".join(names) for names in CEILINGS])
def test_programs_for_machines_not_here_stay_small(target: str, case: str) -> None:
    found = counted(target, case)
    numbers = {name: found[name] for name in ("step", "minibatch", "minibatch_exchanges", "temporary_bytes")}
    numbers |= found["update"]
    ceilings = CEILINGS[target, case]
    above = {name: (numbers[name], limit) for name, limit in ceilings.items() if numbers[name] > limit}
    assert not above, f"{case} for {target}: found, at most {above}"
