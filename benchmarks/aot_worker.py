"""Compile one program for a machine that is not here, and print what it consists of: one line of JSON.

    python aot_worker.py TARGET LIBRARY CASE

`compile_elsewhere` starts it, jaxpg's programs in its own Python and the peers' in theirs. Nothing runs on the target.
"""

from __future__ import annotations

import glob
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from aot_counts import Loop, from_hlo, from_thunks
from jax.experimental import topologies
from versions import versions
from work import A2C, PPO

GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  runtime_version: "12.9.0" driver_version: "12.9.0" {}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{}"
"""


class Target(NamedTuple):
    """A machine to compile for.

    platform: of jax.
    described: a number of chips -> how they are described to XLA.
    bytes: of memory, of a chip.
    """

    platform: str
    described: Callable[[int], dict[str, str]]
    bytes: int


def tpu(name: str, gigabytes: int) -> Target:
    """The smallest slice of TPUs that has so many chips."""
    slices = {4: "2x2", 8: "2x4", 16: "4x4", 64: "8x8", 256: "16x16"}

    def described(chips: int) -> dict[str, str]:
        return {"topology_name": f"{name}:{slices[min(n for n in slices if n >= chips)]}"}

    return Target("tpu", described, gigabytes * 2**30)


def gpu(name: str, details: str) -> Target:
    """A GPU by its name and by what sets it apart, with a driver and a toolkit of CUDA 12.9; eight to a host."""
    description = {"topology_name": name, "target_config": GPU.format(details, name)}

    def described(chips: int) -> dict[str, str]:
        return description | {"topology": f"1x{-(-chips // 8)}x{min(chips, 8)}"}

    size = re.search(r"device_memory_size: (\d+)", details)
    assert size is not None
    return Target("cuda", described, int(size[1]))


TARGETS = {
    "tpu v5e": tpu("v5e", 16),
    "tpu v6e": tpu("v6e", 32),
    "cuda H100": gpu(
        "NVIDIA H100 80GB HBM3",
        "cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 "
        "l2_cache_size: 52428800 memory_bandwidth: 3352320000000 device_memory_size: 84978434048 "
        "shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448",
    ),
    "cuda V100": gpu(
        "Tesla V100-SXM2-16GB",
        "cuda_compute_capability { major: 7 } core_count: 80 fpus_per_core: 64 clock_rate_ghz: 1.53 "
        "l2_cache_size: 6291456 memory_bandwidth: 898048000000 device_memory_size: 16935682048 "
        "shared_memory_per_core: 98304 shared_memory_per_block_optin: 98304",
    ),
}
"""From the makers' data sheets, as `deviceQuery` prints them."""

ENVIRONMENT = {  # libtpu must not ask for a machine that is not there
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "XLA_FLAGS": "",
}
PACKAGES = {
    "tpu": {"libtpu": "libtpu"},
    "cuda": {
        "jax-cuda12-pjrt": "jax_plugins.xla_cuda12",
        "jax-cuda12-plugin": "jax_cuda12_plugin",
        "nvidia-cuda-nvcc-cu12": "nvidia.cuda_nvcc",
    },
}


COMPILING = ("jax", "jaxlib", "rejax", "gymnax", "flax", "optax", *PACKAGES["tpu"], *PACKAGES["cuda"])
"""The packages on which a count may depend."""


def missing(target: str) -> list[str]:
    """The packages that compiling for a target needs and this Python has not."""

    def found(module: str) -> bool:
        try:
            return util.find_spec(module) is not None
        except ModuleNotFoundError:
            return False

    return [package for package, module in PACKAGES[TARGETS[target].platform].items() if not found(module)]


class Case(NamedTuple):
    """A program to compile.

    algorithm: "ppo", "a2c" or a TASK/ALGORITHM of the configs.
    network: "mlp", "cnn" or "gru", or a model of LARGE or language.SIZES that completes prompts; a config has its own.
    tokens: of a text; the rounds of the loop that writes them.
    sharded: the chips share the parameters too.
    agents: seeds side by side.
    remat: a LARGE model recomputes its blocks.
    """

    algorithm: str
    environment: str = ""
    num_envs: int = 0
    network: str = "mlp"
    chips: int = 1
    tokens: int = 0
    sharded: bool = False
    agents: int = 1
    remat: bool = True


