"""Parts of an algorithm that would train something else, unnoticed: refused in a sentence, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from jaxpg import envs, ladder, language, networks, update, values
from jaxpg.algorithm import PolicyGradient
from jaxpg.errors import UserError
from jaxpg.models.distributions import Categorical
from jaxpg.objectives import advantages, loss_weights, surrogates
from jaxpg.policy_gradient import policy_gradient
from jaxpg.rollout import continuing, episodic
from jaxpg.types import Array, Box, Discrete, Params

ENV = tiny.counter()
PPO = partial(ladder.ppo, num_envs=4, num_steps=4, num_minibatches=2, epochs=1)


def trace(algorithm: PolicyGradient) -> Any:
    """One update, traced and not run."""
    learner = policy_gradient(
        tiny.counter(), tiny.softmax_policy(jnp.zeros((2, 3))), tiny.value_table(jnp.zeros(2)), algorithm
    )
    key = jax.random.key(0)
    return jax.eval_shape(learner.step, jax.eval_shape(learner.init, key), key)


def mean_of(loss: Callable[..., Array], axis: int | None) -> Callable[..., Array]:
    return lambda *arguments: loss(*arguments).mean(axis)


def columns(steps: Any, *arguments: Array, **settings: Any) -> advantages.Credit:
    credit = advantages.reward_to_go(steps, *arguments, **settings)
    return credit._replace(advantage=credit.advantage.sum(0))


def target_of_columns(steps: Any, *arguments: Array, **settings: Any) -> advantages.Credit:
    credit = advantages.reward_to_go(steps, *arguments, **settings)
    return credit._replace(target=credit.target.mean(0))


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({"surrogate": mean_of(surrogates.importance_ratio, None)}, "surrogate"),
        ({"surrogate": mean_of(surrogates.importance_ratio, 0)}, "surrogate"),
        ({"value_loss": mean_of(surrogates.squared_error, None)}, "value_loss"),
        ({"credit": columns}, "credit"),
        ({"loss_weights": lambda mask: 1 / mask.sum()}, "loss_weights"),
        ({"credit": target_of_columns}, "credit's target"),
        ({"normalize": lambda advantage, mask: advantage.mean()}, "normalize"),
        ({"normalize": lambda advantage, mask: advantage.mean(0)}, "normalize"),
    ],
)
def test_a_part_gives_one_number_per_step(parts: dict[str, Any], name: str) -> None:
    trace(PPO())
    with pytest.raises(UserError, match=rf"algorithm's {name} must give one number per step, \[\d+, \d+\] here"):
        trace(PPO()._replace(**parts))


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"surrogate": lambda *arguments: None}, r"surrogate must give one number per step, \[1, 8\] here, not None"),
        ({"surrogate": lambda x, *arguments: (x, x)}, r"surrogate must give .*, not a tuple"),
        ({"value_loss": lambda *arguments: None}, r"value_loss must give .*, not None"),
        ({"loss_weights": lambda mask: [mask]}, r"loss_weights must give .*, not a list"),
        ({"normalize": lambda advantage, mask: None}, r"normalize must give .*, not None"),
        ({"credit": lambda *arguments, gamma: None}, r"credit must give an advantages.Credit, not a NoneType"),
        ({"credit": lambda steps, *arguments, gamma: (steps.reward,) * 3}, r"an advantages.Credit, not a tuple"),
    ],
)
def test_a_part_gives_arrays(parts: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        trace(PPO()._replace(**parts))


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({"credit": partial(advantages.group_relative, group_size=2)}, "group_relative"),
        ({"credit": partial(advantages.leave_one_out, group_size=2)}, "leave_one_out"),
        ({"loss_weights": loss_weights.per_episode}, "per_episode"),
        ({"loss_weights": partial(loss_weights.per_episode_over, length=4)}, "per_episode_over"),
        ({"surrogate": surrogates.per_episode(surrogates.importance_ratio)}, "PerEpisode"),
    ],
)
def test_parts_of_whole_episodes_are_refused_on_segments(parts: dict[str, Any], name: str) -> None:
    trace(PPO(num_steps=None)._replace(**parts, collector=episodic(num_envs=4, group_size=2)))
    with pytest.raises(UserError, match=rf"\({name}\) needs whole episodes, but the collector returns segments"):
        trace(PPO()._replace(**parts))


@pytest.mark.parametrize(
    "algorithm",
    [
        ladder.grpo(num_envs=4, group_size=2, num_minibatches=1)._replace(collector=episodic(num_envs=4, group_size=4)),
        PPO(num_steps=None)._replace(credit=partial(advantages.group_relative, group_size=2), value_loss=None),
    ],
    ids=["another collector", "another credit"],
)
def test_groups_that_do_not_share_their_start_are_refused(algorithm: PolicyGradient) -> None:
    with pytest.raises(
        UserError, match=r"credit \(group_relative\) uses groups of 2 .* collector makes groups of [14]"
    ):
        trace(algorithm)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (partial(PPO, epochs=0), "epochs must be at least 1, not 0"),
        (partial(PPO, num_minibatches=0), "num_minibatches must be at least 1, not 0"),
        (partial(PPO, num_envs=2.5), "num_envs must be a whole number, not 2.5"),
        (partial(PPO, num_steps=True), "num_steps must be a whole number, not True"),
        (partial(PPO, anneal_steps=0), "anneal_steps must be at least 1, not 0"),
        (partial(ladder.reinforce, num_envs=-1), "num_envs must be at least 1, not -1"),
        (partial(ladder.grpo, group_size=1), "group_size must be at least 2, not 1"),
        (partial(ladder.dapo, num_envs=12), "num_envs = 12 cannot be cut into groups of group_size = 8: make it a mul"),
        (partial(episodic, num_envs=4, group_size=0), "group_size must be at least 1, not 0"),
        (partial(ladder.trpo, value_epochs=0), "value_epochs must be at least 1, not 0"),
        (partial(values.dqn, batch_size=0), "batch_size must be at least 1, not 0"),
        (partial(continuing, num_envs=1, num_steps=0), "num_steps must be at least 1, not 0"),
        (partial(continuing, num_envs=1, num_steps=2.5), r"num_steps must be a whole number, not 2\.5"),
        (partial(episodic, num_envs=0), "num_envs must be at least 1, not 0"),
        (
            lambda: jax.vmap(lambda n: PPO(epochs=n).gamma)(jnp.array([1, 2])),
            "epochs must .* cannot be traced or mapped",
        ),
    ],
)
def test_sizes_are_whole_numbers_from_one_on(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make()


def test_sizes_may_be_of_numpy_and_none() -> None:
    assert PPO(num_envs=np.int64(4), num_steps=None, chunk_rows=None).collector.num_envs == 4


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"gamma": "0.9"}, "gamma must be a number, not '0.9'"),
        ({"gamma": None}, "gamma must be a number, not None"),
        ({"gamma": True}, "gamma must be a number, not True"),
        ({"gamma": jnp.float32(1.5)}, "gamma must be at most 1, not 1.5"),
        ({"gamma": np.array(1.5)}, "gamma must be at most 1, not 1.5"),
        ({"clip": None}, "clip must be a number, not None"),
        ({"normalize_advantages": "false"}, "normalize_advantages must be True or False, not 'false'"),
        ({"normalize_advantages": jnp.array([True])}, "normalize_advantages must be True or False, not "),
        (
            {"learning_rate": optax.constant_schedule(0.1)},
            r"learning_rate must be .*algorithm\._replace\(learning_rate",
        ),
    ],
)
def test_settings_are_of_their_kind(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        PPO(**settings)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"env": "CartPole-v1"}, "takes a record Env: .*, not 'CartPole-v1'"),
        ({"policy": "mlp"}, "takes a record Policy"),
        ({"critic": tiny.softmax_policy(jnp.zeros((2, 3)))}, "takes a record Critic"),
        ({"algorithm": "ppo"}, r"takes a record PolicyGradient: ladder.ppo\(\), not 'ppo'"),
        ({"algorithm": ladder.ppo}, "takes a record PolicyGradient"),
        ({"algorithm": PPO()._replace(learning_rate=1e-3)}, "learning_rate of an algorithm is a function, not 0.001"),
        ({"algorithm": PPO()._replace(optimizer=optax.scale_by_adam())}, "optimizer of an algorithm is a function"),
    ],
)
def test_records_are_of_their_kind(given: dict[str, Any], sentence: str) -> None:
    sound = {
        "env": tiny.counter(),
        "policy": tiny.softmax_policy(jnp.zeros((2, 3))),
        "critic": tiny.value_table(jnp.zeros(2)),
        "algorithm": PPO(),
    }
    with pytest.raises(UserError, match=sentence):
        policy_gradient(**(sound | given))


def test_a_sampler_compares_episodes_by_the_discount_of_the_algorithm() -> None:
    algorithm = ladder.dapo(num_envs=8, group_size=4, gamma=0.9)
    policy = tiny.softmax_policy(jnp.zeros((2, 3)))
    policy_gradient(tiny.counter(), policy, None, algorithm)
    for gamma in (0.5, 0.95):  # less than the sampler's, and more
        sentence = rf"gamma of this algorithm is {gamma}, .* a gamma of 0\.9: .* ladder\.dapo\(gamma={gamma}\)"
        with pytest.raises(UserError, match=sentence):
            policy_gradient(tiny.counter(), policy, None, algorithm._replace(gamma=gamma))
    jax.jit(lambda gamma: policy_gradient(tiny.counter(), policy, None, algorithm._replace(gamma=gamma)) and gamma)(0.5)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: networks.mlp("CartPole-v1"), r'A network takes a record Env: envs\.make\("CartPole-v1"\), not'),
        (lambda: networks.cnn("Breakout-MinAtar"), "A network takes a record Env"),
        (lambda: networks.recurrent("CartPole-v1"), "A network takes a record Env"),
        (lambda: values.mlp("CartPole-v1"), "A network takes a record Env"),
        (lambda: language.transformer("sort"), "A transformer takes a record Env"),
        (lambda: envs.text.text_env("sort"), "text_env takes a record Task: .*, not 'sort'"),
        (lambda: values.deep_q("CartPole-v1", values.mlp(ENV), values.dqn()), "deep_q takes a record Env"),
        (
            lambda: values.deep_q(ENV, values.mlp(ENV), values.dqn),
            r"takes a record DeepQ: values\.dqn\(\), not <function",
        ),
        (lambda: values.deep_q(ENV, networks.mlp(ENV), values.dqn()), r"takes a torso, a module of flax: values\.mlp"),
        (lambda: values.tabular_control("frozen_lake", values.sarsa()), "tabular_control takes a record Env"),
        (lambda: values.tabular_control(ENV, "sarsa"), "tabular_control takes a record TabularControl"),
        (lambda: tabular(epsilon=0.1), r"The epsilon of an algorithm is a function, not 0\.1"),
        (lambda: tabular(learning_rate=0.1), r"The learning_rate of an algorithm is a function, not 0\.1"),
        (lambda: tabular(gamma="0.9"), r"The gamma of an algorithm is one number, not '0\.9'"),
        (lambda: tabular(gamma=2.0), r"gamma must be .* not 2\.0"),
        (lambda: tabular(num_steps="8"), "num_steps must be a whole number, not '8'"),
        (lambda: tabular(num_tables=3), "num_tables must be 1 or 2, not 3"),
    ],
)
def test_what_builds_a_learner_takes_records(build: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build()


def tabular(**changes: Any) -> Any:
    return values.tabular_control(envs.make("frozen_lake"), values.q_learning()._replace(**changes))


@pytest.mark.parametrize("num_steps", [4, None])
def test_minibatches_divide_the_batch(num_steps: int | None) -> None:
    with pytest.raises(UserError, match=r"num_minibatches = 3 does not divide a batch of 16 rows"):
        trace(PPO(num_steps=num_steps, num_minibatches=3))


@pytest.mark.parametrize("settings", [{"hidden": 64}, {"hidden": "64"}, {"hidden": (64, 0)}, {"hidden": (6.5,)}])
def test_widths_are_a_list(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"hidden must be a list of whole numbers from 1 on, such as \(64, 64\), not"):
        networks.mlp(tiny.counter(), **settings)


def test_kernels_are_a_list() -> None:
    with pytest.raises(UserError, match=r"kernels must be a list of whole numbers from 1 on"):
        networks.cnn(tiny.pictures(tiny.counter()), kernels=3)  # type: ignore[arg-type]


def deep_q(algorithm: values.DeepQ) -> Any:
    """One update of a small network, traced and not run."""
    learner = values.deep_q(ENV, values.mlp(ENV, hidden=(4,)), algorithm)
    return jax.eval_shape(learner.step, jax.eval_shape(learner.init, jax.random.key(0)), jax.random.key(0))


DQN, PQN = values.dqn(num_envs=2, batch_size=4, buffer_size=16), values.pqn(num_envs=2, num_steps=4, num_minibatches=1)


def test_an_optimizer_that_descends_is_refused() -> None:
    trace(PPO()._replace(optimizer=optax.scale_by_adam))
    deep_q(DQN._replace(optimizer=optax.scale_by_adam))
    for descending in (partial(optax.adam, 3e-4), lambda: optax.sgd(0.1)):
        for made in (lambda x: trace(PPO()._replace(optimizer=x)), lambda x: deep_q(DQN._replace(optimizer=x))):
            with pytest.raises(UserError, match="optimizer of this algorithm returns updates that include the sign"):
                made(descending)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: optax.multi_transform(
            {"slow": optax.scale_by_adam(), "fast": optax.chain(optax.scale_by_adam(), optax.scale(3.0))},
            Params("slow", "fast"),
        ),
        lambda: optax.multi_transform(
            {"slow": optax.scale_by_adam(), "fast": optax.scale_by_rms()}, lambda params: Params("slow", "fast")
        ),
        lambda: optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(1e-4, mask=Params(True, False))),
        lambda: optax.masked(optax.set_to_zero(), lambda params: jax.tree.map(lambda x: x.ndim == 2, params)),
        lambda: optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(optax.linear_schedule(0.0, 1.0, 100))),
    ],
    ids=["labels", "a function of labels", "decay", "a mask", "a warm-up"],
)
def test_an_optimizer_may_tell_parameters_apart_and_begin_with_nothing(optimizer: Any) -> None:
    trace(PPO()._replace(optimizer=optimizer))


def test_labels_hide_no_sign() -> None:
    wrong = {"slow": optax.scale_by_adam(), "fast": optax.sgd(0.1)}  # less than what the other one climbs
    with pytest.raises(UserError, match="include the sign"):
        trace(PPO()._replace(optimizer=lambda: optax.multi_transform(wrong, Params("slow", "fast"))))


def test_labels_of_the_parameters_themselves_hide_no_sign() -> None:
    """One decays kernels alone, and is for no other tree than that of the networks' own parameters."""
    policy, critic = networks.mlp(tiny.counter(), hidden=(4,))
    params = jax.eval_shape(lambda key: Params(policy.init(key), critic.init(key)), jax.random.key(0))
    labels = jax.tree.map(lambda x: "kernel" if x.ndim == 2 else "bias", params)

    def make(kernel: Any, bias: Any, *behind: Any) -> None:
        parts = optax.multi_transform({"kernel": kernel, "bias": bias}, labels)
        policy_gradient(tiny.counter(), policy, critic, PPO()._replace(optimizer=lambda: optax.chain(parts, *behind)))

    make(optax.scale_by_adam(), optax.scale_by_rms())
    make(optax.adamw(1.0), optax.adam(1.0), optax.scale(-1.0))
    with pytest.raises(UserError, match=r"include the sign.*optax.scale\(-1.0\)"):
        make(optax.scale_by_adam(), optax.adam(1.0))


