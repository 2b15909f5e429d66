"""What is said of R1's stages, tried in small: see claims.py, which runs these.

rewards: a rule beside a learned preference keeps the policy from exploiting the reward model.
starts: with a cold start fewer tokens of GRPO are needed than from a model that seldom reasons (R1-Zero); and GRPO
    against fine-tuning on right completions alone, for as many completions drawn.
distillation: a small model learns more from a larger one's right completions than from GRPO of its own.
rounds: a reward model that is trained on between rounds (iterative GRPO) is exploited less than one that stays.
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
    tokens,
    trained,
)
from matplotlib.axes import Axes

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
    """
    begin, first, runs = _judged_summaries()
    tuned = runs[0]
    pairs = chosen(**{"pairs.num_pairs": 4_000})
    stays = trained("judge-4000", 1, "summarise_toy", "reward_model", *_from(tuned), *pairs)
    half, whole = ["--steps", "200000"], ["--steps", "400000"]
    alone = trained("rounds-0", seeds, "summarise_toy", "grpo", *begin, *GRPO, *_reward(stays), *whole)
    one = trained("rounds-1", seeds, "summarise_toy", "grpo", *begin, *GRPO, *_reward(first), *half)
    sampled = chosen(**{"pairs.sampled_from": one.directory, "pairs.num_pairs": 2_000, "pairs.earlier_share": 0.1})
    second = trained("judge-second", 1, "summarise_toy", "reward_model", *_from(first), *sampled)
    two = trained("rounds-2", seeds, "summarise_toy", "grpo", *_from(one), *GRPO, *_reward(second), *half)
    figure, axes = panels(2, "true reward", "score of the reward model of the time")
    for panel, name in zip(axes, ("true_reward", "return"), strict=True):
        curve(panel, tokens(alone), alone.metrics[f"evaluation_{name}"], 0, "one reward model")
        curve(panel, tokens(one), one.metrics[f"evaluation_{name}"], 1, "two rounds")
        curve(panel, tokens(two) + tokens(one)[-1], two.metrics[f"evaluation_{name}"], 1, "", linestyle="--")
    _label_tokens(axes)
    measured = ("evaluation_true_reward", "evaluation_return", "evaluation_length")
    lines = ["| | true reward | score of its reward model | tokens |", "|---|---|---|---|"]
    lines += [
        row(label, run.metrics, *measured)
        for label, run in {"one reward model": alone, "after round 1": one, "after round 2": two}.items()
    ]
    judges = {"4,000 pairs": stays, "2,000 pairs": first, "trained on, pairs of the policy": second}
    lines += ["", *(f"Reward model, {label}: {_agreement(run)} of held-out pairs.\n" for label, run in judges.items())]
    return Finding(figure, lines, [*runs, stays, alone, one, second, two])


def _judged_summaries() -> tuple[list[str], Trained, list[Trained]]:
    """Arguments that begin with a fine-tuned policy, a reward model of 2,000 pairs, and both runs."""
    tuned = trained("summaries", 1, "summarise_toy", "sft")
    judge = trained("judge-2000", 1, "summarise_toy", "reward_model", *_from(tuned))
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
