"""From a config to an experiment: the environments, the networks, the learner, and how it is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from jaxpg import envs, ladder, preferences, values
from jaxpg.algorithm import PolicyGradient, needs_trajectories
from jaxpg.envs.text.rewards import make_reward
from jaxpg.errors import UserError
from jaxpg.experiments.config import Config, make_env, wrapped
from jaxpg.experiments.parts import is_deep_q, make_algorithm, make_networks, make_torso, with_own_parts
from jaxpg.experiments.signatures import options
from jaxpg.models import language_model
from jaxpg.policy_gradient import policy_gradient
from jaxpg.preferences import selection
from jaxpg.rollout.episodes import check_groups
from jaxpg.rollout.evaluation import RecordedEpisode, evaluation_metrics, record_episodes
from jaxpg.types import Array, Critic, Env, Key, Learner, Metrics, Policy, Tree
from jaxpg.user_input.domains import INT32_MAX
from jaxpg.user_input.user_code import explain_failure, is_code_name

Evaluate = Callable[[Any, Key], Metrics]
"""The learner's state, key -> scalars by name."""


class Experiment(NamedTuple):
    """What a config describes.

    learner: what is trained.
    env: the environment that it is trained on.
    held_out: the environment that it is evaluated on: the same, but with the held-out problems of a text task.
    evaluate(state, key): metrics of the learner's state; checkpoints are ranked by `return`.
    record(state, key): the episodes `[E, ...]` of the same evaluation, recorded; None where rewards are those of whole
        episodes, and where the environment is on the host, which checks its numbers itself.
    """

    learner: Learner
    env: Env
    held_out: Env
    evaluate: Evaluate
    record: Callable[[Any, Key], RecordedEpisode] | None = None


class Judge(NamedTuple):
    """What a learned reward model is good for.

    role: the setting of a config that takes its run.
    log_weight: how it weighs completions to choose among them.
    """

    role: str
    log_weight: selection.LogWeight


class AlgorithmKind(NamedTuple):
    """What depends on the kind of an algorithm.

    build(config, env, held_out, shards): its learner, and the function that evaluates it.
    score: the metric of an evaluation that is recorded as `return`, by which checkpoints are ranked.
    judge: what its reward model is good for; None where it learns a policy instead.
    action_values(state): the table of action values `[S, A]` that it has learned; None where it learns no table.
    data: the table of a config that says what it learns from; None where it learns from episodes.
    """

    build: Callable[[Config, Env, Env, int], tuple[Learner, Evaluate]]
    score: str = "return"
    judge: Judge | None = None
    action_values: Callable[[Any], Array] | None = None
    data: str | None = None

    @property
    def has_policy(self) -> bool:
        """Whether it learns a policy, which can act and write."""
        return self.judge is None


def build(config: Config, shards: int = 1, models: Mapping[str, Tree] = MappingProxyType({})) -> Experiment:
    """The experiment of a config.

    Args:
        config: what to build.
        shards: devices over which the environments of one seed will be split.
        models: by the setting that names it, the parameters of each reward model (`Config.reward_models`).

    Raises:
        UserError: parts that do not fit together, such as minibatches that do not divide the batch.
    """
    env, held_out = (_env(config, split, models) for split in ("train", "test"))
    kind = kind_of(config)
    learner, measure = kind.build(config, env, held_out, shards)

    def evaluate(state: Any, key: Key) -> Metrics:
        metrics = measure(state, key)
        return {"return": metrics[kind.score], **metrics}

    def record(state: Any, key: Key) -> RecordedEpisode:
        return record_episodes(held_out, learner.actor(state), key, **_evaluation_settings(config))

    looks_again = held_out.outcome is None and held_out.host is None
    return Experiment(learner, env, held_out, evaluate, record if looks_again else None)


def writes_text(config: Config, env: Env) -> bool:
    """Whether what is trained on `env` writes completions."""
    return kind_of(config).has_policy and env.context is not None


def networks(config: Config, env: Env) -> tuple[Policy, Critic]:
    """The policy and the critic of a config; raises as `make_networks`."""
    settings = dict(config.network)
    return make_networks(config.algorithm, settings.pop("kind"), env, settings)


