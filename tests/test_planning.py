"""Planning against linear programming, linear algebra, Gymnasium's tables and each other."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.envs.toy_text import CliffWalkingEnv, FrozenLakeEnv, TaxiEnv
from scipy.optimize import linprog

from jaxpg import envs, values
from jaxpg.envs import tabular
from jaxpg.envs.mdps import grid_of
from jaxpg.envs.reachability import check_mdp
from jaxpg.errors import UserError
from jaxpg.values.planning import greedy_policy, smallest_change

GAMMAS = (0.9, 0.99, 1.0)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


WORLDS = {
    "frozen_lake 4": (lambda: envs.frozen_lake(4), FrozenLakeEnv, {"map_name": "4x4"}),
    "frozen_lake 8": (lambda: envs.frozen_lake(8), FrozenLakeEnv, {"map_name": "8x8"}),
    "dry lake": (lambda: envs.frozen_lake(4, slippery=False), FrozenLakeEnv, {"is_slippery": False}),
    "cliff": (envs.cliff_walking, CliffWalkingEnv, {}),
    "slippery cliff": (lambda: envs.cliff_walking(slippery=True), CliffWalkingEnv, {"is_slippery": True}),
    "taxi": (envs.taxi, TaxiEnv, {}),
}


def gymnasium_table(make, settings):
    """Gymnasium's P as arrays: transitions [S, A, S], expected rewards [S, A], the probability to go on [S, A, S]."""
    table = make(**settings).P
    S, A = len(table), len(table[0])
    P, r, goes_on = np.zeros((S, A, S)), np.zeros((S, A)), np.zeros((S, A, S))
    for s, actions in table.items():
        for a, outcomes in actions.items():
            for p, successor, reward, terminated in outcomes:
                P[s, a, successor] += p
                r[s, a] += p * reward
                goes_on[s, a, successor] += p * (not terminated)
    return P, r, goes_on


@pytest.mark.parametrize("name", WORLDS)
def test_worlds_are_gymnasiums(name):
    """Every transition and reward outside of the terminal states, and the optimal values at three discounts."""
    make, gymnasiums, settings = WORLDS[name]
    mdp = make()
    live = ~np.asarray(mdp.terminal)
    dense = envs.to_dense(mdp) if isinstance(mdp, envs.SparseMDP) else mdp
    P, r, goes_on = gymnasium_table(gymnasiums, settings)
    np.testing.assert_allclose(np.asarray(dense.P)[live], P[live], atol=1e-12)
    np.testing.assert_allclose(np.asarray((dense.P * dense.R).sum(-1))[live], r[live], atol=1e-12)
    np.testing.assert_allclose((np.asarray(dense.P) * live)[live], goes_on[live], atol=1e-12)
    for gamma in GAMMAS:
        v = np.zeros(len(P))
        for _ in range(20_000):
            before, v = v, (r + gamma * goes_on @ v).max(-1)
            if np.abs(v - before).max() < 1e-13:
                break
        found = np.asarray(values.value_iteration(mdp, gamma, tolerance=1e-9).values)
        np.testing.assert_allclose(found[live], v[live], atol=1e-6)


def test_start_states_are_gymnasiums():
    for make, gymnasiums, settings in WORLDS.values():
        np.testing.assert_allclose(make().start, gymnasiums(**settings).initial_state_distrib, atol=1e-6)


GRIDS = {
    "grid_world": {"rows": 3, "columns": 4, "walls": [(1, 1), (-1, -1)], "goal": (0, -2), "trap": (1, 2)},
    "frozen_lake": {"size": 8, "slippery": False},
    "cliff_walking": {},
}


