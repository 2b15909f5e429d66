"""Preference pairs from the settings of a config: of a file, or of a judge who knows the true reward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxpg.envs.text import Task, preference_pairs
from jaxpg.envs.text.rewards import grade, make_reward
from jaxpg.errors import UserError
from jaxpg.preferences.pairs import (
    Pairs,
    completion_length,
    corrupted_demonstrations,
    judged_pairs,
    stored_pairs,
)
from jaxpg.preferences.sampled_pairs import load_pairs
from jaxpg.types import Array, Key, Tree
from jaxpg.user_input.domains import check_scalars

TrueReward = Callable[[Tree, Array, Array], Array]
"""What a judge goes by: problem, completion [T], length [] -> [], as a task's `verify` reads a completion."""
DEMONSTRATIONS_COMPARED = 256
"""Pairs of demonstrations in which a judge has to see a difference at least once."""


def make_pairs(
    task: Task,
    held_out: Task,
    *,
    file: str | None = None,
    sampled_from: str | None = None,
    num_pairs: int | None = None,
    sharpness: float = 10.0,
    slip_rate: float = 0.0,
    judge: str | None = None,
    earlier_share: float = 0.0,
    skip_long_prompts: bool = False,
) -> Pairs:
    """Preference pairs on a task: those of a file, or those of a judge who knows the true reward.

    Args:
        task: the source of prompts.
        held_out: the same task on its held-out prompts.
        file: JSON lines, each with a prompt, a chosen and a rejected completion. Pairs whose prompts belong to the
            task's test split are held out.
        sampled_from: the run, or the stage that is trained first, whose completions are judged. Its first seed writes
            them before training begins; `file` is then theirs.
        num_pairs: number of judged pairs, reused again and again; every pair is new if not given.
        sharpness: how well the judge distinguishes rewards.
        slip_rate: the judged completions are demonstrations in which each token is replaced with this probability,
            where they are not those of a run.
        judge: the reward function that the judge goes by, such as length, which prefers the shorter completion; the
            task's true reward if not given, or its accuracy.
        earlier_share: the share of the sampled pairs that is drawn from those of the reward model that this one begins
            with, its `initial`.
        skip_long_prompts: leave out the pairs of the file whose prompts are longer than those of the task, and log how
            many; else such a pair is an error.

    Raises:
        UserError: a file that cannot be used, demonstrations that do not fit into max_tokens, or a judge to whom any
            two of them are equal; settings that nothing reads.
    """
    if sampled_from is not None:
        if file is None:
            raise UserError(f"The preference pairs from {sampled_from} are sampled by `jaxpg train`.")
        return stored_pairs(*load_pairs(Path(file), task), end=task.vocabulary.end)
    if earlier_share:
        raise UserError("earlier_share is a share of sampled pairs: set pairs.sampled_from, or remove it.")
    if file is not None:
        judging = {"judge": judge, "num_pairs": num_pairs, "sharpness": sharpness, "slip_rate": slip_rate}
        refuse_unread("pairs", make_pairs, judging, f"for a judge, and the file {file} has been judged")
        return _pairs_of_file(file, task, skip_long_prompts)
    skipping = {"skip_long_prompts": skip_long_prompts}
    refuse_unread("pairs", make_pairs, skipping, "used only with a file of pairs, and none is given")
    check_scalars({"slip_rate": slip_rate})
    reward = true_reward(judge, task)
    for judged in (task, held_out):
        judged.check_demonstrations()
    if not slip_rate and reward is not task.true_reward:
        _check_differences(task, reward, judge)
    return judged_pairs(
        task,
        held_out,
        reward,
        generate=corrupted_demonstrations(task, rate=slip_rate),
        num_pairs=num_pairs,
        sharpness=sharpness,
    )


def refuse_unread(table: str, function: Callable[..., Any], settings: Mapping[str, Any], why: str) -> None:
    """Refuse settings of a table that nothing would read, where they are not the defaults of the function they are of.

    Raises:
        UserError: there is one; `why` says what they are for, and what is missing.
    """
    parameters = inspect.signature(function).parameters
    given = [f"{table}.{name}" for name, value in settings.items() if value != parameters[name].default]
    if given:
        verb, them = ("is", "it") if len(given) == 1 else ("are", "them")
        raise UserError(f"{' and '.join(given)} {verb} {why}: remove {them}.")


def true_reward(judge: str | None, task: Task) -> TrueReward:
    """What a judge goes by: a reward function of the task by its name, else the task's true reward or its accuracy.

    Raises:
        UserError: no such reward function, or overlong, which is 0 for every completion where there is no cache.
    """
    if judge is None and task.true_reward is not None:
        return task.true_reward
    if judge == "overlong":
        raise UserError("pairs.judge = overlong would find all completions equal. Use length, to prefer shorter ones.")
    reward = make_reward(judge or "accuracy", 1.0, task)
    return lambda problem, completion, length: reward.function(grade(task, problem, completion, length))


def _check_differences(task: Task, reward: TrueReward, judge: str | None) -> None:
    """Raise a UserError if a judge prefers no demonstration of a task to another one of the same problem.

    Then the labels would be coin tosses.
    """

    def differ(key: Key) -> Array:
        draw_key, *write_keys = jax.random.split(key, 3)
        problem = task.draw(draw_key)
        texts = [task.demonstration(problem, write_key) for write_key in write_keys]
        a, b = (reward(problem, text, completion_length(text, task.vocabulary.end)) for text in texts)
        return a != b

    with jax.ensure_compile_time_eval():
        found = jax.jit(jax.vmap(differ))(jax.random.split(jax.random.key(0), DEMONSTRATIONS_COMPARED)).any()
    if not found:
        by = f" by {judge}" if judge else ""
        raise UserError(
            f"All demonstrations of {task.name} are equally good{by}, so a judge has nothing to prefer: set "
            "pairs.slip_rate above 0, or name a file of pairs."
        )


def _pairs_of_file(file: str, task: Task, skip_long_prompts: bool) -> Pairs:
    """The pairs of a user's own file."""
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


def check_sampled(settings: Mapping[str, Any], task: Task) -> None:
    """Refuse settings of `make_pairs` with which no pairs on a task can be sampled.

    Raises:
        UserError: no number of pairs, or as `true_reward`.
    """
    number = settings.get("num_pairs")
    if number is None or number < 1:
        raise UserError(f"pairs.num_pairs must say how many pairs are sampled, at least 1; it is {number or 'none'}.")
    true_reward(settings.get("judge"), task)
