"""Tabular MDPs against published numbers, linear algebra, enumeration and sampling."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments.misc import frozen_lake as gymnax_frozen_lake

from jaxpg import envs, values
from jaxpg.envs import tabular
from jaxpg.envs.reachability import check_mdp
from jaxpg.envs.tabular import MDP, SparseMDP, state_values, to_sparse
from jaxpg.errors import UserError

LEFT, DOWN, RIGHT, UP = range(4)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def random_policy(key, mdp):
    return jax.nn.softmax(jax.random.normal(jax.random.key(key), mdp.P.shape[:2]))


def optimal(mdp, gamma):
    """Optimal values and the greedy policy."""
    plan = values.value_iteration(mdp, gamma, tolerance=1e-10)
    return plan.values, plan.policy


MDPS = {
    "grid_world": lambda: envs.grid_world(),
    "walls": lambda: envs.grid_world(3, 4, walls=[(1, 1)]),
    "frozen_lake": lambda: envs.frozen_lake(),
    "dry_lake": lambda: envs.frozen_lake(8, slippery=False),
    "random": lambda: envs.random_mdp(jax.random.key(0), 6, 2),
}


@pytest.mark.parametrize("name", MDPS)
def test_probabilities(name):
    mdp = MDPS[name]()
    S, A, _ = mdp.P.shape
    assert mdp.P.shape == mdp.R.shape == (S, A, S)
    assert mdp.start.shape == mdp.terminal.shape == (S,)
    assert (mdp.P >= 0).all()
    np.testing.assert_allclose(mdp.P.sum(-1), 1.0, atol=1e-12)
    np.testing.assert_allclose(mdp.start.sum(), 1.0, atol=1e-12)
    ends = np.asarray(mdp.terminal)
    assert ends.any()
    assert not mdp.start[ends].any()
    np.testing.assert_array_equal(mdp.P[ends], np.broadcast_to(np.eye(S)[ends][:, None], (ends.sum(), A, S)))
    np.testing.assert_array_equal(mdp.R[ends], 0.0)


@pytest.mark.parametrize(
    ("state", "action", "successors"),
    [  # rows of Gymnasium's env.unwrapped.P
        (0, LEFT, {0: 2 / 3, 4: 1 / 3}),
        (0, RIGHT, {4: 1 / 3, 1: 1 / 3, 0: 1 / 3}),
        (6, DOWN, {5: 1 / 3, 10: 1 / 3, 7: 1 / 3}),
        (14, RIGHT, {14: 1 / 3, 15: 1 / 3, 10: 1 / 3}),
        (14, UP, {13: 1 / 3, 10: 1 / 3, 15: 1 / 3}),
        (5, LEFT, {5: 1.0}),
    ],
)
def test_frozen_lake_rows(state, action, successors):
    row = np.asarray(envs.frozen_lake().P[state, action])
    assert {int(s): pytest.approx(row[s]) for s in np.flatnonzero(row)} == successors


def test_frozen_lake_known_optima():
    """Optimal start values at gamma 0.99 as Gymnasium's tables give them; success within 100 steps of that policy."""
    v, greedy = optimal(envs.frozen_lake(), 0.99)
    assert float(v[0]) == pytest.approx(0.5420, abs=5e-5)
    assert float(envs.expected_return(envs.frozen_lake(), greedy, 1.0, horizon=100)) == pytest.approx(0.740, abs=5e-4)
    assert float(optimal(envs.frozen_lake(8), 0.99)[0][0]) == pytest.approx(0.4146, abs=5e-5)
    assert float(optimal(envs.frozen_lake(8, slippery=False), 0.99)[0][0]) == pytest.approx(0.99**13)


def test_grid_world_gives_the_textbook_utilities():
    """Russell & Norvig, figure 17.3: utilities of the 4x3 world at gamma 1, reward -0.04 per step."""
    v, _ = optimal(envs.grid_world(3, 4, walls=[(1, 1)]), 1.0)
    textbook = [[0.812, 0.868, 0.918, 0], [0.762, 0, 0.660, 0], [0.705, 0.655, 0.611, 0.388]]
    open_cells = np.ones((3, 4), bool)
    open_cells[1, 1] = False
    np.testing.assert_allclose(
        (np.asarray(v).reshape(3, 4) + 0.0)[open_cells], np.array(textbook)[open_cells], atol=6e-4
    )


