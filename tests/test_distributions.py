"""Distributions against scipy.stats, their samples against their own distribution functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from scipy import integrate, stats

from jaxpg.models.distributions import Categorical, DiagonalGaussian, SquashedGaussian

KEY = jax.random.key(0)
LOW, HIGH = np.array([-2.0, 0.0, 1.0]), np.array([2.0, 10.0, 1.5])


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=[0, 8], ids=["reductions", "one by one"])
def categories(request: pytest.FixtureRequest, machine_with: Callable[..., None]) -> None:
    """Categories as a CPU takes them, and as an accelerator does, see models/few_categories.py."""
    machine_with(few_categories=request.param)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def categorical(seed: int) -> Categorical:
    return Categorical(normal(seed, 4, 5))


def diagonal(seed: int) -> DiagonalGaussian:
    return DiagonalGaussian(normal(seed, 4, 3), 0.3 * normal(seed + 1, 4, 3) - 0.5)


def squashed(seed: int) -> SquashedGaussian:
    return SquashedGaussian(*diagonal(seed), jnp.asarray(LOW), jnp.asarray(HIGH))


KINDS: dict[str, Callable] = {"categorical": categorical, "diagonal": diagonal, "squashed": squashed}


# --- all of them


@pytest.mark.usefixtures("categories")
@pytest.mark.parametrize("kind", KINDS)
def test_shapes_and_types(kind: str) -> None:
    for dtype in (jnp.float32, jnp.float64):
        p = jax.tree.map(lambda x: x.astype(dtype), KINDS[kind](0))  # noqa: B023
        action, mode, *numbers = jax.eval_shape(
            lambda p: (p.sample(KEY), p.mode(), p.log_prob(p.sample(KEY)), p.log_prob(p.mode()), p.entropy(), p.kl(p)),
            p,
        )
        event, action_type = ((), jnp.int32) if kind == "categorical" else ((3,), dtype)
        assert (action.shape, action.dtype) == (mode.shape, mode.dtype) == ((4, *event), action_type)
        assert all((x.shape, x.dtype) == ((4,), dtype) for x in numbers)


@pytest.mark.usefixtures("categories")
@pytest.mark.parametrize("kind", KINDS)
def test_single_events_equal_a_batch(kind: str) -> None:
    p, q = KINDS[kind](0), KINDS[kind](2)
    action = p.sample(KEY)
    batched = (p.log_prob(action), p.entropy(), p.kl(q), p.mode())
    if kind == "squashed":
        p, q = (d._replace(low=jnp.tile(LOW, (4, 1)), high=jnp.tile(HIGH, (4, 1))) for d in (p, q))
    single = jax.vmap(lambda p, q, a: (p.log_prob(a), p.entropy(), p.kl(q), p.mode()))(p, q, action)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12), single, batched)


@pytest.mark.usefixtures("categories")
@pytest.mark.parametrize("kind", KINDS)
def test_kl_is_the_mean_log_ratio_and_zero_to_itself(kind: str) -> None:
    p, q = KINDS[kind](0), KINDS[kind](2)
    action = jax.vmap(p.sample)(jax.random.split(KEY, 20_000))
    log_ratio = jax.vmap(p.log_prob)(action) - jax.vmap(q.log_prob)(action)
    error = log_ratio.std(0) / np.sqrt(len(log_ratio))
    assert (abs(log_ratio.mean(0) - p.kl(q)) < 4 * error).all()
    assert (p.kl(q) > 20 * error).all()
    np.testing.assert_allclose(p.kl(p), 0, atol=1e-14)


@pytest.mark.usefixtures("categories")
@pytest.mark.parametrize("kind", KINDS)
def test_entropy_is_the_mean_surprise(kind: str) -> None:
    p = KINDS[kind](0)
    surprise = -jax.vmap(p.log_prob)(jax.vmap(p.sample)(jax.random.split(KEY, 20_000)))
    assert (abs(surprise.mean(0) - p.entropy()) < 4 * surprise.std(0) / np.sqrt(len(surprise))).all()


@pytest.mark.usefixtures("categories")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str) -> None:
    p, q = KINDS[kind](0), KINDS[kind](2)
    action = p.sample(KEY)
    parameters = 1 if kind == "categorical" else 2  # the bounds are fixed

    def of_parameters(*changed: jax.Array) -> tuple[jax.Array, ...]:
        d = type(p)(*changed, *p[parameters:])
        return d.log_prob(action), d.entropy(), d.kl(q)

    check_grads(of_parameters, tuple(p[:parameters]), order=1, modes=["rev"])


# --- categorical


@pytest.mark.usefixtures("categories")
def test_categorical_against_scipy() -> None:
    p, q = categorical(0), categorical(1)
    p_probs, q_probs = (np.asarray(jax.nn.softmax(d.logits)) for d in (p, q))
    for a in range(5):
        np.testing.assert_allclose(p.log_prob(jnp.full(4, a)), np.log(p_probs[:, a]), atol=1e-12)
    np.testing.assert_allclose(p.entropy(), stats.entropy(p_probs, axis=1), atol=1e-12)
    np.testing.assert_allclose(p.kl(q), stats.entropy(p_probs, q_probs, axis=1), atol=1e-12)
    np.testing.assert_array_equal(p.mode(), p_probs.argmax(1))


@pytest.mark.device
@pytest.mark.usefixtures("categories")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_categorical_frequencies(dtype: type) -> None:
    logits = jnp.array([-jnp.inf, 1.0, -2.0, -jnp.inf, 0.5, 3.0, -jnp.inf], dtype)
    num_samples = 100_000
    action = Categorical(jnp.broadcast_to(logits, (num_samples, 7))).sample(KEY)
    counts = np.bincount(action, minlength=7)
    probs = np.asarray(jax.nn.softmax(logits), np.float64)
    possible = probs > 0
    assert counts[~possible].sum() == 0
    assert stats.chisquare(counts[possible], num_samples * probs[possible] / probs.sum()).pvalue > 1e-3


@pytest.mark.usefixtures("categories")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("probs", [[0.989, 0.001, 0.01], [1 / 300] * 300])
def test_logits_in_half_precision_are_sampled_as_log_prob_says(probs: list[float], dtype: type) -> None:
    p = Categorical(jnp.log(jnp.array(probs, jnp.float32)).astype(dtype))
    assert p.noise(KEY).dtype == jnp.float32
    u = jnp.linspace(0, 1, 30_000, endpoint=False, dtype=jnp.float32)
    action = Categorical(jnp.broadcast_to(p.logits, (len(u), len(probs)))).at(u)
    frequencies = np.bincount(action, minlength=len(probs)) / len(u)
    wanted = jax.nn.softmax(p.logits.astype(jnp.float32))
    np.testing.assert_allclose(frequencies, wanted, atol=1e-4)


def test_a_mask_in_half_precision_may_forbid_everything() -> None:
    p = Categorical(jnp.array([1.0, 2.0, 3.0], jnp.float16)).masked(jnp.zeros(3, bool))
    np.testing.assert_allclose(jax.vmap(p.log_prob)(jnp.arange(3)), np.full(3, -np.log(3)), atol=1e-3)


@pytest.mark.usefixtures("categories")
def test_samples_of_a_batch_are_independent() -> None:
    action = np.asarray(Categorical(jnp.zeros((50_000, 2, 2))).sample(KEY))
    table = np.histogram2d(*action.T, bins=2)[0]
    assert stats.chisquare(table.ravel()).pvalue > 1e-3


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-23])
def test_the_ends_of_the_uniform_find_a_possible_category(u: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape, dtype: jnp.full(shape, u, dtype))
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(200, 999)).astype(np.float32)
    logits[:, rng.random(999) < 0.5] = -np.inf
    logits[:, [0, -1]] = -np.inf
    possible = np.flatnonzero(np.isfinite(logits[0]))
    action = Categorical(jnp.asarray(logits)).sample(KEY)
    assert np.isin(action, possible).all()
    assert (action == possible[0]).all() if u == 0 else (action > possible[-20]).all()


@pytest.mark.usefixtures("categories")
@pytest.mark.parametrize(("u", "category"), [(0.0, 1), (0.24, 1), (0.26, 3), (1 - 2.0**-23, 3)])
def test_samples_by_hand(u: float, category: int) -> None:
    """Probabilities 0, 1/4, 0, 3/4 and 0; the last is not the answer to any number."""
    logits = jnp.log(jnp.array([0.0, 0.25, 0.0, 0.75, 0.0], jnp.float32))
    assert Categorical(logits).at(jnp.float32(u)) == category


def test_a_rise_of_the_rounded_sum_finds_no_impossible_category(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parallel sum can rise by rounding at a category of probability 0; put the threshold right there."""
    rng = np.random.default_rng(0)
    logits = np.where(rng.random((200, 999)) < 0.5, rng.normal(size=(200, 999)), -np.inf).astype(np.float32)
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    cumulative = np.asarray(jnp.cumsum(jnp.asarray(weight), -1))
    row, before = np.nonzero((np.diff(cumulative) > 0) & (weight[:, 1:] == 0))
    top = np.where(weight > 0, cumulative, 0).max(-1)[row]
    u = np.minimum(cumulative[row, before] / top, np.float32(1 - 2.0**-23))
    hit = (cumulative[row, before] <= u * top) & (u * top < cumulative[row, before + 1])
    assert hit.sum() > 50
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape, dtype: jnp.asarray(u[hit], dtype).reshape(shape))
    action = Categorical(jnp.asarray(logits[row[hit]])).sample(KEY)
    assert np.isfinite(logits[row[hit], action]).all()


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 3}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_k": 9}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 1e-6}, [0, 1, 0, 0]),
        ({"top_p": 0.39}, [0, 1, 0, 0]),
        ({"top_p": 0.41}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.69}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.71}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_k": 3, "top_p": 0.75}, [0, 4 / 7, 0, 3 / 7]),  # of the three, two have a mass of 7/9
        ({"top_k": 3, "top_p": 0.79}, [0, 4 / 9, 2 / 9, 3 / 9]),
    ],
)
def test_truncated_by_hand(settings: dict, kept: list[float]) -> None:
    logits = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.3]))
    p = jax.jit(lambda x: Categorical(x).truncated(**settings))(jnp.stack([logits, logits[::-1] + 3.0]))
    np.testing.assert_allclose(jax.nn.softmax(p.logits), [kept, kept[::-1]], rtol=1e-12)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 1}, [0.5, 0.5, 0, 0]),
        ({"top_k": 2}, [0.5, 0.5, 0, 0]),
        ({"top_k": 3}, [0.375, 0.375, 0.125, 0.125]),
        ({"top_p": 0.1}, [0.5, 0.5, 0, 0]),
        ({"top_p": 0.8}, [0.375, 0.375, 0.125, 0.125]),
    ],
)
def test_ties_at_the_threshold_are_all_kept(settings: dict, kept: list[float]) -> None:
    p = Categorical(jnp.log(jnp.array([0.375, 0.375, 0.125, 0.125]))).truncated(**settings)
    np.testing.assert_allclose(jax.nn.softmax(p.logits), kept, rtol=1e-12)