def reward_network(config: Config, env: Env) -> language_model.RewardModel:
    """A reward model of the policy's size."""
    sizes = {name: x for name, x in config.network.items() if name in options(language_model.transformer_reward_model)}
    return language_model.transformer_reward_model(env, **sizes)


def _trained_reward_network(config: Config, env: Env) -> language_model.RewardModel:
    """The network of a run that trains a reward model.

    Raises:
        UserError: the config names another kind than a transformer.
    """
    if (kind := config.network["kind"]) != "transformer":
        raise UserError(
            f"{config.algorithm} trains a transformer, not the network {kind}: set network.kind = transformer, in the "
            f"section {config.algorithm} where the policy has another network."
        )
    return reward_network(config, env)


def text_task(config: Config, split: str) -> envs.text.Task:
    """The text task of a config.

    Raises:
        UserError: its environment is not a text task, see `envs.make_task`.
    """
    of_the_env = options(envs.text.text_env)
    settings = {name: x for name, x in config.environment_settings.items() if name not in of_the_env}
    if "split" in envs.default_settings(config.environment):
        settings["split"] = split
    return envs.make_task(config.environment, **settings)


def _policy_gradient(config: Config, env: Env, held_out: Env, shards: int) -> tuple[Learner, Evaluate]:
    policy, critic = networks(config, env)
    algorithm = make_algorithm(config.algorithm, config.settings)
    assert isinstance(algorithm, PolicyGradient)
    algorithm = with_own_parts(algorithm, **_own_parts(config))
    _check_division(config, env.time_limit, needs_trajectories(policy, algorithm), shards)
    learner = _checked(policy_gradient(env, policy, critic, algorithm, **config.learner), config)
    return learner, _episode_metrics(config, held_out, learner)


def _deep_q(config: Config, env: Env, held_out: Env, shards: int) -> tuple[Learner, Evaluate]:
    _refuse_scaling(config)
    network = dict(config.network)
    torso = make_torso(config.algorithm, network.pop("kind"), env, network)
    _check_replay(config, shards)
    _check_division(config, env.time_limit, False, shards)
    algorithm = make_algorithm(config.algorithm, config.settings)
    assert isinstance(algorithm, values.DeepQ)
    learner = _checked(values.deep_q(env, torso, with_own_parts(algorithm, **_own_parts(config))), config)
    jax.eval_shape(learner.init, jax.random.key(0))  # refuses a buffer that is too small, before anything is written
    return learner, _episode_metrics(config, held_out, learner)


def _of_the_user(config: Config, env: Env, held_out: Env, shards: int) -> tuple[Learner, Evaluate]:
    """An algorithm of the user's: which of both it is, its function says, and that is imported here at the earliest."""
    build_one = _deep_q if is_deep_q(config.algorithm) else _policy_gradient
    return build_one(config, env, held_out, shards)


def _tabular_control(config: Config, env: Env, held_out: Env, shards: int) -> tuple[Learner, Evaluate]:
    _refuse_scaling(config)
    _refuse_own_parts(config)
    if env.host:
        raise UserError(f"{config.algorithm} learns a table inside of one program, and {env.name} is on the host.")
    _check_division(config, env.time_limit, False, shards)
    learner = values.tabular_control(env, values.TABULAR_ALGORITHMS[config.algorithm](**config.settings))
    return learner, _episode_metrics(config, held_out, learner)


def _sft(config: Config, env: Env, held_out: Env, shards: int) -> tuple[Learner, Evaluate]:
    _refuse_scaling(config)
    _refuse_own_parts(config)
    policy, _ = networks(config, env)
    task = preferences.make_demonstrations(text_task(config, "train"), **config.demonstrations)
    learner = preferences.sft(task, policy, **config.settings)
    return learner, _episode_metrics(config, held_out, learner)


def _dpo(config: Config, env: Env, held_out: Env, shards: int) -> tuple[Learner, Evaluate]:
    _refuse_scaling(config)
    _refuse_own_parts(config)
    policy, _ = networks(config, env)
    pairs = make_pairs(config)
    learner = preferences.dpo(pairs, policy, **config.settings)
    episodes = _episode_metrics(config, held_out, learner)
    settings = preferences.DPOSettings(*(config.settings[name] for name in preferences.DPOSettings._fields))
    on_pairs = partial(
        preferences.held_out_preferences, pairs, policy, num_pairs=config.evaluation_episodes, settings=settings
    )

    def measure(state: Any, key: Key) -> Metrics:
        """Of what it writes, and of held-out pairs; the keys of the episodes are those of every other policy."""
        return episodes(state, key) | on_pairs(state.params.policy, state.reference, jax.random.fold_in(key, 1))

    return learner, measure


