"""Completions to look at: of a trained model, and during training."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.text import Text

from jaxpg.envs.text import PAD, TextState, Tokenizer, completion_text
from jaxpg.envs.text.jsonl_reader import encode_text
from jaxpg.errors import UserError
from jaxpg.experiments.build import Experiment, networks, text_task, writes_text
from jaxpg.experiments.config import Config
from jaxpg.files import replace_file
from jaxpg.models.generation import generate
from jaxpg.parallel import host_callback
from jaxpg.preferences.pairs import completion_length
from jaxpg.training import run_files
from jaxpg.training.program import Program
from jaxpg.training.run_files import read_file
from jaxpg.types import Array, Env, Key, Outcome, Policy, Prompt, Tree
from jaxpg.user_input.printable import printable

SAMPLES = "samples"
SAMPLES_PER_EVALUATION = 4
NAME = re.compile(r"\d{12}\.json")  # what else is in the folder is not jaxpg's
FILE_OF_SAMPLES = run_files.list_of(
    run_files.record(
        prompt=run_files.text, completion=run_files.text, reward=run_files.number, accuracy=run_files.number
    )
)


class Sample(NamedTuple):
    """A prompt, a completion of it, and the completion's reward and accuracy."""

    prompt: str
    completion: str
    reward: float
    accuracy: float

    @property
    def is_right(self) -> bool:
        return self.accuracy >= 1

    def line(self) -> Text:
        """For a terminal."""
        mark = ("✓", "green") if self.is_right else ("✗", "red")
        reward = (f"  {self.reward:.2f} ", "dim")
        prompt, completion = (printable(text, keep="\n\t") for text in (self.prompt, self.completion))
        return Text.assemble(reward, mark, " ", prompt, (completion, "bold"))


def sample_completion(
    env: Env, policy: Policy, params: Tree, key: Key, *, end: int, **settings: Any
) -> tuple[Prompt, Array, Outcome]:
    """A prompt that `env` draws, its completion `[T]`, and its outcome; `settings` are those of `generate`."""
    assert env.context
    reset_key, write_key = jax.random.split(key)
    state, _ = env.reset(reset_key)
    prompt = env.context(state)
    tokens = generate(policy, params, prompt, write_key, end=end, max_tokens=env.time_limit, **settings)
    return prompt, *completion_outcome(env, state, tokens, end)


def completion_outcome(env: Env, state: TextState, tokens: Array, end: int) -> tuple[Array, Outcome]:
    """Generated tokens `[T]` with padding after their end, and the outcome of this completion."""
    assert env.outcome
    length = completion_length(tokens, end)
    completion = jnp.where(jnp.arange(len(tokens)) < length, tokens, PAD)
    return completion, env.outcome(TextState(state.problem, completion, length))


def completion_sampler(
    config: Config, experiment: Experiment, *, number: int, **settings: Any
) -> Callable[[Tree, Key], list[Sample]]:
    """A function that completes held-out prompts, `number` at a time: (parameters of the policy, key) -> samples.

    It raises what a reward function on the host raised. `settings` are those of `generate`.
    """
    policy, _ = networks(config, experiment.held_out)
    vocabulary = text_task(config, "test").vocabulary

    def write(params: Tree, key: Key) -> tuple[Prompt, Array, Outcome]:
        def one(key: Key) -> tuple[Prompt, Array, Outcome]:
            return sample_completion(experiment.held_out, policy, params, key, end=vocabulary.end, **settings)

        return jax.vmap(one)(jax.random.split(key, number))

    program = Program(write)

    def draw(params: Tree, key: Key) -> list[Sample]:
        prompts, tokens, outcomes = jax.device_get(program(params, key))
        host_callback.raise_failure()
        return [
            Sample(
                prompt=vocabulary.decode(prompts.tokens[i][prompts.mask[i]].tolist()),
                completion=decode_completion(vocabulary, tokens[i]),
                reward=float(outcomes.total()[i]),
                accuracy=float(outcomes.parts["accuracy"][i]),
            )
            for i in range(number)
        ]

    return draw


