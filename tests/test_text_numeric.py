"""Reading numbers: the table of numeric.py line by line, against a slow parser, and beside all that spoils a number."""

from __future__ import annotations

import itertools
import re
import time
from fractions import Fraction

import numpy as np
import pytest

from jaxpg.envs.text import numeric
from jaxpg.envs.text.numeric import MAX_LENGTH, last_number

READ = {
    "42": 42,
    "007": 7,
    "1.50": "3/2",
    ".5": "1/2",
    "1,234": 1234,
    "1,234,567.5": "2469135/2",
    "3e2": 300,
    "1.5E-3": "3/2000",
    "2e+05": 200_000,
    "10^5": 100_000,
    "10^{5}": 100_000,
    "10^{-5}": "1/100000",
    r"1.5\times10^{3}": 1500,
    r"1.5 \times 10^3": 1500,
    "2×10^3": 2000,
    r"2 \cdot 10^{3}": 2000,
    "1/2": "1/2",
    "6/4": "3/2",
    r"\frac{1}{2}": "1/2",
    r"\dfrac{ 1 }{ 2 }": "1/2",
    r"\tfrac{-1}{2}": "-1/2",
    "12.5%": "1/8",
    r"12.5\%": "1/8",
    "12.5 %": "1/8",
    "0": 0,
}
SIGNS = {"": 1, "-": -1, "\u2212": -1, "+": 1}
AROUND = (
    *(r"%s", r"\boxed{%s}", "$%s$", "$$%s$$", r"\(%s\)", r"\( %s \)", r"\[%s\]", r"$\boxed{%s}$", "(%s)", "**%s**"),
    *(
        '"%s"',
        "`%s`",
        "x=%s",
        "x = %s",
        r"\boxed{x = %s}",
        "#### %s",
        "Answer:%s",
        "the answer is %s",
        "%s.",
        "%s, I think",
    ),
    *("<answer>%s</answer>", "<think>1+2</think><answer>%s</answer>", "7 apples\n%s\n", "3+4=%s", "-> %s", "(so %s)"),
    *("first 14, or %s?", "7 = 8 - 1 = %s", "%s apples", "{%s}", "[%s]", "$x=%s$", "so\n\n%s"),
)


@pytest.mark.parametrize("notation", READ)
def test_the_notations_of_the_table_are_read_wherever_they_may_stand(notation):
    for sign, factor in SIGNS.items():
        if sign and notation == r"\tfrac{-1}{2}":
            continue
        for around in AROUND:
            text = around.replace("%s", sign + notation)
            assert last_number(text) == factor * Fraction(READ[notation]), text


