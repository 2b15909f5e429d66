"""The edges of the ladder: what each one changes; and every setting of a rung has an effect, a type and a meaning."""

from __future__ import annotations

import inspect
import typing
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpg import ladder, networks, update
from jaxpg.ladder_settings import PARENTS
from jaxpg.policy_gradient import policy_gradient
from jaxpg.types import Transition

ROOT = {
    "num_envs": 16,
    "learning_rate": 3e-3,
    "anneal_steps": None,
    "max_grad_norm": None,
    "adam_eps": 1e-5,
    "gamma": 0.99,
    "entropy_coefficient": 0.0,
    "normalize_advantages": False,
}
# child: (parent, fields that differ when both have the child's settings, new or changed defaults, settings dropped)
EDGES = {
    "reinforce_to_go": ("reinforce", {"credit"}, {}, ()),
    "reinforce_baseline": ("reinforce_to_go", {"credit"}, {"baseline_kind": "batch", "baseline_rate": 0.1}, ()),
    "actor_critic_mc": (
        "reinforce_baseline",
        {"credit", "value_loss", "value_coefficient"},
        {"value_coefficient": 0.5},
        ("baseline_kind", "baseline_rate"),
    ),
    "actor_critic_td": (
        "actor_critic_mc",
        {"collector", "credit", "loss_weights"},
        {"num_envs": 1, "num_steps": 16},
        (),
    ),
    "a2c": ("actor_critic_td", {"credit"}, {"num_envs": 16, "gae_lambda": 1.0, "reset_pool": 0}, ()),
    "trpo": (
        "a2c",
        {"surrogate", "update"},
        {
            "num_steps": 128,
            "gae_lambda": 0.97,
            "normalize_advantages": True,
            "max_kl": 0.01,
            "conjugate_steps": 10,
            "damping": 0.1,
            "backtracks": 10,
            "value_epochs": 10,
            "value_minibatches": 4,
        },
        (),
    ),
    "ppo": (
        "a2c",
        {"surrogate", "update"},
        {
            "num_envs": 64,
            "num_steps": 128,
            "learning_rate": 2.5e-4,
            "max_grad_norm": 2.0,
            "gae_lambda": 0.95,
            "normalize_advantages": True,
            "clip": 0.2,
            "clip_high": None,
            "dual_clip": None,
            "value_clip": None,
            "epochs": 4,
            "num_minibatches": 4,
            "target_kl": None,
            "chunk_rows": None,
        },
        (),
    ),
    "rlhf": (
        "ppo",
        {"collector", "reference_kl"},
        {
            "max_grad_norm": 1.0,
            "gamma": 1.0,
            "gae_lambda": 1.0,
            "kl": "reward_k1",
            "kl_coefficient": 0.05,
            "reference_rate": 0.0,
            "reference_kl_target": None,
            "kl_gain": 0.1,
        },
        ("num_steps", "reset_pool"),
    ),
    "grpo": (
        "ppo",
        {"collector", "credit", "loss_weights", "value_loss", "reference_kl"},
        {
            "max_grad_norm": 1.0,
            "gamma": 1.0,
            "group_size": 8,
            "kl": "loss_k3",
            "kl_coefficient": 0.04,
            "reference_rate": 0.0,
            "normalize_advantages": False,
        },
        ("num_steps", "reset_pool", "gae_lambda", "value_clip", "value_coefficient"),
    ),
    "process_grpo": ("grpo", {"credit"}, {}, ()),
    "rloo": ("grpo", {"credit"}, {}, ()),
    "dr_grpo": ("grpo", {"credit", "loss_weights"}, {"max_length": inspect.Parameter.empty}, ()),
    "gspo": ("grpo", {"surrogate"}, {"clip": 3e-4, "clip_high": 4e-4}, ()),
    "dapo": (
        "grpo",
        {"collector", "loss_weights", "reference_kl"},
        {"clip_high": 0.28, "max_resample_rounds": 4, "overlong_filtering": False},
        ("kl", "kl_coefficient", "reference_rate"),
    ),
    "cispo": ("dapo", {"surrogate"}, {"clip": 1.0}, ("dual_clip",)),
}

# Another value of the settings for which none follows from the default.
ANOTHER = {
    "anneal_steps": 1000,
    "max_grad_norm": 0.25,
    "clip_high": 0.3,
    "dual_clip": 3.0,
    "value_clip": 0.1,
    "target_kl": 0.02,
    "chunk_rows": 32,
    "baseline_kind": "running",
    "kl": "loss_k2",
    "reference_kl_target": 6.0,
}
# Settings that are read only beside another.
BESIDE = {"kl_gain": {"reference_kl_target": 6.0}}
NAMES = tuple(ladder.ALGORITHMS)
SETTINGS = [(name, setting) for name in NAMES for setting in inspect.signature(ladder.ALGORITHMS[name]).parameters]


