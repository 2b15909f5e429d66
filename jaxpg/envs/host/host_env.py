"""An environment on the host as an `Env`: its steps are calls out of the compiled program.

The state of such an environment, as the program sees it, is the seed of its episode and the actions since. The host
keeps the environment itself, as it is after these. So a state that the host does not have, because the process is a
new one or the program has gone back to an earlier state, is made again: reset with that seed, and the same actions.
That is exact for an environment that a seed and actions determine; Gymnasium's say so (`EnvSpec.nondeterministic`).
"""

from __future__ import annotations

import atexit
import functools
import itertools
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.envs.host.vectors import Source, Vector
from jaxpg.errors import UserError
from jaxpg.parallel import host_callback
from jaxpg.types import Array, Box, Env, HostParts, Key, TimeStep
from jaxpg.user_code import describe_failure

LONGEST_HISTORY = 4000
"""Steps of an episode up to which its actions are kept; longer ones begin anew where they would be made again."""
_LOST = (EOFError, ConnectionError, BrokenPipeError)


_every_groups: list[_Groups] = []
"""Of all environments of this process, for what has to end them all."""


@atexit.register
def close_all() -> None:
    """End all environments on the host, and their processes."""
    for groups in _every_groups:
        groups.close()


class HostState(NamedTuple):
    """An environment on the host.

    place: [3] int32, where the host keeps it: its group, its number in there, and the steps that the group had taken.
    seed: [] uint32, of the episode.
    t: [] int32, steps of the episode.
    history: [T, ...], the actions since the reset, the first `t` of which count; T is the time limit, or 0 where an
        episode cannot be made again: its environment does not repeat itself, or it may have too many steps.
    """

    place: Array
    seed: Array
    t: Array
    history: Array


def host_env(source: Source) -> Env:
    """The environments of a source as an Env, stepped together: one call to the host for a whole batch.

    What it returns is the true successor, `discount` is 0 on termination and 1 on truncation, `last` is set on both;
    where both fall on one step, the termination wins. After the end of an episode, until the next reset or restart, a
    step changes nothing; its reward is 0 and `last` is true.
    """
    groups = _Groups(source)
    _every_groups.append(groups)
    shape, dtype = source.action_space.shape, np.float32 if isinstance(source.action_space, Box) else np.int32
    length = source.time_limit if source.repeatable and source.time_limit <= LONGEST_HISTORY else 0
    place_like = jax.ShapeDtypeStruct((3,), jnp.int32)
    obs_like = jax.ShapeDtypeStruct(source.observation_space.shape, jnp.float32)
    begun = place_like, obs_like
    stepped = place_like, obs_like, jax.ShapeDtypeStruct((3,), jnp.float32)

    def reset(key: Key) -> tuple[HostState, Array]:
        seed = jax.random.bits(key)
        place, obs = host_callback.call_in_place(groups.reset, begun, seed)
        return HostState(place, seed, jnp.zeros((), jnp.int32), jnp.zeros((length, *shape), dtype)), obs

    def step(key: Key, state: HostState, action: Array) -> tuple[HostState, TimeStep]:
        action = jnp.asarray(action, dtype)
        place, obs, numbers = host_callback.call_in_place(
            groups.step, stepped, state.seed, state.t, state.place, state.history, action
        )
        # Where the call failed nothing is written. Above all the writing then waits for the call, which reads the
        # history: XLA would copy it whole otherwise, to be free to do either first.
        slot = jnp.where(place[0] < 0, length, state.t)
        history = state.history.at[slot].set(action, mode="drop") if length else state.history
        reward, discount, last = numbers
        return HostState(place, state.seed, state.t + 1, history), TimeStep(obs, reward, discount, last != 0)

    def restart(key: Key, wanted: Array, state: HostState) -> tuple[HostState, Array]:
        seed = jax.random.bits(key)
        place, obs = host_callback.call_in_place(
            groups.restart, begun, state.seed, state.t, state.place, state.history, wanted, seed
        )
        return HostState(place, seed, jnp.zeros_like(state.t), state.history), obs

    return Env(
        source.name, reset, step, source.observation_space, source.action_space, source.time_limit,
        min_truncation_step=source.min_truncation_step,
        host=HostParts(restart, source.to_action, source.frames),
    )  # fmt: skip


