"""Prediction against slow loops, exact values, and the reductions between its methods."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg import envs, values
from jaxpg.errors import UserError

GAMMA, ALPHA = 0.9, 0.1


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def experience(time_limit=12, num_episodes=6):
    """Episodes that revisit states; some terminate, some time out."""
    mdp = envs.random_mdp(jax.random.key(0), 4, 2)
    policy = jnp.full((4, 2), 0.5)
    played = values.sample_episodes(mdp, policy, jax.random.key(1), num_episodes=num_episodes, time_limit=time_limit)
    assert ((played.discount == 0) & (played.mask > 0)).any()
    return played


def timed_out():
    """Episodes of three steps: most of them time out."""
    played = experience(time_limit=3, num_episodes=8)
    assert ((played.discount == 1) & played.last & (played.mask > 0)).any()
    return played


def episodes(played):
    """The real steps of each episode: lists of (state, reward, next_state, discount)."""
    for e in range(played.state.shape[1]):
        steps = zip(
            *(np.asarray(x)[:, e] for x in (played.state, played.reward, played.next_state, played.discount)),
            strict=True,
        )
        yield [step for step, mask in zip(steps, np.asarray(played.mask)[:, e], strict=True) if mask]


def test_an_action_and_its_outcome_are_drawn_apart():
    """Of two actions with two outcomes each, every pair comes as often as the product of its probabilities says."""
    first = jnp.array([[0.0, 0.3, 0.7], [0.0, 0.6, 0.4]])
    P = jnp.stack([first, *(jnp.tile(jnp.eye(3)[s], (2, 1)) for s in (1, 2))])
    R = jnp.zeros((3, 2, 3)).at[0].set(jnp.array([[0.0, 1, 2], [0, 11, 12]]))
    mdp = envs.MDP(P, R, jnp.eye(3)[0], jnp.arange(3) > 0)
    policy, settings = jnp.tile(jnp.array([0.4, 0.6]), (3, 1)), {"num_episodes": 20_000, "time_limit": 1}
    reward = np.asarray(values.sample_episodes(mdp, policy, jax.random.key(0), **settings).reward)
    expected = {1: 0.4 * 0.3, 2: 0.4 * 0.7, 11: 0.6 * 0.6, 12: 0.6 * 0.4}
    assert {r: (reward == r).mean() for r in expected} == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("first_visit", [True, False])
def test_monte_carlo_is_a_mean_of_returns(first_visit):
    played, start = experience(), jnp.full(4, 7.0)
    found = values.monte_carlo(played, start, GAMMA, first_visit=first_visit)
    returns = {s: [] for s in range(4)}
    for e, steps in enumerate(episodes(played)):
        seen = set()
        for t, (s, *_) in enumerate(steps):
            if not (first_visit and s in seen):
                returns[s].append(sum(GAMMA**k * r for k, (_, r, _, _) in enumerate(steps[t:])))
            seen.add(s)
        expected = [np.mean(returns[s]) if returns[s] else 7.0 for s in range(4)]
        np.testing.assert_allclose(found[e], expected, atol=1e-6)
    assert len(returns[0]) > 2


@pytest.mark.parametrize("lambda_", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("online", [True, False])
@pytest.mark.parametrize("make", [experience, timed_out])
def test_td_lambda_is_a_loop(lambda_, online, make):
    played = make()
    found = values.td_lambda(played, jnp.zeros(4), GAMMA, step_size=ALPHA, lambda_=lambda_, online=online)
    v = np.zeros(4)
    for e, steps in enumerate(episodes(played)):
        trace, changes = np.zeros(4), np.zeros(4)
        for s, r, successor, discount in steps:
            source = v + changes if online else v
            delta = r + GAMMA * discount * source[successor] - source[s]
            trace *= GAMMA * lambda_
            trace[s] += 1
            changes += ALPHA * delta * trace
        v = v + changes
        np.testing.assert_allclose(found[e], v, atol=1e-6)


@pytest.mark.parametrize("n", [1, 3, 50])
@pytest.mark.parametrize("online", [True, False])
@pytest.mark.parametrize("make", [experience, timed_out])
def test_n_step_td_is_a_loop(n, online, make):
    """The textbook's loop over time, in which a state is updated n steps after it was left (section 7.1)."""
    played = make()
    found = values.n_step_td(played, jnp.zeros(4), GAMMA, step_size=ALPHA, n=n, online=online)
    v = np.zeros(4)
    for e, steps in enumerate(episodes(played)):
        before, v, T = v, v.copy(), len(steps)
        for t in range(T + n - 1):
            tau = t - n + 1
            if not 0 <= tau < T:
                continue
            end = min(tau + n, T)
            target = sum(GAMMA ** (k - tau) * steps[k][1] for k in range(tau, end))
            source = v if online else before
            target += GAMMA ** (end - tau) * steps[end - 1][3] * source[steps[end - 1][2]]
            v[steps[tau][0]] += ALPHA * (target - source[steps[tau][0]])
        np.testing.assert_allclose(found[e], v, atol=1e-6)


