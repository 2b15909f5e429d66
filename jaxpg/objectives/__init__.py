"""The mathematics: returns, advantages, surrogate losses, loss weights, KL penalties, and metrics of a critic."""

from jaxpg.objectives import adaptation, advantages, kl, loss_weights, metrics, returns, surrogates

__all__ = [
    "adaptation",
    "advantages",
    "kl",
    "loss_weights",
    "metrics",
    "returns",
    "surrogates",
]
