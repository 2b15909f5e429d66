"""Orders that are bijections, and as random as a shuffle needs them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxpg.update.shuffle import SORT_BELOW, random_permutations, random_permutations_below

POWERS = [2**k + d for k in (8, 9, 10, 11, 12, 13, 16) for d in (-1, 0, 1)]
SIZES = [1, 2, 5, SORT_BELOW - 2, *POWERS, 10_000]


@pytest.mark.device
@pytest.mark.parametrize("n", SIZES)
def test_every_number_once(n):
    orders = np.asarray(random_permutations(jax.random.key(n), 3, n))
    assert orders.dtype == np.int32
    np.testing.assert_array_equal(np.sort(orders), np.broadcast_to(np.arange(n), (3, n)))


@pytest.mark.device
def test_every_number_once_where_their_number_is_traced():
    below = jax.jit(lambda key, n: random_permutations_below(key, 3, n)(jnp.arange(700)))
    for n in [*range(40), 255, 256, 257, 699, 700]:
        orders = np.asarray(below(jax.random.key(n), n))
        assert orders.shape == (3, 700)
        assert orders.max() < max(n, 1)
        np.testing.assert_array_equal(np.sort(orders[:, :n]), np.broadcast_to(np.arange(n), (3, n)))


@pytest.fixture(scope="module", params=[SORT_BELOW - 24, SORT_BELOW, 300, 1100, "272 of 400", "1100 of 1200"])
def orders(request):
    """Many orders of as many numbers: one by sorting, one of a power of two, two that walk cycles; two of a part."""
    if isinstance(request.param, int):
        return np.asarray(random_permutations(jax.random.key(0), 10_000, request.param)), request.param
    n, size = map(int, request.param.split(" of "))
    return np.asarray(random_permutations_below(jax.random.key(0), 10_000, jnp.int32(n))(jnp.arange(size)))[:, :n], n


def uniform(counts):
    return scipy.stats.chisquare(counts.ravel()).pvalue > 1e-4


def test_every_place_gets_every_number_equally_often(orders):
    orders, n = orders
    for place in (0, 1, n // 2, n - 1):
        assert uniform(np.bincount(orders[:, place], minlength=n))


def test_neighbours_are_independent(orders):
    """Pairs of places near and far, the numbers in them coarsened to a grid whose cells have known probabilities."""
    orders, n = orders
    cells = 20
    for first, second in ((0, 1), (0, n // 2), (n // 2, n // 2 + 1), (3, n - 1)):
        coarse = orders[:, [first, second]] * cells // n
        counts = np.histogram2d(*coarse.T, bins=[np.arange(cells + 1)] * 2)[0]
        size = np.bincount(np.arange(n) * cells // n)
        expected = np.outer(size, size) - np.diag(size)  # no number stands in two places
        assert scipy.stats.chisquare(counts.ravel(), (expected * counts.sum() / expected.sum()).ravel()).pvalue > 1e-4


def test_steps_and_fixed_points_are_as_frequent_as_in_random_orders(orders):
    """Fixed points and successors i, i + 1 in a row: one of each per order on average, Poisson distributed."""
    orders, n = orders
    for hits in ((orders == np.arange(n)).sum(1), (np.diff(orders) == 1).sum(1)):
        counts = np.bincount(np.minimum(hits, 6), minlength=7)
        p = scipy.stats.poisson.pmf(np.arange(6), 1.0)
        assert scipy.stats.chisquare(counts, np.append(p, 1 - p.sum()) * len(orders)).pvalue > 1e-4


def test_half_of_a_batch_is_a_fair_half(orders):
    """How many of the first half of the numbers fall into the first half of the order: a hypergeometric number."""
    orders, n = orders
    half = n // 2
    hits = (orders[:, :half] < half).sum(1)
    law = scipy.stats.hypergeom(n, half, half)
    edges = np.unique(law.ppf(np.linspace(0.05, 0.95, 19)))
    counts = np.bincount(np.searchsorted(edges, hits), minlength=len(edges) + 1)
    p = np.diff(np.concatenate([[0.0], law.cdf(edges), [1.0]]))
    assert scipy.stats.chisquare(counts, p * len(orders)).pvalue > 1e-4


@pytest.mark.parametrize("n", [100, 5000])
def test_orders_differ_by_row_and_by_key(n):
    one, other = (np.asarray(random_permutations(jax.random.key(i), 2, n)) for i in range(2))
    np.testing.assert_array_equal(one, random_permutations(jax.random.key(0), 2, n))
    for x, y in ((one[0], one[1]), (one[0], other[0])):
        assert (x == y).sum() < 8
