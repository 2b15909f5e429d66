"""The records and contracts that everything else is written against.

Arrays are time-major, `[T, B, ...]`: `T` steps of `B` environments side by side, each of which is a column. Records
are NamedTuples and are read by name. A contract is a record of functions: to implement it, fill its fields. There are
no base classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
Key = jax.Array
Tree = Any  # a pytree of arrays
Scalar = Array | float
"""A setting that may be traced, as under `jax.vmap` over learning rates."""
Metrics = dict[str, Array]


class Discrete(NamedTuple):
    """The integers `0 .. n-1`, stored as int32 scalars."""

    n: int

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    def nearest(self, x: Array) -> Array:
        """`x` itself: every sampled action is already valid."""
        return x


class Box(NamedTuple):
    """Real arrays with elementwise bounds of the same shape, infinite where unbounded."""

    low: np.ndarray | Array
    high: np.ndarray | Array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.low.shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and all(map(np.array_equal, tuple(self), tuple(other)))

    def __ne__(self, other: object) -> bool:
        return not self == other  # that of tuples would ask arrays for one truth

    def __hash__(self) -> int:
        return hash(self.shape)

    def nearest(self, x: Array) -> Array:
        """The point within the bounds that is nearest to `x`, each entry clipped."""
        return x.clip(self.low, self.high)


Space = Discrete | Box
Spaces = Any
"""A Box, a Discrete, or a pytree of them, such as a dictionary: observations are then a pytree of arrays."""


def space_leaves(spaces: Spaces) -> list[tuple[str, Space]]:
    """The spaces in a pytree of them, in the order of `jax.tree.leaves`, with their paths: "['board']", or ""."""
    found = jax.tree_util.tree_flatten_with_path(spaces, is_leaf=_is_space)[0]
    return [(jax.tree_util.keystr(path), space) for path, space in found]


def space_struct(spaces: Spaces, lead: tuple[Any, ...] = ()) -> Tree:
    """Shapes `[*lead, ...]` and dtypes of what lies in the spaces: float32 in a Box, int32 in Discrete."""

    def struct(space: Space) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead, *space.shape), jnp.float32 if isinstance(space, Box) else jnp.int32)

    return jax.tree.map(struct, spaces, is_leaf=_is_space)


def _is_space(x: Any) -> bool:
    return isinstance(x, Box | Discrete)


class TimeStep(NamedTuple):
    """The result of one action in one environment; no batch axes.

    obs: the true successor observation, never the one after a reset.
    reward: [] float.
    discount: [] float, 0 if the episode terminated, else 1. After a time-out it is 1: the episode would have gone on. A
        number between multiplies gamma; gamma itself does not belong here.
    last: [] bool, whether the episode ended with this step, by termination or by time-out.
    """

    obs: Tree
    reward: Array
    discount: Array
    last: Array


class Transition(NamedTuple):
    """Recorded steps, every leaf `[T, B, ...]`.

    obs: the observation before the action. Its successor is in the next row or in `Rollout.final_obs`.
    action: the action taken.
    log_prob: its log-probability under the policy that took it.
    reward, discount, last: as in TimeStep.
    mask: 1 where the step is real, 0 on padding after the end of an episode.
    step_end: 1 where a step of a chain of thought ends, such as a line of a scratchpad, and its reward stands; `()`
        where rewards are not by such steps.
    """

    obs: Tree
    action: Array
    log_prob: Array
    reward: Array
    discount: Array
    last: Array
    mask: Array
    step_end: Tree = ()


class Prompt(NamedTuple):
    """The context of a text episode.

    tokens: [P] int32, token ids.
    mask: [P] bool, which of them are real. Padding may be on the left or on the right.
    """

    tokens: Array
    mask: Array

    def last(self) -> Array:
        """`[...]` int32, the index of the last real token, which is the first observation."""
        return self.mask.shape[-1] - 1 - jnp.argmax(self.mask[..., ::-1], -1)

    def mask_before_last(self) -> Array:
        """`[..., P]` bool, the mask without its last true entry."""
        slots = jax.lax.broadcasted_iota(jnp.int32, self.mask.shape, self.mask.ndim - 1)
        return self.mask & (slots != self.last()[..., None])


class SharedPrompts(NamedTuple):
    """The prompts of rows of PackedTexts whose texts are completions of the same prompt, leaves `[R, ...]`.

    number: [R] int32, of the prompt among those of the batch.
    real: [R, P] bool, which of its slots hold a token that the texts attend to.
    memory: what `Policy.read_prompts` made of it; `()` until the update has put it there.
    """

    number: Array
    real: Array
    memory: Tree = ()


class PackedTexts(NamedTuple):
    """Texts side by side in rows, in the place of the prompts, the context of a batch whose steps are `[S, R]`.

    Step s of column r chose the token after `tokens[r, s]`; a step within a prompt is padding and weighs nothing.

    tokens: [R, S] int32.
    text: [R, S] int32, the number of the text that a slot belongs to, -1 for an empty slot. The slots of a text are
        neighbours.
    position: [R, S] int32, of a slot within its text, its prompt included.
    prompts: SharedPrompts where texts do not contain their own prompts, else `()`.
    """

    tokens: Array
    text: Array
    position: Array
    prompts: SharedPrompts | tuple[()] = ()


class StepRewards(NamedTuple):
    """The rewards of the steps of a chain of thought, each of which is many actions; T is the environment's time limit.

    reward: [T] float32, of the step that ends with an action, 0 at all other actions.
    end: [T] float32, 1 where a step ends, else 0.
    """

    reward: Array
    end: Array


class Outcome(NamedTuple):
    """The result of a whole episode, for environments that give a reward once it is over.

    reward: [] float, added to the reward of the last step.
    parts: [] each, by name: the terms of the reward, and other numbers whose mean over episodes is a metric.
    answer: [] int32, a fingerprint of the final answer for majority votes, -1 if there is none; `()` in environments
        without answers.
    step_rewards: added to the rewards of the actions that they stand at; `()` where there are none.
    """

    reward: Array
    parts: dict[str, Array]
    answer: Array | tuple[()] = ()
    step_rewards: StepRewards | tuple[()] = ()

    def total(self) -> Array:
        """The reward of the whole episode, [...] as `reward`: that of its outcome and those of its steps."""
        return self.reward + self.step_rewards.reward.sum(-1) if self.step_rewards else self.reward


class RewardTerm(NamedTuple):
    """A term of the reward of a whole episode, whose value is the part "reward_NAME" of the outcome.

    weight: of the value in the sum, once it is standardised.
    standardize: "batch" over the episodes of a rollout, "running" over all episodes so far, None not at all.
    """

    weight: Scalar
    standardize: str | None


class Episodes(NamedTuple):
    """What is stored once per column instead of once per step; every leaf `[B, ...]`, `()` where there is none.

    memory: the policy's memory before the first step.
    context: of the episode, see `Env.context`.
    outcome: Outcome, in environments that have one. With dynamic sampling it is that of the first round of sampling,
        before groups were replaced, so that its mean is an unbiased measure of the policy.
    length: steps of the episodes of `outcome`.
    reward_terms: by name, the values of the terms of the reward (`Env.reward_terms`) of the episode in this column.
    """

    memory: Tree = ()
    context: Tree = ()
    outcome: Tree = ()
    length: Tree = ()
    reward_terms: Tree = ()


class Rollout(NamedTuple):
    """One batch of experience: three records, one for each kind of axis.

    steps: Transition, [T, B, ...].
    loss_mask: [T, B], 1 where the step takes part in the loss. It is 0 on padding, and also on real steps that are left
        out, such as those of a group without signal or of a truncated completion.
    final_obs: [K, B, ...], the true successors where a column breaks off (`rollout.bootstraps_at`): at its time-outs in
        order, and at the end of the segment. A termination needs no successor. `()` if the successors are unknown, as
        in minibatches of single steps.
    episodes: Episodes, [B, ...].
    """

    steps: Transition
    loss_mask: Array
    final_obs: Tree = ()
    episodes: Episodes = Episodes()

    def map_columns(self, function: Callable[..., Array], *others: Rollout) -> Rollout:
        """`function(axis, x, *others_x)` of every array and the same arrays of `others`; `axis` is the column axis."""
        parts = zip(self, *others, strict=True)
        steps, loss_mask, final_obs, episodes = (
            jax.tree.map(partial(function, axis), *part) for axis, part in zip((1, 1, 1, 0), parts, strict=True)
        )
        return Rollout(steps, loss_mask, final_obs, episodes)


class HostParts(NamedTuple):
    """What an environment has that lives on the host, outside of the compiled program, where a reset is not a copy.

    restart(key, wanted, state) -> state, obs: as `Env.reset(key)`, of the environment in this state; the result means
        something only where `wanted` ([] bool) is true, and only there anything is reset.
    to_action(action) -> the action as the environment takes it, whose integers may begin elsewhere than at 0, and whose
        Box may be one of integers. An array of jax's, or one of NumPy's, also with an axis of environments in front.
    frames(states, actions [T, ...]) -> pictures `[H, W, 3]` of the T + 1 states of an episode, and its T rewards; None
        if it cannot be drawn.
    """

    restart: Callable[[Key, Array, Tree], tuple[Tree, Tree]]
    to_action: Callable[[Any], Any]
    frames: Callable[[Tree, np.ndarray], tuple[list[np.ndarray], list[float]]] | None = None


class Env(NamedTuple):
    """One environment, without batch axes and without automatic resets.

    reset(key) -> state, obs
    step(key, state, action) -> state, TimeStep. The action lies in `action_space`: those of a Gaussian, which knows no
        bounds, are clipped before (`Box.nearest`), while learners keep what was drawn.
    observation_space: of an observation, which is one array (float32 in a Box, int32 in Discrete), or of several: a
        dictionary or any other pytree of spaces, by whose structure observations come.
    time_limit: the longest episode, in steps.
    context(state): what the policy sees once, at the start of the episode, such as a prompt. It is stored once per
        episode. None if there are only observations.
    outcome(state): Outcome of the episode that ended in `state`, computed once per episode. None if there are only the
        rewards of the steps.
    measure(outcome, length, group_size): further metrics of a batch of whole episodes, `[B]`, in groups of neighbours
        with the same start state; computed over all devices together. None if there are none.
    min_truncation_step: no episode is truncated (ended by a time-out) before this many steps. It only bounds memory: a
        rollout stores a final observation per time-out, and arrays need a fixed size, so a segment of T steps has
        1 + ceil((T - 1) / min_truncation_step) slots per column (`rollout.segments.final_obs_slots`). 1 is always
        correct; a larger value saves memory.
    action_mask(obs): `[..., n]` bool, which of n discrete actions are allowed, read off an observation with any leading
        axes. Policies give the others probability 0 (Huang and Ontañón 2022, "A Closer Look at Invalid Action Masking
        in Policy Gradient Algorithms"). None where all actions are always allowed.
    host: of an environment that lives on the host (`envs.host`); None for one that is computed in the program.
    reward_terms: by name, the terms of `outcome`'s reward, where some are to be standardised over episodes: a learner
        then recomputes the reward (`update.normalization.standardize_rewards`). The reward of the last action must be
        the outcome's alone; the rewards of the actions before it, such as those of the steps of a chain of thought,
        stay as they are. None where the reward of the outcome is final.
    render(state): the picture of a state, `[H, W, 3]` bytes, for `jaxpg play`; called with numpy arrays, outside of any
        compiled program. None if it has none.
    episode_metrics(state): numbers of the episode that ended in `state`, [] by name, such as whether it was a success.
        Their means over episodes are metrics of training and of evaluations, "env_NAME". None if there are none.
    """

    name: str
    reset: Callable[[Key], tuple[Tree, Tree]]
    step: Callable[[Key, Tree, Array], tuple[Tree, TimeStep]]
    observation_space: Spaces
    action_space: Space
    time_limit: int
    context: Callable[[Tree], Tree] | None = None
    outcome: Callable[[Tree], Outcome] | None = None
    measure: Callable[[Outcome, Array, int], Metrics] | None = None
    min_truncation_step: int = 1
    action_mask: Callable[[Array], Array] | None = None
    host: HostParts | None = None
    reward_terms: Mapping[str, RewardTerm] | None = None
    render: Callable[[Any], np.ndarray] | None = None
    episode_metrics: Callable[[Tree], Mapping[str, Array]] | None = None

    def __hash__(self) -> int:
        return hash((self.name, self.reset, self.step))  # the other fields may be dictionaries

    def initial_input(self, state: Tree, obs: Tree) -> Tree:
        """The input of `Policy.start`: the context, or the first observation in environments without one."""
        return obs if self.context is None else self.context(state)


class Policy(NamedTuple):
    """A distribution over actions; `start` and `act` are for one environment, `evaluate` for a whole batch.

    init(key) -> params
    start(params, initial_input) -> memory: the memory at the start of an episode, `()` for policies without one; see
        `Env.initial_input`.
    act(params, memory, obs) -> distribution, memory; `models.distributions` has the methods of a distribution.
    evaluate(params, rollout) -> distribution over `[T, B]`, equal to that of `act` at every step; a language model's
        has log-probabilities, entropy and KL alone, and neither samples nor logits.
    needs_trajectories: `evaluate` needs whole columns in order of time, so a minibatch is a set of columns, not of
        steps.
    evaluates_from_context: `evaluate` computes the memory from the rollout's context, so `Episodes.memory` is not
        stored.
    evaluates_packed: `evaluate` also takes rollouts whose context is PackedTexts.
    read_prompts(params, prompts) -> memory, leaves `[N, ...]`, of prompts `[N, P]` but for their last tokens: all that
        `evaluate` has to know of a prompt that several texts share (see SharedPrompts). None: texts contain their own.
    acting_params(params) -> what `start` and `act` are given instead, for as long as the parameters stay the same: a
        copy in the arithmetic of acting, with which they give the same distributions. None: the parameters themselves.
    acts_rounded: `act` computes in half precision, in another order than `evaluate`, so that the log-probabilities of
        both differ, by some hundredths, and by tenths where logits are in the tens; what needs them closer reads those
        of `evaluate`.
    with_room(memory, steps) -> memory, of one environment or of many, which has room for as many steps more, or less
        where the number, which is static, is negative; `start` gives it room for the time limit. A rollout of long
        episodes lets it grow, so that `act` need not read what is still empty. None: it does not grow with the steps.
    noise(key, shape) -> random numbers for `evaluate`, leaves `[T, B, ...]` for a shape `(T, B)`, of a policy whose
        loss is random, as in RPO or with dropout. New ones are drawn for every gradient step, and the losses read
        `evaluate(params, rollout, noise)`; everything else reads `evaluate` without. None for any other policy.
    max_steps: the longest episode for which `start` makes room, in steps; where an environment's time limit is longer,
        rollouts and evaluations refuse it. None: any.
    """

    init: Callable[[Key], Tree]
    start: Callable[[Tree, Tree], Tree]
    act: Callable[[Tree, Tree, Tree], tuple[Any, Tree]]
    evaluate: Callable[..., Any]
    needs_trajectories: bool = False
    evaluates_from_context: bool = False
    evaluates_packed: bool = False
    read_prompts: Callable[[Tree, Prompt], Tree] | None = None
    acting_params: Callable[[Tree], Tree] | None = None
    acts_rounded: bool = False
    with_room: Callable[[Tree, int], Tree] | None = None
    noise: Callable[[Key, tuple[int, int]], Tree] | None = None
    max_steps: int | None = None

    def for_acting(self, params: Tree) -> Tree:
        """The parameters as `start` and `act` read them: `acting_params`, where the policy has them."""
        return self.acting_params(params) if self.acting_params else params


class Params(NamedTuple):
    """All trained parameters: those of the policy and those of the critic, `()` without a critic."""

    policy: Tree
    critic: Tree


class Critic(NamedTuple):
    """A state-value function.

    init(key) -> params
    values(params, rollout) -> v_tm1, v_t: V(obs) and V of its successor, `[T, B]` each. v_t is used only where the
        discount is not 0 (see `rollout.successor_values`). `params` is the whole of Params, so that a critic can use
        the policy's torso in `params.policy`.
    evaluates_packed: `values` also takes rollouts whose context is PackedTexts; v_t is 0 after the last slot of a text.
    joint: how it is evaluated together with its policy; None for one that has nothing to do with a policy.
    """

    init: Callable[[Key], Tree]
    values: Callable[[Params, Rollout], tuple[Array, Array]]
    evaluates_packed: bool = False
    joint: JointEvaluation | None = None


class JointEvaluation(NamedTuple):
    """A policy and a critic evaluated together, for speed alone: a torso that they share once, or two side by side.

    evaluate, values: those of the Policy and the Critic that it stands for. Where one of them has been replaced, both
        are evaluated by themselves.
    both(params, rollout) -> distribution, v_tm1: what these two give.
    """

    evaluate: Callable[..., Any]
    values: Callable[[Params, Rollout], tuple[Array, Array]]
    both: Callable[[Params, Rollout], tuple[Any, Array]]


class Actor(NamedTuple):
    """A policy with fixed parameters, to evaluate and to record; for one environment.

    start(initial_input) -> memory
    act(memory, obs, key, greedy) -> action, memory; `greedy` (a Python bool) takes the mode instead of a sample.
    max_steps: that of the policy.
    """

    start: Callable[[Tree], Tree]
    act: Callable[[Tree, Tree, Key, bool], tuple[Array, Tree]]
    max_steps: int | None = None


class Experience(NamedTuple):
    """How a learner gathers experience in an environment: to look again at what it has learned from.

    env: the environment.
    collect(state, key) -> Rollout, [B] int32: what `Learner.step` with the same arguments learns from, as the
        environment returned it, and how many steps the episodes had lasted before it.
    """

    env: Env
    collect: Callable[[Any, Key], tuple[Rollout, Array]]


class Learner(NamedTuple):
    """Every algorithm that learns, as four functions. Training, evaluation and checkpoints need nothing else.

    init(key) -> state: a NamedTuple of arrays. What belongs to single environments, leaves `[B, ...]`, is in its field
        `runner`, if it has one, and is split over devices; every other field is replicated.
    step(state, key) -> state, metrics: one iteration. Metrics are a flat dict of scalars. `steps` (int32) counts the
        environment steps since `init`, which end below 2^31. `return` and `length` are means over the episodes that
        ended in this iteration, which `episodes` counts; these and other means over what a metric counts
        (`training.advance.counted_by`) are NaN where it is 0. All others are finite as long as training is healthy.
    actor(state) -> Actor
    with_policy(state, params) -> state with the policy's parameters replaced by `params`, for fine-tuning.
    experience: how it gathers experience, None for a learner without an environment. Training does not use it.
    """

    init: Callable[[Key], Any]
    step: Callable[[Any, Key], tuple[Any, Metrics]]
    actor: Callable[[Any], Actor]
    with_policy: Callable[[Any, Tree], Any]
    experience: Experience | None = None
