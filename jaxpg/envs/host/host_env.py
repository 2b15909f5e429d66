"""An environment on the host as an `Env`: its steps are calls out of the compiled program.

The state of such an environment, as the program sees it, is the seed of its episode and the actions since. The host
keeps the environment itself, as it is after these. So a state that the host does not have, because the process is a
new one or the program has gone back to an earlier state, is made again: reset with that seed, and the same actions.
That is exact for an environment that a seed and actions determine; Gymnasium's say so (`EnvSpec.nondeterministic`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import secrets
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jaxpg.envs.host.vectors import Source, Vector, close_or_warn
from jaxpg.errors import UserError
from jaxpg.parallel import host_callback
from jaxpg.types import Array, Box, Env, HostParts, Key, TimeStep
from jaxpg.user_input.user_code import describe_failure

LONGEST_HISTORY = 4000
"""Steps of an episode up to which its actions are kept; longer ones begin again where they would be replayed."""
_LOST = (EOFError, ConnectionError, BrokenPipeError)


_open_groups: set[_Groups] = set()
"""Of all environments of this process that the host has begun, for what has to end them all."""


@atexit.register
def close_all() -> None:
    """End all environments on the host, and their processes."""
    for groups in [*_open_groups]:
        groups.close()


@contextlib.contextmanager
def close_what_begins() -> Iterator[None]:
    """End the environments on the host that begin inside, and their processes, at the end.

    A state that needs one of them later makes it again, as any that the host has lost.
    """
    before = {number for groups in [*_open_groups] for number in groups.groups}
    try:
        yield
    finally:
        for groups in [*_open_groups]:
            groups.close(keep=before)


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
        place, obs, numbers = host_callback.call_in_place(groups.step, stepped, action, *state)
        # Where the call failed nothing is written. Above all the writing then waits for the call, which reads the
        # history: XLA would copy it whole otherwise, to be free to do either first.
        slot = jnp.where(place[0] < 0, length, state.t)
        history = state.history.at[slot].set(action, mode="drop") if length else state.history
        reward, discount, last = numbers
        return HostState(place, state.seed, state.t + 1, history), TimeStep(obs, reward, discount, last != 0)

    def restart(key: Key, wanted: Array, state: HostState) -> tuple[HostState, Array]:
        seed = jax.random.bits(key)
        place, obs = host_callback.call_in_place(groups.restart, begun, wanted, seed, *state)
        return HostState(place, seed, jnp.zeros_like(state.t), state.history), obs

    def frames(states: HostState, actions: np.ndarray) -> tuple[list[np.ndarray], list[float]]:
        assert source.frames
        return source.frames(int(states.seed[0]), actions)

    return Env(
        source.name, reset, step, source.observation_space, source.action_space, source.time_limit,
        min_truncation_step=source.min_truncation_step,
        host=HostParts(restart, source.to_action, frames if source.frames else None),
    )  # fmt: skip


class _Group:
    """Environments that are reset and stepped together; see `Source`.

    What a step does here costs a small environment as much as its physics, and calls of NumPy are most of that. So
    what seldom changes is kept instead of computed, and a step at which nothing ends has arrays of its own.
    """

    def __init__(self, source: Source, vector: Vector, number: int, size: int) -> None:
        self.number, self.size, self.calls, self.resets = number, size, 0, 0
        self._source, self._vector = source, vector
        self._over, self._resting = np.zeros((2, size), bool)
        self._all_run = True  # none is over, and none rests
        self._began = np.zeros(size, np.int64)  # `calls` at the start of each episode
        self.places = np.zeros((size, 3), np.int32)  # `HostState.place` of each, as it is now
        self.places[:, 0], self.places[:, 1] = number, np.arange(size)
        self._steps_of_places = self.places[:, 2]
        self._going_on = np.tile(np.array([0, 1, 0], np.float32), (size, 1))  # of a step at which no episode ends
        self.close = vector.close

    def is_free(self) -> bool:
        """Whether all episodes are over."""
        return bool(self._over.all())

    def is_at(self, place: np.ndarray) -> bool:
        """Whether states with these places, `[n, 3]`, are what its environments are in."""
        return place.tobytes() == self.places.tobytes()  # much faster than `np.array_equal`, at every step

    def move_on(self) -> None:
        """Another state from now on: what has the places of before is not what the environments are in."""
        self.calls += 1
        self._steps_of_places.fill(self.calls % 2**31)

    def begin(self, wanted: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """New episodes where `wanted`; the observations there, `[n, ...]`."""
        which = np.flatnonzero(wanted).tolist()
        if not which:
            return np.zeros((self.size, *self._source.observation_space.shape), np.float32)
        for i in which:
            self._over[i] = self._resting[i] = False
            self._began[i] = self.calls
        self._all_run = not np.count_nonzero(self._over)  # those that rest are over
        obs = self._source.convert(self._vector.begin(wanted, seeds))
        self._check(obs, self._going_on, wanted)
        return obs

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One step: observations `[n, ...]`, and reward, discount and last, `[n, 3]`; both are used again."""
        if not self._all_run:
            self._rest(self._over)
        actions = self._source.to_action(actions)
        if self._source.python_integers:
            actions = actions.tolist()
        obs, reward, terminated, truncated = self._vector.step(actions, self._age)
        self.move_on()
        obs = self._source.convert(obs)
        if self._all_run and not np.count_nonzero(terminated) and not np.count_nonzero(truncated):
            self._going_on[:, 0] = reward
            self._check(obs, self._going_on)
            return obs, self._going_on
        running = ~self._over  # one that rests in a replay returns nothing new
        terminated, truncated = running & terminated, running & truncated
        if np.count_nonzero(truncated):
            self._check_truncations(truncated & ~terminated)
        self._over |= terminated | truncated
        self._all_run = False
        numbers = self._going_on.copy()
        numbers[:, 0], numbers[:, 1], numbers[:, 2] = np.where(running, reward, 0), ~terminated, self._over
        self._check(obs, numbers, running)
        return obs, numbers

    def replay(self, seeds: np.ndarray, t: np.ndarray, history: np.ndarray) -> None:
        """Bring each environment to where its seed and its first `t` actions lead; to a new episode without actions."""
        self.begin(np.ones(self.size, bool), seeds)
        if not history.shape[1]:
            return
        for i in range(int(t.max(initial=0))):
            self._rest(t <= i)
            self.step(history[:, i])
        if (waiting := self._resting & ~self._over).any() and self._vector.rest:
            self._vector.rest(waiting, False)
            self._resting &= ~waiting
        self._began = self.calls - t.astype(np.int64)

    def _age(self, i: int) -> int:
        """Steps of the episode of environment i, with the one that is being made."""
        return int(self.calls + 1 - self._began[i])

    def _rest(self, where: np.ndarray) -> None:
        where = where & ~self._resting
        if self._vector.rest and where.any():
            self._vector.rest(where, True)
            self._resting |= where
            self._all_run = False

    def _check_truncations(self, truncated: np.ndarray) -> None:
        """Raise a UserError where a time-out comes earlier than any may: a rollout has no place for its successor."""
        steps = self.calls - self._began[truncated]
        if (steps < self._source.min_truncation_step).any():
            raise UserError(
                f"The environment {self._source.name} ended an episode by a time-out after {steps.min()} steps, but "
                f"Gymnasium's own environments do not time out before {self._source.min_truncation_step}. If you "
                "changed its time limit, register it with a class of your own as its entry_point."
            )

    def _check(self, obs: np.ndarray, numbers: np.ndarray, which: np.ndarray | slice = slice(None)) -> None:
        """Raise a UserError if one of `which` has a number that is not finite."""
        if _all_finite(obs) and _all_finite(numbers):
            return
        for i in np.arange(self.size)[which]:
            steps, reward = self.calls - self._began[i], numbers[i, 0]
            when = f"at step {steps} of an episode" if steps else "at the reset of an episode"
            if not np.isfinite(obs[i]).all() or not np.isfinite(reward):
                bad_reward = not np.isfinite(reward)
                what = f"a reward of {reward}" if bad_reward else "an observation that is not finite in float32"
                raise UserError(f"The environment {self._source.name} returned {what} {when}. Fix the environment.")


