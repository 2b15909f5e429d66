"""What the commands do. Each takes the parsed arguments and returns an exit code."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from jaxpg import config as configs
from jaxpg import devices, host, hosts, listing, record
from jaxpg.errors import UserError
from jaxpg.grid import parse_grid, plan
from jaxpg.progress import Reporter, Watch, interruptible

INTERRUPTED = 130
PAGE = "report.html"
SHARED = (
    "environment",
    "environment_settings",
    "network",
    "pairs",
)  # what a run has in common with what it begins with


def train(arguments: argparse.Namespace) -> int:
    """Train an algorithm on a task, and draw its learning curve."""
    config = _resolve(arguments, arguments.task, arguments.algorithm, arguments.out)
    out = arguments.out or Path("runs") / f"{config.task}-{config.algorithm}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not _train_with_what_it_needs(config, out, out, arguments):
        return _interrupted(out, f"train {arguments.task} {arguments.algorithm}")
    if not hosts.is_first():
        return 0
    from jaxpg import report

    run = _measured(record.load_metrics(out))
    curve = out / "learning_curve.png"
    report.learning_curve(
        {config.algorithm: (run.steps, run.returns)}, curve, title=config.task, threshold=config.threshold
    )
    summaries = report.summarize({config.algorithm: run}, config.threshold)
    console = Console()
    console.print(report.comparison_table(summaries, title=f"{config.task}, {len(config.seeds)} seeds"))
    console.print(f"Learning curve: {curve}", highlight=False, soft_wrap=True)
    if (out / PAGE).exists():
        console.print(f"Report:         {out / PAGE}", highlight=False, soft_wrap=True)
    if config.algorithm != "reward_model":
        more = f"jaxpg sample {out}" if (out / "samples").exists() else f"jaxpg play {out} --gif {config.task}.gif"
        console.print(f"Look at it:     {more}", highlight=False, soft_wrap=True)
    return 0


def compare(arguments: argparse.Namespace) -> int:
    """Train several algorithms on a task, and set them side by side."""
    out = arguments.out or Path("runs") / f"{arguments.task}-compared-{time.strftime('%Y%m%d-%H%M%S')}"
    algorithms = list(dict.fromkeys(arguments.algorithms))
    resolved = {name: _resolve(arguments, arguments.task, name, out / name) for name in algorithms}
    for config in resolved.values():
        _refuse_what_does_not_fit(config)
    for name, config in resolved.items():
        if not _train_with_what_it_needs(config, out / name, out, arguments):
            return _interrupted(out, f"compare {arguments.task} {' '.join(algorithms)}")
    if not hosts.is_first():
        return 0
    from jaxpg import report, samples

    runs = {name: _measured(record.load_metrics(out / name)) for name in algorithms}
    first = resolved[algorithms[0]]
    details = {
        "command": shlex.join(["jaxpg", *sys.argv[1:]]),
        "machine": record.machine(),
        "configs": {name: record.flatten(configs.to_dict(config)) for name, config in resolved.items()},
    }
    written = {name: samples.as_text(samples.load(out / name)) for name in algorithms}
    details |= {"completions": kept} if (kept := {name: text for name, text in written.items() if text}) else {}
    summaries = report.compare(runs, out, title=first.task, threshold=first.threshold, details=details)
    console = Console()
    console.print(report.comparison_table(summaries, title=f"{first.task}, {len(first.seeds)} seeds"))
    console.print(f"Report: {out / 'comparison.html'}", highlight=False, soft_wrap=True)
    return 0


def sweep(arguments: argparse.Namespace) -> int:
    """Train an algorithm with all settings of a grid, several seeds each, and say which did best."""
    if arguments.resume and arguments.out is None:
        raise UserError("--resume needs --out, the directory of the sweep that is to go on.")
    chosen, overrides = parse_grid(arguments.grid), _overrides(arguments)
    programs = plan(arguments.task, arguments.algorithm, overrides, chosen)
    config, console = programs[0].config, _console(arguments)
    out = arguments.out or Path("runs") / f"{config.task}-sweep-{time.strftime('%Y%m%d-%H%M%S')}"
    points, seeds = math.prod(map(len, chosen.values())), len(config.seeds)
    console.print(
        f"[bold]{config.algorithm} on {config.task}[/bold], {points} points x {seeds} seeds, "
        f"{config.total_steps:,} steps each, {len(programs)} program{'s' if len(programs) > 1 else ''}\n{out}"
    )
    again = f"sweep {arguments.task} {arguments.algorithm} --grid {shlex.join(arguments.grid)}"
    if (ready := _with_what_it_needs(config, out, arguments)) is None:
        return _interrupted(out, again)
    from jaxpg import report
    from jaxpg.sweep import memory_limit
    from jaxpg.sweep import sweep as run_sweep

    begin: dict[str, Any] = {"initial": ready.initial, "reward": ready.reward}
    scores = run_sweep(
        [p._replace(config=dataclasses.replace(p.config, **begin)) for p in programs],
        out,
        {"task": arguments.task, "algorithm": arguments.algorithm, "grid": chosen, "settings": overrides},
        mesh_for=lambda config: devices.lay_out(arguments, 0, config.batch),  # waves fit any number of devices
        memory_of=lambda mesh: memory_limit(mesh, arguments.memory),
        watched=partial(_watched, arguments),
        resume=arguments.resume,
    )
    if scores is None:
        return _interrupted(out, again)
    title = f"{config.algorithm} on {config.task}, {seeds} seeds"
    details = {"command": shlex.join(["jaxpg", *sys.argv[1:]]), "machine": record.machine()}
    best = report.write_sweep(chosen, scores, out, title=title, details=details)
    resolved = configs.resolve(arguments.task, arguments.algorithm, {**overrides, **best})
    record.replace_file(out / "best.toml", record.dumps(configs.to_dict(resolved)))
    shown = Console()
    shown.print(report.sweep_table(chosen, scores, title=title))
    shown.print(f"Picture:  {out / 'sweep.png'}\nThe best: {out / 'best.toml'}", highlight=False, soft_wrap=True)
    shown.print("It was chosen on these seeds: train it on others before you quote it.", highlight=False)
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    """Measure a trained policy over many episodes."""
    if arguments.episodes < 1:
        raise UserError(f"--episodes must be at least 1, not {arguments.episodes}.")
    config, setup, state = _restored(arguments)
    if rest := arguments.episodes % config.evaluation_samples:
        raise UserError(
            f"--episodes {arguments.episodes} cannot be cut into groups that begin alike, of evaluation_samples = "
            f"{config.evaluation_samples} in this run's config: give a multiple of that, such as --episodes "
            f"{arguments.episodes - rest + config.evaluation_samples}."
        )
    import jax

    from jaxpg import report
    from jaxpg.evaluate import evaluate as whole_episodes

    def one_seed(state: Any, key: Any) -> Any:
        actor = setup.learner.actor(state)
        return whole_episodes(
            setup.held_out,
            actor,
            key,
            episodes=arguments.episodes,
            greedy=arguments.greedy,
            group_size=config.evaluation_samples,
        )

    keys = jax.random.split(jax.random.key(arguments.seed), len(config.seeds))
    result = jax.device_get(jax.jit(jax.vmap(one_seed))(state.learner, keys))
    host.refuse_failure()
    returns, lengths = result.returns.mean(1), result.lengths.mean(1)
    how = "greedy" if arguments.greedy else "sampled"
    table = Table("seed", "return", "length", box=box.SIMPLE_HEAD)
    table.title = f"{config.algorithm} on {config.task}, {arguments.episodes} {how} episodes per seed"
    for seed, value, length in zip(config.seeds, returns, lengths, strict=True):
        table.add_row(str(seed), f"{value:.4g}", f"{length:.4g}")
    console = Console()
    console.print(table)
    for word, statistic in (("mean", report.mean), ("interquartile mean", report.interquartile_mean)):
        value, low, high = report.bootstrap(returns, statistic=statistic)
        interval = f", 95% interval [{low:.4g}, {high:.4g}]" if math.isfinite(low) else ""
        console.print(f"{word} {value:.4g}{interval}", highlight=False, markup=False)
    for name, values in sorted(result.metrics.items()):
        console.print(f"{name} {np.nanmean(values) if np.isfinite(values).any() else math.nan:.4g}", highlight=False)
    return 0


def play(arguments: argparse.Namespace) -> int:
    """Draw one episode of the seed that was best when the checkpoint was written."""
    if arguments.gif.suffix != ".gif":
        raise UserError(f"--gif takes a file that ends in .gif, not {arguments.gif}.")
    config, setup, state = _restored(arguments)
    if setup.env.context:
        raise UserError(f"{config.task} is a text. Look at what is written there with: jaxpg sample {arguments.run}")
    import jax

    from jaxpg import report
    from jaxpg.evaluate import play as one_episode

    metrics = record.load_metrics(arguments.run)
    before = (metrics["steps"] <= np.asarray(state.steps)).all(1)
    scores = _last({name: x[before] for name, x in metrics.items()}.get("evaluation_return"), len(config.seeds))
    best = int(np.argmax(np.nan_to_num(scores, nan=-np.inf)))
    one = jax.tree.map(lambda x: x[best], state.learner)
    actor = setup.learner.actor(one)
    playing = jax.jit(lambda key: one_episode(setup.env, actor, key, greedy=arguments.greedy))
    episode = jax.device_get(playing(jax.random.key(arguments.seed)))
    report.render_gif(setup.env, episode, arguments.gif)
    gained = float(episode.rewards[: int(episode.length)].sum())
    print(f"{arguments.gif}: seed {config.seeds[best]}, {int(episode.length)} steps, return {gained:.4g}")
    return 0


def sample(arguments: argparse.Namespace) -> int:
    """Completions of a trained language model, of a prompt that is given or of held-out ones."""
    if arguments.number < 1 or arguments.temperature <= 0 or arguments.top_k < 0 or not 0 < arguments.top_p <= 1:
        raise UserError(
            "--number is at least 1, --temperature above 0, --top-k at least 0 and --top-p above 0 and at most 1; not "
            f"{arguments.number}, {arguments.temperature}, {arguments.top_k} and {arguments.top_p}."
        )
    config, setup, state = _restored(arguments)
    import jax

    from jaxpg import samples

    if setup.env.context is None or config.algorithm == "reward_model":
        raise UserError(f"{arguments.run} is a run of {config.algorithm} on {config.task}, which writes no text.")
    params = jax.tree.map(lambda x: x[0], state.learner.params.policy)
    key = jax.random.key(arguments.seed)
    how = {name: getattr(arguments, name) for name in ("number", "temperature", "top_k", "top_p", "greedy")}
    if arguments.prompt is None:
        for line in samples.drawing(config, setup, **how)(params, key):
            Console().print(line.line())
    else:
        for text in samples.complete(config, setup, params, arguments.prompt, key, **how):
            print(text)
    return 0


def plot(arguments: argparse.Namespace) -> int:
    """Draw the learning curves of runs into one figure."""
    from jaxpg import report

    resolved = {run: configs.load(run) for run in arguments.runs}
    tasks = {config.task for config in resolved.values()}
    curves: dict[str, Any] = {}
    for run, config in resolved.items():
        label = config.algorithm if len(tasks) == 1 else f"{config.algorithm}, {config.task}"
        metrics = record.load_metrics(run)
        curves[label if label not in curves else f"{label}, {run.name}"] = metrics["steps"], metrics["return"]
    thresholds = {config.threshold for config in resolved.values()}
    threshold = thresholds.pop() if len(thresholds) == 1 else None
    report.learning_curve(curves, arguments.out, title=", ".join(sorted(tasks)), threshold=threshold)
    print(arguments.out)
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "train": train,
    "compare": compare,
    "sweep": sweep,
    "eval": evaluate,
    "play": play,
    "sample": sample,
    "plot": plot,
    "list": listing.show,
}


def _resolve(arguments: argparse.Namespace, task: str, algorithm: str, out: Path | None) -> configs.Config:
    """The config that the arguments ask for; of a run that goes on, its own, with what the arguments say on top."""
    overrides = _overrides(arguments)
    if not arguments.resume:
        return configs.resolve(task, algorithm, overrides)
    if out is None:
        raise UserError("--resume needs --out, the directory of the run that is to go on.")
    if not (out / record.CONFIG).exists():
        return configs.resolve(task, algorithm, overrides)
    begun = configs.load(out)
    asked = configs.resolve(task, algorithm)
    if (begun.task, begun.algorithm) != (asked.task, asked.algorithm):
        raise UserError(f"The run in {out} is of {begun.algorithm} on {begun.task}, not {algorithm} on {asked.task}.")
    return configs.resolve(out / record.CONFIG, algorithm, overrides)


def _overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the arguments say on top of a task's config."""
    overrides = configs.parse_overrides(arguments.set)
    if arguments.steps is not None:
        overrides["total_steps"] = arguments.steps
    if arguments.seeds is not None or arguments.seed:
        seeds = 1 if arguments.seeds is None else arguments.seeds
        if seeds < 1 or arguments.seed < 0:
            raise UserError(f"--seeds must be at least 1 and --seed at least 0, not {seeds} and {arguments.seed}.")
        overrides["seeds"] = list(range(arguments.seed, arguments.seed + seeds))
    return overrides | {n: x for n in ("initial", "reward") if (x := getattr(arguments, n)) is not None}


