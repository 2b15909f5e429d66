"""Environments on the host: Gymnasium's own and a user's, through the door and in a plain Gymnasium loop."""

from __future__ import annotations

import os
import pickle
import re
import shlex
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_gym
from gymnasium.envs.registration import WrapperSpec

import jaxpg
from jaxpg import envs, ladder, networks, parallel, report
from jaxpg.cli.main import main
from jaxpg.envs.host import is_of_this_script, packages
from jaxpg.envs.host.host_env import host_env
from jaxpg.envs.host.vectors import action_converter
from jaxpg.errors import UserError
from jaxpg.experiments.build import build
from jaxpg.experiments.config import resolve_config
from jaxpg.parallel import collectives, host_callback
from jaxpg.policy_gradient import policy_gradient
from jaxpg.report.episodes.gif import CAPTION, _own_scene, draw_frame, trimmed
from jaxpg.rollout.collector import env_keys, make_actor, step_keys
from jaxpg.rollout.evaluation import evaluate, record_episode
from jaxpg.rollout.segments import continuing
from jaxpg.runs import load_policy
from jaxpg.runs.export import export_policy, policy_program
from jaxpg.training import array_files, checkpoint
from jaxpg.types import Actor, Box, Discrete, Env
from jaxpg.user_input import user_code
from jaxpg.vectorize import tree_where

pytestmark = pytest.mark.usefixtures("no_failures")
WALK, LANDER, POLE = "gymnasium:tiny_gym:TinyWalk-v0", "gymnasium:LunarLander-v3", "gymnasium:CartPole-v1"


def source_of(name: str, **settings: Any) -> Any:
    """Where environments of this name come from."""
    return packages.PACKAGES["gymnasium"].source(name.partition(":")[2], packages.default_settings(name) | settings)


def seed_of(key: jax.Array) -> int:
    return int(jax.random.bits(key))


