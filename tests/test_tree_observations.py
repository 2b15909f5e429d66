"""Observations of several arrays: they reach the networks as the same numbers in one array would."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpg
from jaxpg import ladder, networks, values
from jaxpg.cli.main import main
from jaxpg.envs import check_env
from jaxpg.envs.battery import battery
from jaxpg.errors import UserError
from jaxpg.policy_gradient import policy_gradient
from jaxpg.runs import load_policy
from jaxpg.runs.export import policy_program
from jaxpg.types import Box, Discrete, Env, TimeStep

SIDE = 4


def unit(*shape: int) -> Box:
    return Box(-np.ones(shape, np.float32), np.ones(shape, np.float32))


def chase(observe: Any, space: Any, **changes: Any) -> Env:
    """Reach a place on a small board; the state is (own place, the other place, time)."""

    def reset(key: Any) -> Any:
        places = jax.random.randint(key, (2, 2), 0, SIDE)
        return (places[0], places[1], jnp.int32(0)), observe(places[0], places[1], jnp.int32(0))

    def step(key: Any, state: Any, action: Any) -> Any:
        own, other, t = state
        own = jnp.clip(own + jnp.array([[0, 1], [0, -1], [1, 0], [-1, 0]])[action], 0, SIDE - 1)
        met, t = (own == other).all(), t + 1
        discount = jnp.where(met, 0.0, 1.0)
        return (own, other, t), TimeStep(observe(own, other, t), 1 - discount, discount, met | (t >= 10))

    return Env("chase", reset, step, space, Discrete(4), 10, min_truncation_step=10)._replace(**changes)


def board(own: Any, other: Any) -> Any:
    empty = jnp.zeros((SIDE, SIDE, 2), jnp.float32)
    return empty.at[own[0], own[1], 0].set(1).at[other[0], other[1], 1].set(1)


def offset(own: Any, other: Any) -> Any:
    return (other - own).astype(jnp.float32) / SIDE


def parts(own: Any, other: Any, t: Any) -> Any:
    return {"board": board(own, other), "clock": t % 3, "offset": (offset(own, other),)}


def joined(own: Any, other: Any, t: Any) -> Any:
    return jnp.concatenate([board(own, other).reshape(-1), jax.nn.one_hot(t % 3, 3), offset(own, other)])


SPACES = {"board": unit(SIDE, SIDE, 2), "clock": Discrete(3), "offset": (unit(2),)}
TREE = chase(parts, SPACES)
FLAT = chase(joined, unit(2 * SIDE**2 + 3 + 2))
REAL = (
    chase(
        lambda own, other, t: {"a": board(own, other), "b": offset(own, other)}, {"a": SPACES["board"], "b": unit(2)}
    ),
    chase(lambda own, other, t: jnp.concatenate([board(own, other).reshape(-1), offset(own, other)]), unit(34)),
)


def trained(learner: Any) -> Any:
    def steps(key: Any) -> Any:
        return jax.lax.scan(learner.step, learner.init(key), jax.random.split(key, 3))

    return jax.jit(steps)(jax.random.key(0))


def assert_alike(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("network", "algorithm"),
    [(networks.mlp, ladder.ppo), (networks.recurrent, ladder.a2c), (networks.mlp, ladder.grpo)],
)
def test_several_arrays_are_learned_from_as_from_one(network: Any, algorithm: Any) -> None:
    """Of segments and of whole episodes, with time-outs, whose final observations are stored."""
    found = []
    for env in (TREE, FLAT):
        policy, critic = network(env)
        state, metrics = trained(policy_gradient(env, policy, critic, algorithm(num_envs=16)))
        found.append((state.params, metrics))
    assert_alike(*found)


def test_several_arrays_are_normalised_as_one_is() -> None:
    found = []
    for env in REAL:
        learner = policy_gradient(env, *networks.mlp(env), ladder.a2c(num_envs=8), normalize_observations=True)
        state, metrics = trained(learner)
        moments = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(m)]) for m in state.normalization.obs[1:]]
        found.append((state.params, metrics, moments))
    assert_alike(*found)
    assert np.ptp(found[0][2][0]) > 0.1  # means, which have moved away from 0


def test_integers_among_them_are_not_normalised() -> None:
    with pytest.raises(UserError, match=r"obs\['clock'\] of chase are the integers from 0 to 2"):
        policy_gradient(TREE, *networks.mlp(TREE), ladder.a2c(), normalize_observations=True)


def test_a_replay_buffer_keeps_them() -> None:
    found = []
    for env in (TREE, FLAT):
        algorithm = values.dqn(buffer_size=64, learning_starts=16, batch_size=8, repeats=8)
        found.append(trained(values.deep_q(env, values.mlp(env), algorithm))[0].params)
    assert_alike(*found)


def test_a_cnn_joins_the_others_to_the_image_after_its_convolutions() -> None:
    """By hand: with no convolution but the identity on the two channels, it is the mlp on the joined vector."""
    policy, _ = networks.cnn(TREE, channels=(2,), kernels=(1,), hidden=(8,), shared=True)
    params = policy.init(jax.random.key(0))
    convolution = params["torso"]["params"]["Dense_0"]
    assert convolution["kernel"].shape == (2, 2)
    identity = {"kernel": jnp.eye(2), "bias": jnp.zeros(2)}
    own = {**params, "torso": {"params": {**params["torso"]["params"], "Dense_0": identity}}}
    mlp, _ = networks.mlp(FLAT, hidden=(8,), activation="relu")
    theirs = {"torso": {"params": params["torso"]["params"]["MLPTorso_0"]}, "head": params["head"]}
    _, obs = TREE.reset(jax.random.key(3))
    _, vector = FLAT.reset(jax.random.key(3))
    (a, _), (b, _) = policy.act(own, (), obs), mlp.act(theirs, (), vector)
    np.testing.assert_allclose(a.logits, b.logits, rtol=1e-5, atol=1e-6)
    assert np.ptp(np.asarray(a.logits)) > 0


def test_a_cnn_wants_one_image() -> None:
    two = TREE._replace(observation_space={"board": unit(4, 4, 2), "other": unit(4, 4, 1)})
    with pytest.raises(UserError, match=r"have shape \(4, 4, 2\), \(4, 4, 1\). Use an mlp"):
        networks.cnn(two)


def test_a_mask_may_be_an_array_of_its_own() -> None:
    def observe(own: Any, other: Any, t: Any) -> Any:
        return {"mask": jnp.array([1, 0, 1, 0], jnp.float32), "offset": offset(own, other)}

    env = chase(observe, {"mask": unit(4), "offset": unit(2)}, action_mask=lambda obs: obs["mask"] > 0.5)
    policy, critic = networks.mlp(check_env(env, "masked"))
    learner = policy_gradient(env, policy, critic, ladder.a2c(num_envs=8))
    rollout, _ = jax.jit(learner.experience.collect)(learner.init(jax.random.key(0)), jax.random.key(1))
    assert set(np.unique(rollout.steps.action)) == {0, 2}


def test_a_sound_environment_passes_the_battery() -> None:
    assert [finding.sentence for finding in battery(TREE, "chase") if not finding.passed] == []


def replaced(**arrays: Any) -> Any:
    return lambda own, other, t: {**parts(own, other, t), **{k: f(t) for k, f in arrays.items()}}


def test_the_command_line_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a cnn by default, since there is one image, and with sizes in `show`."""
    (tmp_path / "mine.py").write_text(
        "import test_tree_observations\n\ndef tree():\n    return test_tree_observations.TREE\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["show", "mine:tree", "ppo"]) == 0
    shown = capsys.readouterr().out
    assert (
        "['board']: 4 x 4 x 2 real numbers, ['clock']: one of 3, ['offset'][0]: 2 real numbers; actions: one of 4"
        in shown
    )
    assert "cnn" in shown


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        (chase(replaced(more=lambda t: jnp.zeros(3)), SPACES), "must return an obs that fits the observation_space"),
        (chase(replaced(clock=lambda t: jnp.float32(1)), SPACES), "'clock': int32"),
        (chase(replaced(clock=lambda t: t), SPACES), r"obs\['clock'\] at step 3 .* must be from 0 to 2, not array\(3"),
        (chase(replaced(offset=lambda t: (jnp.log(2.0 - t) * jnp.ones(2),)), SPACES), r"obs\['offset'\]\[0\] at step"),
        (chase(parts, {**SPACES, "clock": 3}), r"observation_space\['clock'\] must be a jaxpg.types.Box or Discrete"),
        (chase(parts, {}), "observation_space holds no space"),
    ],
)  # fmt: skip
def test_a_mistake_is_found_with_its_place(env: Env, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_env(env, "chase")


def test_bounds_are_looked_at_in_each_array() -> None:
    env = chase(replaced(offset=lambda t: (2.0 * jnp.ones(2),)), SPACES)
    (wrong,) = (finding.sentence for finding in battery(env, "chase") if not finding.passed)
    assert wrong.startswith("obs['offset'][0][0] went from 2 to 2, and the observation_space says -1 to 1")


def test_a_number_that_is_seldom_none_is_found_in_the_last_array() -> None:
    def step(key: Any, state: Any, action: Any) -> Any:
        state, timestep = TREE.step(key, state, action)
        seldom = jnp.where(jax.random.uniform(key) < 0.02, jnp.nan, timestep.obs["offset"][0])
        return state, timestep._replace(obs={**timestep.obs, "offset": (seldom,)})

    (wrong,) = (finding.sentence for finding in battery(TREE._replace(step=step), "chase") if not finding.passed)
    assert wrong.startswith("observations and rewards must be finite")


def test_a_trained_policy_takes_them_and_so_does_its_exported_file(tmp_path: Path) -> None:
    run = jaxpg.fit(TREE, "ppo", seeds=1, total_steps=512, num_envs=8, num_steps=16, network={"kind": "recurrent"})
    keys = jax.random.split(jax.random.key(0), 5)
    obs = jax.device_get(jax.vmap(TREE.reset)(keys)[1])
    expected = run.policy.act(obs)
    assert expected.shape == (5,)
    run.policy.reset()
    assert run.policy.act(jax.tree.map(lambda x: x[2].tolist(), obs)) == expected[2]
    run.policy.reset()
    for given, sentence in (
        ({"board": obs["board"]}, r"has arrays at \['board'\], \['clock'\], \['offset'\]\[0\], not"),
        ({**obs, "clock": 1}, "one batch axis, or none"),
        ({**obs, "board": obs["board"][:, 1:]}, r"observation\['board'\] of chase has the shape \(4, 4, 2\)"),
    ):
        with pytest.raises(UserError, match=sentence):
            run.policy.act(given)
    (tmp_path / "policy.jax").write_bytes(policy_program(run.experiment.learner, run.learner_of(0), TREE))
    np.testing.assert_array_equal(load_policy.load(tmp_path / "policy.jax")(obs)[0], expected)


class Seen(NamedTuple):
    clock: Any
    offset: Any


def test_a_record_of_arrays_is_learned_from_and_not_exported() -> None:
    env = chase(lambda own, other, t: Seen(t % 3, offset(own, other)), Seen(Discrete(3), unit(2)))
    policy, critic = networks.mlp(check_env(env, "chase"))
    learner = policy_gradient(env, policy, critic, ladder.a2c(num_envs=8))
    state, _ = trained(learner)
    with pytest.raises(UserError, match=r"dictionaries, tuples or lists of arrays, and those of chase are Seen\("):
        policy_program(learner, state, env)
