"""The parts of `benchmarks/language.py --peers` that need no peer: its options, its turns, and jaxpg's own step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))
import language  # noqa: E402
import language_peers  # noqa: E402
import language_turns  # noqa: E402

WORK = language.work_of("0.01M", columns=8)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--peers"], "--peers needs a Python that has a peer: --trl-python, --tunix-python or both"),
        (["--peers", "--trl-python", "/no/such"], "--trl-python: there is no /no/such"),
        (["--peers", "--tunix-python", sys.executable], f"--tunix-python: {sys.executable} has no google-tunix"),
        (["--trl-python", sys.executable], "--trl-python needs --peers"),
    ],
)
def test_a_peer_that_is_not_there_is_a_sentence(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["language.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        language.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {sentence}\n")


def test_the_reward_is_the_share_of_even_tokens_in_tokens_and_in_text() -> None:
    text = next(language_peers.prompts(WORK))
    tokens = language_peers.Characters(WORK).encode(text)
    assert len(tokens) == WORK.prompt
    assert language_peers.Characters(WORK).decode(tokens) == text
    assert language_peers.even_share([0, 1, 3, 6]) == 0.5
    assert language_peers.even_share(tokens) == language_peers.even_share([ord(x) for x in text])


def test_the_reward_on_the_host_is_that_of_the_compiled_one_and_is_asked_for_once() -> None:
    calls = []

    def judge(completions: list[list[int]]) -> list[float]:
        calls.append(len(completions))
        return [language_peers.even_share(tokens) for tokens in completions]

    inside = language.endless()
    policy, critic = language.transformer_of(inside, "0.01M")
    rewards = []
    for env in (inside, language.judged_on_host(inside, judge)):
        learner = language.learner_of(policy, critic, env, WORK.columns)
        state = jax.jit(learner.init)(jax.random.key(0))
        rewards.append(jax.jit(learner.step)(state, jax.random.key(1))[1]["return"])
    assert calls == [WORK.columns]
    assert jnp.array_equal(rewards[0], rewards[1])


@pytest.mark.full
def test_a_step_costs_cpu_seconds_and_what_went_before_the_reward_is_a_part_of_it() -> None:
    command = [sys.executable, str(BENCHMARKS / "language_peers.py"), "jaxpg", "", json.dumps(WORK._asdict())]
    around = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(BENCHMARKS.parent)}
    done = subprocess.run(command, input="step\nstep\n", env=around, capture_output=True, text=True, check=True)
    hello, *steps = map(json.loads, done.stdout.splitlines())
    assert hello["weights"] == sum(
        x.size for x in jax.tree.leaves(language.transformer_of(language.endless(), "0.01M")[0].init(jax.random.key(0)))
    )
    assert len(steps) == 2
    for step in steps:
        assert 0 < step["writing_cpu"] < step["cpu"]
        assert 0 < step["reward"] < 1


def finding(*cpu: float) -> language_turns.Finding:
    return language_turns.Finding(1, {}, "", {}, list(cpu), list(cpu), list(cpu))


def test_the_share_is_the_median_of_the_ratios_within_a_round() -> None:
    findings = {"jaxpg": finding(1.0, 4.0, 3.0), "trl": finding(2.0, 4.0, 4.0)}
    assert language_turns.share(findings) == {"trl": 0.75}


def test_the_fastest_setting_goes_on_and_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Fake:
        def __init__(self, python: str, name: str, setting: str, work: language_peers.Work) -> None:
            self.setting = setting

        def ask(self, what: str) -> dict[str, float]:
            return {"cpu": float(self.setting)}

        def close(self) -> None:
            closed.append(self.setting)

    monkeypatch.setattr(language_turns, "Step", Fake)
    monkeypatch.setattr(language_turns, "SETTINGS", {"tunix": ("64", "16", "32")})
    with language_turns.ExitStack() as stack:
        step, trials = language_turns.best_setting(stack, "", "tunix", WORK)
        assert (step.setting, sorted(closed)) == ("16", ["32", "64"])
    assert trials == {"64": 64.0, "16": 16.0, "32": 32.0}
