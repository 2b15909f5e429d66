"""Preference pairs from completions of a trained policy: drawn and judged once, and kept in a file of arrays."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg import files
from jaxpg.envs.text import PairData, Task
from jaxpg.errors import UserError
from jaxpg.preferences.pairs import Pairs, PreferencePair
from jaxpg.types import Key, Prompt

SIDE_BY_SIDE = 1024
"""Pairs that are drawn at once."""
SPLITS = ("train", "held_out")
FIELDS = ("prompt", "prompt_mask", "chosen", "rejected")


def sample_pairs(
    pairs: Pairs, key: Key, *, num_pairs: int, earlier: Pairs | None = None, earlier_share: float = 0.0
) -> tuple[PairData, PairData]:
    """`num_pairs` pairs to learn from and a tenth as many held out, leaves `[N, ...]`.

    Args:
        pairs: what new pairs are drawn from. All that are held out are new.
        key: the source of all randomness.
        num_pairs: how many to learn from.
        earlier: what `earlier_share` of those to learn from are drawn from instead: a replay of what was learned from
            before. Source: iterative GRPO, Shao et al. 2024, section 4.1.4, where it is a tenth.
        earlier_share: from 0 to 1.
    """
    replayed = round(num_pairs * earlier_share) if earlier else 0
    new_key, earlier_key, held_out_key = jax.random.split(key, 3)
    parts = [_drawn(pairs.draw, new_key, num_pairs - replayed)]
    if earlier:
        parts.append(_drawn(earlier.draw, earlier_key, replayed))
    learned: PairData = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    return learned, _drawn(pairs.held_out, held_out_key, max(1, num_pairs // 10))


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
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"The preference pairs in {path} cannot be read: {error}.") from error
    widths = dict(zip(FIELDS, (task.prompt_length,) * 2 + (task.max_tokens,) * 2, strict=True))
    expected = {f"{split}_{field}": width for split in SPLITS for field, width in widths.items()}
    if found.keys() != expected.keys() or any(
        x.ndim != 2 or x.shape[1] != expected[name] or x.dtype.kind not in "ib" for name, x in found.items()
    ):
        raise UserError(
            f"{path} does not hold preference pairs of {task.name}, with prompts of {task.prompt_length} tokens and "
            f"completions of {task.max_tokens}: remove it, and jaxpg train samples them again."
        )

    def split(name: str) -> PairData:
        prompt, mask, chosen, rejected = (found[f"{name}_{field}"] for field in FIELDS)
        return PairData(Prompt(prompt, mask), chosen, rejected)

    return split("train"), split("held_out")


def _drawn(draw: Callable[[Key], PreferencePair], key: Key, number: int) -> PairData:
    """`number` pairs, of which pair i depends on the key and on i alone."""

    def parts() -> Iterator[PreferencePair]:
        program = jax.jit(jax.vmap(lambda i: draw(jax.random.fold_in(key, i))))
        at_once = min(SIDE_BY_SIDE, max(1, number))
        for first in range(0, max(1, number), at_once):
            yield jax.device_get(program(jnp.arange(first, first + at_once)))

    return PairData(*jax.tree.map(lambda *x: np.concatenate(x)[:number], *parts()))
