"""Preference pairs from the settings of a config: of a file, or of a judge who knows the true reward."""

from __future__ import annotations

from collections.abc import Callable

from jaxpg.envs.text import Task, preference_pairs
from jaxpg.envs.text.rewards import grade, make_reward
from jaxpg.errors import UserError
from jaxpg.preferences.pairs import Pairs, corrupted_demonstrations, judged_pairs, stored_pairs
from jaxpg.types import Array, Tree


def make_pairs(
    task: Task,
    held_out: Task,
    *,
    file: str | None = None,
    num_pairs: int | None = None,
    sharpness: float = 10.0,
    slip_rate: float = 0.0,
    judge: str | None = None,
    skip_long_prompts: bool = False,
) -> Pairs:
    """Preference pairs on a task: those of a file, or those of a judge who knows the true reward.

    Args:
        task: the source of prompts.
        held_out: the same task on its held-out prompts.
        file: JSON lines, each with a prompt, a chosen and a rejected completion. Pairs whose prompts belong to the
            task's test split are held out.
        num_pairs: number of judged pairs, reused again and again; every pair is new if not given.
        sharpness: how well the judge distinguishes rewards.
        slip_rate: the judged completions are demonstrations in which each token is replaced with this probability.
        judge: the reward function that the judge goes by, such as length, which prefers the shorter completion; the
            task's true reward if not given, or its accuracy.
        skip_long_prompts: leave out the pairs of the file whose prompts are longer than those of the task, and log how
            many; else such a pair is an error.

    Raises:
        UserError: a file that cannot be used, demonstrations that do not fit into max_tokens, or a judge who could
            never see two different completions.
    """
    if file is not None:
        train, test = (
            preference_pairs(
                file,
                task.vocabulary,
                prompt_length=task.prompt_length,
                max_tokens=task.max_tokens,
                split=split,
                held_out=task.is_held_out,
                skip_long_prompts=skip_long_prompts,
            )
            for split in ("train", "test")
        )
        return stored_pairs(train, test, end=task.vocabulary.end)
    if not 0 <= slip_rate <= 1:
        raise UserError(f"slip_rate is a probability, from 0 to 1, not {slip_rate}.")
    if judge is None and task.true_reward is None and not slip_rate:
        raise UserError(
            f"All demonstrations of {task.name} are right, so a judge has nothing to prefer: set pairs.slip_rate above "
            "0, or name a file of pairs."
        )
    for judged in (task, held_out):
        judged.check_demonstrations()
    return judged_pairs(
        task,
        held_out,
        _judged_by(judge, task) if judge else task.true_reward or _judged_by("accuracy", task),
        generate=corrupted_demonstrations(task, rate=slip_rate),
        num_pairs=num_pairs,
        sharpness=sharpness,
    )


def _judged_by(name: str, task: Task) -> Callable[[Tree, Array, Array], Array]:
    """A reward function of the task as a true reward."""
    reward = make_reward(name, 1.0, task)
    return lambda problem, completion, length: reward.function(grade(task, problem, completion, length))
