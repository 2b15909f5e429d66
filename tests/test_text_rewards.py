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
