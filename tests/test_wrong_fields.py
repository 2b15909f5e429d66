"""Fields of an algorithm, and functions of a network, that `_replace` has put out of shape: refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from jaxpg import envs, ladder, networks, rollout, values
from jaxpg.algorithm import PolicyGradient
from jaxpg.errors import UserError
from jaxpg.objectives import advantages, loss_weights
from jaxpg.objectives.adaptation import Adaptation
from jaxpg.objectives.advantages import Credit
from jaxpg.policy_gradient import policy_gradient
from jaxpg.types import Array, Critic, Learner, Metrics, Policy, Tree
from jaxpg.values import q_networks, replay, targets

ENV = tiny.counter()
PPO = ladder.ppo(num_envs=4, num_steps=4, num_minibatches=2, epochs=1)
POLICY, CRITIC = tiny.softmax_policy(jnp.zeros((2, 3))), tiny.value_table(jnp.zeros(2))
DQN = values.dqn(num_envs=4, buffer_size=64, batch_size=4, learning_starts=4)


def trace(learner: Learner) -> Metrics:
    """One iteration, traced and not run: its metrics."""
    key = jax.random.key(0)
    return jax.eval_shape(learner.step, jax.eval_shape(learner.init, key), key)[1]


def traced(algorithm: PolicyGradient = PPO, policy: Policy = POLICY, critic: Critic = CRITIC) -> Metrics:
    return trace(policy_gradient(ENV, policy, critic, algorithm))


def keeps(state: Metrics, metrics: Metrics) -> Metrics:
    return state


def unchanged(algorithm: PolicyGradient, state: Metrics) -> PolicyGradient:
    return algorithm


def adapted(init: Any, apply: Callable[..., Any] = unchanged, update: Callable[..., Any] = keeps) -> PolicyGradient:
    return PPO._replace(adaptation=Adaptation(lambda: init, apply, update))


def with_metrics(metrics: Metrics) -> PolicyGradient:
    def update(*arguments: Any) -> Any:
        params, opt_state, own = PPO.update(*arguments)
        return params, opt_state, {**own, **metrics}

    return PPO._replace(update=update)


def with_baseline(baseline: Any) -> PolicyGradient:
    return PPO._replace(credit=lambda steps, v_tm1, v_t, _, *, gamma: Credit(v_tm1, v_tm1, baseline))


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        (PPO._replace(collector=None), r"takes a record Collector: rollout\.continuing\(\.\.\.\), not None"),
        (PPO._replace(reference_kl="loss_k3"), "takes a record ReferenceKL: .*, not 'loss_k3'"),
        (PPO._replace(adaptation={"x": 1}), "takes a record Adaptation"),
        (PPO._replace(value_loss="squared"), "value_loss of an algorithm is a function, not 'squared'"),
        (PPO._replace(gamma=None), "gamma of an algorithm is one number, not None"),
        (PPO._replace(gamma="0.9"), "gamma of an algorithm is one number, not '0.9'"),
        (PPO._replace(entropy_coefficient=jnp.ones(3)), "entropy_coefficient of an algorithm is one number, not Array"),
        (PPO._replace(learning_rate=lambda steps: jnp.ones(3)), "learning_rate of an algorithm gives one number"),
        (PPO._replace(update=lambda *arguments: arguments[3:5]), "update of an algorithm gives params, opt_state and"),
        (with_metrics({"mine": jnp.ones((2, 4))}), r"gives 'mine' as an array \[2, 4\]: take its mean"),
        (with_metrics({"return": jnp.zeros(())}), "gives the metric 'return', which is one already"),
        (with_baseline(None), "baseline of a Credit is one number, not None"),
        (with_baseline(jnp.zeros(4)), "baseline of a Credit is one number, not "),
        (adapted(None), "state of an adaptation is a dict of numbers, not None"),
        (adapted({"x": 1}, apply=lambda algorithm, state: None), "takes a record PolicyGradient"),
        (
            adapted({"x": 1}, apply=lambda algorithm, state: algorithm._replace(value_loss=None)),
            "cannot add or remove the value_loss",
        ),
        (
            adapted({"x": 1}, apply=lambda algorithm, state: algorithm._replace(loss_weights=loss_weights.per_episode)),
            r"The loss_weights \(per_episode\) needs whole episodes",
        ),
        (adapted({"x": 1}, apply=lambda algorithm, state: algorithm._replace(gamma=2)), "gamma must be at most 1"),
        (adapted({"x": 1}, apply=lambda algorithm, state: algorithm._replace(credit=3)), "credit .* is a function"),
        (PPO._replace(gamma=2.0), r"gamma must be at most 1, not 2\.0"),
        (
            ladder.grpo(num_envs=8)._replace(credit=advantages.group_relative),
            r"The credit \(group_relative\) has to know .*: functools.partial\(group_relative, group_size=8\)",
        ),
        (adapted({"x": 1}, update=lambda state, metrics: None), "a dict of numbers, not None"),
        (adapted({"x": 1}, update=lambda state, metrics: {}), r"must keep the numbers that its init gave, \['x'\]"),
    ],
)
def test_a_field_of_another_kind(algorithm: PolicyGradient, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        traced(algorithm)


def test_fields_that_are_right() -> None:
    """A metric of one's own, a baseline that is a number of Python's, and a state that begins as an integer."""
    assert "mine" in traced(with_metrics({"mine": jnp.zeros(())}))
    traced(with_baseline(0))
    assert traced(adapted({"x": 1}, update=lambda state, metrics: {"x": state["x"] + 0.5}))["x"].dtype == jnp.float32


class Wrapped(NamedTuple):
    """A distribution whose entropy keeps an axis."""

    inner: Any

    def mode(self) -> Array:
        return self.inner.mode()

    def noise(self, key: Array) -> Array:
        return self.inner.noise(key)

    def at(self, noise: Array) -> Array:
        return self.inner.at(noise)

    def sample(self, key: Array) -> Array:
        return self.inner.sample(key)

    def log_prob(self, action: Array) -> Array:
        return self.inner.log_prob(action)

    def log_prob_and_entropy(self, action: Array) -> tuple[Array, Array]:
        log_prob, entropy = self.inner.log_prob_and_entropy(action)
        return log_prob, entropy[..., None]


class OnlyMode(NamedTuple):
    inner: Any

    def mode(self) -> Array:
        return self.inner.mode()


def acting(change: Callable[[Any, Tree], Any]) -> Policy:
    return POLICY._replace(act=lambda params, memory, obs: change(*POLICY.act(params, memory, obs)))


def value_with_axis(params: Any, steps: Any) -> Any:
    return rollout.rollout_values(steps, lambda obs: jnp.zeros((*jnp.shape(steps.steps.last)[:1], obs.shape[1], 1)))


@pytest.mark.parametrize(
    ("policy", "critic", "sentence"),
    [
        (acting(lambda found, memory: found), CRITIC, "act of a policy gives a distribution and the memory, not"),
        (acting(lambda found, memory: (OnlyMode(found), memory)), CRITIC, "a OnlyMode, has no noise and no at and no"),
        (
            acting(lambda found, memory: (found, jnp.zeros(())))._replace(start=lambda params, obs: jnp.int32(0)),
            CRITIC,
            r"memory of a policy keeps its shapes and dtypes: start gives int32\[\], and act makes it float32\[\]",
        ),
        (
            POLICY._replace(evaluate=lambda params, steps: Wrapped(POLICY.evaluate(params, steps))),
            CRITIC,
            r"policy's entropy must give one number per step, \[1, 8\] here, not an array of shape \[1, 8, 1\]",
        ),
        (POLICY, CRITIC._replace(values=value_with_axis), r"one number per observation, .* take the last axis off"),
        (
            POLICY,
            CRITIC._replace(values=lambda params, steps: CRITIC.values(params, steps)[0]),
            "values of a Critic are a pair, .* as rollout.rollout_values makes them",
        ),
        (
            POLICY,
            CRITIC._replace(values=lambda params, steps: [x[..., None] for x in CRITIC.values(params, steps)]),
            "values of a Critic are a pair",
        ),
        (
            POLICY,
            CRITIC._replace(values=lambda params, steps: tuple(x[..., None] for x in CRITIC.values(params, steps))),
            r"critic's values must give one number per step, \[4, 4\] here",
        ),
    ],
)
def test_a_network_of_another_shape(policy: Policy, critic: Critic, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        traced(PPO, policy, critic)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: optax.adam(optax.linear_schedule(0.0, 1.0, 50)),
        lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1.0, 100, 5000)),
        lambda: optax.MultiSteps(optax.adam(1.0), 2),  # type: ignore[arg-type]
    ],
)
def test_an_optimizer_that_climbs_after_updates_of_0(optimizer: Callable[[], Any]) -> None:
    with pytest.raises(UserError, match="returns updates that include the sign"):
        traced(PPO._replace(optimizer=optimizer))
    turned = optax.chain(optax.adamw(optax.linear_schedule(0.0, 1.0, 50)), optax.scale(-1.0))
    traced(PPO._replace(optimizer=lambda: turned))
    traced(PPO._replace(optimizer=optax.set_to_zero))


class OneTooMany(nn.Module):
    num_actions: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return nn.Dense(self.num_actions + 1)(x)[..., None]


class WithoutEstimates(nn.Module):
    num_actions: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return nn.Dense(self.num_actions)(x)


FIFTY = partial(q_networks.LinearHead, quantiles=50)


@pytest.mark.parametrize(
    ("replaced", "sentence"),
    [
        ({"n_steps": 0}, "n_steps must be an integer, at least 1, not 0"),
        ({"n_steps": 2.0}, r"n_steps must be an integer, at least 1, not 2\.0"),
        ({"collector": rollout.episodic(num_envs=4)}, "returns whole episodes, .* collect with rollout.continuing"),
        ({"collector": None}, "takes a record Collector"),
        ({"learn": None}, "takes a record LearnFromExperience"),
        ({"sampling": "uniform"}, "takes a record Sampling"),
        ({"sampling": None}, "sampling must say how, and is None"),
        ({"move_target": 200}, "move_target of an algorithm is a function, not 200"),
        ({"gamma": 1.5}, r"gamma must be at most 1, not 1\.5"),
        ({"gamma": lambda steps: 0.9}, "gamma of an algorithm is a number, not <function"),
        ({"head": OneTooMany}, r"head of a DeepQ gives \[actions, estimates\] .* \[3, 1\] here .* \[4, 1\] of float32"),
        ({"head": WithoutEstimates}, r"head of a DeepQ gives .* not an array \[3\]"),
        ({"head": FIFTY}, "huber_loss is of one estimate per action, and the head gives 50"),
        ({"head": FIFTY, "loss": targets.squared_loss}, "squared_loss is of one estimate per action"),
        (
            {"selector": lambda online, target: target.argmax(-1)},
            r"selector must give a number per action, \[4, 3\] here, not an array of shape \[4\]",
        ),
    ],
)
def test_a_field_of_deep_q(replaced: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        trace(values.deep_q(ENV, values.mlp(ENV), DQN._replace(**replaced)))


def test_a_ring_is_filled_by_equal_parts() -> None:
    rows = replay.StoredSteps(*(jnp.zeros((2, 3)) for _ in replay.StoredSteps._fields))
    with pytest.raises(UserError, match="A buffer of 10 slots cannot be filled by 3 steps at a time"):
        replay.write(replay.empty(rows, 10), rows, jnp.int32(0))


@pytest.mark.parametrize("given", ["learner", "state"])
def test_evaluate_takes_an_actor(given: str) -> None:
    learner = policy_gradient(ENV, POLICY, CRITIC, PPO)
    state = learner.init(jax.random.key(0))
    with pytest.raises(UserError, match=r"evaluate takes a record Actor: learner\.actor\(state\), not"):
        rollout.evaluate(ENV, {"learner": learner, "state": state}[given], jax.random.key(0), episodes=2, greedy=True)  # type: ignore[arg-type]
    evaluate = partial(rollout.evaluate, ENV, learner.actor(state), jax.random.key(0), greedy=True)
    with pytest.raises(UserError, match=r"episodes must be a whole number, not 4\.0"):
        evaluate(episodes=4.0)
    with pytest.raises(UserError, match="group_size must be at least 1, not 0"):
        evaluate(episodes=4, group_size=0)
    assert evaluate(episodes=np.int64(2)).returns.shape == (2,)


def test_a_network_made_for_another_environment() -> None:
    """One with as many actions."""
    acrobot, car = envs.make("Acrobot-v1"), envs.make("MountainCar-v0")
    with pytest.raises(UserError, match=r"made for other observations than those of MountainCar-v0, \[2\]: make the"):
        trace(policy_gradient(car, *networks.mlp(acrobot), PPO))


@pytest.mark.parametrize(("pool", "sentence"), [(-1, "at least 0, not -1"), (2.5, r"a whole number, not 2\.5")])
def test_a_pool_of_start_states_has_a_size(pool: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=f"reset_pool must be {sentence}"):
        rollout.continuing(num_envs=4, num_steps=4, reset_pool=pool)
