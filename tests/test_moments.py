"""Moments of numbers on several devices, against numpy on all of them at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg.objectives.moments import sample_moments
from jaxpg.parallel import collectives

DEVICES, T, B = 4, 5, 3


def of_devices(arrays: tuple[np.ndarray, ...], mask: np.ndarray) -> tuple:
    """What each device computes from its share, `[devices, T, B, ...]` of each array."""
    return jax.vmap(sample_moments, axis_name=collectives.DATA)(arrays, mask)


@pytest.mark.parametrize("dtype", [bool, np.float32])
@pytest.mark.parametrize("centre", [0.0, 1e4])
def test_moments_of_all_devices_at_once(centre: float, dtype: type) -> None:
    """Of means that are large beside the spread too, with a device that has no samples, and NaN where no sample is."""
    rng = np.random.default_rng(0)
    x = (centre + rng.normal(size=(DEVICES, T, B))).astype(np.float32)
    vectors = (centre + rng.normal(size=(DEVICES, T, B, 2)) * [1, 3]).astype(np.float32)
    mask = rng.random((DEVICES, T, B)) < 0.6
    mask[1] = False
    x[~mask] = np.nan
    samples, means, squares = of_devices((x, vectors), mask.astype(dtype))
    np.testing.assert_array_equal(samples, np.full(DEVICES, mask.sum()))
    for array, mean, square in zip((x, vectors), means, squares, strict=True):
        chosen = array[mask].astype(np.float64)
        np.testing.assert_allclose(
            mean, np.tile(chosen.mean(0), (DEVICES, *[1] * (array.ndim - 3))), rtol=1e-6, atol=1e-6
        )
        np.testing.assert_allclose(square[0], ((chosen - chosen.mean(0)) ** 2).sum(0), rtol=2e-3 if centre else 1e-5)


def test_moments_of_nothing_are_zero() -> None:
    samples, mean, squares = of_devices(np.ones((DEVICES, T, B), np.float32), np.zeros((DEVICES, T, B), np.float32))
    for x in (samples, mean, squares):
        assert not np.any(x)


def test_the_maximum_is_that_of_all_devices() -> None:
    x = jnp.arange(6).reshape(3, 2)
    largest = jax.vmap(collectives.maximum, axis_name=collectives.DATA)([x, -x.astype(float)])
    np.testing.assert_array_equal(largest[0], [5, 5, 5])
    np.testing.assert_array_equal(largest[1], [0, 0, 0])
    assert collectives.maximum(x) == 5


def test_one_exchange_is_enough() -> None:
    """Several arrays of several shapes: one sum, to which every device adds a row."""
    shapes = (jax.ShapeDtypeStruct((T, B), jnp.float32), jax.ShapeDtypeStruct((T, B, 2), jnp.float32))
    program = jax.make_jaxpr(sample_moments, axis_env=[(collectives.DATA, 2)])(shapes, shapes[0])
    names = [str(equation.primitive) for equation in program.eqns]
    assert (names.count("all_gather"), names.count("psum")) == (0, 1)
