from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from PIL import Image

from jaxpg import envs
from jaxpg.envs import text
from jaxpg.errors import UserError
from jaxpg.report import render_gif
from jaxpg.report.episodes import boards, gif
from jaxpg.report.episodes.boards import _explore, _values, observations
from jaxpg.report.episodes.canvas import BLUE, FAINT, GREEN, RED, SKY, YELLOW, Canvas, Scene
from jaxpg.report.episodes.gif import HOLD, SCENES, draw_frame, trimmed
from jaxpg.report.episodes.lander import _power
from jaxpg.rollout.evaluation import RecordedEpisode, record_episode
from jaxpg.types import Actor, Discrete, Env


def random_actor(env: Env) -> Actor:
    def act(memory, obs, key, greedy):
        if isinstance(env.action_space, Discrete):
            return jax.random.randint(key, (), 0, env.action_space.n), memory
        return jax.random.uniform(key, env.action_space.shape, minval=-1.0), memory

    return Actor(lambda obs: (), act)


def some_episode(env: Env, steps: int = 3) -> RecordedEpisode:
    env = env._replace(time_limit=min(steps, env.time_limit))
    return jax.jit(lambda key: record_episode(env, random_actor(env), key, greedy=False))(jax.random.key(1))


WITHOUT_PICTURES = {"MNISTBandit-bsuite", *text.TASKS, "json_lines"}
DRAWN_ALIKE = {"LunarLanderContinuous-v3"}  # but for the length of its flames; compiling it takes ten seconds


@pytest.mark.parametrize("name", [name for name in envs.names() if name not in WITHOUT_PICTURES | DRAWN_ALIKE])
def test_every_environment_plays(name, tmp_path):
    env = envs.make(name)
    episode = some_episode(env)
    render_gif(env, episode, tmp_path / "play.gif", fps=25)
    with Image.open(tmp_path / "play.gif") as animation:
        assert animation.n_frames == int(episode.length) + 1
        durations, frames = [], []
        for index in range(animation.n_frames):
            animation.seek(index)
            durations.append(animation.info["duration"])
            frames.append(np.asarray(animation.convert("RGB"), int))
    assert durations == [40] * int(episode.length) + [HOLD]
    drawn = trimmed(episode)
    scene = SCENES.get(name, observations)(env, drawn)
    for t, frame in enumerate(frames):  # 255 colours lose next to nothing
        assert np.abs(frame - np.asarray(draw_frame(env, scene, drawn, t), int)).mean() < 1.5


def test_a_long_episode_keeps_its_speed_in_fewer_frames(tmp_path, monkeypatch):
    env = envs.make("CartPole-v1")
    episode = some_episode(env, steps=8)
    monkeypatch.setattr(gif, "MOST_FRAMES", 3)
    render_gif(env, episode, tmp_path / "play.gif", fps=25)
    with Image.open(tmp_path / "play.gif") as animation:
        durations = []
        for index in range(animation.n_frames):
            animation.seek(index)
            durations.append(animation.info["duration"])
        last = np.asarray(animation.convert("RGB"), int)
    assert durations == [120, 120, 120, HOLD]  # steps 0, 3 and 6, and the end
    drawn = trimmed(episode)
    assert np.abs(last - np.asarray(draw_frame(env, SCENES["CartPole-v1"](env, drawn), drawn, 8), int)).mean() < 1.5


def test_frames_follow_no_faster_than_viewers_show_them(tmp_path):
    """A GIF counts hundredths of a second, and one alone is taken for a mistake."""
    render_gif(envs.make("CartPole-v1"), some_episode(envs.make("CartPole-v1")), tmp_path / "play.gif", fps=1000)
    with Image.open(tmp_path / "play.gif") as animation:
        assert animation.info["duration"] == 20


