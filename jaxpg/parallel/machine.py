"""Which machine a program is for, and all that a program does for the machine's sake.

What is learned does not depend on it. Every choice is a field of `Machine` and says what it replaces, what it gains,
and where that was measured; the code that obeys it asks `machine()` while it is traced. CPU figures are times, and so
are those where an H200 is named ("an H200" in the log, which says what else differed then). Others of accelerators are
counts of programs that were compiled and not run (benchmarks/aot.py): the kernels that a GPU is given and the times
that the host must launch something, and the cycles that the compiler for TPUs estimates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import jax


class Machine(NamedTuple):
    """The choices for a kind of machine; `benchmarks/LOG.md` has the measurements under the titles in quotes.

    Counts are of one update of PPO on CartPole with 64 environments, compiled for an H100 or a TPU v5e ("compiled for
    machines not here").

    seeds_at_once: seeds by `vmap`, otherwise by `lax.map`, one after the other. A core gains nothing from runs side by
        side, and XLA's fast matrix and convolution kernels for CPUs take one set of weights (2026-11-20: grouped
        convolutions are 10 to 25 % slower).
    resets_where_any: a `lax.cond` around resets and stored observations, so that a step at which no episode ends pays
        for neither: PPO is 1.03 to 1.15 times as fast on a CPU ("four environments again"). An accelerator pays more
        for the decision than it saves: 0.64 of the speed with 64 environments on an H200.
    packs_outputs: what a step or a minibatch leaves behind is stored as one vector (`vectorize.RowStorage`). On a GPU
        each array is a copy of its own that breaks up the graph which the host launches: GAE's loop, the single seed
        and this together are 181 launches instead of 1,717; a token of `sort` was 50 kernels in one launch instead
        of 57 in 8. On an H200 it is worth 4 %. On a TPU the vector costs a dozen operations a step.
    recursion_unroll: steps of a recursion over time, GAE's or a GRU's, that one round of its loop takes. On a GPU 16
        launches of GAE instead of 384, of one kernel each, and 1.16 times the speed on an H200; with a GRU of 64 an
        update takes 14 instead of 28 thousand kernels and 330 instead of 13,126 launches, and two thirds of the cycles
        on a TPU ("a GRU by one product a step").
    many_columns: from this many columns on a GRU reads its inputs step by step, and has the gradient of a plain loop:
        the layer of 128 takes 277 instead of 335 ms for 256 columns of 128 steps, since a step's numbers stay in a
        CPU's cache; below, and on accelerators, all inputs are read before ("a GRU by one product a step").
    round_equations: a loop over steps of environments takes 16 of them a round (`vectorize.ROUND`) where a step has at
        most this many equations; 0 for one a round, always. The compiler for TPUs has less to copy between steps: an
        update takes 4.6 instead of 5.7 M cycles with 64 environments, 13.4 instead of 14.6 M with 2,048, 25.4 instead
        of 30.7 M on Breakout. A larger step gains nothing: LunarLander's compiles for 71 instead of 13 seconds with 8
        a round ("sixteen steps a round"). A GPU is given 1,669 instead of 1,911 kernels of an update in 45 instead of
        165 launches, and compiling takes 20 instead of 7 seconds of two cores.
    steps_per_question: an episodic rollout asks after this many steps whether all its episodes are over. A CPU asks at
        every step. Elsewhere the host must have the answer before it can launch the next step.
    steps_drawn: steps of an episodic rollout whose random numbers are drawn at a time. A CPU draws none for steps that
        no episode reaches: see `slots_at_once`. An accelerator draws those of all steps up to the time limit by a few
        kernels.
    steps_of_room: a memory that grows with the steps, a KV cache, has room for all of an episode's from the first on
        where they are fewer than two times this many; otherwise it grows in up to four equal parts, of at least this
        many. A token attends to what there is room for. Writing takes 0.69 of the time on a CPU with 512 tokens and
        1 M weights, 0.93 with 48 and 10 M, and compiles one or two seconds longer per part ("a cache that grows"). On
        accelerators 512 is an estimate by bytes: with 1.5 B weights and 16 texts, 28 kB a slot, 256 tokens would gain
        1.5 %, and the compiler for TPUs takes a sixth longer for two parts.
    gathers_words: one gather for all arrays of a minibatch that have a word per step, stacked before. XLA on a CPU
        wakes another thread where more than eight calls are ready: PPO on 4 environments takes 3.0 instead of 4.3 CPU
        seconds per million steps, together with other such things ("four environments, without waking a thread"). A
        TPU keeps one such word in a row of 128: at 2,048 environments it multiplies the cost of a minibatch.
    prepares_minibatches: the advantages of all minibatches of an update are normalised before the first of them: 15
        operations of each of 16 minibatches less on a TPU. Devices that share a minibatch always do, for then they
        exchange the sums of all minibatches at once.
    chunk_rows: the gradient of a minibatch is summed over chunks of at most this many rows, None for the minibatch as a
        whole. 512 rows fit a CPU's cache and are 1.08 to 1.11 times as fast as 256; 128 and 1,024 are slower ("large
        observations and the minibatch"). An accelerator wants as much work per call as there is.
    chunk_padded: the same of steps that train, where episodes are padded: as many chunks as hold any are worked
        through (update/padding.py).
    slots_at_once: slots of a padded batch that are numbered, and put into random orders, at a time: only pieces that
        hold steps are worked through. On a CPU an iteration of GRPO on CartPole with 700 steps in 16,000 slots takes
        3.6 instead of 5.6 ms, `steps_drawn` included, and with a time limit of 10,000 in place of 500 12 instead of
        66 ("slots in pieces"). On an accelerator all slots are one piece: the host need not know how many there are.
    chunk_texts: the same of whole completions. 32 are as fast as any on a CPU and need the least memory ("the first
        language loops"); on an H100 they made 1,471 kernels of an update of GRPO on `sort` that is 547 without.
    chunk_tokens: the same of rows of texts that are packed side by side, in tokens, prompts included unless completions
        share them (update/packing.py), and of the prompts that they share.
    rows_evaluated: observations of a rollout whose values are computed at a time, in whole steps of all columns
        (`rollout.rollout_values`). 8,192 with layers of 64 fit a CPU's cache: PPO with 2,048 environments takes 0.9 to
        0.98 of the time, with 16,384 0.9 and half of the memory, of Breakout with convolutions 0.7 and a third. On
        accelerators this bounds the memory: with 65,536 environments an update holds 3.4 instead of 5.2 GB on an H100
        ("values a few steps at a time").
    sums_rows_by_product: a row's sum as a product with a column of ones, and its derivative likewise. XLA adds up the
        entries of a row one by one on a CPU: the gradient of two normalised layers of 64 takes 280 instead of 586 us
        for 128 rows ("layer normalisation").
    sums_at_once: sums over the same steps are one reduction of their stack, four kernels of a minibatch fewer on a
        GPU, 1 % on an H200; on a TPU the stack costs six operations more ("few categories").
    params_as_one: the parameters of a small network are carried from minibatch to minibatch as one vector
        (`batching.pack_parameters`) where a minibatch of all seeds has up to this many rows: of 49 kernels 4 fewer on a
        GPU, of 109 operations 5 on a TPU. With many rows a GPU had better be given arrays: a bias that is a piece of a
        vector is no part of the kernel that multiplies, but read and written in one of its own, and with 65,536
        environments an update takes 106 instead of 90 ms on an H200 ("bytes of many rows on an H200").
    vectors_as_one: otherwise its scalars and vectors are one vector, and on a GPU nothing is.
    many_rows: a dense layer over this many rows is written in two other forms. A product with a matrix of one column,
        such as a critic's head, is one with two, the second of zeros: the compiler for TPUs makes sums of the former,
        and of its derivative, that go around the matrix unit, and an update takes 14.6 instead of 16.5 M cycles with
        2,048 environments ("a critic's one column"). And the bias of the first row is a term of its own, so that its
        derivative is two sums: one of them keeps the gradient of the rows in float32, which the compiler otherwise
        rounds to bfloat16 beforehand, at four times the cost of the product that makes it: 12.0 instead of 13.4 M
        cycles, of Breakout 0.97 and, with convolutions, 0.98 of them ("a bias in two terms"). A v6e takes 1.01,
        1.01 and 1.08 by both forms together. With 64 environments an update would take 1.03 and 1.06 of the cycles.
    rows_of_steps: the steps of a minibatch are this many rows where several runs are side by side (batching.in_rows).
        The compiler for TPUs puts one row of each run into a tile that holds eight: with 64 agents of 64 environments
        an update takes 24.4 instead of 27.3 M cycles, and with parameters as arrays 23.1; rejax's 28.4 ("64 agents on
        a TPU"). With one run nothing is gained: 12.7 instead of 12.0 M cycles with 2,048 environments.
    few_final_obs: up to this many slots for the final observations of a column (`rollout/segments.py`) are rewritten
        whole, which replaces a scatter at every step of the environments, whose cycles the compiler for TPUs does not
        know: 17 instead of 19 operations a step with 2,048 environments, 81 instead of 96 of Breakout, for 1.00 and
        1.04 of the cycles that it knows, and 1.05 with 64 environments ("final observations without a scatter"). As
        many kernels on a GPU.
    few_categories: up to this many categories, a softmax, a sample and what is made of them are computed category by
        category (models/few_categories.py). A step of the environments takes 10 instead of 13 kernels on an H100, and
        27 instead of 33 operations on a TPU, an update 2,271 instead of 2,671 kernels and 5.9 instead of 7.1 M cycles
        ("few categories"). On an H200 it is worth 4 % with 2,048 environments, nothing with 64. A CPU gains nothing by
        it and compiles 4 to 8 % longer.
    few_outputs: of a layer of up to this many, the derivative by its inputs is a sum of multiples in place of a product
        (layers._dot_of_few), which XLA joins with what reads it: a product of two million rows with two columns writes
        half a gigabyte. On an H200 an update takes 0.95 of the time with 65,536 environments, 0.98 with 2,048 ("bytes
        of many rows on an H200").
    few_slots: a KV cache and a text of at most this many tokens are rewritten whole for each new one, which replaces a
        scatter: that is a kernel of its own, where a `where` joins what computes the key and the value. A token of
        `sort` takes 46 instead of 50 kernels on an H100 ("a token in fewer kernels"). The limit is an estimate: 256
        caches of 64 tokens, 2 heads of 32, are written in the time of two launches.
    torsos_at_once: up to this many rows, of all seeds, those of policy and critic by `vmap`, one product for a layer of
        both (networks._features_of_each). A minibatch of PPO takes 34 instead of 45 kernels on an H100, and PPO is 1.08
        times as fast on an H200 with 2,048 rows, 1.01 with 32,768 (Breakout), 0.95 with 65,536, 0.86 with 131,072
        (64 seeds): XLA then reads and writes the gradients of both more often ("bytes of many rows on an H200"). On a
        TPU it takes 1.05 times the cycles with 64 environments and 1.26 with 2,048 ("policy and critic together"); a
        CPU's fast products take one set of weights.
    queries_at_once: of a text, whose scores are in memory at the same time (decoder.attention). The gradient of two
        layers by 2,048 tokens takes 122 instead of 911 MB on a CPU and 0.38 of the time, by 128 tokens 1.00, since the
        scores of a block stay in its cache ("attention in blocks"). On accelerators this bounds the memory of texts of
        more than a few hundred tokens; shorter ones are one block.
    loops_over_blocks: `remat` makes the blocks of a transformer a loop over their stacked parameters. XLA on a CPU
        takes recomputed blocks for what it has computed already: at 10 M weights an update needs 168 instead of 527 MB
        beside its state by the loop ("texts side by side"). Accelerators recompute them without one, which needs no
        second copy of the weights: in the shape of a model of 0.5 B, 8 texts of 512 tokens, an H100 holds 3.3 instead
        of 5.7 GiB and a v5e 2.4 instead of 5.6, for twice the compile time on a TPU ("`remat` without a loop").
    recomputes: the compiler writes the operations of a value into every kernel that uses it, and
        `vectorize.compute_once` keeps it from that. One pass of LunarLander's solver over the poses was 6,900
        operations for the 500 that it has: its step takes 0.36 of the time with Gymnasium's passes, 0.42 with those of
        training, and compiles in 0.51 ("a value is computed once").
    calls_in_place: a callback reads and writes the buffers of the program. On a CPU, where that is possible, 6 to 9 us
        instead of 140 to 190 a call ("an environment on the host").
    """

    seeds_at_once: bool
    resets_where_any: bool
    packs_outputs: bool
    recursion_unroll: int
    many_columns: float
    round_equations: int
    steps_per_question: int
    steps_drawn: int | float
    steps_of_room: int
    gathers_words: bool
    prepares_minibatches: bool
    chunk_rows: int | None
    chunk_padded: int
    slots_at_once: int | float
    chunk_texts: int | None
    chunk_tokens: int
    rows_evaluated: int
    sums_rows_by_product: bool
    sums_at_once: bool
    params_as_one: int | float
    vectors_as_one: bool
    many_rows: int | float
    rows_of_steps: int
    few_final_obs: int
    few_categories: int
    few_outputs: int
    few_slots: int
    torsos_at_once: int
    queries_at_once: int
    loops_over_blocks: bool
    recomputes: bool
    calls_in_place: bool


CPU = Machine(
    seeds_at_once=False,
    resets_where_any=True,
    packs_outputs=False,
    recursion_unroll=1,
    many_columns=64,
    round_equations=0,
    steps_per_question=1,
    steps_drawn=64,
    steps_of_room=24,
    gathers_words=True,
    prepares_minibatches=False,
    chunk_rows=512,
    chunk_padded=256,
    slots_at_once=1_024,
    chunk_texts=32,
    chunk_tokens=1_024,
    rows_evaluated=8_192,
    sums_rows_by_product=True,
    sums_at_once=False,
    params_as_one=0,
    vectors_as_one=True,
    many_rows=math.inf,
    rows_of_steps=1,
    few_final_obs=0,
    few_categories=0,
    few_outputs=0,
    few_slots=0,
    torsos_at_once=0,
    queries_at_once=64,
    loops_over_blocks=True,
    recomputes=True,
    calls_in_place=True,
)
GPU = Machine(
    seeds_at_once=True,
    resets_where_any=False,
    packs_outputs=True,
    recursion_unroll=32,
    many_columns=math.inf,
    round_equations=1_000,
    steps_per_question=16,
    steps_drawn=math.inf,
    steps_of_room=512,
    gathers_words=False,
    prepares_minibatches=True,
    chunk_rows=None,
    chunk_padded=16_384,
    slots_at_once=math.inf,
    chunk_texts=None,
    chunk_tokens=16_384,
    rows_evaluated=524_288,
    sums_rows_by_product=False,
    sums_at_once=True,
    params_as_one=32_768,
    vectors_as_one=False,
    many_rows=math.inf,
    rows_of_steps=1,
    few_final_obs=0,
    few_categories=8,
    few_outputs=4,
    few_slots=64,
    torsos_at_once=32_768,
    queries_at_once=512,
    loops_over_blocks=False,
    recomputes=False,
    calls_in_place=False,
)
TPU = GPU._replace(
    packs_outputs=False,
    sums_at_once=False,
    params_as_one=65_536,
    vectors_as_one=True,
    many_rows=32_768,
    rows_of_steps=16,
    few_final_obs=4,
    few_outputs=0,
    few_slots=0,
    torsos_at_once=0,
)
MACHINES = {"cpu": CPU, "gpu": GPU, "tpu": TPU}

_platform: ContextVar[str | None] = ContextVar("platform", default=None)
_runs: ContextVar[int] = ContextVar("runs", default=1)


@contextmanager
def program_for(platform: str) -> Iterator[None]:
    """What is traced inside is for this platform, one of MACHINES, whatever the machine at hand is.

    `mesh.spread` enters it with the platform of its mesh. jax keeps what it has traced: to compile the
    same function for two platforms in one process, call `jax.clear_caches()` in between, or make a new function.
    """
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)


def platform() -> str:
    """The platform that the program being traced is for: that of `program_for`, else jax's default."""
    return _platform.get() or jax.default_backend()


def machine() -> Machine:
    """The machine that the program being traced is for; an unknown platform is taken for a GPU."""
    return MACHINES.get(platform(), GPU)


@contextmanager
def side_by_side(runs: int) -> Iterator[None]:
    """What is traced inside is one of this many runs that are `vmap`ped; `mesh.map_seeds` enters it."""
    token = _runs.set(_runs.get() * runs)
    try:
        yield
    finally:
        _runs.reset(token)


def rows_of_all(rows: int) -> int:
    """The rows of all runs side by side, of which each has `rows`: what a kernel of the program works through."""
    return rows * _runs.get()


def compiler_options(*, runs_once: bool = False) -> dict[str, int | bool]:
    """XLA's options for a program, to save compile time on CPUs; none on other platforms.

    What the command line and `fit` compile has them. A `jax.jit` of one's own is given them,
    `jax.jit(train, compiler_options=jaxpg.compiler_options())`: jax takes them for whole programs alone.

    Measured in benchmarks/LOG.md (2026-11-20, compile time of PPO; 2026-11-21, the suite). They replace XLA's default,
    LLVM's optimisation level 3. Level 1 compiles in a fifth less time to equally fast programs. Level 0 compiles
    fastest, to slow programs that run once. jax 0.10 can also compile without fused kernels.
    """
    if platform() != "cpu":
        return {}
    if not runs_once:
        return {"xla_backend_optimization_level": 1}
    without_fusion = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
    return {"xla_backend_optimization_level": 0, **without_fusion}