@pytest.mark.parametrize("field", ["gamma", "entropy_coefficient", "value_coefficient", "reference_rate"])
def test_a_number_is_no_schedule(field: str) -> None:
    with pytest.raises(UserError, match=f"The {field} of an algorithm is a number, .*adaptation"):
        trace(PPO()._replace(**{field: optax.linear_schedule(0.1, 0.0, 100)}))
    with pytest.raises(UserError, match="The surrogate of an algorithm is a function, not None"):
        trace(PPO()._replace(surrogate=None))  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["epsilon", "learning_rate"])
def test_a_schedule_of_action_values_is_a_function(field: str) -> None:
    with pytest.raises(UserError, match=f"The {field} of an algorithm is a function, not 0.1"):
        deep_q(DQN._replace(**{field: 0.1}))  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", [DQN, PQN], ids=["dqn", "pqn"])
@pytest.mark.parametrize("loss", [lambda p, t: (p - t) ** 2, lambda p, t: ((p - t) ** 2).mean()], ids=["[R, 1]", "[]"])
def test_a_loss_of_action_values_gives_one_number_per_row(algorithm: values.DeepQ, loss: Any) -> None:
    """Both arguments are `[R, N]`, and `[R, 1]` would be broadcast against the weights `[R]`."""
    deep_q(algorithm)
    with pytest.raises(UserError, match="algorithm's loss must give one number per step"):
        deep_q(algorithm._replace(loss=loss))


