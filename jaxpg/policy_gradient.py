"""The one learner that runs every algorithm of the ladder."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.errors import ScopeParamShapeError

from jaxpg.algorithm import PolicyGradient, make_batch, make_objective
from jaxpg.domains import check_scalars
from jaxpg.errors import UserError, check_functions, check_numbers, check_record, excerpt, refuse_unknown
from jaxpg.models.distributions import Categorical
from jaxpg.models.initial_weights import in_one_loop
from jaxpg.objectives import advantages, loss_weights
from jaxpg.objectives.adaptation import Adaptation
from jaxpg.objectives.kl import ReferenceKL, k1
from jaxpg.objectives.metrics import credit_metrics, explained_variance
from jaxpg.objectives.surrogates import PerEpisode
from jaxpg.parallel import collectives
from jaxpg.rollout.collector import Collector, CollectorState, RolloutStats, acting_params, make_actor, reset_env
from jaxpg.rollout.metrics import episode_metrics, outcome_metrics
from jaxpg.types import (
    Actor,
    Array,
    Critic,
    Discrete,
    Env,
    Experience,
    Key,
    Learner,
    Metrics,
    Params,
    Policy,
    Rollout,
    Tree,
    space_leaves,
    space_struct,
)
from jaxpg.update.normalization import (
    NormalizationState,
    initial_moments,
    initial_term_moments,
    normalize_rollout,
    standardize_rewards,
    with_normalized_obs,
)
from jaxpg.update.objective import Batch, Objective
from jaxpg.update.optimizers import checked_optimizer
from jaxpg.vectorize import copy_tree, polyak_update

__all__ = ["Parts", "PolicyGradient", "RunnerState", "TrainState", "policy_gradient"]


class RunnerState(NamedTuple):
    """What belongs to single environments, leaves `[B, ...]`, split over devices.

    collector: the state of the collector: environments, observations, the policy's memory.
    reward_sum: discounted sum of the rewards so far in each environment, `()` where rewards are not scaled.
    """

    collector: Tree
    reward_sum: Tree


class TrainState(NamedTuple):
    """Everything that a run carries from iteration to iteration.

    baseline: running average of returns, for `advantages.mean_baseline`.
    reference: the reference policy's parameters, `()` without one.
    steps: environment steps so far, int32.
    algorithm: the state of the algorithm's adaptation, empty without one.
    """

    params: Params
    opt_state: Tree
    runner: RunnerState
    normalization: NormalizationState
    baseline: Array
    reference: Tree
    steps: Array
    algorithm: Metrics


class Parts(NamedTuple):
    """The parts of a learner that do not change during training."""

    env: Env
    policy: Policy
    critic: Critic | None
    algorithm: PolicyGradient
    objective: Objective
    optimizer: optax.GradientTransformation


def policy_gradient(
    env: Env,
    policy: Policy,
    critic: Critic | None,
    algorithm: PolicyGradient,
    *,
    normalize_observations: bool = False,
    scale_rewards: bool = False,
) -> Learner:
    """The learner of `algorithm` on `env`.

    Args:
        env: the environment.
        policy: the policy to train.
        critic: its value function; ignored by algorithms without a value loss.
        algorithm: the algorithm (ladder.py).
        normalize_observations: observations less their running mean, divided by their running standard deviation,
            which are in the state of the learner and not among the parameters of a policy: a reference policy sees
            what the policy sees.
        scale_rewards: divide rewards by the running standard deviation of the discounted sum of rewards.

    Raises:
        ValueError: the algorithm has a value loss and no critic was given.
        UserError: one of them is no record of its kind, such as a name, or a field of the algorithm no function;
            observations are to be normalised and are tokens or other integers, or hold a mask of actions;
            surrogate, credit or weights are of whole episodes, and the collector cuts them; or the updates of the
            optimizer have the sign in them. `init` raises one if the policy's observations or actions are not those of
            the environment.
    """
    _check_records(env, policy, critic, algorithm)
    for path, space in space_leaves(env.observation_space) if normalize_observations else ():
        if isinstance(space, Discrete):
            raise UserError(
                f"normalize_observations needs observations that are real numbers; {'obs' + path if path else 'those'} "
                f"of {env.name} are the integers from 0 to {space.n - 1}, whose mean is meaningless. Set it to false."
            )
    if normalize_observations and env.action_mask:
        raise UserError(
            f"normalize_observations cannot be used on {env.name}: its observations hold the mask of allowed actions, "
            "which must stay zeros and ones. Set it to false."
        )
    if algorithm.value_loss is None:
        critic = None
    elif critic is None:
        raise ValueError("This algorithm learns a value function: pass a critic, or use one without (value_loss=None).")
    objective = make_objective(policy, critic, algorithm)
    key = jax.random.key(0)  # for shapes alone
    optimizer = checked_optimizer(algorithm.optimizer, partial(_init_params, policy, critic, key, key))
    parts = Parts(env, policy, critic, algorithm, objective, optimizer)

    def actor(state: TrainState) -> Actor:
        return make_actor(with_normalized_obs(env, policy, state.normalization), state.params.policy)

    def with_policy(state: TrainState, params: Tree) -> TrainState:
        reference = copy_tree(params) if algorithm.reference_kl else ()
        policy = copy_tree(params)  # a state may be donated, and they are the caller's
        return state._replace(params=state.params._replace(policy=policy), reference=reference)

    init = partial(_init, parts, normalize_observations=normalize_observations, scale_rewards=scale_rewards)
    experience = None if env.host else Experience(env, partial(_experience, parts))  # the host checks its numbers
    return Learner(init, partial(_step, parts), actor, with_policy, experience)


FUNCTIONS = ("credit", "normalize", "loss_weights", "update", "optimizer", "learning_rate")
"""Fields of an algorithm that are called."""
NUMBERS = ("gamma", "value_coefficient", "entropy_coefficient", "reference_rate")
"""Fields of an algorithm that are numbers."""


def _check_records(env: Any, policy: Any, critic: Any, algorithm: Any) -> None:
    """Refuse names and functions in the place of records, and numbers in the place of functions."""
    for given, kind, example in (
        (env, Env, 'envs.make("CartPole-v1")'),
        (policy, Policy, "the first of networks.mlp(env)"),
        (critic, Critic, "the second of networks.mlp(env)"),
        (algorithm, PolicyGradient, "ladder.ppo()"),
    ):
        if kind is not Critic or given is not None:
            check_record("policy_gradient", given, kind, example)
    _check_algorithm(algorithm)


def _check_algorithm(algorithm: PolicyGradient) -> None:
    """Refuse an algorithm with fields of another kind, or with some that do not fit together."""
    _check_fields(algorithm)
    _check_whole_episodes(algorithm)
    _check_discounts(algorithm)


def _check_fields(algorithm: PolicyGradient) -> None:
    """Refuse fields of an algorithm that are of another kind than PolicyGradient says."""
    check_record("A PolicyGradient", algorithm.collector, Collector, "rollout.continuing(...)")
    for optional, kind, example in (
        (algorithm.reference_kl, ReferenceKL, 'objectives.kl.reference_kl("loss_k3", 0.1)'),
        (algorithm.adaptation, Adaptation, "Adaptation(init, apply, update)"),
    ):
        if optional is not None:
            check_record("A PolicyGradient", optional, kind, example)
    functions = FUNCTIONS if isinstance(algorithm.surrogate, PerEpisode) else ("surrogate", *FUNCTIONS)
    check_functions(algorithm, functions if algorithm.value_loss is None else (*functions, "value_loss"))
    check_numbers(algorithm, NUMBERS)
    check_scalars({name: getattr(algorithm, name) for name in NUMBERS})


OF_WHOLE_EPISODES = (
    *(advantages.group_relative, advantages.process_relative, advantages.leave_one_out),
    *(loss_weights.per_episode, loss_weights.per_episode_over),
)
"""Credits and weights that take a column for one episode."""


def _check_whole_episodes(algorithm: PolicyGradient) -> None:
    """Refuse parts that take a column for one episode where columns are segments of several, and other groups."""
    collector = algorithm.collector
    for part in ("surrogate", "credit", "loss_weights"):
        function: Any = getattr(algorithm, part)
        given: dict[str, Any] = {}
        while isinstance(function, partial):
            function, given = function.func, function.keywords | given
        if not isinstance(function, PerEpisode) and function not in OF_WHOLE_EPISODES:
            continue
        name = getattr(function, "__name__", type(function).__name__)
        if not collector.whole_episodes:
            raise UserError(
                f"The {part} ({name}) needs whole episodes, but the collector returns segments that cut "
                "them: collect with rollout.episodic, which is num_steps = none for the children of PPO."
            )
        takes_size = callable(function) and "group_size" in inspect.signature(function).parameters
        if takes_size and "group_size" not in given:
            raise UserError(
                f"The {part} ({name}) has to know the size of groups: "
                f"functools.partial({name}, group_size={collector.group_size})."
            )
        if (size := given.get("group_size", collector.group_size)) != collector.group_size:
            raise UserError(
                f"The {part} ({name}) uses groups of {size} episodes, and the collector makes groups of "
                f"{collector.group_size}: collect with rollout.episodic(num_envs=..., group_size={size})."
            )


def _check_discounts(algorithm: PolicyGradient) -> None:
    """Refuse a sampler that compares episodes by another discount than the algorithm's; traced ones may differ."""
    ours, samplers = algorithm.gamma, algorithm.collector.gamma
    traced = any(isinstance(gamma, jax.core.Tracer) for gamma in (ours, samplers))
    if samplers is not None and not traced and samplers != ours:
        raise UserError(
            f"The gamma of this algorithm is {ours}, and its dynamic sampling compares episodes by a gamma of "
            f"{samplers}: give it to the algorithm's function, as in ladder.dapo(gamma={ours})."
        )


