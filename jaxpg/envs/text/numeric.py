r"""Reading the number that a text ends on: what is not certainly a number is no number.

What is read, with an optional sign (`-`, the minus sign U+2212 or `+`) directly before it:

| notation | examples | value |
|---|---|---|
| integer, decimal | `42`, `007`, `1.50`, `.5` | as written |
| thousands, by commas only | `1,234`, `1,234,567.5` | 1234, 1234567.5 |
| scientific, an exponent of up to 3 digits | `3e2`, `1.5E-3` | 300, 0.0015 |
| power of ten | `10^5`, `10^{-5}`, `1.5\times10^{3}`, also with `\cdot`, `×`, `·` | 100000, ... |
| fraction of two integers | `1/2`, `\frac{1}{2}`, `\dfrac`, `\tfrac` | exactly 1/2 |
| percent | `12.5%`, `12.5\%`, `12.5 %` | 1/8 |

It may stand in `\boxed{...}`, `$...$`, `\(...\)`, `\[...\]`, brackets, quotes or `**...**`, between <answer> and
</answer>, after a currency sign `$`, `€` or `£`, after `=`, `#` or a label ("Answer:42"), and before the end of a
sentence or an ordinary word ("42 apples").

What is not read:

- digits that touch a letter or another sign: "x3", "5th", "42kg", "90°";
- an operand: "x-3", "5 - 3", "2^3", "x**3", "5!", "3\pi", "\sqrt{4}", "f(2)", "minus 5", and what is compared: "< 5";
  so for every dash and every mathematical symbol of Unicode but `=` and arrows: "2 ⋅ 3", "√ 2", "x ⩽ 5";
- a list, a pair or an interval: "3, 5", "(3, 5)"; other separators of digits, or only space: "1.234.567", "3:15",
  "3 : 15", "12 345", "3 1/2"; numbers that a word goes on with: "5 percent", "5 million", "5 and a half";
- digits other than 0 to 9, a division by zero, and more than 1,000 characters without a space.

The number of a text is the last one. If what stands around the last digit cannot be read, the text has no number: an
earlier one is not looked for. Values are exact fractions, so that 0.5, 1/2 and 50% are equal.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

MAX_LENGTH = 1000
"""Limit of the characters of a number; Python refuses to read integers of more than 4,300 digits."""

_DECIMAL = r"(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_INTEGER = "[-+]?[0-9]{1,3}(?![0-9])"
_TIMES_TEN = r"(?:\\times|\\cdot|×|·)10"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)(?:"
    rf"(?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>{_INTEGER})|{_TIMES_TEN}\^(?:{{(?P<braced>{_INTEGER})}}"
    rf"|(?P<bare>{_INTEGER}))|(?P<percent>%))?"
    rf"|10\^(?:{{(?P<power_braced>{_INTEGER})}}|(?P<power>{_INTEGER}))"
    r"|(?P<over>[0-9]+)/(?P<under>[0-9]+)"
    r"|\\frac{(?P<top>[-+]?[0-9]+)}{(?P<bottom>[0-9]+)}"
    r")"
)
_SPELLINGS = {"\u2212": "-", r"\%": "%", r"\$": "$", r"\dfrac": r"\frac", r"\tfrac": r"\frac"}
_TAG = re.compile("</?(?:think|answer)>")
_READ_AS_SPACE = re.compile(
    r"(?<![-=])[-=]+>|[→⇒]"  # a run from its start alone: from n places it takes n² steps
    r"|(?<![\w)\]}])\*\*(?=\S)|(?<=\S)\*\*(?![-+({$\\]*(?:\w|\.[0-9]))"  # bold begins and ends so, and no power does
)
_SPACE_INSIDE = re.compile(
    r"(?<=[(\[{])[^\S\n]+|(?<![^\S\n])[^\S\n]+(?=[)\]}%])|(?<=})[^\S\n]+(?={)"
    r"|(?<=[0-9])[^\S\n]+(?=(?:\\times|\\cdot|×|·)\s*10\^)|(?:(?<=\\times)|(?<=\\cdot)|(?<=[×·]))[^\S\n]+(?=10\^)"
)
_LABEL = re.compile("[A-Za-z]+:")
_WRAPPERS = (
    *((r"\boxed{", "}"), ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("(", ")"), ("[", "]"), ("{", "}")),
    *(('"', '"'), ("'", "'"), ("`", "`"), ("“", "”"), ("‘", "’")),
)
_BEFORE = (r"\boxed{", r"\(", r"\[", "(", "[", "$", "€", "£", "#")
_AFTER = (r"\)", r"\]", "$", ")", "]", "}", ".", ",", ";", ":", "?")
_OPERAND_BEFORE = re.compile(
    r"(?:\\|(?:[<>!~]|\\not)=|\\[A-Za-z]+|π|[0-9)}][^\S\n]*x|\d[)\]}%]*(?:[,;]?|[^\S\n]+:)"
    r"|\b(?:minus|negative|plus|times|over))$",
    re.IGNORECASE,
)
_OPERAND_AFTER = re.compile(
    r"(?:[!%％‰°π]|\\[A-Za-z]|[(\[{][^\S\n]*[A-Za-z]\b"
    r"|(?:x|percent|per cent|hundred|thousand|million|billion|trillion|dozen|and a half|and a quarter|plus|minus|times"
    r"|over|squared|cubed|factorial|pi)s?\b)",
    re.IGNORECASE,
)


def last_number(text: str) -> Fraction | None:
    """The number that a text ends on, None if it has none that is certain: see the table at the top of this file."""
    for spelling, plain in _SPELLINGS.items():
        text = text.replace(spelling, plain)
    text = _SPACE_INSIDE.sub("", _READ_AS_SPACE.sub(" ", _TAG.sub("\n", text)))
    last_digit = next((i for i in range(len(text) - 1, -1, -1) if _is_digit(text[i])), None)
    if last_digit is None:
        return None
    start, stop = _word_around(text, last_digit)
    line = text[text.rfind("\n", 0, start) + 1 : start].rstrip()
    rest = text[stop:].partition("\n")[0].lstrip()
    if _is_operation(line[-1:]) or _is_operation(rest[:1]):
        return None
    if _OPERAND_BEFORE.search(line) or _OPERAND_AFTER.match(rest) or _in_open_bracket(line):
        return None
    word = text[start:stop]
    return _value(word) if len(word) <= MAX_LENGTH else None


def _is_digit(character: str) -> bool:
    """Whether it is a digit of any kind: those that are not read make a number uncertain."""
    return unicodedata.category(character) in ("Nd", "No")


def _is_operation(character: str) -> bool:
    """Whether it stands for an operation or a comparison, or is a dash of any kind; `=` and arrows are neither."""
    plain = unicodedata.normalize("NFKC", character)[:1]  # such as / for one of full width
    kind = unicodedata.category(plain or " ")
    is_sign = kind == "Sm" and plain != "=" and "ARROW" not in unicodedata.name(plain)
    return is_sign or kind == "Pd" or (plain != "" and plain in "*/^·")


def _word_around(text: str, place: int) -> tuple[int, int]:
    """Start and stop of what stands around a place, without space, = and a label such as "Answer:"."""
    start, stop = place, place
    while start > 0 and not text[start - 1].isspace() and text[start - 1] != "=":
        start -= 1
    while stop < len(text) and not text[stop].isspace() and text[stop] != "=":
        stop += 1
    label = _LABEL.match(text, start, place)
    return (label.end() if label else start), stop


def _in_open_bracket(line: str) -> bool:
    """Whether a line ends within brackets that make what follows uncertain: braces, arguments, pairs and sums."""
    closed = 0
    for i in range(len(line) - 1, -1, -1):
        closed += (line[i] in ")]}") - (line[i] in "([{")
        if closed < 0:
            before, inside = line[:i], line[i + 1 :]
            if line[i] == "{":
                return not before.endswith(r"\boxed")
            return before[-1:].isalnum() or any(_is_digit(c) or c in ",;" for c in inside)
    return False


def _value(word: str) -> Fraction | None:
    """The value of a word that is a number, between wrappers and punctuation; None for any other word."""
    while word:
        if number := _NUMBER.fullmatch(word):
            return _read(number)
        word = _peel(word)
    return None


def _peel(word: str) -> str:
    """A word without its outermost wrapper or punctuation; "" if it has none."""
    for opening, closing in _WRAPPERS:
        if len(word) > len(opening + closing) and word.startswith(opening) and word.endswith(closing):
            return word[len(opening) : -len(closing)]
    for opening in _BEFORE:
        if word.startswith(opening):
            return word[len(opening) :]
    for closing in _AFTER:
        if word.endswith(closing):
            return word[: -len(closing)]
    return ""


def _read(number: re.Match[str]) -> Fraction | None:
    part = number.groupdict()
    sign = -1 if part["sign"] == "-" else 1
    if part["decimal"]:
        power = next((part[name] for name in ("exponent", "braced", "bare") if part[name]), "0")
        value = Fraction(part["decimal"].replace(",", "")) * Fraction(10) ** int(power)
        return sign * value / (100 if part["percent"] else 1)
    if power := part["power_braced"] or part["power"]:
        return sign * Fraction(10) ** int(power)
    over, under = int(part["over"] or part["top"]), int(part["under"] or part["bottom"])
    return Fraction(sign * over, under) if under else None