def test_a_caption_names_the_action():
    named, nameless = (Scene((0, 1, 0, 1), None, fps=1, actions=names) for names in (("left", "coast", "right"), ()))
    for env, scene, actions, words in (
        (tiny.counter(), named, [0, 1, 2], ["left", "coast", "right"]),
        (tiny.counter(), nameless, [1], ["action 1"]),
        (tiny.target(), nameless, np.array([[0.5, -2.0]]), ["+0.50 -2.00"]),
    ):
        assert [gif._action_text(env, scene, action) for action in [*actions, None]] == [*words, "end"]


def frame_of(name: str, action, **fields) -> np.ndarray:
    """The picture of an environment in a certain state, [rows, columns, 3]."""
    env = envs.make(name)
    state, obs = env.reset(jax.random.key(0))
    state = state.replace(**{field: jnp.asarray(value, jnp.float32) for field, value in fields.items()})
    twice = jax.tree.map(lambda x: np.stack([x, x]), (state, obs))
    episode = RecordedEpisode(*twice, np.asarray(action)[None], np.zeros(1, np.float32), np.asarray(1))
    return np.asarray(draw_frame(env, SCENES[name](env, episode), episode, 0))


def middle(frame: np.ndarray, color: str) -> tuple[float, float]:
    """Mean x (to the right) and y (up) of the pixels of a colour."""
    rgb = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    rows, columns = np.nonzero((frame == rgb).all(axis=-1))
    assert rows.size > 20
    return columns.mean(), -rows.mean()


@pytest.mark.parametrize(
    ("name", "action", "color", "before", "after", "moves"),
    [
        ("CartPole-v1", 1, YELLOW, {"x": 0, "theta": 0}, {"x": 0, "theta": 0.5}, (1, -1)),  # leans right, tip sinks
        ("CartPole-v1", 1, YELLOW, {"x": 0, "theta": 0}, {"x": 1, "theta": 0}, (1, 0)),
        ("MountainCar-v0", 1, BLUE, {"position": -0.5}, {"position": 0.4}, (1, 1)),  # up the right hill
        ("MountainCarContinuous-v0", [0.0], BLUE, {"position": -0.5}, {"position": -1.0}, (-1, 1)),
        (
            "Acrobot-v1",
            1,
            SKY,
            {"joint_angle1": 0, "joint_angle2": 0},
            {"joint_angle1": 1.5, "joint_angle2": 0},
            (1, 1),
        ),
        (
            "Acrobot-v1",
            1,
            SKY,
            {"joint_angle1": 0, "joint_angle2": 0},
            {"joint_angle1": 0, "joint_angle2": -1},
            (-1, 1),
        ),
        (  # the second angle counts from the first link: from straight on to the right, to straight up
            "Acrobot-v1",
            1,
            SKY,
            {"joint_angle1": 1.57, "joint_angle2": 0},
            {"joint_angle1": 1.57, "joint_angle2": 1.57},
            (-1, 1),
        ),
        ("Pendulum-v1", [0.0], RED, {"theta": 0}, {"theta": 3.14159}, (0, -1)),  # 0 is upright
        ("Pendulum-v1", [0.0], RED, {"theta": 0}, {"theta": 1.0}, (-1, -1)),  # anticlockwise
    ],
)
def test_pictures_show_the_state(name, action, color, before, after, moves):
    shift = np.subtract(middle(frame_of(name, action, **after), color), middle(frame_of(name, action, **before), color))
    for moved, expected in zip(shift, moves, strict=True):
        assert abs(moved) < 3 if expected == 0 else expected * moved > 3


@pytest.mark.parametrize("name", ["CartPole-v1", "frozen_lake", "Breakout-MinAtar", "LunarLander-v3"])
def test_an_environment_with_the_name_of_another_is_drawn_by_what_it_is(name, tmp_path):
    env = envs.make("probe-policy")._replace(name=name)
    episode = some_episode(env)
    render_gif(env, episode, tmp_path / "play.gif")
    scene, drawn = observations(env, trimmed(episode)), trimmed(episode)
    with Image.open(tmp_path / "play.gif") as animation:
        first = np.asarray(animation.convert("RGB"), int)
    assert np.abs(first - np.asarray(draw_frame(env, scene, drawn, 0), int)).mean() < 1.5