@pytest.mark.usefixtures("categories")
def test_impossible_categories_are_harmless() -> None:
    forbidding = jnp.array([0.0, -jnp.inf, 1.0])
    p, q = Categorical(forbidding), Categorical(jnp.array([0.5, 0.0, 0.0]))
    assert p.log_prob(jnp.array(1)) == -jnp.inf
    probs = np.asarray(jax.nn.softmax(forbidding))[[0, 2]]
    np.testing.assert_allclose(p.entropy(), stats.entropy(probs), rtol=1e-12)
    assert q.kl(p) == jnp.inf
    for f in (
        lambda x: Categorical(x).entropy(),
        lambda x: Categorical(x).kl(q),
        lambda x: Categorical(x).kl(p),
        lambda x: Categorical(x).log_prob(jnp.array(2)),
    ):
        assert jnp.isfinite(f(forbidding))
        assert jnp.isfinite(jax.grad(f)(forbidding)).all()


# --- Gaussians


def test_diagonal_against_scipy() -> None:
    p = diagonal(0)
    action, std = normal(9, 4, 3), np.exp(p.log_std)
    np.testing.assert_allclose(p.log_prob(action), stats.norm.logpdf(action, p.mean, std).sum(1), atol=1e-12)
    np.testing.assert_allclose(p.entropy(), stats.norm.entropy(p.mean, std).sum(1), atol=1e-12)
    np.testing.assert_array_equal(p.mode(), p.mean)


