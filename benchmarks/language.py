"""How fast a language model writes and learns, beside what the machine allows; and what a learner needs of memory.

    python benchmarks/language.py [--sizes 0.1M 1M 10M] [--columns 64] [--rounds 9]
    python benchmarks/language.py --peers --trl-python TRL/bin/python --tunix-python TUNIX/bin/python

Writing: tokens per second of decoding with the KV cache, all columns to the full length. Its bound per token is the
slower of two: weights and cache through memory, or two FLOPs per weight. Learning: tokens per second of one update by
GRPO's loss, bound by six FLOPs per weight. Memory bandwidth (of a copy or of a matrix times a vector, whichever is
more) and matmul rate are measured in the same process. The whole step: one compiled program, beside the same work
driven from the host by separately compiled parts, a call per token; they take turns. Ending: a while loop that ends
with the longest completion beside a scan over the whole budget, where completions need all of it, and where none needs
more than a quarter. Lengths: the whole step where completions are of any length up to the budget, each alike, with
texts side by side in rows and with one text per row (update/packing.py). Memory: what XLA's own analysis says of one
step of GRPO, without and with a reference policy and with `remat`, and of PPO with a critic.

`--peers` measures one thing alone: the CPU seconds of a whole step of GRPO with a reward in Python, in turns with TRL's
trainer and Tunix's learner (language_turns.py). benchmarks/README.md says how their environments are made.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import language_turns
import numpy as np
from command_lines import out_file
from language_peers import Work
from result_files import put
from rich.console import Console
from rich.table import Table
from work import update_bytes

from jaxpg import ladder, language, rollout, vectorize
from jaxpg.algorithm import PolicyGradient, make_objective
from jaxpg.models import generation
from jaxpg.objectives.advantages import group_relative
from jaxpg.parallel import host_callback
from jaxpg.parallel.machine import machine
from jaxpg.policy_gradient import policy_gradient
from jaxpg.training.provenance import describe_machine
from jaxpg.types import Critic, Discrete, Env, Learner, Outcome, Policy, Prompt, TimeStep
from jaxpg.update.objective import Batch

HERE = Path(__file__).resolve().parent
PROMPT, TOKENS, VOCABULARY, GROUP = 16, 48, 64, 8
SIZES: dict[str, dict[str, int]] = {
    "0.01M": {"width": 24, "layers": 1, "heads": 2, "kv_heads": 1},
    "0.1M": {"width": 64, "layers": 2, "heads": 4, "kv_heads": 2},
    "1M": {"width": 160, "layers": 4, "heads": 8, "kv_heads": 4},
    "10M": {"width": 384, "layers": 7, "heads": 8, "kv_heads": 4},
    "100M": {"width": 896, "layers": 12, "heads": 14, "kv_heads": 2},
}

LARGE: dict[str, dict[str, Any]] = {
    "0.5B": {"width": 896, "layers": 24, "heads": 14, "kv_heads": 2, "expansion": 4864 / 896, "tied": True},
    "1.5B": {"width": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "expansion": 8960 / 1536, "tied": True},
    "8B": {"width": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "expansion": 3.5},
}
"""The shapes of Qwen2.5-0.5B and 1.5B and of Llama 3 8B (Qwen team 2024, table 1; Dubey et al. 2024, table 3)."""
VOCABULARIES = {"0.5B": 151_936, "1.5B": 151_936, "8B": 128_256}
LONG = 256  # tokens of a prompt, and of a completion, of a LARGE model


class Limits(NamedTuple):
    """What the machine gives: bytes per second that are read or written, and FLOPs per second of a matmul."""

    bandwidth: float
    flops: float

    def or_more(self, other: Limits) -> Limits:
        """What was reached at least once: a machine that others use too gives less at times."""
        return Limits(*map(max, self, other))


def endless(prompt: int = PROMPT, tokens: int = TOKENS, vocabulary: int = VOCABULARY) -> Env:
    """Prompts and completions of full length, paid for their even tokens: all of the work, none of the luck."""

    def reset(key: jax.Array) -> tuple[Any, jax.Array]:
        words = jax.random.randint(key, (prompt,), 2, vocabulary)
        state = Prompt(words, jnp.ones(prompt, bool)), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
        return state, words[-1]

    def step(key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        words, time_, even = state
        last = time_ + 1 >= tokens
        state = words, time_ + 1, even + (action % 2 == 0)
        return state, TimeStep(action.astype(jnp.int32), jnp.zeros(()), 1.0 - last, last)

    def outcome(state: Any) -> Outcome:
        return Outcome(state[2] / tokens, {})

    space = Discrete(vocabulary)
    return Env("endless", reset, step, space, space, tokens, context=lambda state: state[0], outcome=outcome)


def of_any_length() -> Env:
    """`endless` with completions of 1 to TOKENS tokens, each length alike where tokens are: the first one says it."""
    whole = endless()

    def step(key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        inner, length = state
        inner, timestep = whole.step(key, inner, action)
        begins = inner[1] == 1
        length = jnp.where(begins, 1 + action * TOKENS // VOCABULARY, length)
        last = inner[1] >= length
        return (inner, length), timestep._replace(discount=1.0 - last, last=last)

    def reset(key: jax.Array) -> tuple[Any, jax.Array]:
        state, obs = whole.reset(key)
        return (state, jnp.zeros((), jnp.int32)), obs

    def outcome(state: Any) -> Outcome:
        return Outcome(state[0][2] / TOKENS, {})

    return whole._replace(reset=reset, step=step, context=lambda state: state[0][0], outcome=outcome)


def judged_on_host(env: Env, judge: Callable[[list[list[int]]], list[float]]) -> Env:
    """`endless` with a reward in Python: `judge` gets all completions of a rollout and gives a number for each."""

    def judge_batch(tokens: np.ndarray, length: np.ndarray) -> tuple[np.ndarray]:
        rewards = judge(tokens.reshape(-1, TOKENS).tolist())
        return (np.asarray(rewards, np.float32).reshape(length.shape),)

    def reset(key: jax.Array) -> tuple[Any, jax.Array]:
        state, obs = env.reset(key)
        return (state, jnp.zeros(TOKENS, jnp.int32)), obs

    def step(key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        inner, tokens = state
        following, timestep = env.step(key, inner, action)
        return (following, tokens.at[inner[1]].set(action.astype(jnp.int32))), timestep

    def outcome(state: Any) -> Outcome:
        number = jax.ShapeDtypeStruct((), jnp.float32)
        return Outcome(host_callback.call(judge_batch, (number,), state[1], state[0][1])[0], {})

    def context(state: Any) -> Prompt:
        return state[0][0]

    return env._replace(reset=reset, step=step, context=context, outcome=outcome)


def seconds(function: Callable[..., Any], *arguments: Any, rounds: int) -> float:
    """The median time of a call, after one that is not counted."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - begin)
    return median(times)


