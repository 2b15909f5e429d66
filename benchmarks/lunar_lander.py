"""The line from REINFORCE to PPO on LunarLander-v3, in both action spaces, and what is only claimed about it.

    python benchmarks/lunar_lander.py [--spaces discrete continuous] [--only PATTERN] [--report]

Ten seeds each, settings from configs/lunar_lander*.toml, trained with 60 and 20 passes of the physics' solver instead
of Gymnasium's 180 and 60 (benchmarks/lunar_lander_speed.py measures what that changes) and scored with all of them: 100
episodes per seed, sampled and greedy. `claims` are runs with one change each. What is finished is not trained again,
and what was interrupted goes on. `--report` trains nothing and makes tables and figures from what there is.

Writes results/lunar_lander.json and lunar_lander_curves.json, and for docs/lunar_lander.md the tables, learning curves,
diagnostics and a GIF of the final policy of each algorithm.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")  # each run has one core; several runs go side by side

import argparse
import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from command_lines import pattern
from jax.flatten_util import ravel_pytree
from learning import RUNS, Cell, fingerprint, learner_of, markdown, measure, resolve, run_folder
from mistakes import normalized_targets
from result_files import read, write
from rich.console import Console
from scipy import stats

import jaxpg
from jaxpg import report, rollout
from jaxpg.experiments.build import build, networks
from jaxpg.experiments.config import Config
from jaxpg.files import replace_file
from jaxpg.objectives import advantages
from jaxpg.parallel import machine
from jaxpg.report.comparison import to_jsonable
from jaxpg.report.diagnostics import diagnostics_figure
from jaxpg.report.drawing import save
from jaxpg.rollout.evaluation import evaluate, record_episode
from jaxpg.training.loop import restore
from jaxpg.training.run_directory import load_metrics, load_rows
from jaxpg.types import Actor
from jaxpg.update.normalization import normalize_rollout

RESULTS = Path(__file__).parent / "results" / "lunar_lander.json"
CURVES = RESULTS.with_name("lunar_lander_curves.json")
PAGE = Path(__file__).parent.parent / "docs" / "lunar_lander.md"
FIGURES = PAGE.with_suffix("")
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"
COLUMNS = (
    "",
    "return, mean [95%]",
    "IQM [95%]",
    "worst seed",
    "greedy, mean [95%]",
    "episodes ≥ 200",
    "length",
    "target",
)
SIDE_BY_SIDE = machine.CPU._replace(seeds_at_once=True)
"""All seeds at once, also on a CPU: a step of the physics is many small operations, and with four environments a
seed ten seeds by `vmap` are 2.7 times as fast as one after the other (benchmarks/LOG.md, "A2C lands")."""
SPACES = {"discrete": "lunar_lander", "continuous": "lunar_lander_continuous"}
FEWER_PASSES = {"environment_settings": {"velocity_iterations": 60, "position_iterations": 20}}
EPISODES, SEEDS = 100, 10
LINE = {
    "ppo": (240.0, 220.0),
    "a2c": (150.0, None),
    "trpo": (200.0, 200.0),
    "actor_critic_td": (150.0, None),
    "actor_critic_mc": (100.0, None),
    "reinforce_baseline": (None, None),
    "reinforce": (None, None),
    "grpo": (None, None),
}
"""The algorithms, with the mean return that is expected in each space; None where it is only reported."""


JUDGE = Cell("lunar_lander", "actor_critic_mc", 1, overrides=FEWER_PASSES)
"""The run whose policy and critic the gradients are of."""
NOISE = "gradient noise"
ENDS = ("high", "value", "low")
"""Of a signal, by the size of its inverse."""


def line() -> list[Cell]:
    """Every algorithm in both action spaces."""
    return [
        Cell(task, algorithm, SEEDS, targets[i], overrides=FEWER_PASSES)
        for i, task in enumerate(SPACES.values())
        for algorithm, targets in LINE.items()
    ]


def claims() -> list[Cell]:
    """One change each, of what the line has in the discrete space."""

    def changed(algorithm: str, variant: str, change: Any = None, **overrides: Any) -> Cell:
        return Cell("lunar_lander", algorithm, SEEDS, None, None, "", variant, {**FEWER_PASSES, **overrides}, change)

    network = {"kind": "mlp", "hidden": [64, 64], "activation": "tanh"}
    return [
        changed("actor_critic_mc", "returns normalised", normalized_targets),
        changed("actor_critic_td", "targets normalised", normalized_targets),
        *(changed(name, "shared torso", network={**network, "shared": True}) for name in ("a2c", "ppo")),
        *(changed(name, "layer normalisation", network={**network, "layer_norm": True}) for name in ("a2c", "ppo")),
    ]


def exact(cell: Cell) -> Config:
    """The config of a cell with as many passes of the solver as Gymnasium has."""
    return resolve(cell._replace(overrides={k: x for k, x in cell.overrides.items() if k not in FEWER_PASSES}))


def score(cell: Cell) -> dict[str, Any]:
    """Return and length of EPISODES episodes per seed with all passes of the solver, sampled and greedy."""
    config = resolve(cell)
    learner, _ = learner_of(cell, config)
    env = build(exact(cell)).held_out
    state = restore(learner, run_folder(cell), config.seeds, "last").learner
    keys = jax.random.split(jax.random.key(12345), cell.seeds)
    found = {}
    for name, greedy in (("sampled", False), ("greedy", True)):
        play = partial(evaluate, env, episodes=EPISODES, greedy=greedy)
        result = jax.jit(jax.vmap(lambda s, k, play=play: play(learner.actor(s), k)))(state, keys)
        of_episodes, lengths = np.asarray(result.returns), np.asarray(result.lengths)
        returns = of_episodes.mean(1)
        found[name] = {
            "returns": returns,
            "lengths": lengths.mean(1),
            "landed": (of_episodes >= 200).mean(1),
            "mean": report.bootstrap(returns, statistic=report.mean),
            "iqm": report.bootstrap(returns),
        }
    return found


def train(cells: Iterable[Cell], console: Console) -> None:
    """Train and score the cells that have no result."""
    for cell in cells:
        if read(RESULTS).get(cell.name, {}).get("fingerprint") == fingerprint(cell, resolve(cell)):
            continue
        trained = measure(cell, console, fresh=False)
        found = to_jsonable({**trained, "command": "python benchmarks/lunar_lander.py", **score(cell)})
        write(RESULTS, {**read(RESULTS), cell.name: found})  # read again: other cells may have been finished
        for name in ("sampled", "greedy"):
            console.print(f"{cell.name}, {name}: {found[name]['mean']}, {sorted(map(round, found[name]['returns']))}")


def gradient_signals(cell: Cell, batches: int = 1024, episodes: int = 4) -> dict[str, Any]:
    """`signal_of` the policy's gradient over batches of whole episodes, for each psi of the line.

    Policy and critic are those of a trained run, of its first seed, and all psi see the same episodes. Numbers of steps
    and lambda are those of the line's configs.
    """
    config = resolve(cell)
    env = build(config).env
    policy, critic = networks(config, env)
    state = jax.tree.map(lambda x: x[0], restore(learner_of(cell, config)[0], run_folder(cell), config.seeds, "last"))
    params, normalization = state.learner.params, state.learner.normalization
    gamma = config.settings["gamma"]
    n, lambda_ = setting("actor_critic_td", "num_steps"), setting("ppo", "gae_lambda")
    psis = {
        "reinforce: R": advantages.total_return,
        "reinforce_to_go: G_t": advantages.reward_to_go,
        "reinforce_baseline: G_t - b": advantages.mean_baseline,
        "actor_critic_mc, a2c: G_t - V": advantages.critic_baseline,
        f"actor_critic_td: G_t:t+{n} - V": partial(advantages.n_step, n=n),
        f"ppo, trpo: GAE({lambda_})": partial(advantages.generalized_advantage, lambda_=lambda_),
    }
    collect = rollout.episodic(num_envs=episodes).collect

    def gradients(key: jax.Array) -> dict[str, jax.Array]:
        _, collected, _ = collect(env, policy, params.policy, (), key)
        collected, *_ = normalize_rollout(collected, jnp.zeros(episodes), normalization, gamma)
        steps = collected.steps
        v_tm1, v_t = critic.values(params, collected)

        def objective(policy_params: Any, psi: jax.Array) -> jax.Array:
            log_prob = policy.evaluate(policy_params, collected).log_prob(steps.action)
            return (steps.mask * psi * log_prob).sum() / episodes

        def gradient(credit: Any) -> jax.Array:
            psi = credit(steps, v_tm1, v_t, jnp.zeros(()), gamma=gamma).advantage
            return ravel_pytree(jax.grad(objective)(params.policy, psi))[0]

        return {name: gradient(credit) for name, credit in psis.items()}

    found = jax.jit(lambda keys: jax.lax.map(gradients, keys, batch_size=16))(
        jax.random.split(jax.random.key(0), batches)
    )
    return {name: signal_of(np.asarray(g, np.float64)) for name, g in found.items()}


def setting(algorithm: str, name: str) -> Any:
    """A setting of an algorithm in the line, discrete actions."""
    return resolve(Cell(SPACES["discrete"], algorithm, SEEDS, overrides=FEWER_PASSES)).settings[name]


def signal_of(gradients: np.ndarray, blocks: int = 32) -> dict[str, float]:
    """|E[g]|^2 / tr Cov[g] of independent gradients g, `[N, P]`, with two standard errors either side.

    |mean of g|^2 is |E[g]|^2 + tr Cov[g] / N in expectation, so the second term is taken off; where the gradients show
    no mean, the result is around 0 and may be negative. The standard error is that of a jackknife over blocks.
    """

    def signal(g: np.ndarray) -> float:
        noise = g.var(0, ddof=1).sum()
        return float(((g.mean(0) ** 2).sum() - noise / len(g)) / noise)

    parts = np.array_split(np.arange(len(gradients)), blocks)
    left_out = np.array([signal(np.delete(gradients, part, 0)) for part in parts])
    value, error = signal(gradients), float(np.sqrt((blocks - 1) * left_out.var()))
    return {"value": value, "low": value - 2 * error, "high": value + 2 * error}


def trained_here(cell: Cell) -> Actor:
    """The policy of a run's first seed."""
    config = resolve(cell)
    learner, _ = learner_of(cell, config)
    state = restore(learner, run_folder(cell), config.seeds, "last").learner
    return learner.actor(jax.tree.map(lambda x: x[0], state))