def test_diagonal_kl_by_integration() -> None:
    p, q = DiagonalGaussian(jnp.array([0.3]), jnp.array([-0.5])), DiagonalGaussian(jnp.array([-1.0]), jnp.array([0.2]))

    def integrand(x: float) -> float:
        a, b = stats.norm(0.3, np.exp(-0.5)), stats.norm(-1.0, np.exp(0.2))
        return a.pdf(x) * (a.logpdf(x) - b.logpdf(x))

    np.testing.assert_allclose(p.kl(q), integrate.quad(integrand, -8, 8)[0], rtol=1e-8)


def test_kl_keeps_its_digits_between_close_gaussians() -> None:
    p = DiagonalGaussian(jnp.zeros(1, jnp.float32), jnp.zeros(1, jnp.float32))
    step = 3e-4
    np.testing.assert_allclose(p.kl(p._replace(log_std=jnp.full(1, step, jnp.float32))), step**2, rtol=1e-3)


@pytest.mark.parametrize("kind", ["diagonal", "squashed"])
def test_one_log_std_for_all_states(kind: str) -> None:
    p = KINDS[kind](0)
    shared = p._replace(log_std=p.log_std[0])
    spread = p._replace(log_std=jnp.tile(p.log_std[0], (4, 1)))
    action = spread.sample(KEY)
    np.testing.assert_array_equal(shared.sample(KEY), action)
    np.testing.assert_array_equal(shared.log_prob(action), spread.log_prob(action))
    np.testing.assert_array_equal(shared.entropy(), spread.entropy())
    np.testing.assert_array_equal(shared.kl(p), spread.kl(p))


