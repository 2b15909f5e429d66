"""Every credit against a slow loop over episodes, on continuing and on padded batches, the padding poisoned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from numpy.typing import NDArray

from jaxpg.errors import UserError
from jaxpg.objectives import advantages, metrics
from jaxpg.objectives.advantages import Credit
from jaxpg.parallel import collectives
from jaxpg.types import Transition

GAMMA = 0.9
GROUP = 4
BASELINE = 0.25

Batch = tuple[Transition, NDArray, NDArray]  # steps, v_tm1, v_t
Reference = tuple[NDArray, NDArray]  # advantage, target


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def batch(seed: int, *, episodic: bool, padding: float = 0.0) -> Batch:
    """19 steps of 8 columns: segments of several episodes, or one padded episode per column of unequal lengths."""
    rng = np.random.default_rng(seed)
    shape = (19, 8)
    reward, v_tm1, v_t = rng.normal(size=(3, *shape))
    last = rng.random(shape) < 0.2
    mask = np.ones(shape)
    if episodic:
        last[-1] = True
        mask[1:] = np.cumsum(last, 0)[:-1] == 0
    discount = np.where(last & (rng.random(shape) < 0.5), 0.0, 1.0)
    real = mask == 1
    reward, v_tm1, v_t, discount = (np.where(real, x, padding) for x in (reward, v_tm1, v_t, discount))
    step_end = np.where(real, rng.random(shape) < 0.3, padding)
    return Transition((), (), np.zeros(shape), reward, discount, last, mask, step_end), v_tm1, v_t


def episodes(steps: Transition) -> Iterator[tuple[int, int, int]]:
    """(first step, one behind the last step, column) of every episode or piece of one."""
    for b in range(steps.mask.shape[1]):
        start = 0
        for t in range(int(steps.mask[:, b].sum())):
            if steps.last[t, b] or t == steps.mask.shape[0] - 1:
                yield start, t + 1, b
                start = t + 1


def n_step_loop(steps: Transition, v_t: NDArray, n: int) -> NDArray:
    target = np.zeros_like(v_t)
    for start, stop, b in episodes(steps):
        for t in range(start, stop):
            weight, until = 1.0, min(t + n, stop)
            for k in range(t, until):
                target[t, b] += weight * steps.reward[k, b]
                weight *= GAMMA * steps.discount[k, b]
            target[t, b] += weight * v_t[until - 1, b]
    return target


def returns_loop(steps: Transition, v_t: NDArray) -> NDArray:
    return n_step_loop(steps, v_t, n=len(v_t))


def total_return_loop(steps: Transition, v_tm1: NDArray, v_t: NDArray) -> Reference:
    g = returns_loop(steps, v_t)
    whole = np.zeros_like(g)
    for start, stop, b in episodes(steps):
        whole[start:stop, b] = g[start, b]
    return whole, g


def minus_batch_mean_loop(steps: Transition, v_tm1: NDArray, v_t: NDArray) -> Reference:
    g = returns_loop(steps, v_t)
    return g - g[steps.mask == 1].mean(), g


def generalized_loop(steps: Transition, v_tm1: NDArray, v_t: NDArray) -> Reference:
    delta = steps.reward + GAMMA * steps.discount * v_t - v_tm1
    advantage = np.zeros_like(delta)
    for start, stop, b in episodes(steps):
        for t in range(start, stop):
            advantage[t, b] = sum((GAMMA * 0.7) ** (k - t) * delta[k, b] for k in range(t, stop))
    return advantage, advantage + v_tm1


def by_group(steps: Transition, v_t: NDArray, one: Callable[[float, NDArray, NDArray], float]) -> Reference:
    """`one(r, group, others)` for every episode, over its steps."""
    g = returns_loop(steps, v_t)
    advantage = np.zeros_like(g)
    for b, r in enumerate(g[0]):
        first = b - b % GROUP
        others = [i for i in range(first, first + GROUP) if i != b]
        advantage[:, b] = one(r, g[0, first : first + GROUP], g[0, others])
    return advantage, g


def process_loop(steps: Transition, v_t: NDArray, *, ddof: int, eps: float) -> Reference:
    """Shao et al. 2024, section 4.1.3: for every group, the rewards of all steps; for every token, those from it on."""
    advantage = np.zeros_like(steps.reward)
    ragged = set()
    for first in range(0, steps.reward.shape[1], GROUP):
        found = []  # (index of the last token, column, reward)
        for start, stop, b in episodes(steps):
            if first <= b < first + GROUP and start == 0:
                total = 0.0
                for t in range(stop):
                    total += steps.reward[t, b]
                    if steps.step_end[t, b] or t == stop - 1:
                        found.append((t, b, total))
                        total = 0.0
        rewards = np.array([r for *_, r in found])
        ragged.add(len(found))
        for end, b, r in found:
            z = (r - rewards.mean()) / (rewards.std(ddof=ddof) + eps)
            for t in range(end + 1):
                advantage[t, b] += GAMMA ** (end - t) * z
    assert len(ragged) > 1
    return advantage, returns_loop(steps, v_t)


CREDITS: dict[str, tuple[Callable[..., Credit], Callable[..., Reference]]] = {
    "total_return": (advantages.total_return, total_return_loop),
    "reward_to_go": (advantages.reward_to_go, lambda s, v, w: (returns_loop(s, w),) * 2),
    "minus_batch_mean": (advantages.mean_baseline, minus_batch_mean_loop),
    "minus_running_mean": (
        partial(advantages.mean_baseline, baseline_kind="running"),
        lambda s, v, w: (returns_loop(s, w) - BASELINE, returns_loop(s, w)),
    ),
    "critic_baseline": (advantages.critic_baseline, lambda s, v, w: (returns_loop(s, w) - v, returns_loop(s, w))),
    "n_step": (
        partial(advantages.n_step, n=3),
        lambda s, v, w: (n_step_loop(s, w, 3) - v, n_step_loop(s, w, 3)),
    ),
    "generalized": (partial(advantages.generalized_advantage, lambda_=0.7), generalized_loop),
}
GROUP_CREDITS: dict[str, tuple[Callable[..., Credit], Callable[..., Reference]]] = {
    "group_relative": (
        partial(advantages.group_relative, group_size=GROUP),
        lambda s, v, w: by_group(s, w, lambda r, group, _: (r - group.mean()) / (group.std(ddof=1) + 1e-4)),
    ),
    "group_relative_population": (
        partial(advantages.group_relative, group_size=GROUP, ddof=0, eps=0.1),
        lambda s, v, w: by_group(s, w, lambda r, group, _: (r - group.mean()) / (group.std() + 0.1)),
    ),
    "group_relative_without_std": (
        partial(advantages.group_relative, group_size=GROUP, divide_by_std=False),
        lambda s, v, w: by_group(s, w, lambda r, group, _: r - group.mean()),
    ),
    "process_relative": (
        partial(advantages.process_relative, group_size=GROUP),
        lambda s, v, w: process_loop(s, w, ddof=1, eps=1e-4),
    ),
    "process_relative_population": (
        partial(advantages.process_relative, group_size=GROUP, ddof=0, eps=0.1),
        lambda s, v, w: process_loop(s, w, ddof=0, eps=0.1),
    ),
    "leave_one_out": (
        partial(advantages.leave_one_out, group_size=GROUP),
        lambda s, v, w: by_group(s, w, lambda r, _, others: r - others.mean()),
    ),
}
ALL = CREDITS | GROUP_CREDITS
CASES = [(name, episodic) for name in ALL for episodic in (False, True) if episodic or name in CREDITS]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("name", "episodic"), CASES)
def test_by_definition(name: str, episodic: bool, seed: int) -> None:
    credit, loop = ALL[name]
    steps, v_tm1, v_t = batch(seed, episodic=episodic)
    got = jax.jit(credit)(steps, v_tm1, v_t, jnp.array(BASELINE), gamma=GAMMA)
    advantage, target = loop(steps, v_tm1, v_t)
    np.testing.assert_allclose(got.advantage, advantage * steps.mask, rtol=0, atol=1e-10)
    np.testing.assert_allclose(got.target, target * steps.mask, rtol=0, atol=1e-10)
    if name != "minus_running_mean":
        assert got.baseline == BASELINE


@pytest.mark.parametrize("name", ALL)
def test_padding_reaches_nothing(name: str) -> None:
    credit, _ = ALL[name]
    clean, dirty = (
        jax.jit(credit)(*batch(3, episodic=True, padding=padding), jnp.array(BASELINE), gamma=GAMMA)
        for padding in (0.0, 1000.0)
    )
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


@pytest.mark.parametrize("name", ALL)
def test_gamma_may_be_mapped_over(name: str) -> None:
    credit, _ = ALL[name]
    args = (*batch(4, episodic=True), jnp.array(BASELINE))
    gammas = (0.5, 1.0)
    mapped = jax.jit(jax.vmap(lambda gamma: credit(*args, gamma=gamma)))(jnp.array(gammas))
    for i, gamma in enumerate(gammas):
        expected = jax.jit(credit)(*args, gamma=gamma)
        np.testing.assert_allclose(mapped.advantage[i], expected.advantage, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_float32_stays(name: str) -> None:
    credit, _ = ALL[name]
    as_float32 = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, batch(5, episodic=True))
    got = jax.eval_shape(partial(credit, gamma=GAMMA), *as_float32, jnp.float32(BASELINE))
    assert {x.dtype for x in got} == {jnp.dtype("float32")}


# --- baselines


def test_the_running_average_is_of_the_batches_before() -> None:
    rate, baseline = 0.2, jnp.array(0.0)
    expected = 0.0
    for seed in range(3):
        steps, v_tm1, v_t = batch(seed, episodic=True)
        g = returns_loop(steps, v_t)
        credit = advantages.mean_baseline(steps, v_tm1, v_t, baseline, gamma=GAMMA, baseline_kind="running", rate=rate)
        np.testing.assert_allclose(credit.advantage, (g - expected) * steps.mask, atol=1e-10)
        mean = g[steps.mask == 1].mean()
        expected = mean if seed == 0 else (1 - rate) * expected + rate * mean
        baseline = credit.baseline
        np.testing.assert_allclose(baseline, expected, atol=1e-10)


def test_an_unknown_average_is_refused() -> None:
    with pytest.raises(UserError, match="'median'"):
        advantages.mean_baseline(*batch(0, episodic=True), jnp.array(0.0), gamma=1.0, baseline_kind="median")  # type: ignore


# --- groups


def one_step_episodes(returns: NDArray) -> Transition:
    reward = returns[None]
    ends = np.ones_like(reward, bool)
    return Transition((), (), reward, reward, np.zeros_like(reward), ends, np.ones_like(reward))


@pytest.mark.parametrize("divide_by_std", [True, False])
@pytest.mark.parametrize("group_size", [3, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_group_without_variance_is_exactly_zero(dtype: type, group_size: int, divide_by_std: bool) -> None:
    levels = np.random.default_rng(0).normal(size=50).astype(dtype)
    r = np.repeat(levels, group_size)
    means = r.reshape(-1, group_size).mean(1)
    assert (means != levels).any()  # these are values that rounding would betray
    steps, zeros = one_step_episodes(r), np.zeros((1, r.size), dtype)
    args = (steps, zeros, zeros, jnp.zeros((), dtype))
    relative = advantages.group_relative(*args, gamma=1.0, group_size=group_size, divide_by_std=divide_by_std, eps=1e-8)
    others = advantages.leave_one_out(*args, gamma=1.0, group_size=group_size)
    process = advantages.process_relative(*args, gamma=1.0, group_size=group_size, eps=1e-8)
    assert (relative.advantage == 0).all()
    assert (process.advantage == 0).all()
    assert (others.advantage == 0).all()


def test_groups_by_hand() -> None:
    steps = one_step_episodes(np.array([1.0, 3.0, 5.0, 0.0, 0.0, 6.0]))
    zeros = np.zeros((1, 6))
    args = (steps, zeros, zeros, jnp.zeros(()))
    relative = advantages.group_relative(*args, gamma=1.0, group_size=3, eps=0.0)
    np.testing.assert_allclose(relative.advantage[0, :3], [-1, 0, 1], atol=1e-12)
    np.testing.assert_allclose(relative.advantage[0, 3:], np.array([-1, -1, 2]) / np.sqrt(3), atol=1e-12)
    others = advantages.leave_one_out(*args, gamma=1.0, group_size=3)
    np.testing.assert_allclose(others.advantage, [[-3, 0, 3, -3, -3, 6]], atol=1e-12)


def test_one_group_of_a_whole_batch_is_the_batch_average() -> None:
    steps = one_step_episodes(np.random.default_rng(1).normal(size=8))
    zeros = np.zeros((1, 8))
    args = (steps, zeros, zeros, jnp.zeros(()))
    group = advantages.group_relative(*args, gamma=GAMMA, group_size=8, divide_by_std=False)
    np.testing.assert_allclose(group.advantage, advantages.mean_baseline(*args, gamma=GAMMA).advantage, atol=1e-12)


def test_one_step_per_episode_is_outcome_supervision() -> None:
    """Whether or not the steps say so: an episode that marks none is one step."""
    steps, v_tm1, v_t = batch(9, episodic=True, padding=1000.0)
    outcome = advantages.group_relative(steps, v_tm1, 0 * v_t, jnp.zeros(()), gamma=1.0, group_size=GROUP)
    assert np.abs(outcome.advantage).max() > 0.5
    for step_end in ((), steps.last * steps.mask):
        marked = steps._replace(step_end=step_end)
        process = advantages.process_relative(marked, v_tm1, 0 * v_t, jnp.zeros(()), gamma=1.0, group_size=GROUP)
        np.testing.assert_allclose(process.advantage, outcome.advantage, atol=1e-10)


def test_process_supervision_by_hand() -> None:
    """Two completions of 5 and 3 tokens: steps of 1, 2 and 2 tokens with rewards 1, 1, 0; of 2 and 1 with 1 and 0."""
    reward = np.array([[1.0, 0, 1, 0, 0], [0, 1, 0, 0, 0]]).T
    step_end = np.array([[1.0, 0, 1, 0, 1], [0, 1, 1, 0, 0]]).T
    last = np.array([[0, 0, 0, 0, 1], [0, 0, 1, 1, 1]]).T == 1
    mask = np.array([[1.0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).T
    zeros = np.zeros_like(reward)
    steps = Transition((), (), zeros, reward, 1.0 - last, last, mask, step_end)
    got = advantages.process_relative(steps, zeros, zeros, jnp.zeros(()), gamma=1.0, group_size=2, ddof=0, eps=0.0)
    right, wrong = 0.4 / np.sqrt(0.24), -0.6 / np.sqrt(0.24)  # three of five steps are right
    expected = [[2 * right + wrong, right + wrong, right + wrong, wrong, wrong], [right + wrong] * 2 + [wrong, 0, 0]]
    np.testing.assert_allclose(got.advantage.T, expected, atol=1e-12)


@pytest.mark.parametrize("credit", [advantages.group_relative, advantages.process_relative, advantages.leave_one_out])
@pytest.mark.parametrize("group_size", [1, 3])
def test_columns_that_make_no_groups_are_refused(credit: Callable[..., Credit], group_size: int) -> None:
    with pytest.raises(UserError, match=f"8 episodes per device do not divide into groups of {group_size}"):
        credit(*batch(0, episodic=True), jnp.zeros(()), gamma=1.0, group_size=group_size)


# --- standardisation


@pytest.mark.parametrize("ddof", [0, 1])
def test_standardize(ddof: int) -> None:
    steps, advantage, _ = batch(6, episodic=True, padding=1000.0)
    real = advantage[steps.mask == 1]
    got = advantages.standardize(advantage, steps.mask, ddof=ddof, eps=1e-3)
    expected = (advantage - real.mean()) / (real.std(ddof=ddof) + 1e-3) * steps.mask
    np.testing.assert_allclose(got, expected, atol=1e-12)


@pytest.mark.parametrize("num_real", [0, 1])
def test_standardize_with_too_few_steps_for_a_variance(num_real: int) -> None:
    mask = (np.arange(6.0) < num_real).astype(float)[:, None]
    np.testing.assert_array_equal(advantages.standardize(np.full((6, 1), 3.0), mask), np.zeros((6, 1)))


def test_unchanged() -> None:
    advantage = jnp.arange(3.0)
    assert advantages.unchanged(advantage, advantage) is advantage


# --- the critic


@pytest.mark.parametrize("scale", [1.0, 1e-4])  # of returns far below 1, too
def test_explained_variance(scale: float) -> None:
    steps, target, _ = batch(8, episodic=True, padding=1000.0)
    target = scale * target
    value = np.where(steps.mask, 0.5 * target + 3.0, -1000.0)
    real = target[steps.mask == 1]
    np.testing.assert_allclose(metrics.explained_variance(value, target, steps.mask), 0.75, rtol=1e-9)
    np.testing.assert_allclose(metrics.explained_variance(target, target, steps.mask), 1.0)
    np.testing.assert_allclose(
        metrics.explained_variance(-target, target, steps.mask), 1 - (2 * real).var() / real.var(), rtol=1e-9
    )
    assert metrics.explained_variance(target, np.ones_like(target), steps.mask) == 0


def test_beside_targets_that_are_nearly_equal_the_explained_variance_is_bounded() -> None:
    """As in the first iteration of a reward model's policy: no reward, and a KL penalty of 1e-8."""
    value, target = jax.random.normal(jax.random.key(0), (2, 6, 8), jnp.float32)
    found = metrics.explained_variance(value, 1e-8 * target, jnp.ones((6, 8), jnp.float32))
    assert found == metrics.LEAST_EXPLAINED