@pytest.mark.parametrize("name", GRIDS)
def test_the_grid_of_a_world_is_that_of_its_states(name):
    """Cells with a label are ends, walls and the cliff; from any other an action leads where its move points."""
    mdp, grid = envs.MDPS[name](**GRIDS[name]), grid_of(name, GRIDS[name])
    dense = envs.to_dense(mdp) if isinstance(mdp, envs.SparseMDP) else mdp
    P, terminal, pays = np.asarray(dense.P), np.asarray(dense.terminal), np.asarray(dense.R).max((0, 1)) > 0
    size = grid.rows, grid.columns
    labelled = np.zeros(size, bool)
    for cell, label in grid.labels.items():
        labelled[cell], state = True, np.ravel_multi_index(cell, size)
        assert (label in ("+1", "goal")) == (terminal[state] if name == "cliff_walking" else pays[state])
    np.testing.assert_array_equal(labelled.ravel(), terminal | (P.sum((0, 1)) == 0))
    for cell in np.argwhere(~labelled):
        for action, move in enumerate(grid.moves):
            reached = tuple(np.clip(cell + move, 0, np.array(size) - 1).tolist())
            if grid.labels.get(reached) != "":
                likeliest = P[np.ravel_multi_index(cell, size), action].argmax()
                assert np.unravel_index(likeliest, size) == reached


def linear_program(mdp, gamma):
    """Optimal values as the least v with v >= r + gamma P v for every action. Source: Puterman 1994, section 6.9."""
    P, r = np.asarray(mdp.P) * ~np.asarray(mdp.terminal), np.asarray((mdp.P * mdp.R).sum(-1))
    S, A = r.shape
    bounds = np.repeat(np.eye(S), A, axis=0) - gamma * P.reshape(S * A, S)
    return linprog(np.ones(S), A_ub=-bounds, b_ub=-r.ravel(), bounds=(None, None)).x


