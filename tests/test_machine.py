"""Which machine a program is for: who may ask, what the mesh says, and that all machines learn the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec

from jaxpg import envs, ladder, language, networks, parallel
from jaxpg.envs.text.token_arrays import pack
from jaxpg.envs.text.vocabulary import END
from jaxpg.models import layers
from jaxpg.objectives import returns
from jaxpg.parallel.machine import CPU, MACHINES, machine, platform, program_for
from jaxpg.policy_gradient import policy_gradient
from jaxpg.rollout import segments
from jaxpg.types import Learner, Outcome
from jaxpg.vectorize import compute_once, scan_packed, set_slot, sums

PACKAGE = Path(__file__).parent.parent / "jaxpg"
OTHERS = [name for name in MACHINES if name != "cpu"]


def test_the_platform_is_asked_in_one_file() -> None:
    asking = [path.name for path in PACKAGE.rglob("*.py") if "default_backend" in path.read_text(encoding="utf-8")]
    assert asking == ["machine.py"]


def test_a_program_is_for_the_devices_of_its_mesh() -> None:
    seen: list[Any] = []

    def traced(x: jax.Array) -> jax.Array:
        seen.append((platform(), machine()))
        return x

    mesh = parallel.make_mesh(1, 1, jax.devices()[:1])
    program = parallel.spread(traced, mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    with program_for("tpu"):
        jax.eval_shape(program, jnp.zeros(1))
        assert platform() == "tpu"
    assert seen == [("cpu", CPU)]
    assert platform() == "cpu"


@pytest.mark.device
@pytest.mark.parametrize("name", OTHERS)
def test_packed_outputs_are_those_of_a_plain_scan(name: str) -> None:
    def step(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
        picture = jnp.full((2, 3, 3, 1), x)
        flags = jnp.stack([x > 2, x < 3])
        return carry + x, {"a": picture, "b": (carry, flags), "c": jnp.int32(carry), "d": jnp.full((2, 4), -x)}

    plain = jax.lax.scan(step, jnp.float32(0), jnp.arange(5.0))
    with program_for(name):
        packed = jax.jit(lambda: scan_packed(step, jnp.float32(0), jnp.arange(5.0)))
        jax.tree.map(np.testing.assert_array_equal, packed(), plain)
        jax.tree.map(lambda x, y: np.testing.assert_equal(x.dtype, y.dtype), packed(), plain)


@pytest.mark.parametrize("equations", [0, 2, 3])
def test_a_loop_in_rounds_is_the_loop(equations: int, machine_with: Callable[..., None]) -> None:
    """37 steps of three equations, two of them within a function: two rounds of 16 and a rest, if three may be."""
    machine_with(round_equations=equations)

    def step(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = jax.jit(lambda c: c * 0.5 + x)(carry)
        return carry, carry

    def loop(start: jax.Array) -> tuple[jax.Array, jax.Array]:
        return scan_packed(step, start, jnp.arange(37.0), in_rounds=True)

    expected = jax.lax.scan(step, jnp.ones(()), jnp.arange(37.0))
    jax.tree.map(np.testing.assert_array_equal, loop(jnp.ones(())), expected)
    assert ("unroll=16" in str(jax.make_jaxpr(loop)(jnp.ones(())))) == (equations == 3)
    elsewhere = jax.make_jaxpr(lambda start: scan_packed(step, start, jnp.arange(37.0)))(jnp.ones(()))
    assert "unroll=1\n" in str(elsewhere)  # minibatches, for instance


@pytest.mark.device
def test_an_unrolled_recursion_is_the_same() -> None:
    reward, v = jax.random.normal(jax.random.key(0), (2, 37, 3))  # 37 is no multiple of the steps of a round
    last = jax.random.bernoulli(jax.random.key(1), 0.1, reward.shape)
    arguments = (reward, 1.0 - last, last, v, jnp.roll(v, -1, 0), 0.9, 0.8)
    expected = tiny.jit(lambda: returns.gae(*arguments))()
    with program_for("gpu"):
        np.testing.assert_allclose(tiny.jit(lambda: returns.gae(*arguments))(), expected, rtol=1e-6)


@pytest.mark.parametrize("rows", [15, 16])
def test_a_product_with_one_column_is_a_product(rows: int, machine_with: Callable[..., None]) -> None:
    """A layer with one output on 15 rows, with and without another column; value and derivatives."""
    x, weights = jax.random.normal(jax.random.key(0), (5, 3, 4)), jax.random.normal(jax.random.key(1), (4, 1))
    machine_with(many_rows=rows)

    def loss(x: jax.Array, weights: jax.Array) -> jax.Array:
        params = {"params": {"kernel": weights, "bias": jnp.ones(1)}}
        return jnp.tanh(layers.apply(layers.dense(1, None), params, x)).sum()

    def expected(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.einsum("abk,kn->abn", x, weights) + 1).sum()

    got, wanted = (jax.value_and_grad(f, argnums=(0, 1))(x, weights) for f in (loss, expected))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, wanted)
    assert ("pad" in str(jax.make_jaxpr(loss)(x, weights))) == (rows == 15)


@pytest.mark.parametrize("rows", [7, 8])
def test_a_bias_in_two_terms_is_the_bias(rows: int, machine_with: Callable[..., None]) -> None:
    """A layer of 8 features on 7 rows, with and without a term for the first of them; value and derivatives."""
    x, bias = jax.random.normal(jax.random.key(0), (5, 7, 4)), jnp.arange(8.0)
    weights = jax.random.normal(jax.random.key(1), (4, 8))
    machine_with(many_rows=rows)

    def loss(x: jax.Array, bias: jax.Array) -> jax.Array:
        params = {"params": {"kernel": weights, "bias": bias}}
        return jnp.tanh(layers.apply(layers.dense(8, None), params, x)).sum()

    def expected(x: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.einsum("abk,kn->abn", x, weights) + bias[None, None]).sum()

    got, wanted = (jax.value_and_grad(f, argnums=(0, 1))(x, bias) for f in (loss, expected))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, wanted)
    assert ("pad" in str(jax.make_jaxpr(loss)(x, bias))) == (rows == 7)


@pytest.mark.parametrize("recomputes", [False, True])
def test_what_is_computed_once_stays_the_same(recomputes: bool, machine_with: Callable[..., None]) -> None:
    machine_with(recomputes=recomputes)
    numbers = np.float32([0.0, -0.0, 1e-30, -3.5, 1e38, np.inf, -np.inf, np.nan])
    tree = {"x": jnp.asarray(numbers), "flags": jnp.array([True, False]), "count": jnp.arange(3)}
    once = jax.jit(lambda tree: compute_once(tree))(tree)  # a new function, which is compiled anew
    assert np.asarray(once["x"]).tobytes() == numbers.tobytes()
    assert {name: x.dtype for name, x in once.items()} == {name: x.dtype for name, x in tree.items()}
    np.testing.assert_array_equal(once["flags"], [True, False])
    np.testing.assert_array_equal(once["count"], [0, 1, 2])
    np.testing.assert_array_equal(jax.grad(lambda x: compute_once(x * x).sum())(jnp.arange(3.0)), [0, 2, 4])


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="counts what the compiler for CPUs makes")
def test_a_cpu_s_compiler_does_not_compute_again_what_is_computed_once(machine_with: Callable[..., None]) -> None:
    """Ten steps, each from the one before, of which every other one is an output."""

    def multiplications(recomputes: bool) -> int:
        machine_with(recomputes=recomputes)

        def steps(x: jax.Array) -> list[jax.Array]:
            found = [x]
            for _ in range(10):
                found.append(compute_once(found[-1] * found[-1] - 1))
            return found[::2]

        compiled = jax.jit(steps).lower(jnp.ones(8)).compile()
        return str(compiled.as_text()).count(" multiply(")

    assert multiplications(True) == 10 < multiplications(False) / 2


@pytest.mark.parametrize("few", [1, 2])
def test_final_observations_are_stored_in_their_slots(few: int, machine_with: Callable[..., None]) -> None:
    """Of three columns with two slots: the second of one, the first of another, and none of one that is full."""
    machine_with(few_final_obs=few)
    kept = {"a": jnp.zeros((2, 3)), "b": jnp.zeros((2, 3, 4))}
    obs = {"a": jnp.arange(1.0, 4.0), "b": jnp.arange(12.0).reshape(3, 2, 2) + 1}
    store = partial(segments._store_final_obs, obs=obs)
    bootstraps, filled = jnp.asarray([True, True, True]), jnp.asarray([1, 0, 2])
    found = store(kept, bootstraps=bootstraps, num_final=filled)
    np.testing.assert_array_equal(found["a"], [[0, 2, 0], [1, 0, 0]])
    np.testing.assert_array_equal(found["b"][:, :2], [[[0] * 4, [5, 6, 7, 8]], [[1, 2, 3, 4], [0] * 4]])
    assert not found["b"][:, 2].any()
    unchanged = store(kept, bootstraps=~bootstraps, num_final=filled)
    jax.tree.map(np.testing.assert_array_equal, unchanged, kept)
    program = str(jax.make_jaxpr(lambda kept: store(kept, bootstraps=bootstraps, num_final=filled))(kept))
    assert ("scatter" in program) == (few == 1)


@pytest.mark.parametrize("at_once", [False, True])
def test_sums_at_once_are_the_sums(at_once: bool, machine_with: Callable[..., None]) -> None:
    machine_with(sums_at_once=at_once)
    terms = {"b": jnp.arange(6.0).reshape(2, 3), "a": jnp.full((2, 3), 0.5)}
    assert sums(terms) == {"b": 15.0, "a": 3.0}
    reductions = str(jax.make_jaxpr(lambda terms: sums(terms))(terms)).count("reduce_sum")  # traced anew
    assert reductions == (1 if at_once else 2)


@pytest.mark.device
@pytest.mark.parametrize("few", [0, 5])
def test_a_value_is_set_in_its_slot_of_each_text(few: int, machine_with: Callable[..., None]) -> None:
    """Of caches `[texts, 2, 5, 3]` along both of their last axes, and not at all where a text is full."""
    machine_with(few_slots=few)
    x, values = jnp.arange(90.0).reshape(3, 2, 5, 3), -jnp.arange(18.0).reshape(3, 2, 1, 3) - 1
    slots = jnp.asarray([4, 0, 5])
    found = jax.vmap(partial(set_slot, axis=-2))(x, slots, values)
    turned = jax.vmap(partial(set_slot, axis=-1))(x.swapaxes(-1, -2), slots, values.swapaxes(-1, -2))
    expected = np.array(x)
    for text, slot in enumerate([4, 0]):
        expected[text, :, slot] = values[text, :, 0]
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(turned.swapaxes(-1, -2), expected)
    assert ("scatter" in str(jax.make_jaxpr(lambda: set_slot(x[0], slots[0], values[0], axis=-2))())) == (few == 0)


@pytest.mark.parametrize("size", [3, 4, 9])
def test_short_texts_are_packed_as_long_ones_are(size: int, machine_with: Callable[..., None]) -> None:
    pieces = (jnp.asarray([0, 7, 0, 8]), "<eos>", jnp.asarray([9, 0]))
    packed = []
    for few in (0, 8, 64):
        machine_with(few_slots=few)
        packed.append(pack(*pieces, size=size))
    np.testing.assert_array_equal(packed[0], [7, 8, END, 9, *[0] * 5][:size])
    for other in packed[1:]:
        np.testing.assert_array_equal(other, packed[0])


@pytest.mark.parametrize("few", [0, 64])
def test_tokens_have_32_bits_under_double_precision(few: int, machine_with: Callable[..., None]) -> None:
    machine_with(few_slots=few)
    with jax.enable_x64(True):
        assert pack(jnp.asarray([0, 7, 0, 8]), "<eos>").dtype == jnp.int32


def learner(algorithm: str) -> Learner:
    """CartPole, for GRPO no more than 21 steps, which is no multiple of a machine's steps per question; or texts."""
    if algorithm == "texts":
        env = envs.make("sort", length=3, min_length=2)
        env = env._replace(outcome=lambda state: Outcome(jnp.sin(state.tokens).sum(), {}), measure=None)
        model = language.transformer(env, width=16, layers=2, heads=4, kv_heads=2)
        texts: dict[str, Any] = {"num_envs": 8, "group_size": 4, "learning_rate": 1e-2, "max_grad_norm": 0.5}
        return policy_gradient(env, *model, ladder.grpo(**texts, kl=None))
    env = envs.make("CartPole-v1")
    env = env._replace(time_limit=21) if algorithm == "grpo" else env
    network = networks.mlp(env, hidden=(8,))
    shared: dict[str, Any] = {"num_envs": 8, "epochs": 2, "num_minibatches": 2, "learning_rate": 1e-2}
    kinds = {"ppo": partial(ladder.ppo, num_steps=19), "grpo": partial(ladder.grpo, group_size=4, kl=None)}
    return policy_gradient(env, *network, kinds[algorithm](**shared))


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "texts"])
def test_every_machine_learns_the_same(algorithm: str) -> None:
    """Its choices, compiled for a CPU: the numbers of three updates are those of the CPU's own program."""

    def three_updates(name: str) -> Any:
        one = learner(algorithm)
        with program_for(name):
            state = tiny.jit(one.init)(jax.random.key(0))
            step = tiny.jit(one.step)
            for i in range(3):
                state, metrics = step(state, jax.random.key(i))
        return state.params, metrics

    expected = three_updates("cpu")
    assert float(expected[1]["episodes"]) > 0
    for name in OTHERS:
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-6), three_updates(name), expected)
