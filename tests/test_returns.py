"""Every estimator against hand-computed arrays, against its definition summed forwards, and against its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxpg.errors import UserError
from jaxpg.objectives import returns

GAMMA, LAMBDA = 0.9, 0.7


class Segment(NamedTuple):
    reward: np.ndarray
    discount: np.ndarray
    last: np.ndarray
    v_tm1: np.ndarray
    v_t: np.ndarray


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def segment(seed: int, num_steps: int = 23, num_columns: int = 7) -> Segment:
    """Episodes of random length, half of them ended by time-outs, by a critic that values each state once."""
    rng = np.random.default_rng(seed)
    shape = (num_steps, num_columns)
    last = rng.random(shape) < 0.2
    discount = np.where(last & (rng.random(shape) < 0.5), 0.0, 1.0)
    v_tm1, v_t = rng.normal(size=shape), rng.normal(size=shape)
    v_tm1[1:] = np.where(last[:-1], v_tm1[1:], v_t[:-1])
    return Segment(rng.normal(size=shape), discount, last, v_tm1, v_t)


def discounted_returns(s: Segment, gamma: float = GAMMA) -> jax.Array:
    return returns.discounted_returns(s.reward, s.discount, s.last, s.v_t, gamma)


def n_step_targets(s: Segment, n: int, gamma: float = GAMMA) -> jax.Array:
    return returns.n_step_targets(s.reward, s.discount, s.last, s.v_t, gamma, n)


def lambda_returns(s: Segment, lambda_: float = LAMBDA, gamma: float = GAMMA) -> jax.Array:
    return returns.lambda_returns(s.reward, s.discount, s.last, s.v_t, gamma, lambda_)


def gae(s: Segment, lambda_: float = LAMBDA, gamma: float = GAMMA) -> jax.Array:
    return returns.gae(s.reward, s.discount, s.last, s.v_tm1, s.v_t, gamma, lambda_)


ESTIMATORS: dict[str, Callable[[Segment], jax.Array]] = {
    "discounted_returns": discounted_returns,
    "n_step_targets_1": lambda s: n_step_targets(s, 1),
    "n_step_targets_3": lambda s: n_step_targets(s, 3),
    "lambda_returns": lambda_returns,
    "gae": gae,
}


# --- by hand: a termination after row 1, a time-out after row 3, the end of the segment after row 5

HAND = Segment(
    reward=np.array([1.0, 2, 3, 4, 5, 6]),
    discount=np.array([1.0, 0, 1, 1, 1, 1]),
    last=np.array([False, True, False, True, False, False]),
    v_tm1=np.array([5.0, 10, 7, 20, 8, 40]),
    v_t=np.array([10.0, 1000, 20, 30, 40, 50]),  # 1000 behind the termination must not be seen
)


@pytest.mark.device
@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (lambda s: discounted_returns(s, 0.5), [2, 2, 12.5, 19, 20.5, 31]),
        (lambda s: n_step_targets(s, 1, 0.5), [6, 2, 13, 19, 25, 31]),
        (lambda s: n_step_targets(s, 2, 0.5), [2, 2, 12.5, 19, 20.5, 31]),
        (lambda s: lambda_returns(s, 0.5, 0.5), [4, 2, 12.75, 19, 22.75, 31]),
        (lambda s: gae(s, 0.5, 0.5), [-1, -8, 5.75, -1, 14.75, -9]),
    ],
)
def test_by_hand(estimator: Callable[[Segment], jax.Array], expected: list[float]) -> None:
    column = Segment(*(x[:, None] for x in HAND))
    np.testing.assert_array_equal(estimator(column)[:, 0], expected)


# --- by definition: forward sums, one step at a time


def span(s: Segment, t: int, b: int) -> int:
    """The number of steps from t to the end of the episode or the segment, t included."""
    ends = np.flatnonzero(s.last[t:, b])
    return int(ends[0]) + 1 if ends.size else len(s.last) - t


def n_step_by_sum(s: Segment, t: int, b: int, n: int) -> float:
    total, weight = 0.0, 1.0
    for k in range(t, t + min(n, span(s, t, b))):
        total += weight * s.reward[k, b]
        weight *= GAMMA * s.discount[k, b]
    return total + weight * s.v_t[k, b]


def lambda_by_sum(s: Segment, t: int, b: int) -> float:
    """Every n-step target with its weight (1 - λ)λ^{n-1}, the longest with all that is left."""
    longest = span(s, t, b)
    weights = [(1 - LAMBDA) * LAMBDA ** (n - 1) for n in range(1, longest)] + [LAMBDA ** (longest - 1)]
    return sum(w * n_step_by_sum(s, t, b, n) for n, w in enumerate(weights, start=1))


def gae_by_sum(s: Segment, t: int, b: int) -> float:
    deltas = s.reward + GAMMA * s.discount * s.v_t - s.v_tm1
    return sum((GAMMA * LAMBDA) ** k * deltas[t + k, b] for k in range(span(s, t, b)))


BY_SUM: dict[str, Callable[[Segment, int, int], float]] = {
    "discounted_returns": lambda s, t, b: n_step_by_sum(s, t, b, len(s.reward)),
    "n_step_targets_1": lambda s, t, b: n_step_by_sum(s, t, b, 1),
    "n_step_targets_3": lambda s, t, b: n_step_by_sum(s, t, b, 3),
    "lambda_returns": lambda_by_sum,
    "gae": gae_by_sum,
}


@pytest.mark.device
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ESTIMATORS)
def test_by_definition(name: str, seed: int) -> None:
    s = segment(seed)
    expected = [[BY_SUM[name](s, t, b) for b in range(s.reward.shape[1])] for t in range(s.reward.shape[0])]
    np.testing.assert_allclose(ESTIMATORS[name](s), expected, rtol=0, atol=1e-12)


# --- what must not leak


@pytest.mark.parametrize("name", ESTIMATORS)
def test_nothing_passes_the_end_of_an_episode(name: str) -> None:
    s = segment(seed=4)
    end = 11
    s.last[end] = True
    poisoned = s._replace(**{field: getattr(s, field).copy() for field in ("reward", "v_tm1", "v_t")})
    for field in (poisoned.reward, poisoned.v_tm1, poisoned.v_t):
        field[end + 1 :] = 1000.0
    clean, dirty = ESTIMATORS[name](s), ESTIMATORS[name](poisoned)
    np.testing.assert_array_equal(dirty[: end + 1], clean[: end + 1])
    assert (dirty[end + 1 :] != clean[end + 1 :]).all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_only_a_termination_hides_the_value_behind_it(name: str) -> None:
    s = segment(seed=5)
    time_out = s.last & (s.discount == 1)
    assert time_out.any()
    assert (s.discount == 0).any()
    clean = ESTIMATORS[name](s)
    behind_termination = s._replace(v_t=np.where(s.discount == 0, 1000.0, s.v_t))
    behind_time_out = s._replace(v_t=np.where(time_out, 1000.0, s.v_t))
    np.testing.assert_array_equal(ESTIMATORS[name](behind_termination), clean)
    assert (ESTIMATORS[name](behind_time_out) != clean)[time_out].all()


# --- neighbours


def test_gae_runs_from_td_errors_to_monte_carlo_less_value() -> None:
    s = segment(seed=6)
    np.testing.assert_allclose(gae(s, 0.0), s.reward + GAMMA * s.discount * s.v_t - s.v_tm1, atol=1e-12)
    np.testing.assert_allclose(gae(s, 1.0), discounted_returns(s) - s.v_tm1, atol=1e-12)
    np.testing.assert_allclose(gae(s), lambda_returns(s) - s.v_tm1, atol=1e-12)


def test_long_n_steps_are_returns_and_one_step_is_lambda_zero() -> None:
    s = segment(seed=7)
    for n in (len(s.reward), len(s.reward) + 5):
        np.testing.assert_allclose(n_step_targets(s, n), discounted_returns(s), atol=1e-12)
    np.testing.assert_allclose(n_step_targets(s, 1), lambda_returns(s, 0.0), atol=1e-12)


def test_no_steps_is_refused() -> None:
    with pytest.raises(UserError, match="n is 0"):
        n_step_targets(segment(seed=0), 0)


# --- transformations and types


@pytest.mark.parametrize("name", ESTIMATORS)
def test_gradients(name: str) -> None:
    s = segment(seed=8, num_steps=5, num_columns=2)

    def of_floats(reward: jax.Array, discount: jax.Array, v_tm1: jax.Array, v_t: jax.Array) -> jax.Array:
        return ESTIMATORS[name](Segment(reward, discount, s.last, v_tm1, v_t))

    check_grads(of_floats, (s.reward, s.discount, s.v_tm1, s.v_t), order=1)


@pytest.mark.parametrize(
    "of_gamma", [discounted_returns, lambda s, g: n_step_targets(s, 3, g), lambda s, g: gae(s, g, g)]
)
def test_traced_hyperparameters(of_gamma: Callable[[Segment, float], jax.Array]) -> None:
    s, gammas = segment(seed=9), (0.5, 0.9, 1.0)
    mapped = jax.jit(jax.vmap(lambda g: of_gamma(s, g)))(jnp.array(gammas))
    np.testing.assert_allclose(mapped, [of_gamma(s, g) for g in gammas], atol=1e-12)


@pytest.mark.parametrize(
    ("hyperparameter", "expected"), [(0.9, "float32"), (np.float32(0.9), "float32"), (np.float64(0.9), "float64")]
)
@pytest.mark.parametrize(
    "of_hyperparameter",
    [
        discounted_returns,
        lambda s, x: n_step_targets(s, 3, gamma=x),
        lambda s, x: lambda_returns(s, lambda_=x),
        lambda s, x: gae(s, lambda_=x),
        lambda s, x: gae(s, gamma=x),
    ],
)
def test_float32_data(of_hyperparameter: Callable, hyperparameter: float, expected: str) -> None:
    """Stay float32 as far as the hyperparameters let them."""
    s = jax.tree.map(lambda x: jnp.asarray(x, bool if x.dtype == bool else jnp.float32), segment(seed=10))
    assert jax.eval_shape(of_hyperparameter, s, jnp.asarray(hyperparameter)).dtype == expected
