"""What papers say of language models under policy gradients, tried in small: one figure and one table per claim.

    python benchmarks/claims.py [scratchpad] [lengths] [sampling] [overoptimization] [--seeds 5]

Every run is a command of `jaxpg`, which stands beside its figure in results/claims.md; runs that are finished are not
trained again.

scratchpad: a model that seldom thinks learns to think, because it pays; without the tokens to think with it cannot.
lengths: GRPO divides by a completion's length, which makes long wrong answers cheap; Dr. GRPO does not.
sampling: DAPO's wider clip keeps entropy up; its dynamic sampling learns more per update, at a price in prompts.
overoptimization: the reward model's score goes on rising when the true reward has long begun to fall.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxpg import config, record, report, samples
from jaxpg.__main__ import main as jaxpg
from jaxpg.build import networks
from jaxpg.report.figures import STYLE, color
from jaxpg.rollout import episodic
from jaxpg.stages import build_stage, policy_of
from jaxpg.train import restore

HERE = Path(__file__).resolve().parent
RUNS, RESULTS = HERE.parent / "runs" / "claims", HERE / "results"

Metrics = Mapping[str, np.ndarray]


class Trained(NamedTuple):
    """A run, what it was told, and what it measured: name -> [N, S]."""

    directory: Path
    command: str
    metrics: Metrics


class Finding(NamedTuple):
    """What a claim comes to: its figure, and lines of Markdown."""

    figure: Figure
    lines: list[str]
    runs: list[Trained]


def trained(name: str, seeds: int, *arguments: str) -> Trained:
    """A run of `jaxpg train`, from where an earlier one stands."""
    out = RUNS / f"{name}-{seeds}"
    command = ["train", *arguments, "--seeds", str(seeds), "--out", str(out), "--resume", "--quiet"]
    if jaxpg(command):
        raise SystemExit(f"jaxpg {shlex.join(command)} failed")
    shown = shlex.join([*arguments, "--seeds", str(seeds), "--out", str(out)]).replace(f"{HERE.parent}/", "")
    return Trained(out, f"jaxpg train {shown}", record.load_metrics(out))


def curve(axes: Axes, x: np.ndarray, y: np.ndarray, index: int, label: str, **look: Any) -> None:
    """The mean over seeds of y [N, S], with its range over seeds, over x [N]."""
    known = np.isfinite(y).any(1)
    x, y = x[known], y[known]
    axes.plot(x, np.nanmean(y, 1), color=color(index), label=label, **look)
    axes.fill_between(x, np.nanmin(y, 1), np.nanmax(y, 1), color=color(index), alpha=0.15, linewidth=0)


def panels(number: int, *titles: str) -> tuple[Figure, list[Axes]]:
    """A row of empty panels."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * number, 3.4), layout="constrained")
        axes = list(np.atleast_1d(figure.subplots(1, number)))
    for panel, title in zip(axes, titles, strict=True):
        panel.set_title(title, loc="left", fontsize=10, fontweight="bold")
        panel.grid(axis="y")
    return figure, axes


def tokens(run: Trained) -> np.ndarray:
    """Tokens that a seed has written, [N], in thousands."""
    return run.metrics["steps"].mean(1) / 1e3


def final(values: np.ndarray) -> str:
    """The last known value of every seed: interquartile mean and interval."""
    last = values[np.isfinite(values).all(1)][-1]
    value, low, high = report.bootstrap(last)
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def row(label: str, metrics: Metrics, *names: str) -> str:
    """A line of a Markdown table."""
    return f"| {label} | " + " | ".join(final(metrics[name]) for name in names) + " |"