def test_a_target_network_may_be_left_out() -> None:
    learner = values.deep_q(ENV, values.mlp(ENV, hidden=(4,)), DQN._replace(move_target=None))
    state, _ = jax.jit(learner.step)(learner.init(jax.random.key(0)), jax.random.key(0))
    assert state.target == ()


NARROW = Box(np.zeros(1, np.float32), np.ones(1, np.float32))


@pytest.mark.parametrize(
    ("made_for", "sentence"),
    [
        (ENV._replace(action_space=Discrete(5)), r"is one of 3 integers, and .* gives int32\[\], one of 5"),
        (ENV._replace(action_space=NARROW), r"is one of 3 integers, and .* gives float32\[1\]\."),
    ],
)
def test_a_policy_has_the_actions_of_its_environment(made_for: Any, sentence: str) -> None:
    """Others would be broadcast, or clamped where the environment looks them up."""
    learner = policy_gradient(ENV, *networks.mlp(made_for, hidden=(4,)), PPO())
    with pytest.raises(UserError, match=sentence):
        jax.eval_shape(learner.init, jax.random.key(0))
    wide = ENV._replace(action_space=Box(np.zeros(2, np.float32), np.ones(2, np.float32)))
    learner = policy_gradient(wide, *networks.mlp(ENV._replace(action_space=NARROW), hidden=(4,)), PPO())
    with pytest.raises(UserError, match=r"is \[2\] real numbers, and the policy's distribution gives float32\[1\]"):
        jax.eval_shape(learner.init, jax.random.key(0))