def test_grid_world_layout():
    mdp = envs.grid_world(8, 8, slip=0.0, living_cost=0.5)
    assert int(mdp.start.argmax()) == 56
    np.testing.assert_array_equal(np.flatnonzero(mdp.terminal), [7, 15])
    assert mdp.P[56, LEFT, 56] == mdp.P[56, UP, 48] == mdp.P[56, RIGHT, 57] == mdp.P[48, DOWN, 56] == 1
    assert mdp.R[6, RIGHT, 7] == 0.5
    assert mdp.R[14, RIGHT, 15] == -1.5
    assert mdp.R[56, UP, 48] == -0.5
    slippery = envs.grid_world(8, 8, slip=0.2)
    np.testing.assert_allclose(slippery.P[27, UP, jnp.array([19, 26, 28, 35])], [0.8, 0.1, 0.1, 0.0], atol=1e-12)


@pytest.mark.parametrize(  # no terminal state is reached from inside the wall, so at gamma 1 that world has no values
    ("name", "gamma"), [(name, gamma) for name in MDPS for gamma in (0.9, 1.0) if (name, gamma) != ("walls", 1.0)]
)
def test_values_satisfy_the_bellman_equation(name, gamma):
    mdp = MDPS[name]()
    policy = random_policy(1, mdp)
    v = envs.state_values(mdp, policy, gamma)
    q = envs.action_values(mdp, v, gamma)
    np.testing.assert_allclose((policy * q).sum(-1), v, atol=1e-10)
    np.testing.assert_array_equal(v[mdp.terminal], 0.0)
    np.testing.assert_allclose(envs.state_values(mdp, policy, gamma, horizon=20_000), v, atol=1e-9)


def test_what_terminal_states_hold_is_never_read():
    mdp = envs.random_mdp(jax.random.key(0))
    poisoned = mdp._replace(
        R=jnp.where(mdp.terminal[:, None, None], 1000.0, mdp.R),
        P=jnp.where(mdp.terminal[:, None, None], 1.0 / len(mdp.P), mdp.P),
    )
    policy = random_policy(1, mdp)
    for horizon in (None, 7):
        clean, other = (envs.state_values(m, policy, 0.9, horizon) for m in (mdp, poisoned))
        np.testing.assert_array_equal(clean, other)
    np.testing.assert_array_equal(envs.state_visits(mdp, policy, 0.9), envs.state_visits(poisoned, policy, 0.9))
    clean = envs.state_values(mdp, policy, 0.9)
    haunted = jnp.where(mdp.terminal, 1000.0, clean)
    np.testing.assert_array_equal(envs.action_values(mdp, clean, 0.9), envs.action_values(mdp, haunted, 0.9))


def test_finite_horizon_against_the_enumeration_of_every_path():
    mdp, gamma, horizon = envs.random_mdp(jax.random.key(2), 4, 2), 0.8, 3
    policy = random_policy(3, mdp)
    P, R, pi, start = (np.asarray(x) for x in (mdp.P, mdp.R, policy, mdp.start))
    expected = 0.0
    for states in itertools.product(range(4), repeat=horizon + 1):
        for actions in itertools.product(range(2), repeat=horizon):
            probability, gain = start[states[0]], 0.0
            for t, (s, a, s_next) in enumerate(zip(states[:-1], actions, states[1:], strict=True)):
                probability *= pi[s, a] * P[s, a, s_next]
                gain += 0.0 if mdp.terminal[s] else gamma**t * R[s, a, s_next]
            expected += probability * gain
    assert float(envs.expected_return(mdp, policy, gamma, horizon)) == pytest.approx(expected, abs=1e-12)