UPDATES = 7  # of a peer's program, whose loop over updates is known by that
ROUND = 16  # jaxpg.vectorize.ROUND, which a peer's environment lacks
CASES = {
    "PPO, CartPole, 64": Case("ppo", "CartPole-v1", 64),
    "PPO, CartPole, 2,048": Case("ppo", "CartPole-v1", 2048),
    "PPO, CartPole, 65,536": Case("ppo", "CartPole-v1", 65_536),
    "PPO, CartPole, 64, 64 agents": Case("ppo", "CartPole-v1", 64, agents=64),
    "A2C, CartPole, 64": Case("a2c", "CartPole-v1", 64),
    "PPO, Breakout, 1,024, MLP": Case("ppo", "Breakout-MinAtar", 1024),
    "PPO, Breakout, 1,024, CNN": Case("ppo", "Breakout-MinAtar", 1024, network="cnn"),
    "PPO, CartPole, 64, GRU": Case("ppo", "CartPole-v1", 64, network="gru"),
    "GRPO, sort": Case("sort/grpo", tokens=5),
    "PPO, CartPole, 64, 8 chips": Case("ppo", "CartPole-v1", 64, chips=8),
}
LARGE = ("0.5B", "1.5B", "8B")  # of language.LARGE
QUESTION = 16  # tokens between two questions whether all completions have ended (Machine.steps_per_question)
CHIPS = {
    **{f"PPO, CartPole, 2,048 each, {n} chips": Case("ppo", "CartPole-v1", 2048 * n, chips=n) for n in (4, 8, 64, 256)},
    **{
        f"GRPO, 10M weights, 64 completions each, {n} chips": Case("grpo", "", 64 * n, "10M", n, QUESTION)
        for n in (4, 8, 64, 256)
    },
    **{
        f"GRPO, {name} weights, shared by {n} chips": Case("grpo", "", 16 * n, name, n, QUESTION, sharded=True)
        for name in ("1.5B", "8B")
        for n in (8, 16)
    },
    **{
        f"GRPO, 0.5B weights, 8 completions{how}, 1 chip": Case("grpo", "", 8, "0.5B", 1, QUESTION, remat=remat)
        for how, remat in ((", blocks not recomputed", False), ("", True))
    },
}
"""What multichip.py compiles."""
PEER_CASES = {
    "PPO, CartPole, 64": ("rejax", "purejaxrl"),
    "PPO, CartPole, 2,048": ("rejax", "purejaxrl"),
    "PPO, CartPole, 65,536": ("rejax", "purejaxrl"),
    "PPO, CartPole, 64, 64 agents": ("rejax", "purejaxrl"),
    "PPO, Breakout, 1,024, MLP": ("rejax", "purejaxrl"),
    "PPO, CartPole, 64, GRU": ("purejaxrl",),
}
"""What peers are compiled for, and which of them can do it."""


def learner_of(case: Case) -> tuple[Any, int]:
    """jaxpg's learner of a case, and the environments of a run."""
    if "/" in case.algorithm:
        from jaxpg.experiments import config
        from jaxpg.experiments.build import build

        found = config.resolve_config(*case.algorithm.split("/"), {"initial": None})
        return build(found).learner, found.settings["num_envs"]
    if case.algorithm == "grpo":
        return writer_of(case), case.num_envs
    import workloads

    from jaxpg import envs, networks, policy_gradient

    env = envs.make(case.environment)
    algorithm = {"ppo": workloads.ppo, "a2c": workloads.a2c}[case.algorithm](case.num_envs)
    make_network = {
        "mlp": partial(networks.mlp, hidden=PPO.hidden, activation="tanh"),
        "cnn": networks.cnn,
        "gru": workloads.gru,
    }[case.network]
    return policy_gradient.policy_gradient(env, *make_network(env), algorithm), case.num_envs


def writer_of(case: Case) -> Any:
    """GRPO of a language model: completions of 48 tokens, of a LARGE one 256 after prompts of as many, in bfloat16."""
    import language

    if case.network not in LARGE:
        env = language.endless()
        return language.learner_of(*language.transformer_of(env, case.network), env, case.num_envs)
    return language.large_learner(case.network, case.num_envs, remat=case.remat)


def lower_jaxpg(case: Case, devices: list[Any]) -> Any:
    """The program with which `jaxpg train` trains the agents of a case, each on all of these devices."""
    from jaxpg import parallel
    from jaxpg.training import advance

    learner, num_envs = learner_of(case)
    mesh = parallel.make_mesh(1, num_envs, devices, sharded=case.sharded)
    keys, state = advance.abstract_keys(case.agents), advance.abstract_state(learner, case.agents)
    specs = (parallel.PER_SEED, parallel.state_specs(state, mesh))
    arguments = parallel.abstract_arrays((keys, state), specs, mesh)
    return advance.compile_programs(learner, None, state, mesh).advance.lower(*arguments, np.int32(1))


def lower_peer(library: str) -> Callable[[Case, list[Any]], Any]:
    """UPDATES updates by a peer's own loop, on one device."""

    def lower(case: Case, devices: list[Any]) -> Any:
        import peers

        steps = UPDATES * PPO.num_steps * case.num_envs * case.agents
        make = getattr(peers, f"{library}_recurrent" if case.network == "gru" else library)
        workload = make(case.environment, case.num_envs, case.agents, 1, steps)
        sharding = jax.sharding.SingleDeviceSharding(devices[0])
        state = jax.eval_shape(workload.init, jax.eval_shape(lambda: jax.random.key(0)))
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)
        return jax.jit(workload.run, donate_argnums=0).lower(state)

    return lower


