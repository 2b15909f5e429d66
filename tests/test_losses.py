"""Whole losses and what they do to parameters, beside slow loops in float64 over a ragged batch.

A learner is given one batch and makes two gradient steps on it, so that the second sees a policy and a critic that have
moved; the loops know the algorithms by their formulas alone. The policy and the critic are tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpg import ladder, rollout, update
from jaxpg.policy_gradient import policy_gradient
from jaxpg.types import Params, Rollout, Transition

T, B, GROUP, STATES, ACTIONS = 5, 9, 3, 4, 3
LENGTHS = (5, 2, 3, 4, 1, 5, 3, 4, 2)
CUT_OFF, LEFT_OUT = 0, 8  # columns: one that the time limit ended, one that does not train
WITHOUT_SIGNAL = range(3, 6)  # the group whose members all have the same return
STEP_SIZE, GAMMA, LAMBDA, ENTROPY, KL, VALUE, VALUE_CLIP, MAX_LENGTH = 0.5, 0.9, 0.8, 0.03, 0.3, 0.7, 0.02, 7

SHARED = {"num_envs": B, "learning_rate": STEP_SIZE, "max_grad_norm": None, "entropy_coefficient": ENTROPY}
SHARED |= {"epochs": 2, "num_minibatches": 1}
CRITIC = {"value_coefficient": VALUE, "gae_lambda": LAMBDA, "gamma": GAMMA}
GROUPS = {"group_size": GROUP, "gamma": 1.0}

# name: (algorithm, its settings)
CASES = {
    "ppo": ("ppo", {**CRITIC, "num_steps": T, "value_clip": VALUE_CLIP}),
    "rlhf": ("rlhf", {**CRITIC, "kl_coefficient": KL}),
    "grpo": ("grpo", {**GROUPS, "kl_coefficient": KL}),
    "rloo": ("rloo", {**GROUPS, "kl": "loss_ratio_k3", "kl_coefficient": KL}),
    "dr_grpo": ("dr_grpo", {**GROUPS, "kl": "loss_k2", "kl_coefficient": KL, "max_length": MAX_LENGTH}),
    "dapo": ("dapo", {**GROUPS, "max_resample_rounds": 1, "overlong_filtering": True}),
    "gspo": ("gspo", {**GROUPS, "kl_coefficient": KL, "clip": 0.12, "clip_high": 0.05}),
    "cispo": ("cispo", {**GROUPS, "max_resample_rounds": 1, "clip": 0.3, "clip_high": 0.2}),
}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


class Tables(NamedTuple):
    """The policies by their logits `[S, A]`, and the critic's values `[S]`."""

    policy: np.ndarray
    reference: np.ndarray
    values: np.ndarray


RNG = np.random.default_rng(0)
TABLES = Tables(RNG.normal(size=(STATES, ACTIONS)), RNG.normal(size=(STATES, ACTIONS)), RNG.normal(size=STATES))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def batch(segments: bool) -> Rollout:
    """Segments with both kinds of ends, or whole episodes and poison behind them; actions of some other policy."""
    rng = np.random.default_rng(1)
    state, action = rng.integers(STATES, size=(T, B)), rng.integers(ACTIONS, size=(T, B))
    log_prob = log_softmax(TABLES.policy)[state, action] + rng.normal(scale=0.5, size=(T, B))
    reward, mask = rng.normal(size=(T, B)), np.ones((T, B))
    if segments:
        discount = (rng.random((T, B)) > 0.2).astype(float)
        last = (discount == 0) | (rng.random((T, B)) < 0.2)
    else:
        t, lengths = np.arange(T)[:, None], np.array(LENGTHS)[None]
        mask, last = (t < lengths).astype(float), t >= lengths - 1
        discount = np.where(last, 0.0, 1.0)
        discount[-1, CUT_OFF] = 1.0
        reward *= mask
        for b in WITHOUT_SIGNAL:
            reward[:, b] = 0.0
            reward[LENGTHS[b] - 1, b] = 1.5
        log_prob = np.where(mask, log_prob, 10.0)
    loss_mask = mask * (np.arange(B) != LEFT_OUT)
    final_obs = np.eye(STATES)[rng.integers(STATES, size=(T if segments else 1, B))]
    steps = Transition(np.eye(STATES)[state], action, log_prob, reward, discount, last, mask)
    return jax.tree.map(jnp.asarray, Rollout(steps, loss_mask, final_obs))


# --- the loops


def slow_rewards(name: str, part: Rollout) -> np.ndarray:
    """What is credited: of RLHF the reward less the price of leaving the reference."""
    reward = np.array(part.steps.reward)
    if name == "rlhf":
        reference = log_softmax(TABLES.reference)
        for t, b in np.argwhere(part.steps.mask):
            state, action = part.steps.obs[t, b].argmax(), part.steps.action[t, b]
            reward[t, b] -= KL * (part.steps.log_prob[t, b] - reference[state, action])
    return reward