def test_methods_meet_where_they_are_the_same():
    played, zeros = experience(), jnp.zeros(4)
    td = values.td_lambda(played, zeros, GAMMA, step_size=ALPHA)
    np.testing.assert_allclose(values.n_step_td(played, zeros, GAMMA, step_size=ALPHA, n=1), td, atol=1e-12)
    whole = values.n_step_td(played, zeros, GAMMA, step_size=ALPHA, n=50, online=False)
    traces = values.td_lambda(played, zeros, GAMMA, step_size=ALPHA, lambda_=1.0, online=False)
    np.testing.assert_allclose(whole, traces, atol=1e-6)  # rewards are float32
    other = values.td_lambda(played, zeros, GAMMA, step_size=ALPHA, lambda_=1.0)
    assert np.abs(other - traces).max() > 1e-3  # on-line differs where a state comes back


def test_first_visits_are_unbiased_and_every_visit_is_not():
    """One state that stays with probability 1/2 at a reward of 1, then ends: v = 1. Singh & Sutton 1996, section 3."""
    mdp = envs.SparseMDP(
        successors=jnp.array([[[0, 1]], [[1, 1]]], jnp.int32),
        probabilities=jnp.array([[[0.5, 0.5]], [[1.0, 0.0]]]),
        rewards=jnp.array([[[1.0, 0.0]], [[0.0, 0.0]]]),
        start=jnp.array([1.0, 0.0]),
        terminal=jnp.array([False, True]),
    )
    runs = 20_000

    def estimate(key, first_visit):
        played = values.sample_episodes(mdp, jnp.ones((2, 1)), key, num_episodes=1, time_limit=60)
        return values.monte_carlo(played, jnp.zeros(2), 1.0, first_visit=first_visit)[0, 0]

    keys = jax.random.split(jax.random.key(0), runs)
    first, every = (jax.vmap(lambda key, f=f: estimate(key, f))(keys) for f in (True, False))
    assert float(first.mean()) == pytest.approx(1.0, abs=5 * float(first.std()) / runs**0.5)
    assert float(every.mean()) == pytest.approx(
        0.5, abs=5 * float(every.std()) / runs**0.5
    )  # mean of (0 + ... + n)/(n+1)


def test_errors_are_over_runs_and_over_the_states_that_count():
    rng = np.random.default_rng(0)
    estimates, exact, counts = rng.normal(size=(7, 3, 5)), rng.normal(size=5), np.array([0, 1, 1, 0, 1], bool)
    error = (estimates - exact)[..., counts]
    estimates[..., ~counts] = 1000.0
    found = values.prediction_error(*map(jnp.asarray, (estimates, exact, counts)))
    np.testing.assert_allclose(found.bias, np.sqrt((error.mean(0) ** 2).mean(-1)))
    np.testing.assert_allclose(found.sd, np.sqrt(error.var(0).mean(-1)))
    np.testing.assert_allclose(found.rmse, np.sqrt((error**2).mean((0, 2))))


