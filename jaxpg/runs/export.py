"""A run for other programs: its metrics as comma-separated values, and its policy as a program for jax alone.

The policy is written by `jax.export`: the traced computation with its parameters, for any size of the batch, on CPU,
CUDA and TPU. It is the computation that was trained, operation by operation, and needs neither jaxpg nor a converter;
ONNX would need one that knows every operation of every network, the user's own included. How long later versions of
jax read such a file: https://docs.jax.dev/en/latest/export/export.html (compatibility guarantees).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from jaxpg.errors import UserError, excerpt
from jaxpg.files import explain_os_error, replace_file
from jaxpg.runs.policy import act_all
from jaxpg.runs.results import MetricsTable
from jaxpg.runs.trained import Run
from jaxpg.types import Array, Env, Learner, Tree, space_struct

TABLE, POLICY, LOADER = "metrics.csv", "policy.jax", "load_policy.py"
PLATFORMS = ("cpu", "cuda", "tpu")


def export_metrics(metrics: MetricsTable, out: Path) -> Path:
    """Write the metrics of all seeds in long form (`MetricsTable.to_csv`); returns the file.

    Raises:
        UserError: the directory cannot be written to.
    """
    with explain_os_error(out):
        out.mkdir(parents=True, exist_ok=True)
        metrics.to_csv(out / TABLE)
    return out / TABLE


def export_policy(run: Run, out: Path, seed_index: int | None = None) -> Path:
    """Write the policy of a seed, by default of the best, and beside it what loads it; returns the file.

    Raises:
        UserError: as `Run.policy_of`; the directory cannot be written to.
    """
    index = run.seed_index(seed_index)
    run.refuse_without_actions()
    with jax.enable_x64(False):  # as it was trained
        program = policy_program(run.experiment.learner, run.learner_of(index), run.experiment.env)
    with explain_os_error(out):
        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / POLICY, program)
        replace_file(out / LOADER, Path(__file__).with_name(LOADER).read_text(encoding="utf-8"))
    return out / POLICY


def policy_program(learner: Learner, state: Tree, env: Env) -> bytes:
    """A policy as a serialised `jax.export.Exported`, its parameters inside, for `load_policy.load`.

    It computes `(obs, begins [b] bool, greedy [] bool, seed [] int32, memory) -> (actions [b, ...], memory)` for any b;
    the arrays of obs are [b, ...], and `memory` is the list of those of the policy's memory, which `begins` resets.

    Raises:
        UserError: an observation is of a class that may be missing where the file is loaded.
    """
    (batch,) = jax.export.symbolic_shape("b")
    one = space_struct(env.observation_space)
    if not _is_plain(jax.tree.structure(one)):
        raise UserError(
            f"A policy is exported with observations in dictionaries, tuples or lists of arrays, and those of "
            f"{env.name} are {excerpt(one, 100)}."
        )
    obs = space_struct(env.observation_space, (batch,))
    memory = jax.eval_shape(lambda obs: jax.vmap(learner.actor(state).start)(obs), obs)
    leaves, tree = jax.tree.flatten(memory)

    def act(obs: Tree, begins: Array, greedy: Array, seed: Array, memory: list[Array]) -> tuple[Array, Tree]:
        arguments = state, jax.tree.unflatten(tree, memory), begins, obs, jax.random.key(seed)
        (best, after), (sampled, _) = (act_all(learner, env, *arguments, greedy=mode) for mode in (True, False))
        return jnp.where(greedy, best, sampled), jax.tree.leaves(after)

    begins, greedy, seed = (
        jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((batch,), bool), ((), bool), ((), jnp.int32))
    )
    exported = jax.export.export(jax.jit(act), platforms=PLATFORMS)(obs, begins, greedy, seed, leaves)
    return bytes(exported.serialize())


def _is_plain(structure: Any) -> bool:
    """Whether a structure is made of dictionaries, tuples and lists alone."""
    node = structure.node_data()
    return node is None or (node[0] in (dict, tuple, list) and all(map(_is_plain, structure.children())))