METHODS = {
    "value iteration": values.value_iteration,
    "value iteration, Gauss-Seidel": partial(values.value_iteration, order=values.gauss_seidel),
    "policy iteration": values.policy_iteration,
    "policy iteration, Gauss-Seidel": partial(values.policy_iteration, order=values.gauss_seidel),
    "modified policy iteration": partial(values.policy_iteration, max_sweeps=5),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_methods_find_what_a_linear_program_finds(method, sparse):
    for mdp in (envs.random_mdp(jax.random.key(0), 12, 3), envs.grid_world(4, 5, walls=[(1, 1)])):
        for gamma in (0.0, 0.9, 0.99):
            plan = METHODS[method](envs.to_sparse(mdp) if sparse else mdp, gamma, tolerance=1e-8)
            np.testing.assert_allclose(plan.values, linear_program(mdp, gamma), atol=1e-7)
            followed = envs.state_values(mdp, plan.policy, gamma)
            np.testing.assert_allclose(followed, plan.values, atol=1e-5)


def test_policy_evaluation_is_the_linear_solve():
    mdp = envs.random_mdp(jax.random.key(1), 8, 3)
    policy = jax.nn.softmax(jax.random.normal(jax.random.key(2), (8, 3)))
    for form in (mdp, envs.to_sparse(mdp)):
        for order in (values.synchronous, values.gauss_seidel):
            swept = values.policy_evaluation(form, policy, 0.95, tolerance=1e-9, order=order)
            np.testing.assert_allclose(swept, envs.state_values(mdp, policy, 0.95), atol=1e-8)
        np.testing.assert_allclose(envs.state_values(form, policy, 0.95), envs.state_values(mdp, policy, 0.95))


PLANNED = {
    "value iteration": lambda mdp: values.value_iteration(mdp, 0.9).values,
    "policy iteration": lambda mdp: values.policy_iteration(mdp, 0.9).values,
    "policy evaluation": lambda mdp: values.policy_evaluation(mdp, jnp.full((5, 2), 0.5), 0.9),
    "finite horizon": lambda mdp: values.finite_horizon(mdp, 0.9, 3).values,
}


@pytest.mark.parametrize("name", PLANNED)
def test_what_terminal_states_hold_is_in_no_plan(name):
    """Their values are 0 whatever is rewarded there, and wherever they seem to lead."""
    mdp = envs.random_mdp(jax.random.key(0), 5, 2)
    ends = mdp.terminal[:, None, None]
    poisoned = mdp._replace(R=jnp.where(ends, 1000.0, mdp.R), P=jnp.where(ends, 0.2, mdp.P))
    found = PLANNED[name](poisoned)
    np.testing.assert_allclose(found, PLANNED[name](mdp), atol=1e-9)
    np.testing.assert_array_equal(found[..., mdp.terminal], 0)


@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_of_actions_that_differ_by_rounding_the_first_is_taken(gamma):
    P = jnp.zeros((2, 2, 2)).at[:, :, 1].set(1.0)
    for more, best in ((2.0**-52, 0), (1e-9, 1)):
        R = jnp.zeros((2, 2, 2)).at[0, :, 1].set(jnp.array([1.0, 1.0 + more]))
        mdp = envs.MDP(P, R, jnp.array([1.0, 0.0]), jnp.array([False, True]))
        assert greedy_policy(mdp, jnp.zeros(2), gamma)[0].argmax() == best


@pytest.mark.parametrize("gamma", [0.5, 0.9, 0.99])
def test_a_sweep_brings_the_values_closer_by_gamma(gamma):
    mdp = envs.random_mdp(jax.random.key(3), 10, 3)
    exact = values.value_iteration(mdp, gamma, tolerance=1e-12).values
    errors = [float(jnp.abs(s.values - exact).max()) for s in values.value_iteration_steps(mdp, gamma)]
    assert len(errors) > 5
    assert all(after <= gamma * before + 1e-12 for before, after in itertools.pairwise(errors))


@pytest.mark.parametrize("gamma", [0.9, 0.99])
def test_values_are_within_the_tolerance(gamma):
    """Also where changes are small and many: a change below the tolerance would end far too early."""
    mdp = envs.grid_world()
    exact = values.value_iteration(mdp, gamma, tolerance=1e-12).values
    for tolerance in (1e-1, 1e-3, 1e-6):
        error = float(jnp.abs(values.value_iteration(mdp, gamma, tolerance=tolerance).values - exact).max())
        assert error <= tolerance


def test_float32_ends_at_its_rounding():
    with jax.enable_x64(False):
        plan = values.value_iteration(envs.frozen_lake(8), 0.999, tolerance=1e-12)
        assert int(plan.sweeps) < 10_000
        assert float(plan.change) < 1e-6


STEPPED = {
    "discounted": (lambda: envs.grid_world(slip=0.1), 0.9),
    "the first values are 0": (
        lambda: envs.grid_world(2, 2, living_cost=0.0, slip=0.0, goal=(0, 0), trap=(1, 1), start=(1, 0)),
        0.9,
    ),
    "a cost below the tolerance": (
        lambda: envs.grid_world(5, 7, living_cost=5e-7, goal=(2, 4), trap=(0, 3), start=(0, 0)),
        1.0,
    ),
    "staying is best": (lambda: stay_or_end(), 1.0),
}


@pytest.mark.parametrize("name", STEPPED)
def test_steps_are_those_of_the_methods(name):
    make, gamma = STEPPED[name]
    mdp = make()
    for steps, method in (
        (values.value_iteration_steps, values.value_iteration),
        (values.policy_iteration_steps, values.policy_iteration),
    ):
        shown, plan = list(itertools.islice(steps(mdp, gamma), 2_000)), method(mdp, gamma)
        np.testing.assert_allclose(shown[-1].values, plan.values, atol=1e-9)
        np.testing.assert_array_equal(shown[-1].policy, plan.policy)
        assert shown[0].kind == "start"
        swept = [step.kind in ("sweep", "evaluation") for step in shown]
        assert sum(swept) == plan.sweeps
        assert [step.sweeps for step in shown] == np.cumsum(swept).tolist()


@pytest.mark.parametrize("name", STEPPED)
def test_improvements_alone_are_those_among_every_sweep(name):
    make, gamma = STEPPED[name]
    every = [step for step in values.policy_iteration_steps(make(), gamma) if step.kind != "evaluation"]
    alone = list(values.policy_iteration_steps(make(), gamma, every_sweep=False))
    assert [(step.kind, step.sweeps) for step in alone] == [(step.kind, step.sweeps) for step in every]
    for one, other in zip(alone, every, strict=True):
        np.testing.assert_allclose(one.values, other.values, atol=1e-9)
        np.testing.assert_array_equal(one.policy, other.policy)


def test_sweeps_that_end_at_their_limit_are_counted():
    mdp = envs.grid_world(slip=0.1)
    for method in (values.value_iteration, values.policy_iteration):
        assert method(mdp, 0.9).unfinished == 0
    plan = values.value_iteration(mdp, 0.9)
    for fewer, unfinished in ((0, 0), (1, 1)):
        assert values.value_iteration(mdp, 0.9, max_sweeps=int(plan.sweeps) - fewer).unfinished == unfinished
    plan = values.policy_iteration(mdp, 0.9, max_sweeps=2, max_improvements=3)
    assert (int(plan.sweeps), int(plan.unfinished)) == (8, 4)  # the first evaluation, and one after each improvement


def test_the_first_evaluation_is_not_the_last():
    """The goal and the trap are as near as each other from both cells, so nothing is worth anything at first."""
    mdp, gamma = STEPPED["the first values are 0"][0](), 0.9
    steps = list(values.policy_iteration_steps(mdp, gamma))
    assert not np.any(steps[1].values)
    np.testing.assert_array_equal(steps[-1].values, [0, 1, 1, 0])


def test_policy_iteration_step_by_step_ends_after_so_many_improvements():
    for most in (0, 1, 2):
        steps = list(values.policy_iteration_steps(envs.grid_world(), 0.9, max_improvements=most))
        plan = values.policy_iteration(envs.grid_world(), 0.9, max_improvements=most)
        assert sum(step.kind == "improvement" for step in steps) == most + 1  # and the greedy policy at the end
        np.testing.assert_allclose(steps[-1].values, plan.values, atol=1e-9)
        np.testing.assert_array_equal(steps[-1].policy, plan.policy)


def stay_or_end():
    """A state in which to stay costs nothing, and to end costs 1."""
    P = jnp.zeros((2, 2, 2)).at[0, 0, 0].set(1).at[0, 1, 1].set(1).at[1, :, 1].set(1)
    return envs.MDP(P, jnp.zeros((2, 2, 2)).at[0, 1, 1].set(-1.0), jnp.array([1.0, 0.0]), jnp.array([False, True]))


@pytest.mark.parametrize("method", METHODS)
def test_with_a_discount_of_one_nothing_is_better_than_a_loss(method):
    """To stay for ever is better than the only end, also where most moves may slip into it."""
    plan = METHODS[method](stay_or_end(), 1.0)
    np.testing.assert_array_equal(plan.values, [0, 0])
    assert plan.policy[0].tolist() == [1, 0]
    only_a_trap = envs.grid_world(3, 3, living_cost=0.0, goal=(0, 2), walls=[(0, 1), (1, 2)], trap=(2, 2))
    found = METHODS[method](only_a_trap, 1.0).values
    np.testing.assert_allclose(found, np.zeros(9), atol=1e-6)  # by steps into the walls


def test_finite_horizon_is_the_best_of_all_plans():
    """Two actions, three steps: every plan that knows the steps left, by enumeration of its rewards."""
    mdp = envs.random_mdp(jax.random.key(4), 4, 2)
    plan = values.finite_horizon(mdp, 0.9, 3)
    q = jnp.zeros(4)
    P, R, terminal = (np.asarray(x) for x in (mdp.P, mdp.R, mdp.terminal))
    best = np.zeros(4)
    for h in range(1, 4):
        q = np.array(
            [[sum(P[s, a, x] * (R[s, a, x] + 0.9 * best[x]) for x in range(4)) for a in (0, 1)] for s in range(4)]
        )
        best = np.where(terminal, 0.0, q.max(-1))
        np.testing.assert_allclose(plan.values[h], best, atol=1e-12)
        np.testing.assert_array_equal(plan.policy[h].argmax(-1)[~terminal], q.argmax(-1)[~terminal])
    lake = envs.frozen_lake()
    within = values.finite_horizon(lake, 1.0, 100).values[-1][0]
    fixed = envs.expected_return(lake, values.value_iteration(lake, 1.0).policy, 1.0, horizon=100)
    assert float(fixed) <= float(within) < 0.8236  # 14/17 without a time limit


@pytest.mark.parametrize("size", [4, 8])
def test_with_a_discount_of_one_the_policy_still_arrives(size):
    """On dry ice every safe move is as good; one that only avoids holes would never arrive."""
    mdp = envs.frozen_lake(size, slippery=False)
    for method in METHODS.values():
        policy = method(mdp, 1.0).policy
        assert float(envs.expected_return(mdp, policy, 1.0, horizon=2 * size - 2)) == 1.0
    careless = jax.nn.one_hot(envs.action_values(mdp, values.value_iteration(mdp, 1.0).values, 1.0).argmax(-1), 4)
    assert float(envs.expected_return(mdp, careless, 1.0, horizon=100)) == 0.0


@pytest.mark.parametrize("size", [4, 8])
def test_success_within_the_time_limit_exact_and_simulated(size):
    mdp, limit = envs.frozen_lake(size), {4: 100, 8: 200}[size]
    policy = values.value_iteration(mdp, 0.99).policy
    exact = float(envs.expected_return(mdp, policy, 1.0, horizon=limit))
    episodes = 4_000
    played = values.sample_episodes(mdp, policy, jax.random.key(0), num_episodes=episodes, time_limit=limit)
    success = float((played.reward * played.mask).sum(0).mean())
    assert success == pytest.approx(exact, abs=4 * (exact * (1 - exact) / episodes) ** 0.5)


def test_discounts_slips_and_places_of_the_goal_are_mapped_over():
    def start_value(gamma, slip, goal):
        mdp = envs.grid_world(5, 5, slip=slip, goal=goal)
        return mdp.start @ values.value_iteration(mdp, gamma).values

    gammas, slips, goals = jnp.array([0.9, 0.95]), jnp.array([0.0, 0.3]), jnp.array([[0, 4], [2, 2]])
    together = jax.jit(jax.vmap(start_value))(gammas, slips, goals)
    alone = [start_value(0.9, 0.0, (0, 4)), start_value(0.95, 0.3, (2, 2))]
    np.testing.assert_allclose(together, alone, atol=1e-6)
    by_gamma = jax.vmap(lambda gamma: values.policy_iteration(envs.frozen_lake(), gamma).values[0])(gammas)
    assert float(by_gamma[0]) < float(by_gamma[1])


def test_sparse_and_dense_are_the_same_world():
    dense, sparse = envs.grid_world(5, 6, slip=0.3), envs.sparse_grid_world(5, 6, slip=0.3)
    assert sparse.successors.shape == (30, 4, 3)
    for back in (envs.to_dense(sparse), envs.to_dense(envs.to_sparse(dense))):
        np.testing.assert_allclose(back.P, dense.P, atol=1e-12)
        np.testing.assert_allclose(back.R, dense.R, atol=1e-12)
    np.testing.assert_allclose(
        values.value_iteration(sparse, 0.99, tolerance=1e-9).values,
        values.value_iteration(dense, 0.99, tolerance=1e-9).values,
        atol=1e-8,
    )


def test_a_sparse_world_is_sampled():
    """The cliff's edge: a step to the right of the start falls, and the episode goes on."""
    env = envs.make("cliff_walking")
    state, _ = env.reset(jax.random.key(0))
    after, timestep = env.step(jax.random.key(1), state, jnp.int32(1))
    assert (int(after.position), float(timestep.reward), bool(timestep.last)) == (36, -100.0, False)
    after, timestep = env.step(jax.random.key(1), state, jnp.int32(0))
    assert (int(after.position), float(timestep.reward), float(timestep.discount)) == (24, -1.0, 1.0)


REFUSED = {
    "discount": (lambda: (envs.frozen_lake(), 1.5), "between 0 and 1, not 1.5"),
    "nan": (lambda: (envs.frozen_lake(), float("nan")), "between 0 and 1"),
    "rows": (lambda: (envs.frozen_lake()._replace(P=envs.frozen_lake().P * 0.9), 0.9), "state 0 and action 0.*0.9"),
    "rewards": (lambda: (envs.frozen_lake()._replace(R=envs.frozen_lake().R * jnp.nan), 0.9), "finite"),
    "no end": (lambda: (envs.frozen_lake()._replace(terminal=jnp.zeros(16, bool)), 0.9), "No terminal state"),
    "walled in": (lambda: (envs.grid_world(4, 4, walls=[(2, 0), (2, 1), (3, 1)]), 0.9), "No terminal state"),
    "trapped": (lambda: (lake_with_a_pit(), 1.0), "state 1 has none"),
    "trapped, if ever there": (lambda: (envs.grid_world(4, 4, walls=[(2, 3), (3, 2)]), 1.0), "state 15 has none"),
    "paid for living": (lambda: (envs.grid_world(living_cost=-0.01), 1.0), "as from state 0, whose value is infinite"),
    "paid now and then": (lambda: (circle(0.0, 1.0), 1.0), "as from state [01], whose value"),
}


def circle(there, back):
    """From state 0 to state 1 and back, with these rewards; state 1 may also end for nothing."""
    P = jnp.zeros((3, 2, 3)).at[0, :, 1].set(1).at[1, 0, 0].set(1).at[1, 1, 2].set(1).at[2, :, 2].set(1)
    R = jnp.zeros((3, 2, 3)).at[0, :, 1].set(there).at[1, 0, 0].set(back)
    return envs.MDP(P, R, jnp.array([1.0, 0.0, 0.0]), jnp.array([False, False, True]))


def paid_once():
    """A reward on the way to a state from which nothing leads back, and in which to stay costs nothing."""
    return circle(1.0, 0.0)._replace(P=circle(1.0, 0.0).P.at[1, 0].set(jnp.array([0.0, 1.0, 0.0])))


def lake_with_a_pit():
    """A state that only leads to itself, and does not end the episode."""
    mdp = envs.frozen_lake()
    return mdp._replace(P=mdp.P.at[1].set(jnp.eye(16)[1]))


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_values_is_refused(name):
    make, sentence = REFUSED[name]
    with pytest.raises(UserError, match=sentence):
        check_mdp(*make())


@pytest.mark.parametrize("gamma", [1.5, -0.1, float("nan"), jnp.float32(1.5)])
def test_methods_refuse_what_is_no_discount(gamma):
    """Also where it is an array; one that is traced is not known, and passes."""
    mdp = envs.random_walk(5)
    for method in (values.value_iteration, values.policy_iteration, partial(values.policy_evaluation, policy=None)):
        with pytest.raises(UserError, match="The discount must be between 0 and 1, not"):
            method(mdp, gamma=gamma)
    jax.vmap(lambda gamma: values.value_iteration(mdp, gamma).values)(jnp.array([0.5, 1.0]))


def test_methods_refuse_the_name_of_an_order():
    mdp = envs.random_walk(5)
    evaluation = partial(values.policy_evaluation, policy=jnp.ones((7, 1)))
    for method in (values.value_iteration, values.policy_iteration, evaluation):
        with pytest.raises(UserError, match=r"order is a function, .*values\.gauss_seidel, not 'gauss_seidel'"):
            method(mdp, gamma=0.9, order="gauss_seidel")


def test_methods_refuse_lists_and_a_horizon_below_0():
    mdp = envs.random_walk(5)
    with pytest.raises(UserError, match="rewards of an MDP is an array, not a list"):
        values.value_iteration(mdp._replace(rewards=mdp.rewards.tolist()), 0.9)
    with pytest.raises(UserError, match="at least 0, not -2"):
        values.finite_horizon(mdp, 0.9, -2)
    assert values.finite_horizon(mdp, 0.9, 0).values.shape[0] == 1


def test_a_second_look_at_worlds_of_the_same_shape_compiles_nothing(caplog):
    def compilations(mdp):
        caplog.clear()
        with jax.log_compiles():
            check_mdp(mdp, 1.0)
        return sum(record.message.startswith("Compiling ") for record in caplog.records)

    first, second = (envs.random_mdp(jax.random.key(key), 13, 3) for key in (0, 1))
    assert compilations(first._replace(R=-jnp.ones_like(first.R))) > 0
    assert compilations(second._replace(R=-jnp.ones_like(second.R))) == 0


def test_what_has_values_is_not_refused():
    check_mdp(lake_with_a_pit(), 0.9)
    check_mdp(circle(0.0, 1.0), 0.9)
    check_mdp(stay_or_end(), 1.0)
    check_mdp(paid_once(), 1.0)
    assert values.policy_iteration(paid_once(), 1.0).values.tolist() == [1, 0, 0]
    for make in envs.MDPS.values():
        check_mdp(make(), 1.0)


def test_a_fair_game_pays_nothing_however_it_is_rounded():
    """To stay is a lottery with the expected reward 0, which is above 0 by rounding; to end costs 1."""
    chance, win = 0.3, 1.5
    lottery, end = [win, -chance * win / (1 - chance)], [-1.0, -1.0]
    mdp = envs.SparseMDP(
        successors=jnp.array([[[0, 0], [1, 1]], [[1, 1], [1, 1]]], jnp.int32),
        probabilities=jnp.array([[[chance, 1 - chance], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]]]),
        rewards=jnp.array([[lottery, end], [[0.0, 0.0], [0.0, 0.0]]]),
        start=jnp.array([1.0, 0.0]),
        terminal=jnp.array([False, True]),
    )
    assert tabular.expected_rewards(mdp)[0, 0] > 0
    check_mdp(mdp, 1.0)