def _reward_model(config: Config, env: Env, held_out: Env, shards: int) -> tuple[Learner, Evaluate]:
    """A reward model; its accuracy is how often it agrees with the judge on held-out pairs."""
    _refuse_scaling(config)
    _refuse_own_parts(config)
    pairs, model = make_pairs(config), _trained_reward_network(config, env)

    def measure(state: Any, key: Key) -> Metrics:
        params, number = state.params.critic, config.evaluation_episodes
        return {"accuracy": preferences.held_out_accuracy(pairs, model, params, key, num_pairs=number)}

    return preferences.reward_model(pairs, model, **config.settings), measure


def _process_reward_model(config: Config, env: Env, held_out: Env, shards: int) -> tuple[Learner, Evaluate]:
    """A process reward model; its accuracy is how often it agrees with the labels of held-out steps."""
    _refuse_scaling(config)
    _refuse_own_parts(config)
    policy, _ = networks(config, env)
    train, test = (text_task(config, split) for split in ("train", "test"))
    labels = preferences.make_step_labels(train, test, policy, **config.step_labels)
    model = _trained_reward_network(config, env)
    if labels.policy and config.initial is None:
        raise UserError(
            f"{config.algorithm} learns from completions of the policy that it begins with, and there is none: set "
            "initial, as --from RUN does, or name a file of labelled steps, step_labels.file."
        )

    def measure(state: Any, key: Key) -> Metrics:
        params, number = state.params.critic, config.evaluation_episodes
        found = preferences.held_out_step_accuracy(labels, model, params, state.reference, key, num_completions=number)
        return {"accuracy": found.accuracy, "accuracy_right": found.right, "accuracy_wrong": found.wrong}

    return preferences.process_reward_model(labels, model, **config.settings), measure


KINDS: dict[str, AlgorithmKind] = {
    **dict.fromkeys(ladder.ALGORITHMS, AlgorithmKind(_policy_gradient)),
    **dict.fromkeys(values.ALGORITHMS, AlgorithmKind(_deep_q)),
    **dict.fromkeys(values.TABULAR_ALGORITHMS, AlgorithmKind(_tabular_control, action_values=values.mean_table)),
    "sft": AlgorithmKind(_sft, data="demonstrations"),
    "dpo": AlgorithmKind(_dpo, data="pairs"),
    "reward_model": AlgorithmKind(
        _reward_model, score="accuracy", judge=Judge("reward", selection.by_outcome), data="pairs"
    ),
    "process_reward_model": AlgorithmKind(
        _process_reward_model,
        score="accuracy",
        judge=Judge("process_reward", selection.by_process),
        data="step_labels",
    ),
}
"""The kind of every algorithm, by the algorithm's name."""


def kind_of(config: Config) -> AlgorithmKind:
    """The kind of a config's algorithm."""
    return KINDS.get(config.algorithm, AlgorithmKind(_of_the_user))


def _checked(learner: Learner, config: Config) -> Learner:
    """A learner with code of the user's, traced once, so that its mistakes are reported before anything is written.

    Raises:
        UserError: the user's algorithm or network cannot be traced.
    """
    parts = (config.algorithm, config.network["kind"], config.optimizer.get("kind"), config.schedule.get("kind"))
    own = [name for name in parts if name is not None and is_code_name(name)]
    if own:
        with explain_failure(f"Training with {' and '.join(own)}"):
            key = jax.eval_shape(lambda: jax.random.key(0))
            jax.eval_shape(learner.step, jax.eval_shape(learner.init, key), key)
    return learner


def _episode_metrics(config: Config, held_out: Env, learner: Learner) -> Evaluate:
    """Evaluation of a learner by whole episodes of its actor in `held_out`."""
    if config.evaluation_episodes % config.evaluation_samples:
        raise UserError(
            f"evaluation_samples = {config.evaluation_samples} does not divide evaluation_episodes = "
            f"{config.evaluation_episodes}: it is the number of evaluation episodes per start state."
        )

    def measure(state: Any, key: Key) -> Metrics:
        return evaluation_metrics(held_out, learner.actor(state), key, **_evaluation_settings(config))

    return measure