@pytest.mark.parametrize(
    ("name", "settings", "vectorization"),
    [
        pytest.param(WALK, {}, "sync", marks=pytest.mark.full),
        pytest.param(WALK, {}, "async", marks=pytest.mark.full),
        pytest.param(POLE, {"max_episode_steps": 15}, "sync", marks=pytest.mark.full),
        pytest.param("gymnasium:Pendulum-v1", {"max_episode_steps": 9}, "sync", marks=pytest.mark.full),
        pytest.param(LANDER, {"continuous": True, "max_episode_steps": 95}, "sync", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_a_rollout_is_what_a_plain_loop_sees(name: str, settings: dict[str, Any], vectorization: str) -> None:
    """Two segments of three environments: every observation, reward, ending and final observation."""
    env = envs.make(name, vectorization=vectorization, **settings)
    policy, _ = networks.mlp(env, hidden=(4,))
    columns, length = 3, 40 if name == WALK else 100
    collector = continuing(num_envs=columns, num_steps=length)
    params, first_key, keys = policy.init(jax.random.key(0)), jax.random.key(1), jax.random.split(jax.random.key(2))
    runner = collector.init(env, policy, params, first_key)
    collect = jax.jit(partial(collector.collect, env, policy))
    plain = [gymnasium.make(name.partition(":")[2], **settings) for _ in range(columns)]
    obs = [one.reset(seed=seed_of(key))[0] for one, key in zip(plain, env_keys(first_key, columns), strict=True)]
    ends = {"terminated": 0, "truncated": 0}
    for key in keys:
        runner, rollout, _ = jax.device_get(collect(params, runner, key))
        host_callback.raise_failure()
        steps, reset_keys = rollout.steps, step_keys(key, columns, length, with_reset=True).reset
        for b, one in enumerate(plain):
            finals = 0
            for t in range(length):
                np.testing.assert_array_equal(steps.obs[t, b], np.float32(obs[b]))
                action = steps.action[t, b]
                if isinstance(env.action_space, Box):
                    action = np.clip(action, env.action_space.low, env.action_space.high)
                else:
                    action = action + one.action_space.start
                obs[b], reward, terminated, truncated, _ = one.step(action)
                assert steps.reward[t, b] == np.float32(reward)
                assert steps.discount[t, b] == 1 - terminated
                assert steps.last[t, b] == (terminated or truncated)
                if (truncated and not terminated) or t == length - 1:
                    np.testing.assert_array_equal(rollout.final_obs[finals, b], np.float32(obs[b]))
                    finals += 1
                if terminated or truncated:
                    ends["terminated" if terminated else "truncated"] += 1
                    obs[b], _ = one.reset(seed=seed_of(reset_keys[t, b]))
    assert ends["truncated"] > 0
    assert ends["terminated"] > 0 or name == "gymnasium:Pendulum-v1"


def run(env: Env, actions: Any, state: Any) -> Any:
    """States and time steps of these actions, one environment, step by step."""
    rows = []
    for action in actions:
        state, timestep = env.step(jax.random.key(0), state, jnp.asarray(action))
        rows.append((state, timestep))
    host_callback.raise_failure()
    return rows


def test_a_state_that_the_host_has_lost_is_made_again() -> None:
    """In a new process, and after the program has gone back, the next step is what it was."""
    env, actions = envs.make(WALK), [1, 0, 1, 0, 1]
    rows = run(env, actions, env.reset(jax.random.key(3))[0])
    elsewhere = envs.make(WALK)  # it keeps environments of its own, as another process does
    for other in (env, elsewhere):
        for before, after in ((2, 3), (1, 2)):
            ((_, again),) = run(other, actions[after : after + 1], rows[before][0])
            jax.tree.map(np.testing.assert_array_equal, again, rows[after][1])
    changed = run(env, [0, 0], rows[1][0])  # another branch, and back
    assert not np.array_equal(changed[1][1].obs, rows[3][1].obs)
    jax.tree.map(np.testing.assert_array_equal, run(env, actions[4:], rows[3][0])[0][1], rows[4][1])


def test_a_state_of_another_process_is_not_taken_for_one_of_this() -> None:
    """Both have begun one group of one environment, which is as old."""
    there, here = envs.make(WALK), envs.make(WALK)
    state, _ = there.reset(jax.random.key(0))
    here.reset(jax.random.key(1))
    ((_, found),), ((_, expected),) = run(here, [1], state), run(there, [1], state)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_an_episode_that_cannot_be_made_again_keeps_its_environment() -> None:
    """Where another one begins before it is over; its observation is the number of its steps."""
    env = host_env(source_of(WALK)._replace(repeatable=False))
    ((state, _),) = run(env, [0], env.reset(jax.random.key(0))[0])
    env.reset(jax.random.key(1))
    ((_, timestep),) = run(env, [1], state)
    assert timestep.obs[1] == 2


def test_states_in_another_order_are_made_again() -> None:
    """They are of the same group after as many steps, and yet not what its environments are in."""
    env = envs.make(WALK)
    step = jax.jit(jax.vmap(env.step, (None, 0, 0)))
    key, actions = jax.random.key(0), jnp.array([0, 1, 0])
    begun = jax.jit(jax.vmap(env.reset))(jax.random.split(key, 3))[0]
    moved, _ = step(key, begun, actions)
    order = jnp.array([2, 0, 1])
    _, found = step(key, jax.tree.map(lambda x: x[order], moved), actions[order])
    _, expected = step(key, moved, actions)
    host_callback.raise_failure()
    assert len(np.unique(expected.obs, axis=0)) == 3, "states that are alike show nothing"
    jax.tree.map(np.testing.assert_array_equal, found, jax.tree.map(lambda x: x[order], expected))


def test_an_environment_that_is_over_stays_so_when_another_begins() -> None:
    """Two of one time limit end together and one of them is restarted; the other must not go on."""
    env, key = envs.make(WALK, max_episode_steps=2), jax.random.key(0)
    step, both = jax.jit(jax.vmap(env.step, (None, 0, 0))), jnp.array([0, 0])
    state, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(5)))
    for _ in range(2):
        state, ended = step(key, state, both)
    wanted = jnp.array([True, False])
    restarted, _ = jax.jit(jax.vmap(env.host.restart))(jax.random.split(key), wanted, state)
    state = jax.vmap(tree_where)(wanted, restarted, state._replace(place=restarted.place))
    _, after = step(key, state, both)
    host_callback.raise_failure()
    np.testing.assert_array_equal(ended.last, [True, True])
    np.testing.assert_array_equal(after.last, [False, True])
    np.testing.assert_array_equal(after.obs[1], ended.obs[1])
    assert after.reward[0] != 0
    assert after.reward[1] == 0


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="callbacks read the program's buffers on a CPU alone")
def test_the_history_is_not_copied_at_every_step() -> None:
    env = envs.make(POLE)
    states, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 3))

    def steps(states: Any) -> Any:
        act = jax.vmap(lambda state: env.step(jax.random.key(0), state, jnp.int32(0))[0])
        return jax.lax.fori_loop(0, 5, lambda i, states: act(states), states)

    text = jax.jit(steps, donate_argnums=0).lower(states).compile().as_text()
    body = "\n".join(x for x in re.split(r"\n(?=%|ENTRY)", text) if not x.startswith("ENTRY"))
    assert "scatter" in body
    assert re.findall(r"= s32\[3,500\]\S* copy\(", body) == []