def slow_gae(reward: np.ndarray, part: Rollout) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and targets of the critic."""
    steps, successors = part.steps, tiny.next_obs(part)
    advantage, target = np.zeros((T, B)), np.zeros((T, B))
    for b in range(B):
        following = 0.0
        for t in reversed(range(T)):
            if steps.mask[t, b] == 0:
                continue
            value = TABLES.values[steps.obs[t, b].argmax()]
            ahead = 0.0 if steps.discount[t, b] == 0 else TABLES.values[successors[t, b].argmax()]
            goes_on = steps.discount[t, b] * (not steps.last[t, b])
            following = reward[t, b] + GAMMA * ahead - value + GAMMA * LAMBDA * goes_on * following
            advantage[t, b], target[t, b] = following, following + value
    return advantage, target


def slow_groups(name: str, reward: np.ndarray, part: Rollout) -> np.ndarray:
    """Advantages within groups of whole episodes."""
    advantage, score = np.zeros((T, B)), reward.sum(0)
    for b in range(B):
        group = range(b // GROUP * GROUP, b // GROUP * GROUP + GROUP)
        scores = [score[i] for i in group]
        if b in WITHOUT_SIGNAL:
            psi = 0.0
        elif name == "rloo":
            psi = score[b] - np.mean([score[i] for i in group if i != b])
        elif name == "dr_grpo":
            psi = score[b] - np.mean(scores)
        else:
            psi = (score[b] - np.mean(scores)) / (np.std(scores, ddof=1) + 1e-4)
        advantage[:, b] = psi * np.asarray(part.steps.mask)[:, b]
    return advantage


def slow_weights(name: str, part: Rollout) -> np.ndarray:
    """What each step counts for."""
    loss_mask = np.array(part.loss_mask)
    if name in ("dapo", "cispo"):
        loss_mask[:, WITHOUT_SIGNAL] = 0
    if name == "dapo":
        loss_mask[:, CUT_OFF] = 0
    weight = np.zeros((T, B))
    episodes = sum(loss_mask[:, b].any() for b in range(B))
    for t, b in np.argwhere(loss_mask):
        if name in ("grpo", "rloo", "gspo"):
            weight[t, b] = 1 / (episodes * loss_mask[:, b].sum())
        elif name == "dr_grpo":
            weight[t, b] = 1 / (episodes * MAX_LENGTH)
        else:
            weight[t, b] = 1 / loss_mask.sum()
    return weight


def slow_surrogate(name: str, ratio: float, log_prob: float, psi: float, weight: float) -> float:
    """The policy's loss of a step; `weight` is the ratio as a constant."""
    if name == "cispo":
        return -np.clip(weight, 0.7, 1.2) * psi * log_prob
    low, high = {"dapo": (0.8, 1.28), "gspo": (0.88, 1.05)}.get(name, (0.8, 1.2))
    return -min(ratio * psi, np.clip(ratio, low, high) * psi)


def slow_kl(name: str, ratio: float, log_prob: float, reference: float) -> float:
    """What leaving the reference costs in the loss of a step."""
    k3 = np.exp(reference - log_prob) - (reference - log_prob) - 1
    k2 = (log_prob - reference) ** 2 / 2
    return {"grpo": KL * k3, "gspo": KL * k3, "rloo": KL * ratio * k3, "dr_grpo": KL * k2}.get(name, 0.0)


def slow_episode_ratio(log_pi: np.ndarray, part: Rollout, b: int) -> float:
    """The geometric mean of the ratios of an episode."""
    product, length = 1.0, 0
    for t in range(T):
        if part.steps.mask[t, b]:
            state, action = int(part.steps.obs[t, b].argmax()), int(part.steps.action[t, b])
            product *= np.exp(log_pi[state, action] - float(part.steps.log_prob[t, b]))
            length += 1
    return product ** (1 / length)


