"""Adapters of other libraries: each on a fake of its library, and on the real one where it is installed."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from jaxpg import envs
from jaxpg.cli.main import main
from jaxpg.envs import adapting, suites
from jaxpg.envs.wrappers import unwrap
from jaxpg.errors import UserError
from jaxpg.types import Discrete
from jaxpg.user_input import user_code

OVER = 5
"""The task of every fake is over after so many steps; its observation is the time."""


class Record(NamedTuple):
    """A state of a library, whose names differ."""

    time: Any
    obs: Any
    reward: Any
    done: Any

    @property
    def achievements(self) -> Any:
        """[4], of Craftax: one more from step to step."""
        return jnp.arange(4) < self.time


def begin() -> Record:
    return Record(jnp.int32(0), jnp.zeros(1), jnp.float32(0), jnp.float32(0))


def after(time: Any, over: Any) -> Record:
    return Record(time, jnp.full(1, time, jnp.float32), jnp.float32(1), over.astype(jnp.float32))


def picture(time: Any) -> Any:
    """What the fakes draw."""
    return jnp.full((3, 4, 3), time, jnp.uint8)


class Bodies:
    """Brax's and Playground's environment: no limit, no reset."""

    action_size = 2
    mj_model = None
    sys = types.SimpleNamespace(mj_model=None)

    def __init__(self, backend: str = "generalized", **settings: Any) -> None: ...

    def reset(self, key: Any) -> Record:
        assert key.dtype == jnp.uint32
        return begin()

    def step(self, state: Record, action: Any) -> Record:
        return after(state.time + 1, state.time + 1 >= OVER)


def fake_brax() -> dict[str, Any]:
    return {"brax.envs": {"_envs": {"count": Bodies}, "get_environment": lambda env_id, **settings: Bodies(**settings)}}


class _Config:
    def to_dict(self) -> dict[str, Any]:
        return {
            "episode_length": 1000,
            "impl": "warp",
            "action_repeat": 1,
            "vision": False,
            "sim_dt": 0.01,
            "ctrl_dt": 0.02,
        }


def fake_mujoco_playground() -> dict[str, Any]:
    def load(env_id: str, config_overrides: dict[str, Any]) -> Bodies:
        assert config_overrides["impl"] == "jax"
        return Bodies()

    suite = {"ALL_ENVS": ["count"], "get_default_config": lambda env_id: _Config(), "load": load}
    return {"mujoco_playground": {"dm_control_suite": types.SimpleNamespace(**suite)}}


def fake_navix() -> dict[str, Any]:
    def symbolic(state: Any) -> Any: ...

    symbolic.__module__ = "navix.observations"

    class Timestep(NamedTuple):
        state: Any
        observation: Any
        reward: Any

    class Grid:
        action_set = (1, 2, 3)

        def reset(self, key: Any) -> Timestep:
            return Timestep(*begin()[:3])

        def step(self, timestep: Timestep, action: Any) -> Timestep:
            raise AssertionError("it resets by itself")

        def _step(self, timestep: Timestep, action: Any) -> Timestep:
            return Timestep(*after(timestep.state + 1, jnp.bool_(True))[:3])

        def termination_fn(self, before: Any, action: Any, state: Any) -> Any:
            return state >= OVER

    return {
        "navix": {
            "registry": lambda: {"count": Grid},
            "make": lambda env_id, **settings: Grid(),
            "observations": types.SimpleNamespace(symbolic=symbolic, rgb=picture, jnp=jnp),
        }
    }


def fake_craftax() -> dict[str, Any]:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Params:
        max_timesteps: int = 10_000
        angles: tuple = (None,)

    class Game:
        default_params = Params()
        num_actions = 3

        def reset_env(self, key: Any, params: Params) -> tuple:
            return begin().obs, begin()

        def step_env(self, key: Any, state: Record, action: Any, params: Params) -> tuple:
            time = state.time + 1
            state = after(time, (time >= OVER) | (time >= params.max_timesteps))
            return state.obs, state, state.reward, state.done, {}

    def make(name: str, auto_reset: bool) -> Game:
        assert not auto_reset
        return Game()

    return {
        "craftax.craftax_env": {"make_craftax_env_from_name": make},
        "craftax.craftax": {},
        "craftax.craftax.constants": {"BLOCK_PIXEL_SIZE_IMG": 16},
        "craftax.craftax.renderer": {
            "make_craftax_pixel_renderer": lambda size: lambda state: picture(state.time) * 1.0
        },
    }


class DiscreteArray(NamedTuple):
    num_values: int


class MultiDiscreteArray(NamedTuple):
    num_values: Any


def fake_jumanji() -> dict[str, Any]:
    class Observation(NamedTuple):
        time: Any
        action_mask: Any

    class Viewer:
        def _display(self, figure: Any) -> None:
            raise AssertionError("it opens a window")

        def _display_rgb_array(self, figure: Any) -> Any:
            return np.pad(np.asarray(figure), ((0, 0), (0, 0), (0, 1)))

        def render(self, time: Any) -> Any:
            return self._display(picture(time.astype(jnp.uint8)))  # of jax's arrays alone, as Jumanji's are

    class Board:
        """Two rows of three cells; only cell (1, step % 3) is allowed."""

        action_spec = MultiDiscreteArray(np.array([2, 3]))
        reward_spec = np.zeros(())
        observation_spec = types.SimpleNamespace(_specs={"action_mask": np.zeros((2, 3)), "time": None})

        def __init__(self, time_limit: int = 100, viewer: Any = None) -> None:
            self.time_limit = time_limit
            self._viewer = Viewer()

        def observe(self, time: Any) -> Observation:
            return Observation(jnp.full(1, time, jnp.int8), jnp.arange(6).reshape(2, 3) == 3 + time % 3)

        def reset(self, key: Any) -> tuple:
            return jnp.int32(0), types.SimpleNamespace(observation=self.observe(jnp.int32(0)))

        def step(self, time: Any, action: Any) -> tuple:
            legal = (action[0] == 1) & (action[1] == time % 3)
            time = time + 1
            last = (time >= OVER) | (time >= self.time_limit)
            reward = jnp.where(legal, 1.0, -1.0)
            return time, types.SimpleNamespace(observation=self.observe(time), reward=reward, last=lambda: last)

    spec = types.SimpleNamespace(entry_point="board", kwargs={})
    registration = types.SimpleNamespace(_REGISTRY={"count": spec}, load=lambda entry_point: Board)
    return {
        "jumanji": {
            "registered_environments": lambda: {"count"},
            "make": lambda env_id, **settings: Board(**settings),
            "registration": registration,
            "specs": types.SimpleNamespace(DiscreteArray=DiscreteArray, MultiDiscreteArray=MultiDiscreteArray),
        },
        "jumanji.viewer": {"MatplotlibViewer": Viewer},
    }


class Game(NamedTuple):
    """PGX's state of a game in which players move by turns, and each counts its own moves."""

    current_player: Any
    moves: Any
    rewards: Any
    terminated: Any
    legal_action_mask: Any