def test_arrows_show_the_action():
    for name, color in (("CartPole-v1", BLUE), ("MountainCar-v0", RED)):
        left, right = middle(frame_of(name, 0), color)[0], middle(frame_of(name, 2 if color == RED else 1), color)[0]
        assert left < right
    assert middle(frame_of("Pendulum-v1", [1.5]), BLUE)[0] < middle(frame_of("Pendulum-v1", [-1.5]), BLUE)[0]


class Noted:
    """A canvas that notes what is drawn: the shape and its arguments."""

    def __init__(self):
        self.shapes = []

    def __getattr__(self, shape):
        return lambda *arguments: self.shapes.append((shape, arguments))

    def of(self, wanted):
        return [arguments for shape, arguments in self.shapes if shape == wanted]


def noted(scene, episode, t) -> Noted:
    """What a scene draws of a step."""
    canvas, action = Noted(), episode.actions[t] if t < len(episode.actions) else None
    scene.draw(canvas, t, jax.tree.map(lambda x: x[t], episode.states), action)
    return canvas


def resting(env: Env, **start) -> RecordedEpisode:
    """A first state, changed, that is the second one, too."""
    state, obs = env.reset(jax.random.key(0))
    state = state._replace(**start) if isinstance(state, tuple) else state.replace(**start)
    twice = jax.tree.map(lambda x: np.stack([x, x]), (state, obs))
    return RecordedEpisode(*twice, np.zeros(1, int), np.zeros(1, np.float32), np.asarray(1))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "settings", "start"),
    [
        ("FourRooms-misc", {"fail_prob": 0.0}, {"pos": jnp.array([4, 3])}),
        ("cliff_walking", {}, {"position": jnp.int32(12 + 5)}),
        ("frozen_lake", {"slippery": False}, {"position": jnp.int32(4 * 2 + 1)}),
    ],
    ids=["four rooms", "cliff", "lake"],
)
def test_an_arrow_points_where_its_action_leads(name, settings, start):
    """By the steps of the environment, from a cell with four neighbours."""
    env = envs.make(name, **settings)
    episode, step = resting(env, **start), jax.jit(env.step)
    scene, directions = SCENES[name](env, episode), set()
    state = jax.tree.map(lambda x: x[0], episode.states)
    for action in range(4):
        after, _ = step(jax.random.key(action), state, jnp.int32(action))
        states = jax.tree.map(lambda *x: np.stack(x), state, after)
        first, last = (noted(scene, episode._replace(states=states, actions=np.array([action])), t) for t in (0, 1))
        (here, *_), (there, *_) = first.of("circle")[-1], last.of("circle")[-1]
        ((begin, end, *_),) = first.of("arrow")
        assert last.of("arrow") == []
        moved = np.subtract(there, here)
        np.testing.assert_allclose(np.subtract(end, begin), 0.36 * moved, atol=1e-6)
        directions.add(tuple(moved.tolist()))
    assert directions == {(1, 0), (-1, 0), (0, 1), (0, -1)}