def trained_in_gymnasium(cell: Cell) -> Actor:
    """A policy that was trained on Gymnasium's own environment, with the settings of a cell."""
    config, run_dir = resolve(cell), RUNS / f"gymnasium-{cell.name.replace(' ', '-')}"
    settings = {"seeds": 1, "network": config.network, "scale_rewards": True, "evaluations": 1, **config.settings}
    settings["reset_pool"] = 0  # start states on the host cannot be copied
    continuous = {"environment_settings": {"continuous": True}} if cell.task.endswith("continuous") else {}
    if not run_dir.exists():
        name = "gymnasium:LunarLander-v3"
        jaxpg.fit(name, cell.algorithm, total_steps=config.total_steps, out=run_dir, **settings, **continuous)
    run = jaxpg.load(run_dir, checkpoint="last")
    return run.experiment.learner.actor(run.learner_of(0))


def fly_both(cell: Cell, actor: Actor, episodes: int = 1000) -> dict[str, Any]:
    """Sampled episodes of a policy in Gymnasium's environment and in ours, and what their returns differ by.

    In 200 episodes a crash in twenty more is neither seen by a Kolmogorov-Smirnov test nor by the means.
    """
    act = jax.jit(lambda obs, key: actor.act((), obs, key, False)[0])
    theirs = gymnasium.make("LunarLander-v3", continuous=cell.task.endswith("continuous"))
    key, returns = jax.random.key(0), []
    for episode in range(episodes):
        obs, _ = theirs.reset(seed=episode)
        total, done = 0.0, False
        while not done:
            key, key_action = jax.random.split(key)
            action = np.asarray(act(jnp.asarray(obs), key_action))
            obs, reward, terminated, truncated, _ = theirs.step(np.clip(action, -1, 1) if action.ndim else int(action))
            total, done = total + float(reward), terminated or truncated
        returns.append(total)
    play = jax.jit(partial(evaluate, build(exact(cell)).held_out, actor, episodes=episodes, greedy=False))
    ours = np.asarray(play(jax.random.key(1)).returns)
    return {
        "gymnasium": float(np.mean(returns)),
        "ours": float(ours.mean()),
        "standard_error": float(np.sqrt((np.var(returns, ddof=1) + ours.var(ddof=1)) / episodes)),
        "below_200": {"gymnasium": float(np.mean(np.array(returns) < 200)), "ours": float((ours < 200).mean())},
        "episodes": episodes,
        "p_value": float(stats.ks_2samp(returns, ours).pvalue),
    }