def fake_pgx() -> dict[str, Any]:
    class Table:
        """The agent's fifth move ends the game; the other may take action 1 alone; half a point to the agent each.

        The other begins, for `opening` points, which may be the end.
        """

        num_actions = 3

        def __init__(self, opening: float, ends: bool) -> None:
            self.opening, self.ends = opening, ends

        def init(self, key: Any) -> Game:
            return Game(jnp.int32(1), jnp.zeros(2, jnp.int32), jnp.zeros(2), jnp.bool_(False), self.legal(1))

        def legal(self, player: Any) -> Any:
            return jnp.where(jnp.equal(player, 1), jnp.arange(3) == 1, jnp.ones(3, bool))

        def step(self, state: Game, action: Any, key: Any) -> Game:
            player = state.current_player
            moves = state.moves.at[player].add(1)
            opens = moves.sum() == 1
            paid = jnp.where(opens, self.opening, jnp.where((player == 0) | (action == 1), 0.5, 0.0))
            paid = jnp.where(state.terminated, 0.0, paid)
            over = state.terminated | (moves[0] >= OVER) | (opens & self.ends)
            return Game(1 - player, moves, jnp.stack([paid, -paid]), over, self.legal(1 - player))

        def _observe(self, state: Game, player: Any) -> Any:
            return jnp.full(1, state.moves[player], jnp.int8)

    games = {"count": Table(0.0, False), "opening": Table(-2.0, False), "over": Table(-2.0, True)}
    return {"pgx": {"available_envs": lambda: tuple(games), "make": games.__getitem__}}


def fake_jaxtari() -> dict[str, Any]:
    class Screen:
        def action_space(self) -> Any:
            return types.SimpleNamespace(n=3)

        def reset(self, key: Any) -> tuple:
            return {"ball": begin().obs}, begin()

        def step(self, state: Record, action: Any) -> tuple:
            state = after(state.time + 1, state.time + 1 >= OVER)
            return {"ball": state.obs}, state, state.reward, state.done, {}

    return {
        "jaxtari": {
            "list_available_games": lambda: ["count"],
            "make": lambda env_id, mode, difficulty: Screen(),
            "ownership_or_alt_markers_present": lambda: True,
        }
    }


