"""Number, mean and squares of numbers that several devices hold, by one exchange."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpg.parallel import collectives
from jaxpg.types import Array, Tree


class SampleMoments(NamedTuple):
    """Of the steps that a mask chooses.

    samples: [] how many there are.
    mean: of each array of a tree, 0 where there is no step.
    squares: of each, the sum of (x - mean)^2.
    """

    samples: Array
    mean: Tree
    squares: Tree


def sample_moments(tree: Tree, mask: Array, *, exact_for_equal: bool = False) -> SampleMoments:
    """The moments of each array `[T, B, ...]` of a tree over the steps of `mask` `[T, B]`, on all devices.

    The rounded mean of equal numbers is not quite that number. With `exact_for_equal` it is, and their squares are 0:
    the mean of what is left is added, by one more sum. On several devices each mean is exact.

    Each device takes those of its own steps. The sets are put together as

        mean = sum_i n_i mean_i / n,    squares = sum_i squares_i + n_i (mean_i - mean)^2,

    so that one exchange is enough and no large numbers are subtracted (Chan, Golub and LeVeque 1979, equation 2.1).
    """
    samples = mask.sum()

    def total(x: Array) -> Array:
        return jnp.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim)), x, 0).sum((0, 1))

    def squares(x: Array, mean: Array) -> Array:
        return total((x - mean[None, None]) ** 2)

    def mean_of(x: Array) -> Array:
        mean = total(x) / jnp.maximum(samples, 1)
        return mean + total(x - mean[None, None]) / jnp.maximum(samples, 1) if exact_for_equal else mean

    mean = jax.tree.map(mean_of, tree)
    own = SampleMoments(samples, mean, jax.tree.map(squares, tree, mean))
    return own if collectives.num_shards() == 1 else _together(collectives.of_each_device(own))


def _together(parts: SampleMoments) -> SampleMoments:
    """The moments of all devices, from those of each, `[devices, ...]`."""
    samples = parts.samples.sum()

    def weighted(of_each: Array) -> Array:  # a sum and no product: accelerators round the factors of a product
        return (parts.samples.reshape(-1, *(1,) * (of_each.ndim - 1)) * of_each).sum(0)

    def mean(of_each: Array) -> Array:
        return weighted(of_each) / jnp.maximum(samples, 1)

    def squares(of_each: Array, mean_of_each: Array, mean: Array) -> Array:
        return of_each.sum(0) + weighted((mean_of_each - mean[None]) ** 2)

    means = jax.tree.map(mean, parts.mean)
    return SampleMoments(samples, means, jax.tree.map(squares, parts.squares, parts.mean, means))