def _init_params(policy: Policy, critic: Critic | None, policy_key: Key, critic_key: Key) -> Params:
    return Params(policy.init(policy_key), critic.init(critic_key) if critic else ())


def _init(parts: Parts, key: Key, *, normalize_observations: bool, scale_rewards: bool) -> TrainState:
    """New parameters, optimizer state and environments."""
    policy, critic, algorithm = parts.policy, parts.critic, parts.algorithm
    policy_key, critic_key, runner_key = jax.random.split(key, 3)
    params = in_one_loop(partial(_init_params, policy, critic), policy_key, critic_key)
    normalization = NormalizationState(
        obs=initial_moments(space_struct(parts.env.observation_space)) if normalize_observations else (),
        reward_sums=initial_moments() if scale_rewards else (),
        reward_terms=initial_term_moments(parts.env.reward_terms),
    )
    acting = with_normalized_obs(parts.env, policy, normalization)
    collector = algorithm.collector.init(parts.env, acting, params.policy, runner_key)
    _check_actions(parts.env, acting, params.policy, collector)
    return TrainState(
        params=params,
        opt_state=parts.optimizer.init(params),
        runner=RunnerState(
            collector=collector,
            reward_sum=jnp.zeros(algorithm.collector.num_envs, jnp.float32) if scale_rewards else (),
        ),
        normalization=normalization,
        baseline=jnp.zeros((), jnp.float32),
        reference=copy_tree(params.policy) if algorithm.reference_kl else (),
        steps=jnp.zeros((), jnp.int32),
        algorithm=_before_training(algorithm.adaptation),
    )