@pytest.mark.parametrize("constant", [0.1, 1e-6, 1000.1])
@pytest.mark.parametrize("shape", [(6, 8), (7, 13), (128, 64)])
def test_of_a_constant_target_nothing_is_explained(constant: float, shape: tuple[int, int]) -> None:
    """In float32 the mean of equal numbers is not quite that number."""
    target = jnp.full(shape, constant, jnp.float32)
    value = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    assert metrics.explained_variance(value, target, jnp.ones(shape, jnp.float32)) == 0


# --- devices


@pytest.mark.parametrize("name", [*ALL, "standardize"])
def test_four_devices_give_what_one_gives(name: str) -> None:
    steps, v_tm1, v_t = batch(7, episodic=True, padding=1000.0)

    def compute(steps: Transition, v_tm1: jax.Array, v_t: jax.Array) -> Credit:
        if name == "standardize":
            return Credit(advantages.standardize(v_tm1, steps.mask), v_t, jnp.array(BASELINE))
        # groups live on one device: here pairs of the two columns of each
        group = {"group_size": 2} if name in GROUP_CREDITS else {}
        return ALL[name][0](steps, v_tm1, v_t, jnp.array(BASELINE), gamma=GAMMA, **group)

    columns, replicated = PartitionSpec(None, collectives.DATA), PartitionSpec()
    sharded = jax.shard_map(
        compute,
        mesh=Mesh(np.array(jax.devices()[:4]), (collectives.DATA,)),
        in_specs=(columns, columns, columns),
        out_specs=Credit(columns, columns, replicated),
        check_vma=False,
    )
    one, four = (jax.jit(f)(steps, v_tm1, v_t) for f in (compute, sharded))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-12), four, one)