def defaults(name):
    return {p.name: p.default for p in inspect.signature(ladder.ALGORITHMS[name]).parameters.values()}


def make(name, **settings):
    required = {"max_length": 7} if name == "dr_grpo" else {}
    return ladder.ALGORITHMS[name](**required | settings)


def changed_fields(child, parent):
    """The fields in which two records differ. Functions with bound arguments are equal if both parts are."""

    def comparable(part):
        if isinstance(part, partial):
            bound = {name: comparable(value) for name, value in part.keywords.items()}
            return comparable(part.func), comparable(part.args), bound
        return tuple(map(comparable, part)) if isinstance(part, tuple) else part

    rows = zip(child._fields, child, parent, strict=True)
    return {name for name, ours, theirs in rows if comparable(ours) != comparable(theirs)}


def test_every_algorithm_and_its_parent_are_pinned():
    assert defaults("reinforce") == ROOT
    assert {child: PARENTS.get(child) for child in NAMES} == {
        "reinforce": None,
        **{child: parent for child, (parent, *_) in EDGES.items()},
    }
    assert tuple(ladder.ALGORITHMS) == NAMES


@pytest.mark.parametrize("child", EDGES)
def test_an_edge_changes_the_pinned_fields_and_defaults(child):
    parent, fields, changes, drops = EDGES[child]
    new, old = defaults(child), defaults(parent)
    settings = {k: v for k, v in new.items() if v is not inspect.Parameter.empty}
    shared = {k: v for k, v in settings.items() if k in old}
    changed = changed_fields(make(child, **settings), make(parent, **shared))
    print(f"{child:20} {parent:20} {', '.join(sorted(changed))}")
    assert changed == fields
    assert {k: v for k, v in new.items() if k not in old or old[k] != v} == changes
    assert old.keys() - new.keys() == set(drops)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_settings_give_the_same_record(name):
    assert changed_fields(make(name), make(name)) == set()


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_every_setting_is_read(name, setting):
    default = 7 if setting == "max_length" else defaults(name)[setting]
    if setting in ANOTHER:
        other = ANOTHER[setting]
    elif isinstance(default, bool):
        other = not default
    else:
        other = default / 2 or 1.0 if isinstance(default, float) else default * 2 or 1
    beside = BESIDE.get(setting, {})
    assert changed_fields(make(name, **{setting: other}, **beside), make(name, **beside))


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_every_setting_is_explained_once_in_its_line_of_ancestors(name, setting):
    ancestor, explanations = name, 0
    while ancestor:
        explanations += f"\n    {setting}: " in inspect.getdoc(ladder.ALGORITHMS[ancestor])
        ancestor = PARENTS.get(ancestor)
    assert explanations == 1


@pytest.mark.parametrize("child", EDGES)
def test_inherited_settings_have_the_type_that_the_parent_states(child):
    """mypy sees only that the parent accepts them: a TypedDict could forget that a setting may be none or traced."""
    parameters = inspect.signature(inspect.unwrap(ladder.ALGORITHMS[child]), eval_str=True).parameters
    (inherited,) = typing.get_args(parameters["inherited"].annotation)
    parent = inspect.signature(ladder.ALGORITHMS[EDGES[child][0]], eval_str=True).parameters
    for name, kind in typing.get_type_hints(inherited).items():
        assert kind == parent[name].annotation, name


@pytest.mark.parametrize("child", EDGES)
def test_settings_that_a_child_drops_are_refused(child):
    for setting in EDGES[child][3]:
        with pytest.raises(TypeError, match=f"{child} has no setting '{setting}'"):
            make(child, **{setting: 1})
    with pytest.raises(TypeError, match=f"{child} has no setting 'learning_rat'. Did you mean 'learning_rate'"):
        make(child, learning_rat=1)


