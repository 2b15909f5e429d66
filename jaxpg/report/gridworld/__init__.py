"""The grid world as a page for the browser, that solves it and learns in it by itself."""

from jaxpg.report.gridworld.assemble import gridworld_page, script

__all__ = [
    "gridworld_page",
    "script",
]
