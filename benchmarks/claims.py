"""What papers say of language models under policy gradients, tried in small: one figure and one table per claim.

    python benchmarks/claims.py [scratchpad] [lengths] [clips] [sampling] [overoptimization] [kl_target] [process]
                                [rewards] [starts] [distillation] [rounds] [--seeds 5]

Every run is a command of `jaxpg`, which stands beside its figure in results/claims.md; runs that are finished are not
trained again.

scratchpad: a model that seldom thinks learns to think, because it pays; without the tokens to think with it cannot.
lengths: GRPO divides by a completion's length, which makes long wrong answers cheap; Dr. GRPO does not.
clips: DAPO's wider clip keeps entropy up.
sampling: DAPO's dynamic sampling learns more per update, at a price in completions.
overoptimization: the reward model's score goes on rising when the true reward has long begun to fall.
kl_target: a controller of the KL coefficient keeps the KL where it is wanted.
process: a reward for every step of a chain teaches more per completion than one for its answer, the longer the chain.
rewards, starts, distillation, rounds: see claims_r1.py.

Evaluations are of the last one; what is measured in training is pooled over its last quarter, in which an average
counts as much as what it is an average of.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from claim_tools import (
    RESULTS,
    Finding,
    Trained,
    at_the_end,
    chosen,
    curve,
    divergence,
    estimate,
    origin,
    panels,
    row,
    tokens,
    trained,
    written_lines,
)
from claims_r1 import distillation, rewards, rounds, starts
from result_files import read, write

from jaxpg.experiments import completions
from jaxpg.report.palette import COLORS
from jaxpg.training import run_directory


def scratchpad(seeds: int) -> Finding:
    """Length and accuracy rise together, as more completions think; without a scratchpad neither does."""
    thinking = trained("thinking", seeds, "parity", "grpo")
    bare = ["--set", "environment_settings.think=false", "--set", "environment_settings.scratchpad_share=1.0"]
    without = trained("without", seeds, "parity", "grpo", *bare)
    figure, (accuracy, length, share) = panels(
        3, "held-out accuracy, sampled", "tokens per completion", "share that thinks"
    )
    curve(share, tokens(thinking), thinking.metrics["scratchpad_used"], 0, "with a scratchpad")
    for index, (label, run) in enumerate({"with a scratchpad": thinking, "without": without}.items()):
        curve(accuracy, tokens(run), run.metrics["evaluation_accuracy"], index, label)
        curve(length, tokens(run), run.metrics["length"], index, label)
    for panel in (accuracy, length, share):
        panel.set_xlabel("thousand tokens written")
    accuracy.axhline(0.5, color="gray", linewidth=0.8, linestyle=":")
    accuracy.set_ylim(0, 1.03)
    accuracy.legend(frameon=False)
    written = completions.completions_by_heading(thinking.directory)
    printed = [list(written)[i] for i in sorted({0, len(written) // 2, len(written) - 1})]
    scratchpad_used = [
        f"{when} {estimate(at_the_end(m, 'evaluation_scratchpad_used'))}"
        for when, m in (("before", run_directory.load_metrics(thinking.directory / "sft")), ("after", thinking.metrics))
    ]
    lines = [
        f"Share of completions that think: {', '.join(scratchpad_used)}.\n",
        "| | accuracy | tokens |\n|---|---|---|",
        *(
            row(f"{name} a scratchpad, {when}", metrics, "evaluation_accuracy", "evaluation_length")
            for name, run in (("with", thinking), ("without", without))
            for when, metrics in (("before", run_directory.load_metrics(run.directory / "sft")), ("after", run.metrics))
        ),
        "",
        *(f"Completions of the first seed, {when}:\n\n```\n{written_lines(written[when])}\n```\n" for when in printed),
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
            curve(panel, tokens(run), run.metrics["length_incorrect"], index, name)
            lines.append(
                row(f"{task}, {name}", run.metrics, "length_incorrect", "length_correct", "evaluation_accuracy")
            )
            runs.append(run)
        panel.set_xlabel("thousand tokens written")
        panel.legend(frameon=False)
    return Finding(figure, lines, runs)


AS_THEY_COME = {"epochs": 4, "max_resample_rounds": "none"}  # four epochs, so that ratios reach the clip


def clips(seeds: int) -> Finding:
    """Entropy under DAPO with a symmetric and with a raised clip, without an entropy bonus and with one of 0.01."""
    figure, panels_ = panels(2, "entropy without a bonus, nats", "entropy with a bonus of 0.01, nats")
    runs, lines = [], ["| | entropy | share clipped high | accuracy |\n|---|---|---|---|"]
    for bonus, panel in zip((0.0, 0.01), panels_, strict=True):
        for index, high in enumerate((0.2, 0.28)):
            settings = chosen(**AS_THEY_COME, clip_high=high, entropy_coefficient=bonus)
            run = trained(f"clips-{bonus}-{high}", seeds, "sort", "dapo", *settings)
            curve(panel, run.metrics["iteration"].mean(1), run.metrics["entropy"], index, f"clip 0.2 / {high}")
            label = f"clip 0.2 / {high}, bonus {bonus}"
            lines.append(row(label, run.metrics, "entropy", "clipped_high", "evaluation_accuracy"))
            runs.append(run)
        panel.set_xlabel("iterations")
        panel.set_yscale("log")
        panel.legend(frameon=False)
    return Finding(figure, lines, runs)


def sampling(seeds: int) -> Finding:
    """DAPO per update and per completion drawn: groups as they come, those without signal left out, or refilled."""
    variants = {
        "as they come": ("clips-0.01-0.28", chosen(**AS_THEY_COME, clip_high=0.28, entropy_coefficient=0.01)),
        "without signal left out": ("sampling-1", chosen(epochs=4, max_resample_rounds=1)),
        "without signal refilled": ("sampling-4", chosen(epochs=4, max_resample_rounds=4)),
    }
    figure, (per_update, per_prompt) = panels(2, "accuracy per update", "accuracy per completion")
    runs, lines = [], ["| | accuracy | updates | completions drawn |\n|---|---|---|---|"]
    for index, (label, (name, settings)) in enumerate(variants.items()):
        run = trained(name, seeds, "sort", "dapo", *settings)
        m = run.metrics
        iterations, drawn = m["iteration"].mean(1), np.nancumsum(m["episodes"], 0).mean(1) / 1e3
        curve(per_update, iterations, m["evaluation_accuracy"], index, label)
        curve(per_prompt, drawn, m["evaluation_accuracy"], index, label)
        lines.append(row(label, m, "evaluation_accuracy") + f" {iterations[-1]:.0f} | {drawn[-1]:.0f} k |")
        runs.append(run)
    per_update.set_xlabel("iterations")
    per_prompt.set_xlabel("thousand completions drawn")
    per_update.legend(frameon=False)
    return Finding(figure, lines, runs)


KL_COEFFICIENTS, BETAS = (0.0, 0.03, 0.1, 0.3), (0.03, 0.1, 0.3, 1.0)


def _judged(seeds: int) -> tuple[Trained, Trained, list[str]]:
    """A fine-tuned policy, a reward model, and the arguments of runs of 200,000 tokens that begin from both."""
    tuned = trained("tuned", seeds, "summarise_toy", "sft")
    begin = ["--from", str(tuned.directory)]
    judge = trained("judge", seeds, "summarise_toy", "reward_model", *begin)
    return tuned, judge, [*begin, "--reward", str(judge.directory), "--steps", "200000"]


def overoptimization(seeds: int) -> Finding:
    """True and proxy reward over the KL to the policy that a run began with: PPO by KL coefficient, DPO by β.

    All seeds face the reward model of the first: intervals are over policies. Along the lines of PPO the KL is what
    training measured (k3); that of the table and of DPO's marks is k1 on fresh samples. Lines and marks are means.
    """
    figure, axes = panels(2, "true reward", "what the reward model says")
    tuned, judge, begin = _judged(seeds)
    runs, lines = [tuned, judge], ["| | KL, nats | proxy reward | true reward |\n|---|---|---|---|"]
    for index, coefficient in enumerate(KL_COEFFICIENTS):
        setting = f"kl_coefficient={coefficient}"
        run = trained(f"rlhf-{coefficient}", seeds, "summarise_toy", "rlhf", *begin, "--set", setting)
        m = run.metrics
        moved = (m["reference_kl"] * m["length"]).mean(1)
        for panel, name in zip(axes, ("true_reward", "return"), strict=True):
            panel.plot(moved, m[name].mean(1), color=COLORS[index % len(COLORS)], label=f"PPO {coefficient:g}")
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
    accuracy = estimate(at_the_end(judge.metrics, "evaluation_accuracy"))
    return Finding(figure, [f"Reward model, held-out pairs: {accuracy}.\n", *lines], runs)


KL_TARGETS = (1.0, 2.0, 4.0)


def kl_target(seeds: int) -> Finding:
    """KL and coefficient over iterations, by the target of Ziegler et al.'s controller (gain 1).

    All begin with a coefficient of 0.05 and face the reward model of the first seed. The table has the second half of
    training, the true reward the last evaluation.
    """
    figure, (moved, coefficient) = panels(2, "KL to the initial policy, nats", "KL coefficient")
    tuned, judge, begin = _judged(seeds)
    runs, lines = [tuned, judge], ["| target, nats | KL, nats | KL coefficient | true reward |\n|---|---|---|---|"]
    for index, target in enumerate(KL_TARGETS):
        settings = chosen(reference_kl_target=target, kl_gain=1.0)
        run = trained(f"target-{target:g}", seeds, "summarise_toy", "rlhf", *begin, *settings)
        m, iterations = run.metrics, run.metrics["iteration"].mean(1)
        second_half = iterations > iterations[-1] / 2
        curve(moved, iterations, m["episode_reference_kl"], index, f"target {target:g}")
        curve(coefficient, iterations, m["kl_coefficient"], index, f"target {target:g}")
        moved.axhline(target, color="gray", linewidth=0.8, linestyle=":")
        late = [estimate(np.nanmean(m[name][second_half], 0)) for name in ("episode_reference_kl", "kl_coefficient")]
        true = estimate(at_the_end(m, "evaluation_true_reward"))
        lines.append(f"| {target:g} | {' | '.join(late)} | {true} |")
        runs.append(run)
    for panel in (moved, coefficient):
        panel.set_xlabel("iterations")
    coefficient.set_yscale("log")
    moved.legend(frameon=False)
    return Finding(figure, lines, runs)


CHAIN_LENGTHS, LABEL_NOISE = (4, 6, 8), (0.0, 0.1)


def process(seeds: int) -> Finding:
    """Outcome against process supervision on chains of growing length; on the longest also by learned step rewards.

    All seeds begin with one fine-tuned policy per length. Step rewards are the task's own check, or those of a process
    reward model that was trained on labels of which none or a tenth are wrong.
    """
    figure, axes = panels(len(CHAIN_LENGTHS), *(f"chains of {n} terms: accuracy" for n in CHAIN_LENGTHS))
    runs, lines = [], ["| terms | rewards | accuracy | tokens | completions drawn |\n|---|---|---|---|---|"]
    for terms, panel in zip(CHAIN_LENGTHS, axes, strict=True):
        chain = {"terms": terms, "min_terms": terms, "modulus": 5}
        setting = chosen(**{f"environment_settings.{name}": x for name, x in chain.items()}, **{"network.width": 32})
        tuned = trained(
            f"chain-{terms}",
            1,
            "modular_chain",
            "sft",
            *setting,
            *chosen(learning_rate=3e-3),
            "--steps",
            f"{60_000 * terms}",
        )
        begin = [*setting, "--from", str(tuned.directory)]
        learning = [*begin, *chosen(num_envs=128, learning_rate=1e-3), "--steps", f"{12_500 * terms}"]
        variants = {"outcome": ("grpo", []), "steps": ("process_grpo", [])}
        runs.append(tuned)
        for noise in LABEL_NOISE if terms == max(CHAIN_LENGTHS) else ():
            labels = [*begin, *chosen(**{"step_labels.label_noise": noise}), "--steps", "150000"]
            model = trained(f"steps-{noise}", 1, "modular_chain", "process_reward_model", *labels)
            judged = chosen(process_reward=model.directory)
            variants[f"steps by a model, {noise:.0%} of labels wrong"] = ("process_grpo", judged)
            runs.append(model)
            agrees = estimate(at_the_end(model.metrics, "evaluation_accuracy"))
            lines.insert(0, f"Process reward model, {noise:.0%} of labels wrong, held-out steps: {agrees}.\n")
        for index, (label, (algorithm, judged)) in enumerate(variants.items()):
            run = trained(f"process-{terms}-{index}", seeds, "modular_chain", algorithm, *learning, *judged)
            drawn = np.nancumsum(run.metrics["episodes"], 0).mean(1) / 1e3
            curve(panel, drawn, run.metrics["evaluation_accuracy"], index, label)
            found = row(f"{terms} | {label}", run.metrics, "evaluation_accuracy", "evaluation_length")
            lines.append(f"{found} {drawn[-1]:.1f} k |")
            runs.append(run)
        panel.set_xlabel("thousand completions drawn")
        panel.legend(frameon=False, fontsize=8)
    return Finding(figure, lines, runs)


def _line(label: str, run: Trained) -> str:
    metrics = {**run.metrics, "evaluation_moved": divergence(run)[None]}
    return row(label, metrics, "evaluation_moved", "evaluation_return", "evaluation_true_reward")


CLAIMS: dict[str, Callable[[int], Finding]] = {
    f.__name__: f
    for f in (
        *(scratchpad, lengths, clips, sampling, overoptimization, kl_target, process),
        *(rewards, starts, distillation, rounds),
    )
}


def main() -> None:
    """Train what is missing, draw, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", nargs="*", choices=CLAIMS, metavar="CLAIM", help="which (default all)")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    known = RESULTS / "claims.json"
    sections: dict[str, str] = read(known)
    for name in args.claims or CLAIMS:
        finding = CLAIMS[name](args.seeds)
        picture = RESULTS / f"claim_{name}.png"
        finding.figure.savefig(picture, dpi=150)
        commands = "\n".join(run.command for run in finding.runs)
        about = " ".join((CLAIMS[name].__doc__ or "").split())
        body = "\n".join(finding.lines)
        parts = f"## {name}", f"{about} {args.seeds} seeds. {origin(finding.runs)}", f"![{name}]({picture.name})", body
        sections[name] = "\n\n".join([*parts, f"```bash\n{commands}\n```\n"])
        write(known, sections)
    page = (
        "# Claims, tried in small\n\nMade by `python benchmarks/claims.py`. Lines and tables are interquartile means "
        "over seeds, with 95% intervals, where a section does not say otherwise.\n\n"
    )
    (RESULTS / "claims.md").write_text(page + "\n".join(sections[name] for name in CLAIMS if name in sections))


if __name__ == "__main__":
    main()
