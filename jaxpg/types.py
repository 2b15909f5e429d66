"""The records and contracts that everything else is written against.

Arrays are time-major, `[T, B, ...]`: `T` steps of `B` environments side by side. Records are NamedTuples, read by
name. A contract is a record of functions; whoever fills its fields has implemented it, and no base class is involved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

Array = jax.Array
Key = jax.Array
Tree = Any  # a pytree of arrays
Metrics = dict[str, Array]


class Discrete(NamedTuple):
    """The integers `0 .. n-1`, stored as int32 scalars."""

    n: int

    @property
    def shape(self) -> tuple[int, ...]:
        return ()


class Box(NamedTuple):
    """Real arrays with elementwise bounds, both of the shape of the array (infinite where unbounded)."""

    low: np.ndarray
    high: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.low.shape)


Space = Discrete | Box


class TimeStep(NamedTuple):
    """What one environment answers to one action; all fields without batch axes.

    obs: the true successor observation, never the one after a reset.
    reward: [] float.
    discount: [] float, 0 where the episode terminated, else 1. A time-out keeps 1: the future went on unseen.
    last: [] bool, whether the episode ended here, by termination or by time-out.
    """

    obs: Tree
    reward: Array
    discount: Array
    last: Array


class Transition(NamedTuple):
    """Steps as they were collected, every leaf `[T, B, ...]`.

    obs: the observation acted on. Its successor is the next step's, or one of `Rollout.final_obs`.
    action, log_prob: what was done, and its log-probability under the policy that did it.
    reward, discount, last: as in TimeStep.
    mask: 1 where the step is real, 0 on padding behind the end of an episode.
    """

    obs: Tree
    action: Array
    log_prob: Array
    reward: Array
    discount: Array
    last: Array
    mask: Array


class Prompt(NamedTuple):
    """The context of an episode of text, `[P]` each: token ids (int32), and where they are real (bool).

    Padding may lie on the left or on the right.
    """

    tokens: Array
    mask: Array


class Outcome(NamedTuple):
    """What a whole episode was worth, where that is judged once it is over.

    reward: [] float, added to the reward of the last step.
    parts: by name, [] each: what the reward was made of, and what else is to be averaged over episodes.
    answer: [] int32, for the majority vote a fingerprint of the answer that was given, -1 for none; `()` where
        episodes do not answer anything.
    """

    reward: Array
    parts: dict[str, Array]
    answer: Array | tuple[()] = ()


class Episodes(NamedTuple):
    """What belongs to the episode of a column, every leaf `[B, ...]`, `()` where there is none.

    memory: the policy's memory before the first step.
    context: what `Env.context` showed, such as a prompt.
    outcome: Outcome, where rewards do not come step by step. Where groups were resampled (dynamic sampling), of those
        that were drawn first: what the policy is worth.
    length: steps of the episodes of `outcome`.
    """

    memory: Tree = ()
    context: Tree = ()
    outcome: Tree = ()
    length: Tree = ()


class Rollout(NamedTuple):
    """One batch of experience: what belongs to a step, to a place where a column breaks off, and to an episode.

    steps: Transition, [T, B, ...].
    loss_mask: [T, B], 1 where the step takes part in learning. A real step (`steps.mask`) need not: a group that
        carries no signal, or a truncated completion, is real and yet left out.
    final_obs: the true successors where a column breaks off, [K, B, ...]: at its time-outs, in order, and at the end of
        the segment (`rollout.bootstraps_at`). Nothing needs the successor of a termination. `()` where none is known,
        as of steps that were taken out of their order.
    episodes: Episodes, [B, ...].
    """

    steps: Transition
    loss_mask: Array
    final_obs: Tree = ()
    episodes: Episodes = Episodes()

    def map_columns(self, function: Callable[..., Array], *others: Rollout) -> Rollout:
        """`function(axis, x, *like)` of every array and its likes in `others`; columns lie on `axis` of it."""
        parts = zip(*(part for part in (self, *others)), strict=True)
        steps, loss_mask, final_obs, episodes = (
            jax.tree.map(partial(function, axis), *likes) for axis, likes in zip((1, 1, 1, 0), parts, strict=True)
        )
        return Rollout(steps, loss_mask, final_obs, episodes)


class Env(NamedTuple):
    """One environment, unbatched and without auto-reset.

    reset(key) -> state, obs
    step(key, state, action) -> state, TimeStep
    time_limit: no episode is longer than this many steps.
    context(state): what is shown once, when an episode begins in `state`, such as a prompt, and is stored once per
        episode; None where there is nothing but observations.
    outcome(state): Outcome of the episode that ended in `state`, computed once per episode; None where the rewards of
        the steps are all there is.
    measure(outcome, length, group_size): further metrics of a batch of whole episodes, `[B]`, groups of neighbours
        having begun alike: for all devices together. None for none.
    min_truncation_step: no episode times out before this many steps; a rollout has room for as many
        successors as this allows.
    """

    name: str
    reset: Callable[[Key], tuple[Tree, Tree]]
    step: Callable[[Key, Tree, Array], tuple[Tree, TimeStep]]
    observation_space: Space
    action_space: Space
    time_limit: int
    context: Callable[[Tree], Tree] | None = None
    outcome: Callable[[Tree], Outcome] | None = None
    measure: Callable[[Outcome, Array, int], Metrics] | None = None
    min_truncation_step: int = 1

    def initial_input(self, state: Tree, obs: Tree) -> Tree:
        """What a policy is shown when an episode begins: the context, or the first observation where there is none."""
        return obs if self.context is None else self.context(state)


class Policy(NamedTuple):
    """A distribution over actions; `start` and `act` see one environment, `evaluate` a whole batch.

    init(key) -> params
    start(params, first) -> memory: the memory at the start of an episode, `()` without one; see `Env.initial_input`.
    act(params, memory, obs) -> distribution, memory; distributions.py says what a distribution offers.
    evaluate(params, rollout) -> distribution over `[T, B]`, equal to what `act` gave step by step.
    sequential: `evaluate` needs whole columns in order, so minibatches must never cut one.
    rereads: `evaluate` starts anew from the rollout's context, so the rollout need not keep the memory.
    """

    init: Callable[[Key], Tree]
    start: Callable[[Tree, Tree], Tree]
    act: Callable[[Tree, Tree, Tree], tuple[Any, Tree]]
    evaluate: Callable[[Tree, Rollout], Any]
    needs_trajectories: bool = False
    evaluates_from_context: bool = False


class Params(NamedTuple):
    """What is trained: the policy's parameters and the critic's (`()` without a critic)."""

    policy: Tree
    critic: Tree


class Critic(NamedTuple):
    """A state-value function.

    init(key) -> params
    values(params, rollout) -> v_tm1, v_t: V(obs) and V of the successors, both `[T, B]`; the latter is read only where
        the discount is not 0 (see `networks.successor_values`). `params` is the whole Params, so a critic that shares
        the policy's torso reads `params.policy`.
    """

    init: Callable[[Key], Tree]
    values: Callable[[Params, Rollout], tuple[Array, Array]]


class Actor(NamedTuple):
    """A trained policy with its parameters bound, for evaluation and play, one environment at a time.

    start(first) -> memory
    act(memory, obs, key, greedy) -> action, memory; `greedy` (a Python bool) takes the mode instead of a sample.
    """

    start: Callable[[Tree], Tree]
    act: Callable[[Tree, Tree, Key, bool], tuple[Array, Tree]]


class Learner(NamedTuple):
    """The narrow waist: every method that learns is these functions, and what stands around them is written once.

    init(key) -> state: a NamedTuple of arrays. Its field `runner` (where it has one) holds what belongs to single
        environments, leaves `[B, ...]`, which are split over devices; every other field is replicated.
    step(state, key) -> state, metrics: one iteration; metrics is a flat dict of scalars. `steps` (int32) counts
        the environment steps since `init`; `return` and `length` are means over the episodes that ended in
        this iteration, NaN if none did, and `episodes` counts them (see MEAN_OVER in training/advance.py). All
        others are finite while training is healthy.
    actor(state) -> Actor
    adopt(state, policy) -> state that begins with these parameters of a policy instead of its own, for fine-tuning.
    """

    init: Callable[[Key], Any]
    step: Callable[[Any, Key], tuple[Any, Metrics]]
    actor: Callable[[Any], Actor]
    with_policy: Callable[[Any, Tree], Any]
