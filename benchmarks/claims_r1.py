"""What is said of R1's stages, tried in small: see claims.py, which runs these.

rewards: a rule beside a learned preference keeps the policy from exploiting the reward model.
starts: with a cold start fewer tokens of GRPO are needed than from a model that seldom reasons (R1-Zero); and GRPO
    against fine-tuning on right completions alone, for as many completions drawn.
distillation: a small model learns more from a larger one's right completions than from GRPO of its own.
rounds: whether a reward model that is trained on between rounds (iterative GRPO) is exploited less than one that stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from claim_tools import (
    Finding,
    Trained,
    at_the_end,
    chosen,
    curve,
    divergence,
    estimate,
    panels,
    row,
    together,
    tokens,
    trained,
)
from matplotlib.axes import Axes

from jaxpg import report

OVERFITTED = ["--steps", "600000"]
"""Thirty passes over the pairs: what `rewards` says is about a reward model that knows its pairs by heart."""
GRPO = chosen(num_envs=256, learning_rate=5e-4, epochs=1, num_minibatches=1, max_grad_norm=1.0, kl="none")


def rewards(seeds: int) -> Finding:
    """GRPO on summaries by a rule (the perfect summary and no other), by a reward model, and by both.

    All seeds begin with one fine-tuned policy and face one reward model. The true reward is that of the judge whose
    noisy preferences the reward model has learned; the KL is k1 on fresh samples.
    """
    begin, judge, runs = _judged_summaries()
    variants = {"rule": (1.0, 0.0), "reward model": (0.0, 1.0), "both": (1.0, 1.0)}
    figure, axes = panels(3, "accuracy", "true reward", "score of the reward model")
    lines = [
        "| rewards | accuracy | true reward | score of the reward model | KL, nats | tokens |",
        "|---|---|---|---|---|---|",
    ]
    for index, (label, (rule, learned)) in enumerate(variants.items()):
        weights = chosen(**{"rewards.accuracy": rule, "rewards.preference.model": judge.directory})
        weights += chosen(**{"rewards.preference.weight": learned})
        run = trained(f"rewards-{index}", seeds, "summarise_toy", "grpo", *begin, *GRPO, *weights, "--steps", "400000")
        metrics = {**run.metrics, "evaluation_moved": divergence(run)[None]}
        measured = ("accuracy", "true_reward", "reward_preference")
        for panel, name in zip(axes, measured, strict=True):
            curve(panel, tokens(run), metrics[f"evaluation_{name}"], index, label)
        lines.append(row(label, metrics, *(f"evaluation_{name}" for name in (*measured, "moved", "length"))))
        runs.append(run)
    _label_tokens(axes)
    return Finding(figure, lines, runs)


CHAIN = chosen(
    **{f"environment_settings.{name}": x for name, x in {"terms": 3, "modulus": 5, "scratchpad_share": 0.2}.items()}
)
RULES = chosen(**{"rewards.accuracy": 1.0, "rewards.format": 0.1})
BASE_STEPS, COLD_STEPS, LEARNING_STEPS = 800_000, 30_000, 300_000


def starts(seeds: int) -> Finding:
    """Chains of up to three terms from a base model that fills in its scratchpad in a fifth of the cases.

    Zero is GRPO on it. A cold start fine-tunes it on 200 demonstrations with scratchpads first. Rejection sampling
    fine-tunes the base model on right completions, its own or, in later rounds, those of the first seed, drawn at once
    or in three rounds, as many in all as GRPO draws. All seeds begin with one base model.
    """
    base = _base("chain-base", CHAIN)
    cold = _cold_start(base)
    zero = trained("chain-zero", seeds, "modular_chain", "grpo", *_grpo(CHAIN, base))
    after = trained("chain-after-cold", seeds, "modular_chain", "grpo", *_grpo(CHAIN, cold))
    figure, axes = panels(3, "accuracy", "share with tags in place", "tokens per completion")
    runs = {"zero": zero, "after a cold start": after}
    for index, (label, run) in enumerate(runs.items()):
        for panel, name in zip(axes, ("accuracy", "format", "length"), strict=True):
            curve(panel, tokens(run), run.metrics[f"evaluation_{name}"], index, label)
    _label_tokens(axes)
    columns = ("evaluation_accuracy", "evaluation_format", "evaluation_scratchpad_used", "evaluation_length")
    lines = ["| | accuracy | tags in place | scratchpad used | tokens | thousand tokens to 0.9 |", "|" + "---|" * 6]
    for label, run in {"base": base, "cold start": cold}.items():
        lines.append(row(label, run.metrics, *columns) + " |")
    for label, run in runs.items():
        lines.append(row(f"GRPO, {label}", run.metrics, *columns) + f" {_thousands_to(run, 0.9)} |")
    drawn = int(np.nansum(zero.metrics["episodes"], 0).mean())
    sampled = []
    for number in (1, 3):
        rounds = _rejection_sampling(base, number, drawn, seeds)
        label = f"rejection sampling, {number} round{'s' * (number > 1)}"
        lines.append(row(label, rounds[-1].metrics, *columns) + " |")
        sampled += rounds
    return Finding(figure, [f"Completions drawn: {drawn:,} each.\n", *lines], [base, cold, *runs.values(), *sampled])


SMALL = chosen(**{"network.width": 24, "network.layers": 1, "network.heads": 2, "network.kv_heads": 1})


def distillation(seeds: int) -> Finding:
    """A small model of 24 units and one layer, and what it learns from a model of 64 units and two layers.

    It is fine-tuned on that model's right completions, or trained by GRPO from a small base model with the same cold
    start. Both see as many tokens.
    """
    base = _base("chain-base", CHAIN)
    teachers_cold = _cold_start(base)
    teacher = trained("chain-after-cold", seeds, "modular_chain", "grpo", *_grpo(CHAIN, teachers_cold))
    settings = [*CHAIN, *SMALL]
    small = _base("small-base", settings)
    cold = _cold_start(small, "small-cold", settings)
    alone = trained("small-grpo", seeds, "modular_chain", "grpo", *_grpo(settings, cold))
    data = _sampled_from(teacher, prompts=2_048, number=8)
    steps = ["--steps", str(LEARNING_STEPS)]
    taught = trained("small-taught", seeds, "modular_chain", "sft", *settings, *_from(cold), *data, *steps)
    figure, (panel,) = panels(1, "accuracy of the small model")
    lines = ["| | accuracy | tokens |", "|---|---|---|"]
    measured = ("evaluation_accuracy", "evaluation_length")
    lines += [row("the larger model", teacher.metrics, *measured), row("small, cold start", cold.metrics, *measured)]
    for index, (label, run) in enumerate({"GRPO of its own": alone, "the larger model's completions": taught}.items()):
        curve(panel, tokens(run), run.metrics["evaluation_accuracy"], index, label)
        lines.append(row(f"small, {label}", run.metrics, *measured))
    _label_tokens([panel])
    return Finding(figure, lines, [base, teachers_cold, teacher, small, cold, alone, taught])


def rounds(seeds: int) -> Finding:
    """GRPO on summaries against a reward model that stays, and in rounds between which it is trained on.

    The reward model that stays has learned from 4,000 pairs. The other one has learned from 2,000 and then, after half
    of the tokens, from 2,000 pairs of the policy's own completions, a tenth of them earlier ones. No KL holds either.
    Every seed has reward models of its own: two draws of one differ more than two policies that face the same one. All
    begin with one fine-tuned policy.
    """
    tuned = trained("summaries", 1, "summarise_toy", "sft")
    chains = [_rounds_of(tuned, ["--seed", str(seed)], f"-seed{seed}") for seed in range(seeds)]
    alone, one, two = (together([chain[name] for chain in chains]) for name in ("alone", "one", "two"))
    figure, axes = panels(2, "true reward", "score of the reward model of the time")
    for panel, name in zip(axes, ("evaluation_true_reward", "evaluation_return"), strict=True):
        curve(panel, alone["steps"].mean(1) / 1e3, alone[name], 0, "one reward model")
        curve(panel, one["steps"].mean(1) / 1e3, one[name], 1, "two rounds")
        curve(panel, (two["steps"] + one["steps"][-1]).mean(1) / 1e3, two[name], 1, "", linestyle="--")
    _label_tokens(axes)
    measured = ("evaluation_true_reward", "evaluation_return", "evaluation_length")
    lines = ["| | true reward | score of its reward model | tokens |", "|---|---|---|---|"]
    halfway = {name: values[alone["steps"].mean(1) <= 1.05 * one["steps"][-1].mean()] for name, values in alone.items()}
    found = {"one reward model, half of the tokens": halfway, "one reward model": alone}
    found |= {"after round 1": one, "after round 2": two}
    lines += [row(label, metrics, *measured) for label, metrics in found.items()]
    difference = report.difference(at_the_end(two, measured[0]), at_the_end(alone, measured[0]))
    lines += ["", f"Two rounds less one reward model, true reward: {_signed(difference)}.\n"]
    judges = {"4,000 pairs": "stays", "2,000 pairs": "first", "trained on, pairs of the policy": "second"}
    for label, name in judges.items():
        agreement = np.concatenate([at_the_end(chain[name].metrics, "evaluation_accuracy") for chain in chains])
        lines.append(f"Reward models, {label}: {estimate(agreement)} of held-out pairs.\n")
    return Finding(figure, lines, [tuned, *(run for chain in chains for run in chain.values())])


def _rounds_of(tuned: Trained, seed: list[str], name: str) -> dict[str, Trained]:
    """The runs of one seed, which has reward models of its own."""
    judge, write = ["summarise_toy", "reward_model", *seed], ["summarise_toy", "grpo", *GRPO, *seed]
    half, whole = ["--steps", "200000"], ["--steps", "400000"]
    stays = trained(f"judge-4000{name}", 1, *judge, *_from(tuned), *chosen(**{"pairs.num_pairs": 4_000}))
    first = trained(f"judge-2000{name}", 1, *judge, *_from(tuned))
    alone = trained(f"rounds-0{name}", 1, *write, *_from(tuned), *_reward(stays), *whole)
    one = trained(f"rounds-1{name}", 1, *write, *_from(tuned), *_reward(first), *half)
    sampled = chosen(**{"pairs.sampled_from": one.directory, "pairs.num_pairs": 2_000, "pairs.earlier_share": 0.1})
    second = trained(f"judge-second{name}", 1, *judge, *_from(first), *sampled)
    two = trained(f"rounds-2{name}", 1, *write, *_from(one), *_reward(second), *half)
    return {"stays": stays, "first": first, "alone": alone, "one": one, "second": second, "two": two}


def _signed(found: report.Estimate) -> str:
    return f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def _judged_summaries() -> tuple[list[str], Trained, list[Trained]]:
    """Arguments that begin with a fine-tuned policy, a reward model of 2,000 pairs, and both runs."""
    tuned = trained("summaries", 1, "summarise_toy", "sft")
    judge = trained("judge-2000", 1, "summarise_toy", "reward_model", *_from(tuned), *OVERFITTED)
    return _from(tuned), judge, [tuned, judge]


def _base(name: str, settings: Sequence[str]) -> Trained:
    """A model that has seen demonstrations of the task, most of which answer at once."""
    arguments = [*settings, *chosen(learning_rate=3e-3), "--steps", str(BASE_STEPS)]
    return trained(name, 1, "modular_chain", "sft", *arguments)


def _cold_start(base: Trained, name: str = "chain-cold", settings: Sequence[str] = CHAIN) -> Trained:
    """A base model fine-tuned on 200 demonstrations, all with scratchpads."""
    shown = chosen(**{"environment_settings.scratchpad_share": 1.0, "demonstrations.num_demonstrations": 200})
    return trained(name, 1, "modular_chain", "sft", *settings, *shown, *_from(base), "--steps", str(COLD_STEPS))


def _rejection_sampling(base: Trained, number: int, drawn: int, seeds: int) -> list[Trained]:
    """Rounds of fine-tuning on right completions of the round before; `drawn` completions and LEARNING_STEPS in all."""
    runs, writer = [], base
    for i in range(number):
        data = _sampled_from(writer, prompts=drawn // (16 * number), number=16)
        steps = ["--steps", str(LEARNING_STEPS // number)]
        writer = trained(
            f"rejection-{number}-{i}", seeds, "modular_chain", "sft", *CHAIN, *_from(writer), *data, *steps
        )
        runs.append(writer)
    return runs


def _grpo(settings: Sequence[str], begun: Trained) -> list[str]:
    return [*settings, *_from(begun), *RULES, "--steps", str(LEARNING_STEPS)]


def _from(run: Trained) -> list[str]:
    return ["--from", str(run.directory)]


def _reward(model: Trained) -> list[str]:
    return ["--reward", str(model.directory)]


def _sampled_from(writer: Trained, **settings: int) -> list[str]:
    return chosen(**{f"demonstrations.{name}": x for name, x in {"sampled_from": writer.directory, **settings}.items()})


def _thousands_to(run: Trained, accuracy: float) -> str:
    """Thousand tokens until the mean accuracy over seeds is first reached."""
    values = run.metrics["evaluation_accuracy"].mean(1)
    reached = np.flatnonzero(values >= accuracy)
    return f"{tokens(run)[reached[0]]:.0f}" if len(reached) else "–"


def _agreement(model: Trained) -> str:
    return estimate(at_the_end(model.metrics, "evaluation_accuracy"))


def _label_tokens(axes: Sequence[Axes]) -> None:
    for panel in axes:
        panel.set_xlabel("thousand tokens written")
    axes[0].legend(frameon=False, fontsize=8)
