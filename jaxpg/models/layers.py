"""The layers that networks are made of: torsos from observations to features, recurrent cells, and heads.

Initial weights are orthogonal with the gains of PPO's reference code (Huang et al. 2022, "The 37 Implementation Details
of PPO", detail 2): sqrt(2) in the torso, so that activations keep their scale; 0.01 for the policy head, so that the
first policy is nearly uniform; 1 for the value and in recurrent cells. A gain of None stands for flax's own, LeCun's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.models.distributions import Categorical, DiagonalGaussian, SquashedGaussian
from jaxpg.types import Array, Discrete, Key, Space

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"tanh": nn.tanh, "relu": nn.relu, "silu": nn.silu, "gelu": nn.gelu}
HIDDEN_GAIN, POLICY_GAIN, VALUE_GAIN, CELL_GAIN = 2.0**0.5, 0.01, 1.0, 1.0


def orthogonal(gain: float) -> Callable[..., Array]:
    """Initial weights `[..., out]`: as a matrix, `gain` times one with orthonormal columns (or rows), uniformly drawn.

    Gram-Schmidt on a normal matrix, every projection taken twice against rounding (Saxe et al. 2014, section 3). A QR
    decomposition gives the same, but several of jaxlib's at once, as `vmap` over seeds makes them, can wait for each
    other for ever on a CPU: each holds a thread of the pool that it wants to share its work with.
    """
    return lambda key, shape, dtype=jnp.float32: gain * _orthonormal(key, tuple(shape), dtype)


@partial(jax.jit, static_argnums=(1, 2))  # traced once per shape: flax asks for the shape at every call of a layer
def _orthonormal(key: Key, shape: tuple[int, ...], dtype: Any) -> Array:
    rows, columns = math.prod(shape[:-1]), shape[-1]
    normal = jax.random.normal(key, (max(rows, columns), min(rows, columns)), dtype)

    def add_column(i: Array, q: Array) -> Array:
        column = normal[:, i]
        for _ in range(2):
            column -= q @ (q.T @ column)
        return q.at[:, i].set(column / jnp.linalg.norm(column))

    q = lax.fori_loop(0, normal.shape[1], add_column, jnp.zeros_like(normal))
    return (q if rows >= columns else q.T).reshape(shape)


def kernel(gain: float | None) -> Callable[..., Array]:
    """How the weights of a layer begin: orthogonal with that gain, or as flax has it."""
    return nn.initializers.lecun_normal() if gain is None else orthogonal(gain)


def dense(features: int, gain: float | None) -> nn.Dense:
    """A dense layer with weights of `kernel(gain)` and no initial bias."""
    return nn.Dense(features, kernel_init=kernel(gain))


class MLPTorso(nn.Module):
    """`[..., *event] -> [..., hidden[-1]]`: the event axes flattened, then dense layers."""

    event_ndim: int
    hidden: Sequence[int]
    activation: str
    gain: float | None = HIDDEN_GAIN

    @nn.compact
    def __call__(self, obs: Array) -> Array:
        x = obs.reshape(*obs.shape[: obs.ndim - self.event_ndim], -1)
        for width in self.hidden:
            x = ACTIVATIONS[self.activation](dense(width, self.gain)(x))
        return x


class CNNTorso(nn.Module):
    """`[..., H, W, C] -> [..., hidden[-1]]`: one 3x3 convolution per entry of `channels`, then dense layers.

    MinAtar's ten-by-ten boards want no more than one (Young and Tian 2019, section 4).
    """

    channels: Sequence[int]
    hidden: Sequence[int]
    activation: str
    gain: float | None = HIDDEN_GAIN

    @nn.compact
    def __call__(self, obs: Array) -> Array:
        x = obs
        for channels in self.channels:
            x = ACTIVATIONS[self.activation](dense(channels, self.gain)(patches(x)))
        return MLPTorso(3, self.hidden, self.activation, self.gain)(x)


def patches(x: Array) -> Array:
    """`[..., H, W, C] -> [..., H-2, W-2, 9C]`: the 3x3 neighbourhood of every inner cell, row by row.

    A dense layer on top of it is a convolution without padding. XLA's own convolution, differentiated inside a
    compiled loop on a CPU, took 15 times as long as this matrix product.
    """
    height, width = x.shape[-3] - 2, x.shape[-2] - 2
    return jnp.concatenate([x[..., i : i + height, j : j + width, :] for i in range(3) for j in range(3)], -1)


class PolicyHead(nn.Module):
    """Features to a distribution over the action space.

    Discrete: logits. Box: a mean per dimension and a log standard deviation that does not depend on the state
    (detail 2 of the continuous-control part of the 37) unless `state_std`, squashed into the bounds where `squash` is
    set.
    """

    space: Space
    squash: bool
    initial_log_std: float
    state_std: bool = False
    gain: float | None = POLICY_GAIN

    @nn.compact
    def __call__(self, features: Array) -> Any:
        if isinstance(self.space, Discrete):
            return Categorical(dense(self.space.n, self.gain)(features))
        size = self.space.shape[-1]
        mean = dense(size, self.gain)(features)
        log_std = self.param("log_std", nn.initializers.constant(self.initial_log_std), (size,))
        log_std = jnp.broadcast_to(log_std, mean.shape)
        if self.state_std:
            log_std += dense(size, self.gain)(features)
        if not self.squash:
            return DiagonalGaussian(mean, log_std)
        low, high = (jnp.broadcast_to(jnp.asarray(bound, mean.dtype), mean.shape) for bound in self.space)
        return SquashedGaussian(mean, log_std, low, high)


class ValueHead(nn.Module):
    """Features to a scalar, the last axis dropped."""

    gain: float | None = VALUE_GAIN

    @nn.compact
    def __call__(self, features: Array) -> Array:
        return dense(1, self.gain)(features)[..., 0]


class GRU(nn.Module):
    """Gated recurrent unit (Cho et al. 2014). `__call__` is one step, `unroll` a scan over `[T, B, ...]`."""

    width: int
    gain: float | None = CELL_GAIN

    def setup(self) -> None:
        self.cell = nn.GRUCell(
            self.width, kernel_init=kernel(self.gain), recurrent_kernel_init=orthogonal(self.gain or CELL_GAIN)
        )

    def __call__(self, memory: Array, x: Array) -> Array:
        return self.cell(memory, x)[0]

    def unroll(self, memory: Array, x: Array, first: Array) -> Array:
        def step(cell: nn.Module, memory: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
            x_t, first_t = inputs
            memory = cell(jnp.where(first_t[:, None], 0.0, memory), x_t)[0]
            return memory, memory

        scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})
        return scan(self.cell, memory, (x, first))[1]


class MinGRU(nn.Module):
    """h_t = (1 - z_t) h_{t-1} + z_t c_t with gate z_t and candidate c_t functions of x_t alone."""

    width: int
    gain: float | None = CELL_GAIN

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
