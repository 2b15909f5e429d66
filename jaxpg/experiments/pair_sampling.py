"""Preference pairs of a trained policy's own completions, judged once and written for the run that learns from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg import files, preferences
from jaxpg.envs.text import PairData
from jaxpg.errors import UserError
from jaxpg.experiments.build import make_pairs, networks, text_task
from jaxpg.experiments.config import Config, load_config, make_env
from jaxpg.experiments.signatures import options
from jaxpg.experiments.warm_start import check_writer
from jaxpg.models.generation import generate
from jaxpg.parallel import host_callback
from jaxpg.preferences import Pairs, PreferencePair
from jaxpg.training.program import Program
from jaxpg.types import Array, Key, Tree

SIDE_BY_SIDE = 1024
"""Completions, or pairs of them, that are written at once."""


def sample_pairs(file: Path, config: Config) -> None:
    """Write the pairs that the table `pairs` of a config asks for, to learn from and a tenth as many held out.

    With `earlier_share` a part of those to learn from is drawn from the pairs of the reward model that the run begins
    with; all that are held out are new.

    Raises:
        UserError: as `check_writer` and `check_earlier_pairs`; a judge of the user's that fails; a file that cannot be
            written.
    """
    settings = {name: option.default for name, option in options(preferences.make_pairs).items()} | config.pairs
    earlier = load_config(Path(config.initial)) if config.initial else None
    check_earlier_pairs(config, earlier)
    pairs = draw_pairs(
        _pairs_of_writer(config, settings["judge"], settings["sharpness"]),
        jax.random.key(0),
        num_pairs=settings["num_pairs"],
        earlier=make_pairs(earlier) if earlier and settings["earlier_share"] else None,
        earlier_share=settings["earlier_share"],
    )
    with files.explain_os_error(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        preferences.save_pairs(file, *pairs)


def check_earlier_pairs(config: Config, earlier: Config | None) -> None:
    """Refuse a share of earlier pairs unless the run that a config begins with, `earlier`, is a reward model."""
    if config.pairs.get("earlier_share") and (earlier is None or earlier.algorithm != "reward_model"):
        raise UserError(
            "pairs.earlier_share is a share of the pairs of the reward model that this one begins with: set initial to "
            f"a run of reward_model, not to {config.initial or 'none'}."
        )


def draw_pairs(
    pairs: Pairs, key: Key, *, num_pairs: int, earlier: Pairs | None = None, earlier_share: float = 0.0
) -> tuple[PairData, PairData]:
    """`num_pairs` pairs to learn from and a tenth as many held out, leaves `[N, ...]`.

    Args:
        pairs: what new pairs are drawn from.
        key: the source of all randomness.
        num_pairs: how many to learn from.
        earlier: what `earlier_share` of those to learn from are drawn from instead: a replay of what was learned from
            before. Source: iterative GRPO, Shao et al. 2024, section 4.1.4, where it is a tenth.
        earlier_share: from 0 to 1.

    Raises:
        UserError: a judge of the user's fails.
    """
    replayed = round(num_pairs * earlier_share) if earlier else 0
    new_key, earlier_key, held_out_key = jax.random.split(key, 3)
    parts = [_drawn(pairs.draw, new_key, num_pairs - replayed)]
    if earlier:
        parts.append(_drawn(earlier.draw, earlier_key, replayed))
    learned: PairData = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    return learned, _drawn(pairs.held_out, held_out_key, max(1, num_pairs // 10))


def _pairs_of_writer(config: Config, judge: str | None, sharpness: float) -> Pairs:
    """Completions of the run that `pairs.sampled_from` names, by the policy of its first seed, and their judge."""
    writer, params = check_writer(config.pairs["sampled_from"], config)
    train, test = (text_task(config, split) for split in ("train", "test"))
    policy, _ = networks(writer, make_env(writer))
    first, end = jax.tree.map(lambda x: x[0], params.policy), train.vocabulary.end

    def write(problem: Tree, key: Key) -> Array:
        return generate(policy, first, train.prompt(problem), key, end=end, max_tokens=train.max_tokens)

    true_reward = preferences.true_reward(judge, train)
    return preferences.judged_pairs(train, test, true_reward, generate=write, sharpness=sharpness)


def _drawn(draw: Callable[[Key], PreferencePair], key: Key, number: int) -> PairData:
    """`number` pairs, of which pair i depends on the key and on i alone."""

    def parts() -> Iterator[PreferencePair]:
        program = Program(jax.vmap(lambda i: draw(jax.random.fold_in(key, i))))
        at_once = min(SIDE_BY_SIDE, max(1, number))
        for first in range(0, max(1, number), at_once):
            yield jax.device_get(program(jnp.arange(first, first + at_once)))
            host_callback.raise_failure()

    return PairData(*jax.tree.map(lambda *x: np.concatenate(x)[:number], *parts()))
