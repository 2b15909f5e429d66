"""LunarLander-v3 in JAX: the world of Gymnasium's environment, with the physics of Box2D."""

from jaxpg.envs.lunar_lander.craft import HEIGHT, PAD, WIDTH, outlines
from jaxpg.envs.lunar_lander.environment import LunarLanderState, lunar_lander

__all__ = [
    "HEIGHT",
    "PAD",
    "WIDTH",
    "LunarLanderState",
    "lunar_lander",
    "outlines",
]