def test_a_step_after_the_end_changes_nothing() -> None:
    env = envs.make(WALK)
    rows = run(env, [1] * 9, env.reset(jax.random.key(0))[0])
    length = 1 + next(i for i, (_, timestep) in enumerate(rows) if timestep.last)
    assert length <= 6
    for _, timestep in rows[length:]:
        assert timestep.last
        assert timestep.reward == 0
        np.testing.assert_array_equal(timestep.obs, rows[length - 1][1].obs)


def test_what_cannot_rest_is_stepped_for_nothing_after_the_end() -> None:
    source = source_of(WALK)
    env = host_env(source._replace(make=lambda n, seed: source.make(n, seed)._replace(rest=None)))
    rows = run(env, [1] * 9, env.reset(jax.random.key(2))[0])
    over = [bool(timestep.last) for _, timestep in rows]
    assert over == sorted(over)
    after = rows[over.index(True) + 1 :]
    assert [(float(x.reward), float(x.discount)) for _, x in after] == [(0.0, 1.0)] * len(after)
    assert rows[over.index(True)][1].discount == 0  # and it would terminate again
    assert after


def random_actor(env: Env) -> Actor:
    return Actor(
        lambda obs: (), lambda memory, obs, key, greedy: (jax.random.randint(key, (), 0, env.action_space.n), ())
    )


@pytest.mark.full
def test_evaluation_ends_and_its_environments_are_used_again() -> None:
    env = envs.make(WALK)
    measure = jax.jit(lambda key: evaluate(env, random_actor(env), key, episodes=5, greedy=False))
    first, second, again = (measure(jax.random.key(k)) for k in (0, 1, 0))
    host_callback.raise_failure()
    assert (first.lengths >= 1).all()
    assert (first.lengths <= 6).all()
    assert not np.array_equal(first.returns, second.returns)
    np.testing.assert_array_equal(first.returns, again.returns)
    key = jax.random.split(jax.random.key(0), 5)[3]
    recorded = jax.jit(lambda key: record_episode(env, random_actor(env), key, greedy=False))(key)
    assert recorded.length == first.lengths[3]
    np.testing.assert_allclose(recorded.rewards[: recorded.length].sum(), first.returns[3], rtol=1e-6)


@pytest.mark.full
def test_wrappers_restart_what_is_inside() -> None:
    """A stack of frames begins anew where an episode does, and only there."""
    env = envs.flatten(envs.frame_stack(envs.make(WALK), num=3))
    policy, _ = networks.mlp(env, hidden=(4,))
    collector, params = continuing(num_envs=3, num_steps=30), policy.init(jax.random.key(0))
    runner = collector.init(env, policy, params, jax.random.key(1))
    _, rollout, _ = jax.jit(partial(collector.collect, env, policy))(params, runner, jax.random.key(2))
    host_callback.raise_failure()
    obs, last = np.asarray(rollout.steps.obs).reshape(30, 3, 3, 2), np.asarray(rollout.steps.last)
    assert last.sum() > 5
    for t, b in np.ndindex(29, 3):
        if last[t, b]:
            np.testing.assert_array_equal(obs[t + 1, b], np.repeat(obs[t + 1, b, -1:], 3, 0))
            assert obs[t + 1, b, -1, 1] == 0
        else:
            np.testing.assert_array_equal(obs[t + 1, b, :-1], obs[t, b, 1:])