def tables(results: Mapping[str, Any]) -> str:
    """The line in both spaces and the claims, as Markdown."""

    def estimate(x: Mapping[str, float]) -> str:
        return f"{x['value']:.0f} [{x['low']:.0f}, {x['high']:.0f}]"

    def inverse(x: Mapping[str, float]) -> str:
        low, value, high = (f"{1 / x[end]:,.{0 if x[end] < 0.01 else 1}f}" if x[end] > 0 else "∞" for end in ENDS)
        return f"more than {low}" if value == "∞" else f"{value} [{low}, {high}]"

    def cells_of(cell: Cell) -> tuple[str, ...]:
        sampled, greedy = (results[cell.name][name] for name in ("sampled", "greedy"))
        return (
            f"`{cell.algorithm}`" + (f", {cell.variant}" if cell.variant else ""),
            estimate(sampled["mean"]),
            estimate(sampled["iqm"]),
            f"{min(sampled['returns']):.0f}",
            estimate(greedy["mean"]),
            f"{100 * np.mean(sampled['landed']):.0f} %",
            f"{np.mean(sampled['lengths']):.0f}",
            "" if cell.target is None else f"{cell.target:.0f}",
        )

    text = ""
    for space, task in SPACES.items():
        done = [cells_of(cell) for cell in line() if cell.task == task and cell.name in results]
        text += f"{space.capitalize()}:\n\n{markdown(COLUMNS, done)}\n"
    changed = [cell for cell in claims() if cell.name in results]
    as_they_are = [c for c in line() if c.task == "lunar_lander" and c.algorithm in {x.algorithm for x in changed}]
    both = sorted([*(c for c in as_they_are if c.name in results), *changed], key=lambda cell: cell.algorithm)
    if changed:
        text += f"One change each:\n\n{markdown(COLUMNS, [cells_of(cell) for cell in both])}\n"
    if signals := results.get(NOISE):
        columns = ("psi", "tr Cov / squared mean, ± two standard errors of its inverse")
        rows = [(f"`{name}`", inverse(x)) for name, x in signals.items()]
        text += f"Noise of the policy's gradient:\n\n{markdown(columns, rows)}\n"
    if flown := results.get("flown in both"):
        columns = (
            *("one policy", "return in Gymnasium", "in ours", "difference ± two standard errors"),
            *("below 200 in Gymnasium", "in ours", "p, Kolmogorov-Smirnov"),
        )
        rows = [
            (
                name,
                f"{x['gymnasium']:.1f}",
                f"{x['ours']:.1f}",
                f"{x['ours'] - x['gymnasium']:.1f} ± {2 * x['standard_error']:.1f}",
                *(f"{100 * x['below_200'][side]:.1f} %" for side in ("gymnasium", "ours")),
                f"{x['p_value']:.2f}",
            )
            for name, x in flown.items()
        ]
        text += f"The same policy in both environments, sampled:\n\n{markdown(columns, rows)}"
    return text


