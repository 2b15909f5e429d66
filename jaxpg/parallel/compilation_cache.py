"""Compiled programs, kept between processes and between calls of one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax


def keep_compiled_programs() -> None:
    """Keep what is compiled from now on in `cache_directory`, and read it from there; settings of the user are kept.

    A second `fit` of the same experiment then takes less than a third of the time, in whichever process
    (benchmarks/LOG.md, "what a second fit compiles").
    """
    config: Any = jax.config
    if config.jax_compilation_cache_dir is None and (cache := cache_directory()):
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def cache_directory() -> str | None:
    """Where compiled programs are kept; None where none is named and this user has no home."""
    if named := os.environ.get("JAXPG_CACHE"):
        return named
    try:
        return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxpg")
    except RuntimeError:  # as in a container whose user is a bare number
        return None
