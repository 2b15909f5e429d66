"""State of an algorithm: the adaptive weight of a KL, in the record, in the learner's state and in checkpoints."""

from __future__ import annotations

import importlib
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpg import ladder, networks
from jaxpg.errors import UserError
from jaxpg.objectives.adaptation import Adaptation, adaptive_kl
from jaxpg.objectives.kl import reference_kl
from jaxpg.policy_gradient import policy_gradient
from jaxpg.training import checkpoint
from jaxpg.types import Learner

ENV = tiny.counter()  # episodes of unequal length
NETWORK = partial(networks.mlp, hidden=(4,))
SETTINGS: dict[str, Any] = {"num_envs": 8, "epochs": 2, "num_minibatches": 1, "learning_rate": 0.02}
KEYS = jax.random.split(jax.random.key(1), 3)


def controller(coefficient: float, kls: Any, target: float, gain: float) -> list[float]:
    """The weight after each of these KLs, by the formula of Ziegler et al."""
    found = []
    for kl in kls:
        coefficient *= 1 + gain * min(max((kl - target) / target, -0.2), 0.2)
        found.append(coefficient)
    return found


def test_the_weight_follows_the_controller() -> None:
    """Far above the target, far below, within a fifth of it, at it, and without any KL; for several runs at once."""
    kls = [60.0, 0.5, 6.6, 5.5, 6.0, 0.0, -1.0]
    coefficients, targets, gains = jnp.array([0.2, 0.1]), jnp.array([6.0, 5.0]), jnp.array([0.3, 0.1])

    def steered(coefficient: Any, target: Any, gain: Any) -> Any:
        adaptation = adaptive_kl("reward_k1", coefficient, target=target, gain=gain)

        def step(state: Any, kl: Any) -> Any:
            state = adaptation.update(state, {"episode_reference_kl": kl})
            return state, state["kl_coefficient"]

        return jax.lax.scan(step, adaptation.init(), jnp.array(kls))[1]

    found = jax.vmap(steered)(coefficients, targets, gains)
    np.testing.assert_allclose(found[0], controller(0.2, kls, 6.0, 0.3), rtol=1e-5)
    np.testing.assert_allclose(found[1], controller(0.1, kls, 5.0, 0.1), rtol=1e-5)


def test_a_weight_that_has_become_small_comes_back() -> None:
    adaptation = adaptive_kl("reward_k1", 0.05, target=1.0)

    def after(kl: float, steps: int, state: Any) -> Any:
        update = partial(adaptation.update, metrics={"episode_reference_kl": jnp.float32(kl)})
        return jax.lax.fori_loop(0, steps, lambda _, state: update(state), state)

    low = after(0.0, 6000, adaptation.init())
    np.testing.assert_allclose(low["kl_coefficient"], 1e-6)
    np.testing.assert_allclose(after(100.0, 500, low)["kl_coefficient"], 1e-6 * 1.02**500, rtol=1e-4)
    with pytest.raises(UserError, match="kl_coefficient = 0 cannot be steered"):
        ladder.rlhf(kl_coefficient=0.0, reference_kl_target=1.0)


def adapted(adaptation: Adaptation) -> Learner:
    return policy_gradient(ENV, *NETWORK(ENV), ladder.ppo(num_envs=8, num_steps=4)._replace(adaptation=adaptation))


def test_a_coefficient_may_follow_the_steps() -> None:
    """The entropy bonus, from 0.1 to 0 over 96 steps; an iteration takes 32."""
    made = adapted(
        Adaptation(
            init=lambda: {"bonus": jnp.float32(0.1)},
            apply=lambda algorithm, state: algorithm._replace(entropy_coefficient=state["bonus"]),
            update=lambda state, metrics: {"bonus": 0.1 * (1 - metrics["steps"] / 96)},
        )
    )
    _, metrics = jax.jit(lambda state: jax.lax.scan(made.step, state, KEYS))(made.init(jax.random.key(0)))
    np.testing.assert_allclose(metrics["bonus"], [0.1, 0.1 * 2 / 3, 0.1 / 3], rtol=1e-6)


@pytest.mark.parametrize(
    ("adaptation", "sentence"),
    [
        (
            Adaptation(lambda: {"x": jnp.float32(1)}, lambda a, s: a._replace(optimizer=ladder.ppo().optimizer), max),
            "An adaptation cannot change the optimizer",
        ),
        (
            Adaptation(lambda: {"x": jnp.float32(1)}, lambda a, s: a._replace(collector=ladder.ppo().collector), max),
            "An adaptation cannot change the collector",
        ),
        (
            Adaptation(lambda: {"approx_kl": jnp.float32(1)}, lambda a, s: a, lambda s, m: s),
            "'approx_kl', which is one already: rename it",
        ),
        (
            Adaptation(lambda: {"x": jnp.float32(1)}, lambda a, s: a, lambda s, m: {"x": m["kl"]}),
            "no metric 'kl' for the adaptation of this algorithm",
        ),
        (Adaptation(lambda: {"x": jnp.ones(3)}, lambda a, s: a, lambda s, m: s), "each of which is a metric, and 'x'"),
        (Adaptation(lambda: {"x": {"y": 1.0}}, lambda a, s: a, lambda s, m: s), "each of which is a metric, and 'x'"),
    ],
)
def test_what_cannot_be_adapted_is_refused(adaptation: Adaptation, sentence: str) -> None:
    made = adapted(adaptation)
    with pytest.raises(UserError, match=sentence):
        jax.eval_shape(made.step, jax.eval_shape(made.init, KEYS[0]), KEYS[0])