def measure_noise(console: Console) -> None:
    """Train the policy whose gradients are looked at, and look at them."""
    if NOISE not in read(RESULTS):
        measure(JUDGE, console, fresh=False)
        signals = gradient_signals(JUDGE)
        write(RESULTS, {**read(RESULTS), NOISE: signals})


def is_here(cell: Cell) -> bool:
    """Whether the run of a cell is on this machine, and finished."""
    rows = load_rows(run_folder(cell))
    return bool(rows) and np.min(rows[-1]["steps"]) >= resolve(cell).total_steps


def learning_curves(cells: Iterable[Cell]) -> dict[str, Any]:
    """Steps and returns over training of these cells, by name: those of runs on this machine, and those kept before."""
    kept = read(CURVES)
    for cell in cells:
        if is_here(cell):
            metrics = load_metrics(run_folder(cell))
            returns = metrics["return"].astype(float).round(1)
            kept[cell.name] = to_jsonable({"steps": metrics["steps"].astype(int), "return": returns})
    lines = (f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept))
    replace_file(CURVES, "{\n" + ",\n".join(lines) + "\n}\n")
    return kept


def draw(results: Mapping[str, Any]) -> None:
    """Learning curves and diagnostics of each space, and a GIF of each final policy, into docs/lunar_lander/.

    Curves are those that are kept. A policy whose run is not on this machine keeps its GIF, and the diagnostics, which
    need all runs, stay as they are.
    """
    FIGURES.mkdir(exist_ok=True)
    kept = learning_curves(cell for cell in line() if cell.name in results)
    for space, task in SPACES.items():
        title = f"LunarLander-v3, {space} actions"
        done = [cell for cell in line() if cell.task == task and cell.name in results]
        here = [cell for cell in done if is_here(cell)]
        for cell in here:
            play(cell, FIGURES / f"{space}_{cell.algorithm}.gif")
        known = {cell.algorithm: kept[cell.name] for cell in done if cell.name in kept}
        curves = {name: (np.asarray(x["steps"], float), np.asarray(x["return"], float)) for name, x in known.items()}
        if curves:
            report.learning_curve(curves, FIGURES / f"{space}.png", title=title, threshold=200.0)
        if len(here) == len(done):
            metrics = {cell.algorithm: load_metrics(run_folder(cell)) for cell in here}
            shown = diagnostics_figure({name: (m["steps"], m) for name, m in metrics.items()})
            assert shown is not None
            save(shown, FIGURES / f"{space}_diagnostics.png")


