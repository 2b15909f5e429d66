"""The arithmetic of the penalty on overlong completions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg.envs.text import rewards


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
def test_overlong_penalty(dtype):
    """A maximum of 20 tokens, of which the last 4 cost."""
    length = jnp.array([0, 16, 17, 18, 19, 20, 21, 90], dtype)
    penalty = jax.jit(rewards.overlong_penalty)(length, 20, 4)
    np.testing.assert_array_equal(penalty, [0, 0, -0.25, -0.5, -0.75, -1, -1, -1])


def test_overlong_penalty_without_a_cache_is_a_step_at_the_maximum():
    penalty = jax.jit(rewards.overlong_penalty)(jnp.array([0, 19, 20, 21, 90]), 20, 0)
    np.testing.assert_array_equal(penalty, [0, 0, 0, -1, -1])
