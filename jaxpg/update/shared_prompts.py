"""The gradient of texts that share prompts: a prompt is read once for all its completions, not once for each.

Completions attend to their prompt's keys and values, its *memory*, and nothing else of it. So the loss is a function of
the parameters and of the memories, L(params, memory(params)), and

    dL/dparams = (dL/dparams with memory fixed) + (d/dparams) <memory(params), dL/dmemory>

The memories of all prompts are computed first. The chunks of a minibatch then add up their gradients by the parameters
and by the memories, however the completions of a prompt are spread over them, and the second term follows backwards
through the reading of the prompts. It replaces texts that contain their own prompts, on every platform, with the same
gradient. Of 64 completions of 48 tokens for prompts of 16 tokens in groups of 8, a step of GRPO takes 0.74 to 0.84 of
the time on a CPU (benchmarks/LOG.md, "prompts of a group, read once"); the longer the prompts, the more is saved.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.parallel.machine import machine
from jaxpg.types import Array, Metrics, Params, Prompt, Rollout, SharedPrompts, Tree
from jaxpg.update.objective import Batch, Objective, TextReader
from jaxpg.vectorize import count_chunks


def read_all(reader: TextReader | None, prompts: Prompt, params: Params) -> Tree:
    """The memories of prompts `[N, P]`, leaves `[N, ...]`, in float32, since gradients by them are added up.

    Of several chunks nothing but the prompts is kept for the gradient: they are read again.
    """
    assert reader is not None
    assert reader.read_prompts is not None
    read_prompts = partial(reader.read_prompts, params)

    def of_chunk(prompts: Prompt) -> Tree:
        return jax.tree.map(lambda x: x.astype(jnp.float32), read_prompts(prompts))

    num_chunks = chunks_of_prompts(prompts)
    if num_chunks == 1:
        return of_chunk(prompts)
    cut = jax.tree.map(lambda x: x.reshape(num_chunks, -1, *x.shape[1:]), prompts)
    memories = lax.map(jax.checkpoint(of_chunk, prevent_cse=False), cut)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), memories)


def with_memories(rollout: Rollout, memories: Tree) -> Rollout:
    """The texts of a chunk with what they attend to of their prompts, given the memories of all prompts."""
    episodes = rollout.episodes
    shared: SharedPrompts = episodes.context.prompts
    memory = jax.tree.map(lambda x: jnp.take(x, shared.number, 0, mode="clip"), memories)
    context = episodes.context._replace(prompts=shared._replace(memory=memory))
    return rollout._replace(episodes=episodes._replace(context=context))


def loss_with_memories(objective: Objective, inputs: tuple[Params, Tree], batch: Batch) -> tuple[Array, Metrics]:
    """The loss of a chunk as a function of the parameters and of the memories of all prompts."""
    params, memories = inputs
    return objective.loss(params, batch._replace(rollout=with_memories(batch.rollout, memories)))


def chunks_of_prompts(prompts: Prompt) -> int:
    """In how many equal chunks prompts are read: at most `Machine.chunk_tokens` each."""
    num_prompts, slots = prompts.tokens.shape
    return count_chunks(num_prompts, max(1, machine().chunk_tokens // slots))
