"""Completions whose steps are labelled: written by a policy and checked by a task, or read from a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpg.envs.text import StepData, Task
from jaxpg.envs.text.labelled_steps import NO_STEP, labelled_steps
from jaxpg.errors import UserError
from jaxpg.models.generation import completion_rollout, generate
from jaxpg.preferences.pairs import completion_length
from jaxpg.preferences.sources import refuse_unread
from jaxpg.types import Array, Key, Policy, Prompt, Rollout, Tree
from jaxpg.user_input.domains import FRACTION, check_number, check_whole


class LabelledCompletion(NamedTuple):
    """One completion.

    prompt: leaves [P].
    tokens: [T] int32, with its end token, or truncated without one.
    label: [T] float32, from 0 (wrong) to 1 (right) at the token that ends a step, NO_STEP elsewhere.
    """

    prompt: Prompt
    tokens: Array
    label: Array


class StepLabels(NamedTuple):
    """A source of labelled completions; `writer` are the parameters of the policy that writes them, where one does.

    draw(writer, key): a completion to learn from.
    held_out(writer, key): a completion for evaluation, never learned from, with labels that are right.
    end: the token that ends a completion.
    policy: the policy that writes; None where completions are stored.
    """

    draw: Callable[[Tree, Key], LabelledCompletion]
    held_out: Callable[[Tree, Key], LabelledCompletion]
    end: int
    policy: Policy | None = None


def checked_steps(
    task: Task, held_out: Task, policy: Policy, *, num_completions: int | None = None, label_noise: float = 0.0
) -> StepLabels:
    """Completions of a policy, whose steps the task checks; the last step is right if the answer is.

    Args:
        task: the source of prompts.
        held_out: the same task on its held-out prompts.
        policy: writes the completions.
        num_completions: number of completions to learn from, each labelled once and reused; every one is new if not
            given.
        label_noise: probability that a label to learn from is wrong, for each step by itself.

    Raises:
        UserError: a task that has no steps or cannot check them, or settings out of range.
    """
    check_number("label_noise", label_noise, FRACTION)
    if num_completions is not None:
        num_completions = check_whole("num_completions", num_completions)
    task.check_steps_exist()
    if task.check_steps is None:
        raise UserError(
            f"{task.name} cannot check the steps of a completion itself: name a file of labelled steps, "
            "step_labels.file."
        )
    end = task.vocabulary.end

    def labelled(task: Task, writer: Tree, key: Key, noise: float) -> LabelledCompletion:
        draw_key, write_key, noise_key = jax.random.split(key, 3)
        problem = task.draw(draw_key)
        prompt = task.prompt(problem)
        tokens = generate(policy, writer, prompt, write_key, end=end, max_tokens=task.max_tokens)
        ends, right = _judge(task, problem, tokens)
        flipped = jax.random.bernoulli(noise_key, noise, tokens.shape)
        return LabelledCompletion(prompt, tokens, jnp.where(ends, jnp.where(flipped, 1 - right, right), NO_STEP))

    def draw(writer: Tree, key: Key) -> LabelledCompletion:
        # As for pairs: a completion is a function of its key, so num_completions keys give as many, and none is stored.
        if num_completions is not None:
            key = jax.random.fold_in(jax.random.key(0), jax.random.randint(key, (), 0, num_completions))
        return labelled(task, writer, key, label_noise)

    return StepLabels(draw, lambda writer, key: labelled(held_out, writer, key, 0.0), end, policy)


def stored_steps(data: StepData, held_out: StepData, *, end: int) -> StepLabels:
    """Completions stored in arrays, leaves `[N, ...]`, drawn uniformly with replacement.

    Raises:
        UserError: none to learn from, or none held out.
    """
    if not len(data.tokens) or not len(held_out.tokens):
        raise UserError(
            f"There are {len(data.tokens)} labelled completions to learn from and {len(held_out.tokens)} held out, and "
            "both are needed: give more, of more prompts."
        )

    def drawing(data: StepData) -> Callable[[Tree, Key], LabelledCompletion]:
        def draw(_: Tree, key: Key) -> LabelledCompletion:
            i = jax.random.randint(key, (), 0, len(data.tokens))
            return LabelledCompletion(*jax.tree.map(lambda x: jnp.asarray(x)[i], data))

        return draw

    return StepLabels(drawing(data), drawing(held_out), end)


def make_step_labels(
    task: Task,
    held_out: Task,
    policy: Policy,
    *,
    file: str | None = None,
    num_completions: int | None = None,
    label_noise: float = 0.0,
    skip_long_prompts: bool = False,
) -> StepLabels:
    """Labelled steps on a task: those of a file, or those of the policy's completions, which the task checks.

    Args:
        task: the source of prompts.
        held_out: the same task on its held-out prompts.
        policy: writes the completions where there is no file.
        file: JSON lines, each with a prompt, the steps of a completion and a label for each. Completions whose prompts
            belong to the task's test split are held out.
        num_completions: number of completions to learn from, each labelled once and reused; every one is new if not
            given.
        label_noise: probability that a label to learn from is wrong, for each step by itself.
        skip_long_prompts: leave out the completions of the file whose prompts are longer than those of the task, and
            log how many; else such a prompt is an error.

    Raises:
        UserError: a file that cannot be used, labels that do not fit the steps, or a task that cannot check steps.
    """
    if file is None:
        skipping = {"skip_long_prompts": skip_long_prompts}
        refuse_unread(
            "step_labels", make_step_labels, skipping, "used only with a file of completions, and none is given"
        )
        return checked_steps(task, held_out, policy, num_completions=num_completions, label_noise=label_noise)
    checking = {"label_noise": label_noise, "num_completions": num_completions}
    why = f"for completions that the task checks, and the file {file} has its labels"
    refuse_unread("step_labels", make_step_labels, checking, why)
    task.check_steps_exist()
    train, test = (
        labelled_steps(file, task, split=split, skip_long_prompts=skip_long_prompts) for split in ("train", "test")
    )
    return stored_steps(train, test, end=task.vocabulary.end)


def label_rollout(completions: LabelledCompletion, *, end: int) -> Rollout:
    """Completions, leaves `[B, ...]`, as a rollout: the rewards are labels, the loss mask has the ends of steps."""
    rollout = completion_rollout(completions.prompt, completions.tokens, end=end)
    label = completions.label.T
    labelled = (label >= 0) * rollout.steps.mask
    steps = rollout.steps._replace(reward=jnp.maximum(label, 0.0) * labelled, step_end=labelled)
    return rollout._replace(steps=steps, loss_mask=labelled)


def _judge(task: Task, problem: Tree, tokens: Array) -> tuple[Array, Array]:
    """Where steps end, `[T]` bool, and how right each is; the last is right if the answer is."""
    assert task.step_ends
    assert task.check_steps
    length = completion_length(tokens, task.vocabulary.end)
    is_last = jnp.arange(len(tokens)) == length - 1
    accuracy = task.verify(problem, tokens, length).accuracy
    right = jnp.where(is_last, accuracy, task.check_steps(problem, tokens, length))
    return task.step_ends(tokens, length), right
