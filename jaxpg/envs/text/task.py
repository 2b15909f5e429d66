"""The contract of a text task: problems are drawn, shown, demonstrated and verified inside the compiled program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxpg.envs.text.vocabulary import PAD, Tokenizer
from jaxpg.types import Array, Key, Prompt, Tree


class Verdict(NamedTuple):
    """What is to be said of one completion.

    accuracy: [] float32, 1 if it is right, else 0.
    format: [] float32, 1 if it has the form that was asked for, right or wrong, else 0.
    answer: [] int32, a fingerprint of the answer that it gave, for the majority vote; -1 if none could be read.
    thinks: [] float32, 1 if its scratchpad is not empty, else 0; `()` where there is none to fill.
    """

    accuracy: Array
    format: Array
    answer: Array
    scratchpad_used: Array | tuple[()] = ()


class Task(NamedTuple):
    """Problems with a verifier, for one problem at a time: `vmap` makes batches. Tokens are int32.

    prompt_length: P, prompts are padded to this.
    max_tokens: T, completions are cut off after this many tokens, the end token counted.
    draw(key): a problem, of the training or of the held-out ones as was settled when the task was made.
    prompt(problem): [P], padded on the right, with at least one real token.
    demonstration(problem, key): [T], a right completion with its end, padded behind it.
    verify(problem, completion, length): Verdict of the first `length` [] tokens of a completion [T], the end counted
        where there is one. What lies behind them is not read.
    held_out(prompts): which of these texts are prompts of the test split; asked outside the compiled program.
    true_reward(problem, completion, length): how good a completion really is, [] float32, where there is more to say
        than right or wrong; None where there is not.
    """

    name: str
    vocabulary: Tokenizer
    prompt_length: int
    max_tokens: int
    draw: Callable[[Key], Tree]
    prompt: Callable[[Tree], Array]
    demonstration: Callable[[Tree, Key], Array]
    verify: Callable[[Tree, Array, Array], Verdict]
    held_out: Callable[[Sequence[str]], Sequence[bool]]
    true_reward: Callable[[Tree, Array, Array], Array] | None = None

    def prompt_of(self, problem: Tree) -> Prompt:
        """The prompt of a problem, with what of it is real."""
        tokens = self.prompt(problem)
        return Prompt(tokens, tokens != PAD)