def test_policy_gradient_theorem():
    """The gradient of the exact objective equals visits x action values x the gradient of the policy."""
    mdp, gamma = envs.random_mdp(jax.random.key(4)), 0.9
    logits = jax.random.normal(jax.random.key(5), mdp.P.shape[:2])
    exact = jax.grad(lambda x: envs.expected_return(mdp, jax.nn.softmax(x), gamma))(logits)
    policy = jax.nn.softmax(logits)
    q = envs.action_values(mdp, envs.state_values(mdp, policy, gamma), gamma)
    visits = envs.state_visits(mdp, policy, gamma)
    theorem = jax.grad(lambda x: (visits[:, None] * q * jax.nn.softmax(x)).sum())(logits)
    np.testing.assert_allclose(theorem, exact, atol=1e-12)
    assert np.abs(exact).max() > 1e-3
    nudged = jnp.zeros_like(logits).at[0, 0].set(1e-6)
    up, down = (envs.expected_return(mdp, jax.nn.softmax(logits + d), gamma) for d in (nudged, -nudged))
    assert float(exact[0, 0]) == pytest.approx(float((up - down) / 2e-6), abs=1e-8)


def test_the_return_is_visits_times_expected_rewards():
    mdp, gamma = envs.random_mdp(jax.random.key(6)), 0.95
    policy = random_policy(7, mdp)
    rewards = jnp.einsum("sa,sax,sax->s", policy, mdp.P, mdp.R)
    assert float(envs.state_visits(mdp, policy, gamma) @ rewards) == pytest.approx(
        float(envs.expected_return(mdp, policy, gamma)), abs=1e-12
    )


def test_values_vmap_and_jit():
    policies = jax.nn.softmax(jax.random.normal(jax.random.key(8), (3, 5, 3)))
    mdp = envs.random_mdp(jax.random.key(0))
    together = jax.jit(jax.vmap(lambda p, g: envs.expected_return(mdp, p, g)))(policies, jnp.array([0.5, 0.9, 1.0]))
    alone = [envs.expected_return(mdp, p, g) for p, g in zip(policies, [0.5, 0.9, 1.0], strict=True)]
    np.testing.assert_allclose(together, jnp.array(alone), atol=1e-12)


def frequencies(step, states, actions, samples):
    """How often `step(key, state, action) -> successor` gives each successor, [S, A, S]."""
    keys = jax.random.split(jax.random.key(0), samples)

    def counts(state, action):
        successors = jax.vmap(step, (0, None, None))(keys, state, action)
        return jax.nn.one_hot(successors, states).mean(0)

    every = jax.vmap(jax.vmap(counts, (None, 0)), (0, None))
    return np.asarray(jax.jit(every)(jnp.arange(states, dtype=jnp.int32), jnp.arange(actions, dtype=jnp.int32)))


def assert_samples_fit(found, P, samples):
    """Every frequency within five standard errors of its probability, and exact where that is 0 or 1."""
    assert (np.abs(found - P) <= 5 * np.sqrt(P * (1 - P) / samples) + 1e-9).all()


def test_frozen_lake_is_the_one_of_gymnax():
    lake, params = gymnax_frozen_lake.FrozenLake(), gymnax_frozen_lake.EnvParams()
    mdp, samples = envs.frozen_lake(), 2000

    def step(key, state, action):
        _, state, *_ = lake.step_env(key, gymnax_frozen_lake.EnvState(position=state, time=0), action, params)
        return state.position

    with jax.enable_x64(False):
        found = frequencies(step, 16, 4, samples)
    live = ~np.asarray(mdp.terminal)
    assert_samples_fit(found[live], np.asarray(mdp.P)[live], samples)
    reached = lake.desc.reshape(-1)
    np.testing.assert_array_equal(mdp.terminal, np.isin(reached, (gymnax_frozen_lake.HOLE, gymnax_frozen_lake.GOAL)))
    arrives = np.asarray(mdp.P)[live][..., 15] > 0
    np.testing.assert_array_equal(np.asarray(mdp.R)[live][..., 15], 1.0 * arrives)


