"""Recurrent cells, step by step and unrolled over time; what a GRU is computed by stands below."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.models.initial_weights import kernel, orthogonal
from jaxpg.models.layers import dense, dot_rows
from jaxpg.parallel.machine import machine
from jaxpg.types import Array


class GRU(nn.Module):
    """Gated recurrent unit (Cho et al. 2014), in the form of flax's GRUCell, whose parameters it has.

    With r, z = sigmoid(W x + U h) and n = tanh(W_n x + r (U_n h)), biases aside, the memory h becomes (1 - z) n + z h.
    `__call__(memory, x)` is one step; `unroll(memory, x, first)` is a scan over `[T, B, ...]` that clears the memory
    where `first`, `[T, B]`, is true.

    For speed alone, it replaces the cell's six products per step by two, and in `unroll` by one per step and one for
    the inputs of all steps, unless there are many columns (`Machine.many_columns`; benchmarks/LOG.md, "a GRU by one
    product a step").
    """

    width: int
    gain: float | None

    def setup(self) -> None:
        recurrent_gain = 1.0 if self.gain is None else self.gain  # orthogonal in flax too
        self.cell = nn.GRUCell(
            self.width, kernel_init=kernel(self.gain), recurrent_kernel_init=orthogonal(recurrent_gain)
        )

    def __call__(self, memory: Array, x: Array) -> Array:
        if self.is_initializing():
            return self.cell(memory, x)[0]
        of_inputs, of_memory = self._stacked()
        return _gated(_affine(of_memory, memory), _affine(of_inputs, x), memory)[0]

    def unroll(self, memory: Array, x: Array, first: Array) -> Array:
        of_inputs, of_memory = self._stacked()
        if x.shape[1] < machine().many_columns:
            return _unroll_gates(of_memory, memory, _affine(of_inputs, x), first)

        def step(memory: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
            x, first = inputs
            memory = jnp.where(first[:, None], 0.0, memory)
            memory = _gated(_affine(of_memory, memory), _affine(of_inputs, x), memory)[0]
            return memory, memory

        return lax.scan(step, memory, (x, first))[1]

    def _stacked(self) -> tuple[Affine, Affine]:
        """Weights and biases of the inputs, and those of the memory, side by side for r, z and n."""
        weights = self.cell.variables["params"]
        no_bias = jnp.zeros((2, self.width), jnp.float32)
        kernels = (jnp.concatenate([weights[source + gate]["kernel"] for gate in "rzn"], 1) for source in "ih")
        biases = ([weights["i" + gate]["bias"] for gate in "rzn"], [*no_bias, weights["hn"]["bias"]])
        of_inputs, of_memory = zip(kernels, map(jnp.concatenate, biases), strict=True)
        return of_inputs, of_memory


class MinGRU(nn.Module):
    """h_t = (1 - z_t) h_{t-1} + z_t c_t, where gate z_t and candidate c_t are functions of x_t alone.

    Source: Feng et al. 2024 ("Were RNNs All We Needed?"), section 3.1. The interface is that of GRU; `unroll` is an
    associative scan of O(log T) steps.
    """

    width: int
    gain: float | None

    def setup(self) -> None:
        self.gate, self.candidate = (dense(self.width, self.gain) for _ in range(2))

    def __call__(self, memory: Array, x: Array) -> Array:
        gate = nn.sigmoid(self.gate(x))
        return (1 - gate) * memory + gate * self.candidate(x)

    def unroll(self, memory: Array, x: Array, first: Array) -> Array:
        gate = nn.sigmoid(self.gate(x))
        keep = jnp.where(first[..., None], 0.0, 1 - gate)
        new = gate * self.candidate(x)
        new = new.at[0].add(keep[0] * memory)

        def compose(earlier: tuple[Array, Array], later: tuple[Array, Array]) -> tuple[Array, Array]:
            return earlier[0] * later[0], later[0] * earlier[1] + later[1]

        return lax.associative_scan(compose, (keep, new))[1]


Affine = tuple[Array, Array]
"""A kernel `[K, N]` and a bias `[N]`."""


def _affine(weights: Affine, x: Array) -> Array:
    kernel, bias = weights
    product = dot_rows(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))
    return product + jnp.expand_dims(bias, range(x.ndim - 1))


class _Gates(NamedTuple):
    """What a step of a GRU computes on its way, `[..., N]` each: r, z and n, and U_n h + c_n, which r multiplies."""

    r: Array
    z: Array
    n: Array
    of_memory: Array


def _gated(of_memory: Array, of_inputs: Array, memory: Array) -> tuple[Array, _Gates]:
    """The next memory `[..., N]` from what memory and inputs give to r, z and n, `[..., 3 N]` each."""
    (r_h, z_h, n_h), (r_x, z_x, n_x) = (jnp.split(part, 3, -1) for part in (of_memory, of_inputs))
    r, z = nn.sigmoid(r_x + r_h), nn.sigmoid(z_x + z_h)
    n = nn.tanh(n_x + r * n_h)
    return (1 - z) * n + z * memory, _Gates(r, z, n, n_h)


def _gated_backward(gates: _Gates, memory: Array, gradient: Array) -> tuple[Array, Array, Array]:
    """The derivative of `_gated` in the direction of `gradient`: of what memory gives, of n, and of memory itself.

    What the inputs give has that of what the memory gives, but for n.
    """
    r, z, n, n_h = gates
    of_n = gradient * (1 - z) * (1 - n**2)
    of_r, of_z = of_n * n_h * r * (1 - r), gradient * (memory - n) * z * (1 - z)
    return jnp.concatenate([of_r, of_z, of_n * r], -1), of_n, gradient * z


def _scan_gates(weights: Affine, memory: Array, of_inputs: Array, first: Array) -> tuple[Array, _Gates]:
    """The memories `[T, B, N]` after each step, and its gates, from what all inputs give to them, `[T, B, 3 N]`."""

    def step(memory: Array, inputs: tuple[Array, Array]) -> tuple[Array, tuple[Array, _Gates]]:
        of_inputs, first = inputs
        memory = jnp.where(first[:, None], 0.0, memory)
        memory, gates = _gated(_affine(weights, memory), of_inputs, memory)
        return memory, (memory, gates)

    return lax.scan(step, memory, (of_inputs, first), unroll=machine().recursion_unroll)[1]


@jax.custom_vjp
def _unroll_gates(weights: Affine, memory: Array, of_inputs: Array, first: Array) -> Array:
    """The memories of `_scan_gates`, whose derivative with respect to the weights is one product over all steps.

    That of a scan adds a product to the sum at every step.
    """
    return _scan_gates(weights, memory, of_inputs, first)[0]


def _unroll_forward(weights: Affine, memory: Array, of_inputs: Array, first: Array) -> tuple[Array, Any]:
    memories, gates = _scan_gates(weights, memory, of_inputs, first)
    before = jnp.where(first[..., None], 0.0, jnp.concatenate([memory[None], memories[:-1]]))
    return memories, (weights[0], before, gates, first)


def _unroll_backward(saved: Any, gradient: Array) -> tuple[Affine, Array, Array, None]:
    kernel, before, gates, first = saved

    def step(of_next: Array, at_step: tuple[Array, _Gates, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        gradient, gates, memory, first = at_step
        of_memory, of_n, direct = _gated_backward(gates, memory, gradient + of_next)
        return jnp.where(first[:, None], 0.0, direct + of_memory @ kernel.T), (of_memory, of_n)

    start, unroll = jnp.zeros_like(before[0]), machine().recursion_unroll
    of_start, (of_memory, of_n) = lax.scan(step, start, (gradient, gates, before, first), reverse=True, unroll=unroll)
    of_inputs = jnp.concatenate([of_memory[..., : -start.shape[-1]], of_n], -1)
    of_kernel = before.reshape(-1, before.shape[-1]).T @ of_memory.reshape(-1, of_memory.shape[-1])  # as in dot_rows
    return (of_kernel, of_memory.sum((0, 1))), of_start, of_inputs, None


_unroll_gates.defvjp(_unroll_forward, _unroll_backward)
