"""What the programs in benchmarks/ ask of each other, where nothing has to be measured to see it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import before_after
import throughput
from workloads import WORKLOADS


def test_every_row_of_a_table_is_a_program_that_there_is() -> None:
    rows = [row for case in (*throughput.CASES, *throughput.ONE_AGENT) for row in case.programs]
    rows += [*throughput.COLLECTING, *throughput.LEARNING.programs, *throughput.QUICK.programs]
    rows += [row for *_, row in before_after.CASES]
    assert {row.workload for row in rows} <= set(WORKLOADS)
