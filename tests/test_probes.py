"""Five environments, each of which needs one more part of the learner: the first that fails names the broken part."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import lax

from jaxpg import envs, ladder, networks
from jaxpg.policy_gradient import policy_gradient

GAMMA = 0.5

# probe: {observation: (value, action)}; the action is None where there is no choice.
SOLUTION = {
    "probe-value": {0.0: (1.0, None)},
    "probe-observation": {-1.0: (-1.0, None), 1.0: (1.0, None)},
    "probe-discount": {0.0: (GAMMA, None), 1.0: (1.0, None)},
    "probe-action": {0.0: (1.0, 1)},
    "probe-policy": {-1.0: (1.0, 0), 1.0: (1.0, 1)},
}
ALGORITHMS = {
    "a2c": (ladder.a2c(num_envs=16, num_steps=5, gamma=GAMMA, learning_rate=0.02), 300),
    "ppo": (ladder.ppo(num_envs=16, num_steps=8, gamma=GAMMA, learning_rate=0.01), 60),
}


@pytest.mark.device
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("probe", SOLUTION)
def test_probe_is_solved(probe, algorithm):
    env = envs.make(probe)
    policy, critic = networks.mlp(env, hidden=(8,))
    record, iterations = ALGORITHMS[algorithm]
    learner = policy_gradient(env, policy, critic, record)
    observations = jnp.array(list(SOLUTION[probe]))[:, None]

    def train(key):
        init_key, run_key = jax.random.split(key)
        state, _ = lax.scan(learner.step, learner.init(init_key), jax.random.split(run_key, iterations))
        params = state.params
        value, _ = critic.values(params, tiny.resting(observations))
        probabilities = jax.nn.softmax(policy.act(params.policy, (), observations)[0].logits)
        return value[0], probabilities

    values, probabilities = tiny.jit(train)(jax.random.key(0))
    for value, probability, (true_value, action) in zip(values, probabilities, SOLUTION[probe].values(), strict=True):
        np.testing.assert_allclose(value, true_value, atol=0.1)
        if action is not None:
            assert probability[action] > 0.95