def _check_actions(env: Env, policy: Policy, params: Tree, collector: Tree) -> None:
    """Refuse a policy whose actions have another shape or dtype than the environment's: arrays would be broadcast.

    `collector` is the state of the collector. Where it holds environments nothing is reset to see an observation: one
    of LunarLander takes a second to trace.
    """
    params = jax.eval_shape(partial(acting_params, policy), params)
    if isinstance(collector, CollectorState):
        begun = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), collector)
    else:
        begun = jax.eval_shape(partial(reset_env, env, policy), params, jax.random.key(0))
    try:
        acted = jax.eval_shape(policy.act, params, begun.memory, begun.obs)
    except ScopeParamShapeError as error:
        shapes = jax.tree.map(lambda x: list(x.shape), begun.obs)
        raise UserError(
            f"The policy was made for other observations than those of {env.name}, {shapes}: make the network from "
            "this environment."
        ) from error
    if not isinstance(acted, tuple) or len(acted) != 2 or not hasattr(acted[0], "mode"):
        raise UserError(f"The act of a policy gives a distribution and the memory, not {excerpt(acted)}.")
    distribution, memory = acted
    _check_distribution(distribution)
    if (new := _kinds(memory)) != (old := _kinds(begun.memory)):
        raise UserError(
            f"The memory of a policy keeps its shapes and dtypes: start gives {old}, and act makes it {new}."
        )
    action = jax.eval_shape(lambda x: x.mode(), distribution)
    space = env.action_space
    kind = jnp.integer if isinstance(space, Discrete) else jnp.floating
    fits = action.shape == space.shape and jnp.issubdtype(action.dtype, kind)
    choices = ""
    if isinstance(distribution, Categorical) and isinstance(space, Discrete):
        fits &= distribution.logits.shape[-1] == space.n
        choices = f", one of {distribution.logits.shape[-1]}"
    if not fits:
        expected = f"one of {space.n} integers" if isinstance(space, Discrete) else f"{list(space.shape)} real numbers"
        raise UserError(
            f"An action of {env.name} is {expected}, and the policy's distribution gives {action.dtype.name}"
            f"{list(action.shape)}{choices}. Make the network from this environment, or change its last layer."
        )