def test_a_wrapper_that_truncates_is_reckoned_with() -> None:
    """Gymnasium's own environments have no time-out before their limit, unless they are registered with a wrapper."""
    limited = WrapperSpec("TimeLimit", "gymnasium.wrappers:TimeLimit", {"max_episode_steps": 20})
    spec = replace(gymnasium.spec("Pendulum-v1"), id="ShortPendulum-v0", additional_wrappers=(limited,))
    gymnasium.registry[spec.id] = spec
    try:
        assert envs.make("gymnasium:ShortPendulum-v0").min_truncation_step == 1
    finally:
        del gymnasium.registry[spec.id]
    assert envs.make("gymnasium:Pendulum-v1").min_truncation_step == 200


@pytest.mark.parametrize("name", ["gymnasium:Taxi-v4", "gymnasium:WrappedTaxi-v0", WALK])
def test_integers_of_numpy_are_for_what_may_ask_for_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gymnasium's own environments get integers of Python's; all others may want `action.item()`."""
    own = name == "gymnasium:Taxi-v4"
    limited = WrapperSpec("TimeLimit", "gymnasium.wrappers:TimeLimit", {"max_episode_steps": 20})
    spec = replace(gymnasium.spec("Taxi-v4"), id="WrappedTaxi-v0", additional_wrappers=(limited,))
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    env, seen = envs.make(name), []
    one = type(gymnasium.make(name.partition(":")[2]).unwrapped)
    step = one.step
    monkeypatch.setattr(one, "step", lambda self, action: seen.append(action) or step(self, action))
    run(env, [1, 0], env.reset(jax.random.key(0))[0])
    assert [type(action) for action in seen] == [int if own else np.int64] * 2
    assert [int(action) for action in seen] == [x + one().action_space.start for x in (1, 0)]


@pytest.mark.full
def test_a_worker_imports_neither_jax_nor_other_environments() -> None:
    """That takes ten times as long as what it needs, and there is one for each environment."""
    maker = source_of(WALK, vectorization="async").make.args[0]  # type: ignore[attr-defined]  # of a partial
    code = (
        f"import pickle, sys; env = pickle.loads({pickle.dumps(maker)!r})(); env.reset(seed=0); "
        "assert not {'jax', 'jaxpg.envs'} & set(sys.modules), 'too much'"
    )
    here = str(Path(tiny_gym.__file__).parent)
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": here}, timeout=60)


def test_a_thread_of_xlas_is_known_to_python_after_its_first_call() -> None:
    of_thread, new, devices = threading.local(), [], jax.devices()

    def add_one(x: Any) -> tuple[np.ndarray]:
        if not hasattr(of_thread, "seen"):
            of_thread.seen = new.append(threading.get_ident())
        return (np.asarray(x) + 1,)

    def add_fifty(x: jax.Array) -> jax.Array:
        like = (jax.ShapeDtypeStruct(x.shape, x.dtype),)
        return jax.lax.scan(lambda x, _: (*host_callback.call_in_place(add_one, like, x), None), x, length=50)[0]

    mesh, split = parallel.make_mesh(1, len(devices), devices), jax.sharding.PartitionSpec(collectives.DATA)
    program = parallel.spread(add_fifty, mesh, in_specs=split, out_specs=split)
    np.testing.assert_array_equal(jax.jit(program)(jnp.zeros(len(devices))), 50)
    assert len(new) == len(set(new))


def test_spaces() -> None:
    flat = envs.make("gymnasium:tiny_gym:TinyDictionary-v0")
    assert flat.observation_space.shape == (8,)
    assert np.asarray(flat.reset(jax.random.key(0))[1])[0] == 1  # t = 0, one of seven; then x
    lake = envs.make("gymnasium:FrozenLake-v1")
    assert lake.observation_space.shape == (16,)
    assert lake.action_space == Discrete(4)
    assert lake.time_limit == 100
    np.testing.assert_array_equal(lake.reset(jax.random.key(0))[1], np.eye(16)[0])
    larger = envs.make("gymnasium:FrozenLake8x8-v1")  # the same class, registered with another map
    assert (larger.observation_space.shape, larger.time_limit) == ((64,), 200)
    assert envs.make("gymnasium:FrozenLake8x8-v1", map_name="4x4").observation_space.shape == (16,)


def test_observations_without_an_axis() -> None:
    """Of one environment, which is reset, stepped and begun anew without a batch, and of two."""
    env = envs.make("gymnasium:tiny_gym:TinyScalar-v0")
    rows = run(env, [1, 0], env.reset(jax.random.key(0))[0])
    assert rows[-1][1].obs.shape == ()
    assert env.host is not None
    _, obs = env.host.restart(jax.random.key(1), jnp.ones((), bool), rows[-1][0])
    assert jnp.isfinite(obs)
    assert jnp.isfinite(jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 2))[1]).all()
    host_callback.raise_failure()


@pytest.mark.parametrize("whole", [False, True])
def test_a_policy_acts_in_gymnasium_as_it_was_trained(whole: bool, tmp_path: Path) -> None:
    """Actions that begin at -1, or a Box of integers: `act` and the exported program return the environment's own."""
    name = "gymnasium:tiny_gym:TinyQuiet-v0"
    settings = {"num_envs": 8, "num_steps": 32, "learning_rate": 1e-2, "entropy_coefficient": 0.0}
    fitted = jaxpg.fit(
        name, "ppo", seeds=1, total_steps=8_000, progress=False, evaluations=1, environment_settings={"whole": whole},
        out=tmp_path / "run", **settings,
    )  # fmt: skip
    trained = jaxpg.load(tmp_path / "run", checkpoint="last", trust_code=True)
    evaluated = float(fitted.metrics.columns["evaluation_return"][-1, 0])
    assert evaluated > 8
    with user_code.trust(lambda name: True):
        export_policy(trained, tmp_path / "export")
    act = load_policy.load(tmp_path / "export" / "policy.jax")
    env = gymnasium.make("tiny_gym:TinyQuiet-v0", disable_env_checker=True, whole=whole)
    for choose in (trained.policy.act, lambda obs: np.asarray(act([obs])[0])[0]):
        obs, _ = env.reset(seed=0)
        total = 0.0
        for _ in range(10):
            action = choose(obs)
            obs, reward, *_ = env.step(action.astype(env.action_space.dtype))
            total += reward.item()
        assert total > 8


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_numbers_may_be_arrays_of_one(vectorization: str) -> None:
    """A reward, or the end of only some of the episodes, is an array of one number; both ways of stepping take it."""
    env = envs.make("gymnasium:tiny_gym:TinyQuiet-v0", vectorization=vectorization)
    state, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 4))
    step = jax.jit(jax.vmap(env.step))
    for _ in range(3):
        state, timestep = step(jax.random.split(jax.random.key(1), 4), state, jnp.full(4, 2))
        host_callback.raise_failure()
        assert np.isin(timestep.reward, (0, 1)).all()


