"""PPO on other libraries' environments, beside the libraries' own PPO and beside published figures.

    python benchmarks/suites.py --brax-python PEER/bin/python [--only PATTERN] [--report]

jaxpg's runs have their settings from configs/. Brax's PPO runs in a Python of its own (brax_peer.py), since it calls
`jax.device_put_replicated`, which jax 0.10 no longer has; Navix's runs here. All are trained with as many steps of the
same environment, and scored by 100 whole episodes per seed on fresh environments, sampled and greedy. What is finished
is not run again. `--report` runs nothing and makes the table from what there is.

Writes results/suites.json, results/suites.md, and the table of docs/environments.md.
"""

from __future__ import annotations

import os

os.environ["JAX_NUM_CPU_DEVICES"] = "1"  # seeds one after the other: several runs go side by side

import argparse
import json
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from command_lines import pattern
from learning import Cell, fingerprint, format_estimate, learner_of, markdown, measure, resolve, run_folder
from result_files import read, write
from rich.console import Console

from jaxpg import report
from jaxpg.experiments.build import build
from jaxpg.report.comparison import format_number, format_quantity
from jaxpg.rollout.evaluation import evaluate
from jaxpg.training import provenance
from jaxpg.training.loop import restore
from jaxpg.types import Actor, Env

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "suites.json"
PAGE = HERE.parent / "docs" / "environments.md"
BEGIN, END = "<!-- suites -->", "<!-- end of suites -->"
EPISODES, SEEDS = 100, 5
BRAX_STEPS = 1_146_880
"""Seven of the iterations that Brax publishes, each of 163,840 steps."""
GRU = {
    "network": {"kind": "recurrent", "hidden": [64], "width": 64},
    "num_envs": 64,
    "num_steps": 32,
    "num_minibatches": 4,
}
"""The same batch in shorter columns, which a recurrent policy reads step by step."""
LARGE_GRU = {"network": {"kind": "recurrent", "hidden": [128], "width": 128, "activation": "relu"}}
CRAFTAX = "% of 226, Craftax's README"


def cells() -> list[Cell]:
    """jaxpg's runs."""
    return [
        Cell("brax_inverted_pendulum", "ppo", SEEDS, overrides={"total_steps": BRAX_STEPS}),
        Cell("navix_door_key", "ppo", SEEDS),
        Cell("navix_door_key", "ppo", SEEDS, variant="gru", overrides=GRU),
        Cell("craftax", "ppo", SEEDS, published=f"5.0 (2.2 {CRAFTAX})"),
        Cell("craftax", "ppo", SEEDS, variant="gru", overrides=LARGE_GRU, published=f"5.2 (2.3 {CRAFTAX})"),
    ]


class Peer(NamedTuple):
    """A library's own PPO on the environment of a cell.

    task: the cell's task.
    name: what the table calls it.
    run: seeds -> steps per seed, and returns by name of `SCORES`, each `[seeds, EPISODES]`.
    """

    task: str
    name: str
    run: Callable[[int], tuple[int, dict[str, np.ndarray]]]

    @property
    def label(self) -> str:
        return f"{self.task} {self.name}"


SCORES = {"sampled": False, "greedy": True}
"""How the final policy is scored, and whether that is greedy."""


def brax_ppo(settings: str, python: str) -> Callable[[int], tuple[int, dict[str, np.ndarray]]]:
    """Brax's own PPO with settings of brax_peer.py, a process per seed, whose answers are kept in runs/suites."""

    def run(seeds: int) -> tuple[int, dict[str, np.ndarray]]:
        answers = []
        for seed in range(seeds):
            kept = HERE.parent / "runs" / "suites" / f"brax-{settings}-{seed}.json"
            if not kept.exists():
                command = [python, str(HERE / "brax_peer.py"), str(seed), settings, str(BRAX_STEPS), str(EPISODES)]
                answer = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(answer.splitlines()[-1])
            answers.append(json.loads(kept.read_text()))
        return answers[0]["steps"], {name: np.array([x[name] for x in answers]) for name in SCORES}

    return run


def navix_ppo(task: str, **settings: Any) -> Callable[[int], tuple[int, dict[str, np.ndarray]]]:
    """Navix's own PPO on the environment of a task, scored by our evaluation; `settings` are instead of its own."""

    def run(seeds: int) -> tuple[int, dict[str, np.ndarray]]:
        import navix
        from navix.agents import PPO, ActorCritic, PPOHparams

        config = resolve(Cell(task, "ppo", seeds))
        name = config.environment.removeprefix("navix:")
        observe = getattr(navix.observations, config.environment_settings["observation"])
        env = navix.make(name, observation_fn=observe)
        flat = env.observation_space.replace(shape=(int(np.prod(env.observation_space.shape)),))
        env = env.replace(observation_fn=lambda state: jnp.ravel(observe(state)), observation_space=flat)
        agent = PPO(PPOHparams(budget=config.total_steps, **settings), ActorCritic(action_dim=len(env.action_set)), env)
        train = jax.jit(agent.train)
        params = [train(jax.random.PRNGKey(seed))[0].params for seed in range(seeds)]

        def actor(params: Any) -> Actor:
            def act(memory: Any, obs: jax.Array, key: jax.Array, greedy: bool) -> tuple[jax.Array, Any]:
                policy = agent.network.apply(params, obs.ravel(), method="policy")
                return (policy.mode() if greedy else policy.sample(seed=key)), memory

            return Actor(lambda obs: (), act)

        stacked = jax.tree.map(lambda *x: jnp.stack(x), *params)
        return config.total_steps, score(build(config).held_out, actor, stacked, seeds)

    return run


