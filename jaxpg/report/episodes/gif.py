"""A recorded episode as an animation."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image, ImageDraw

from jaxpg.envs.wrappers import unwrap
from jaxpg.errors import UserError
from jaxpg.files import replace_file
from jaxpg.report.episodes import boards, control, lander
from jaxpg.report.episodes.canvas import INK, PAPER, QUIET, Canvas, Scene, font, pictures_scene
from jaxpg.rollout.evaluation import RecordedEpisode
from jaxpg.types import Discrete, Env
from jaxpg.user_input.user_code import describe_failure, explain_failure

_log = logging.getLogger(__name__)
SCENES: dict[str, Callable[[Env, RecordedEpisode], Scene]] = {
    "CartPole-v1": control.cart_pole,
    "MountainCar-v0": control.mountain_car,
    "MountainCarContinuous-v0": control.mountain_car,
    "Acrobot-v1": control.acrobot,
    "Pendulum-v1": control.pendulum,
    **dict.fromkeys(("LunarLander-v3", "LunarLanderContinuous-v3"), lander.lunar_lander_scene),
    **dict.fromkeys(boards.MINATAR, boards.minatar),
    "Catch-bsuite": boards.catch,
    "FourRooms-misc": boards.four_rooms,
    **dict.fromkeys(("FrozenLake-misc", "frozen_lake", "grid_world"), boards.grid_world),
    "cliff_walking": partial(boards.grid_world, actions=("up", "right", "down", "left")),
}
CAPTION = 28  # pixels
HOLD = 1500  # duration of the last frame in milliseconds
MOST_FRAMES = 150
MOST_BYTES = 500_000


def render_gif(env: Env, episode: RecordedEpisode, path: str | Path, *, fps: float | None = None) -> None:
    """Draw an episode, each step with its action and the return so far, as an animated GIF that repeats.

    Environments on the host and those with a `render` draw themselves. Others without a scene are drawn by their
    observations, or by the numbers of their states (`boards.observations`). Of an episode of more than MOST_FRAMES
    steps only every second, third, ... step is drawn, and shown for as long as they all last; fewer where the file
    would have more than MOST_BYTES.

    Raises:
        UserError: `render` fails, or returns something else than a picture. Where an environment on the host does, a
            warning is logged, and its observations are drawn.
        OSError: the file cannot be written, as in a folder that is not there.

    Args:
        env: the environment of the episode; its name selects the scene, if its states are what that draws.
        episode: as recorded by `rollout.evaluation.record_episode`.
        path: the file to write.
        fps: frames per second, at most 50 (a GIF counts hundredths of a second, and viewers slow down faster ones);
            None for the scene's own rate.
    """
    episode = trimmed(episode)
    length = len(episode.rewards)
    scene = _own_scene(env, episode) or _scene_by_name(env, episode) or boards.observations(env, episode)
    palette = _palette([draw_frame(env, scene, episode, t) for t in np.linspace(0, length, 8, dtype=int)])
    step_duration = 10 * max(2, round(100 / (fps or scene.fps)))  # milliseconds
    stride = -(-length // MOST_FRAMES) or 1
    while True:
        drawn = [*range(0, length, stride), length]
        frames = [_quantized(draw_frame(env, scene, episode, t), palette) for t in drawn]
        content = _animation(frames, stride * step_duration)
        if len(content) <= MOST_BYTES or len(drawn) <= 2:
            break
        stride = max(stride + 1, -(-stride * len(content) // MOST_BYTES))
    replace_file(Path(path), content)


def _animation(frames: list[Image.Image], duration: int) -> bytes:
    """Frames as a GIF, each shown for `duration` milliseconds and the last one for HOLD."""
    buffer = io.BytesIO()
    frames[0].save(
        buffer,
        format="GIF",
        save_all=True,
        append_images=frames[1:],
        duration=[duration] * (len(frames) - 1) + [HOLD],
        loop=0,
        optimize=False,
        disposal=1,
    )
    return buffer.getvalue()


def _own_scene(env: Env, episode: RecordedEpisode) -> Scene | None:
    """The pictures that an environment makes itself, those on the host of the episode played once more; None if none.

    There are also none if the rewards are not those that were recorded: the pictures would be of another episode.
    """
    if env.render is not None:
        states = unwrap(episode.states)
        first = _rendered(env, jax.tree.map(lambda x: x[0], states))
        return pictures_scene(first.shape[:2], lambda t, state: _rendered(env, state))
    if env.host is None or env.host.frames is None:
        return None
    try:
        pictures, rewards = env.host.frames(episode.states, np.asarray(episode.actions))
        for picture in pictures:
            _check_picture(env, picture)
    except (Exception, SystemExit) as error:
        reason = error if isinstance(error, UserError) else f"{env.name} raised {describe_failure(error)}."
        _log.warning("%s Its observations are drawn instead.", reason)
        return None
    if not np.allclose(rewards, episode.rewards, atol=1e-4):
        return None
    return pictures_scene(pictures[0].shape[:2], lambda t, state: pictures[t])


def _scene_by_name(env: Env, episode: RecordedEpisode) -> Scene | None:
    """The scene of the environment that has this name; None if it has other states, as one of a user's may."""
    if env.name not in SCENES:
        return None
    try:
        scene = SCENES[env.name](env, episode)
        draw_frame(env, scene, episode, 0)
    except (AttributeError, IndexError, TypeError):
        return None
    return scene


