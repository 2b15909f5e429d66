"""The edges of DQN's family: what each one changes; and every setting has an effect and a meaning."""

from __future__ import annotations

import inspect

import jax.numpy as jnp
import numpy as np
import pytest
from test_ladder import changed_fields
from tiny import target

from jaxpg import values
from jaxpg.errors import UserError
from jaxpg.experiments import config as configs
from jaxpg.ladder_settings import PARENTS
from jaxpg.values.replay_learning import ReplaySettings

PRIORITIES = {"priority_alpha": 0.6, "priority_beta": 0.4, "beta_steps": 500_000}
FROM_REPLAY = set(ReplaySettings._fields) | {"train_frequency", "target_period", "target_rate", "huber_threshold"}
# child: (fields that differ when both have the child's settings, new or changed defaults, settings dropped)
EDGES = {
    "double_dqn": ({"selector"}, {}, set()),
    "dueling_dqn": ({"head"}, {}, set()),
    "n_step_dqn": ({"n_steps"}, {"n_steps": 3}, set()),
    "prioritized_dqn": ({"sampling"}, PRIORITIES, set()),
    "qr_dqn": ({"head", "loss"}, {"quantiles": 50}, set()),
    "rainbow": (
        {"selector", "head", "loss", "n_steps", "sampling"},
        {**PRIORITIES, "priority_alpha": 0.5, "n_steps": 3, "quantiles": 50},
        set(),
    ),
    "pqn": (
        {"collector", "learn", "loss", "move_target", "sampling"},
        {
            "num_envs": 128,
            "learning_rate": 5e-4,
            "num_steps": 32,
            "gae_lambda": 0.65,
            "epochs": 2,
            "num_minibatches": 32,
            "chunk_rows": None,
            "reset_pool": 0,
        },
        FROM_REPLAY,
    ),
}
ANOTHER = {"anneal_steps": 1000, "chunk_rows": 32}
SETTINGS = [(name, setting) for name, f in values.ALGORITHMS.items() for setting in inspect.signature(f).parameters]


def defaults(name):
    return {p.name: p.default for p in inspect.signature(values.ALGORITHMS[name]).parameters.values()}


def test_every_algorithm_and_its_parent_are_pinned():
    assert {name: PARENTS.get(name) for name in values.ALGORITHMS} == {"dqn": None} | dict.fromkeys(EDGES, "dqn")


@pytest.mark.parametrize("child", EDGES)
def test_an_edge_changes_the_pinned_fields_and_defaults(child):
    fields, changes, drops = EDGES[child]
    new, old = defaults(child), defaults("dqn")
    shared = {name: x for name, x in new.items() if name in old}
    changed = changed_fields(values.ALGORITHMS[child](), values.dqn(**shared))
    print(f"{child:16} {', '.join(sorted(changed))}")
    assert changed == fields
    assert {name: x for name, x in new.items() if name not in old or old[name] != x} == changes
    assert old.keys() - new.keys() == drops


@pytest.mark.parametrize("child", ["double_dqn", "dueling_dqn", "n_step_dqn", "prioritized_dqn", "qr_dqn"])
def test_rainbow_is_the_sum_of_the_others(child):
    """Field by field, given the others' settings."""
    rainbow, other = values.rainbow(priority_alpha=0.6), values.ALGORITHMS[child]()
    fields = other._asdict()
    assert not changed_fields(rainbow, rainbow._replace(**{name: fields[name] for name in EDGES[child][0] - {"head"}}))
    assert rainbow.head.func is values.dueling_dqn().head
    assert rainbow.head.keywords == values.qr_dqn().head.keywords


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_every_setting_is_read(name, setting):
    default = defaults(name)[setting]
    other = (
        ANOTHER[setting]
        if setting in ANOTHER
        else (default / 2 or 1.0 if isinstance(default, float) else default * 2 or 1)
    )
    assert changed_fields(values.ALGORITHMS[name](**{setting: other}), values.ALGORITHMS[name]())


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_every_setting_is_explained(name, setting):
    texts = [inspect.getdoc(values.ALGORITHMS[x]) for x in {name, "dqn"}]
    assert any(f"\n    {setting}: " in text for text in texts)


def test_epsilon_falls_linearly_and_stays():
    epsilon = values.dqn(epsilon_start=0.9, epsilon_end=0.1, epsilon_steps=1000).epsilon
    np.testing.assert_allclose([epsilon(jnp.int32(n)) for n in (0, 500, 1000, 9000)], [0.9, 0.5, 0.1, 0.1], rtol=1e-6)


def test_settings_that_pqn_does_not_have_are_refused():
    with pytest.raises(TypeError, match="pqn has no setting 'batch_size'"):
        values.pqn(batch_size=3)


def test_real_actions_are_refused():
    with pytest.raises(UserError, match="Action values need discrete actions, but those of target are real numbers"):
        values.deep_q(target(), values.mlp(target()), values.dqn())


@pytest.mark.parametrize(
    ("algorithm", "of_more"),
    [("sarsa", "n_step_sarsa"), ("double_q_learning", "n_step_sarsa"), ("dqn", "n_step_dqn"), ("qr_dqn", "n_step_dqn")],
)
def test_n_steps_of_one_step_targets_name_the_rung_that_has_them(algorithm: str, of_more: str) -> None:
    """Elsewhere n_steps are the steps of a rollout, which are `num_steps` here and change no target."""
    with pytest.raises(TypeError, match=f"{algorithm} has no setting 'n_steps'. .* those of {of_more} have as many"):
        getattr(values, algorithm)(n_steps=3)
    with pytest.raises(UserError, match=f"no setting 'n_steps' of {algorithm} .* those of {of_more} have as many"):
        configs.resolve_config("frozen_lake" if "sarsa" in of_more else "cartpole", algorithm, {"n_steps": 3})
    getattr(values, of_more)(n_steps=3)
    with pytest.raises(TypeError, match="It is called 'num_steps' here"):
        values.pqn(n_steps=3)
