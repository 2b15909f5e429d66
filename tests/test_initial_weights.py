"""Orthogonal initial weights, against a QR decomposition by numpy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from jaxpg import envs, ladder
from jaxpg.models import initial_weights, mlp
from jaxpg.models.initial_weights import in_one_loop, orthogonal
from jaxpg.policy_gradient import policy_gradient


@pytest.mark.parametrize("shape", [(4, 64), (64, 64), (64, 2), (3, 3, 10, 16), (9, 1)])
def test_orthogonal_is_the_q_of_a_normal_matrix(shape: tuple[int, ...]) -> None:
    key, gain = jax.random.key(3), 1.7
    rows, columns = np.prod(shape[:-1]), shape[-1]
    normal = np.asarray(jax.random.normal(key, (max(rows, columns), min(rows, columns))), np.float64)
    q, r = np.linalg.qr(normal)
    q = q * np.sign(np.diag(r))
    weights = np.asarray(orthogonal(gain)(key, shape)).reshape(rows, columns)
    np.testing.assert_allclose(weights, gain * (q if rows >= columns else q.T), atol=1e-4)
    gram = weights.T @ weights if rows >= columns else weights @ weights.T
    np.testing.assert_allclose(gram, gain**2 * np.eye(len(gram)), atol=1e-5)


def test_orthogonal_under_vmap_equals_a_loop() -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    together = jax.jit(jax.vmap(lambda key: orthogonal(1.0)(key, (6, 3))))(keys)
    alone = np.stack([orthogonal(1.0)(key, (6, 3)) for key in keys])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def of_both_networks(key: jax.Array, wrap: Callable[..., Any] = lambda init: init) -> Any:
    """The weights of two networks, one of them through `wrap`."""
    shapes = ((4, 64), (64, 64), (64, 2)), ((3, 3, 10, 16), (16, 1), (160, 70))

    def network(key: jax.Array, shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
        return [orthogonal(0.5 + i)(jax.random.fold_in(key, i), shape) for i, shape in enumerate(shapes)]

    first, second = jax.random.split(key)
    return network(first, shapes[0]), wrap(partial(network, shapes=shapes[1]))(second)


@pytest.mark.parametrize("large", [2**10, 2**30])
@pytest.mark.parametrize("wrap", [lambda init: init, jax.jit], ids=["plain", "a network that jits"])
def test_in_one_loop_the_weights_are_those_of_a_loop_each(
    wrap: Callable[..., Any], large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial_weights, "LARGE", large)
    jax.clear_caches()  # what was traced with another limit
    key = jax.random.key(1)
    alone = of_both_networks(key)
    together = jax.jit(lambda key: in_one_loop(lambda: of_both_networks(key, wrap)))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), alone, together(key))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), alone, in_one_loop(lambda: of_both_networks(key)))


def test_all_weights_of_a_learner_take_one_loop_and_a_step_none(monkeypatch: pytest.MonkeyPatch) -> None:
    env = envs.make("CartPole-v1")
    learner = policy_gradient(env, *mlp(env), ladder.ppo(num_envs=2, num_steps=2, num_minibatches=1))
    loops: list[tuple[int, ...]] = []
    gram_schmidt = initial_weights._gram_schmidt
    monkeypatch.setattr(initial_weights, "_gram_schmidt", lambda x: (loops.append(x.shape), gram_schmidt(x))[1])
    jax.clear_caches()
    key = jax.random.key(0)
    state = jax.eval_shape(learner.init, key)
    assert loops == [(64, 64)]
    loops.clear()
    jax.eval_shape(learner.step, state, key)
    jax.eval_shape(learner.step, state, key)
    assert len(loops) == len(set(loops))  # flax asks for the shape of a matrix whenever a layer is called


def test_a_failing_init_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError):
        in_one_loop(lambda: (orthogonal(1.0)(jax.random.key(0), (3, 2)), 1 / 0))
    assert np.asarray(orthogonal(1.0)(jax.random.key(0), (3, 2))).any()


def test_columns_that_fill_up_stay_zero() -> None:
    filled_up = np.zeros((5, 4), np.float32)
    filled_up[:3, :2] = np.random.default_rng(0).normal(size=(3, 2))
    q = np.asarray(initial_weights._gram_schmidt(filled_up))
    np.testing.assert_allclose(q.T @ q, np.diag([1.0, 1, 0, 0]), atol=1e-6)
