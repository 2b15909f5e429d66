"""A policy that `jaxpg export` has written. It needs jax, and flatbuffers, with which jax reads such a file.

act = load("policy.jax")
actions, memory = act(obs)  # [B, ...] -> [B, ...]: the first step of B episodes side by side
actions, memory = act(obs, memory)  # the next step; `begins`, [B] bool, says where new episodes begin
actions, memory = act(obs, memory, greedy=False)  # samples, others at every call; the same for the same `seed`
"""

import itertools
from pathlib import Path
from typing import Any

import jax.export
import jax.numpy as jnp


def load(path: str | Path) -> Any:
    """The policy in a file: observations, memory, begins, greedy, seed of the samples -> actions, memory."""
    program, calls = jax.export.deserialize(bytearray(Path(path).read_bytes())), itertools.count()
    wanted, *_, memories = jax.tree.unflatten(program.in_tree, program.in_avals)[0]

    def array(like: Any, x: Any) -> Any:
        given = jnp.asarray(x)
        if given.shape[1:] != like.shape[1:] or given.ndim != like.ndim:
            raise ValueError(f"Observations are a batch, {list(like.shape)}, not {list(given.shape)}.")
        if like.ndim > 3 and given.dtype == "uint8":
            raise ValueError("Give images as float32, in the range of training: of Gymnasium's, bytes divided by 255.")
        if not isinstance(given, jax.core.Tracer) and (given != given).any():
            raise ValueError("An observation holds NaN, so no action is better than another.")
        return given.astype(like.dtype)

    def act(obs: Any, memory: Any = None, begins: Any = False, greedy: bool = True, seed: int | None = None) -> Any:
        if seed is not None and not 0 <= seed < 2**31:
            raise ValueError(f"A seed is an integer from 0 to 2**31 - 1, not {seed}.")
        obs = jax.tree.map(array, wanted, obs)
        begins = jnp.broadcast_to(jnp.asarray(memory is None or begins, bool), len(jax.tree.leaves(obs)[0]))
        memory = memory or [jnp.zeros(begins.shape + x.shape[1:], x.dtype) for x in memories]
        return program.call(obs, begins, greedy, jnp.int32(next(calls) if seed is None else seed), memory)

    return act
