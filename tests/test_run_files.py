"""What the files of a run may hold: each check by values at its bounds, and the sentence that refuses what does not."""

from __future__ import annotations

from typing import Any

import pytest

from jaxpg.training import run_files

LARGEST = 2**63 - 1
COUNTS = run_files.record(absent={"b": 7}, a=run_files.count, b=run_files.count)


@pytest.mark.parametrize(
    ("check", "value", "result"),
    [
        (run_files.count, 0, 0),
        (run_files.count, LARGEST, LARGEST),
        (run_files.whole(2, 3), 3, 3),
        (run_files.number, 2, 2.0),
        (run_files.number, float("inf"), float("inf")),
        (run_files.finite, -1e308, -1e308),
        (run_files.text, "", ""),
        (run_files.flag, False, False),
        (run_files.optional(run_files.count), None, None),
        (run_files.list_of(run_files.count), [1, 2], [1, 2]),
        (run_files.list_of(run_files.count, 2), [1, 2], [1, 2]),
        (run_files.table_of(run_files.count), {"a": 1}, {"a": 1}),
        (COUNTS, {"a": 1, "c": "left out"}, {"a": 1, "b": 7}),
    ],
)
def test_what_fits_is_given_back(check: run_files.Check, value: Any, result: Any) -> None:
    assert check("x", value) == result


@pytest.mark.parametrize(
    ("check", "value", "sentence"),
    [
        (run_files.count, -1, "x is -1, not a whole number from 0"),
        (run_files.count, LARGEST + 1, "not a whole number from 0 to 9223372036854775807"),
        (run_files.count, True, "x is True, not a whole number"),
        (run_files.count, 1.0, r"x is 1\.0, not a whole number"),
        (run_files.whole(2, 3), 1, "x is 1, not a whole number from 2 to 3"),
        (run_files.whole(2, 3), 4, "x is 4, not a whole number from 2 to 3"),
        (run_files.number, True, "x is True, not a number"),
        (run_files.number, 2**1001, "x is a number of many digits, not a number"),
        (run_files.finite, float("inf"), "x is inf, not a finite number"),
        (run_files.finite, float("nan"), "x is nan, not a finite number"),
        (run_files.text, 3, "x is 3, not a string"),
        (run_files.flag, 1, "x is 1, not true or false"),
        (run_files.optional(run_files.count), "", "x is '', not a whole number"),
        (run_files.list_of(run_files.count), {}, "x is {}, not a list"),
        (run_files.list_of(run_files.count), [1, -1], "entry 2 of x is -1"),
        (run_files.list_of(run_files.count, 2), [1], r"x is \[1\], not a list of 2"),
        (run_files.list_of(run_files.count, 2), [1, 2, 3], r"x is \[1, 2, 3\], not a list of 2"),
        (run_files.table_of(run_files.count), {"a": None}, "'a' in x is None"),
        (COUNTS, {"b": 1}, "x has no field 'a'"),
        (COUNTS, {"a": 1, "b": None}, "'b' in x is None"),
    ],
)
def test_what_does_not_fit_is_named(check: run_files.Check, value: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check("x", value)


def test_integers_of_toml_have_64_bits() -> None:
    assert run_files.parse_toml(b"a = -9223372036854775808\nb = [9223372036854775807]") == {
        "a": -(2**63),
        "b": [LARGEST],
    }
    for text in (b"a = 9223372036854775808", b"a = -9223372036854775809", b"[t]\na = [[9223372036854775808]]"):
        with pytest.raises(ValueError, match="it has an integer of more than 64 bits"):
            run_files.parse_toml(text)


def test_the_first_byte_that_is_no_text_is_named() -> None:
    assert run_files.decode("é".encode()) == "é"
    with pytest.raises(ValueError, match="it is not UTF-8 text: byte 3 is 0xff"):
        run_files.decode(b"ab\xffc\xff")
