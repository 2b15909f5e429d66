"""A trained policy as a plain object: observations in, actions out, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jaxpg.errors import UserError, excerpt
from jaxpg.types import Array, Box, Env, Key, Learner, Space, Tree, space_leaves, space_struct
from jaxpg.vectorize import tree_where


class TrainedPolicy:
    """The policy of one seed of a run. It remembers what a recurrent network has seen since `reset`.

    Args:
        learner: what was trained.
        state: its state, of one seed.
        env: what it was trained on, which says what observations and actions are.
        seed: of the actions that are sampled.
    """

    def __init__(self, learner: Learner, state: Tree, env: Env, *, seed: int = 0) -> None:
        self._state, self._env, self._key = state, env, jax.random.key(seed)
        self._start, self._act = _compiled(learner, env)
        self._memory: Tree = None
        self._begins = np.ones(1, bool)
        self._acted = 0

    def act(self, obs: Any, *, greedy: bool = True) -> np.ndarray:
        """The actions for observations as they were in training, as the environment itself takes them.

        Those of a Box are clipped to its bounds. Of an environment on the host they are its own: Gymnasium's
        Discrete(3, start=1) gets one of 1, 2 and 3, and a Box of integers gets integers.

        Args:
            obs: one observation, or a batch of them, [B, ...], from environments that keep their places in the batch;
                a dictionary where those of the environment are dictionaries.
            greedy: the most probable action; else a sample.

        Returns:
            One action, or a batch of them.

        Raises:
            UserError: observations of another shape than in training, with NaN in them, beyond a Discrete space, or
                traced; where the policy has a memory, a batch of another size since `reset`.
        """
        batch, batched = self._batch(obs)
        with jax.enable_x64(False):  # as it was trained
            actions = self._act_batch(batch, greedy)
        return actions if batched else actions[0]

    def _act_batch(self, batch: Tree, greedy: bool) -> np.ndarray:
        """`act` for observations with a batch axis."""
        size = len(jax.tree.leaves(batch)[0])
        if self._memory is None:
            self._memory, self._begins = self._start(self._state, batch), np.ones(size, bool)
        elif size != len(self._begins):
            if jax.tree.leaves(self._memory):
                raise UserError(
                    f"This policy remembers {len(self._begins)} episodes, and was given {size} observations: "
                    "call reset() where new episodes begin."
                )
            self._begins = np.zeros(size, bool)
        number = np.int32(self._acted)
        actions, self._memory = self._act(
            self._state, self._memory, self._begins, batch, self._key, number, greedy=greedy
        )
        self._acted += 1
        self._begins = np.zeros(size, bool)
        return np.asarray(actions)

    def reset(self, begins: ArrayLike | None = None) -> None:
        """Forget what was seen: a new episode begins with the next observation.

        Args:
            begins: [B] bool, in which places of the batch; None for all of them, and for another size of the batch.

        Raises:
            UserError: another number of places than the last batch had.
        """
        if begins is None:
            self._memory = None
            return
        begins = np.array(begins, bool)  # a copy: the caller's may change before the next observation
        if self._memory is None or begins.shape != self._begins.shape:
            there = "no batch yet" if self._memory is None else f"a batch of {len(self._begins)}"
            raise UserError(
                f"reset takes a boolean for each place of the batch, and there was {there}: {begins.shape}."
            )
        self._begins = self._begins | begins  # those of an earlier call, too, before the next observation

    def _batch(self, obs: Any) -> tuple[Tree, bool]:
        """Observations with a batch axis, and whether they had one."""
        spaces = space_leaves(self._env.observation_space)
        structure: Any = jax.tree.structure(space_struct(self._env.observation_space))
        try:
            given = structure.flatten_up_to(obs)  # an array may be given as a list
        except ValueError:
            raise UserError(
                f"An observation of {self._env.name} has arrays at {', '.join(path for path, _ in spaces)}, not "
                f"{excerpt(jax.tree.map(np.shape, obs))}."
            ) from None
        arrays = [self._array(f"observation{path}", space, x) for (path, space), x in zip(spaces, given, strict=True)]
        leading = {x.shape[: x.ndim - len(space.shape)] for (_, space), x in zip(spaces, arrays, strict=True)}
        if len(leading) > 1:
            raise UserError(f"The arrays of an observation have one batch axis, or none: not {sorted(leading)}.")
        batched = leading != {()}
        return structure.unflatten(x if batched else x[None] for x in arrays), batched

    def _array(self, what: str, space: Space, obs: ArrayLike) -> np.ndarray:
        """An array of an observation, or of a batch of them, with the dtype that it had in training."""
        shape = tuple(space.shape)
        try:
            given = np.asarray(obs)
        except jax.errors.TracerArrayConversionError:
            raise UserError(
                "policy.act takes plain arrays, and this observation is traced, as in a jit or a scan. What acts there "
                "is the learner's actor: run.experiment.learner.actor(run.learner_of(0)).act (docs/python.md)."
            ) from None
        except ValueError:  # rows of different lengths
            raise UserError(f"An {what} of {self._env.name} has one shape, {shape}: these differ.") from None
        if (given.shape != shape and given.shape[1:] != shape) or not given.size:
            raise UserError(
                f"An {what} of {self._env.name} has the shape {shape}, and a batch of them one axis in front; not "
                f"{given.shape}."
            )
        if given.dtype.kind not in "biuf":
            raise UserError(f"Observations are numbers, not an array of {given.dtype}.")
        if given.dtype.kind == "f" and np.isnan(given).any():
            raise UserError(f"An {what} of {self._env.name} holds NaN, so no action is better than another: mend it.")
        if given.dtype == np.uint8 and isinstance(space, Box) and len(shape) == 3 and np.all(space.high <= 1):
            raise UserError(f"{self._env.name} was trained on images divided by 255: divide these bytes too.")
        if isinstance(space, Box):
            return given.astype(np.float32)
        if np.any((given < 0) | (given >= space.n) | (given % 1 != 0)):
            raise UserError(
                f"An {what} of {self._env.name} is an integer from 0 to {space.n - 1}, not {excerpt(given)}."
            )
        return given.astype(np.int32)


@lru_cache(maxsize=16)
def _compiled(learner: Learner, env: Env) -> tuple[Callable[..., Tree], Callable[..., tuple[Array, Tree]]]:
    """The memories of a batch at the start of its episodes, and `act_all` of this number: compiled once for all seeds.

    The key is made by the program, since that takes three times as long as the actions outside of it.
    """
    start = jax.jit(lambda state, obs: jax.vmap(learner.actor(state).start)(obs))

    @partial(jax.jit, static_argnames="greedy")
    def act(state: Tree, memory: Tree, begins: Array, obs: Tree, key: Key, number: Array, *, greedy: bool) -> Any:
        return act_all(learner, env, state, memory, begins, obs, jax.random.fold_in(key, number), greedy=greedy)

    return start, act


def act_all(
    learner: Learner, env: Env, state: Tree, memory: Tree, begins: Array, obs: Tree, key: Key, *, greedy: bool
) -> tuple[Array, Tree]:
    """The actions of a batch as the environment takes them, those of a Box within its bounds, and the memories.

    Args:
        learner: what was trained.
        env: what it was trained on.
        state: the learner's, of one seed.
        memory: of the policy, leaves [B, ...].
        begins: [B] bool, where an episode begins: its memory is reset.
        obs: leaves [B, ...].
        key: of the samples.
        greedy: the most probable actions (static).
    """
    actor, space = learner.actor(state), env.action_space

    def one(memory: Tree, begins: Array, obs: Tree, place: Array) -> tuple[Array, Any]:
        remembered = tree_where(begins, actor.start(obs), memory)
        action, memory = actor.act(remembered, obs, jax.random.fold_in(key, place), greedy)
        return (env.host.to_action(action) if env.host else space.nearest(action)), memory

    return jax.vmap(one)(memory, begins, obs, jnp.arange(begins.shape[0]))