@pytest.mark.device
def test_gaussian_samples() -> None:
    mean, log_std = jnp.array([0.5, -3.0]), jnp.array([-1.0, 0.7])
    action = DiagonalGaussian(jnp.tile(mean, (5000, 1)), log_std).sample(KEY)
    for i in range(2):
        assert stats.kstest(action[:, i], stats.norm(mean[i], np.exp(log_std[i])).cdf).pvalue > 1e-3
    assert abs(stats.pearsonr(*action.T).statistic) < 0.06


# --- squashed


def unsquash(action: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.arctanh(2 * (action - low) / (high - low) - 1)


@pytest.mark.device
def test_squashed_samples() -> None:
    mean, log_std = jnp.array([0.5, -1.0, 0.0]), jnp.array([-1.0, 0.3, 0.0])
    action = SquashedGaussian(jnp.tile(mean, (5000, 1)), log_std, jnp.asarray(LOW), jnp.asarray(HIGH)).sample(KEY)
    for i in range(3):
        u = unsquash(np.asarray(action[:, i]), LOW[i], HIGH[i])
        assert stats.kstest(u, stats.norm(mean[i], np.exp(log_std[i])).cdf).pvalue > 1e-3


def test_squashed_log_prob_by_change_of_variables() -> None:
    p = squashed(0)
    action = np.asarray(p.sample(KEY))
    u = unsquash(action, LOW, HIGH)
    slope = (1 - np.tanh(u) ** 2) * (HIGH - LOW) / 2
    expected = (stats.norm.logpdf(u, p.mean, np.exp(p.log_std)) - np.log(slope)).sum(1)
    np.testing.assert_allclose(p.log_prob(jnp.asarray(action)), expected, atol=1e-10)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-3.0, 0.5)])
@pytest.mark.parametrize(("mean", "log_std"), [(0.0, -1.0), (0.8, -0.3), (-1.5, 0.0)])
def test_squashed_density_integrates_to_one(mean: float, log_std: float, low: float, high: float) -> None:
    width = high - low
    action = low + width * (jnp.arange(200_000) + 0.5) / 200_000
    parameters = (jnp.full((200_000, 1), x) for x in (mean, log_std))
    density = jnp.exp(SquashedGaussian(*parameters, jnp.array([low]), jnp.array([high])).log_prob(action[:, None]))
    np.testing.assert_allclose(density.mean() * width, 1, atol=1e-6)


@pytest.mark.device
@pytest.mark.usefixtures("categories")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("mean", [-30.0, 0.0, 30.0])
def test_squashed_at_and_near_the_bounds(mean: float, dtype: type) -> None:
    low, high = jnp.asarray(LOW, dtype), jnp.asarray(HIGH, dtype)
    p = SquashedGaussian(jnp.full(3, mean, dtype), jnp.zeros(3, dtype), low, high)
    sample = p.sample(KEY)
    assert ((low <= sample) & (sample <= high)).all()
    for action in (low, high, jnp.nextafter(low, high), jnp.nextafter(high, low), sample, p.mode()):
        log_prob, slope = jax.value_and_grad(lambda p: p.log_prob(action))(p)  # noqa: B023
        assert jnp.isfinite(log_prob)
        assert all(jnp.isfinite(x).all() for x in slope[:2])


