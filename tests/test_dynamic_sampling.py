"""Groups without signal, several of them in one round of sampling."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg import rollout
from jaxpg.errors import UserError
from jaxpg.types import Episodes, Rollout, Transition

FIRST, SECOND = [1, 1, 2, 2, 5, 6], [3, 4, 0, 0, 7, 8]


def scripted(key: jax.Array, first: list[int], later: list[int], max_resample_rounds: int) -> rollout.Collector:
    """Three groups of two episodes of one step each, with these rewards in the first round and in every later one."""
    first_key = jax.random.key_data(jax.random.fold_in(key, 0))

    def collect(env, policy, params, runner, round_key):
        is_first = (jax.random.key_data(round_key) == first_key).all()
        reward = jnp.where(is_first, jnp.array(first), jnp.array(later))[None].astype(jnp.float32)
        zeros, mask = jnp.zeros((1, 6)), jnp.ones((1, 6))
        steps = Transition(reward[..., None], zeros, zeros, reward, zeros, zeros == 0, mask)
        stats = rollout.RolloutStats(*map(jnp.float32, (6, 6, 0, 6)))
        return runner, Rollout(steps, mask, episodes=Episodes(memory=reward[0])), stats

    plain = rollout.Collector(init=lambda *args: (), collect=collect, num_envs=6, group_size=2, whole_episodes=True)
    return rollout.with_dynamic_sampling(plain, max_resample_rounds=max_resample_rounds, gamma=0.9)


def test_each_place_gets_a_fresh_group_of_its_own():
    """Of two groups without signal the k-th is replaced by the k-th fresh one with signal, not both by one."""
    key = jax.random.key(0)
    _, part, stats = scripted(key, FIRST, SECOND, 3).collect(None, None, (), (), key)
    for column in (part.steps.reward[0], part.steps.obs[0, :, 0], part.episodes.memory):
        np.testing.assert_array_equal(column, [3, 4, 7, 8, 5, 6])
    assert stats.steps == 12


@pytest.mark.parametrize(
    ("collector", "sentence"),
    [
        (rollout.continuing(num_envs=8, num_steps=4), "not of 1, and no segments"),
        (rollout.episodic(num_envs=8), r"groups of two episodes at least, not of 1\."),
    ],
)
def test_what_has_no_groups_is_not_sampled_again(collector: rollout.Collector, sentence: str) -> None:
    """Nothing would ever have signal, so nothing would train."""
    with pytest.raises(UserError, match=sentence):
        rollout.with_dynamic_sampling(collector, max_resample_rounds=2, gamma=1.0)
    with pytest.raises(UserError, match="max_resample_rounds must be at least 1, not 0"):
        rollout.with_dynamic_sampling(rollout.episodic(num_envs=8, group_size=4), max_resample_rounds=0, gamma=1.0)


def test_segments_are_not_filtered_by_their_episodes() -> None:
    with pytest.raises(UserError, match=r"leaves out whole episodes, so it takes rollout\.episodic"):
        rollout.with_overlong_filtering(rollout.continuing(num_envs=8, num_steps=4))


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_sampling_ends_after_so_many_rounds(rounds: int):
    """The first included; all of them count as steps, and groups that still have no signal have no loss."""
    key = jax.random.key(0)
    _, part, stats = scripted(key, FIRST, [7] * 6, rounds).collect(None, None, (), (), key)
    np.testing.assert_array_equal(part.steps.reward[0], FIRST)
    np.testing.assert_array_equal(part.loss_mask[0], [0, 0, 0, 0, 1, 1])
    assert stats.steps == 6 * rounds
