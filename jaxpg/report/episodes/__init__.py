"""Episodes as animations, with a scene for each kind of environment."""

from jaxpg.report.episodes.gif import render_gif

__all__ = [
    "render_gif",
]