@pytest.mark.parametrize(
    "text",
    [
        *("", "no number - at all.", "nan", "inf", "Infinity", "one", "-", ".", "%", "e5"),
        *(
            "x-3",
            "5-3",
            "5 - 3",
            "x - 3",
            "2+3",
            "2 * 3",
            "2 x 3",
            r"2 \times 3",
            "2^3",
            "x^2",
            "2**3",
            "5!",
            "(2)-1",
            "2(3)",
        ),
        *("3x", "3 x", "x3", "42kg", "5th", "0x1F", "1_000", "90°", "f(2)", "f( 2 )", r"\sqrt{4}", r"\sqrt 4", r"3\pi"),
        *(r"3 \pi", r"\pi 3", "minus 5", "negative 5", "- 5", "--5", "+-5", "\u20135", "± 5", r"\pm 5", "-$3"),
        *("< 5", "x<5", r"x \le 5", "x >= 5", "x != 5", "~5", "≈ 5"),
        *(
            "x ⩽ 5",
            "x ≦ 5",
            "∼ 5",
            "≃ 5",
            "x ≪ 5",
            "x ＞ 5",
            "5 ⩾ x",
            "2 ⋅ 3",
            "2 ∗ 3",
            "2 ∕ 3",
            "2 ／ 3",
            "√ 2",
            "5 √ x",
        ),
        *("x**5", "x ** 5", "x**-5", "x**(5)", "(x)**5", "x**.5", "5**x", "5 π", "π 5", "5 ％", "5 ‰"),
        *("3 : 4", "(3) : 4", "3 — 4", "3—4", "3 ‒ 4", "— 5", "5 － x"),
        *(
            "1,2",
            "1,2345",
            "0,123",
            "12,34,567",
            "1.234.567",
            "1.234,5",
            "3:15",
            "12 345",
            "12\u00a0345",
            "3 1/2",
            "1 / 2",
        ),
        *(
            "3, 5",
            "(3, 5)",
            "[3, 5]",
            "[3,5]",
            "{3, 5}",
            "max(3, 5)",
            "x = 3; 5",
            "2024-01-31",
            "1/2/2026",
            "192.168.0.1",
        ),
        *(
            "1/0",
            r"\frac{1}{0}",
            "0/0",
            "1/-2",
            r"\frac{1}{x}",
            r"\frac{\pi}{2}",
            r"3\frac{1}{2}",
            r"\frac12",
            r"\frac{1}2",
        ),
        *("10^{5", "10^5}3", "10^{1000}", "3e99999", "3e1000", "3e", "2^{x = 3}", "e^{x 3}", "10^{2}^{3}"),
        *("5 percent", "5 million", "5 and a half", "5 squared", "5%%", "%5"),
        *("\uff15", "\u0665", "5\u0665", "5²", "x²", "½", "5\u200b0", "5\u03380", "①", "42 (or ４)"),
        *("9" * 5000, "1" + "0" * MAX_LENGTH, "(" * 5000 + "5", "1" + ",000" * 2000),
    ],
)
def test_what_is_not_a_number_for_certain_is_none(text):
    assert last_number(text) is None
    assert (
        last_number(f"The answer is 7, I mean {text}" if text.strip() and any(map(str.isdigit, text)) else text) is None
    )


@pytest.mark.parametrize(
    "text",
    [
        *("**5**", "**5**.", "**Answer:** 5", "**Answer**: 5", "the **5** apples", "is:**5**", "(**5**)", "**$5$**"),
        *("**(5)**", r"**\boxed{5}**", "**the answer: 5**", '"**5**"', "⟶ 5", "x ⟹ 5", "x ＝ 5", "Step 2: 5"),
    ],
)
def test_bold_arrows_equal_signs_and_labels_are_no_operations(text):
    assert last_number(text) == 5


def test_as_many_digits_as_may_be_are_read():
    assert last_number("9" * MAX_LENGTH) == 10**MAX_LENGTH - 1
    assert last_number("1e999") == 10**999
    assert last_number("5 -" + " " * 100 + "3") is None


def slow_digits(text):
    return bool(text) and all(c in "0123456789" for c in text)


def slow_decimal(text):
    """Digits, or groups of three after one to three; and digits behind a point."""
    whole, point, part = text.partition(".")
    if point and not slow_digits(part):
        return None
    groups = whole.split(",")
    grouped = len(groups) > 1 and all(map(slow_digits, groups)) and groups[0][0] != "0"
    grouped = grouped and len(groups[0]) <= 3 and all(len(g) == 3 for g in groups[1:])
    if not (slow_digits(whole) or grouped or (not whole and point)):
        return None
    value = Fraction(0)
    for c in "".join(groups):
        value = 10 * value + "0123456789".index(c)
    for i, c in enumerate(part, start=1):
        value += Fraction("0123456789".index(c), 10**i)
    return value


def slow_integer(text):
    sign, digits = (text[0], text[1:]) if text[:1] in ("+", "-") else ("", text)
    return (-1 if sign == "-" else 1) * int(digits) if slow_digits(digits) and len(digits) <= 3 else None


