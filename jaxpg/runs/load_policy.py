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
    (wanted, _, _, _, *of_memory), _ = jax.tree.unflatten(program.in_tree, program.in_avals)

    def as_in_training(wanted: Any, x: Any) -> Any:
        if (x := jnp.asarray(x)).dtype == jnp.uint8 and x.ndim == 4:
            raise ValueError("The policy was trained on images of float32: divide these bytes by 255.")
        return x.astype(wanted.dtype)

    def act(obs: Any, memory: Any = None, begins: Any = False, greedy: bool = True, seed: int | None = None) -> Any:
        obs = jax.tree.map(as_in_training, wanted, obs)
        size = len(jax.tree.leaves(obs)[0])
        begins = jnp.broadcast_to(jnp.asarray(memory is None or begins), size)
        memory = memory or [jnp.zeros((size, *x.shape[1:]), x.dtype) for x in of_memory]
        seed = next(calls) if seed is None else seed
        actions, *memory = program.call(obs, begins, greedy, seed, *memory)
        return actions, memory

    return act