@pytest.mark.parametrize(("log_std", "tolerance"), [(-1.0, 1e-5), (0.0, 1e-5), (np.log(2), 1e-4), (np.log(4), 1e-2)])
@pytest.mark.parametrize("mean", [0.0, 0.7, -2.0])
def test_squashed_entropy_by_integration(mean: float, log_std: float, tolerance: float) -> None:
    low, high = -3.0, 0.5

    def log_slope(u: float) -> float:
        return np.log((high - low) / 2) + 2 * (np.log(2) - u - np.logaddexp(0, -2 * u))

    def exact(mean: float) -> float:
        u = stats.norm(mean, np.exp(log_std))
        limits = mean - 10 * u.std(), mean + 10 * u.std()
        return u.entropy() + integrate.quad(lambda x: u.pdf(x) * log_slope(x), *limits, limit=200)[0]

    def entropy(mean: float) -> jax.Array:
        return SquashedGaussian(jnp.array([mean]), jnp.array([log_std]), jnp.array([low]), jnp.array([high])).entropy()[
            ...
        ]

    np.testing.assert_allclose(entropy(mean), exact(mean), atol=tolerance)


def test_squashed_mode_is_the_median() -> None:
    p = squashed(0)
    np.testing.assert_allclose(unsquash(np.asarray(p.mode()), LOW, HIGH), p.mean, atol=1e-10)


def test_rounding_leaves_no_sample_outside_the_bounds() -> None:
    rng = np.random.default_rng(0)
    low, high = -100 * rng.random(1000, np.float32), rng.random(1000, np.float32)
    assert (low + (high - low) > high).any()
    far_out = jnp.full(1000, 30.0, jnp.float32)
    sample = SquashedGaussian(far_out, jnp.zeros_like(far_out), jnp.asarray(low), jnp.asarray(high)).sample(KEY)
    assert (sample == high).any()
    assert (sample <= high).all()


@pytest.mark.usefixtures("categories")
@pytest.mark.parametrize("allowed", [[True, False, True, True, False], [False, False, False, True, False]])
def test_a_mask_leaves_the_distribution_over_what_is_allowed(allowed: list[bool]) -> None:
    """And no derivative reaches what is not, by whichever way."""
    logits, other, chosen = normal(0, 5), normal(1, 5), np.flatnonzero(allowed)
    mask = jnp.array(allowed)
    few, p, q = Categorical(logits[chosen]), Categorical(logits).masked(mask), Categorical(other).masked(mask)
    for number, category in enumerate(chosen):
        np.testing.assert_allclose(p.log_prob(jnp.int32(category)), few.log_prob(jnp.int32(number)), rtol=1e-12)
    np.testing.assert_allclose(p.entropy(), few.entropy(), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(p.kl(q), few.kl(Categorical(other[chosen])), rtol=1e-12, atol=1e-15)
    assert set(np.unique(jax.vmap(p.sample)(jax.random.split(KEY, 1000)))) == set(chosen)
    assert int(p.mode()) in chosen

    def everything(logits: jax.Array) -> jax.Array:
        p = Categorical(logits).masked(mask)
        log_prob, entropy = p.log_prob_and_entropy(jnp.int32(chosen[0]))
        return log_prob + 2 * entropy + 3 * p.kl(q) + 5 * q.kl(p)

    def everything_of_few(logits: jax.Array) -> jax.Array:
        p, q = Categorical(logits), Categorical(other[chosen])
        return p.log_prob(jnp.int32(0)) + 2 * p.entropy() + 3 * p.kl(q) + 5 * q.kl(p)

    gradient = np.zeros(5)
    gradient[chosen] = jax.grad(everything_of_few)(logits[chosen])
    np.testing.assert_allclose(jax.grad(everything)(logits), gradient, atol=1e-12)


@pytest.mark.usefixtures("categories")
def test_where_nothing_is_allowed_all_is() -> None:
    p = Categorical(normal(0, 5).astype(jnp.float32)).masked(jnp.zeros(5, bool))
    np.testing.assert_allclose(p.entropy(), np.log(5), rtol=1e-6)
    assert np.isfinite(jax.grad(lambda x: Categorical(x).masked(jnp.zeros(5, bool)).entropy())(p.logits)).all()


def test_truncation_that_truncates_nothing_keeps_every_category() -> None:
    """Sums of probabilities round to 1 before the last category, whose probability is below the rounding."""
    logits = jnp.array([0.0, -18.0, -19.0, -20.0], jnp.float32)
    np.testing.assert_array_equal(Categorical(logits).truncated().logits, logits)
    assert np.isneginf(Categorical(logits).truncated(top_p=0.9).logits[1:]).all()
