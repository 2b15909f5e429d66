"""A command that is refused, as its user sees it."""

from __future__ import annotations

import pytest

from jaxpg.cli.main import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command ends, after exit code 2; nothing of what was printed before it."""
    capsys.readouterr()
    assert main(list(arguments)) == 2, arguments
    message = capsys.readouterr().err
    assert message.startswith("jaxpg: ")
    assert message.count("\n") == 1
    assert "Traceback" not in message
    assert len(message) < 2000
    return message