LIBRARIES = {"jaxpg": lower_jaxpg, "rejax": lower_peer("rejax"), "purejaxrl": lower_peer("purejaxrl")}


def compiled_for(target: str, lowered: Any) -> tuple[Any, Loop, Loop]:
    """The program, its loops by its HLO, and on CUDA its loops by its thunks."""
    if TARGETS[target].platform == "tpu":
        program = lowered.compile()
        return program, from_hlo(program.as_text()), from_hlo(program.as_text())
    import nvidia.cuda_nvcc

    with tempfile.TemporaryDirectory() as dump:
        program = lowered.compile(
            {
                "xla_dump_to": dump,
                "xla_gpu_enable_triton_gemm": False,  # its kernels are chosen by running them
                "xla_gpu_cuda_data_dir": nvidia.cuda_nvcc.__path__[0],
            }
        )
        hlo = program.as_text()

        def dumped(ending: str) -> str:
            (path,) = glob.glob(f"{dump}/*.{ending}.txt")
            return Path(path).read_text()

        graphs = glob.glob(f"{dump}/*.thunk_sequence_after_thunk_passes.txt")
        sequence = dumped("thunk_sequence_after_thunk_passes" if graphs else "thunk_sequence")
        return program, from_hlo(hlo), from_thunks(sequence, dumped("thunk_metadata"), hlo)


def count(target: str, library: str, case: Case) -> dict[str, Any]:
    """What a program consists of, by environment step, by minibatch and by update."""
    described = TARGETS[target]
    topology = topologies.get_topology_desc(platform=described.platform, **described.described(case.chips))
    lowered = LIBRARIES[library](case, list(topology.devices)[: case.chips])
    began, before = time.process_time(), time.monotonic()
    program, hlo, thunks = compiled_for(target, lowered)
    seconds = {"cpu": time.process_time() - began, "wall": time.monotonic() - before}
    unit = "operations" if described.platform == "tpu" else "kernels"
    update = {"hlo": updates_of(hlo, "operations"), "thunks": updates_of(thunks, unit)}
    whole = update["hlo"].round() | update["thunks"].round()  # loops of unknown length, such as shuffling's: one round
    settings = A2C if case.algorithm == "a2c" else PPO
    step = _count_of_step(update["thunks"], case.tokens or settings.num_steps, unit)
    batches = (settings.epochs * settings.num_minibatches,) if library == "jaxpg" else (PPO.epochs, PPO.num_minibatches)
    minibatch = update["thunks"].find(batches, unit) if case.algorithm == "ppo" else None
    exchanging = update["hlo"].find(batches, "operations") if case.algorithm == "ppo" else None
    token = update["hlo"].find((case.tokens,), "operations") if case.tokens else None
    memory = program.memory_analysis()
    return {
        "unit": unit,
        "step": step,
        "minibatch": minibatch.round()[unit] if minibatch else None,
        "update": dict(whole),
        "once": dict(update["hlo"].round(0)),  # without loops of unknown length: over tokens, over chunks of texts
        "token_exchanges": token.round()["exchanges"] if token else None,
        "minibatch_exchanges": exchanging.round()["exchanges"] if exchanging else None,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "compile_s": seconds,
        "loops": loops_of(update["thunks"], unit),
        "versions": versions(COMPILING),
    }


def _count_of_step(update: Loop, num_steps: int, unit: str) -> float | None:
    """What a step consists of in the loop over so many steps or tokens; on a TPU a round may be sixteen of them."""
    if loop := update.find((num_steps,), unit):
        return loop.round()[unit]
    rounds = update.find((num_steps // ROUND,), unit)
    return round(rounds.round()[unit] / ROUND, 1) if rounds else None


def updates_of(program: Loop, key: str) -> Loop:
    """The loop over updates: the outermost of unknown length, or of UPDATES rounds, that does most."""
    candidates = [loop for loop in program.walk() if loop.trips in (None, UPDATES)]
    return max(candidates, key=lambda loop: loop.round()[key])


def loops_of(loop: Loop, unit: str) -> list[Any]:
    """The loops as [trips, count of a round without inner loops, inner loops]."""
    return [[x.trips, x.each[unit], loops_of(x, unit)] for x in loop.inner]


def compile_elsewhere(target: str, library: str, case: str, *, python: str, path: str) -> dict[str, Any]:
    """`count` in a process of its own, with another Python and PYTHONPATH; "failed": the end of its error."""
    command = [python, "-W", "ignore", str(Path(__file__).resolve()), target, library, case]
    around = os.environ | ENVIRONMENT | {"PYTHONPATH": path}
    done = subprocess.run(command, env=around, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout)
    too_large = re.search(r"Ran out of memory (in memory space hbm. Used \S+ of \S+ hbm|on HBM, .+)", done.stderr)
    return {"failed": too_large[0] if too_large else done.stderr.strip()[-500:]}


if __name__ == "__main__":
    print(json.dumps(count(sys.argv[1], sys.argv[2], (CASES | CHIPS)[sys.argv[3]])))
