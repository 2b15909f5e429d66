"""Weights by hand, what they sum to, and that devices share one denominator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxpg.objectives import loss_weights
from jaxpg.parallel import collectives

LENGTH = 5  # the configured maximum; the batches below are padded to 4 or to 9

LOSS_WEIGHTS: dict[str, Callable[..., jax.Array]] = {
    "per_step": loss_weights.per_step,
    "per_episode": loss_weights.per_episode,
    "per_episode_over": partial(loss_weights.per_episode_over, length=LENGTH),
}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def mask_of(lengths: tuple[int, ...], width: int) -> np.ndarray:
    return (np.arange(width)[:, None] < np.array(lengths)[None, :]).astype(float)


@pytest.mark.parametrize(
    ("name", "weight_by_column"),
    [
        ("per_step", [1 / 7, 1 / 7, 0, 1 / 7]),
        ("per_episode", [1 / 12, 1 / 6, 0, 1 / 3]),
        ("per_episode_over", [1 / 15, 1 / 15, 0, 1 / 15]),
    ],
)
@pytest.mark.parametrize("width", [4, 9])
@pytest.mark.parametrize("dtype", [bool, np.float64])
def test_by_hand(name: str, weight_by_column: list[float], width: int, dtype: type) -> None:
    mask = mask_of((4, 2, 0, 1), width)
    weights = jax.jit(LOSS_WEIGHTS[name])(jnp.asarray(mask, dtype))
    np.testing.assert_allclose(weights, mask * np.array([weight_by_column]), rtol=1e-12)


@pytest.mark.parametrize("name", LOSS_WEIGHTS)
def test_no_real_step_weighs_nothing(name: str) -> None:
    np.testing.assert_array_equal(LOSS_WEIGHTS[name](jnp.zeros((4, 3))), np.zeros((4, 3)))


@pytest.mark.parametrize("name", LOSS_WEIGHTS)
def test_float32_stays(name: str) -> None:
    assert LOSS_WEIGHTS[name](jnp.ones((4, 3), jnp.float32)).dtype == jnp.float32


def test_a_mean_over_episodes_of_means_over_their_steps() -> None:
    lengths = (3, 1, 7, 5)
    loss = np.random.default_rng(0).normal(size=(9, 4))
    weights = loss_weights.per_episode(mask_of(lengths, 9))
    expected = np.mean([loss[:n, b].mean() for b, n in enumerate(lengths)])
    np.testing.assert_allclose((weights * loss).sum(), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "divisor"),
    [
        ("per_step", lambda n: 10),
        ("per_episode", lambda n: 3 * n),
        ("per_episode_over", lambda n: 3 * LENGTH),
    ],
)
def test_the_gradient_of_a_weighted_loss_is_that_of_a_slow_loop(name: str, divisor: Callable[[int], int]) -> None:
    """Of half the squares: what stands there, divided. Padding has none."""
    lengths, width = (3, 0, 5, 2), 6
    x, mask = np.random.default_rng(1).normal(size=(width, 4)), mask_of(lengths, width)
    got = jax.jit(jax.grad(lambda x: (LOSS_WEIGHTS[name](mask) * x**2 / 2).sum()))(x)
    expected = np.zeros((width, 4))
    for b, n in enumerate(lengths):
        for t in range(n):
            expected[t, b] = x[t, b] / divisor(n)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_equal_lengths_make_all_weights_one() -> None:
    mask = mask_of((LENGTH,) * 4, 9)
    for weigh in LOSS_WEIGHTS.values():
        np.testing.assert_allclose(weigh(mask), loss_weights.per_step(mask), rtol=1e-12)


def test_length_may_be_mapped_over() -> None:
    mask = mask_of((4, 2, 0, 1), 4)
    mapped = jax.vmap(partial(loss_weights.per_episode_over, mask))(jnp.array([5.0, 8.0]))
    np.testing.assert_allclose(mapped[0] / mapped[1], np.where(mask, 8 / 5, np.nan), rtol=1e-12)


@pytest.mark.parametrize("name", LOSS_WEIGHTS)
def test_four_devices_give_what_one_gives(name: str) -> None:
    mask = mask_of((3, 0, 5, 5, 1, 2, 0, 0), 9)  # the last device has no step at all
    columns = PartitionSpec(None, collectives.DATA)
    mesh = Mesh(np.array(jax.devices()[:4]), (collectives.DATA,))
    sharded = jax.shard_map(LOSS_WEIGHTS[name], mesh=mesh, in_specs=columns, out_specs=columns, check_vma=False)
    np.testing.assert_allclose(jax.jit(sharded)(mask), LOSS_WEIGHTS[name](mask), rtol=1e-12)
