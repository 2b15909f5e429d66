"""PGX's games: the agent is player 0, and every other player makes a random legal move.

Who begins is drawn by PGX. A step is the agent's move and the moves of the others up to the agent's next turn or the
end of the game, and its reward is the sum of the agent's over these moves. What moves before the agent's first turn
bring is part of its first step's reward, and a game that they end is over with that step. Illegal actions are masked;
an algorithm that takes one all the same loses the game, as PGX has it.

`max_steps` counts moves of the agent, and is a time-out. Some games of PGX also end after a number of moves of both
players, which is a termination: chess and shogi after 512, gardner_chess and animal_shogi after 256, Go after twice as
many as its board has points. The observations of chess, gardner_chess and animal_shogi show how many there were.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pgx

from jaxpg.envs.adapting import as_env
from jaxpg.types import Array, Discrete, Env, Tree

AGENT = 0


def ids() -> list[str]:
    """The games that `pgx.make` knows."""
    return list(pgx.available_envs())


def default_settings(env_id: str) -> dict[str, Any]:
    """The time limit."""
    return {"max_steps": 1000}


def make(env_id: str, settings: dict[str, Any]) -> Env:
    """The game against random players."""
    env = pgx.make(env_id)

    def others_move(key: Array, state: Any) -> tuple[Any, Array]:
        """The state at the agent's next turn or at the end of the game, and the agent's rewards until then."""

        def waiting(carry: tuple[Array, Any, Array]) -> Array:
            state = carry[1]
            return (state.current_player != AGENT) & ~state.terminated

        def move(carry: tuple[Array, Any, Array]) -> tuple[Array, Any, Array]:
            key, state, reward = carry
            key, action_key, step_key = jax.random.split(key, 3)
            action = jax.random.categorical(action_key, jnp.where(state.legal_action_mask, 0.0, -jnp.inf))
            state = env.step(state, action.astype(jnp.int32), step_key)
            return key, state, reward + state.rewards[AGENT]

        _, state, reward = jax.lax.while_loop(waiting, move, (key, state, jnp.zeros((), jnp.float32)))
        return state, reward

    def reset(key: Array) -> tuple[Tree, Tree]:
        init_key, others_key = jax.random.split(key)
        state, before = others_move(others_key, env.init(init_key))
        return (state, before), env._observe(state, jnp.int32(AGENT))

    def step(key: Array, state: Any, action: Array) -> tuple[Tree, Tree, Array, Array]:
        step_key, others_key = jax.random.split(key)
        after = env.step(state[0], action, step_key)
        moved, reward = others_move(others_key, after)
        reward += state[1] + after.rewards[AGENT]
        return (moved, jnp.zeros_like(reward)), env._observe(moved, jnp.int32(AGENT)), reward, moved.terminated

    return as_env(
        env_id, reset, step, Discrete(env.num_actions), settings["max_steps"], lambda state: state[0].legal_action_mask
    )