def _train_with_what_it_needs(config: configs.Config, out: Path, shared: Path, arguments: argparse.Namespace) -> bool:
    """Train as the config says, after what it begins with or is judged by; whether the end was reached."""
    ready = _with_what_it_needs(config, shared, arguments)
    return ready is not None and _train(ready, out, arguments)


def _with_what_it_needs(config: configs.Config, shared: Path, arguments: argparse.Namespace) -> configs.Config | None:
    """The config with the runs that it begins with or is judged by, where it names these as algorithms; None if one
    of them was interrupted.

    They go to directories of their own in `shared`, and are not trained again where they are finished.
    """
    if configs.ALGORITHMS.keys() & {config.reward, config.initial}:
        _refuse_what_does_not_fit(config)
    for stage in ("reward", "initial"):
        name = getattr(config, stage)
        if name not in configs.ALGORITHMS:
            continue
        directory = shared / name
        said = configs.parse_overrides(arguments.set)
        shared_settings = {key: x for key, x in said.items() if key.split(".")[0] in SHARED}
        earlier = configs.resolve(arguments.task, name, {**shared_settings, "seeds": list(config.seeds)})
        if not _is_finished(directory, earlier):
            begun = argparse.Namespace(**{**vars(arguments), "resume": (directory / record.CONFIG).exists()})
            if not _train_with_what_it_needs(earlier, directory, shared, begun):
                return None
        changed: dict[str, Any] = {stage: str(directory)}
        config = dataclasses.replace(config, **changed)
    return config