class _Group:
    """Environments that are reset and stepped together; see `Source`."""

    def __init__(self, source: Source, vector: Vector, number: int, size: int) -> None:
        self.number, self.size, self.calls = number, size, 0
        self._source, self._vector = source, vector
        self._over, self._resting = np.zeros((2, size), bool)
        self._t = np.zeros(size, np.int64)
        self._places = np.zeros((size, 3), np.int32)  # the type that states have, see `is_at`
        self._places[:, 0], self._places[:, 1] = number, np.arange(size)
        self.close = vector.close

    def is_free(self) -> bool:
        """Whether all episodes are over."""
        return bool(self._over.all())

    def is_at(self, place: np.ndarray) -> bool:
        """Whether states with these places, `[n, 3]`, are what its environments are in."""
        return place.tobytes() == self.places().tobytes()  # much faster than `np.array_equal`, at every step

    def places(self) -> np.ndarray:
        """`HostState.place` of its environments as they are now; the array is used again."""
        self._places[:, 2] = self.calls % 2**31
        return self._places

    def begin(self, wanted: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """New episodes where `wanted`; the observations there, `[n, ...]`."""
        if not wanted.any():
            return np.zeros((self.size, *self._source.observation_space.shape), np.float32)
        self._over[wanted] = self._resting[wanted] = False
        self._t[wanted] = 0
        obs = self._source.convert(self._vector.begin(wanted, seeds))
        self._check(obs, np.zeros(self.size), wanted)
        return obs

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One step: observations `[n, ...]`, and reward, discount and last, `[n, 3]`."""
        idle = self._over | self._resting
        if np.count_nonzero(idle):
            self._rest(idle & ~self._resting)
        running = ~idle
        obs, reward, terminated, truncated = self._vector.step(self._source.to_action(actions))
        self.calls += 1
        self._t += running
        obs = self._source.convert(obs)
        self._check(obs, reward, running)
        ended = running & (terminated | truncated)
        self._over |= ended
        numbers = np.empty((self.size, 3), np.float32)
        numbers[:, 0], numbers[:, 1], numbers[:, 2] = reward * running, ~(ended & terminated), self._over
        return obs, numbers

    def replay(self, seeds: np.ndarray, t: np.ndarray, history: np.ndarray) -> None:
        """Bring each environment to where its seed and its first `t` actions lead; to a new episode without actions."""
        self.begin(np.ones(self.size, bool), seeds)
        if not history.shape[1]:
            return
        for i in range(int(t.max(initial=0))):
            self._rest((t <= i) & ~self._resting)
            self.step(history[:, i])
        if (waiting := self._resting & ~self._over).any() and self._vector.rest:
            self._vector.rest(waiting, False)
            self._resting &= ~waiting

    def _rest(self, where: np.ndarray) -> None:
        if self._vector.rest and where.any():
            self._vector.rest(where, True)
            self._resting |= where

    def _check(self, obs: np.ndarray, reward: np.ndarray, which: np.ndarray) -> None:
        """Raise a UserError if one of `which` has a number that is not finite; one sum finds that out cheaply."""
        if math.isfinite(obs.sum()) and math.isfinite(reward.sum()):
            return
        for i in np.flatnonzero(which):
            when = f"at step {self._t[i]} of an episode" if self._t[i] else "at the reset of an episode"
            if not np.isfinite(obs[i]).all() or not np.isfinite(reward[i]):
                bad_reward = not np.isfinite(reward[i])
                what = f"a reward of {reward[i]}" if bad_reward else "an observation that is not finite in float32"
                raise UserError(f"The environment {self._source.name} returned {what} {when}. Fix the environment.")


def _explained(method: Callable[..., tuple[np.ndarray, ...]]) -> Callable[..., tuple[np.ndarray, ...]]:
    """A method of `_Groups` that raises what goes wrong as a sentence; all environments are ended then.

    Not a context manager, which costs a microsecond or two at every step.
    """

    @functools.wraps(method)
    def call(self: _Groups, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        try:
            return method(self, *arrays)
        except UserError:
            close_all()
            raise
        except _LOST as error:
            steps = max((group.calls for group in self.groups.values()), default=0)
            close_all()
            raise _lost(self.source.name, steps) from error
        except Exception as error:
            close_all()
            raise UserError(f"The environment {self.source.name} raised {describe_failure(error)}.") from error

    return call


def _lost(name: str, steps: int) -> UserError:
    what = f"A worker process of the environment {name} has died"
    if not steps:
        return UserError(
            f"{what} before it took a step. Every worker imports the script that runs anew: in a script, what trains "
            'belongs below if __name__ == "__main__":.'
        )
    return UserError(
        f"{what} at step {steps + 1} of its group, and the others have been ended. A run that has a directory goes on "
        "with: jaxpg resume."
    )


class _Groups:
    """All environments of a source that the host keeps. A batch of a program is one group, or several in a row."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.groups: dict[int, _Group] = {}
        self._numbers = itertools.count(secrets.randbits(30))  # another process must not have the same

    @_explained
    def reset(self, seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places and observations of new episodes, a group of them."""
        group = self._idle(seeds.size, seeds.ravel()[0])
        group.calls += 1  # states of its last episodes are not those of the new ones
        obs = group.begin(np.ones(seeds.size, bool), seeds.ravel())
        return _like(seeds, group.places()), _like(seeds, obs)

    @_explained
    def step(
        self, seeds: np.ndarray, t: np.ndarray, place: np.ndarray, history: np.ndarray, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Places after a step, observations, and reward, discount and last of each."""
        actions = actions.reshape(seeds.size, *self.source.action_space.shape)
        parts = [(*group.step(actions[of]), group.places()) for group, of in self._find(seeds, t, place, history)]
        obs, numbers, places = _joined(parts)
        return _like(seeds, places), _like(seeds, obs), _like(seeds, numbers)

    @_explained
    def restart(
        self,
        seeds: np.ndarray,
        t: np.ndarray,
        place: np.ndarray,
        history: np.ndarray,
        wanted: np.ndarray,
        new_seeds: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """New episodes where `wanted`: places and observations."""
        if not wanted.any():  # most calls are such
            return place, np.zeros((*wanted.shape, *self.source.observation_space.shape), np.float32)
        wanted, new_seeds = wanted.ravel(), new_seeds.ravel()
        found = self._find(seeds, t, place, history)
        parts = [(group.places(), group.begin(wanted[of], new_seeds[of])) for group, of in found]
        places, obs = _joined(parts)
        return _like(seeds, places), _like(seeds, obs)

    def close(self) -> None:
        """End all environments and their processes."""
        while self.groups:
            self.groups.popitem()[1].close()

    def _find(
        self, seeds: np.ndarray, t: np.ndarray, place: np.ndarray, history: np.ndarray
    ) -> Iterator[tuple[_Group, slice]]:
        """The groups that a batch of states consists of, in these states, and the part of each."""
        history = history.reshape(seeds.size, *history.shape[seeds.ndim :])
        place, seeds, t = place.reshape(-1, 3), seeds.ravel(), t.ravel()
        first = self.groups.get(int(place[0, 0]))
        if first is not None and first.is_at(place):
            yield first, slice(None)
            return
        cuts = np.flatnonzero(np.diff(place[:, 0])) + 1
        for start, stop in itertools.pairwise((0, *cuts.tolist(), len(place))):
            of = slice(start, stop)
            group = self.groups.get(int(place[start, 0]))
            if group is None or not group.is_at(place[of]):
                if group is None or group.size != stop - start:
                    group = self._idle(stop - start, seeds[start])
                group.replay(seeds[of], t[of], history[of])
            yield group, of

    def _idle(self, size: int, seed: Any) -> _Group:
        """A group that nobody needs any more, or a new one."""
        for group in self.groups.values():
            if group.size == size and group.is_free():
                return group
        number = next(self._numbers) % 2**31
        self.groups[number] = _Group(self.source, self.source.make(size, int(seed) % 2**31), number, size)
        return self.groups[number]


def _joined(parts: Sequence[tuple[np.ndarray, ...]]) -> Sequence[np.ndarray]:
    """The arrays of several groups, one after the other."""
    return parts[0] if len(parts) == 1 else [np.concatenate(x) for x in zip(*parts, strict=True)]


def _like(batch: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Rows `[n, ...]` with the axes of a batch in place of the first."""
    return rows.reshape(*batch.shape, *rows.shape[1:])