FAKES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "brax:count": (fake_brax, "episode_length"),
    "craftax:Craftax-Symbolic-v1": (fake_craftax, "max_timesteps"),
    "jaxtari:count": (fake_jaxtari, "max_steps"),
    "jumanji:count": (fake_jumanji, "time_limit"),
    "navix:count": (fake_navix, "max_steps"),
    "pgx:count": (fake_pgx, "max_steps"),
    "playground:count": (fake_mujoco_playground, "episode_length"),
}
"""The fake library of each suite, and what its time limit is called."""


def install(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Put the fake library in the place of the real one."""
    prefix = name.partition(":")[0]
    monkeypatch.delitem(sys.modules, f"jaxpg.envs.suites.{prefix}", raising=False)
    made: dict[str, types.ModuleType] = {}
    for module, contents in FAKES[name][0]().items():
        for part in {module.partition(".")[0], module} - made.keys():
            fake = made[part] = types.ModuleType(part)
            fake.__spec__ = importlib.machinery.ModuleSpec(part, None)
            fake.__path__ = []
            monkeypatch.setitem(sys.modules, part, fake)
        vars(sys.modules[module]).update(contents)
        outer, _, inner = module.partition(".")
        if inner:
            setattr(sys.modules[outer], inner, sys.modules[module])
    monkeypatch.setattr(suites.table, "is_installed", lambda prefix: True)


@pytest.fixture(params=FAKES)
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    install(monkeypatch, request.param)
    yield request.param
    sys.modules.pop(f"jaxpg.envs.suites.{request.param.partition(':')[0]}", None)  # it holds on to the fake


def play(env: Any, steps: int) -> tuple[Any, list[Any]]:
    """The first observation, and what steps of an allowed action (or the last one) return."""
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    state, obs = reset(jax.random.key(0))
    first, seen = obs, []
    for i in range(steps):
        action = jnp.ones(env.action_space.shape) if not isinstance(env.action_space, Discrete) else jnp.int32(1)
        if env.action_mask is not None:
            action = jnp.argmax(env.action_mask(obs)).astype(jnp.int32)
        state, timestep = step(jax.random.key(i), state, action)
        obs = timestep.obs
        seen.append(timestep)
    return first, seen


def test_a_time_out_and_a_termination_are_told_apart(fake: str) -> None:
    limit = FAKES[fake][1]
    assert envs.default_settings(fake)[limit] >= 100
    short = envs.make(fake, **{limit: 3})
    assert short.name == fake
    assert (short.time_limit, short.min_truncation_step) == (3, 3)
    first, seen = play(short, 3)
    assert first[0] == 0
    assert [float(x.obs[0]) for x in seen] == [1, 2, 3]  # the last is the true successor
    assert [bool(x.last) for x in seen] == [False, False, True]
    assert [float(x.discount) for x in seen] == [1, 1, 1]
    assert [float(x.reward) for x in seen] == [1, 1, 1]

    for steps in (OVER, 9):  # also where both fall on one step
        _, seen = play(envs.make(fake, **{limit: steps}), OVER)
        assert [bool(x.last) for x in seen] == [False] * 4 + [True]
        assert [float(x.discount) for x in seen] == [1] * 4 + [0]


@pytest.mark.parametrize("fake", ["craftax:Craftax-Symbolic-v1", "jumanji:count", "navix:count"], indirect=True)
def test_what_a_library_draws_is_the_picture_of_a_state(fake: str) -> None:
    """Called with numpy arrays and the library's own state, as `jaxpg play` does."""
    env = envs.make(fake)
    state, _ = env.reset(jax.random.key(0))
    for i in range(2):
        state, _ = env.step(jax.random.key(i), state, jnp.int32(1))
    drawn = env.render(jax.device_get(unwrap(state)))
    assert (drawn.shape, drawn.dtype) == ((3, 4, 3), np.uint8)
    assert np.unique(drawn).tolist() == [2]


@pytest.mark.parametrize("fake", ["brax:count", "playground:count"], indirect=True)
def test_bodies_are_drawn_where_it_takes_no_window(fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, drawn in (("", False), ("glfw", False), ("egl", True), ("osmesa", True)):
        monkeypatch.setenv("MUJOCO_GL", value)
        assert (envs.make(fake).render is not None) == drawn


@pytest.mark.parametrize("fake", ["craftax:Craftax-Symbolic-v1"], indirect=True)
def test_achievements_of_craftax_are_counted(fake: str) -> None:
    env = envs.make(fake)
    state, _ = env.reset(jax.random.key(0))
    for i in range(3):
        state, _ = env.step(jax.random.key(i), state, jnp.int32(1))
    assert env.episode_metrics is not None
    assert {name: float(x) for name, x in env.episode_metrics(state).items()} == {"achievements": 3.0}


@pytest.mark.full
def test_every_adapter_keeps_the_contract(fake: str) -> None:
    envs.check_env(envs.make(fake, **{FAKES[fake][1]: 3}), fake)


def test_a_name_or_a_setting_that_is_not_there_is_one_sentence(fake: str) -> None:
    prefix = fake.partition(":")[0]
    with pytest.raises(UserError, match=f"There is no environment of {suites.SUITES[prefix].name} 'coumt'"):
        envs.make(f"{prefix}:coumt")
    with pytest.raises(UserError, match=f"{fake} has no setting 'gravity'"):
        envs.make(fake, gravity=1.0)


def test_a_board_of_jumanji_is_masked_and_its_cells_are_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "jumanji:count")
    env = envs.make("jumanji:count")
    assert env.action_space == Discrete(6)
    state, obs = env.reset(jax.random.key(0))
    for time in range(3):
        assert env.action_mask is not None
        np.testing.assert_array_equal(env.action_mask(obs), np.arange(6) == 3 + time)
        assert obs.shape == (7,)
        state, timestep = env.step(jax.random.key(0), state, jnp.int32(3 + time))
        assert timestep.reward == 1
        obs = timestep.obs
    sys.modules.pop("jaxpg.envs.suites.jumanji")


def test_bounds_of_an_observation_are_those_of_the_types_of_its_parts() -> None:
    """Two booleans, three bytes, and a number that may be anything; of one part as it is."""
    parts = [jax.ShapeDtypeStruct((2,), bool), jax.ShapeDtypeStruct((3, 1), np.uint8), jax.ShapeDtypeStruct((), float)]
    space = adapting._joined_space(parts)
    np.testing.assert_array_equal(space.low, [0, 0, 0, 0, 0, -np.inf])
    np.testing.assert_array_equal(space.high, [1, 1, 255, 255, 255, np.inf])
    np.testing.assert_array_equal(adapting._joined_space(parts[1:2]).high, [[255], [255], [255]])


def test_what_comes_before_the_first_turn_counts_and_may_end_the_game(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "pgx:count")
    for game, expected in (("opening", [(-1.0, 1.0), (1.0, 1.0)]), ("over", [(-2.0, 0.0)])):
        _, seen = play(envs.make(f"pgx:{game}"), len(expected))
        assert [(float(x.reward), float(x.discount)) for x in seen] == expected
    sys.modules.pop("jaxpg.envs.suites.pgx")


def test_settings_that_a_library_would_take_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, settings, sentence in (
        ("navix:count", {"observation": "jnp"}, r"no observation 'jnp' of navix:count\. There are: symbolic"),
        ("navix:count", {"max_steps": 0}, "count: the time limit of an episode must be at least 1 step, not 0"),
        ("playground:count", {"sim_dt": 0.03}, r"sim_dt .* at most that of an action, ctrl_dt = 0\.02, not 0\.03"),
    ):
        install(monkeypatch, name)
        with pytest.raises(UserError, match=sentence):
            envs.make(name, **settings)
        sys.modules.pop(f"jaxpg.envs.suites.{name.partition(':')[0]}")
    with pytest.raises(UserError, match="Did you mean 'brax:ant'"):
        envs.make("brx:ant")


def test_the_largest_limit_is_one_that_a_library_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "jumanji:count")
    assert envs.make("jumanji:count", time_limit=2**31 - 1).time_limit == 2**31 - 1
    sys.modules.pop("jaxpg.envs.suites.jumanji")


