"""What is recorded of the machine that a run was made on."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from jaxpg.training import provenance

X86 = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC

processor\t: 1
cpu family\t: 26
model\t\t: 2
model name\t: another
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (X86, "AMD EPYC, family 25, model 17"),
        ("processor\t: 0\nmodel name\t: ARMv8: rev 1\n", "ARMv8: rev 1"),
        ("processor\t: 0\nBogoMIPS\t: 48.00\n", platform.processor()),
        (None, platform.processor()),
    ],
)
def test_the_processor_is_told_apart_from_others_of_its_name(
    text: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(provenance, "Path", lambda name: file)
    assert provenance._cpu() == expected


def test_a_report_names_each_machine_once() -> None:
    """When they began and in which directory is no difference."""
    one = {"cpu": "A", "devices": ["cpu"], "started": "10:00", "directory": "runs/x"}
    found = provenance.machines([one, one | {"started": "11:00", "directory": "runs/y"}, one | {"devices": ["H200"]}])
    first = {"cpu": "A", "devices": ["cpu"], "started": "10:00"}
    assert found == {"machine": first, "machine 2": first | {"devices": ["H200"]}}


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_commit_is_that_of_the_checkout_and_marked_where_files_were_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "provenance.py"
    file.write_text("# as committed\n")
    monkeypatch.setattr(provenance, "__file__", str(file))
    assert provenance.commit.__wrapped__() is None  # no checkout
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "first")):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    named = subprocess.run(
        ["git", "-C", str(tmp_path), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    assert provenance.commit.__wrapped__() == named.stdout.strip()
    file.write_text("# changed\n")
    assert provenance.commit.__wrapped__() == f"{named.stdout.strip()}-dirty"
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "untracked.py"))
    assert provenance.commit.__wrapped__() is None