class Parts(NamedTuple):
    """A step of GRPO, cut up for a loop on the host: prefill, a token of every completion, verdicts, an update."""

    begin: Callable[..., Any]
    one_token: Callable[..., Any]
    judge: Callable[..., Batch]
    update: Callable[..., Any]


ONE_UPDATE = {"epochs": 1, "num_minibatches": 1, "gamma": 1.0}
ALGORITHMS: dict[str, Callable[..., PolicyGradient]] = {
    "grpo": partial(ladder.grpo, kl=None, group_size=GROUP),
    "grpo, reference": partial(ladder.grpo, group_size=GROUP),
    "ppo": partial(ladder.ppo, num_steps=None),
    "rlhf": ladder.rlhf,
}


def measured_limits(rounds: int) -> Limits:
    """Of this machine, now."""
    accelerator = jax.default_backend() != "cpu"
    many, side = (2**28, 8192) if accelerator else (2**25, 1024)
    x, a = jnp.ones(many, jnp.float32), jnp.ones((side, side), jnp.float32)
    copy = seconds(jax.jit(lambda x: x + 1), x, rounds=rounds)
    read = seconds(jax.jit(lambda x: x.reshape(-1, 1024) @ x[:1024]), x, rounds=rounds)
    matmul = seconds(jax.jit(lambda a: a @ a), a, rounds=rounds)
    return Limits(max(2 * x.nbytes / copy, x.nbytes / read), 2 * side**3 / matmul)


