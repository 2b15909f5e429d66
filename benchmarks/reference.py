"""A plain PPO loop, frozen: what `throughput.py --quick` measures jaxpg against. Do not make it faster.

One scan over iterations, written the way such loops usually are: gymnax's own auto-reset, GAE by a scan, and in every
epoch all samples in a fresh order by `jax.random.permutation`, for two separate networks of tanh units and Adam.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnax
import jax
import jax.numpy as jnp
import optax

Params = list[list[tuple[jax.Array, jax.Array]]]


class Settings(NamedTuple):
    """What the loop does."""

    num_envs: int
    num_steps: int
    epochs: int
    num_minibatches: int
    hidden: tuple[int, ...]
    learning_rate: float
    gamma: float
    gae_lambda: float
    clip: float
    entropy: float
    max_grad_norm: float


class Step(NamedTuple):
    """One step of every environment."""

    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    done: jax.Array


def layers(key: jax.Array, sizes: tuple[int, ...], gain: float) -> list[tuple[jax.Array, jax.Array]]:
    """Weights and biases of a multi-layer perceptron."""
    keys = jax.random.split(key, len(sizes) - 1)
    gains = [2.0**0.5] * (len(sizes) - 2) + [gain]
    shapes = zip(keys, gains, sizes[:-1], sizes[1:], strict=True)
    return [(jax.nn.initializers.orthogonal(g)(k, (a, b)), jnp.zeros(b)) for k, g, a, b in shapes]


def forward(network: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
    """The output of a perceptron with tanh units."""
    *inner, (weight, bias) = network
    for w, b in inner:
        x = jnp.tanh(x @ w + b)
    return x @ weight + bias


def loop(env_name: str, s: Settings) -> tuple[Any, Any]:
    """(init, iteration): key -> state, and (state, _) -> state, mean reward."""
    env, env_params = gymnax.make(env_name)
    actions = env.action_space(env_params).n
    size = int(jnp.prod(jnp.array(env.observation_space(env_params).shape)))
    optimizer = optax.chain(optax.clip_by_global_norm(s.max_grad_norm), optax.adam(s.learning_rate, eps=1e-5))
    reset, step_env = jax.vmap(env.reset, (0, None)), jax.vmap(env.step, (0, 0, 0, None))

    def init(key: jax.Array) -> Any:
        key, actor, critic, start = jax.random.split(key, 4)
        params = [layers(actor, (size, *s.hidden, actions), 0.01), layers(critic, (size, *s.hidden, 1), 1.0)]
        obs, states = reset(jax.random.split(start, s.num_envs), env_params)
        return key, params, optimizer.init(params), obs, states

    def look(params: Params, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        flat = obs.reshape(len(obs), -1).astype(jnp.float32)
        return jax.nn.log_softmax(forward(params[0], flat)), forward(params[1], flat)[..., 0]

    def act(carry: Any, key: jax.Array) -> tuple[Any, Step]:
        params, obs, states = carry
        action_key, step_key = jax.random.split(key)
        logits, value = look(params, obs)
        action = jax.random.categorical(action_key, logits)
        log_prob = jnp.take_along_axis(logits, action[:, None], 1)[:, 0]
        keys = jax.random.split(step_key, s.num_envs)
        following, states, reward, terminated, truncated, _ = step_env(keys, states, action, env_params)
        return (params, following, states), Step(obs, action, log_prob, value, reward, terminated | truncated)

    def advantages(steps: Step, last_value: jax.Array) -> jax.Array:
        def back(carry: tuple[jax.Array, jax.Array], step: Step) -> Any:
            advantage, value = carry
            goes_on = 1.0 - step.done
            delta = step.reward + s.gamma * value * goes_on - step.value
            advantage = delta + s.gamma * s.gae_lambda * goes_on * advantage
            return (advantage, step.value), advantage

        return jax.lax.scan(back, (jnp.zeros_like(last_value), last_value), steps, reverse=True)[1]

    def loss(params: Params, steps: Step, advantage: jax.Array, target: jax.Array) -> jax.Array:
        logits, value = look(params, steps.obs)
        log_prob = jnp.take_along_axis(logits, steps.action[:, None], 1)[:, 0]
        ratio = jnp.exp(log_prob - steps.log_prob)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - s.clip, 1 + s.clip) * advantage).mean()
        near = steps.value + jnp.clip(value - steps.value, -s.clip, s.clip)
        critic = 0.5 * jnp.maximum((value - target) ** 2, (near - target) ** 2).mean()
        entropy = -(jnp.exp(logits) * logits).sum(-1).mean()
        return policy + 0.5 * critic - s.entropy * entropy

    def minibatch(carry: Any, batch: Any) -> tuple[Any, None]:
        params, opt_state = carry
        updates, opt_state = optimizer.update(jax.grad(loss)(params, *batch), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    def iteration(state: Any, _: None) -> tuple[Any, jax.Array]:
        key, params, opt_state, obs, states = state
        key, act_key, shuffle_key = jax.random.split(key, 3)
        (_, obs, states), steps = jax.lax.scan(act, (params, obs, states), jax.random.split(act_key, s.num_steps))
        advantage = advantages(steps, look(params, obs)[1])
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (steps, advantage, advantage + steps.value))

        def epoch(carry: Any, key: jax.Array) -> tuple[Any, None]:
            order = jax.random.permutation(key, s.num_envs * s.num_steps)
            parts = jax.tree.map(lambda x: x[order].reshape(s.num_minibatches, -1, *x.shape[1:]), rows)
            return jax.lax.scan(minibatch, carry, parts)

        (params, opt_state), _ = jax.lax.scan(epoch, (params, opt_state), jax.random.split(shuffle_key, s.epochs))
        return (key, params, opt_state, obs, states), steps.reward.mean()

    return init, iteration
