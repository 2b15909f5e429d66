"""Networks as Policy and Critic: MLP, CNN, recurrent networks and transformers."""

from jaxpg.models.distributions import Categorical, DiagonalGaussian, SquashedGaussian
from jaxpg.models.generation import completion_rollout, generate
from jaxpg.models.language_model import ChunkedCategorical, RewardModel, transformer, transformer_reward_model
from jaxpg.models.networks import cnn, mlp, recurrent

__all__ = [
    "Categorical",
    "ChunkedCategorical",
    "DiagonalGaussian",
    "RewardModel",
    "SquashedGaussian",
    "cnn",
    "completion_rollout",
    "generate",
    "mlp",
    "recurrent",
    "transformer",
    "transformer_reward_model",
]
