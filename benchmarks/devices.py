"""One learner on many devices: whether it stays the same, and what the devices exchange.

    python benchmarks/devices.py [--devices 1 2 4 8] [--updates 3]

The same: every algorithm of the ladder takes some updates by plain gradient descent on each number of devices (forced
on a CPU), from the same state with the same keys; how far its parameters end from those of one device is the largest
difference, relative to the largest entry of an array where that is above one. DAPO and CISPO do so without refilling
their groups: each device refills its own. And one PPO with Adam trains to the end.

Exchanged: collectives and bytes of one update, counted in the compiled program, loops taken as often as they run,
beside the least that data parallelism needs, one sum of the gradient per gradient step. From these comes the efficiency
to expect: with n devices that sum by a ring, c collectives and b bytes per update that takes t seconds of work,

    1 / (1 + (c latency + 2 (n - 1)/n b / bandwidth) / t)

so an update should take at least 9 (c latency + ...) for nine tenths of n times the speed.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import numpy as np
from command_lines import out_file
from result_files import write
from rich.console import Console
from rich.table import Table

from jaxpg import envs, ladder, networks, parallel, update
from jaxpg.experiments import config as configs
from jaxpg.experiments.build import build
from jaxpg.policy_gradient import policy_gradient
from jaxpg.rollout.evaluation import evaluation_metrics
from jaxpg.training import provenance
from jaxpg.types import Learner

HERE = Path(__file__).resolve().parent
COLUMNS = 16
SETTINGS: dict[str, dict[str, Any]] = {
    "segments": {"num_steps": 16},
    "one_minibatch": {"epochs": 2, "num_minibatches": 1},  # which steps meet in a minibatch depends on the devices
    "groups": {"group_size": 2},
}
LINKS = {"8 GPUs (NVLink)": (8, 10e-6, 300e9), "64 hosts of 8 (InfiniBand)": (512, 40e-6, 40e9)}
"""Devices, seconds per collective, bytes per second of each device: orders of magnitude, to be replaced by measured."""


def learner_of(name: str, *, descent: bool) -> Learner:
    """An algorithm on Catch, with plain gradient descent where updates are to be compared."""
    known = configs.algorithm_options(name)
    wanted: dict[str, Any] = {"num_envs": COLUMNS, "learning_rate": 0.1 if descent else 1e-3, "max_length": 9}
    if descent:
        wanted["max_resample_rounds"] = None  # each device refills its own groups, so the draws depend on their number
    for settings in SETTINGS.values():
        wanted |= settings
    if name == "trpo":
        wanted |= {"value_minibatches": 1, "value_epochs": 2}
    algorithm = ladder.ALGORITHMS[name](**{n: x for n, x in wanted.items() if n in known})
    if descent:
        algorithm = algorithm._replace(optimizer=partial(update.sgd, max_grad_norm=0.5))
    env = envs.make("Catch-bsuite")
    return policy_gradient(env, *networks.mlp(env, hidden=(16,)), algorithm)


class Spread(NamedTuple):
    """A learner's updates over a mesh: the compiled program, and what it is given."""

    program: Any
    arguments: tuple[Any, ...]


def spread(learner: Learner, devices: int, updates: int) -> Spread:
    """So many updates of one seed whose environments are split over so many devices."""
    mesh = parallel.make_mesh(1, COLUMNS, jax.devices()[:devices])
    state = jax.tree.map(lambda x: x[None], jax.jit(learner.init)(jax.random.key(0)))
    specs, keys = parallel.state_specs(state, mesh), jax.random.split(jax.random.key(1), updates)[None]

    def run(state: Any, keys: jax.Array) -> Any:
        return jax.lax.scan(learner.step, state, keys)[0]

    seed = parallel.PER_SEED
    program = parallel.spread(parallel.map_seeds(run), mesh, in_specs=(specs, seed), out_specs=specs)
    arguments = parallel.place(state, specs, mesh), keys
    return Spread(jax.jit(program).lower(*arguments).compile(), arguments)


def difference(one: Any, other: Any) -> float:
    """The largest difference between two trees of arrays, relative to an array's size where that is above one."""

    def apart(x: Any, y: Any) -> float:
        x, y = np.asarray(x), np.asarray(y)
        return float(np.abs(x - y).max(initial=0.0) / np.abs(y).max(initial=1.0))

    return max(jax.tree.leaves(jax.tree.map(apart, one, other)))


class Traffic(NamedTuple):
    """What a program sends: calls of collectives and the bytes they carry; whether a loop's length was unknown."""

    calls: int
    bytes: int
    at_least: bool = False

    def times(self, number: int) -> Traffic:
        return Traffic(self.calls * number, self.bytes * number, self.at_least)

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.bytes + other.bytes, self.at_least or other.at_least)


SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
COLLECTIVE = re.compile(r"= (.+?) (?:all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(")


