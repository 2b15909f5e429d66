"""EnvPool's environments through the door and in plain loops of one environment each; .ci/run installs EnvPool."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpg
from jaxpg import envs, networks
from jaxpg.errors import UserError
from jaxpg.parallel import host_callback
from jaxpg.rollout.collector import env_keys
from jaxpg.rollout.segments import continuing

envpool = pytest.importorskip("envpool", reason="EnvPool is not installed")
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_failures")]
POLE = "envpool:CartPole-v1"


def plain(env_id: str, seed: int, **settings: Any) -> Any:
    """One environment of a pool; the i-th of a pool of several has the pool's seed and i more."""
    return envpool.make(env_id, env_type="gymnasium", num_envs=1, seed=seed, **settings)


def test_a_rollout_is_what_plain_loops_see() -> None:
    """Three environments, whose resets the plain pools make at a step of their own and the door does not."""
    columns, length, key = 3, 60, jax.random.key(1)
    env = envs.make(POLE, max_episode_steps=12)
    policy, _ = networks.mlp(env, hidden=(4,))
    params = policy.init(jax.random.key(0))
    collector = continuing(num_envs=columns, num_steps=length)
    runner = collector.init(env, policy, params, key)
    collect = jax.jit(partial(collector.collect, env, policy))
    _, rollout, _ = jax.device_get(collect(params, runner, jax.random.key(2)))
    host_callback.raise_failure()
    seed = int(jax.random.bits(env_keys(key, columns)[0])) % 2**31
    steps, ends = rollout.steps, {"terminated": 0, "truncated": 0}
    for b in range(columns):
        pool = plain("CartPole-v1", seed + b, max_episode_steps=12)
        obs, finals = pool.reset()[0][0], 0
        for t in range(length):
            np.testing.assert_array_equal(steps.obs[t, b], obs)
            (obs,), (reward,), (terminated,), (truncated,), _ = pool.step(steps.action[t, b][None])
            assert steps.reward[t, b] == reward
            assert steps.discount[t, b] == 1 - terminated
            assert steps.last[t, b] == (terminated or truncated)
            if (truncated and not terminated) or t == length - 1:
                np.testing.assert_array_equal(rollout.final_obs[finals, b], obs)
                finals += 1
            if terminated or truncated:
                ends["terminated" if terminated else "truncated"] += 1
                obs = pool.step(steps.action[t, b][None])[0][0]  # resets, whatever the action
    assert min(ends.values()) > 0, ends


@pytest.mark.parametrize("limit", [2, 30], ids=["time-out", "termination"])
def test_after_the_end_nothing_counts(limit: int) -> None:
    """A pool cannot rest: it begins and ends further episodes, and what it returns of them is left out."""
    env, key = envs.make(POLE, max_episode_steps=limit), jax.random.key(0)
    step = jax.jit(jax.vmap(env.step, (None, 0, 0)))
    state, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(key))
    rows = []
    for _ in range(40):
        state, timestep = step(key, state, jnp.array([0, 1]))
        rows.append(timestep)
    host_callback.raise_failure()
    found = jax.tree.map(lambda *x: np.stack(x), *rows)
    for b in range(2):  # always the same action: down after some ten steps
        end = int(found.last[:, b].argmax())
        assert end == 1 if limit == 2 else 5 < end < 15
        assert found.discount[end, b] == (limit == 2)
        assert found.last[end:, b].all()
        np.testing.assert_array_equal(found.reward[:, b], [1.0] * (end + 1) + [0.0] * (39 - end))
        np.testing.assert_array_equal(np.delete(found.discount[:, b], end), 1)


def test_images_are_numbers_from_0_to_1_with_channels_last() -> None:
    env, key = envs.make("envpool:Pong-v5"), jax.random.key(3)
    state, first = env.reset(key)
    _, timestep = env.step(key, state, jnp.int32(2))
    host_callback.raise_failure()
    pool = plain("Pong-v5", int(jax.random.bits(key)) % 2**31)
    for found, expected in ((first, pool.reset()[0][0]), (timestep.obs, pool.step(np.array([2]))[0][0])):
        assert found.shape == env.observation_space.shape == (84, 84, 4)
        np.testing.assert_allclose(found, expected.transpose(1, 2, 0) / 255, rtol=1e-6)


@pytest.mark.parametrize("name", [POLE, "envpool:Pong-v5"])
def test_an_agent_is_trained(name: str, tmp_path: Any) -> None:
    """Pong from images with a CNN."""
    run = jaxpg.fit(
        name,
        "ppo",
        total_steps=64,
        num_envs=2,
        num_steps=16,
        seeds=1,
        out=tmp_path / "run",
        evaluation_episodes=2,
        environment_settings={"max_episode_steps": 30},
    )
    assert np.isfinite(run.metrics["policy_loss"][1:]).all()
    assert run.metrics["steps"][-1] == 64
    assert np.isfinite(run.metrics["evaluation_return"]).all()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("envpool:Pong-v6", {}, "envpool:Pong-v5"),
        (POLE, {"max_steps": 3}, "max_episode_steps"),
        (POLE, {"max_episode_steps": 0}, "max_episode_steps"),
    ],
)
def test_what_does_not_exist_is_said(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        envs.make(name, **settings)
