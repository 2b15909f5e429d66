"""What `policy_gradient` refuses: records of another kind, and functions of a user that give something else.

All of it is seen when a learner is made, or when its step is traced, and costs a compiled program nothing.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.errors import ScopeParamShapeError

from jaxpg.algorithm import PolicyGradient
from jaxpg.errors import UserError, check_functions, check_numbers, check_record, excerpt
from jaxpg.models.distributions import Categorical
from jaxpg.objectives import advantages, loss_weights
from jaxpg.objectives.adaptation import Adaptation
from jaxpg.objectives.kl import ReferenceKL
from jaxpg.objectives.surrogates import PerEpisode
from jaxpg.rollout.collector import Collector, CollectorState, acting_params, reset_env
from jaxpg.types import Critic, Discrete, Env, Metrics, Policy, Tree, space_leaves
from jaxpg.user_input.domains import check_scalars

FUNCTIONS = ("credit", "normalize", "loss_weights", "update", "optimizer", "learning_rate")
"""Fields of an algorithm that are called."""
NUMBERS = ("gamma", "value_coefficient", "entropy_coefficient", "reference_rate")
"""Fields of an algorithm that are numbers."""


def check_records(env: Any, policy: Any, critic: Any, algorithm: Any) -> None:
    """Refuse names and functions in the place of records, and numbers in the place of functions."""
    for given, kind, example in (
        (env, Env, 'envs.make("CartPole-v1")'),
        (policy, Policy, "the first of networks.mlp(env)"),
        (critic, Critic, "the second of networks.mlp(env)"),
        (algorithm, PolicyGradient, "ladder.ppo()"),
    ):
        if kind is not Critic or given is not None:
            check_record("policy_gradient", given, kind, example)
    check_algorithm(algorithm)


def check_algorithm(algorithm: PolicyGradient) -> None:
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


def check_normalization(env: Env) -> None:
    """Refuse to normalise observations that are integers or hold a mask of actions."""
    for path, space in space_leaves(env.observation_space):
        if isinstance(space, Discrete):
            raise UserError(
                f"normalize_observations needs observations that are real numbers; {'obs' + path if path else 'those'} "
                f"of {env.name} are the integers from 0 to {space.n - 1}, whose mean is meaningless. Set it to false."
            )
    if env.action_mask:
        raise UserError(
            f"normalize_observations cannot be used on {env.name}: its observations hold the mask of allowed actions, "
            "which must stay zeros and ones. Set it to false."
        )


def check_actions(env: Env, policy: Policy, params: Tree, collector: Tree) -> None:
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


def check_learning_rate(learning_rate: Any) -> None:
    """Refuse what the `learning_rate` of an algorithm gave if it is not one number."""
    if jnp.shape(learning_rate) != ():
        raise UserError(f"The learning_rate of an algorithm gives one number, not {excerpt(learning_rate)}.")


def check_update(result: Any) -> None:
    """Refuse what the `update` of an algorithm gave if it is not (params, opt_state, metrics), a number each."""
    if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[2], dict):
        raise UserError(
            "The update of an algorithm gives params, opt_state and a dict of metrics, as update.gradient_step does, "
            f"not {excerpt(result)}."
        )
    for name, x in result[2].items():
        if jnp.shape(x) != ():
            raise UserError(
                f"A metric is one number, and the update of the algorithm gives {name!r} as an array "
                f"{list(jnp.shape(x))}: take its mean, or give every number a name of its own."
            )


def check_metric_names(whose: str, given: Metrics, known: Metrics) -> None:
    """Refuse a metric under a name that another one has: one of them would be lost."""
    if both := sorted(given.keys() & known):
        raise UserError(f"{whose} gives the metric {both[0]!r}, which is one already: rename it.")


def check_adapted(before: PolicyGradient, algorithm: Any) -> None:
    """Refuse what the `apply` of an adaptation made of the algorithm if the learner's state does not fit it."""
    check_record(
        "The apply of an adaptation gives the algorithm, and policy_gradient",
        algorithm,
        PolicyGradient,
        "algorithm._replace(...)",
    )
    check_algorithm(algorithm)
    for field in ("reference_kl", "value_loss"):
        if (getattr(algorithm, field) is None) != (getattr(before, field) is None):
            raise UserError(
                f"An adaptation cannot add or remove the {field}, for which the learner has parameters: begin with "
                "one, of weight 0 where it is to come later."
            )
    for field in ("collector", "optimizer"):
        if getattr(algorithm, field) is not getattr(before, field):
            raise UserError(
                f"An adaptation cannot change the {field}, which has a state of its own: change other fields by "
                "algorithm._replace. A step size that changes is the field learning_rate."
            )


def check_adaptation_state(given: Any) -> None:
    """Refuse what an adaptation gave as its state if it is not a dict of numbers."""
    if not isinstance(given, dict):
        raise UserError(f"The state of an adaptation is a dict of numbers, not {excerpt(given)}.")
    for name, x in given.items():
        if isinstance(x, dict) or jnp.shape(x):
            raise UserError(
                f"The state of an adaptation is a dict of numbers, each of which is a metric, and {name!r} is "
                f"{excerpt(x)}: give every number a name of its own."
            )
