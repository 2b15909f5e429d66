"""How the tests run: four devices on any machine, no silent broadcasting, and compiled programs kept between runs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import jax
import pytest

if jax.__version_info__ < (0, 11):  # no fused kernels: half the time to compile; later versions can not do without
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled programs in pytest's own cache; `pytest --cache-clear` forgets them.

    An entry is found by a hash of the whole program and the compiler's version, so a changed function is compiled anew.
    Each worker of pytest-xdist has a folder to itself, and so have the command lines that its tests start and kill: jax
    writes entries in place, and another process could read half of one.
    """
    cache = getattr(config, "cache", None)  # not there with `-p no:cacheprovider`
    if cache is None:
        return
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    os.environ["JAXPG_CACHE"] = str(cache.mkdir(f"xla-{worker}-commands"))
    jax.config.update("jax_compilation_cache_dir", str(cache.mkdir(f"xla-{worker}")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


LONGEST = (
    "readme",
    "contracts",
    "parallel",
    "hosts",
    "language",
    "learning",
    "controls",
    "cli",
    "cli_text",
    "cli_records",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no worker is left alone with one at the end."""
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(autouse=True)
def compiled_in_a_hurry(request: pytest.FixtureRequest) -> Iterator[None]:
    """Most programs here run once, for a few steps, so compiling them well would take longer than running them."""
    optimised = any(request.node.get_closest_marker(name) for name in ("learning", "optimised"))
    jax.config.update("jax_disable_most_optimizations", not optimised)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
