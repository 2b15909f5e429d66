"""The layers of networks: torsos from observations to features, and heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.errors import UserError
from jaxpg.models.distributions import Categorical, DiagonalGaussian, SquashedGaussian
from jaxpg.models.initial_weights import kernel
from jaxpg.parallel import collectives
from jaxpg.parallel.machine import machine
from jaxpg.types import Array, Discrete, Space, Tree

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"tanh": nn.tanh, "relu": nn.relu, "silu": nn.silu, "gelu": nn.gelu}


class Gains(NamedTuple):
    """Gains of orthogonal initial weights by kind of layer; None for flax's default, LeCun's normal distribution."""

    hidden: float | None
    policy: float | None
    value: float | None
    cell: float | None


PPO_GAINS = Gains(hidden=2.0**0.5, policy=0.01, value=1.0, cell=1.0)
"""Huang et al. 2022 ("The 37 Implementation Details of PPO", detail 2): sqrt(2) in the torso keeps the scale of the
activations, 0.01 in the policy head makes the first policy nearly uniform."""

FLAX_GAINS = Gains(None, None, None, None)


def apply(module: nn.Module, params: Tree, *inputs: Any, **options: Any) -> Any:
    """`module.apply`, for modules without mutable collections: it returns their output alone."""
    return module.apply(params, *inputs, **options)


def dense(features: int, gain: float | None) -> Dense:
    """A dense layer with weights of `kernel(gain)` and no initial bias."""
    return Dense(features, kernel(gain))


class Dense(nn.Module):
    """`x W + b`, `[..., K] -> [..., features]`; parameters as flax's, sums in the form that the machine wants."""

    features: int
    kernel_init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, x: Array) -> Array:
        # Of weights that are there, flax asks an initialiser for the shape alone, and tracing this one takes a while.
        initial = nn.initializers.zeros if self.has_variable("params", "kernel") else self.kernel_init
        weights = self.param("kernel", initial, (x.shape[-1], self.features), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        x, weights, bias = nn.dtypes.promote_dtype(x, weights, bias)
        y = _dot(x, weights)
        return y + _bias_of_rows(bias.reshape((1,) * (y.ndim - 1) + bias.shape), y)


def _dot(x: Array, weights: Array) -> Array:
    """`[..., K]` times `[K, N]`, in another form for one N and many rows (`Machine.many_rows`)."""
    if weights.shape[-1] == 1 and x.size // x.shape[-1] >= machine().many_rows:
        return jnp.dot(x, jnp.pad(weights, ((0, 0), (0, 1))))[..., :1]
    return _dot_of_few(x, weights) if weights.shape[-1] <= machine().few_outputs else jnp.dot(x, weights)


@jax.custom_jvp
def _dot_of_few(x: Array, weights: Array) -> Array:
    """`[..., K]` times `[K, N]` for few N; the derivative by x is a sum of N multiples (`Machine.few_outputs`).

    It replaces `jnp.dot`, whose derivative by x is a product.
    """
    return jnp.dot(x, weights)


@_dot_of_few.defjvp
def _differentiate_dot_of_few(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (x, weights), (x_dot, weights_dot) = primals, tangents
    columns = weights.T.reshape(-1, *(1,) * (x.ndim - 1), x.shape[-1])
    of_columns = [(x_dot * column).sum(-1) for column in columns]  # transposed, a multiple each
    return jnp.dot(x, weights), jnp.stack(of_columns, axis=-1) + jnp.dot(x, weights_dot)


_NARROW = 8
"""A layer of fewer features gains nothing by a bias in two terms."""


def _bias_of_rows(bias: Array, like: Array) -> Array:
    """What the bias `[..., 1, N]` adds to the rows of `[..., R, N]`: of many, to the first in a term of its own.

    The derivative is then the sum over all rows but one, and that one: see `Machine.many_rows`.
    """
    if like.ndim < 2 or like.shape[-2] < machine().many_rows or like.shape[-1] < _NARROW:
        return bias
    rows, outer = like.shape[-2], like.ndim - 2
    is_first = (jnp.arange(rows) == 0).reshape(*(1,) * outer, rows, 1)
    return jnp.where(is_first, 0, bias) + jnp.pad(bias, [(0, 0)] * outer + [(0, rows - 1), (0, 0)])


def dot_rows(x: Array, kernel: Array, dimension_numbers: Any, **options: Any) -> Array:
    """`[..., K]` times `[K, N]` with all leading axes of x as one, for speed alone: the `dot_general` of a layer.

    It replaces `lax.dot_general`, whose gradient with respect to the kernel contracts over each leading axis. XLA on a
    CPU does that by several slow products where there are two of them; over one axis it is one matrix product, with the
    same bits (benchmarks/LOG.md, "dense layers over sequences"). Devices that share a model keep the axes apart: one
    of them is split.
    """
    if x.ndim < 3 or collectives.auto_mesh.get():
        return lax.dot_general(x, kernel, dimension_numbers, **options)
    product = lax.dot_general(x.reshape(-1, x.shape[-1]), kernel, (((1,), (0,)), ((), ())), **options)
    return product.reshape(*x.shape[:-1], kernel.shape[-1])


class LayerNorm(nn.Module):
    """`scale (x - mean) / sqrt(variance + 1e-6) + bias` over the last axis (Ba et al. 2016); parameters as flax's."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = (1,) * (x.ndim - 1) + x.shape[-1:]
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:], jnp.float32).reshape(shape)
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:], jnp.float32).reshape(shape)
        centred = x - _spread(_row_mean(x), x)
        return centred * _spread(lax.rsqrt(_row_mean(centred**2) + 1e-6), x) * scale + bias


class RMSNorm(nn.Module):
    """`scale x / sqrt(mean(x^2) + 1e-6)` over the last axis, in float32 (Zhang and Sennrich 2019).

    It replaces flax's layer, which has the same parameters and multiplies the root by the scale first. In this order
    XLA for GPUs makes one kernel of it, where mean and product were two: a token of `sort` takes four kernels fewer
    (benchmarks/LOG.md, "a token in fewer kernels").

    dtype: of the result.
    """

    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:], jnp.float32)
        scale = scale.reshape((1,) * (x.ndim - 1) + x.shape[-1:])
        x = x.astype(jnp.float32)
        return (x * _spread(lax.rsqrt(_row_mean(x**2) + 1e-6), x) * scale).astype(self.dtype)


def _row_mean(x: Array) -> Array:
    """The mean over the last axis, `[..., n] -> [..., 1]`.

    On a CPU a product with a column of ones replaces the sum, and so does the derivative of `_spread`:
    `Machine.sums_rows_by_product`.
    """
    n = x.shape[-1]
    return x @ jnp.full((n, 1), 1 / n, x.dtype) if machine().sums_rows_by_product else x.mean(-1, keepdims=True)


def _spread(x: Array, like: Array) -> Array:
    """A number per row in all columns, `[..., 1] -> [..., n]`; on a CPU a product with a row of ones: `_row_mean`."""
    if machine().sums_rows_by_product:
        return x @ jnp.ones((1, like.shape[-1]), x.dtype)
    return jnp.broadcast_to(x, like.shape)


IMAGE = 3
"""The axes of an image: rows, columns, channels."""


def _as_vector(kind: int | Discrete, x: Array) -> Array:
    """`[..., *shape] -> [..., n]`: this many last axes flattened, or integers as one-hot vectors."""
    return jax.nn.one_hot(x, kind.n) if isinstance(kind, Discrete) else x.reshape(*x.shape[: x.ndim - kind], -1)


class MLPTorso(nn.Module):
    """Observations to features `[..., hidden[-1]]`: their arrays as vectors side by side, then dense layers.

    With `layer_norm`, each layer is normalised before its activation (Ba et al. 2016).

    arrays: of each array of an observation, in the order of `jax.tree.leaves`, the number of its axes, which are
        flattened, or the Discrete in which it lies: then it is a one-hot vector.
    """

    arrays: Sequence[int | Discrete]
    hidden: Sequence[int]
    activation: str
    gain: float | None
    layer_norm: bool = False

    @nn.compact
    def __call__(self, obs: Tree) -> Array:
        vectors = list(map(_as_vector, self.arrays, jax.tree.leaves(obs)))
        x = vectors[0] if len(vectors) == 1 else jnp.concatenate(vectors, -1)
        for width in self.hidden:
            x = dense(width, self.gain)(x)
            x = ACTIVATIONS[self.activation](LayerNorm()(x) if self.layer_norm else x)
        return x


class CNNTorso(nn.Module):
    """Images `[..., H, W, C]` to features `[..., hidden[-1]]`: a convolution per entry of `channels`, then an MLPTorso.

    What else an observation holds joins the image after its convolutions. MinAtar's boards of ten by ten cells need
    only one (Young and Tian 2019, section 4). With `layer_norm`, each layer is normalised before its activation, a
    convolution over the channels of each cell.

    arrays: as in MLPTorso; one has three axes, the image.
    """

    arrays: Sequence[int | Discrete]
    channels: Sequence[int]
    hidden: Sequence[int]
    activation: str
    gain: float | None
    layer_norm: bool = False
    kernels: Sequence[int] = (3,)
    strides: Sequence[int] = (1,)

    @nn.compact
    def __call__(self, obs: Tree) -> Array:
        arrays = jax.tree.leaves(obs)
        image = self.arrays.index(IMAGE)
        x = arrays[image]
        for channels, size, stride in self.convolutions():
            x = dense(channels, self.gain)(patches(x, size, stride))
            x = ACTIVATIONS[self.activation](LayerNorm()(x) if self.layer_norm else x)
        arrays[image] = x
        return MLPTorso(self.arrays, self.hidden, self.activation, self.gain, self.layer_norm)(arrays)

    def convolutions(self) -> list[tuple[int, int, int]]:
        """Output channels, size and stride of each convolution."""
        layers = len(self.channels)
        sizes = (each * layers if len(each) == 1 else each for each in map(tuple, (self.kernels, self.strides)))
        return list(zip(self.channels, *sizes, strict=True))


def patches(x: Array, size: int = 3, stride: int = 1) -> Array:
    """`[..., H, W, C] -> [..., (H - size) // stride + 1, ..., size^2 C]`: neighbourhoods within the picture, by rows.

    With a dense layer on top it replaces a convolution without padding, on every platform. The gain is on a CPU: XLA's
    convolution, differentiated inside a compiled loop, takes 15 times as long as this matrix product
    (benchmarks/LOG.md, "MinAtar's convolution and step size").
    """
    ends = [(n - size) // stride * stride + 1 for n in x.shape[-3:-1]]  # of the corners of the neighbourhoods
    step = stride if stride > 1 else None
    rows, columns = ([slice(i, i + end, step) for i in range(size)] for end in ends)
    return jnp.concatenate([x[..., row, column, :] for row in rows for column in columns], -1)


class PolicyHead(nn.Module):
    """Features to a distribution over the action space.

    Discrete: logits of a Categorical. Box: mean and log standard deviation per dimension of a DiagonalGaussian, or with
    `squash` of a SquashedGaussian within the bounds. The log standard deviation is a separate parameter (Huang et al.
    2022, detail 2 for continuous actions); with `state_std`, a function of the features is added to it.
    """

    space: Space
    squash: bool
    initial_log_std: float
    state_std: bool
    gain: float | None

    @nn.compact
    def __call__(self, features: Array) -> Any:
        if isinstance(self.space, Discrete):
            return Categorical(dense(self.space.n, self.gain)(features))
        if len(self.space.shape) != 1:
            raise UserError(
                f"Actions of a Box have one axis, as in shape (3,), not the shape {self.space.shape}: reshape them in "
                "the environment's step."
            )
        (size,) = self.space.shape
        mean = dense(size, self.gain)(features)
        log_std = self.param("log_std", nn.initializers.constant(self.initial_log_std), (size,), jnp.float32)
        log_std = jnp.broadcast_to(log_std, mean.shape)
        if self.state_std:
            log_std += dense(size, self.gain)(features)
        if not self.squash:
            return DiagonalGaussian(mean, log_std)
        low, high = (jnp.broadcast_to(jnp.asarray(bound, mean.dtype), mean.shape) for bound in self.space)
        return SquashedGaussian(mean, log_std, low, high)


class ValueHead(nn.Module):
    """`[..., width] -> [...]`, a value per row of features."""

    gain: float | None

    @nn.compact
    def __call__(self, features: Array) -> Array:
        return dense(1, self.gain)(features)[..., 0]
