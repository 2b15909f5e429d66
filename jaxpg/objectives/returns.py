"""Returns and advantages over segments of experience, each one backward recursion x_t = a_t + b_t x_{t+1}.

Everything is `[T, B]`, time-major; `gamma` and `lambda_` are scalars and may be traced. There are three cases:

- termination, `discount_t` = 0: nothing follows, nothing is bootstrapped;
- a time-out, `last_t` with `discount_t` = 1: the trace is cut, and V of the true successor replaces the rewards that
  would have followed;
- the end of the segment, row T-1: as a time-out.

A column may hold several episodes in a row: nothing after the `last` step of an episode influences the steps of that
episode. `v_tm1` is V(obs_t) and `v_t` is V of the true successor of obs_t. All of them raise a UserError for arrays of
different shapes.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jaxpg.errors import UserError
from jaxpg.parallel.machine import machine
from jaxpg.types import Array, Scalar


def _backward(a: Array, b: Array, init: Array) -> Array:
    """x_t = a_t + b_t x_{t+1} with x_T = `init`."""

    def step(x: Array, ab: tuple[Array, Array]) -> tuple[Array, Array]:
        x = ab[0] + ab[1] * x
        return x, x

    start = init.astype(jnp.result_type(a, b))
    return lax.scan(step, start, (a, b), reverse=True, unroll=machine().recursion_unroll)[1]


def _check_shapes(reward: Array, **others: Array) -> None:
    """Raise a UserError unless all are `[T, B]` (or `[T]`) alike with T >= 1; a row `[B]` would be broadcast."""
    shape = jnp.shape(reward)
    if not shape or not shape[0]:
        raise UserError(f"reward must be [T, B], with at least one step, and has the shape {shape}.")
    for name, x in others.items():
        if jnp.shape(x) != shape:
            raise UserError(f"{name} must be [T, B] as the reward is, {shape}, and has the shape {jnp.shape(x)}.")


def lambda_returns(reward: Array, discount: Array, last: Array, v_t: Array, gamma: Scalar, lambda_: Scalar) -> Array:
    """G_t = r_t + γ discount_t ((1 - c_t) v_t + c_t G_{t+1}), with c_t = λ(1 - last_t) and G_T = v_{T-1}.

    Between the one-step target at λ = 0 and the Monte-Carlo return at λ = 1.
    Source: Sutton & Barto 2018, section 12.8, equation 12.18.
    """
    _check_shapes(reward, discount=discount, last=last, v_t=v_t)
    trace = jnp.where(last, 0.0, lambda_)
    discount = gamma * discount
    return _backward(reward + discount * (1 - trace) * v_t, discount * trace, v_t[-1])


def discounted_returns(reward: Array, discount: Array, last: Array, bootstrap: Array, gamma: Scalar) -> Array:
    """G_t = r_t + γ discount_t G_{t+1}, with `bootstrap_t` in place of G_{t+1} where the episode or the segment ends.

    The reward-to-go of every step. `bootstrap` is `[T, B]` and counts only at time-outs and in the last row: zeros for
    the plain sum of the rewards seen, `v_t` to estimate the rest. Elsewhere its weight is 0, and it must be finite.
    Source: Sutton & Barto 2018, equation 3.9.
    """
    return lambda_returns(reward, discount, last, bootstrap, gamma, 1.0)


def n_step_targets(reward: Array, discount: Array, last: Array, v_t: Array, gamma: Scalar, n: int) -> Array:
    """G_t = r_t + γ d_t G_{t+1}, n times, and then v_{t+n-1}, the value of the state reached; d_t is `discount_t`.

    Fewer rewards where the episode or the segment ends first, with the value there unless it terminated. `n` is a
    static int.
    Source: Sutton & Barto 2018, equation 7.1.

    Raises:
        UserError: `n` is not at least 1.
    """
    if n < 1:
        raise UserError(f"n is {n}, but a target spans at least one step: choose n >= 1.")
    _check_shapes(reward, discount=discount, last=last, v_t=v_t)

    def one_step_longer(_: int, target: Array) -> Array:
        following = jnp.concatenate([target[1:], v_t[-1:]])
        return reward + gamma * discount * jnp.where(last, v_t, following)

    one_step = reward + gamma * discount * v_t
    return lax.fori_loop(1, min(n, reward.shape[0]), one_step_longer, one_step)


def gae(reward: Array, discount: Array, last: Array, v_tm1: Array, v_t: Array, gamma: Scalar, lambda_: Scalar) -> Array:
    """Generalised advantages A_t = δ_t + γλ discount_t (1 - last_t) A_{t+1}, δ_t = r_t + γ discount_t v_t - v_tm1_t.

    Equal to `lambda_returns` minus `v_tm1` where the critic values each state once: `v_t` is the `v_tm1` of the next
    step within an episode. Source: Schulman et al. 2016 (GAE), equation 16.
    """
    _check_shapes(reward, discount=discount, last=last, v_tm1=v_tm1, v_t=v_t)
    discount = gamma * discount
    delta = reward + discount * v_t - v_tm1
    return _backward(delta, discount * jnp.where(last, 0.0, lambda_), jnp.zeros_like(delta[0]))