def test_what_would_follow_the_end_of_an_episode_pays_nothing():
    """A terminal state is entered and not left, wherever its row of P leads."""
    P = jnp.zeros((2, 1, 2)).at[0, 0, 1].set(1).at[1, 0, 0].set(1)
    R = jnp.zeros((2, 1, 2)).at[0, 0, 1].set(1.0)
    check_mdp(envs.MDP(P, R, jnp.array([1.0, 0.0]), jnp.array([False, True])), 1.0)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: envs.grid_world(4, 4, goal=(4, 0)), "outside of the 4 x 4 grid"),
        (lambda: envs.grid_world(4, 4, walls=[(0, 3)]), "walls and goal are both in the cell"),
        (lambda: envs.grid_world(4, 4, trap=(0, 3)), "trap and goal are both in the cell"),
        (lambda: envs.grid_world(4, 4, start=(0, 3)), "start and goal are both in the cell"),
        (lambda: envs.grid_world(4, 4, start=(-5, 0)), r"start \(-5, 0\) is outside of the 4 x 4 grid"),
        (lambda: envs.random_walk(4), "length must be odd and positive"),
    ],
)
def test_worlds_that_make_no_sense_are_refused(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()


@pytest.mark.full
def test_actions_that_differ_by_rounding_do_not_keep_policy_iteration_going() -> None:
    """Far from its goal a large grid has many; changing between them for ever takes all improvements allowed."""
    plan = values.policy_iteration(envs.sparse_grid_world(30, 30), 0.99, max_sweeps=20)
    best = values.value_iteration(envs.sparse_grid_world(30, 30), 0.99)
    assert int(plan.improvements) < 30
    assert jnp.abs(plan.values - best.values).max() < 1e-5
    assert (plan.policy.max(-1) == 1).all()


@pytest.mark.parametrize("gamma", [0.9, 0.99, 1.0])
def test_sweeps_end_where_only_rounding_is_left(gamma: float) -> None:
    """A backup adds three outcomes and a reward, each sum rounded by half an eps, and two sweeps differ by twice that.

    On a grid of a million cells changes stay at 5 eps for ever.
    """
    worth = jnp.full(4, -4.0, jnp.float32)
    assert smallest_change(worth, gamma, 1e-9) > 6 * jnp.finfo(worth.dtype).eps * 4


def best_by_enumeration(successors: np.ndarray, rewards: np.ndarray) -> np.ndarray | None:
    """What the best of all deterministic policies earns from each state without a discount; the last state is the end.

    None where some circle gains, or is worth nothing by gains and losses in turn: the sum has no limit then.
    """
    end = len(successors) - 1
    best = np.full(len(successors), -np.inf)
    best[end] = 0
    for policy in itertools.product(range(successors.shape[1]), repeat=end):
        for start in range(end):
            visited: dict[int, int] = {}
            earned: list[float] = []
            state = start
            while state != end and state not in visited:
                visited[state] = len(earned)
                earned.append(rewards[state, policy[state]])
                state = successors[state, policy[state]]
            circle = [] if state == end else earned[visited[state] :]
            if sum(circle) > 0 or (sum(circle) == 0 and any(circle)):
                return None
            if sum(circle) == 0:
                best[start] = max(best[start], sum(earned))
    return best


@pytest.mark.parametrize("order", [values.planning.synchronous, values.planning.gauss_seidel])
def test_resting_for_nothing_among_gains_and_losses(order: values.planning.Order) -> None:
    """Without a discount, a gain that a loss follows must not stay in a state in which one can rest."""
    rng, found = np.random.default_rng(0), 0
    given = [(np.array([[0, 1], [2, 2], [2, 2]]), np.array([[0.0, 1.0], [-1.0, -1.0], [0.0, 0.0]]))]
    while found < 40:
        successors, rewards = given.pop() if given else (rng.integers(0, 5, (5, 2)), rng.integers(-2, 3, (5, 2)) * 1.0)
        end = len(successors) - 1
        successors[end], rewards[end] = end, 0
        best = best_by_enumeration(successors, rewards)
        if best is None or not np.isfinite(best).all():
            continue
        found += 1
        first, terminal = np.arange(end + 1) == 0, np.arange(end + 1) == end
        certain = jnp.ones((*successors.shape, 1))
        mdp = envs.tabular.SparseMDP(successors[..., None], certain, rewards[..., None], 1.0 * first, terminal)
        mdp = jax.tree.map(jnp.asarray, mdp)
        np.testing.assert_allclose(values.value_iteration(mdp, 1.0, order=order).values, best, atol=1e-5)
        for most in (1, 5, 100_000):
            found_values = values.policy_iteration(mdp, 1.0, order=order, max_sweeps=most).values
            np.testing.assert_allclose(found_values, best, atol=1e-5)


def gain_before_a_loss(length: int) -> envs.MDP:
    """State 0 rests for nothing, or leaves for 1; so many states on, each for nothing, the last step costs 2."""
    last = length + 1
    successors = np.minimum(np.arange(last + 1) + 1, last)
    P = np.zeros((last + 1, 2, last + 1))
    P[np.arange(last + 1), :, successors] = 1
    P[0, 0] = np.eye(last + 1)[0]
    R = np.zeros_like(P)
    R[0, 1, 1], R[length, :, last] = 1, -2
    of_states = np.arange(last + 1)
    return envs.MDP(*map(jnp.asarray, (P, R, 1.0 * (of_states == 0), of_states == last)))


@pytest.mark.parametrize("order", [values.planning.synchronous, values.planning.gauss_seidel])
@pytest.mark.parametrize("max_sweeps", [1, 5, 7])
def test_few_sweeps_do_not_stop_short_of_a_loss(max_sweeps: int, order: values.planning.Order) -> None:
    """The values of an evaluation that was cut short would be above the optimal ones, and resting keeps them there."""
    for length in (5, 8):
        mdp = gain_before_a_loss(length)
        check_mdp(mdp, 1.0)
        best = [0.0] + [-2.0] * length + [0.0]
        found = values.policy_iteration(mdp, 1.0, max_sweeps=max_sweeps, order=order)
        np.testing.assert_allclose(found.values, best, atol=1e-5)
        swept = values.value_iteration(mdp, 1.0, max_sweeps=max_sweeps, order=order)
        assert float(swept.values[0]) <= 1e-5


def test_value_iteration_step_by_step_begins_below_the_optimal_values() -> None:
    mdp = gain_before_a_loss(8)
    plan, steps = values.value_iteration(mdp, 1.0), list(values.value_iteration_steps(mdp, 1.0))
    np.testing.assert_allclose(steps[-1].values, plan.values, atol=1e-9)
    np.testing.assert_allclose(plan.values, [0.0] + [-2.0] * 8 + [0.0], atol=1e-5)
    assert [step.kind for step in steps] == ["start"] + ["sweep"] * int(plan.improvements)
