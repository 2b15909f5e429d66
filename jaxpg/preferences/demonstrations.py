"""Where fine-tuning has its demonstrations from, as a config says it: the task, a file, or completions of a run."""

from __future__ import annotations

import jax

from jaxpg.envs.text import Task, demonstrations
from jaxpg.errors import UserError
from jaxpg.preferences.sources import refuse_unread
from jaxpg.types import Array, Key


def make_demonstrations(
    task: Task,
    *,
    num_demonstrations: int | None = None,
    file: str | None = None,
    sampled_from: str | None = None,
    prompts: int = 512,
    number: int = 16,
    temperature: float = 1.0,
    skip_long_prompts: bool = False,
) -> Task:
    """A task whose demonstrations are those of a file, or some of its own; for fine-tuning alone.

    Args:
        task: the task.
        num_demonstrations: number of the task's own demonstrations, reused again and again; every one is new if not
            given.
        file: JSON lines, each with a prompt and a completion, such as `jaxpg sample --out` writes. Prompts of the test
            split are left out.
        sampled_from: the run, or the stage that is trained first, whose right completions are the demonstrations
            (rejection sampling). Its first seed writes them before training begins; `file` is then theirs.
        prompts: number of prompts that it completes.
        number: completions of each prompt.
        temperature: of these completions.
        skip_long_prompts: leave out what the file has with longer prompts than the task; else such a prompt is an
            error.

    Raises:
        UserError: a file that cannot be used; demonstrations from two places at once, or not sampled yet; settings that
            nothing reads.
    """
    if num_demonstrations is not None and (file or sampled_from):
        raise UserError("demonstrations come from a file or a run, or num_demonstrations of them from the task.")
    sampling = {"prompts": prompts, "number": number, "temperature": temperature}
    if sampled_from is None:
        refuse_unread("demonstrations", make_demonstrations, sampling, "used only with sampled_from, which is not set")
    if file is None and sampled_from is None:
        skipping = {"skip_long_prompts": skip_long_prompts}
        refuse_unread("demonstrations", make_demonstrations, skipping, "used only with a file, and none is given")
    if sampled_from is not None and file is None:
        raise UserError(f"The demonstrations from {sampled_from} are sampled by `jaxpg train`, or by `jaxpg sample`.")
    if file is not None:
        prompt, completions = demonstrations(file, task, skip_long_prompts=skip_long_prompts)
        return _stored(task, prompt.tokens, completions)
    if num_demonstrations is None:
        return task
    task.check_demonstrations()

    def example(key: Key) -> tuple[Array, Array]:
        draw_key, demonstration_key = jax.random.split(key)
        problem = task.draw(draw_key)
        return task.prompt_tokens(problem), task.demonstration(problem, demonstration_key)

    with jax.ensure_compile_time_eval():
        return _stored(task, *jax.jit(jax.vmap(example))(jax.random.split(jax.random.key(0), num_demonstrations)))


def _stored(task: Task, prompts: Array, completions: Array) -> Task:
    """A task whose problem is the index of a row of prompts `[N, P]` and demonstrations `[N, T]`, drawn uniformly."""
    return task._replace(
        draw=lambda key: jax.random.randint(key, (), 0, len(prompts)),
        prompt_tokens=lambda row: prompts[row],
        demonstration=lambda row, key: completions[row],
    )
