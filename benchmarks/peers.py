"""The peers' programs for throughput.py, each imported where it is used: their environment has no jaxpg.

All do the work of work.py. Where a peer cannot, its docstring says what it does instead.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
from work import A2C, EPISODES, PPO, Program, Q, Workload, compiled, over_agents, whole_iterations


def rejax(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """rejax's PPO, its evaluation switched off: it would run inside the loop."""
    return _rejax_ppo(env_name, num_envs, agents, steps, PPO.max_grad_norm)


def rejax_limit_1(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """The same with a limit of 1; it clips each number of a gradient by itself, and not their norm."""
    return _rejax_ppo(env_name, num_envs, agents, steps, 1.0)


def rejax_unclipped(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """The same with gradients as they are."""
    return _rejax_ppo(env_name, num_envs, agents, steps, 1e9)


def _rejax_ppo(env_name: str, num_envs: int, agents: int, steps: int, limit: float) -> Workload:
    import rejax

    per_agent = whole_iterations(steps, num_envs, agents)
    settings = {
        "num_envs": num_envs,
        "num_steps": PPO.num_steps,
        "num_epochs": PPO.epochs,
        "num_minibatches": PPO.num_minibatches,
        "agent_kwargs": {"activation": "tanh", "hidden_layer_sizes": PPO.hidden},
        "learning_rate": PPO.learning_rate,
        "gamma": PPO.gamma,
        "gae_lambda": PPO.gae_lambda,
        "clip_eps": PPO.clip,
        "ent_coef": PPO.entropy,
        "vf_coef": PPO.value,
        "max_grad_norm": limit,
    }
    return _rejax(rejax.PPO, env_name, agents, per_agent, settings)


def rejax_dqn(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """rejax's DQN, not double; a time-out counts as a termination."""
    import rejax

    settings = _rejax_value_settings(num_envs, steps // agents) | {
        "agent_kwargs": {"activation": "relu"},
        "buffer_size": Q.buffer_size,
        "fill_buffer": Q.learning_starts,
        "batch_size": Q.batch_size,
        "target_update_freq": Q.target_every,
        "polyak": 0.0,  # else the target moves by a hundredth of the way then
        "num_epochs": 1,
        "ddqn": False,
    }
    return _rejax(rejax.DQN, env_name, agents, whole_iterations(steps, num_envs, agents, Q.num_steps), settings)


def rejax_pqn(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """rejax's PQN, with layer normalisation; a time-out counts as a termination."""
    import rejax

    settings = _rejax_value_settings(num_envs, steps // agents) | {
        "num_steps": Q.num_steps,
        "num_epochs": Q.epochs,
        "num_minibatches": Q.num_minibatches,
        "td_lambda": Q.gae_lambda,
    }
    return _rejax(rejax.PQN, env_name, agents, whole_iterations(steps, num_envs, agents, Q.num_steps), settings)


def _rejax_value_settings(num_envs: int, steps: int) -> dict[str, Any]:
    """Of DQN and PQN alike, for so many steps of an agent.

    The widths of their networks cannot be set; they are those of work.py.
    """
    return {
        "num_envs": num_envs,
        "learning_rate": Q.learning_rate,
        "gamma": Q.gamma,
        "max_grad_norm": Q.max_grad_norm,
        "eps_start": Q.epsilon_start,
        "eps_end": Q.epsilon_end,
        "exploration_fraction": min(1.0, Q.epsilon_steps / steps),
    }


def _rejax(kind: Any, env_name: str, agents: int, per_agent: int, settings: dict[str, Any]) -> Workload:
    """The loop of one of rejax's algorithms, without its evaluation."""
    from rejax.evaluate import evaluate

    algorithm = kind.create(
        env=env_name, total_timesteps=per_agent, eval_freq=per_agent, skip_initial_evaluation=True, **settings
    ).replace(eval_callback=lambda algorithm, train_state, key: ())
    keys = partial(jax.random.split, num=agents) if agents > 1 else lambda key: key

    def score(state: Any) -> jax.Array:
        act = algorithm.make_act(state)
        return evaluate(act, jax.random.key(0), algorithm.env, algorithm.env_params, EPISODES)[1].mean()

    return compiled(
        init=jax.jit(lambda key: over_agents(agents, algorithm.init_state)(keys(key))),
        run=over_agents(agents, lambda state: algorithm.train(train_state=state)),
        work=agents * per_agent,
        score=over_agents(agents, score),
    )


def purejaxrl(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """PureJaxRL's ppo.py, found on PYTHONPATH; every call begins anew and returns the info of every step."""
    return _purejaxrl("ppo", env_name, num_envs, agents, steps)


def purejaxrl_recurrent(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """PureJaxRL's ppo_rnn.py with a GRU as flax has it today, and heads without the hidden layers that jaxpg's lack."""
    import distrax
    from flax import linen

    width = 128  # as ppo_rnn.py has it

    class ScannedRNN(linen.Module):
        @partial(linen.scan, variable_broadcast="params", split_rngs={"params": False})
        @linen.compact
        def __call__(self, memory: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, first = inputs
            return linen.GRUCell(width)(jnp.where(first[:, None], 0.0, memory), x)

        @staticmethod
        def initialize_carry(batch_size: int, hidden_size: int) -> jax.Array:
            return jnp.zeros((batch_size, hidden_size))

    class ActorCriticRNN(linen.Module):
        action_dim: int
        config: Any

        @linen.compact
        def __call__(self, memory: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any, jax.Array]:
            obs, done = inputs
            memory, features = ScannedRNN()(memory, (linen.relu(linen.Dense(width)(obs)), done))
            head, value = linen.Dense(self.action_dim), linen.Dense(1)
            return memory, distrax.Categorical(logits=head(features)), value(features)[..., 0]

    return _purejaxrl(
        "ppo_rnn", env_name, num_envs, agents, steps, ScannedRNN=ScannedRNN, ActorCriticRNN=ActorCriticRNN
    )


def _purejaxrl(file: str, env_name: str, num_envs: int, agents: int, steps: int, **replaced: Any) -> Workload:
    """The loop of a file of PureJaxRL, some of whose names mean something else."""
    for name in ("navix", "brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training"):
        sys.modules[name] = MagicMock()  # only its environments of these packages need them
    module = importlib.import_module(file)
    vars(module).update(replaced)

    per_agent = whole_iterations(steps, num_envs, agents)
    train = module.make_train(
        {
            "ENV_NAME": env_name,
            "NUM_ENVS": num_envs,
            "NUM_STEPS": PPO.num_steps,
            "TOTAL_TIMESTEPS": per_agent,
            "UPDATE_EPOCHS": PPO.epochs,
            "NUM_MINIBATCHES": PPO.num_minibatches,
            "LR": PPO.learning_rate,
            "GAMMA": PPO.gamma,
            "GAE_LAMBDA": PPO.gae_lambda,
            "CLIP_EPS": PPO.clip,
            "ENT_COEF": PPO.entropy,
            "VF_COEF": PPO.value,
            "MAX_GRAD_NORM": PPO.max_grad_norm,
            "ACTIVATION": "tanh",
            "ANNEAL_LR": False,
            "DEBUG": False,
        }
    )
    keys = partial(jax.random.split, num=agents) if agents > 1 else lambda key: key

    def run(key: jax.Array) -> tuple[jax.Array, Any]:
        key, run_key = jax.random.split(key)
        return key, over_agents(agents, train)(keys(run_key))

    return compiled(init=lambda key: key, run=run, work=agents * per_agent)


def _baseline(
    algorithm: Callable[..., Any], env_name: str, num_envs: int, num_steps: int, steps: int, *, compiles: bool = False
) -> Workload:
    """A learner of the stable-baselines family on gymnasium's own environments, side by side in one process.

    One that compiles does so when it first learns, so `build` then takes a first iteration too.
    """
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    work = whole_iterations(steps, num_envs, 1, num_steps)
    seeds = itertools.count()
    make_envs = partial(make_vec_env, env_name)

    def build() -> Program:
        envs, seed = make_envs(num_envs), next(seeds)
        model = algorithm("MlpPolicy", envs, seed=seed, device="cpu")
        if compiles:
            model.learn(num_envs * num_steps)
        score = partial(evaluate_policy, model, make_envs(10), n_eval_episodes=EPISODES, deterministic=False)
        return Program(lambda: model.learn(work, reset_num_timesteps=False) and None, lambda: [score()[0]])

    return Workload(build, work)


BASELINE: dict[str, Any] = {
    "learning_rate": PPO.learning_rate,
    "n_epochs": PPO.epochs,
    "gamma": PPO.gamma,
    "gae_lambda": PPO.gae_lambda,
    "clip_range": PPO.clip,
    "ent_coef": PPO.entropy,
    "vf_coef": PPO.value,
    "max_grad_norm": PPO.max_grad_norm,
}
ARCHITECTURE = {"pi": list(PPO.hidden), "vf": list(PPO.hidden)}


def sb3(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """stable-baselines3's PPO on one torch thread; more threads make it slower at this size."""
    import stable_baselines3
    import torch

    torch.set_num_threads(1)
    algorithm = partial(
        stable_baselines3.PPO,
        **BASELINE,
        n_steps=PPO.num_steps,
        clip_range_vf=PPO.clip,
        batch_size=num_envs * PPO.num_steps // PPO.num_minibatches,
        policy_kwargs={"net_arch": ARCHITECTURE, "activation_fn": torch.nn.Tanh},
    )
    return _baseline(algorithm, env_name, num_envs, PPO.num_steps, steps)


def sbx(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """sbx's PPO, whose value loss is not clipped."""
    import sbx
    from flax import linen

    algorithm = partial(
        sbx.PPO,
        **BASELINE,
        n_steps=PPO.num_steps,
        batch_size=num_envs * PPO.num_steps // PPO.num_minibatches,
        policy_kwargs={"net_arch": ARCHITECTURE, "activation_fn": linen.tanh},
    )
    return _baseline(algorithm, env_name, num_envs, PPO.num_steps, steps, compiles=True)


def sb3_a2c(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """stable-baselines3's A2C with Adam, on one torch thread."""
    import stable_baselines3
    import torch

    torch.set_num_threads(1)
    algorithm = partial(
        stable_baselines3.A2C,
        n_steps=A2C.num_steps,
        learning_rate=A2C.learning_rate,
        gamma=A2C.gamma,
        gae_lambda=A2C.gae_lambda,
        ent_coef=A2C.entropy,
        vf_coef=A2C.value,
        max_grad_norm=A2C.max_grad_norm,
        use_rms_prop=False,
        policy_kwargs={"net_arch": ARCHITECTURE, "activation_fn": torch.nn.Tanh},
    )
    return _baseline(algorithm, env_name, num_envs, A2C.num_steps, steps)


def sb3_dqn(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """stable-baselines3's DQN with its Huber loss, on one torch thread."""
    import stable_baselines3
    import torch

    torch.set_num_threads(1)
    algorithm = partial(
        stable_baselines3.DQN,
        learning_rate=Q.learning_rate,
        gamma=Q.gamma,
        buffer_size=Q.buffer_size,
        batch_size=Q.batch_size,
        learning_starts=Q.learning_starts,
        train_freq=1,
        gradient_steps=1,
        target_update_interval=Q.target_every,
        exploration_initial_eps=Q.epsilon_start,
        exploration_final_eps=Q.epsilon_end,
        max_grad_norm=Q.max_grad_norm,
        policy_kwargs={"net_arch": list(Q.hidden)},
    )
    return _baseline(algorithm, env_name, num_envs, Q.num_steps, steps)


def brax(env_name: str, num_envs: int, agents: int, devices: int, steps: int) -> Workload:
    """Brax's PPO on gymnax's environment: it shuffles whole segments, not steps, and squashes its actions.

    Its `train` is a loop of its own around a compiled epoch, so it runs in a thread that waits for its turn
    wherever an epoch has ended; what `build` takes is the first epoch, compilation included.
    """
    import gymnax

    # Brax 0.14.2 calls a function that jax 0.10 no longer has; this is what it did.
    jax.device_put_replicated = lambda tree, devices: jax.tree.map(lambda x: jnp.stack([x] * len(devices)), tree)
    from brax.envs.base import Env, State
    from brax.training.agents.ppo import networks, train

    inner, params = gymnax.make(env_name)
    space = inner.action_space(params)

    class Adapted(Env):
        def reset(self, key: jax.Array) -> State:
            key, reset_key = jax.random.split(key)
            obs, state = inner.reset(reset_key, params)
            zero = jnp.zeros(())
            return State((state, key), obs, zero, zero, {}, {})

        def step(self, state: State, action: jax.Array) -> State:
            inside, key = state.pipeline_state
            key, step_key = jax.random.split(key)
            action = space.low + (space.high - space.low) * (action + 1) / 2
            obs, inside, reward, done, _ = inner.step_env(step_key, inside, action, params)
            return state.replace(
                pipeline_state=(inside, key), obs=obs, reward=reward.astype(float), done=done.astype(float)
            )

        observation_size = inner.observation_space(params).shape[0]
        action_size = space.shape[0]
        backend = "none"

    work = whole_iterations(steps, num_envs, 1)
    turn, done = threading.Semaphore(0), threading.Semaphore(0)

    def progress(*_: Any) -> None:
        done.release()
        turn.acquire()

    def once() -> None:
        turn.release()
        done.acquire()

    def epochs(**settings: Any) -> None:
        try:
            train.train(Adapted(), **settings)
        finally:
            done.release()  # or an error would leave the other thread waiting

    def build() -> Program:
        settings = {
            "num_timesteps": 10_000 * work,
            "num_evals": 10_001,
            "run_evals": False,
            "progress_fn": progress,
            "episode_length": params.max_steps_in_episode,
            "num_envs": num_envs,
            "unroll_length": PPO.num_steps,
            "batch_size": num_envs // PPO.num_minibatches,
            "num_minibatches": PPO.num_minibatches,
            "num_updates_per_batch": PPO.epochs,
            "learning_rate": PPO.learning_rate,
            "discounting": PPO.gamma,
            "gae_lambda": PPO.gae_lambda,
            "entropy_cost": PPO.entropy,
            "vf_loss_coefficient": PPO.value,
            "clipping_epsilon": PPO.clip,
            "clipping_epsilon_value": PPO.clip,
            "max_grad_norm": PPO.max_grad_norm,
            "network_factory": partial(
                networks.make_ppo_networks,
                policy_hidden_layer_sizes=PPO.hidden,
                value_hidden_layer_sizes=PPO.hidden,
                activation=jnp.tanh,
            ),
        }
        thread = threading.Thread(target=partial(epochs, **settings), daemon=True)
        thread.start()
        done.acquire()
        if not thread.is_alive():
            raise SystemExit("Brax's training ended before its first epoch did.")
        return Program(once)

    return Workload(build, work)