def bounds(limits: Limits, size: str, weights: int, columns: int) -> tuple[float, float]:
    """Tokens per second at most, written and learned from: weights and cache through memory, FLOPs per weight."""
    shape = SIZES[size]
    cache = 2 * shape["layers"] * (PROMPT + TOKENS) * shape["kv_heads"] * (shape["width"] // shape["heads"]) * 4
    per_token_bytes = 4 * weights / columns + cache
    write = 1 / max(per_token_bytes / limits.bandwidth, 2 * weights / limits.flops)
    return write, limits.flops / (6 * weights)


def transformer_of(env: Env, size: str, **settings: Any) -> tuple[Policy, Critic]:
    """The model of a size, and a critic of the same make."""
    return language.transformer(env, **SIZES[size], **settings)


def learner_of(
    policy: Policy, critic: Critic, env: Env, columns: int, algorithm: str = "grpo", **settings: Any
) -> Learner:
    """One update per batch, so that a step is one rollout and one gradient."""
    return policy_gradient(env, policy, critic, ALGORITHMS[algorithm](num_envs=columns, **ONE_UPDATE | settings))


def large_learner(name: str, columns: int, **settings: Any) -> Learner:
    """GRPO of a LARGE model in bfloat16, which completes prompts of LONG tokens by as many."""
    env = endless(prompt=LONG, tokens=LONG, vocabulary=VOCABULARIES[name])
    model = language.transformer(env, **LARGE[name], **{"dtype": "bfloat16", "logit_chunks": 4} | settings)
    return learner_of(*model, env, columns)


def parts_of(env: Env, policy: Policy, columns: int) -> Parts:
    """The step of GRPO as separately compiled parts."""
    algorithm = ALGORITHMS["grpo"](num_envs=columns, **ONE_UPDATE)
    objective, optimizer = make_objective(policy, None, algorithm), algorithm.optimizer()

    @jax.jit
    def begin(params: Any, key: jax.Array) -> Any:
        states, obs = jax.vmap(env.reset)(rollout.env_keys(key, columns, GROUP))
        assert env.context is not None
        prompts = jax.vmap(env.context)(states)
        return states, obs, jax.vmap(partial(policy.start, params))(prompts), prompts

    @partial(jax.jit, donate_argnums=(1, 3))
    def one_token(params: Any, states: Any, obs: jax.Array, cache: Any, key: jax.Array) -> Any:
        def column(state: Any, obs: jax.Array, cache: Any, key: jax.Array) -> Any:
            distribution, cache = policy.act(params, cache, obs)
            action = distribution.sample(key)
            state, timestep = env.step(key, state, action)
            return state, timestep.obs, cache, action, distribution.log_prob(action)

        return jax.vmap(column)(states, obs, cache, jax.random.split(key, columns))

    @jax.jit
    def judge(states: Any, prompts: Prompt, actions: list[jax.Array], log_probs: list[jax.Array]) -> Batch:
        assert env.outcome is not None
        part = generation.completion_rollout(prompts, jnp.stack(actions, 1), end=-1)
        reward = part.steps.reward.at[-1].set(jax.vmap(env.outcome)(states).reward)
        steps = part.steps._replace(reward=reward, log_prob=jnp.stack(log_probs))
        zeros = jnp.zeros_like(reward)
        credit = group_relative(steps, zeros, zeros, jnp.zeros(()), gamma=1.0, group_size=GROUP)
        weight = algorithm.loss_weights(part.loss_mask)
        return Batch(part._replace(steps=steps), credit.advantage, credit.target, zeros, weight, (), ())

    @jax.jit
    def update(params: Any, opt_state: Any, batch: Batch, key: jax.Array) -> Any:
        return algorithm.update(objective, optimizer, jnp.float32(1e-4), params, opt_state, batch, key)

    return Parts(begin, one_token, judge, update)


def batch_by_the_host(parts: Parts, params: Any, key: jax.Array) -> Batch:
    """Prefill, one call per token, verify."""
    states, obs, cache, prompts = parts.begin(params, key)
    actions, log_probs = [], []
    for t in range(TOKENS):
        states, obs, cache, action, log_prob = parts.one_token(params, states, obs, cache, jax.random.fold_in(key, t))
        actions.append(action)
        log_probs.append(log_prob)
    return parts.judge(states, prompts, actions, log_probs)


def decoding(policy: Policy, early: bool) -> Callable[..., jax.Array]:
    """(params, prompts, lengths, key) -> the last tokens, by a loop that ends with the longest or by a scan."""

    def decode(params: Any, prompts: Prompt, lengths: jax.Array, key: jax.Array) -> jax.Array:
        def step(carry: Any, t: jax.Array) -> tuple[Any, None]:
            cache, token = carry
            distribution, cache = jax.vmap(partial(policy.act, params))(cache, token)
            return (cache, distribution.sample(jax.random.fold_in(key, t))), None

        start = jax.vmap(partial(policy.start, params))(prompts), prompts.tokens[:, -1]
        if not early:
            return jax.lax.scan(step, start, jnp.arange(TOKENS))[0][1]
        return jax.lax.while_loop(
            lambda carry: (carry[1] < TOKENS) & vectorize.any_in_batch(carry[1] < lengths),
            lambda carry: (step(*carry)[0], carry[1] + 1),
            (start, jnp.zeros((), jnp.int32)),
        )[0][1]

    return jax.jit(decode)


def early_exit(policy: Policy, params: Any, prompts: Prompt, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of decoding a batch, by loop and by scan, in turns: completions that need the budget, or a quarter."""
    columns = len(prompts.tokens)
    loops = {"while": decoding(policy, early=True), "scan": decoding(policy, early=False)}
    found: dict[str, dict[str, float]] = {}
    for label, longest in (("whole budget", TOKENS), ("a quarter", TOKENS // 4)):
        lengths, key = jnp.linspace(1, longest, columns).astype(jnp.int32), jax.random.key(0)
        turns = [
            {n: seconds(f, params, prompts, lengths, key, rounds=1) for n, f in loops.items()} for _ in range(rounds)
        ]
        found[label] = {name: median(turn[name] for turn in turns) for name in loops}
    return found


def unequal_lengths(size: str, columns: int, rounds: int) -> dict[str, float]:
    """Seconds of a whole step where lengths are unequal, with texts side by side and with one per row, in turns."""
    env, key = of_any_length(), jax.random.key(0)
    policy, critic = transformer_of(env, size)
    one_per_row = machine().chunk_texts or columns
    learners = {
        "side by side": learner_of(policy, critic, env, columns),
        "one per row": learner_of(policy, critic, env, columns, chunk_rows=one_per_row),
    }
    state = jax.jit(learners["side by side"].init)(key)
    steps = {name: jax.jit(learner.step) for name, learner in learners.items()}
    turns = [{name: seconds(step, state, key, rounds=1) for name, step in steps.items()} for _ in range(rounds)]
    return {name: median(turn[name] for turn in turns) for name in steps}


def measure(size: str, columns: int, rounds: int) -> dict[str, Any]:
    """Everything about one size of model, the machine's limits measured before and behind it."""
    limits = measured_limits(rounds)
    env, key = endless(), jax.random.key(0)
    policy, critic = transformer_of(env, size)
    grpo = learner_of(policy, critic, env, columns)
    state = jax.jit(grpo.init)(key)
    params = state.params.policy
    weights = sum(x.size for x in jax.tree.leaves(params))
    collect = jax.jit(
        lambda params, key: rollout.episodic(num_envs=columns, group_size=GROUP).collect(env, policy, params, (), key)[
            1
        ]
    )
    part, parts = collect(params, key), parts_of(env, policy, columns)
    batch = batch_by_the_host(parts, params, key)

    def by_host(state: Any, key: jax.Array) -> Any:
        batch = batch_by_the_host(parts, state.params.policy, key)
        return parts.update(state.params, state.opt_state, batch, key)

    tokens = columns * TOKENS
    writing = tokens / seconds(collect, params, key, rounds=rounds)
    update = seconds(parts.update, state.params, state.opt_state, batch, key, rounds=rounds)
    learning = columns * (PROMPT + TOKENS) / update
    limits = limits.or_more(measured_limits(rounds))
    write_bound, learn_bound = bounds(limits, size, weights, columns)

    whole = jax.jit(grpo.step)
    turns: dict[str, list[float]] = {"one program": [], "host loop": []}
    for _ in range(rounds):
        turns["one program"].append(seconds(whole, state, key, rounds=1))
        turns["host loop"].append(seconds(by_host, state, key, rounds=1))
    return {
        "weights": weights,
        "columns": columns,
        "limits": limits._asdict(),
        "writing": {"tokens per second": writing, "bound": write_bound, "share": writing / write_bound},
        "learning": {"tokens per second": learning, "bound": learn_bound, "share": learning / learn_bound},
        "ending, seconds": early_exit(policy, params, part.episodes.context, rounds),
        "grpo step, seconds": {name: median(times) for name, times in turns.items()},
        "unequal lengths, seconds": unequal_lengths(size, columns, rounds),
        "memory, bytes": {name: update_bytes(learner_of(policy, critic, env, columns, name)) for name in ALGORITHMS}
        | {"grpo, remat": update_bytes(learner_of(*transformer_of(env, size, remat=True), env, columns))},
    }


def work_of(size: str, columns: int) -> Work:
    """The step of GRPO that the peers do too, on the model of a size."""
    policy, _ = transformer_of(endless(), size)
    block = jax.eval_shape(policy.init, jax.random.key(0))["params"]["blocks_0"]
    hidden = block["down"]["kernel"].shape[0]
    given = {"vocabulary": VOCABULARY, "prompt": PROMPT, "tokens": TOKENS, "columns": columns, "group": GROUP}
    return Work(**SIZES[size], hidden=hidden, **given, learning_rate=1e-4, max_grad_norm=1.0)


def print_tables(results: dict[str, dict[str, Any]], console: Console) -> None:
    """Speed beside the bounds, endings and memory of every size."""
    speed = Table(
        "weights",
        "writing, tokens/s",
        "of the bound",
        "learning, tokens/s",
        "of the bound",
        "whole step",
        "by host",
        "×",
    )
    ending = Table("weights", "budget, while", "scan", "a quarter, while", "scan", title="ending, seconds")
    lengths = Table("weights", "side by side", "one per row", "×", title="completions of any length, seconds of a step")
    names = (*ALGORITHMS, "grpo, remat")
    columns = [cell for name in names for cell in (f"{name}, state", "beside it")]
    memory = Table("weights", *columns, title="memory, MiB")
    for size, r in results.items():
        whole, host = r["grpo step, seconds"].values()
        rates = [
            cell
            for kind in ("writing", "learning")
            for cell in (f"{r[kind]['tokens per second']:,.0f}", f"{r[kind]['share']:.0%}")
        ]
        speed.add_row(size, *rates, f"{whole:.3f} s", f"{host:.3f} s", f"{host / whole:.2f}")
        ending.add_row(size, *(f"{x:.3f}" for case in r["ending, seconds"].values() for x in case.values()))
        packed, plain = r["unequal lengths, seconds"].values()
        lengths.add_row(size, f"{packed:.3f}", f"{plain:.3f}", f"{plain / packed:.2f}")
        memory.add_row(size, *(f"{x / 2**20:.1f}" for kind in r["memory, bytes"].values() for x in kind.values()))
    console.print(speed, ending, lengths, memory)
    for size, r in results.items():
        limits = Limits(**r["limits"])
        console.print(f"{size}: memory {limits.bandwidth / 1e9:.1f} GB/s, matmul {limits.flops / 1e9:.0f} GFLOP/s")


def whole_groups(text: str) -> int:
    """A number of completions, as the type of an option."""
    if not text.isdecimal() or int(text) == 0 or int(text) % GROUP:
        raise argparse.ArgumentTypeError(f"{text} completions are not groups of {GROUP}: give a multiple of {GROUP}")
    return int(text)


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="default 0.1M 1M 10M, with --peers 1M 10M")
    parser.add_argument(
        "--columns", type=whole_groups, default=64, help="completions side by side, a multiple of 8 (default 64)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="calls of which the median is taken (default 9)")
    parser.add_argument("--peers", action="store_true", help="one step of GRPO beside TRL and Tunix, and nothing else")
    parser.add_argument("--trl-python", help="a Python that has TRL and the CPU build of torch")
    parser.add_argument("--tunix-python", help="a Python that has Tunix")
    parser.add_argument(
        "--out", type=out_file, help="where to write (default results/language_speed.json or language_peers.json)"
    )
    args = parser.parse_args()
    pythons = language_turns.peer_pythons(parser, args)
    console = Console(width=120)
    if args.peers:
        works = {size: work_of(size, args.columns) for size in args.sizes or ["1M", "10M"]}
        out = args.out or HERE / "results" / "language_peers.json"
        return language_turns.measure(works, pythons, args.rounds, out, console)
    out = args.out or HERE / "results" / "language_speed.json"
    about = {"machine": describe_machine(), "prompt": PROMPT, "tokens": TOKENS}
    results = {}
    for size in args.sizes or ["0.1M", "1M", "10M"]:
        results[size] = measure(size, args.columns, args.rounds)
        put(out, "sizes", size, results[size], about)
    print_tables(results, console)


if __name__ == "__main__":
    main()