@pytest.mark.parametrize("name", ["random", "frozen_lake"])
def test_environment_samples_its_mdp(name):
    mdp, samples = MDPS[name](), 4000
    env = envs.as_env(mdp, 3, name)

    def step(key, position, action):
        state, timestep = env.step(key, tabular.TabularState(position, jnp.int32(0)), action)
        right = timestep.reward == mdp.R[position, action, state.position].astype(jnp.float32)
        right &= (timestep.obs == jnp.eye(len(mdp.P))[state.position]).all()
        right &= timestep.last == mdp.terminal[state.position]
        right &= timestep.discount == 1 - mdp.terminal[state.position]
        return jnp.where(right, state.position, -1)  # -1 is counted nowhere

    S, A, _ = mdp.P.shape
    found = frequencies(step, S, A, samples)
    np.testing.assert_allclose(found.sum(-1), 1.0, atol=1e-5)
    assert_samples_fit(found, np.asarray(mdp.P), samples)

    states, obs = jax.vmap(env.reset)(jax.random.split(jax.random.key(1), samples))
    np.testing.assert_array_equal(obs, np.eye(S)[np.asarray(states.position)])
    assert_samples_fit(np.bincount(states.position, minlength=S) / samples, np.asarray(mdp.start), samples)


def test_environment_times_out_without_terminating():
    env = envs.as_env(envs.frozen_lake(slippery=False), 2, "lake")
    state, _ = env.reset(jax.random.key(0))
    for expected in (False, True):
        state, timestep = env.step(jax.random.key(0), state, LEFT)
        assert bool(timestep.last) is expected
        assert float(timestep.discount) == 1.0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_impossible_outcomes_are_never_drawn(dtype):
    """Whatever rounding does to the sums: the last possible outcome has 1, those without probability have 0."""
    weights = jax.random.exponential(jax.random.key(0), (500, 30), dtype)
    p = jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, weights.shape), weights, 0).at[:, 3].set(1e-4)
    cdf = np.asarray(tabular._cdf(p / p.sum(-1, keepdims=True)))
    p = np.asarray(p)
    np.testing.assert_array_equal(cdf[p == 0], 0.0)
    last_possible = p.shape[-1] - 1 - np.argmax(p[:, ::-1] > 0, axis=-1)
    np.testing.assert_array_equal(cdf[np.arange(len(p)), last_possible], 1.0)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: envs.grid_world(1, 5), "rows, columns >= 2"),
        (lambda: envs.grid_world(slip=-0.1), "slip in"),
        (lambda: envs.frozen_lake(6), "size must be 4 or 8, not 6"),
        (lambda: envs.random_mdp(jax.random.key(0), states=1), "at least 2 states"),
        (lambda: envs.as_env(envs.frozen_lake(), 0, "lake"), "time_limit must be at least 1, not 0"),
    ],
)
def test_senseless_settings_are_refused(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()


@pytest.mark.parametrize("field", ["P", "R"])
def test_arrays_of_other_shapes_are_refused_where_they_would_be_broadcast(field):
    """Rewards r(s, a) and r(s) of as many actions as states are arrays that NumPy takes for r(s, a, s')."""
    mdp = envs.random_mdp(jax.random.key(0), states=3, actions=3)
    policy = jnp.full((3, 3), 1 / 3)
    for of_one, axes in ((jnp.ones((3, 3)), "3, 3"), (jnp.ones(3), "3"), (jnp.ones((2, 3, 3)), "2, 3, 3")):
        wrong = mdp._replace(**{field: of_one})
        sentence = rf"of an MDP with 3 states has the shape \[S, A, S\], not \[{axes}\]"
        for use in (
            lambda mdp: values.value_iteration(mdp, 0.9),
            lambda mdp: values.policy_evaluation(mdp, policy, 0.9),
            lambda mdp: state_values(mdp, policy, 0.9),
            lambda mdp: envs.as_env(mdp, 5, "mine"),
        ):
            with pytest.raises(UserError, match=sentence):
                use(wrong)
    sparse = to_sparse(mdp)
    with pytest.raises(UserError, match=r"rewards of an MDP with 3 states has the shape \[S, A, K\]"):
        values.value_iteration(sparse._replace(rewards=jnp.ones((3, 3))), 0.9)


@pytest.mark.parametrize("to", [lambda mdp: mdp, to_sparse])
@pytest.mark.parametrize("total", [0.5, 0.999, 1.001, 2.0])
def test_an_environment_of_rows_that_are_no_distributions_is_refused(to, total):
    mdp = envs.random_mdp(jax.random.key(0), states=3, actions=3)
    wrong = to(mdp._replace(P=mdp.P.at[1, 2].multiply(total)))
    with pytest.raises(UserError, match=rf"state 1 and action 2: .* sum to {total:g}\."):
        envs.as_env(wrong, 5, "mine")


IMPOSSIBLE = {
    "start of more states": ({"start": np.ones(7) / 7}, r"each of its 3 states to be the first.* axes \[7\]"),
    "start without a state": ({"start": np.zeros(3)}, r"start is not a distribution.* sum to 0\."),
    "start below 0": ({"start": np.array([3, -2, 0])}, r"start is not a distribution.* the least is -2"),
    "start often": ({"start": np.ones(3)}, r"start is not a distribution.* sum to 3\."),
    "successor too large": ({"successors": np.full((3, 2, 1), 7)}, "Action 0 of state 0 leads to the state 7.* 0 to 2"),
    "successor below 0": ({"successors": np.full((3, 2, 1), -1)}, "Action 0 of state 0 leads to the state -1"),
    "successor between": ({"successors": np.zeros((3, 2, 1))}, "successors .* integers.*, not float64"),
    "terminal of numbers": ({"terminal": np.zeros(3)}, r"array of bool with the axis \[S\].* float64"),
    "terminal with an axis": ({"terminal": np.zeros((3, 1), bool)}, r"with the axes \[3, 1\]"),
    "list": ({"terminal": [False, False, True]}, r"not a list: take jnp\.asarray\(terminal\)"),
}


def chain():
    """Three states, one after the other; no action has two outcomes."""
    successors = np.array([[[0], [1]], [[1], [2]], [[2], [2]]])
    return SparseMDP(successors, np.ones((3, 2, 1)), np.ones((3, 2, 1)), np.array([1, 0, 0]), np.arange(3) == 2)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_worlds_that_cannot_be_are_refused(name):
    changes, sentence = IMPOSSIBLE[name]
    uses = [lambda mdp: envs.as_env(mdp, 5, "mine"), lambda mdp: check_mdp(mdp, 0.9)]
    if "start" in changes:
        uses.append(lambda mdp: envs.expected_return(mdp, jnp.full((3, 2), 0.5), 0.9))
    for use in uses:
        use(chain())
        with pytest.raises(UserError, match=sentence):
            use(chain()._replace(**changes))


def test_outcomes_that_do_not_happen_may_lead_anywhere():
    mdp = chain()
    pad = {"successors": -1, "probabilities": 0, "rewards": 0}
    wider = {name: np.append(getattr(mdp, name), np.full((3, 2, 1), x), axis=-1) for name, x in pad.items()}
    envs.as_env(mdp._replace(**wider), 5, "mine")


def test_worlds_made_inside_of_a_program_are_taken():
    """Their numbers are not known, of one array or of all."""

    def first(start):
        return envs.as_env(chain()._replace(start=start), 5, "mine").reset(jax.random.key(0))[0].position

    np.testing.assert_array_equal(jax.jit(jax.vmap(first))(jnp.eye(3)), [0, 1, 2])
    mdp = jax.tree.map(jnp.asarray, chain())
    assert jax.jit(lambda mdp: envs.as_env(mdp, 5, "mine").reset(jax.random.key(0))[0].position)(mdp) == 0
    assert jax.jit(lambda key: envs.as_env(mdp, 5, "mine").reset(key)[0].position)(jax.random.key(0)) == 0


def test_worlds_of_integers_have_the_values_of_others():
    """Nothing is cut to an integer on the way, whichever array holds them."""
    whole = chain()._replace(probabilities=np.ones((3, 2, 1), int), rewards=np.ones((3, 2, 1), int))
    policy = np.array([[0, 1]] * 3)
    np.testing.assert_allclose(state_values(whole, policy, 0.5), [1.5, 1, 0])
    np.testing.assert_allclose(tabular.to_dense(whole._replace(rewards=chain().rewards / 2)).R[0, 1, 1], 0.5)
    for method in (values.value_iteration, values.policy_iteration):
        np.testing.assert_allclose(method(whole, 0.5).values, method(chain(), 0.5).values)
    mdp = envs.random_mdp(jax.random.key(0), states=3, actions=2)
    np.testing.assert_allclose(state_values(to_sparse(mdp), policy, 0.5), state_values(mdp, policy, 0.5))


def test_a_policy_of_one_action_per_state_is_refused():
    mdp, actions = envs.random_mdp(jax.random.key(0), states=3, actions=3), jnp.array([0, 1, 2])
    for evaluate in (values.policy_evaluation, state_values):
        with pytest.raises(UserError, match=r"of the shape \[3, 3\] here, not \[3\].*one_hot\(actions"):
            evaluate(mdp, actions, 0.9)
        evaluate(mdp, jax.nn.one_hot(actions, 3), 0.9)


TAKERS = {
    "state_values": lambda mdp, policy: state_values(mdp, policy, 0.9),
    "expected_return": lambda mdp, policy: envs.expected_return(mdp, policy, 0.9),
    "policy_evaluation": lambda mdp, policy: values.policy_evaluation(mdp, policy, 0.9),
    "sample_episodes": lambda mdp, policy: values.sample_episodes(
        mdp, policy, jax.random.key(0), num_episodes=2, time_limit=3
    ),
    "value_iteration": lambda mdp, policy: values.value_iteration(mdp, 0.9),
    "policy_iteration": lambda mdp, policy: values.policy_iteration(mdp, 0.9),
    "finite_horizon": lambda mdp, policy: values.finite_horizon(mdp, 0.9, 3),
}
TAKERS_OF_A_POLICY = ("state_values", "expected_return", "policy_evaluation", "sample_episodes")


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.parametrize("to", [lambda mdp: mdp, to_sparse])
def test_values_of_rows_that_are_no_distributions_are_refused(name, to):
    mdp, policy = envs.random_mdp(jax.random.key(0), states=3, actions=2), jnp.full((3, 2), 0.5)
    TAKERS[name](to(mdp), policy)
    for total in (0.9, 1.05):
        with pytest.raises(UserError, match=rf"P is not a distribution for state 1 and action 0: .* sum to {total}\."):
            TAKERS[name](to(mdp._replace(P=mdp.P.at[1, 0].multiply(total))), policy)
    TAKERS[name](to(mdp), policy)


@pytest.mark.parametrize("name", TAKERS)
def test_an_environment_in_the_place_of_an_mdp_is_refused(name):
    record = "state_values" if name == "expected_return" else name
    with pytest.raises(UserError, match=rf"{record} takes a record MDP: envs.MDPS\[\"frozen_lake\"\]\(\), not Env\("):
        TAKERS[name](envs.make("frozen_lake"), jnp.full((16, 4), 0.25))


@pytest.mark.parametrize("name", TAKERS_OF_A_POLICY)
def test_what_is_no_policy_is_refused(name):
    mdp, policy = envs.frozen_lake(), jnp.full((16, 4), 0.25)
    for wrong in (jnp.full((4, 16), 1 / 16), policy[:8], jnp.zeros(16, int)):
        with pytest.raises(UserError, match=r"A policy holds pi\(a \| s\), of the shape \[16, 4\] here, not \["):
            TAKERS[name](mdp, wrong)
    least_and_sum = {"0, and they sum to 0": 0.0, "1, and they sum to 4": 1.0, "nan, and they sum to nan": jnp.nan}
    for sentence, of_one in least_and_sum.items():
        with pytest.raises(
            UserError, match=f"The policy is not a distribution for state 2: .* the least is {sentence}"
        ):
            TAKERS[name](mdp, policy.at[2].set(of_one))
    TAKERS[name](mdp, jnp.where(mdp.terminal[:, None], 0.0, policy))  # whatever terminal states have


@pytest.mark.parametrize("name", TAKERS_OF_A_POLICY)
def test_a_policy_made_inside_of_a_program_is_taken(name):
    """Its numbers are not known; gradients and maps need that."""
    mdp, logits = envs.frozen_lake(), jnp.zeros((2, 16, 4))
    jax.jit(jax.vmap(lambda x: TAKERS[name](mdp, jax.nn.softmax(x))))(logits)
    jax.jit(lambda mdp, x: TAKERS[name](mdp, x))(mdp, jnp.full((16, 4), 0.25))


def test_mdp_is_a_pytree_of_arrays():
    assert isinstance(envs.random_mdp(jax.random.key(0)), MDP)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(envs.grid_world()))