def test_an_optimizer_with_a_traced_setting_is_not_tried() -> None:
    def norm(decay: Array) -> Array:
        algorithm = PPO()._replace(optimizer=lambda: optax.scale_by_rms(decay))
        learner = policy_gradient(
            tiny.counter(), tiny.softmax_policy(jnp.zeros((2, 3))), tiny.value_table(jnp.zeros(2)), algorithm
        )
        return learner.step(learner.init(jax.random.key(0)), jax.random.key(1))[1]["gradient_norm"]

    assert jnp.isfinite(jax.jit(norm)(0.9))
    assert jnp.isfinite(jax.vmap(norm)(jnp.array([0.9, 0.99]))).all()


def test_an_optimizer_that_wants_the_loss_is_refused() -> None:
    for make in (optax.contrib.reduce_on_plateau, lambda: optax.chain(optax.contrib.reduce_on_plateau())):
        with pytest.raises(UserError, match=r"this one wants more: .*required keyword-only argument: 'value'"):
            trace(PPO()._replace(optimizer=make))


def test_a_trust_region_needs_the_kl_of_the_distribution() -> None:
    class Mine(NamedTuple):
        """A Categorical without a KL."""

        logits: Array
        noise = Categorical.noise
        at = Categorical.at
        sample = Categorical.sample
        log_prob = Categorical.log_prob
        log_prob_and_entropy = Categorical.log_prob_and_entropy
        mode = Categorical.mode

    inside = tiny.softmax_policy(jnp.zeros((2, 3)))

    def act(params: Any, memory: Any, obs: Any) -> Any:
        distribution, memory = inside.act(params, memory, obs)
        return Mine(distribution.logits), memory

    policy = inside._replace(act=act, evaluate=lambda *rest: Mine(inside.evaluate(*rest).logits))
    algorithm = ladder.trpo(num_envs=4, num_steps=4, value_minibatches=1)
    learner = policy_gradient(tiny.counter(), policy, tiny.value_table(jnp.zeros(2)), algorithm)
    with pytest.raises(UserError, match=r"a Mine, the method kl\(other\)"):
        jax.eval_shape(learner.step, learner.init(jax.random.key(0)), jax.random.key(0))


