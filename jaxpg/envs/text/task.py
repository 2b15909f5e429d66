"""The contract of a text task: drawing, prompts, demonstrations and verification, all inside the compiled program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxpg.envs.text.vocabulary import PAD, Tokenizer
from jaxpg.errors import UserError
from jaxpg.types import Array, Key, Prompt, Tree


class Verdict(NamedTuple):
    """The verification of one completion.

    accuracy: [] float32, 1 if it is right, else 0.
    format: [] float32, 1 if it has the required form, right or wrong, else 0.
    answer: [] int32, a fingerprint of its answer, for the majority vote; -1 if no answer could be read.
    scratchpad_used: [] float32, 1 if its scratchpad is not empty, else 0; `()` for a task without a scratchpad.
    """

    accuracy: Array
    format: Array
    answer: Array
    scratchpad_used: Array | tuple[()] = ()


class Task(NamedTuple):
    """Problems with a verifier, for one problem at a time: `vmap` makes batches. Tokens are int32.

    prompt_length: P, prompts are padded to this length.
    max_tokens: T, completions are truncated after this many tokens, the end token included.
    draw(key): a problem, of the split for which the task was made.
    prompt_tokens(problem): [P], padded on the right, with at least one real token.
    demonstration(problem, key): [T], a right completion with its end token, padded after it. Raises a UserError if
        max_tokens is too few for the demonstrations of the task.
    verify(problem, completion, length): Verdict of the first `length` [] tokens of a completion [T], the end token
        included where there is one. Tokens after them are ignored.
    is_held_out(prompts): whether each of these texts is a prompt of the test split; runs on the host.
    step_ends(completion, length): [T] bool, the tokens that end a step of the reasoning, such as a line of a
        scratchpad; the last token always does, since the answer is the last step. None where completions are not cut
        into steps.
    check_steps(problem, completion, length): [T] float32 from 0 to 1, how right the step is that ends at a token, read
        only at the `step_ends` before the last: the answer is for `verify`. None where the task cannot tell.
    true_reward(problem, completion, length): the quality of a completion, [] float32, where there is more to measure
        than right or wrong; None where there is not.
    num_problems: of the split for which the task was made, where they come from a file; None where they are endless.
    record(problem): the fields of the record that a problem is; runs on the host. None where problems are no records.
    answers(problems): a right answer to each problem of a batch, as text; runs on the host. None where there is none.
    """

    name: str
    vocabulary: Tokenizer
    prompt_length: int
    max_tokens: int
    draw: Callable[[Key], Tree]
    prompt_tokens: Callable[[Tree], Array]
    demonstration: Callable[[Tree, Key], Array]
    verify: Callable[[Tree, Array, Array], Verdict]
    is_held_out: Callable[[Sequence[str]], Sequence[bool]]
    step_ends: Callable[[Array, Array], Array] | None = None
    check_steps: Callable[[Tree, Array, Array], Array] | None = None
    true_reward: Callable[[Tree, Array, Array], Array] | None = None
    answers: Callable[[Tree], Sequence[str]] | None = None
    num_problems: int | None = None
    record: Callable[[Tree], Mapping[str, Any]] | None = None

    def prompt(self, problem: Tree) -> Prompt:
        """The prompt of a problem, with the mask of its real tokens."""
        tokens = self.prompt_tokens(problem)
        return Prompt(tokens, tokens != PAD)

    def check_steps_exist(self) -> None:
        """Raise a UserError unless completions are cut into steps; what judges steps calls this."""
        if self.step_ends is None:
            raise UserError(
                f"{self.name}: completions have no steps that could be judged: set think = true on a task that has a "
                "scratchpad, or step_separator on json_lines."
            )

    def check_demonstrations(self) -> None:
        """Check that the demonstrations fit, before anything is compiled; what learns from them calls this.

        Raises:
            UserError: max_tokens is too few for them.
        """
        jax.eval_shape(lambda key: self.demonstration(self.draw(key), key), jax.random.key(0))
