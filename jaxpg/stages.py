"""A run that begins with what another one learned: its policy, or its reward model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxpg import config as configs
from jaxpg.build import Setup, build
from jaxpg.config import Config
from jaxpg.errors import UserError
from jaxpg.train import restore
from jaxpg.types import Params, Tree


def build_stage(config: Config, shards: int = 1) -> Setup:
    """`build`, with the reward model that the config names.

    Raises:
        UserError: there is no such run, or it is of another kind.
    """
    return build(config, shards, reward_of(config))


def policy_of(config: Config, setup: Setup) -> Tree:
    """The policies to begin with, one for each seed, `[S, ...]`; None where the config names none.

    A run of one seed gives its policy to all; else every seed takes that of the same number.

    Raises:
        UserError: there is no such run, it lacks a seed, or its network is another one.
    """
    if config.initial is None:
        return None
    earlier, params = _params(config.initial)
    policies = _for_seeds(params.policy, earlier.seeds, config)
    state = jax.eval_shape(setup.learner.init, jax.random.key(0))
    mine = jax.eval_shape(setup.learner.adopt, state, jax.tree.map(lambda x: x[0], policies)).params
    expected = jax.tree.map(jnp.shape, jax.eval_shape(setup.learner.init, jax.random.key(0)).params)
    if jax.tree.map(jnp.shape, mine) != expected:
        raise UserError(
            f"The policy of {config.initial} has another network ({earlier.network}) than this run "
            f"({config.network}). Give this run the same one."
        )
    return policies


def reward_of(config: Config) -> Tree:
    """Parameters of the reward model that the config names: those of its run's first seed; None where it names none."""
    if config.reward is None:
        return None
    earlier, params = _params(config.reward)
    if earlier.algorithm != "reward_model":
        raise UserError(f"{config.reward} is a run of {earlier.algorithm}; reward takes one of reward_model.")
    return jax.tree.map(lambda x: x[0], params.critic)


def _params(directory: str) -> tuple[Config, Params]:
    """The config of a run and what it learned, `[S, ...]`."""
    earlier = configs.load(Path(directory))
    learner = build_stage(earlier).learner
    return earlier, restore(learner, Path(directory), earlier.seeds, "last").learner.params


def _for_seeds(policies: Tree, seeds: Sequence[int], config: Config) -> Tree:
    if len(seeds) == 1:
        return jax.tree.map(lambda x: jnp.repeat(x, len(config.seeds), 0), policies)
    missing = set(config.seeds) - set(seeds)
    if missing:
        raise UserError(
            f"{config.initial} has the seeds {list(seeds)}, this run also {sorted(missing)}: choose from those, or "
            "begin with a run of one seed."
        )
    places = jnp.asarray([list(seeds).index(seed) for seed in config.seeds])
    return jax.tree.map(lambda x: x[places], policies)
