"""What was not finite first, an environment's number or the optimisation, found by going back and looking.

Training checks no number of an environment, since that would cost time at every step. When a metric or a parameter is
not finite, the seed repeats the iterations since its last checkpoint, with the same keys and the same compiled program,
and the rollout of each is checked before it is learned from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg import parallel
from jaxpg.errors import UserError
from jaxpg.rollout.evaluation import RecordedEpisode
from jaxpg.rollout.successors import successor_values
from jaxpg.training.advance import RunState, seed_keys
from jaxpg.training.health import EVALUATED, Diverged, last_checkpoint, non_finite_parameters
from jaxpg.types import Array, Experience, Key, Rollout, Tree
from jaxpg.user_input.domains import LARGEST_REWARD

_OBSERVATION = "an observation that is not finite"


class Fault(NamedTuple):
    """The first number of an environment that is not as it should be.

    quantity: what it is: "a reward of nan", "an observation that is not finite".
    step: of its episode; 0 is the reset.
    iteration: of training, or the number of iterations before the evaluation.
    steps: environment steps of the seed until then.
    """

    quantity: str
    step: int
    iteration: int
    steps: int


class CheckedRollout(NamedTuple):
    """A rollout as far as it matters here, `[T, B]` each; `elapsed` is `[B]`, see Experience.

    obs, action, successor: whether they are finite; `successor` where a column breaks off, true elsewhere.
    """

    obs: Array
    action: Array
    reward: Array
    discount: Array
    successor: Array
    last: Array
    mask: Array
    elapsed: Array

    def faults(self) -> np.ndarray:
        """[T, 5, B], what is unsound at a step, in order: observation, action, reward, discount, successor."""
        in_range = (self.discount >= 0) & (self.discount <= 1)
        sound = np.stack([self.obs, self.action, _is_sound(self.reward), in_range, self.successor], 1)
        return ~sound & (np.asarray(self.mask) > 0)[:, None]

    def first_fault(self, iteration: int, steps: int) -> Fault | None:
        """The first fault of an iteration that began after `steps`; None if it is an action, which the policy chose."""
        t, kind, column = (int(i) for i in np.argwhere(self.faults())[0])
        reward, discount = self.reward[t, column], self.discount[t, column]
        quantities = (_OBSERVATION, "", _bad_reward(reward), f"a discount of {discount}", _OBSERVATION)
        ends = np.flatnonzero(self.last[:t, column])
        begin = int(ends[-1]) + 1 if ends.size else -int(self.elapsed[column])
        before = int((self.mask[:t] > 0).sum()) + column + (kind > 0)
        fault = Fault(quantities[kind], t - begin + (kind > 0), iteration, steps + before)
        return fault if fault.quantity else None


class Rerun(NamedTuple):
    """A run that has diverged, and how to go through it again.

    begin: () -> the state of its last checkpoint, or of its beginning, on the mesh.
    advance: state, target -> the state in which every seed has consumed `target` steps (see advance.py); donates.
    experience: of the learner, None if its environment cannot be looked at.
    record: the episodes of an evaluation, see `train`.
    seeds: the numbers of the seeds.
    run_dir: the directory of the run.
    """

    begin: Callable[[], RunState]
    advance: Callable[[RunState, int], RunState]
    experience: Experience | None
    record: Callable[[Any, Key], RecordedEpisode] | None
    seeds: Sequence[int]
    run_dir: Path

    def explain(self, diverged: Diverged) -> UserError:
        """The error that names the environment, if a number of it was the first; else `diverged`."""
        if self.experience is None:
            return diverged
        in_evaluation = diverged.quantity == EVALUATED
        fault = self._fault_in_evaluation(diverged) if in_evaluation else self._fault_in_training(diverged)
        if fault is None:
            return diverged
        when = f"at step {fault.step} of an episode" if fault.step else "at the reset of an episode"
        where = f"evaluation after iteration {fault.iteration}" if in_evaluation else f"iteration {fault.iteration}"
        return UserError(
            f"The environment {self.experience.env.name} returned {fault.quantity} {when}: seed "
            f"{self.seeds[diverged.index]}, {where}, environment step {fault.steps}. {last_checkpoint(self.run_dir)}. "
            "Fix the environment."
        )

    def _fault_in_training(self, diverged: Diverged) -> Fault | None:
        """The first fault on the way to where a seed diverged; None if its parameters or actions were bad before."""
        assert self.experience is not None
        look, key = jax.jit(partial(_check_rollout, self.experience)), seed_keys(self.seeds[diverged.index]).run
        state = self.begin()
        while True:
            one = _state_of(state, diverged.index)
            parameters = non_finite_parameters(jax.tree.map(lambda x: x[None], one.learner))
            if one.iteration >= diverged.iteration or any(bad.any() for bad in parameters.values()):
                return None
            checked = jax.device_get(look(one.learner, jax.random.fold_in(key, one.iteration)))
            if checked.faults().any():
                return checked.first_fault(int(one.iteration) + 1, int(one.steps))
            state = self.advance(state, int(one.steps) + 1)

    def _fault_in_evaluation(self, diverged: Diverged) -> Fault | None:
        """The first fault in the episodes that the last checkpoint was evaluated by."""
        assert self.record is not None
        record, one = self.record, _state_of(self.begin(), diverged.index)
        look = jax.jit(lambda *arguments: _check_episodes(record(*arguments)))
        key = jax.random.fold_in(seed_keys(self.seeds[diverged.index]).evaluation, one.iteration)
        faults = []
        for observed, rewards, length in zip(*jax.device_get(look(one.learner, key)), strict=True):
            unsound = np.flatnonzero(~_is_sound(rewards[:length]))
            if unsound.size:
                unseen = np.flatnonzero(~observed[: unsound[0] + 1])
                step = int(unseen[0] if unseen.size else unsound[0] + 1)
                quantity = _OBSERVATION if unseen.size else _bad_reward(rewards[unsound[0]])
                faults.append(Fault(quantity, step, int(one.iteration), int(one.steps)))
        return min(faults, key=lambda fault: fault.step, default=None)


def _is_sound(reward: Array) -> np.ndarray:
    return np.abs(np.asarray(reward)) <= LARGEST_REWARD  # false of NaN


def _bad_reward(reward: Any) -> str:
    too_large = " (too large to square and sum in float32)" if np.isfinite(reward) else ""
    return f"a reward of {reward:g}{too_large}"


def _state_of(state: RunState, index: int) -> RunState:
    """The state of one seed, on the host."""
    return jax.tree.map(lambda x: np.asarray(x[index]), jax.device_get(parallel.to_host(state)))


def _check_rollout(experience: Experience, learner_state: Tree, key: Key) -> CheckedRollout:
    rollout, elapsed = experience.collect(learner_state, key)
    steps = rollout.steps
    return CheckedRollout(
        obs=_all_finite(steps.obs),
        action=_all_finite(steps.action),
        reward=steps.reward,
        discount=steps.discount,
        successor=_finite_successors(rollout),
        last=steps.last,
        mask=steps.mask,
        elapsed=elapsed,
    )


def _finite_successors(rollout: Rollout) -> Array:
    """[T, B], whether the final observation is finite where a column breaks off without a termination."""
    if not jax.tree.leaves(rollout.final_obs):
        return jnp.ones_like(rollout.steps.last)
    finite = successor_values(rollout, jnp.ones_like(rollout.steps.last), _all_finite)
    return finite | (rollout.steps.discount == 0)


def _check_episodes(episodes: RecordedEpisode) -> tuple[Array, Array, Array]:
    return _all_finite(episodes.observations), episodes.rewards, episodes.length


def _all_finite(tree: Tree) -> Array:
    """Whether all numbers behind the first two axes are finite, over all arrays of a tree."""
    arrays = [x.reshape(*x.shape[:2], -1) for x in jax.tree.leaves(tree)]
    return jnp.stack([jnp.isfinite(x).all(-1) for x in arrays]).all(0)