def test_the_kl_of_episodes_is_measured_on_whole_ones() -> None:
    """A column of a segment holds parts of several."""
    adaptation = Adaptation(lambda: {"x": 1.0}, lambda a, s: a, lambda s, m: {"x": m["episode_reference_kl"]})
    algorithm = ladder.a2c(num_envs=4, num_steps=8)._replace(
        reference_kl=reference_kl("loss_k3", 0.1), adaptation=adaptation
    )
    made = policy_gradient(ENV, *NETWORK(ENV), algorithm)
    with pytest.raises(UserError, match="no metric 'episode_reference_kl' for the adaptation"):
        jax.eval_shape(made.step, jax.eval_shape(made.init, KEYS[0]), KEYS[0])


def learner(**settings: Any) -> Learner:
    return policy_gradient(ENV, *NETWORK(ENV), ladder.rlhf(**SETTINGS, **settings))


@pytest.mark.full
@pytest.mark.parametrize("kl", ["reward_k1", "loss_k2"])
def test_every_iteration_has_the_weight_of_its_state(kl: str) -> None:
    """It steps as an algorithm with that constant weight does, and its KL is that of a loop over the episodes."""
    adapted, policy = learner(kl=kl, kl_coefficient=0.3, reference_kl_target=0.01, kl_gain=4.0), NETWORK(ENV)[0]
    state = adapted.init(jax.random.key(0))
    moved = jax.tree.map(lambda x: x + 0.2, state.params.policy)
    state, weights, kls = state._replace(params=state.params._replace(policy=moved)), [], []

    @tiny.jit
    def constant(weight: Any, state: Any, key: Any) -> Any:
        return learner(kl=kl, kl_coefficient=weight).step(state._replace(algorithm={}), key)[0]

    @tiny.jit
    def collected(state: Any, key: Any) -> Any:
        rollout, _ = adapted.experience.collect(state, key)
        steps = rollout.steps
        return steps.mask, steps.log_prob - policy.evaluate(state.reference, rollout).log_prob(steps.action)

    step = tiny.jit(adapted.step)
    for key in KEYS:
        plain, (mask, ratio) = constant(state.algorithm["kl_coefficient"], state, key), collected(state, key)
        state, metrics = step(state, key)
        same = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-9)  # of two programs the last digit may differ
        jax.tree.map(same, plain, state._replace(algorithm={}))
        weights.append(float(metrics["kl_coefficient"]))
        kls.append(float(metrics["episode_reference_kl"]))
        by_hand = [sum(float(r) for r, real in zip(*x, strict=True) if real) for x in zip(ratio.T, mask.T, strict=True)]
        np.testing.assert_allclose(kls[-1], np.mean(by_hand), rtol=1e-4, atol=1e-6)
    assert np.abs(kls).max() > 0.02
    after = controller(0.3, kls, 0.01, 4.0)
    np.testing.assert_allclose([*weights[1:], float(state.algorithm["kl_coefficient"])], after, rtol=1e-5)


def test_a_checkpoint_of_before_is_read_without_a_target_and_refused_with_one(tmp_path: Path) -> None:
    """Without one there is nothing new in it, as in those that older versions wrote."""
    plain, adapted = (jax.eval_shape(learner(reference_kl_target=x).init, jax.random.key(0)) for x in (None, 1.0))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), plain._replace(algorithm={}))
    saved = checkpoint.save(tmp_path, zeros, steps=1, about={})
    assert checkpoint.restore(saved, plain).algorithm == {}
    with pytest.raises(UserError, match=r"the array .algorithm\['kl_coefficient'\] is absent in it"):
        checkpoint.restore(saved, adapted)


@pytest.mark.full
def test_the_penalty_of_the_page_is_doubled_and_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/algorithm.md: its module on two seeds, beside the rule of Schulman et al. by hand."""
    page = (Path(__file__).parent.parent / "docs" / "algorithm.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(# penalty\.py\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "penalty.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    algorithm = importlib.import_module("penalty").penalty_ppo(num_envs=8, num_steps=8, learning_rate=0.02, aim=1e-3)
    made = policy_gradient(ENV, *NETWORK(ENV), algorithm)

    @tiny.jit
    @jax.vmap
    def train(key: Any) -> Any:
        return jax.lax.scan(made.step, made.init(key), jax.random.split(key, 8))[1]

    metrics = train(jax.random.split(jax.random.key(0), 2))
    betas, kls = (np.asarray(metrics[name], np.float64) for name in ("beta", "approx_kl"))
    expected = np.select([kls > 1.5e-3, kls < 1e-3 / 1.5], [2 * betas, betas / 2], betas)
    np.testing.assert_allclose(betas[:, 1:], expected[:, :-1], rtol=1e-6)
    assert (betas[:, 0] == 1).all()
    assert {2.0, 0.5} <= set((betas[:, 1:] / betas[:, :-1]).ravel())
