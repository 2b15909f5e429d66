"""The file of preference pairs that were sampled for a run (experiments/pair_sampling.py), as arrays of tokens."""

from __future__ import annotations

import io
from pathlib import Path

import jax
import numpy as np

from jaxpg import files
from jaxpg.envs.text import PairData, Task
from jaxpg.errors import UserError
from jaxpg.types import Prompt

SPLITS = ("train", "held_out")
FIELDS = ("prompt", "prompt_mask", "chosen", "rejected")


def save_pairs(path: Path, pairs: PairData, held_out: PairData) -> None:
    """Write pairs into a file, whole or not at all. It holds tokens: a text would not say where an end is missing.

    Raises:
        OSError: it cannot be written.
    """
    arrays = {
        f"{split}_{field}": np.asarray(x)
        for split, data in zip(SPLITS, (pairs, held_out), strict=True)
        for field, x in zip(FIELDS, jax.tree.leaves(data), strict=True)
    }
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    files.replace_file(path, buffer.getvalue())


def load_pairs(path: Path, task: Task) -> tuple[PairData, PairData]:
    """The pairs of a file: those to learn from and those held out.

    Raises:
        UserError: it cannot be read, or is not what `save_pairs` writes for such a task.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    except Exception as error:  # of many types, for damaged archives
        raise UserError(f"The preference pairs in {path} cannot be read: {error}.") from error
    widths = dict(zip(FIELDS, (task.prompt_length,) * 2 + (task.max_tokens,) * 2, strict=True))
    expected = {f"{split}_{field}": (split, width) for split in SPLITS for field, width in widths.items()}
    if found.keys() != expected.keys() or any(
        found[name].shape != (*found[f"{split}_chosen"].shape[:1], width) or found[name].dtype.kind not in "ib"
        for name, (split, width) in expected.items()
    ):
        raise UserError(
            f"{path} does not hold preference pairs of {task.name}, with prompts of {task.prompt_length} tokens and "
            f"completions of {task.max_tokens}: remove it, and jaxpg train samples them again."
        )

    def split(name: str) -> PairData:
        prompt, mask, chosen, rejected = (found[f"{name}_{field}"] for field in FIELDS)
        return PairData(Prompt(prompt, mask), chosen, rejected)

    return split("train"), split("held_out")
