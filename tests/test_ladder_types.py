"""What mypy knows of the ladder's settings and of `fit`: `mypy` fails where one of the marked lines has no error.

At run time the same calls are refused, except that types are not checked.
"""

from __future__ import annotations

from typing import Unpack

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg import envs, ladder, networks, values
from jaxpg.algorithm import PolicyGradient
from jaxpg.errors import UserError
from jaxpg.ladder_settings import A2CSettings, ReinforceSettings, child_of
from jaxpg.runs.fitting import Network


def test_a_misspelt_setting() -> None:
    with pytest.raises(TypeError, match=r"ppo has no setting 'num_env'\. Did you mean 'num_envs'"):
        ladder.ppo(num_env=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"reinforce has no setting 'num_env'\. Did you mean 'num_envs'"):
        ladder.reinforce(num_env=3)  # type: ignore[call-arg]


def test_a_setting_of_the_parent_that_is_not_inherited() -> None:
    with pytest.raises(TypeError, match="grpo has no setting 'value_clip'"):
        ladder.grpo(value_clip=0.1)  # type: ignore[call-arg]


def test_a_missing_setting() -> None:
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'max_length'"):
        ladder.dr_grpo()  # type: ignore[call-arg]


def test_a_positional_argument() -> None:
    with pytest.raises(TypeError, match="takes 0 positional arguments"):
        ladder.a2c(16)  # type: ignore[call-arg]


def test_scalars_may_be_arrays_and_static_settings_may_not() -> None:
    rate, count = jnp.array(0.5), jnp.array(2)
    assert ladder.ppo(gamma=rate, entropy_coefficient=rate).gamma is rate  # inherited
    assert ladder.rlhf(kl_coefficient=rate, reference_rate=rate).reference_rate is rate  # its own
    ladder.ppo(epochs=count)  # type: ignore[arg-type]
    ladder.ppo(num_steps=count)  # type: ignore[arg-type]


@pytest.mark.parametrize("of_jax", [False, True])
def test_an_array_of_several_is_no_setting(of_jax: bool) -> None:
    rates = jnp.array([0.9, 0.99]) if of_jax else np.array([0.9, 0.99])
    with pytest.raises(UserError, match=r"gamma must be one number, not an array of shape \(2,\): jax.vmap maps"):
        ladder.ppo(gamma=rates)  # type: ignore[arg-type]


def test_new_defaults_are_checked_against_the_settings_of_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpg.ladder_settings.PARENTS", {})
    child_of(ladder.ppo, gamma=0.9, epochs=1)
    child_of(ladder.ppo, gama=0.9)  # type: ignore[call-arg]
    child_of(ladder.ppo, gamma="high")  # type: ignore[arg-type]

    @child_of(ladder.a2c, gamma=0.9)
    def own(*, factor: float = 2.0, **inherited: Unpack[ReinforceSettings]) -> PolicyGradient:
        parent = ladder.a2c(**inherited)
        return parent._replace(gamma=factor * parent.gamma)

    assert (own().gamma, own(gamma=0.1).gamma, own(factor=0.5).gamma) == (1.8, 0.2, 0.45)
    with pytest.raises(TypeError, match=r"own has no setting 'facto'\. Did you mean 'factor'"):
        own(facto=1)  # type: ignore[call-arg]


def test_what_a_child_inherits_has_an_annotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever name; a child without it inherits nothing."""
    monkeypatch.setattr("jaxpg.ladder_settings.PARENTS", {})

    @child_of(ladder.a2c)
    def renamed(**settings: Unpack[ReinforceSettings]) -> PolicyGradient:
        return ladder.a2c(**settings)

    @child_of(ladder.a2c)
    def alone(*, gamma: float = 0.5) -> PolicyGradient:
        return ladder.a2c(gamma=gamma)

    assert renamed(gamma=0.1).gamma == 0.1
    assert alone().gamma == 0.5
    with pytest.raises(TypeError, match="alone has no setting 'num_envs'"):
        alone(num_envs=3)  # type: ignore[call-arg]

    def bare(**inherited):  # type: ignore[no-untyped-def]
        return ladder.a2c(**inherited)

    with pytest.raises(UserError, match=r"bare: \*\*inherited needs an annotation .*Unpack\[A2CSettings\]"):
        child_of(ladder.a2c)(bare)


def test_a_setting_that_the_parent_does_not_have_cannot_be_passed_on() -> None:
    def wrong(**inherited: Unpack[A2CSettings]) -> PolicyGradient:
        return ladder.grpo(**inherited)  # type: ignore[misc]

    with pytest.raises(TypeError, match="grpo has no setting 'num_steps'"):
        wrong(num_steps=3)


def test_every_kind_of_network_that_fit_takes() -> None:
    """Functions of the policy gradients and of the DQN family, and what they return."""
    env = envs.make("CartPole-v1")
    kinds: list[Network] = ["mlp", {"kind": "mlp"}, networks.mlp, networks.mlp(env), values.mlp, values.mlp(env)]
    wrong: Network = 3  # type: ignore[assignment]
    assert wrong not in kinds