def test_names_in_the_list_are_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "Dynamic-Obstacles-16x16-Random-With-A-Long-Name-v0"
    monkeypatch.setattr(suites.table, "ids", lambda prefix: [name])
    monkeypatch.setattr(suites, "ids", lambda prefix: [name])
    monkeypatch.setattr(envs, "default_settings", lambda name: {"max_steps": 100, "observation": "symbolic " * 9})
    assert main(["list", "environments", "navix"]) == 0
    assert f"navix:{name} " in capsys.readouterr().out


def test_a_game_of_jaxtari_may_last_as_long_as_one_of_ale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an hour of 60 frames a second, each of them a step."""
    install(monkeypatch, "jaxtari:count")
    assert envs.default_settings("jaxtari:count")["max_steps"] == 30 * 60 * 60
    sys.modules.pop("jaxpg.envs.suites.jaxtari")


def test_missing_sprites_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "jaxtari:count")
    monkeypatch.setattr(sys.modules["jaxtari"], "ownership_or_alt_markers_present", lambda: False)
    with pytest.raises(UserError, match=r"python -m jaxtari\.install_sprites"):
        envs.make("jaxtari:count")
    sys.modules.pop("jaxpg.envs.suites.jaxtari")


def test_a_library_that_is_not_installed_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    out = tmp_path / "run"
    message = refused(capsys, "train", "brax:ant", "ppo", "--out", str(out))
    assert "Brax is not installed" in message
    assert "pip install 'jaxpg[brax]'" in message
    assert not out.exists()


@pytest.mark.full
def test_the_list_says_what_there_is_and_what_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "environments"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{prefix}:ID" in listed for prefix in suites.SUITES)
    assert "kinetix-env 3.0.2" in listed
    assert "There is no suite 'braxx'. Did you mean 'brax'?" in refused(capsys, "list", "environments", "braxx")


def test_every_suite_is_an_extra_and_a_reserved_prefix() -> None:
    page = Path(__file__).parent.parent / "pyproject.toml"
    extras = tomllib.loads(page.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert suites.SUITES.keys() == user_code.SUITE_PREFIXES
    assert suites.SUITES.keys() <= extras.keys()
    for prefix, suite in suites.SUITES.items():
        assert extras[prefix][0].startswith(f"{prefix}>=")
        assert (Path(suites.__file__).parent / f"{prefix}.py").exists(), suite


def test_a_suites_name_is_no_code_of_a_run() -> None:
    settings = {"environment": "brax:ant", "environment_settings": {"match": "mine:check"}}
    assert user_code.code_names(settings) == ["mine:check"]
    with pytest.raises(UserError, match="prefix of a suite"):
        user_code.import_user_code("brax:ant", "reward function")


REAL = {
    "brax:ant": {"backend": "spring", "episode_length": 3},
    "craftax:Craftax-Classic-Symbolic-v1": {"max_timesteps": 3},
    "jaxtari:pong": {"max_steps": 3},
    "jumanji:Snake-v1": {"time_limit": 3},
    "navix:Navix-Empty-5x5-v0": {"max_steps": 3},
    "pgx:tic_tac_toe": {"max_steps": 2},
    "playground:CartpoleBalance": {"episode_length": 3},
}


def draw_sprites(folder: Path) -> None:
    """Pong in plain colours, as JAXtari's alternative sprites: its own are Atari's and are downloaded."""
    pong = folder / "jaxtari" / "sprites" / "pong"
    pong.mkdir(parents=True)
    (folder / "jaxtari" / ".alternative_sprites_installed").touch()
    (pong.parent / ".version").write_text("1")
    pictures = {"background": (210, 160, 90), "player": (16, 4, 180), "enemy": (16, 4, 210), "ball": (4, 2, 240)}
    pictures |= {f"{side}_score_{i}": (20, 12, i + 1) for side in ("player", "enemy") for i in range(10)}
    for name, (height, width, grey) in pictures.items():
        np.save(pong / f"{name}.npy", np.tile(np.uint8([grey, grey, grey, 255]), (height, width, 1)))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REAL)
def test_a_real_environment_trains_and_its_limit_is_a_time_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, limit = name.partition(":")[0], list(REAL[name].values())[-1]
    if not suites.is_installed(prefix):
        pytest.skip(f"needs {suites.install_command(prefix)}")
    if prefix == "jaxtari":
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
        draw_sprites(tmp_path / "data")
    short, long = (envs.make(name, **{**REAL[name], list(REAL[name])[-1]: steps}) for steps in (limit, 100))
    (_, cut), (_, whole) = play(short, limit), play(long, limit + 1)
    for a, b in zip(cut, whole[:limit], strict=True):
        np.testing.assert_array_equal(a.obs, b.obs)
        assert a.discount == b.discount == 1
    assert [bool(x.last) for x in cut] == [False] * (limit - 1) + [True]
    assert not any(bool(x.last) for x in whole[:limit])

    settings = [f"--set=environment_settings.{key}={value}" for key, value in REAL[name].items()]
    few = ["--set=num_envs=4", "--set=num_steps=8", "--set=evaluation_episodes=2", "--set=evaluations=1", "--quiet"]
    monkeypatch.chdir(tmp_path)
    assert main(["train", name, "ppo", "--steps", "64", "--out", "run", *few, *settings]) == 0
    assert main(["eval", "run", "--episodes", "2"]) == 0
    assert main(["play", "run", "--gif", "run.gif"]) == 0
    assert (tmp_path / "run.gif").stat().st_size <= 500_000