def score(env: Env, actor: Callable[[Any], Actor], state: Any, seeds: int) -> dict[str, np.ndarray]:
    """Returns `[seeds, EPISODES]` of the policies in a state whose leaves have a leading axis of seeds."""
    keys = jax.random.split(jax.random.key(12345), seeds)

    def play(state: Any, key: jax.Array, greedy: bool) -> jax.Array:
        return evaluate(env, actor(state), key, episodes=EPISODES, greedy=greedy).returns

    return {n: np.asarray(jax.jit(jax.vmap(partial(play, greedy=g)))(state, keys)) for n, g in SCORES.items()}


def summary(returns: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Per way of scoring, the mean return of each seed, and mean and interquartile mean over seeds."""
    return {
        name: {
            "seeds": x.mean(1),
            "mean": report.bootstrap(x.mean(1), statistic=report.mean),
            "iqm": report.bootstrap(x.mean(1)),
        }
        for name, x in returns.items()
    }


def peers(brax_python: str) -> list[Peer]:
    """The libraries' own runs."""
    brax, navix = "brax_inverted_pendulum", "navix_door_key"
    return [
        Peer(brax, "Brax's PPO, published settings", brax_ppo("published", brax_python)),
        Peer(brax, "Brax's PPO, settings near ours", brax_ppo("small", brax_python)),
        Peer(navix, "Navix's PPO, its own settings", navix_ppo(navix)),
        Peer(navix, "Navix's PPO, epochs and learning rate as in ours", navix_ppo(navix, num_epochs=4, lr=1e-3)),
    ]


def run_cell(cell: Cell, console: Console) -> dict[str, Any]:
    """Train a cell, from where an interrupted run of it stands, and score it."""
    trained = measure(cell, console, fresh=False)
    config = resolve(cell)
    learner, _ = learner_of(cell, config)
    state = restore(learner, run_folder(cell), config.seeds, "last").learner
    kept = {name: trained[name] for name in ("fingerprint", "total_steps", "seconds", "settings", "machine")}
    return {**kept, **summary(score(build(config).held_out, learner.actor, state, cell.seeds))}


def run_peer(peer: Peer) -> dict[str, Any]:
    """Train and score a peer."""
    steps, returns = peer.run(SEEDS)
    return {"total_steps": steps, "machine": provenance.describe_machine(), **summary(returns)}


def table(results: Mapping[str, Any]) -> str:
    """A line per run, a task's together."""
    columns = (
        "task",
        "PPO",
        "steps",
        "sampled, mean [95%]",
        "IQM [95%]",
        "each seed",
        "greedy, IQM [95%]",
        "published",
    )
    named = [(c.task, f"jaxpg, {c.variant or 'mlp'}", c.name, c.published) for c in cells()]
    named += [(p.task, p.name, p.label, "") for p in peers("")]
    lines = []
    for task, shown, name, published in sorted(named, key=lambda x: x[0]):
        if name in results:
            sampled, greedy = (results[name][how] for how in SCORES)
            numbers = [format_estimate(x) for x in (sampled["mean"], sampled["iqm"])]
            numbers += [", ".join(map(format_number, sampled["seeds"])), format_estimate(greedy["iqm"])]
            lines.append((f"`{task}`", shown, format_quantity(results[name]["total_steps"]), *numbers, published))
    return markdown(columns, lines)


def publish(console: Console) -> None:
    """Write the table beside the results and into the page."""
    text = table(read(RESULTS))
    console.print(text)
    RESULTS.with_suffix(".md").write_text(f"Made by `python benchmarks/suites.py`.\n\n{text}")
    page = PAGE.read_text()
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{text}{END}{after}")


def main() -> None:
    """Run what has no result and make the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--brax-python", help="a Python with Brax and a jax before 0.10; Brax's own runs need it")
    parser.add_argument("--only", type=pattern, default="", help="only the runs whose name this pattern fits")
    parser.add_argument("--report", action="store_true", help="run nothing; make the table")
    arguments = parser.parse_args()
    console = Console(highlight=False, width=200)
    runs: dict[str, Callable[[], dict[str, Any]]] = {}
    if not arguments.report:
        fresh = [c for c in cells() if read(RESULTS).get(c.name, {}).get("fingerprint") != fingerprint(c, resolve(c))]
        runs |= {cell.name: partial(run_cell, cell, console) for cell in fresh}
        others = {peer.label: peer for peer in peers(arguments.brax_python or "")}
        runs |= {name: partial(run_peer, peer) for name, peer in others.items() if name not in read(RESULTS)}
    for name, run in runs.items():
        if arguments.only.search(name) and (arguments.brax_python or "Brax's" not in name):
            found = run()
            write(RESULTS, {**read(RESULTS), name: found})  # read again: other runs may have been finished
            console.print(f"{name}: {format_estimate(read(RESULTS)[name]['sampled']['mean'])}")
    publish(console)


if __name__ == "__main__":
    main()
