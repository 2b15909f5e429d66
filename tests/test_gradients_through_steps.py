"""Gradients with respect to a setting, through `step` and the parameters that it returns, beside finite differences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpg import ladder, networks, update
from jaxpg.objectives import advantages
from jaxpg.policy_gradient import policy_gradient
from jaxpg.types import Array, Transition
from jaxpg.vectorize import scan_packed

SMALL: dict[str, Any] = {"num_envs": 4, "num_steps": 8, "learning_rate": 0.1, "max_grad_norm": None}
MINIBATCHES: dict[str, Any] = SMALL | {"epochs": 2, "num_minibatches": 2}
WAYS = {
    "one gradient": partial(ladder.a2c, **SMALL),
    "minibatches": partial(ladder.ppo, **MINIBATCHES),
    "minibatches in chunks": partial(ladder.ppo, **MINIBATCHES, chunk_rows=4),
}


def credit(steps: Transition, values: Array, next_values: Array, baseline: Array, *, gamma: Array, w: Array) -> Any:
    """The reward of each step, weighed by w; values are constants to the policy."""
    return advantages.Credit(w * steps.reward, w * steps.reward, baseline)


def ratio(log_prob: Array, old_log_prob: Array, advantage: Array) -> Array:
    """A surrogate without `stop_gradient`."""
    return -jnp.exp(log_prob - old_log_prob) * advantage


def after_two_steps(make: Callable[..., Any], w: Array) -> Array:
    """A number that depends on every parameter of the policy after two iterations."""
    env = tiny.counter(time_limit=5)
    algorithm = make()._replace(
        credit=partial(credit, w=w), surrogate=ratio, optimizer=update.sgd, normalize=advantages.unchanged
    )
    learner = policy_gradient(env, *networks.mlp(env, hidden=(4,)), algorithm)
    state = learner.init(jax.random.key(0))
    for i in range(2):
        state, _ = learner.step(state, jax.random.key(i))
    return sum(jnp.sin(3 * x).sum() for x in jax.tree.leaves(state.params.policy))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("gathers_words", [False, True])
def test_a_weight_of_the_rewards_has_the_gradient_of_finite_differences(
    way: str, gathers_words: bool, machine_with: Callable[..., None]
) -> None:
    machine_with(gathers_words=gathers_words)
    number = jax.jit(partial(after_two_steps, WAYS[way]))
    w, h = jnp.asarray(1.0), 1e-2
    slope = (number(w + h) - number(w - h)) / (2 * h)
    for derivative in (jax.grad, jax.jacfwd):
        np.testing.assert_allclose(jax.jit(derivative(number))(w), slope, rtol=2e-3)
    assert abs(float(slope)) > 1e-2


def test_what_a_loop_stores_keeps_its_gradient(machine_with: Callable[..., None]) -> None:
    """Also where the arrays of a step are one vector of words; integers and truth values are as they were."""
    machine_with(packs_outputs=True)

    def steps(x: Array) -> tuple[Array, Array, Array]:
        def step(carry: Array, t: Array) -> Any:
            return carry * x, (carry * x, t - 5, t > 2)

        return scan_packed(step, jnp.ones(3), jnp.arange(4))[1]

    def total(x: Array) -> Array:
        return steps(x)[0].sum()

    powers, number, late = jax.jit(steps)(2.0)
    np.testing.assert_array_equal(powers[:, 0], [2, 4, 8, 16])
    np.testing.assert_array_equal(number, [-5, -4, -3, -2])
    np.testing.assert_array_equal(late, [False, False, False, True])
    assert jax.grad(total)(2.0) == 3 * (1 + 4 + 12 + 32)