@pytest.mark.parametrize(
    ("name", "shown"),
    [("cliff_walking", [True, False]), pytest.param("grid_world", [True, True], marks=pytest.mark.full)],
)
def test_ends_are_green_or_red_by_their_rewards(name, shown):
    """The end of the cliff pays -1 as every step does, and is the goal: there is no other."""
    env = envs.make(name)
    episode = resting(env)
    ((floor,),) = noted(SCENES[name](env, episode), episode, 0).of("stamp")
    pixels = np.asarray(floor.image())
    colors = [[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in (GREEN, RED)]
    assert [bool((pixels == color).all(-1).any()) for color in colors] == shown


def test_the_line_of_acrobot_is_green_where_the_foot_is_above_it():
    def green(**angles):
        frame = frame_of("Acrobot-v1", 1, **angles)
        return (frame == [int(GREEN[i : i + 2], 16) for i in (1, 3, 5)]).all(-1).any()

    assert green(joint_angle1=3.1416, joint_angle2=0)
    assert not green(joint_angle1=0, joint_angle2=0)
    assert not green(joint_angle1=1.5708, joint_angle2=0)


def test_the_ball_of_catch_falls_to_the_paddle():
    """Yellow above blue, in the cells that the agent sees."""
    env = envs.make("Catch-bsuite")
    episode = trimmed(some_episode(env, steps=4))
    scene = SCENES[env.name](env, episode)
    for t in range(5):
        boxes = noted(scene, episode, t).of("box")
        cells = {color: (9 - int(bottom), int(left)) for left, bottom, _, _, color, _ in boxes}
        assert cells[SKY][0] == 9
        assert cells[YELLOW][0] == t
        assert sorted(map(list, cells.values())) == np.argwhere(np.reshape(episode.observations[t], (10, 5))).tolist()


def test_the_flag_of_a_mountain_stands_at_its_goal():
    """At 0.5, and at 0.45 where the push is a number: 12 pixels of 480 for two units."""
    flags = [middle(frame_of(name, a, position=-0.5), RED)[0] for name, a in
             (("MountainCar-v0", 1), ("MountainCarContinuous-v0", [0.0]))]  # fmt: skip
    assert flags[0] - flags[1] == pytest.approx(12, abs=2)


def test_flames_of_a_lander_are_those_of_its_engines():
    """Main engine, and side engines, the left one negative; those of Gymnasium fire beyond 0 and 0.5."""
    assert [_power(action, True) for action in range(4)] == [(0, 0), (0, -1), (1, 0), (0, 1)]
    numbers = {(0.0, 0.5): (0, 0), (0.5, -0.75): (0.75, -0.75), (-1.0, 3.0): (0, 1), (3.0, -0.4): (1, 0)}
    assert {action: _power(np.array(action), False) for action in numbers} == numbers


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_map_of_a_lake_is_found_out(size, wrapped):
    ours, theirs = envs.make("frozen_lake", size=size), envs.make("FrozenLake-misc", map_name=f"{size}x{size}")
    lake = {4: "SFFF FHFH FFFH HFFG", 8: "SFFFFFFF FFFFFFFF FFFHFFFF FFFFFHFF FFFHFFFF FHHFFFHF FHFFHFHF FFFHFFFG"}[
        size
    ]
    rows = lake.split()
    expected = {(r, c): float(rows[r][c] == "G") for r in range(size) for c in range(size) if rows[r][c] in "HG"}
    for env in (ours, theirs):
        env = envs.flatten(envs.sticky_actions(envs.frame_stack(env, num=2))) if wrapped else env
        walls, gain = _explore(env, env.reset(jax.random.key(0))[0])
        assert walls.shape == (size, size)
        assert not walls.any()
        assert gain == expected


def test_the_map_of_a_grid_with_a_wall_is_found_out():
    env = envs.as_env(envs.grid_world(3, 4, living_cost=0.0, walls=[(1, 1)]), 50, "grid_world")
    walls, gain = _explore(env, env.reset(jax.random.key(0))[0])
    assert walls.shape == (3, 4)
    assert np.argwhere(walls).tolist() == [[1, 1]]
    assert gain == {(0, 3): 1.0, (1, 3): -1.0}


@pytest.mark.parametrize(("walled", "floor"), [([(0, c) for c in range(6)], range(6, 11)), ([(0, 0), (1, 1)], [6])])
def test_a_map_without_vertical_moves_is_one_row(walled, floor):
    """A corridor, and a start between walls."""
    world = envs.grid_world(2, 6, goal=(1, 5), trap=(1, 4), walls=walled)
    env = envs.as_env(world, 50, "grid_world")
    walls, _ = _explore(env, env.reset(jax.random.key(0))[0])
    assert np.argwhere(~walls).tolist() == [[0, column] for column in floor]


def test_boards_show_what_the_agent_sees():
    """Breakout's three rows of bricks, also behind wrappers that change the observations."""
    env = envs.flatten(envs.frame_stack(envs.make("Breakout-MinAtar"), num=2))
    drawn = trimmed(some_episode(env))
    frame = np.asarray(draw_frame(env, SCENES[env.name](env, drawn), drawn, 0))
    red = (frame == [int(RED[i : i + 2], 16) for i in (1, 3, 5)]).all(axis=-1)
    cell = frame.shape[1] / 10.4  # ten cells and a margin
    rows = np.nonzero(red.any(axis=1))[0] / cell - 0.2
    assert 1.0 < rows.min() < 1.1
    assert 3.9 < rows.max() < 4.0
    assert red.sum() == pytest.approx(30 * (0.92 * cell) ** 2, rel=0.05)


def test_the_caption_tells_the_rewards_before_the_step():
    env = envs.make("CartPole-v1")
    drawn = trimmed(some_episode(env))
    richer = drawn._replace(rewards=drawn.rewards + np.array([0, 7, 0], np.float32))
    scene = SCENES[env.name](env, drawn)
    changed = [draw_frame(env, scene, drawn, t) != draw_frame(env, scene, richer, t) for t in range(4)]
    assert changed == [False, False, True, True]


def test_edges_are_smooth_and_lengths_true():
    canvas = Canvas((0, 10, 0, 5), width=100)
    canvas.line([(2, 1), (8, 4)], FAINT, 1.0)
    image = np.asarray(canvas.image())
    assert image.shape == (50, 100, 3)
    shades = len({tuple(pixel) for row in image for pixel in row})
    assert 5 <= shades <= 12  # oversampled by 3: nine steps between the two colours
    ink = (252 - image[..., 0].astype(float)).sum() / (252 - 0xE4)  # in pixels of full colour
    assert ink == pytest.approx(100 * np.hypot(6, 3) * 1.0 + np.pi * 5**2, rel=0.02)


def of_one_number(**parts) -> tuple[Env, RecordedEpisode]:
    """An environment without a scene whose state is a record of two numbers, and three steps of it."""
    env = tiny.counter()._replace(name="mine", **parts)
    return env, trimmed(some_episode(env, steps=3))


@pytest.mark.full
def test_an_environment_draws_its_own_states(tmp_path):
    """Also behind a wrapper, whose state holds that of the environment."""

    def render(state) -> np.ndarray:
        return np.full((40, 60, 3), 20 + 30 * int(state.time), np.uint8)

    env, episode = of_one_number(render=render)
    scene = gif._own_scene(env, episode)
    for t in range(len(episode.rewards) + 1):
        frame = np.asarray(draw_frame(env, scene, episode, t))
        assert (frame[: -gif.CAPTION] == 20 + 30 * int(episode.states.time[t])).all()
    render_gif(env, episode, tmp_path / "play.gif")
    wrapped = envs.sticky_actions(env)
    drawn = trimmed(some_episode(wrapped, steps=2))
    first = np.asarray(draw_frame(wrapped, gif._own_scene(wrapped, drawn), drawn, 0))
    assert (first[: -gif.CAPTION] == 20 + 30 * int(drawn.states.inner.time[0])).all()


@pytest.mark.parametrize(
    ("render", "sentence"),
    [
        (lambda state: np.zeros((4, 4), np.uint8), r"\(H, W, 3\) and dtype uint8, not \(4, 4\)"),
        (lambda state: np.zeros((4, 4, 3)), "and float64"),
        (lambda state: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_a_render_that_makes_no_picture_is_a_sentence(render, sentence, tmp_path):
    env, episode = of_one_number(render=render)
    with pytest.raises(UserError, match=sentence):
        render_gif(env, episode, tmp_path / "play.gif")
    assert not list(tmp_path.iterdir())


def test_numbers_of_a_state_have_their_names_and_a_scale():
    """The dot of a value is as far to the right as the value lies between the least and the most of the episode."""
    numbers = np.array([[0.0, 5.0], [1.0, 5.0], [4.0, 5.0]])
    scene = _values(["height", "constant"], numbers)
    places = []
    for t in range(3):
        canvas = Canvas(scene.view, scene.width, scene.background)
        scene.draw(canvas, t, None, None)
        blue = (np.asarray(canvas.image())[:34] == [0, 0x72, 0xB2]).all(-1)
        places.append(np.nonzero(blue)[1].mean())
    assert places == pytest.approx([150, 150 + 170 / 4, 320], abs=1)


def test_states_of_a_few_scalars_are_named_by_their_fields(monkeypatch):
    shown = []
    monkeypatch.setattr(boards, "_values", lambda names, numbers: shown.append((names, numbers)))
    env, episode = of_one_number()
    observations(env, episode)
    observations(env, episode._replace(states=np.zeros((4, 3, 3)), observations=np.full((4, 2), 0.5)))
    (names, numbers), (others, _) = shown
    assert names == ["length", "time"]
    np.testing.assert_array_equal(numbers[:, 1], np.arange(len(episode.rewards) + 1))
    assert others == ["observation 0", "observation 1"]


@pytest.mark.full
def test_a_gif_is_never_large(tmp_path, monkeypatch):
    """Noise, which no GIF compresses, gets fewer frames; the last is kept."""
    noise = np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8)
    env, episode = of_one_number(render=lambda state: np.roll(noise, 7 * int(state.time), 0))
    render_gif(env, episode, tmp_path / "whole.gif")
    size = (tmp_path / "whole.gif").stat().st_size
    monkeypatch.setattr(gif, "MOST_BYTES", size - 1)
    render_gif(env, episode, tmp_path / "play.gif")
    assert (tmp_path / "play.gif").stat().st_size < size
    with Image.open(tmp_path / "play.gif") as small, Image.open(tmp_path / "whole.gif") as whole:
        assert 2 <= small.n_frames < whole.n_frames
        duration = [0, 0]
        for i, animation in enumerate((small, whole)):
            for index in range(animation.n_frames - 1):
                animation.seek(index)
                duration[i] += animation.info["duration"]
        assert duration[0] >= duration[1]


@pytest.mark.parametrize(("channels", "shown"), [(3, [51, 102, 153]), (4, [204] * 3), (1, [51] * 3)])
def test_observations_that_are_images_are_shown(channels, shown):
    """In colour, or the newest of a stack of frames; not the bars of thousands of numbers."""
    env, episode = of_one_number()
    length = len(episode.rewards) + 1
    images = np.tile(np.float32([0.2, 0.4, 0.6, 0.8][:channels]), (length, 20, 30, 1))
    images[:, :10] = 0
    scene = observations(env, episode._replace(observations=images))
    canvas = Canvas(scene.view, scene.width, scene.background)
    scene.draw(canvas, 0, None, None)
    pixels = np.asarray(canvas.image())
    assert pixels.shape == (160, 240, 3)
    np.testing.assert_array_equal(pixels[120, 100], shown)
    np.testing.assert_array_equal(pixels[30, 100], 0)


@pytest.mark.parametrize(("shape", "least", "most"), [((20, 30, 4), 0, 2), ((20, 30, 4), -1, 1), ((15, 30, 4), 0, 1)])
def test_observations_that_are_no_images_stay_bars(shape, least, most, monkeypatch):
    """Numbers beyond what a pixel can be, and boards that are smaller than images."""
    drawn = []
    monkeypatch.setattr(boards, "_bars", lambda frames: drawn.append(frames.shape))
    env, episode = of_one_number()
    length = len(episode.rewards) + 1
    numbers = np.linspace(least, most, length * np.prod(shape)).reshape(length, *shape)
    observations(env, episode._replace(states=np.zeros((length, 3)), observations=numbers))
    assert drawn == [(length, np.prod(shape))]