def slow_number(text):
    """The value of a text that is a number and nothing else; None if it is not."""
    if text[:1] in ("+", "-"):
        value = slow_number(text[1:]) if text[1:2] not in ("+", "-") else None
        return value if value is None or text[0] == "+" else -value
    if text.endswith("%"):
        value = slow_decimal(text[:-1])
        return None if value is None else value / 100
    for mark in "eE":
        if mark in text:
            value, power = slow_decimal(text[: text.index(mark)]), slow_integer(text[text.index(mark) + 1 :])
            return None if value is None or power is None else value * Fraction(10) ** power
    if text.startswith("10^"):
        rest = text[3:]
        power = slow_integer(rest[1:-1] if rest[:1] == "{" and rest[-1:] == "}" else rest)
        return None if power is None else Fraction(10) ** power
    if "/" in text:
        over, _, under = text.partition("/")
        return Fraction(int(over), int(under)) if slow_digits(over) and slow_digits(under) and int(under) else None
    return slow_decimal(text)


def slow_word(text):
    """The value of a word: a number before punctuation."""
    text = text.partition("=")[2] if "=" in text else text
    while text and slow_number(text) is None and text[-1] in ".,":
        text = text[:-1]
    return slow_number(text)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_short_word_is_read_as_a_slow_parser_reads_it(size):
    read = 0
    for letters in itertools.product("015.,-+e/%^", repeat=size):
        word = "".join(letters)
        assert last_number(word) == slow_word(word), word
        read += slow_word(word) is not None
    assert read > 2 * 3 ** (size - 1)


def test_longer_words_are_read_as_a_slow_parser_reads_them():
    rng = np.random.default_rng(0)
    pieces = ["0", "5", "10", "123", "000", ".", ",", "-", "e", "/", "%", "10^", "{", "}", "10^{", ",234", "E+"]
    read = 0
    for _ in range(20_000):
        word = "".join(rng.choice(pieces, rng.integers(2, 7)))
        value = slow_word(word)
        if not {"{", "}"} & set(word) or value is not None:
            assert last_number(word) == value, word
            read += value is not None
    assert read > 500


PLAIN_ARROW = re.compile(r"[-=]+>|[→⇒]|(?<![\w)\]}])\*\*(?=\S)|(?<=\S)\*\*(?![-+({$\\]*(?:\w|\.[0-9]))")
PLAIN_SPACE = re.compile(
    r"(?<=[(\[{])[^\S\n]+|[^\S\n]+(?=[)\]}%])|(?<=})[^\S\n]+(?={)"
    r"|(?<=[0-9])[^\S\n]+(?=(?:\\times|\\cdot|×|·)\s*10\^)|(?:(?<=\\times)|(?<=\\cdot)|(?<=[×·]))[^\S\n]+(?=10\^)"
)
"""The patterns without what keeps them from trying a run of spaces or signs from each of its places."""


def test_arrows_and_spaces_are_those_of_the_plain_patterns():
    rng = np.random.default_rng(0)
    pieces = [*" \n\t()[]{}%5×-=>*→", "  ", "10^", r"\times", r"\cdot"]
    changed = 0
    for _ in range(30_000):
        text = "".join(rng.choice(pieces, rng.integers(2, 9)))
        assert numeric._READ_AS_SPACE.sub(" ", text) == PLAIN_ARROW.sub(" ", text), text
        assert numeric._SPACE_INSIDE.sub("", text) == PLAIN_SPACE.sub("", text), text
        changed += PLAIN_SPACE.sub("", text) != text
    assert changed > 5000


@pytest.mark.parametrize("around", ["5%sapples", "%s5", "5 %sx", r"2 \times%s3", "5(%s"])
@pytest.mark.parametrize("run", [" ", "-", "=", "\t ", "\n"])
def test_a_long_run_of_one_sign_is_read_in_one_pass(around, run):
    began = time.process_time()
    last_number(around.replace("%s", run * 40_000))
    assert time.process_time() - began < 1  # 0.02 s, and 1.4 to 40 s where every place of it is a start
