"""The mathematics: returns, advantages, surrogate losses, loss weights and KL penalties."""

from jaxpg.objectives import advantages, kl, loss_weights, returns, surrogates

__all__ = [
    "advantages",
    "kl",
    "loss_weights",
    "returns",
    "surrogates",
]