def _evaluation_settings(config: Config) -> dict[str, Any]:
    """How the policy of a config is evaluated."""
    return {
        "episodes": config.evaluation_episodes,
        "greedy": config.evaluation_greedy,
        "group_size": config.evaluation_samples,
    }


def make_pairs(config: Config) -> preferences.Pairs:
    """The preference pairs of a config; raises as `preferences.make_pairs`."""
    return preferences.make_pairs(text_task(config, "train"), text_task(config, "test"), **config.pairs)


def _env(config: Config, split: str, models: Mapping[str, Tree]) -> Env:
    """The environment of a config, with the rewards and the reward models that the config itself names."""
    given = [name for name in ("rewards", "reward", "process_reward") if getattr(config, name)]
    if not given:
        return make_env(config, split)
    if not envs.task_factory(config.environment):
        raise UserError(
            f"{config.environment} is not a text task, so it takes no list of rewards: remove {' and '.join(given)}. "
            f"There are: {', '.join(envs.TEXT_TASKS)}."
        )
    task, rewards = text_task(config, split), dict(config.reward_list)
    settings = {name: x for name, x in config.environment_settings.items() if name in options(envs.text.text_env)}
    if not config.reward_models:
        return wrapped(config, envs.text.text_env(task, **{**settings, "rewards": rewards}))
    model = reward_network(config, make_env(config, split))
    if config.process_reward:
        task = preferences.judged_by_model(task, model, models.get("process_reward"))
        settings["process_weight"] = config.process_weight
    for name, entry in rewards.items():
        setting = "reward" if config.reward else f"rewards.{name}.model"
        if setting in config.reward_models:
            rewards[name] = make_reward(name, entry, task, preferences.score_of(model, models.get(setting)))
    if rewards:
        settings["rewards"] = rewards
    return wrapped(config, preferences.with_true_reward(envs.text.text_env(task, **settings), task))


def _refuse_scaling(config: Config) -> None:
    """Refuse what only the learner of policy gradients has."""
    scaled = [name for name, given in config.learner.items() if given]
    if scaled:
        raise UserError(f"{config.algorithm} has no {scaled[0]}: set {scaled[0]} = false in its section.")


def _own_parts(config: Config) -> dict[str, Any]:
    """What a config says about the optimizer and the step size."""
    clip = config.settings.get("max_grad_norm")
    return {"optimizer": config.optimizer, "schedule": config.schedule, "max_grad_norm": clip}


def _refuse_own_parts(config: Config) -> None:
    """Refuse an optimizer or a schedule of the user's where the learner has one of its own."""
    if given := next((name for name in ("optimizer", "schedule") if getattr(config, name)), None):
        raise UserError(
            f"{config.algorithm} takes no {given}: name it in the section of an algorithm that does, one of the policy "
            "gradients or of the deep Q-learners."
        )


def _check_replay(config: Config, shards: int) -> None:
    """Refuse batches that devices cannot share."""
    batch_size = config.settings.get("batch_size", shards)
    if batch_size % shards:
        raise UserError(f"batch_size = {batch_size} cannot be split evenly over {shards} devices.")


def _check_division(config: Config, time_limit: int, needs_trajectories: bool, shards: int) -> None:
    """Refuse batches that cannot be cut into equal parts over groups, devices and minibatches."""
    settings = config.settings
    num_envs, group_size = settings["num_envs"], settings.get("group_size", 1)
    if num_envs % shards:
        raise UserError(f"num_envs = {num_envs} cannot be split evenly over {shards} devices.")
    local = num_envs // shards
    check_groups(local, group_size, shards)
    steps = settings.get("num_steps") or time_limit
    rows = local if needs_trajectories else local * steps
    if num_envs * steps > INT32_MAX:
        raise UserError(
            f"num_envs = {num_envs} x {steps} steps are more than the 2^31 - 1 that a batch can have: make one smaller."
        )
    batch = f"{local} environments" if needs_trajectories else f"{local} environments x {steps} steps = {rows} rows"
    for name in ("num_minibatches", "value_minibatches"):
        if rows % settings.get(name, 1):
            raise UserError(f"{name} = {settings[name]} does not divide the batch of {batch}.")