def test_negative_weights_turn_the_step_around() -> None:
    """On whole episodes as on segments: where a weight is 0 nothing counts, below it everything does."""
    of_episodes = partial(ladder.grpo, num_envs=4, group_size=2, num_minibatches=1, epochs=1)
    for make in (of_episodes, partial(ladder.a2c, num_envs=4, num_steps=4)):
        moved = []
        for sign in (1, -1):
            algorithm = make(learning_rate=0.1, max_grad_norm=None)
            usual = algorithm.loss_weights
            algorithm = algorithm._replace(
                optimizer=update.sgd, loss_weights=lambda mask, sign=sign, usual=usual: sign * usual(mask)
            )
            critic = tiny.value_table(jnp.zeros(2)) if algorithm.value_loss else None
            learner = policy_gradient(tiny.counter(), tiny.softmax_policy(jnp.zeros((2, 3))), critic, algorithm)
            state = learner.init(jax.random.key(0))
            after, _ = tiny.jit(learner.step)(state, jax.random.key(1))
            moved.append(after.params.policy - state.params.policy)
        assert np.abs(moved[0]).max() > 1e-3
        np.testing.assert_allclose(moved[1], -moved[0], rtol=1e-4)


def test_parameters_keep_their_type_and_belong_to_who_gave_them() -> None:
    """Those of bfloat16 through every kind of update; those of `with_policy` although the state is donated."""
    env, given = tiny.counter(), jnp.zeros((2, 3), jnp.bfloat16)
    for make in (partial(ladder.a2c, num_envs=4, num_steps=4), PPO):
        for seed in range(2):
            policy, critic = tiny.softmax_policy(jnp.zeros_like(given)), tiny.value_table(jnp.zeros(2))
            learner = policy_gradient(env, policy, critic, make())
            step = jax.jit(learner.step, donate_argnums=0)
            state, _ = step(learner.with_policy(learner.init(jax.random.key(seed)), given), jax.random.key(seed))
            assert state.params.policy.dtype == jnp.bfloat16
        assert not given.is_deleted()


def test_an_axis_of_the_users_own_joins_no_runs() -> None:
    learner = policy_gradient(
        tiny.counter(), tiny.softmax_policy(jnp.zeros((2, 3))), tiny.value_table(jnp.zeros(2)), PPO()
    )

    def train(key: Array) -> Any:
        state, metrics = learner.step(learner.init(key), key)
        return state.params, metrics

    keys = jax.random.split(jax.random.key(0), 3)
    apart, named = jax.vmap(train)(keys), jax.vmap(train, axis_name="data")(keys)
    jax.tree.map(np.testing.assert_array_equal, apart, named)
