"""Policies whose loss is random: what `Policy.noise` draws reaches every update, anew for each gradient step."""

from __future__ import annotations

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
from jaxpg.types import Critic, Env, Params, Policy, Rollout, Transition

ENV = tiny.target()
WHOLE = {"num_envs": 8, "learning_rate": 0.02}
ALGORITHMS = {
    "gradient_step": partial(ladder.reinforce, **WHOLE),
    "minibatch_epochs, chunks": partial(ladder.ppo, **WHOLE, num_steps=6, epochs=2, num_minibatches=1, chunk_rows=16),
    "minibatch_epochs, padding": partial(ladder.ppo, **WHOLE, num_steps=None, epochs=2, num_minibatches=1),
    "trust_region_step": partial(ladder.trpo, **WHOLE, num_steps=6, value_minibatches=1, conjugate_steps=4),
}


def shifted(env: Env, shift: Any, *, as_noise: bool) -> tuple[Policy, Critic]:
    """A policy whose losses see all means `shift` higher: by its noise, or by itself in all that is not acting."""
    policy, critic = networks.mlp(env, hidden=(4,))

    def evaluate(params: Any, rollout: Rollout, noise: Any = 0.0 if as_noise else shift) -> Any:
        distribution = policy.evaluate(params, rollout)
        return distribution._replace(mean=distribution.mean + noise)

    def noise(key: Any, shape: tuple[int, int]) -> Any:
        return jnp.full((*shape, 2), shift)

    return policy._replace(evaluate=evaluate, noise=noise if as_noise else None), critic


@pytest.mark.full
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_update_reads_the_noise(name: str, machine_with: Any) -> None:
    """Noise that is always the same number gives what a policy with that number in it gives, and another than none."""
    machine_with(chunk_padded=8)

    @partial(tiny.jit, static_argnums=1)
    def after(shift: Any, as_noise: bool) -> Any:
        learner = policy_gradient(ENV, *shifted(ENV, shift, as_noise=as_noise), ALGORITHMS[name]())
        state, _ = learner.step(learner.init(jax.random.key(0)), jax.random.key(1))
        return jax.flatten_util.ravel_pytree(state.params.policy)[0]

    noisy, built_in, without = after(0.3, True), after(0.3, False), after(0.0, False)
    np.testing.assert_allclose(noisy, built_in, rtol=1e-4, atol=1e-6)
    assert np.abs(noisy - without).max() > 1e-4


@pytest.mark.full
@pytest.mark.parametrize(("epochs", "num_minibatches"), [(1, 4), (4, 1)])
def test_every_gradient_step_has_noise_of_its_own(epochs: int, num_minibatches: int) -> None:
    """A number for each of four steps, and no other for the second chunk of one."""
    T, B = 2, 32
    ones = jnp.ones((T, B))
    steps = Transition(jnp.arange(T * B).reshape(T, B), ones, ones, ones, ones, ones > 1, ones)
    batch = update.Batch(Rollout(steps, ones), ones, ones, ones, ones, (), ())

    def loss(params: Params, batch: update.Batch) -> Any:
        return (batch.noise * params.policy[batch.rollout.steps.obs]).sum(), {}

    def noise(key: Any, shape: tuple[int, int]) -> Any:
        return jnp.full(shape, jnp.left_shift(1, jax.random.randint(key, (), 0, 20)), jnp.float32)

    objective = update.Objective(loss, None, None, advantages.unchanged, needs_trajectories=False, noise=noise)
    params, *_ = update.minibatch_epochs(
        objective, update.sgd(), 1.0, Params(jnp.zeros(T * B), ()), (), batch, jax.random.key(1),
        epochs=epochs, num_minibatches=num_minibatches, chunk_rows=8,
    )  # fmt: skip
    sums = {int(x) for x in -np.asarray(params.policy)}  # of powers of two, so that the sum tells which
    assert len(sums) == num_minibatches
    assert {x.bit_count() for x in sums} == {epochs}