def traffic(text: str) -> Traffic:
    """What one call of a compiled program sends, from its text: loops as often as they are known to run, else once."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if begins := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = begins[2]
            bodies[name] = []
            entry = name if begins[1] else entry
        elif name:
            bodies[name].append(line)

    def of(name: str) -> Traffic:
        total = Traffic(0, 0)
        for line in bodies.get(name, ()):
            if sent := COLLECTIVE.search(line):
                shapes = re.findall(r"(\w+)\[([\d,]*)\]", sent[1])
                size = sum(SIZES[kind] * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in shapes)
                total = total.plus(Traffic(1, size))
            if loop := re.search(r" while\(.*body=%?([\w.\-]+)", line):
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                inside = of(loop[1])
                if inside.calls and not known:
                    inside = inside._replace(at_least=True)
                total = total.plus(inside.times(int(known[1]) if known else 1))
            for called in re.findall(r" call\(.*to_apply=%?([\w.\-]+)", line):
                total = total.plus(of(called))
            if branches := re.search(r"branch_computations=\{([^}]*)\}", line):
                total = total.plus(max((of(n.strip(" %")) for n in branches[1].split(",")), key=lambda t: t.bytes))
        return total

    return of(entry)


def least(name: str, learner: Learner) -> Traffic:
    """One sum of the gradient per gradient step."""
    state = jax.eval_shape(learner.init, jax.random.key(0))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.params))
    settings = SETTINGS["one_minibatch"] if "epochs" in configs.algorithm_options(name) else {}
    steps = settings.get("epochs", 1) * settings.get("num_minibatches", 1)
    return Traffic(steps, steps * size)


def learns(devices: Sequence[int], seeds: int) -> dict[int, list[float]]:
    """The final return of Catch's PPO with Adam, `seeds` seeds, for each number of devices."""
    config = configs.resolve_config("catch", "ppo", {"total_steps": 100_000})
    found: dict[int, list[float]] = {}
    for number in devices:
        learner = build(config, shards=number).learner
        mesh = parallel.make_mesh(1, config.batch_size, jax.devices()[:number])
        updates = config.total_steps // (config.settings["num_envs"] * config.settings["num_steps"])
        final = []
        for seed in range(seeds):
            state = jax.tree.map(lambda x: x[None], jax.jit(learner.init)(jax.random.key(seed)))
            specs, keys = parallel.state_specs(state, mesh), jax.random.split(jax.random.key(100 + seed), updates)[None]

            def run(state: Any, keys: jax.Array, step: Any = learner.step) -> Any:
                return jax.lax.scan(step, state, keys)[0]

            program = parallel.spread(
                parallel.map_seeds(run), mesh, in_specs=(specs, parallel.PER_SEED), out_specs=specs
            )
            state = jax.device_get(jax.jit(program)(parallel.place(state, specs, mesh), keys))
            one = jax.tree.map(lambda x: x[0], state)
            measured = jax.jit(
                lambda state, key, actor=learner.actor: evaluation_metrics(
                    envs.make(config.environment), actor(state), key, episodes=100
                )
            )
            final.append(float(measured(one, jax.random.key(seed))["return"]))
        found[number] = final
    return found


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--updates", type=int, default=3, help="by plain gradient descent (default 3)")
    parser.add_argument("--seeds", type=int, default=5, help="of the run with Adam (default 5; 0 leaves it out)")
    parser.add_argument("--out", type=out_file, default=HERE / "results" / "devices.json")
    args = parser.parse_args()
    console, result = Console(), {"machine": provenance.describe_machine(), "updates": args.updates, "algorithms": {}}
    most = max(args.devices)
    same = Table("algorithm", *(f"{n} devices" for n in args.devices[1:]), title="difference from one device, SGD")
    sent_table = Table("algorithm", "collectives", "bytes", "least", "×", *LINKS, title=f"one update, {most} devices")
    for name in ladder.ALGORITHMS:
        learner = learner_of(name, descent=True)
        ends = {n: spread(learner, n, args.updates) for n in args.devices}
        params = {n: jax.device_get(s.program(*s.arguments)).params for n, s in ends.items()}
        apart = {n: difference(params[n], params[args.devices[0]]) for n in args.devices[1:]}
        sent = traffic(spread(learner_of(name, descent=False), most, 1).program.as_text())
        bound = least(name, learner)
        needed = {
            link: 9 * (sent.calls * latency + 2 * (n - 1) / n * sent.bytes / bandwidth)
            for link, (n, latency, bandwidth) in LINKS.items()
        }
        same.add_row(name, *(f"{x:.1e}" for x in apart.values()))
        plus = "+" if sent.at_least else ""
        sent_table.add_row(
            name,
            f"{sent.calls}{plus}",
            f"{sent.bytes:,}{plus}",
            f"{bound.calls}: {bound.bytes:,}",
            f"{sent.bytes / bound.bytes:.2f}",
            *(f"{1e3 * seconds:.2g} ms" for seconds in needed.values()),
        )
        result["algorithms"][name] = {
            "difference": apart,
            "sent": sent._asdict(),
            "least": bound._asdict(),
            "seconds of an update for nine tenths": needed,
        }
        write(args.out, result)
    console.print(same, sent_table)
    if args.seeds:
        result["ppo with adam on catch"] = found = learns((1, most), args.seeds)
        write(args.out, result)
        for number, returns in found.items():
            console.print(f"PPO with Adam on Catch, {number} devices: {np.mean(returns):.3f}, seeds {returns}")


if __name__ == "__main__":
    main()
