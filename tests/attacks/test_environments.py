"""Environments of a user's own that break the contract: one sentence each, and nothing left behind."""

from __future__ import annotations

import re

import pytest
from bad_environments import BAD, good

from jaxpg import envs
from jaxpg.errors import UserError


@pytest.fixture(autouse=True)
def own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs.registry, "_user_factories", {})


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_environment_is_refused_by_its_cause(kind: str) -> None:
    factory, sentence = BAD[kind]
    envs.register("bad", factory)
    with pytest.raises(UserError) as error:
        envs.make("bad")
    text = str(error.value)
    print(text)
    assert "bad" in text
    assert re.search(sentence, text)
    assert "\n" not in text
    assert len(text) < 400
