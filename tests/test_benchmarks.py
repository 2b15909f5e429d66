"""What the programs in benchmarks/ ask of each other, where nothing has to be measured to see it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import before_after
import mutations
import throughput
from workloads import WORKLOADS


def test_every_row_of_a_table_is_a_program_that_there_is() -> None:
    rows = [row for case in (*throughput.CASES, *throughput.ONE_AGENT) for row in case.programs]
    rows += [*throughput.COLLECTING, *map(throughput.Row, throughput.LEARNERS), *throughput.QUICK.programs]
    rows += [row for *_, row in before_after.CASES]
    assert {row.workload for row in rows} <= set(WORKLOADS)


def test_every_deliberate_fault_still_finds_its_text() -> None:
    found = {mutation.name: mutations.applies(mutation, mutations.ROOT) for mutation in mutations.MUTATIONS}
    assert [name for name, applies in found.items() if not applies] == []


def test_the_steps_to_a_return_are_those_at_which_each_agent_first_reaches_it(monkeypatch):
    """Whoever falls and rises again had reached it before; whoever never does has taken as many steps as there were."""
    scores = [[0, 475, 0], [500, 0, 474], [0, 500, 0]]
    asked = []

    class Worker:
        def ask(self, what):
            asked.append(what)
            return {"return": scores[min(asked.count("score"), 3) - 1]}

    def workers(programs, peers, environment, num_envs, steps):
        assert steps == 3 * throughput.EVERY  # of three agents together
        return contextlib.nullcontext({program: Worker() for program in programs})

    monkeypatch.setattr(throughput, "workers", workers)
    found = throughput.steps_to_return(throughput.Row("jaxpg", agents=3), throughput.Peers())
    assert found == [2 * throughput.EVERY, throughput.EVERY, throughput.PATIENCE]
    assert asked.count("run") == throughput.PATIENCE // throughput.EVERY - 1
    asked.clear()
    scores[1][2] = 475
    throughput.steps_to_return(throughput.Row("jaxpg", agents=3), throughput.Peers())
    assert asked == ["run", "score"] * 2  # all have
