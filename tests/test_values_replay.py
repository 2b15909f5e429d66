"""Replay buffers against a Python list, n-step transitions against a loop, prioritised draws against the formulas."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpg.objectives import returns
from jaxpg.rollout.successors import successor_obs
from jaxpg.types import Rollout, Transition
from jaxpg.values import replay
from jaxpg.values.prioritized import BLOCK, prioritized

B, SLOTS, GAMMA = 3, 7, 0.9


def steps(t: int, rng: np.random.Generator) -> replay.StoredSteps:
    """One row of B environments, each number of which says where it comes from; time-outs, ends and ordinary steps."""
    last = rng.random(B) < 0.4
    discount = np.where(last & (rng.random(B) < 0.5), 0.0, 1.0)
    number = 100.0 * t + np.arange(B)
    row = replay.StoredSteps(number, number.astype(np.int32), rng.normal(size=B), discount, last, number + 0.5)
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32 if x.dtype == float else x.dtype)[:, None], row)


def filled(number: int) -> tuple[replay.StoredSteps, list[replay.StoredSteps]]:
    """A buffer after `number` rows, and a list of these rows."""
    rng = np.random.default_rng(0)
    rows = [steps(t, rng) for t in range(number)]
    buffer, write = replay.empty(rows[0], SLOTS), tiny.jit(replay.write)
    for t, row in enumerate(rows):
        buffer = write(buffer, row, t % SLOTS)
    return buffer, rows


@pytest.mark.parametrize("number", [3, 7, 17])
def test_a_buffer_holds_the_newest_rows_of_a_list(number):
    buffer, rows = filled(number)
    for t in range(max(0, number - SLOTS), number):
        jax.tree.map(
            lambda ring, row, t=t: np.testing.assert_array_equal(ring[:, t % SLOTS], row[:, 0]), buffer, rows[t]
        )
    window = replay.window(buffer, jnp.int32(number))
    assert (int(window.cursor), int(window.filled)) == (number % SLOTS, min(number, SLOTS))


def slow_n_step(rows: list, t: int, column: int, n: int) -> tuple[float, float, float]:
    """reward_sum, bootstrap_discount and next_obs, step by step in Python."""
    total, factor = 0.0, 1.0
    for k in range(n):
        row = jax.tree.map(lambda x: float(x[column, 0]), rows[t + k])
        total += factor * row.reward
        factor *= GAMMA * row.discount
        if row.last:
            break
    return total, factor, row.next_obs


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("number", [6, 17])
def test_n_step_transitions_are_those_of_a_loop(n, number):
    """Of every row that can be drawn, over the seam of the ring too; none reaches past the newest step."""
    buffer, rows = filled(number)
    starts = range(max(0, number - SLOTS), number - n + 1)
    column, time = (jnp.asarray(x.ravel(), jnp.int32) for x in np.meshgrid(range(B), starts))
    drawn = replay.Drawn(column, time % SLOTS, jnp.ones(column.shape))
    found = tiny.jit(partial(replay.gather, n=n, gamma=GAMMA))(buffer, drawn)
    expected = np.array([slow_n_step(rows, int(t), int(c), n) for c, t in zip(column, time, strict=True)])
    discounts = found.bootstrap_discount
    np.testing.assert_allclose(np.stack([found.reward_sum, discounts], 1), expected[:, :2], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.next_obs, expected[:, 2])
    np.testing.assert_array_equal(found.obs, 100 * time + column)
    np.testing.assert_array_equal(found.action, found.obs)
    assert {0.0} < set(np.asarray(discounts).tolist())  # terminations are among them


def test_n_step_transitions_make_the_ladder_s_n_step_targets():
    """Except at the end of the rollout, where the ladder's targets are shorter and the buffer draws nothing."""
    buffer, rows = filled(SLOTS)
    n, values = 3, np.random.default_rng(1).normal(size=(SLOTS, B)).astype(np.float32)  # V of the successors
    reward, discount, last = (
        np.concatenate([getattr(r, x) for r in rows], 1).T for x in ("reward", "discount", "last")
    )
    expected = returns.n_step_targets(*map(jnp.asarray, (reward, discount, last, values)), GAMMA, n)
    column, time = (jnp.asarray(x.ravel(), jnp.int32) for x in np.meshgrid(range(B), range(SLOTS - n + 1)))
    gather = tiny.jit(partial(replay.gather, n=n, gamma=GAMMA))
    found = gather(buffer, replay.Drawn(column, time, jnp.ones(column.shape)))
    reached = np.asarray(found.next_obs - 0.5)
    v_t = values[(reached // 100).astype(int), (reached % 100).astype(int)]
    target = found.reward_sum + found.bootstrap_discount * v_t
    np.testing.assert_allclose(target, expected[np.asarray(time), np.asarray(column)], rtol=1e-5, atol=1e-5)


def drawn_by(sampling, state, window, n, batch_size, steps, key):
    """A batch from its key."""
    return sampling.draw(state, window, n, steps, sampling.noise(window.columns, batch_size, key))


def test_uniform_draws_are_uniform_over_the_steps_whose_targets_are_complete():
    buffer, _ = filled(10)
    window = replay.window(buffer, jnp.int32(10))  # slots 3 .. 6 are the oldest, then 0 .. 2
    draw = tiny.jit(lambda key: drawn_by(replay.uniform(), (), window, 3, 3 * 4000, jnp.int32(0), key))
    drawn = draw(jax.random.key(0))
    np.testing.assert_array_equal(np.bincount(drawn.column), [4000] * B)
    share = np.bincount(drawn.slot, minlength=SLOTS) / drawn.slot.size
    np.testing.assert_allclose(share, [0.2, 0, 0, 0.2, 0.2, 0.2, 0.2], atol=0.02)
    np.testing.assert_array_equal(drawn.weight, 1.0)


def test_a_batch_that_the_environments_do_not_divide_favours_none():
    buffer, _ = filled(10)
    window = replay.window(buffer, jnp.int32(10))
    draw = tiny.jit(jax.vmap(lambda key: drawn_by(replay.uniform(), (), window, 1, 4, jnp.int32(0), key).column))
    columns = np.asarray(draw(jax.random.split(jax.random.key(0), 3000)))
    assert {tuple(sorted(np.bincount(row, minlength=B))) for row in columns} == {(1, 1, 2)}
    np.testing.assert_allclose(np.bincount(columns.ravel()) / columns.size, [1 / 3] * B, atol=0.02)


def slow_priorities(errors: np.ndarray, alpha: float, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """P and the weights of Schaul et al. 2016 (equation 1 and section 3.4) in float64; weights before their maximum."""
    priority = (np.abs(errors.astype(np.float64)) + 1e-6) ** alpha
    probability = priority / priority.sum()
    return probability, (errors.size * probability) ** -beta


@pytest.mark.parametrize(("slots", "levels"), [(1, 1), (BLOCK, 1), (2 * BLOCK + 9, 2), (BLOCK**2 + BLOCK + 9, 3)])
def test_prioritised_draws_and_weights_are_those_of_the_paper(slots, levels):
    """beta is half of its way to 1."""
    alpha, beta = 0.7, 0.4
    sampling = prioritized(alpha=alpha, beta=beta, over=100)
    errors = np.random.default_rng(2).exponential(size=(1, slots)) ** 2
    window = replay.Window(jnp.int32(0), jnp.int32(slots), 1, slots)
    state = sampling.add(sampling.init(1, slots), window, slots, 1)
    everything = replay.Drawn(jnp.zeros(slots, jnp.int32), jnp.arange(slots), jnp.ones(slots))

    def draw(key):
        after = sampling.update(state, everything, jnp.asarray(errors[0], jnp.float32), jnp.bool_(True))
        return drawn_by(sampling, after, window, 1, 200_000, jnp.int32(50), key), after

    drawn, after = tiny.jit(draw)(jax.random.key(0))
    probability, weight = slow_priorities(errors[0], alpha, beta + 0.5 * (1 - beta))
    share = np.bincount(drawn.slot, minlength=slots) / 200_000
    np.testing.assert_allclose(share, probability, atol=5 * np.sqrt(probability.max() / 200_000))
    slot = np.asarray(drawn.slot)
    np.testing.assert_allclose(drawn.weight, (weight / weight[slot].max())[slot], rtol=1e-4)
    np.testing.assert_allclose(after.highest[0], max(1, np.max(errors + 1e-6) ** alpha), rtol=1e-5)
    assert len(after.levels) == levels
    for level in after.levels:
        np.testing.assert_allclose(level.sum(), ((np.abs(errors) + 1e-6) ** alpha).sum(), rtol=1e-5)


@pytest.mark.parametrize(("steps", "beta"), [(0, 0.4), (50, 0.7), (100, 1.0), (300, 1.0)])
def test_beta_rises_to_one_and_no_further(steps, beta):
    """Four steps with the priorities 1 to 4."""
    sampling, window = prioritized(alpha=1.0, beta=0.4, over=100), replay.Window(jnp.int32(0), jnp.int32(4), 1, 4)
    everything = replay.Drawn(jnp.zeros(4, jnp.int32), jnp.arange(4), jnp.ones(4))

    @tiny.jit
    def draw(steps):
        state = sampling.add(sampling.init(1, 4), window, 4, 1)
        state = sampling.update(state, everything, jnp.arange(4.0) + 1, jnp.bool_(True))
        return drawn_by(sampling, state, window, 1, 200, steps, jax.random.key(0))

    drawn = draw(jnp.int32(steps))
    assert set(np.asarray(drawn.slot).tolist()) == {0, 1, 2, 3}
    np.testing.assert_allclose(drawn.weight, (1.0 + np.asarray(drawn.slot)) ** -beta, rtol=1e-4)


@pytest.mark.parametrize("n", [1, 3])
def test_new_steps_have_the_highest_priority_once_their_targets_are_complete(n):
    sampling = prioritized(alpha=1.0, beta=1.0, over=1)
    state = sampling.init(2, SLOTS)._replace(highest=jnp.array([5.0, 7.0]))
    add = tiny.jit(
        lambda state, t: sampling.add(state, replay.Window(t % SLOTS, jnp.minimum(t, SLOTS), 2, SLOTS), 1, n)
    )
    for t in range(1, 12):
        state = add(state, jnp.int32(t))
        complete = range(max(0, t - SLOTS), t - n + 1)
        expected = np.zeros((2, SLOTS))
        expected[:, [s % SLOTS for s in complete]] = [[5.0], [7.0]]
        (priorities,) = state.levels
        np.testing.assert_array_equal(priorities.reshape(2, -1)[:, :SLOTS], expected)


@pytest.mark.parametrize("learned", [True, False])
def test_priorities_change_where_something_was_learned(learned):
    """Before that the errors are zeros, by which the rows that were drawn would hardly be drawn again."""
    sampling = prioritized(alpha=0.5, beta=1.0, over=1)
    state = sampling.add(sampling.init(2, SLOTS), replay.Window(jnp.int32(3), jnp.int32(3), 2, SLOTS), 3, 1)
    drawn = replay.Drawn(jnp.array([0, 1]), jnp.array([2, 1]), jnp.ones(2))
    after = sampling.update(state, drawn, jnp.array([-4.0, 0.0]), jnp.asarray(learned))
    expected = np.array([[1, 1, 2.0], [1, 1e-3, 1]]) if learned else np.ones((2, 3))
    np.testing.assert_allclose(after.levels[0].reshape(2, -1)[:, :3], expected, rtol=1e-4)
    np.testing.assert_allclose(after.levels[-1].sum((1, 2)), expected.sum(1), rtol=1e-5)
    np.testing.assert_allclose(after.highest, [2, 1] if learned else [1, 1], rtol=1e-5)


def test_successors_are_the_next_rows_or_the_final_observations():
    """Of two columns: one times out after its second step, both break off at the end; terminations need none."""
    obs = jnp.arange(8.0).reshape(4, 2)
    last = jnp.array([[0, 0], [1, 0], [0, 1], [0, 0]], bool)
    discount = jnp.array([[1, 1], [1, 1], [1, 0], [1, 1]], jnp.float32)
    zeros = jnp.zeros((4, 2))
    transitions = Transition(obs, zeros, zeros, zeros, discount, last, zeros + 1)
    final = jnp.array([[50.0, 61.0], [60.0, -1.0], [-1.0, -1.0]])
    found = np.asarray(tiny.jit(successor_obs)(Rollout(transitions, zeros + 1, final)))
    expected = np.array([[2, 3], [50, 5], [6, np.nan], [60, 61]])
    np.testing.assert_array_equal(found[np.isfinite(expected)], expected[np.isfinite(expected)])
