"""What an accelerator learns beside what the CPU of the same machine does; benchmarks/gpu.sh runs the device lane.

Without an accelerator one row stands for all, with the choices of a GPU compiled for the CPU.
"""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from cases import CASES, KEYS, distance, make, moved, updates

from jaxpg.parallel.machine import program_for

ACCELERATOR = jax.default_backend() != "cpu"
ROWS = sorted(CASES, key=lambda name: not CASES[name].quick)  # first those that stand for the others


def three_updates(name, platform, device, state=None):
    """State before, state and metrics after; the learner is made anew, since jax keeps what it has traced."""
    learner = make(name)
    options = {"xla_backend_optimization_level": 0} if device.platform == "cpu" else None  # quickly compiled
    jit = partial(jax.jit, compiler_options=options)
    with jax.default_device(device), program_for(platform):
        state = jit(learner.init)(jax.random.key(0)) if state is None else state
        return state, *jit(updates(learner))(*jax.device_put((state, KEYS), device))


@pytest.mark.device
@pytest.mark.full
@pytest.mark.parametrize("name", ROWS if ACCELERATOR else ["grpo, text"])
def test_an_accelerator_learns_what_a_cpu_does(name):
    before, expected, metrics = three_updates(name, "cpu", jax.devices("cpu")[0])
    platform = jax.default_backend() if ACCELERATOR else "gpu"
    _, found, found_metrics = three_updates(name, platform, jax.devices()[0], before)
    step, apart = moved(before, expected), distance(*jax.device_get((found.params, expected.params)))
    assert step > 1e-3
    assert apart < 0.01 * step
    for count in ("steps", "episodes", "length"):
        np.testing.assert_allclose(found_metrics[count], metrics[count], rtol=1e-6)