def _check_distribution(distribution: Any) -> None:
    missing = [x for x in ("noise", "at", "sample", "log_prob", "log_prob_and_entropy") if not hasattr(distribution, x)]
    if missing:
        raise UserError(
            f"The distribution of a policy, a {type(distribution).__name__}, has no {' and no '.join(missing)}: "
            "jaxpg/models/distributions.py says what each does."
        )


def _kinds(tree: Tree) -> Any:
    """The shapes and dtypes of a tree, as a tree of text that a sentence can show."""
    return jax.tree.map(lambda x: f"{x.dtype.name}{list(x.shape)}", tree)


def _step(parts: Parts, state: TrainState, key: Key) -> tuple[TrainState, Metrics]:
    """One iteration: collect a rollout, credit its actions, update the parameters."""
    parts = _adapted(parts, state)
    algorithm, params = parts.algorithm, state.params
    # The third key is not used: random-number code is compiled for every number of keys, and `_init` makes three. The
    # first two are those of `split(key)` (benchmarks/LOG.md, "keys by threes").
    collect_key, update_key, _ = jax.random.split(key, 3)
    collector, rollout, stats = _collect(parts, state, collect_key)
    rollout, term_moments, weighted = standardize_rewards(
        parts.env.reward_terms, rollout, state.normalization.reward_terms
    )
    normalization = state.normalization._replace(reward_terms=term_moments)
    rollout, reward_sum, normalization = normalize_rollout(
        rollout, state.runner.reward_sum, normalization, algorithm.gamma
    )
    batch, credit = make_batch(parts.policy, parts.critic, algorithm, params, state.reference, state.baseline, rollout)
    learning_rate = algorithm.learning_rate(state.steps)
    if jnp.shape(learning_rate) != ():
        raise UserError(f"The learning_rate of an algorithm gives one number, not {excerpt(learning_rate)}.")
    params, opt_state, metrics = _updated(parts, learning_rate, state, batch, update_key)
    of_rollout = {"learning_rate": learning_rate, **_rollout_metrics(parts, batch, rollout, stats), **weighted}
    if known := sorted(metrics.keys() & of_rollout):
        raise UserError(f"The update of an algorithm gives the metric {known[0]!r}, which is one already: rename it.")
    metrics |= of_rollout
    if known := sorted(metrics.keys() & state.algorithm):
        raise UserError(f"The state of an adaptation is a metric, and {known[0]!r} is one already: rename it.")
    steps = state.steps + stats.steps.astype(jnp.int32)
    metrics |= state.algorithm
    state = TrainState(
        params=params,
        opt_state=opt_state,
        runner=RunnerState(collector, reward_sum),
        normalization=normalization,
        baseline=credit.baseline,
        reference=polyak_update(state.reference, params.policy, algorithm.reference_rate),
        steps=steps,
        algorithm=_after_iteration(algorithm.adaptation, state.algorithm, metrics | {"steps": steps}),
    )
    # `steps` stays an integer: float32 counts no further than 2^24.
    return state, {name: jnp.asarray(x, jnp.float32) for name, x in metrics.items()} | {"steps": state.steps}


def _updated(
    parts: Parts, learning_rate: Array, state: TrainState, batch: Batch, key: Key
) -> tuple[Params, Tree, Metrics]:
    """The algorithm's update: parameters, optimizer state and metrics, a number each."""
    result = parts.algorithm.update(
        parts.objective, parts.optimizer, learning_rate, state.params, state.opt_state, batch, key
    )
    if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[2], dict):
        raise UserError(
            "The update of an algorithm gives params, opt_state and a dict of metrics, as update.gradient_step does, "
            f"not {excerpt(result)}."
        )
    params, opt_state, metrics = result
    for name, x in metrics.items():
        if jnp.shape(x) != ():
            raise UserError(
                f"A metric is one number, and the update of the algorithm gives {name!r} as an array "
                f"{list(jnp.shape(x))}: take its mean, or give every number a name of its own."
            )
    return params, opt_state, dict(metrics)


def _before_training(adaptation: Adaptation | None) -> Metrics:
    """The state of an adaptation before the first iteration."""
    return _as_state(adaptation.init()) if adaptation else {}


