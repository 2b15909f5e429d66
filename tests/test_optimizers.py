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


@pytest.mark.parametrize("flat_below", [None, 0])
def test_a_tree_is_updated_alike_as_one_vector_and_array_by_array(flat_below):
    params = {"a": jnp.array([3.0, 1.0]), "b": jnp.array([[4.0, -2.0]])}
    gradient = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0, 12.0]])}
    optimizer = update.adam(max_grad_norm=0.5, flat_below=flat_below)
    state = optimizer.init(params)
    assert any(x.ndim == 2 for x in jax.tree.leaves(state)) == (flat_below == 0)
    params, state, norms = update.apply_gradient(optimizer, 0.1, gradient, params, state)
    assert norms == {"gradient_norm": pytest.approx(13.0)}
    expected = {"a": [2.9, 1.0], "b": [[3.9, -2.1]]}  # Adam's first step is the sign of the gradient
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-4)
