"""What optimizers make of a gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg import update


@pytest.mark.parametrize("scale", [1.0, 7.0])
def test_adam_clips_by_the_global_norm(scale):
    """Two gradients in turn, since a first step of Adam does not depend on the length of its gradient."""
    gradients = [
        {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])},
        {"a": jnp.array([0.3, 0.1]), "b": jnp.zeros((1, 1))},
    ]
    clipped, plain = update.adam(max_grad_norm=0.5), update.adam(max_grad_norm=None)
    state, expected_state = (optimizer.init(gradients[0]) for optimizer in (clipped, plain))
    for gradient in gradients:
        gradient = jax.tree.map(lambda x: scale * x, gradient)
        norm = np.sqrt(sum((np.asarray(x) ** 2).sum() for x in jax.tree.leaves(gradient)))
        shrunk = jax.tree.map(lambda x, norm=norm: x * min(1.0, 0.5 / norm), gradient)
        step, state = clipped.update(gradient, state)
        expected, expected_state = plain.update(shrunk, expected_state)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), step, expected)
