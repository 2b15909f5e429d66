"""XLA's options for a program, by platform."""

from __future__ import annotations

import jax


def compiler_options(*, runs_once: bool = False) -> dict[str, int | bool]:
    """XLA's options for a program, to save compile time on CPUs; none on other platforms.

    A choice by platform, measured in benchmarks/LOG.md (2026-11-20, compile time of PPO; 2026-11-21, the suite). They
    replace XLA's default, LLVM's optimisation level 3. Level 1 compiles in a fifth less time to equally fast programs.
    Level 0 compiles fastest, to slow programs that run once. jax 0.10 can also compile without fused kernels.
    """
    if jax.default_backend() != "cpu":
        return {}
    if not runs_once:
        return {"xla_backend_optimization_level": 1}
    without_fusion = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
    return {"xla_backend_optimization_level": 0, **without_fusion}