def test_errors_on_the_random_walk():
    """Bias falls and the parts make up the whole; after 100 episodes TD(0) is closer than Monte Carlo (example 6.2)."""
    mdp = envs.random_walk(5, left_reward=0.0)
    policy = jnp.ones((7, 1))
    exact = envs.state_values(mdp, policy, 1.0)
    np.testing.assert_allclose(exact, [0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 0], atol=1e-12)
    start = jnp.where(mdp.terminal, 0.0, 0.5)

    def run(key):
        played = values.sample_episodes(mdp, policy, key, num_episodes=100, time_limit=200)
        mc = values.td_lambda(played, start, 1.0, step_size=0.02, lambda_=1.0, online=False)
        return values.td_lambda(played, start, 1.0, step_size=0.1), mc

    td, mc = jax.vmap(run)(jax.random.split(jax.random.key(0), 100))
    errors = values.prediction_error(td, exact, ~mdp.terminal)
    np.testing.assert_allclose(errors.rmse**2, errors.bias**2 + errors.sd**2, atol=1e-9)
    assert float(errors.bias[-1]) < 0.1 * float(errors.bias[0])
    per_run = np.sqrt(((np.asarray(td) - np.asarray(exact))[:, :, 1:6] ** 2).mean(-1)).mean(0)
    assert 0.03 < float(per_run[-1]) < 0.09  # the figure of example 6.2 shows about 0.05 to 0.06
    assert float(errors.rmse[30]) < float(values.prediction_error(mc, exact, ~mdp.terminal).rmse[30])


def test_a_target_of_no_step_is_refused():
    for n, rule in ((0, "be at least 1"), (1.5, "be a whole number")):
        with pytest.raises(UserError, match=f"n, the rewards of a target, must {rule}, not {n}"):
            values.n_step_td(experience(), jnp.zeros(4), GAMMA, step_size=ALPHA, n=n)


METHODS = {
    "monte_carlo": values.monte_carlo,
    "td_lambda": partial(values.td_lambda, step_size=ALPHA),
    "n_step_td": partial(values.n_step_td, step_size=ALPHA, n=2),
}


@pytest.mark.parametrize("method", METHODS.values())
def test_values_to_begin_with_may_be_a_list_of_integers(method):
    begun = [1, 0, 2, 0]
    np.testing.assert_array_equal(method(experience(), begun, GAMMA), method(experience(), jnp.array(begun), GAMMA))


@pytest.mark.parametrize("name", METHODS)
def test_a_table_without_the_terminal_states_is_refused(name):
    """JAX would take its last entry in their place, which they then change."""
    mdp = envs.random_walk(5)
    played = values.sample_episodes(mdp, jnp.ones((7, 1)), jax.random.key(0), num_episodes=20, time_limit=200)
    sentence = r"come to state 6, and the values to begin with are of \d states: .*jnp\.zeros\(len\(mdp\.terminal\)\)"
    for short in (jnp.zeros(6), [0.0] * 5):
        with pytest.raises(UserError, match=sentence):
            METHODS[name](played, short, GAMMA)
    with pytest.raises(UserError, match=r"are a table \[S\], not an array of the shape \[7, 1\]"):
        METHODS[name](played, jnp.zeros((7, 1)), GAMMA)
    assert METHODS[name](played, jnp.zeros(7), GAMMA).shape == (20, 7)


@pytest.mark.parametrize("name", METHODS)
def test_an_mdp_in_the_place_of_its_episodes_is_refused(name):
    with pytest.raises(UserError, match=f"{name} takes a record TabularEpisodes: values.sample_episodes"):
        METHODS[name](envs.frozen_lake(), jnp.zeros(16), GAMMA)