def _as_state(given: Any) -> Metrics:
    """What an adaptation gave as its state: float32 numbers by name.

    Raises:
        UserError: it is something else.
    """
    if not isinstance(given, dict):
        raise UserError(f"The state of an adaptation is a dict of numbers, not {excerpt(given)}.")
    for name, x in given.items():
        if isinstance(x, dict) or jnp.shape(x):
            raise UserError(
                f"The state of an adaptation is a dict of numbers, each of which is a metric, and {name!r} is "
                f"{excerpt(x)}: give every number a name of its own."
            )
    return {name: jnp.asarray(x, jnp.float32) for name, x in given.items()}


def _after_iteration(adaptation: Adaptation | None, state: Metrics, metrics: Metrics) -> Metrics:
    """The state of an adaptation after an iteration with these metrics."""
    if adaptation is None:
        return state
    try:
        new = _as_state(adaptation.update(state, metrics))
    except KeyError as error:
        if error.args[0] in metrics:
            raise
        refuse_unknown("metric", error.args[0], metrics, " for the adaptation of this algorithm")
    if new.keys() != state.keys():
        raise UserError(
            f"The update of an adaptation must keep the numbers that its init gave, {sorted(state)}, and gives "
            f"{sorted(new)}."
        )
    return new


def _adapted(parts: Parts, state: TrainState) -> Parts:
    """The parts of this iteration: those of the algorithm as its adaptation has made it."""
    adaptation = parts.algorithm.adaptation
    if adaptation is None:
        return parts
    algorithm = adaptation.apply(parts.algorithm, state.algorithm)
    check_record(
        "The apply of an adaptation gives the algorithm, and policy_gradient",
        algorithm,
        PolicyGradient,
        "algorithm._replace(...)",
    )
    _check_algorithm(algorithm)
    for field in ("reference_kl", "value_loss"):
        if (getattr(algorithm, field) is None) != (getattr(parts.algorithm, field) is None):
            raise UserError(
                f"An adaptation cannot add or remove the {field}, for which the learner has parameters: begin with "
                "one, of weight 0 where it is to come later."
            )
    for field in ("collector", "optimizer"):
        if getattr(algorithm, field) is not getattr(parts.algorithm, field):
            raise UserError(
                f"An adaptation cannot change the {field}, which has a state of its own: change other fields by "
                "algorithm._replace. A step size that changes is the field learning_rate."
            )
    return parts._replace(algorithm=algorithm, objective=make_objective(parts.policy, parts.critic, algorithm))


def _collect(parts: Parts, state: TrainState, key: Key) -> tuple[Tree, Rollout, RolloutStats]:
    """The rollout of an iteration, with observations and rewards of the environment."""
    acting = with_normalized_obs(parts.env, parts.policy, state.normalization)
    return parts.algorithm.collector.collect(parts.env, acting, state.params.policy, state.runner.collector, key)


def _experience(parts: Parts, state: TrainState, key: Key) -> tuple[Rollout, Array]:
    """What `_step` learns from; see `Experience.collect`."""
    _, rollout, _ = _collect(parts, state, jax.random.split(key)[0])
    before = state.runner.collector
    carried = isinstance(before, CollectorState)
    return rollout, before.episode_length if carried else jnp.zeros(rollout.loss_mask.shape[1], jnp.int32)


def _rollout_metrics(parts: Parts, batch: Batch, rollout: Rollout, stats: RolloutStats) -> Metrics:
    """Metrics of the experience, of what its actions are credited with, and of the critic's values for it."""
    episodes = rollout.episodes
    metrics = episode_metrics(stats) | outcome_metrics(episodes.outcome)
    metrics |= credit_metrics(batch.advantage, batch.target, rollout.loss_mask)
    if parts.env.measure:
        group_size = parts.algorithm.collector.group_size
        metrics |= parts.env.measure(episodes.outcome, episodes.length, group_size)
    if parts.algorithm.adaptation and parts.algorithm.reference_kl and parts.algorithm.collector.whole_episodes:
        log_ratio = k1(rollout.steps.log_prob, batch.reference_log_prob)
        mask = rollout.steps.mask
        total, count = jnp.where(mask > 0, log_ratio, 0).sum(), mask.max(0).sum()
        metrics["episode_reference_kl"] = collectives.psum(total) / collectives.psum(count)
    if parts.critic:
        metrics["explained_variance"] = explained_variance(batch.old_value, batch.target, rollout.loss_mask)
    return metrics
