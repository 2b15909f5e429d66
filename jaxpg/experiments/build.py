"""From a config to what trains: the environment, the networks, and the learner around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxpg import envs, ladder, preferences
from jaxpg.errors import UserError
from jaxpg.experiments.config import NETWORKS, SUPERVISED, Config, make_env
from jaxpg.experiments.signatures import options
from jaxpg.models import language_model
from jaxpg.policy_gradient import policy_gradient
from jaxpg.rollout.evaluation import evaluation_metrics
from jaxpg.types import Critic, Env, Key, Learner, Metrics, Policy, Tree

TEXT_TASKS: dict[str, Callable[..., envs.text.Task]] = {**envs.text.TASKS, "json_lines": envs.text.json_lines}
"""The environments that are texts."""


class Experiment(NamedTuple):
    """What a config describes.

    learner: what learns.
    env: where it learns.
    held_out: where it is evaluated: the same, but for what was kept from training.
    evaluate(state, key): what an evaluation of the learner's state measures, `return` first of all.
    """

    learner: Learner
    env: Env
    held_out: Env
    evaluate: Callable[[Any, Key], Metrics]


def build(config: Config, shards: int = 1, reward: Tree = None) -> Experiment:
    """The learner and the environments of a config.

    Args:
        config: what to build.
        shards: devices over which the environments of one seed will be split.
        reward: parameters of the reward model that judges completions, for a config that names one.

    Raises:
        UserError: parts that do not fit together, such as minibatches that do not divide the batch.
    """
    env, held_out = (make_env(config, split) for split in ("train", "test"))
    if config.reward:
        env, held_out = (_rlhf_env(config, split, reward) for split in ("train", "test"))
    if config.algorithm == "reward_model":
        return _reward_model(config, env, held_out)
    if config.algorithm in SUPERVISED:
        learner = _supervised(config, env)
    else:
        policy, critic = networks(config, env)
        _check_division(config, env.time_limit, policy.needs_trajectories, shards)
        algorithm = ladder.ALGORITHMS[config.algorithm](**config.settings)
        learner = policy_gradient(env, policy, critic, algorithm, **config.learner)
    if config.evaluation_episodes % config.evaluation_samples:
        raise UserError(
            f"evaluation_samples = {config.evaluation_samples} does not divide evaluation_episodes = "
            f"{config.evaluation_episodes}: so many episodes of an evaluation begin alike."
        )

    def evaluate(state: Any, key: Key) -> Metrics:
        return evaluation_metrics(
            held_out,
            learner.actor(state),
            key,
            episodes=config.evaluation_episodes,
            greedy=config.evaluation_greedy,
            group_size=config.evaluation_samples,
        )

    return Experiment(learner, env, held_out, evaluate)


def networks(config: Config, env: Env) -> tuple[Policy, Critic]:
    """The policy and the critic of a config."""
    arguments = dict(config.network)
    return NETWORKS[arguments.pop("kind")](env, **arguments)


def text_task(config: Config, split: str) -> envs.text.Task:
    """The text task of a config.

    Raises:
        UserError: its environment is none.
    """
    if config.environment not in TEXT_TASKS:
        raise UserError(
            f"{config.algorithm} learns from texts, and {config.environment} is none. "
            f"There are: {', '.join(TEXT_TASKS)}."
        )
    payment = options(envs.text.text_env)
    settings = {name: x for name, x in config.environment_settings.items() if name not in payment}
    return TEXT_TASKS[config.environment](**{**settings, "split": split})


def _supervised(config: Config, env: Env) -> Learner:
    """The learner of a policy that learns from texts rather than from playing."""
    policy, _ = networks(config, env)
    if config.algorithm == "sft":
        return preferences.sft(text_task(config, "train"), policy, **config.settings)
    return preferences.dpo(_pairs(config), policy, **config.settings)


def _reward_model(config: Config, env: Env, held_out: Env) -> Experiment:
    """A reward model, whose evaluation is how often it agrees with the judge on pairs it has not seen."""
    pairs, model = _pairs(config), reward_network(config, env)

    def evaluate(state: Any, key: Key) -> Metrics:
        params, number = state.params.critic, config.evaluation_episodes
        accuracy = preferences.held_out_accuracy(pairs, model, params, key, num_pairs=number)
        return {"return": accuracy, "accuracy": accuracy}

    return Experiment(preferences.reward_model(pairs, model, **config.settings), env, held_out, evaluate)


def _pairs(config: Config) -> preferences.Pairs:
    return preferences.make_pairs(text_task(config, "train"), text_task(config, "test"), **config.pairs)


def _rlhf_env(config: Config, split: str, reward: Tree) -> Env:
    """The environment of RLHF: completions are worth what the reward model says."""
    plain = make_env(config, split)
    return preferences.rlhf_env(text_task(config, split), reward_network(config, plain), reward)


def reward_network(config: Config, env: Env) -> language_model.RewardModel:
    """A reward model as large as the policy."""
    sizes = {name: x for name, x in config.network.items() if name in options(language_model.transformer_reward_model)}
    return language_model.transformer_reward_model(env, **sizes)


def _check_division(config: Config, time_limit: int, needs_trajectories: bool, shards: int) -> None:
    """Refuse batches that cannot be cut into equal parts over groups, devices and minibatches."""
    settings = config.settings
    envs = settings["num_envs"]
    group = settings.get("group_size", 1)
    if envs % shards:
        raise UserError(f"num_envs = {envs} cannot be split evenly over {shards} devices.")
    local = envs // shards
    if local % group:
        where = f" on each of {shards} devices" if shards > 1 else ""
        raise UserError(f"num_envs = {local}{where} cannot be cut into groups of group_size = {group}.")
    steps = settings.get("num_steps") or time_limit
    rows = local if needs_trajectories else local * steps
    what = f"{local} environments" if needs_trajectories else f"{local} environments x {steps} steps = {rows} rows"
    for name in ("num_minibatches", "value_minibatches"):
        if rows % settings.get(name, 1):
            raise UserError(f"{name} = {settings[name]} does not divide the batch of {what}.")
