"""Orthogonal initial weights, against a QR decomposition by numpy."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxpg.models.layers import orthogonal


@pytest.mark.parametrize("shape", [(4, 64), (64, 64), (64, 2), (3, 3, 10, 16), (9, 1)])
def test_orthogonal_is_the_q_of_a_normal_matrix(shape: tuple[int, ...]) -> None:
    key, gain = jax.random.key(3), 1.7
    rows, columns = np.prod(shape[:-1]), shape[-1]
    normal = np.asarray(jax.random.normal(key, (max(rows, columns), min(rows, columns))), np.float64)
    q, r = np.linalg.qr(normal)
    q = q * np.sign(np.diag(r))
    weights = np.asarray(orthogonal(gain)(key, shape)).reshape(rows, columns)
    np.testing.assert_allclose(weights, gain * (q if rows >= columns else q.T), atol=1e-4)
    gram = weights.T @ weights if rows >= columns else weights @ weights.T
    np.testing.assert_allclose(gram, gain**2 * np.eye(len(gram)), atol=1e-5)


def test_orthogonal_under_vmap_equals_a_loop() -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    together = jax.jit(jax.vmap(lambda key: orthogonal(1.0)(key, (6, 3))))(keys)
    alone = np.stack([orthogonal(1.0)(key, (6, 3)) for key in keys])
    np.testing.assert_allclose(together, alone, atol=1e-5)