def test_what_a_batch_credits_its_actions_with() -> None:
    rng = np.random.default_rng(0)
    mask = rng.random((5, 4)) < 0.6
    advantage = np.where(mask, rng.normal(0.5, 2.0, mask.shape), 1000.0)  # padding must not be read
    advantage[mask.nonzero()[0][0], mask.nonzero()[1][0]] = 0.0  # which is not above 0
    target = np.where(mask, rng.normal(-3.0, 1.0, mask.shape), 1000.0)
    real, returns = advantage[mask], target[mask]
    expected = {
        "advantage_mean": real.mean(),
        "advantage_std": real.std(),
        "advantage_min": real.min(),
        "advantage_max": real.max(),
        "advantage_positive": (real > 0).mean(),
        "return_variation": returns.std() / abs(returns.mean()),
    }
    found = metrics.credit_metrics(jnp.asarray(advantage), jnp.asarray(target), jnp.asarray(mask, float))
    assert {name: float(x) for name, x in found.items()} == pytest.approx(expected, rel=1e-9)


def test_a_batch_without_a_step_credits_nothing() -> None:
    found = metrics.credit_metrics(*jnp.ones((2, 3, 2)), jnp.zeros((3, 2)))
    assert {float(x) for x in found.values()} == {0.0}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_the_variation_of_standardised_returns_is_finite(dtype) -> None:
    """Their mean is 0 up to rounding, or exactly; training ends as diverged where a metric is not finite."""
    target = jnp.asarray([[-1.0], [1.0]], dtype)
    found = metrics.credit_metrics(target, target, jnp.ones((2, 1), dtype))
    assert float(found["return_variation"]) == pytest.approx(metrics.LARGEST_VARIATION)
