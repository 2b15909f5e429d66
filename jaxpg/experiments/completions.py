"""Completions to look at: of a trained model, and as training goes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.text import Text

from jaxpg.envs.text import PAD, TextState, Tokenizer
from jaxpg.errors import UserError
from jaxpg.experiments.build import Experiment, networks, text_task
from jaxpg.experiments.config import Config
from jaxpg.files import replace_file
from jaxpg.models.generation import generate
from jaxpg.parallel import host_callback
from jaxpg.types import Array, Env, Key, Outcome, Policy, Prompt, Tree

SAMPLES = "samples"
NUMBER = 4  # per evaluation


class Sample(NamedTuple):
    """A prompt, what a model made of it, and what that is worth."""

    prompt: str
    completion: str
    reward: float
    accuracy: float

    def line(self) -> Text:
        """For a terminal."""
        mark = ("✓", "green") if self.accuracy > 0 else ("✗", "red")
        quiet = (f"  {self.reward:.2f} ", "dim")
        return Text.assemble(quiet, mark, " ", self.prompt, (self.completion, "bold"))


def sample_completion(
    env: Env, policy: Policy, params: Tree, key: Key, *, end: int, **how: Any
) -> tuple[Prompt, Array, Outcome]:
    """A prompt that `env` draws, its completion `[T]`, and its outcome; `how` are settings of `language.generate`."""
    assert env.context
    assert env.outcome
    reset_key, write_key = jax.random.split(key)
    state, _ = env.reset(reset_key)
    prompt = env.context(state)
    tokens = generate(policy, params, prompt, write_key, end=end, max_tokens=env.time_limit, **how)
    ended = tokens == end
    length = jnp.where(ended.any(), ended.argmax() + 1, len(tokens)).astype(jnp.int32)
    written = jnp.where(jnp.arange(len(tokens)) < length, tokens, PAD)
    return prompt, written, env.outcome(TextState(state.problem, written, length))


def completion_sampler(
    config: Config, setup: Experiment, *, number: int, **how: Any
) -> Callable[[Tree, Key], list[Sample]]:
    """A program that writes so many completions of held-out prompts: (parameters of the policy, key) -> samples.

    It raises what a reward function on the host raised.
    """
    policy, _ = networks(config, setup.held_out)
    vocabulary = text_task(config, "test").vocabulary

    @jax.jit
    def write(params: Tree, key: Key) -> tuple[Prompt, Array, Outcome]:
        def one(key: Key) -> tuple[Prompt, Array, Outcome]:
            return sample_completion(setup.held_out, policy, params, key, end=vocabulary.end, **how)

        return jax.vmap(one)(jax.random.split(key, number))

    def draw(params: Tree, key: Key) -> list[Sample]:
        prompts, tokens, outcomes = jax.device_get(write(params, key))
        host_callback.raise_failure()
        return [
            Sample(
                prompt=vocabulary.decode(prompts.tokens[i][prompts.mask[i]].tolist()),
                completion=decode_completion(vocabulary, tokens[i]),
                reward=float(outcomes.reward[i]),
                accuracy=float(outcomes.parts["accuracy"][i]),
            )
            for i in range(number)
        ]

    return draw


def complete_prompt(
    config: Config, setup: Experiment, params: Tree, text: str, key: Key, *, number: int, **how: Any
) -> list[str]:
    """So many completions of one prompt.

    Raises:
        UserError: the prompt holds what the vocabulary lacks, padding or an end, nothing at all, or more than the
            model was made for.
    """
    policy, _ = networks(config, setup.held_out)
    about = text_task(config, "test")
    ids = about.vocabulary.encode(text)
    if not 1 <= len(ids) <= about.prompt_length:
        raise UserError(f"The prompt has {len(ids)} tokens; {config.task} has prompts of 1 to {about.prompt_length}.")
    if PAD in ids or about.vocabulary.end in ids:
        raise UserError(f"The prompt {text!r} holds padding or an end, which no text can.")
    prompt = Prompt(jnp.asarray(ids, jnp.int32), jnp.ones(len(ids), bool))

    write = partial(generate, policy, params, prompt, end=about.vocabulary.end, max_tokens=about.max_tokens, **how)
    tokens = jax.device_get(jax.jit(jax.vmap(write))(jax.random.split(key, number)))
    return [text + decode_completion(about.vocabulary, row) for row in tokens]


def decode_completion(vocabulary: Tokenizer, tokens: np.ndarray) -> str:
    """A completion as text; one that was cut off says so."""
    cut_off = vocabulary.end not in tokens
    return vocabulary.decode(tokens[tokens != PAD].tolist()) + (" ..." if cut_off else "")


class CompletionLogger:
    """Shows some completions of the first seed after every evaluation, and keeps them in the run's directory.

    Does nothing where no text is written: in control, and for a reward model.
    """

    def __init__(self, config: Config, setup: Experiment, run_dir: Path, console: Console) -> None:
        self._console, self._directory = console, run_dir / SAMPLES
        writes = setup.env.context is not None and config.algorithm != "reward_model"
        self._draw = completion_sampler(config, setup, number=NUMBER) if writes else None

    def __call__(self, state: Any) -> None:
        if self._draw is None:
            return
        params = jax.tree.map(lambda x: x[0], state.learner.params.policy)
        steps = int(np.asarray(state.steps)[0])
        samples = self._draw(params, jax.random.key(steps))
        self._directory.mkdir(exist_ok=True)
        path = self._directory / f"{steps:012d}.json"
        rows = [sample._asdict() for sample in samples]
        replace_file(path, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
        for sample in samples:
            self._console.print(sample.line())


def load_completions(run_dir: Path) -> dict[int, list[Sample]]:
    """The completions that a run kept, by the steps after which they were written."""
    files = sorted((run_dir / SAMPLES).glob("*.json"))
    return {int(path.stem): [Sample(**row) for row in json.loads(path.read_text())] for path in files}


def format_completions(samples: dict[int, list[Sample]]) -> dict[str, str]:
    """Completions for a report: steps -> lines."""
    return {f"after {steps:,} tokens": "\n".join(s.line().plain for s in lines) for steps, lines in samples.items()}