@pytest.mark.parametrize("name", [name for name in NAMES if "group_size" in defaults(name)])
def test_groups_do_not_credit_a_short_answer(name):
    """Four episodes of 1 to 4 steps, each with a reward of 1 at its end: none is better than another."""
    step, length = np.arange(4)[:, None], np.arange(1, 5)[None]
    mask, last = 1.0 * (step < length), step == length - 1
    steps = Transition(mask[..., None], mask, mask, 1.0 * last, 1.0 - last, last, mask)
    algorithm = make(name, group_size=4, num_envs=4)
    credit = algorithm.credit(steps, 0 * mask, 0 * mask, jnp.zeros(()), gamma=algorithm.gamma)
    np.testing.assert_array_equal(credit.advantage, 0)
    lucky = steps._replace(reward=steps.reward * (length == 4))
    assert (algorithm.credit(lucky, 0 * mask, 0 * mask, jnp.zeros(()), gamma=algorithm.gamma).advantage != 0).any()


def test_annealing_falls_linearly_to_zero_and_stays_there():
    rate = ladder.reinforce(learning_rate=0.4, anneal_steps=1000).learning_rate
    np.testing.assert_allclose([rate(jnp.int32(n)) for n in (0, 250, 1000, 3000)], [0.4, 0.3, 0, 0], rtol=1e-6)
    assert ladder.reinforce(learning_rate=0.4).learning_rate(jnp.int32(10**9)) == np.float32(0.4)


def test_gradients_are_clipped_by_their_global_norm():
    gradient = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}
    clipped, _ = update.sgd(max_grad_norm=0.5).update(gradient, update.sgd(max_grad_norm=0.5).init(gradient))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), clipped, {"a": [0.3, 0.0], "b": [[0.4]]})


@pytest.mark.parametrize("name", NAMES)
def test_every_rung_steps_with_an_adam_of_a_large_eps(name):
    small = {"a": jnp.full(2, 1e-5)}
    optimizer = make(name).optimizer()
    step, _ = optimizer.update(small, optimizer.init(small))
    np.testing.assert_allclose(step["a"], 0.5, rtol=1e-5)  # g/(|g| + eps) with eps = 1e-5


TRACED = {
    "ppo": {
        "learning_rate": (1e-2, 3e-2),
        "gamma": (0.9, 0.99),
        "entropy_coefficient": (0.0, 0.1),
        "clip": (0.01, 0.2),
        "clip_high": (0.02, 0.3),
        "gae_lambda": (0.5, 0.9),
        "value_coefficient": (0.5, 2.0),
        "value_clip": (0.01, 0.2),
        "max_grad_norm": (0.1, 1.0),
        "target_kl": (1.0, 1e-6),
        "dual_clip": (3.0, 1.001),  # at 1 rounding decides, for the first ratio is 1
        "adam_eps": (1e-5, 1e-2),
    },
    "trpo": {"max_kl": (0.01, 0.1), "damping": (0.01, 0.1)},
    "reinforce_baseline": {"baseline_rate": (0.1, 0.5)},
    "grpo": {"kl_coefficient": (0.5, 1.0), "reference_rate": (0.1, 1.0)},
}
SIZE = {
    "ppo": {"num_envs": 4, "num_steps": 4, "num_minibatches": 2, "epochs": 2},
    "trpo": {"num_envs": 4, "num_steps": 4, "value_minibatches": 2, "value_epochs": 1, "conjugate_steps": 3},
    "reinforce_baseline": {"num_envs": 4, "baseline_kind": "running", "learning_rate": 0.1},
    "grpo": {"num_envs": 4, "group_size": 2, "num_minibatches": 2, "epochs": 1, "learning_rate": 0.1},
}


@pytest.mark.parametrize("name", TRACED)
def test_numbers_may_be_traced(name):
    """A vmap over a number gives what a loop over it gives, and the number makes a difference."""
    env = tiny.counter()
    policy, critic = networks.mlp(env, hidden=(4,))

    def run(settings):
        learner = policy_gradient(env, policy, critic, make(name, **SIZE[name], **settings))
        state = learner.init(jax.random.key(0))
        state, _ = jax.lax.scan(learner.step, state, jax.random.split(jax.random.key(1), 3))
        return jax.flatten_util.ravel_pytree(state.params)[0]

    low, high = ({k: v[i] for k, v in TRACED[name].items()} for i in (0, 1))
    one_high = [low | {k: v} for k, v in high.items()]
    table = {k: jnp.array([low[k], *(row[k] for row in one_high)]) for k in low}
    together = tiny.jit(jax.vmap(run))(table)
    single = tiny.jit(run)
    for i, row in enumerate([low, *one_high]):
        np.testing.assert_allclose(together[i], single(row), rtol=2e-4, atol=1e-5)
        if i:
            assert np.abs(together[i] - together[0]).max() > 1e-4, list(high)[i - 1]
