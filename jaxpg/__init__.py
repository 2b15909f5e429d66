"""Policy gradients in JAX, from REINFORCE to R1: algorithms as records of small pure functions."""