def play(cell: Cell, path: Path) -> None:
    """The median of nine sampled episodes, of the seed with the median return."""
    config = resolve(cell)
    learner, _ = learner_of(cell, config)
    env = build(exact(cell)).held_out
    returns = read(RESULTS)[cell.name]["sampled"]["returns"]
    median = int(np.argsort(returns)[len(returns) // 2])
    state = restore(learner, run_folder(cell), config.seeds, "last").learner
    actor = learner.actor(jax.tree.map(lambda x: x[median], state))
    record = jax.jit(lambda key: record_episode(env, actor, key, greedy=False))
    episodes = [jax.device_get(record(key)) for key in jax.random.split(jax.random.key(0), 9)]
    by_return = sorted(episodes, key=lambda episode: float(episode.rewards[: int(episode.length)].sum()))
    report.render_gif(env, by_return[len(by_return) // 2], path)


def fly_across(cells: Iterable[Cell]) -> None:
    """Fly the policies of these cells, and others that are trained on Gymnasium's environment, in both environments."""
    for cell in cells:
        for where, trained in (("here", trained_here), ("in Gymnasium", trained_in_gymnasium)):
            name = f"{cell.name}, trained {where}"
            if name not in read(RESULTS).get("flown in both", {}):
                flown = {name: fly_both(cell, trained(cell))}
                results = read(RESULTS)
                write(RESULTS, {**results, "flown in both": {**results.get("flown in both", {}), **flown}})


def publish(console: Console) -> None:
    """Write tables, figures and GIFs."""
    results = read(RESULTS)
    text = tables(results)
    RESULTS.with_suffix(".md").write_text(f"Made by `python benchmarks/lunar_lander.py`.\n\n{text}")
    console.print(text)
    page = PAGE.read_text()
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{text}{END}{after}")
    draw(results)


def main() -> None:
    """Train what is missing and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spaces", nargs="+", choices=SPACES, default=list(SPACES))
    parser.add_argument("--only", type=pattern, default="", help="only the runs whose name this pattern fits")
    parser.add_argument("--report", action="store_true", help="train nothing; make tables and figures")
    arguments = parser.parse_args()
    machine.MACHINES["cpu"] = SIDE_BY_SIDE
    console = Console(highlight=False)
    tasks = [SPACES[space] for space in arguments.spaces]
    cells = [cell for cell in [*line(), *claims()] if cell.task in tasks and arguments.only.search(cell.name)]
    if arguments.report:
        publish(console)
    else:
        train(cells, console)
        if "discrete" in arguments.spaces and arguments.only.search(NOISE):
            measure_noise(console)
        fly_across(cell for cell in cells if cell.algorithm == "ppo" and not cell.variant)


if __name__ == "__main__":
    main()