def prompt_completer(
    config: Config, experiment: Experiment, **settings: Any
) -> Callable[[Tree, str, Key, int], list[str]]:
    """`(params, text, key, number) -> completions` of one prompt, by one program for all prompts.

    `settings` are those of `generate`. The function raises a UserError for a prompt with a part that the vocabulary
    lacks, with no token, or with more tokens than the prompts of the task.
    """
    policy, _ = networks(config, experiment.held_out)
    task = text_task(config, "test")
    end, length = task.vocabulary.end, task.prompt_length

    @jax.jit
    def program(params: Tree, prompt: Prompt, keys: Key) -> Array:
        def write(key: Key) -> Array:
            return generate(policy, params, prompt, key, end=end, max_tokens=task.max_tokens, **settings)

        return jax.vmap(write)(keys)

    def complete(params: Tree, text: str, key: Key, number: int) -> list[str]:
        ids = encode_text(text, task.vocabulary)
        if not 1 <= len(ids) <= length:
            raise UserError(f"The prompt has {len(ids)} tokens; {config.task} has prompts of 1 to {length}.")
        tokens = np.full(length, PAD, np.int32)
        tokens[: len(ids)] = ids
        prompt = Prompt(jnp.asarray(tokens), jnp.arange(length) < len(ids))
        written = jax.device_get(program(params, prompt, jax.random.split(key, number)))
        return [text + decode_completion(task.vocabulary, row) for row in written]

    return complete


def decode_completion(vocabulary: Tokenizer, tokens: np.ndarray) -> str:
    """A completion as text; three dots mark one without an end."""
    return completion_text(vocabulary, tokens.tolist()) + ("" if vocabulary.end in tokens else " ...")


class CompletionLogger:
    """Writes completions of the first seed into the run's directory after every evaluation; a terminal shows them.

    Does nothing where no text is written: in control, and for a reward model.

    Raises:
        UserError: earlier completions in that directory are damaged.
    """

    def __init__(self, config: Config, experiment: Experiment, run_dir: Path, console: Console) -> None:
        self._console, self._directory = console, run_dir / SAMPLES
        writes = writes_text(config, experiment.env)
        self._draw = completion_sampler(config, experiment, number=SAMPLES_PER_EVALUATION) if writes else None
        load_completions(run_dir)  # those of a run that is resumed: a damaged file is refused before it trains

    def __call__(self, state: Any) -> list[Sample]:
        """What was written; empty where no text is."""
        if self._draw is None:
            return []
        params = jax.tree.map(lambda x: x[0], state.learner.params.policy)
        steps = int(np.asarray(state.steps)[0])
        samples = self._draw(params, jax.random.key(steps))
        self._directory.mkdir(exist_ok=True)
        rows = [sample._asdict() for sample in samples]
        replace_file(self._directory / f"{steps:012d}.json", json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
        if self._console.is_terminal:
            for sample in samples:
                self._console.print(sample.line())
        return samples


def load_completions(run_dir: Path) -> dict[int, list[Sample]]:
    """The completions in the directory of a run, by the steps after which they were written.

    Raises:
        UserError: a file is damaged.
    """
    files = [path for path in sorted((run_dir / SAMPLES).glob("*.json")) if NAME.fullmatch(path.name)]
    return {int(path.stem): read_file(path, _parse_samples, "Delete it to go on without it.") for path in files}


def _parse_samples(content: bytes) -> list[Sample]:
    return [Sample(**row) for row in run_files.parse_json(content, FILE_OF_SAMPLES)]


def completions_by_heading(run_dir: Path) -> dict[str, list[Sample]]:
    """The completions in the directory of a run for a report: "after 1,000 tokens" -> samples."""
    return {f"after {steps:,} tokens": samples for steps, samples in load_completions(run_dir).items()}