def scratchpad(seeds: int) -> Finding:
    """Length and accuracy rise together; without a scratchpad neither does."""
    thinking = trained("thinking", seeds, "parity", "grpo")
    bare = ["--set", "environment_settings.think=false", "--set", "environment_settings.thinking=1.0"]
    without = trained("without", seeds, "parity", "grpo", *bare)
    figure, (accuracy, length) = panels(2, "held-out accuracy, sampled", "tokens per completion")
    for index, (label, run) in enumerate({"with a scratchpad": thinking, "without": without}.items()):
        curve(accuracy, tokens(run), run.metrics["evaluation_accuracy"], index, label)
        curve(length, tokens(run), run.metrics["length"], index, label)
    for panel in (accuracy, length):
        panel.set_xlabel("thousand tokens written")
    accuracy.axhline(0.5, color="gray", linewidth=0.8, linestyle=":")
    accuracy.set_ylim(0, 1.03)
    accuracy.legend(frameon=False)
    written = samples.as_text(samples.load(thinking.directory))
    shown = [list(written)[i] for i in sorted({0, len(written) // 2, len(written) - 1})]
    lines = [
        "| | accuracy | tokens |\n|---|---|---|",
        *(
            row(f"{name} a scratchpad, {when}", metrics, "evaluation_accuracy", "evaluation_length")
            for name, run in (("with", thinking), ("without", without))
            for when, metrics in (("before", record.load_metrics(run.directory / "sft")), ("after", run.metrics))
        ),
        "",
        *(f"Completions of the first seed, {when}:\n\n```\n{written[when]}\n```\n" for when in shown),
    ]
    return Finding(figure, lines, [thinking, without])


def lengths(seeds: int) -> Finding:
    """The length of wrong answers under both: where thinking is a choice (parity), and where all think (chains)."""
    figure, axes = panels(2, "parity: tokens of a wrong completion", "chains: tokens of a wrong completion")
    runs, lines = [], ["| | tokens, wrong | tokens, right | accuracy |\n|---|---|---|---|"]
    for task, panel in zip(("parity", "modular_chain"), axes, strict=True):
        for index, name in enumerate(("grpo", "dr_grpo")):
            known = "thinking" if (task, name) == ("parity", "grpo") else f"lengths-{task}-{name}"  # the same command
            run = trained(known, seeds, task, name)
            curve(panel, tokens(run), run.metrics["length_wrong"], index, name)
            lines.append(row(f"{task}, {name}", run.metrics, "length_wrong", "length_right", "evaluation_accuracy"))
            runs.append(run)
        panel.set_xlabel("thousand tokens written")
        panel.legend(frameon=False)
    return Finding(figure, lines, runs)


def sampling(seeds: int) -> Finding:
    """Entropy under both clips; learning per update and per completion drawn, with refilling and without."""
    several = ["--set", "epochs=4", "--set", "max_rounds=1"]
    variants = {
        "clip 0.2": [*several, "--set", "clip_high=0.2"],
        "clip 0.2 / 0.28": several,
        "and groups refilled": ["--set", "epochs=4", "--set", "max_rounds=4"],
    }
    figure, (entropy, per_update, per_prompt) = panels(
        3, "entropy, nats", "accuracy per update", "accuracy per completion"
    )
    runs, lines = [], ["| | entropy | accuracy | updates | completions drawn |\n|---|---|---|---|---|"]
    for index, (label, settings) in enumerate(variants.items()):
        run = trained(f"sampling-{index}", seeds, "sort", "dapo", *settings)
        m = run.metrics
        iterations, drawn = m["iteration"].mean(1), np.nancumsum(m["episodes"], 0).mean(1) / 1e3
        curve(entropy, iterations, m["entropy"], index, label)
        curve(per_update, iterations, m["evaluation_accuracy"], index, label)
        curve(per_prompt, drawn, m["evaluation_accuracy"], index, label)
        lines.append(row(label, m, "entropy", "evaluation_accuracy") + f" {iterations[-1]:.0f} | {drawn[-1]:.0f} k |")
        runs.append(run)
    entropy.set_xlabel("iterations")
    per_update.set_xlabel("iterations")
    per_prompt.set_xlabel("thousand completions drawn")
    entropy.legend(frameon=False)
    return Finding(figure, lines, runs)


KL_COEFFICIENTS, BETAS = (0.0, 0.03, 0.1, 0.3), (0.03, 0.1, 0.3, 1.0)


def overoptimization(seeds: int) -> Finding:
    """True and proxy reward over the KL to the policy that all began with: PPO by KL coefficient, DPO by β."""
    figure, axes = panels(2, "true reward", "what the reward model says")
    tuned = trained("tuned", seeds, "summarise_toy", "sft")
    begin = ["--from", str(tuned.directory)]
    judge = trained("judge", seeds, "summarise_toy", "reward_model", *begin)
    begin += ["--reward", str(judge.directory), "--steps", "200000"]
    runs, lines = [tuned, judge], ["| | KL, nats | proxy reward | true reward |\n|---|---|---|---|"]
    for index, coefficient in enumerate(KL_COEFFICIENTS):
        setting = f"kl_coefficient={coefficient}"
        run = trained(f"rlhf-{coefficient}", seeds, "summarise_toy", "rlhf", *begin, "--set", setting)
        m = run.metrics
        moved = (m["reference_kl"] * m["length"]).mean(1)
        for panel, name in zip(axes, ("true_reward", "return"), strict=True):
            panel.plot(moved, m[name].mean(1), color=color(index), label=f"PPO {coefficient:g}")
        lines.append(_line(f"PPO {coefficient:g}", run))
        runs.append(run)
    for index, beta in enumerate(BETAS):
        run = trained(f"dpo-{beta}", seeds, "summarise_toy", "dpo", *begin, "--set", f"beta={beta}")
        kl = divergence(run)
        for panel, name in zip(axes, ("true_reward", "return"), strict=True):
            values = run.metrics[f"evaluation_{name}"]
            last = values[np.isfinite(values).all(1)][-1]
            panel.plot(kl.mean(), last.mean(), "so^D"[index], color="black", markersize=5, label=f"DPO {beta:g}")
        lines.append(_line(f"DPO {beta:g}", run))
        runs.append(run)
    for panel in axes:
        panel.set_xlabel("KL to the initial policy, nats per completion")
    axes[1].legend(frameon=False, fontsize=8, ncols=2)
    accuracy = final(judge.metrics["evaluation_accuracy"])
    return Finding(figure, [f"Reward model, held-out pairs: {accuracy}.\n", *lines], runs)


def _line(label: str, run: Trained) -> str:
    metrics = {**run.metrics, "moved": divergence(run)[None]}
    return row(label, metrics, "moved", "evaluation_return", "evaluation_true_reward")


def divergence(run: Trained, columns: int = 512) -> np.ndarray:
    """KL of a run's policies to those they began with, in nats per completion, estimated by k1 on samples: [S]."""
    settings = config.load(run.directory)
    setup = build_stage(settings)
    policy, _ = networks(settings, setup.held_out)
    learned = restore(setup.learner, run.directory, settings.seeds, "last").learner.params.policy

    def one(params: Any, began: Any, key: jax.Array) -> jax.Array:
        part = episodic(num_envs=columns).collect(setup.held_out, policy, params, (), key)[1]
        reference = policy.evaluate(began, part).log_prob(part.steps.action)
        return ((part.steps.log_prob - reference) * part.steps.mask).sum(0).mean()

    keys = jax.random.split(jax.random.key(0), len(settings.seeds))
    return np.asarray(jax.lax.map(lambda x: one(*x), (learned, policy_of(settings, setup), keys)))


def origin(runs: list[Trained]) -> str:
    """What machines, versions and commits the runs come from."""
    machines = [json.loads((run.directory / record.MACHINE).read_text()) for run in runs]
    kinds = {f"{m['cpu']}, {m['cores']} cores, jax {m['jax']}, commit {str(m['commit'])[:12]}" for m in machines}
    return f"({'; '.join(sorted(kinds))})"


CLAIMS: dict[str, Callable[[int], Finding]] = {f.__name__: f for f in (scratchpad, lengths, sampling, overoptimization)}


def main() -> None:
    """Train what is missing, draw, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", nargs="*", default=list(CLAIMS), help="which (default all)")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    known = RESULTS / "claims.json"
    sections: dict[str, str] = json.loads(known.read_text()) if known.exists() else {}
    for name in args.claims:
        finding = CLAIMS[name](args.seeds)
        picture = RESULTS / f"claim_{name}.png"
        finding.figure.savefig(picture, dpi=150)
        commands = "\n".join(run.command for run in finding.runs)
        about = (CLAIMS[name].__doc__ or "").strip()
        body = "\n".join(finding.lines)
        parts = f"## {name}", f"{about} {args.seeds} seeds. {origin(finding.runs)}", f"![{name}]({picture.name})", body
        sections[name] = "\n\n".join([*parts, f"```bash\n{commands}\n```\n"])
        known.write_text(json.dumps(sections, indent=1) + "\n")
    page = (
        "# Claims, tried in small\n\nMade by `python benchmarks/claims.py`. Lines are means over seeds, bands their "
        "range; tables give interquartile means and 95% intervals.\n\n"
    )
    (RESULTS / "claims.md").write_text(page + "\n".join(sections[name] for name in CLAIMS if name in sections))


if __name__ == "__main__":
    main()