def _refuse_what_does_not_fit(config: configs.Config) -> None:
    """Raise the UserError that the training of a config would raise, before something else trains."""
    from jaxpg.build import build
    from jaxpg.stages import build_stage

    with_what_there_is = build if config.reward in configs.ALGORITHMS else build_stage  # yet to be trained, or there
    with_what_there_is(config)


def _is_finished(directory: Path, config: configs.Config) -> bool:
    """Whether a run of this config has come to its end there."""
    if not (directory / record.METRICS).exists():
        return False
    steps = record.load_metrics(directory)["steps"]
    return bool(steps[-1].min() >= config.total_steps)


def _train(config: configs.Config, out: Path, arguments: argparse.Namespace) -> bool:
    """Train as the config says; whether the end was reached."""
    console = _console(arguments)
    hosts.if_lost(lambda: _how_to_go_on(out))
    import jax

    from jaxpg import parallel
    from jaxpg.samples import Shown
    from jaxpg.stages import build_stage, keep_vocabulary, policy_of
    from jaxpg.train import train

    mesh = devices.lay_out(arguments, len(config.seeds), config.batch)
    setup = build_stage(config, shards=mesh.shape[parallel.DATA])
    initial = policy_of(config, setup)
    keep_vocabulary(config, out)
    shown = Shown(config, setup, out, console)

    def on_evaluation(state: Any) -> None:
        shown(state)
        if setup.env.context and np.any(state.iteration):  # before the first one there is no curve
            _write_page(config, out)

    with _watched(arguments, _header(config, out, mesh), config.total_steps) as watch:
        state = train(
            setup.learner,
            seeds=config.seeds,
            total_steps=config.total_steps,
            run_dir=out,
            mesh=mesh,
            evaluate=setup.evaluate,
            evaluate_every=max(1, config.total_steps // config.evaluations),
            config=configs.to_dict(config),
            resume=arguments.resume,
            initial=initial,
            on_evaluation=on_evaluation if hosts.is_first() else lambda state: None,
            on_row=watch.on_row,
            should_stop=watch.should_stop,
        )
    return int(jax.device_get(state.steps).min()) >= config.total_steps


def _write_page(config: configs.Config, out: Path) -> None:
    """The page of a run on a text, as far as it has come: learning curve, and completions with their rewards."""
    from jaxpg import report, samples

    run, written = _measured(record.load_metrics(out)), samples.as_text(samples.load(out))
    details = {"completions": written} if written else {}
    details |= {"config": record.flatten(configs.to_dict(config)), "machine": record.machine()}
    page = report.page({config.algorithm: run}, title=config.task, threshold=config.threshold, details=details)
    record.replace_file(out / PAGE, page)


@contextlib.contextmanager
def _watched(arguments: argparse.Namespace, header: str, total_steps: int) -> Iterator[Watch]:
    """Show progress under a header, unless it is to be quiet, and let Ctrl-C stop the training."""
    console = _console(arguments)
    console.print(header)
    with interruptible(console) as should_stop, Reporter(console, total_steps) as reporter:
        yield Watch(reporter if not console.quiet else lambda row: None, should_stop)


def _console(arguments: argparse.Namespace) -> Console:
    """Where progress is shown: of several processes the first alone has something to say."""
    return Console(quiet=arguments.quiet or not hosts.is_first(), highlight=False, soft_wrap=True)


def _header(config: configs.Config, out: Path, mesh: Any) -> str:
    import jax

    seeds = f"{len(config.seeds)} seed{'s' if len(config.seeds) > 1 else ''}"
    return (
        f"[bold]{config.algorithm} on {config.task}[/bold], {seeds}, {config.total_steps:,} steps each; "
        f"{devices.describe(mesh)}, jax {jax.__version__}\n{out}"
    )


def _how_to_go_on(out: Path) -> str:
    """What to say of a run that ends because one of its processes has."""
    from jaxpg.checkpoint import find
    from jaxpg.train import CHECKPOINTS

    found = find(out / CHECKPOINTS)
    last = f"the last checkpoint is {found.path}" if found else "there was no checkpoint yet"
    return f"another process of this run has gone; {last}. Start all of them again with --resume to go on."


def _interrupted(out: Path, command: str) -> int:
    if hosts.is_first():
        print(f"jaxpg: interrupted and saved. Go on with: jaxpg {command} --out {out} --resume", file=sys.stderr)
    return INTERRUPTED


def _restored(arguments: argparse.Namespace) -> tuple[configs.Config, Any, Any]:
    """Config, setup and state of a run."""
    configs.check_seeds([arguments.seed])
    config = configs.load(arguments.run)
    from jaxpg.stages import build_stage, refuse_other_vocabulary
    from jaxpg.train import restore

    refuse_other_vocabulary(config, arguments.run)
    setup = build_stage(config)
    host.forget_failures()
    return config, setup, restore(setup.learner, arguments.run, config.seeds, arguments.checkpoint)


def _measured(metrics: Mapping[str, np.ndarray]) -> Any:
    """What a report wants to know of a run."""
    from jaxpg.report import Run

    new_steps = np.diff(metrics["steps"], axis=0, prepend=0).sum(1)
    return Run(
        steps=metrics["steps"],
        returns=metrics["return"] if "return" in metrics else metrics["evaluation_return"],
        final=_last(metrics.get("evaluation_return"), metrics["steps"].shape[1]),
        seconds=float(metrics["seconds"][-1]),
        steps_per_second=float(np.median(new_steps / metrics["chunk_seconds"])),
    )


def _last(values: np.ndarray | None, num_seeds: int) -> np.ndarray:
    """The last evaluation, [S]; NaN if there was none."""
    done = [] if values is None else values[np.isfinite(values).all(1)]
    return done[-1] if len(done) else np.full(num_seeds, np.nan)