def slow_loss(name: str, part: Rollout) -> Callable[[np.ndarray, np.ndarray, np.ndarray], float]:
    """The loss of a policy, a critic, and the policy that counts as a constant where a formula stops the gradient."""
    steps, reference = part.steps, log_softmax(TABLES.reference)
    learns_values = name in ("ppo", "rlhf")
    reward, weight = slow_rewards(name, part), slow_weights(name, part)
    if learns_values:
        psi, target = slow_gae(reward, part)
        trained = psi[np.asarray(part.loss_mask) > 0]
        psi = (psi - trained.mean()) / (trained.std(ddof=1) + 1e-8)
    else:
        psi = slow_groups(name, reward, part)

    def loss(logits: np.ndarray, values: np.ndarray, constant: np.ndarray) -> float:
        total, log_pi, held = 0.0, log_softmax(logits), log_softmax(constant)
        episode_ratios = [slow_episode_ratio(log_pi, part, b) for b in range(B)] if name == "gspo" else None
        for t, b in np.argwhere(weight):
            state, action = int(steps.obs[t, b].argmax()), int(steps.action[t, b])
            log_prob, old_log_prob = log_pi[state, action], float(steps.log_prob[t, b])
            ratio = np.exp(log_prob - old_log_prob) if episode_ratios is None else episode_ratios[b]
            one = slow_surrogate(name, ratio, log_prob, psi[t, b], np.exp(held[state, action] - old_log_prob))
            one += slow_kl(name, ratio, log_prob, reference[state, action])
            one -= ENTROPY * -sum(np.exp(x) * x for x in log_pi[state])
            if learns_values:
                value, old_value = values[state], TABLES.values[state]
                error = (value - target[t, b]) ** 2
                if name == "ppo":
                    near = old_value + np.clip(value - old_value, -VALUE_CLIP, VALUE_CLIP)
                    error = max(error, (near - target[t, b]) ** 2)
                one += VALUE * error / 2
            total += weight[t, b] * one
        return total

    return loss


def slope(function: Callable[[np.ndarray], float], x: np.ndarray, h: float = 1e-3) -> np.ndarray:
    """The gradient by differences of fourth order."""
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        one = np.zeros_like(x)
        one[i] = h
        near, far = function(x + one) - function(x - one), function(x + 2 * one) - function(x - 2 * one)
        gradient[i] = (8 * near - far) / (12 * h)
    return gradient


# --- the learner


def two_steps(name: str, part: Rollout, monkeypatch: pytest.MonkeyPatch) -> tuple[float, Params, dict]:
    """The learner's loss before it learns from the batch, its parameters afterwards, and its metrics."""
    stats = rollout.RolloutStats(*[jnp.ones(())] * 4)

    def collector(num_envs: int, group_size: int = 1, **_: int) -> rollout.Collector:
        return rollout.Collector(lambda *_: (), lambda *_: ((), part, stats), num_envs, group_size, True)

    for way in ("continuing", "episodic"):
        monkeypatch.setattr(rollout, way, collector)
    kind, settings = CASES[name]
    algorithm, losses = ladder.ALGORITHMS[kind](**SHARED, **settings)._replace(optimizer=update.sgd), []

    def spy_update(objective, optimizer, learning_rate, params, opt_state, batch, key):
        losses.append(float(objective.loss(params, objective.as_minibatch(batch))[0]))
        return algorithm.update(objective, optimizer, learning_rate, params, opt_state, batch, key)

    policy, critic = tiny.softmax_policy(jnp.asarray(TABLES.policy)), tiny.value_table(jnp.asarray(TABLES.values))
    env = tiny.counter()
    env = env._replace(reset=lambda key: (tiny.counter().reset(key)[0], jnp.zeros(len(TABLES.policy))))  # as it is read
    learner = policy_gradient(env, policy, critic, algorithm._replace(update=spy_update))
    state = learner.init(jax.random.key(0))
    if algorithm.reference_kl:
        state = state._replace(reference=jnp.asarray(TABLES.reference))
    state, metrics = learner.step(state, jax.random.key(1))
    return losses[0], state.params, metrics


@pytest.mark.parametrize("name", CASES)
def test_a_loss_and_its_gradient_steps_are_those_of_slow_loops(name, monkeypatch):
    part = batch(segments=name == "ppo")
    first, params, metrics = two_steps(name, part, monkeypatch)
    loss = slow_loss(name, part)
    np.testing.assert_allclose(first, loss(TABLES.policy, TABLES.values, TABLES.policy), atol=1e-10)
    logits, values = TABLES.policy, TABLES.values
    for _ in range(2):
        by_logits = slope(lambda x, v=values, c=logits: loss(x, v, c), logits)
        by_values = slope(lambda v, x=logits: loss(x, v, x), values)
        assert np.abs(by_logits).max() > 0.01
        logits, values = logits - STEP_SIZE * by_logits, values - STEP_SIZE * by_values
    np.testing.assert_allclose(params.policy, logits, rtol=0, atol=1e-8)
    if name in ("ppo", "rlhf"):
        assert np.abs(values - TABLES.values).max() > VALUE_CLIP
        np.testing.assert_allclose(params.critic, values, rtol=0, atol=1e-8)
    assert metrics["clipped_high"] + metrics["clipped_low"] > 0 or name == "cispo"  # cispo keeps every gradient
