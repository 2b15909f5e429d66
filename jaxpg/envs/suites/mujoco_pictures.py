"""Pictures of rigid bodies by MuJoCo's renderer, for the suites whose models are MuJoCo's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

WIDTH, HEIGHT = 360, 270


def renderer(model: Any, positions: Callable[[Any], tuple[Any, Any]]) -> Callable[[Any], np.ndarray] | None:
    """`Env.render` for a model: the picture of its first camera, or of MuJoCo's own without one.

    None where MUJOCO_GL names no way to draw without a window: "egl" or "osmesa", which has to be set before MuJoCo is
    imported.

    Args:
        model: an `mujoco.MjModel`.
        positions: state -> qpos, qvel.
    """
    if os.environ.get("MUJOCO_GL") not in ("egl", "osmesa"):
        return None
    made: list[Any] = []

    def render(state: Any) -> np.ndarray:
        import mujoco

        if not made:
            made.append(mujoco.Renderer(model, HEIGHT, WIDTH))
        data = mujoco.MjData(model)
        data.qpos, data.qvel = (np.asarray(x) for x in positions(state))
        mujoco.mj_forward(model, data)
        made[0].update_scene(data, camera=0 if model.ncam else -1)
        return np.asarray(made[0].render())

    return render