@pytest.mark.parametrize(
    ("shape", "high", "seen"),
    [
        ((3, 20, 16), 255, (20, 16, 3)),
        ((20, 16, 3), 255, (20, 16, 3)),
        ((20, 16), 255, (20, 16, 1)),
        ((4, 4, 4), 255, (4, 4, 4)),
        ((5, 4, 3), 1, (5, 4, 3)),
        ((12,), 255, (12,)),
    ],
)
def test_images_are_divided_and_their_channels_are_last(shape: tuple[int, ...], high: int, seen: Any) -> None:
    env = envs.make("gymnasium:tiny_gym:TinyPictures-v0", shape=shape, high=high)
    obs = np.asarray(env.reset(jax.random.key(0))[1])
    assert obs.shape == env.observation_space.shape == seen
    raw = np.arange(np.prod(shape)).astype(np.uint8).reshape(shape)
    image = high == 255 and len(shape) > 1
    expected = np.moveaxis(raw, 0, -1) if shape[0] == 3 else raw.reshape(seen)
    np.testing.assert_allclose(obs, expected / 255 if image else expected, rtol=1e-6)
    assert np.max(env.observation_space.high) == (1 if image else high)


@pytest.mark.parametrize(
    ("picture", "said"),
    [
        ("bytes", None),
        ("nothing", "must return a picture .*, not None"),
        ("float", "must return a picture of .*, not (32, 32, 3) and float32"),
        ("raise", "raised ImportError: no module to draw with"),
    ],
)
def test_what_cannot_be_drawn_is_shown_by_its_observations(
    picture: str, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env = envs.make("gymnasium:tiny_gym:TinyQuiet-v0", picture=picture)
    policy, _ = networks.mlp(env)
    actor = make_actor(policy, policy.init(jax.random.key(0)))
    episode = jax.jit(lambda key: record_episode(env, actor, key, greedy=True))(jax.random.key(0))
    report.render_gif(env, episode, tmp_path / "x.gif")
    assert (tmp_path / "x.gif").stat().st_size > 100
    if said is None:
        assert not caplog.text
    else:
        assert re.search(re.escape(said).replace(r"\.\*", ".*"), caplog.text)
        assert "observations are drawn instead" in caplog.text


def test_an_episode_of_sticky_actions_is_drawn_as_it_was_played() -> None:
    """By the executed actions; with those that the agent chose it would be another climb with the same rewards."""
    env = envs.sticky_actions(envs.make("gymnasium:tiny_gym:TinyStairs-v0"), probability=0.5)
    env = envs.frame_stack(envs.sticky_actions(env, probability=0.2), num=2)
    episode = jax.jit(lambda key: record_episode(env, random_actor(env), key, greedy=False))(jax.random.key(0))
    episode = trimmed(episode)
    heights = episode.observations[:, -1].tolist()
    assert heights != [0, *np.cumsum(episode.actions).tolist()]
    scene = _own_scene(env, episode)
    assert scene is not None
    for t, height in enumerate(heights):
        frame = np.asarray(draw_frame(env, scene, episode, t))
        assert (frame[:-CAPTION] == height).all()


def test_pictures_of_a_canvas_that_is_drawn_again_are_those_of_their_steps() -> None:
    env = envs.make("gymnasium:tiny_gym:TinyCanvas-v0")
    episode = trimmed(jax.jit(lambda key: record_episode(env, random_actor(env), key, greedy=False))(jax.random.key(0)))
    assert env.host is not None
    assert env.host.frames is not None
    pictures, _ = env.host.frames(episode.states, np.asarray(episode.actions))
    assert [picture.max() for picture in pictures] == list(range(8))


def test_pictures_are_those_of_the_episode_with_its_seed_or_not_shown() -> None:
    """Of another one they would say nothing of the policy. The rewards tell, where an environment ignores its seed."""

    class Drawn(tiny_gym.Walk):
        def render(self) -> Any:
            return self._obs()

    actions = np.array([1, 2, 1])
    pictures, rewards = packages._frames(Drawn, lambda actions: actions, 7, actions)
    plain = tiny_gym.Walk()
    seen = [plain.reset(seed=7)[0]]
    for action, reward in zip(actions, rewards, strict=True):
        obs, expected, *_ = plain.step(action)
        seen.append(obs)
        assert reward == expected
    np.testing.assert_array_equal(pictures, seen)
    env = envs.make("gymnasium:tiny_gym:TinyCanvas-v0")
    episode = trimmed(jax.jit(lambda key: record_episode(env, random_actor(env), key, greedy=False))(jax.random.key(0)))
    assert _own_scene(env, episode) is not None
    assert _own_scene(env, episode._replace(rewards=episode.rewards + np.float32(0.5))) is None


@pytest.mark.parametrize("steps", [pytest.param(1, id="to the end of all"), 2])
def test_states_that_are_twice_in_a_batch_go_on_each_by_itself(steps: int) -> None:
    env = envs.make(WALK, max_episode_steps=1 if steps == 1 else 6)
    one, other = (env.reset(jax.random.key(seed))[0] for seed in (0, 1))
    states = jax.tree.map(lambda *x: jnp.stack(x), one, other, one)
    step = jax.jit(jax.vmap(partial(env.step, jax.random.key(0))))
    for actions in ([0, 0, 1], [0, 1, 1])[:steps]:
        states, timestep = step(states, jnp.array(actions))
    host_callback.raise_failure()
    assert len({tuple(place) for place in states.place.tolist()}) == 3
    for i, (state, actions) in enumerate(((one, [0, 0]), (other, [0, 1]), (one, [1, 1]))):
        _, expected = run(env, actions[:steps], state)[-1]
        jax.tree.map(partial(np.testing.assert_array_equal, err_msg=str(i)), timestep.obs[i], expected.obs)
        assert timestep.reward[i] == expected.reward


def test_an_id_of_the_script_is_no_name_for_commands(tmp_path: Path) -> None:
    class OfTheScript(tiny_gym.Walk):
        __module__ = "__main__"

    gymnasium.register("OfTheScript-v0", OfTheScript, max_episode_steps=3)
    gymnasium.register("OfTheScriptToo-v0", "__main__:OfTheScript", max_episode_steps=3)
    assert is_of_this_script("gymnasium:OfTheScript-v0")
    assert is_of_this_script("gymnasium:OfTheScriptToo-v0")
    assert not is_of_this_script(WALK)
    assert not is_of_this_script("CartPole-v1")
    with pytest.raises(UserError, match="this script registers it: register it in a module"):
        jaxpg.fit("gymnasium:OfTheScript-v0", "ppo", out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_actions_become_those_of_the_space(array: Any) -> None:
    """One of NumPy's or of jax's, and several of NumPy's."""
    whole, _ = action_converter(gymnasium.spaces.Box(-1, 3, (2,), np.int64))
    np.testing.assert_array_equal(whole(array([0.6, -0.7])), [1, -1])
    np.testing.assert_array_equal(whole(array([9.0, -9.0])), [3, -1])
    np.testing.assert_array_equal(whole(np.array([[9.0, -9.0], [0.4, 2.6]])), [[3, -1], [0, 3]])
    assert np.issubdtype(whole(array([0.6, -0.7])).dtype, np.integer)
    for dtype in (np.int64, np.uint64, np.int32):  # whose bounds jax's integers and float32 do not have
        limits = np.iinfo(dtype)
        wide, _ = action_converter(gymnasium.spaces.Box(limits.min, limits.max, (3,), dtype))
        np.testing.assert_array_equal(wide(array([0.6, 3.0, 7e4])), [1, 3, 70_000])
        assert (wide(array([-1e20, 0, 1e20])) == wide(np.array([-1e20, 0, 1e20]))).all()
    with pytest.raises(UserError, match="32 bits"):
        action_converter(gymnasium.spaces.Discrete(3, start=2**40))
    bounded, _ = action_converter(gymnasium.spaces.Box(-1.0, 0.1, (1,), np.float32))
    for action, executed in ((0.05, 0.05), (0.5, 0.1)):
        np.testing.assert_array_equal(bounded(array([action])), np.float32([executed]))
    square, space = action_converter(gymnasium.spaces.Box(-1.0, 1.0, (2, 3), np.float32))
    assert space.shape == (6,)
    np.testing.assert_array_equal(square(array(np.arange(6) / 9)), np.float32(np.arange(6) / 9).reshape(2, 3))
    assert square(np.zeros((5, 6))).shape == (5, 2, 3)
    scalar, space = action_converter(gymnasium.spaces.Box(-1.0, 1.0, (), np.float32))
    assert (space.shape, scalar(array([3.0])).item()) == ((1,), 1)
    from_one, space = action_converter(gymnasium.spaces.Discrete(3, start=1))
    assert from_one(array([0, 2])).tolist() == [1, 3]
    assert space == Discrete(3)


def test_an_exported_policy_refuses_the_bytes_of_images(tmp_path: Path) -> None:
    """It was trained on numbers from 0 to 1, and would act on bytes without a word."""
    env = envs.make("gymnasium:tiny_gym:TinyPictures-v0", shape=(16, 16, 3))
    policy, critic = networks.cnn(env, channels=(2,), hidden=(4,))
    learner = policy_gradient(env, policy, critic, ladder.ppo(num_envs=2, num_steps=2, num_minibatches=1))
    (tmp_path / "policy.jax").write_bytes(policy_program(learner, learner.init(jax.random.key(0)), env))
    act = load_policy.load(tmp_path / "policy.jax")
    image = np.full((16, 16, 3), 99, np.uint8)
    with pytest.raises(ValueError, match="in the range of training"):
        act([image])
    assert act([image / 255])[0].shape == (1,)
    with pytest.raises(ValueError, match=r"are a batch, \[b, 16, 16, 3\], not \[16, 16, 3\]"):
        act(image / 255)
    with pytest.raises(ValueError, match="holds NaN"):
        act([image * np.nan])
    for seed in (-1, 2**31):
        with pytest.raises(ValueError, match="A seed is an integer from 0"):
            act([image / 255], greedy=False, seed=seed)


def test_names_of_code_are_those_that_import_a_module() -> None:
    settings = {"environment": "gymnasium:CartPole-v1", "a": "envpool:Pong-v5", "b": WALK, "c": "module:function"}
    assert user_code.code_names(settings) == [WALK, "module:function"]
    with user_code.trust(lambda name: False), pytest.raises(UserError, match=r"import tiny_gym and .*--trust-code"):
        envs.make(WALK)


def test_the_name_of_an_environment_is_a_task() -> None:
    config = resolve_config("gymnasium:Pendulum-v1", "ppo", {"environment_settings.g": 9.81, "num_envs": 4})
    assert (config.task, config.environment) == ("gymnasium-Pendulum-v1", "gymnasium:Pendulum-v1")
    assert config.environment_settings == {"g": 9.81}
    with pytest.raises(UserError, match="Did you mean 'gymnasium:Pendulum-v1'"):
        resolve_config("gymnasium:Pendulum-v2", "ppo")


def settings(*assignments: str) -> list[str]:
    return [word for assignment in assignments for word in ("--set", assignment)]


SMALL = settings("num_envs=2", "num_steps=8", "num_minibatches=1", "epochs=1", "network.hidden=[4]")


@pytest.mark.full
def test_a_run_goes_on_with_the_same_bits_and_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the host's environments repeat themselves, resuming is exact for them too."""
    begun, ended, make = [], [], packages.VECTORIZATIONS["sync"]

    def counted(*arguments: Any) -> Any:
        vector = make(*arguments)
        begun.append(vector)
        return vector._replace(close=lambda: ended.append(vector))

    monkeypatch.setitem(packages.VECTORIZATIONS, "sync", counted)
    train = [
        "train",
        "gymnasium:CartPole-v1",
        "ppo",
        *SMALL,
        *settings("evaluation_episodes=2", "evaluations=2"),
        "--quiet",
    ]
    for name, lengths in (("whole", [640]), ("two", [330, 640])):
        for steps in lengths:
            again = ["--resume"] if steps != lengths[0] else []
            assert main([*train, "--steps", str(steps), "--out", str(tmp_path / name), *again]) == 0
    assert len(begun) == len(ended) > 0  # environments of training and of evaluation, with each command
    states = []
    for name in ("whole", "two"):
        found = checkpoint.find(tmp_path / name / "checkpoints")
        assert found is not None
        states.append(array_files.read(found.path / "state"))
    assert any("history" in name for name in states[0])
    for name, x in states[0].items():
        if "place" not in name:  # where this process keeps them
            np.testing.assert_array_equal(x, states[1][name], err_msg=name)
    gif = tmp_path / "episode.gif"
    assert main(["play", str(tmp_path / "two"), "--gif", str(gif)]) == 0
    assert gif.read_bytes()[:4] == b"GIF8"


@pytest.mark.full
@pytest.mark.learning
def test_ppo_learns_through_the_door() -> None:
    env = envs.make("gymnasium:CartPole-v1")
    policy, critic = networks.mlp(env)
    learner = policy_gradient(env, policy, critic, ladder.ppo(num_envs=8, learning_rate=2.5e-3, gamma=0.98))

    def train(key: jax.Array) -> jax.Array:
        init_key, run_key = jax.random.split(key)
        return jax.lax.scan(learner.step, learner.init(init_key), jax.random.split(run_key, 40))[1]["return"]

    returns = jax.jit(lambda keys: jax.lax.map(train, keys))(jax.random.split(jax.random.key(0), 8))
    host_callback.raise_failure()
    assert np.nanmax(np.asarray(returns)[:, -5:], 1).mean() > 400  # in 41,000 steps; about 20 by chance


@pytest.mark.full
def test_the_page_about_gymnasium_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The blocks of docs/gymnasium.md in order, with fewer steps; all but the commands that need other packages."""
    page = (Path(__file__).parent.parent / "docs" / "gymnasium.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        if language == "python" and block.startswith("# my_module.py"):
            (tmp_path / "my_module.py").write_text(block, encoding="utf-8")
        elif language == "python":
            exec(compile(block, "docs/gymnasium.md", "exec"), {"__name__": "__main__"})
            assert float(capsys.readouterr().out.split()[-1]) >= 8  # steps that a pole stands, whatever is done
        else:
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                if words[0] == "jaxpg" and "envpool:" not in line and "Lunar" not in line:
                    fewer = ["--steps", "2048", *settings("evaluation_episodes=2")] if words[1] == "train" else []
                    assert main([*words[1:], *fewer]) == 0, line
    assert (tmp_path / "cartpole.gif").read_bytes()[:4] == b"GIF8"


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_experience_of_the_host_is_not_collected_again_to_be_diagnosed(name: str) -> None:
    """Its simulator has moved on; and it checks its numbers itself."""
    assert build(resolve_config(POLE, name)).learner.experience is None