def _rendered(env: Env, state: Any) -> np.ndarray:
    """The picture that `Env.render` makes of a state."""
    assert env.render is not None
    with explain_failure(f"render of the environment {env.name}"):
        picture = np.asarray(env.render(state))
    _check_picture(env, picture)
    return picture


def _check_picture(env: Env, picture: Any) -> None:
    """Raise a UserError for what `render` must not return."""
    given = np.asarray(picture)
    if given.ndim != 3 or given.shape[-1] != 3 or given.dtype != np.uint8:
        raise UserError(
            f"render of the environment {env.name} must return a picture of the shape (H, W, 3) and dtype uint8, not "
            f"{'None' if picture is None else f'{given.shape} and {given.dtype}'}."
        )


def trimmed(episode: RecordedEpisode) -> RecordedEpisode:
    """The episode as numpy arrays without its padding: T + 1 states and observations, T actions and rewards."""
    states, observations, actions, rewards, length = jax.device_get(episode)
    states, observations = jax.tree.map(lambda x: x[: length + 1], (states, observations))
    return RecordedEpisode(states, observations, actions[:length], rewards[:length], length)


def draw_frame(env: Env, scene: Scene, episode: RecordedEpisode, t: int) -> Image.Image:
    """Step `t` of a trimmed episode, with a caption below it."""
    action = episode.actions[t] if t < len(episode.actions) else None
    canvas = Canvas(scene.view, scene.width, scene.background)
    scene.draw(canvas, t, jax.tree.map(lambda x: x[t], unwrap(episode.states)), action)
    picture = canvas.image()
    frame = Image.new("RGB", (picture.width, picture.height + CAPTION), PAPER)
    frame.paste(picture)
    draw = ImageDraw.Draw(frame)
    middle = picture.height + CAPTION // 2
    total = float(episode.rewards[:t].sum())
    draw.text((10, middle), f"step {t}", fill=QUIET, font=font(12), anchor="lm")
    draw.text((frame.width // 2, middle), _action_text(env, scene, action), fill=QUIET, font=font(12), anchor="mm")
    draw.text((frame.width - 10, middle), f"return {total:.4g}", fill=INK, font=font(12), anchor="rm")
    return frame


def _action_text(env: Env, scene: Scene, action: Any) -> str:
    if action is None:
        return "end"
    if isinstance(env.action_space, Discrete):
        return scene.actions[int(action)] if scene.actions else f"action {int(action)}"
    numbers = [f"{x:+.2f}" for x in np.ravel(action)]
    return " ".join(numbers[:3]) + (" …" if len(numbers) > 3 else "")


def _palette(frames: list[Image.Image]) -> Image.Image:
    """One palette of 255 colours for all frames, so that colours do not flicker; one index is left for transparency."""
    width, height = frames[0].size
    sheet = Image.new("RGB", (width, height * len(frames)))
    for index, frame in enumerate(frames):
        sheet.paste(frame, (0, index * height))
    return sheet.quantize(255, method=Image.Quantize.MEDIANCUT)


def _quantized(frame: Image.Image, palette: Image.Image) -> Image.Image:
    return frame.quantize(palette=palette, dither=Image.Dither.NONE)
