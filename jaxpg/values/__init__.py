"""Learning values: DQN and its descendants, with a replay buffer on the device, and PQN."""

from jaxpg.values.deep_q import DeepQ, deep_q
from jaxpg.values.dqn import (
    ALGORITHMS,
    PARENT,
    double_dqn,
    dqn,
    dueling_dqn,
    n_step_dqn,
    pqn,
    prioritized_dqn,
    qr_dqn,
    rainbow,
)
from jaxpg.values.q_networks import QNetwork, cnn, epsilon_greedy, epsilon_greedy_policy, mlp, q_network

__all__ = [
    "ALGORITHMS",
    "PARENT",
    "DeepQ",
    "QNetwork",
    "cnn",
    "deep_q",
    "double_dqn",
    "dqn",
    "dueling_dqn",
    "epsilon_greedy",
    "epsilon_greedy_policy",
    "mlp",
    "n_step_dqn",
    "pqn",
    "prioritized_dqn",
    "q_network",
    "qr_dqn",
    "rainbow",
]