def _all_finite(x: np.ndarray) -> bool:
    return np.count_nonzero(np.isfinite(x)) == x.size  # of few numbers in half the time of `all`


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
            steps = max((group.calls - group.resets for group in self.groups.values()), default=0)
            close_all()
            raise _lost(self.source.name, steps) from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            close_all()
            raise UserError(f"The environment {self.source.name} raised {describe_failure(error)}.") from error

    return call


def _lost(name: str, steps: int) -> UserError:
    what = f"A worker process of the environment {name} has died"
    if not steps:
        return UserError(
            f"{what} before it took a step. Every worker imports the script again: put the code that trains below "
            'if __name__ == "__main__":.'
        )
    return UserError(
        f"{what} at step {steps + 1} of all environments side by side, and the others have been ended. A run that has "
        "a directory goes on from its last checkpoint with: jaxpg resume DIRECTORY (--trust-code for your own code)."
    )


class _Groups:
    """All environments of a source that the host keeps. A batch of a program is one group, or several in a row."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.groups: dict[int, _Group] = {}
        self._numbers = itertools.count(secrets.randbits(30))  # another process must not have the same

    @_explained
    def reset(self, seeds: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Places and observations of new episodes, a group of them."""
        seeds = np.asarray(seeds)
        group = self._idle(seeds.size, seeds.ravel()[0])
        group.move_on()
        group.resets += 1
        obs = group.begin(np.ones(seeds.size, bool), seeds.ravel())
        return _like(seeds, group.places), _like(seeds, obs)

    @_explained
    def step(self, actions: ArrayLike, *state: Any) -> tuple[np.ndarray, ...]:
        """Places after a step of environments in this `HostState`, observations, and reward, discount and last."""
        actions, place = np.asarray(actions), np.asarray(state[0])
        if (group := self._whole(place)) is not None and place.ndim == 2:  # nearly always
            obs, numbers = group.step(actions)
            return group.places, obs, numbers
        actions = actions.reshape(-1, *self.source.action_space.shape)
        parts = [(*group.step(actions[of]), group.places) for group, of in self._find(HostState(*state))]
        obs, numbers, places = (_like(place[..., 0], x) for x in _joined(parts))
        return places, obs, numbers

    @_explained
    def restart(self, wanted: ArrayLike, seeds: ArrayLike, *state: Any) -> tuple[np.ndarray, ...]:
        """New episodes where `wanted`, of environments in this `HostState`: places and observations."""
        wanted, seeds, place = np.asarray(wanted), np.asarray(seeds), np.asarray(state[0])
        if not np.count_nonzero(wanted):
            return place, np.zeros((*wanted.shape, *self.source.observation_space.shape), np.float32)
        if (group := self._whole(place)) is not None and place.ndim == 2:  # nearly always
            return group.places, group.begin(wanted, seeds)
        of_groups = self._find(HostState(*state))
        parts = [(group.places, group.begin(wanted.ravel()[of], seeds.ravel()[of])) for group, of in of_groups]
        return tuple(_like(wanted, x) for x in _joined(parts))

    def close(self, keep: Container[int] = ()) -> None:
        """End all groups but these, and their processes; one that cannot be closed is a warning."""
        for number in [x for x in self.groups if x not in keep]:
            close_or_warn(self.groups.pop(number).close, self.source.name)
        if not self.groups:
            _open_groups.discard(self)

    def _whole(self, place: np.ndarray) -> _Group | None:
        """The group that a whole batch of states with these places, `[..., 3]`, is, or None."""
        group = self.groups.get(place.item(0))
        return group if group is not None and group.is_at(place) else None

    def _find(self, states: HostState) -> Iterator[tuple[_Group, slice]]:
        """The groups that a batch of states consists of, in these states, and the part of each."""
        place = np.asarray(states.place)
        if (group := self._whole(place)) is not None:
            yield group, slice(None)
            return
        seeds, t, history = np.asarray(states.seed), np.asarray(states.t), np.asarray(states.history)
        history = history.reshape(seeds.size, *history.shape[seeds.ndim :])
        place, seeds, t = place.reshape(-1, 3), seeds.ravel(), t.ravel()
        cuts = np.flatnonzero(np.diff(place[:, 0])) + 1
        taken: set[int] = set()  # by an earlier part of this batch, which may be the same states once more
        for start, stop in itertools.pairwise((0, *cuts.tolist(), len(place))):
            of = slice(start, stop)
            group = self.groups.get(int(place[start, 0]))
            if group is not None and group.number in taken:
                group = None
            if group is None or not group.is_at(place[of]):
                if group is None or group.size != stop - start:
                    group = self._idle(stop - start, seeds[start], taken)
                group.replay(seeds[of], t[of], history[of])
            taken.add(group.number)
            yield group, of

    def _idle(self, size: int, seed: Any, taken: Container[int] = ()) -> _Group:
        """A group whose episodes are all over and that is not `taken`, or a new one."""
        for group in self.groups.values():
            if group.size == size and group.is_free() and group.number not in taken:
                return group
        number = next(self._numbers) % 2**31
        self.groups[number] = _Group(self.source, self.source.make(size, int(seed) % 2**31), number, size)
        _open_groups.add(self)
        return self.groups[number]


def _joined(parts: Sequence[tuple[np.ndarray, ...]]) -> Sequence[np.ndarray]:
    """The arrays of several groups, one after the other."""
    return parts[0] if len(parts) == 1 else [np.concatenate(x) for x in zip(*parts, strict=True)]


def _like(batch: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Rows `[n, ...]` with the axes of a batch in place of the first."""
    return rows.reshape((*batch.shape, *rows.shape[1:]))  # which may be no axes at all
