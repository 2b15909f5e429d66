"""Countdown's problems and its parser, against Python's own parser of expressions."""

from __future__ import annotations

import ast
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import jit

from jaxpg.envs.text import CHARACTERS, END, PAD, TASKS
from jaxpg.envs.text.countdown import Countdown
from jaxpg.envs.text.expression import DEPTH, evaluate_expression

SIZE = 24
parser = jit(jax.vmap(evaluate_expression))


def value(node: ast.expr) -> int:
    """The value in whole numbers; ValueError for what is no plain sum, difference, product or exact quotient."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if not isinstance(node, ast.BinOp):
        raise ValueError
    a, b = value(node.left), value(node.right)
    if isinstance(node.op, ast.Div):
        if b == 0 or a % b:
            raise ValueError
        return a // b
    operations = {ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__}
    if type(node.op) not in operations:
        raise ValueError
    return operations[type(node.op)](a, b)


def legal_value(text: str, given: list[int]) -> int | None:
    """What a legal expression is worth, None for any other text."""
    if not re.fullmatch(r"[-+*/()\d]+", text) or Counter(map(int, re.findall(r"\d+", text))) != Counter(given):
        return None
    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError):
        return None


def expression(rng: np.random.Generator, given: list[int]) -> str:
    """A random expression of the numbers, with parentheses that it needs and some that it does not."""
    if len(given) == 1:
        text = str(given[0])
        return f"({text})" if rng.random() < 0.1 else text
    cut = int(rng.integers(1, len(given)))
    left, right = expression(rng, given[:cut]), expression(rng, given[cut:])
    text = f"{left}{rng.choice(list('+-*/'))}{right}"
    return f"({text})" if rng.random() < 0.5 else text


def spoilt(rng: np.random.Generator, text: str) -> str:
    """Up to three characters deleted, inserted, replaced or exchanged."""
    characters = list(text)
    for _ in range(rng.integers(0, 4)):
        at, new = int(rng.integers(len(characters) + 1)), str(rng.choice(list("0123456789+-*/()+-*/()=, a")))
        change = int(rng.integers(4))
        if change == 3:
            characters[at : at + 2] = characters[at : at + 2][::-1]
        else:
            characters[at : at + (change > 0)] = [new] * (change < 2)
    return "".join(characters)[:SIZE]


def parse(texts: list[str], given: list[list[int]], size: int = SIZE) -> tuple[np.ndarray, np.ndarray]:
    """What `evaluate_expression` makes of texts, with digits behind the end of each."""
    tokens = np.full((len(texts), size), CHARACTERS.id("1"))
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = CHARACTERS.encode(text)
    lengths = jnp.array([len(text) for text in texts])
    return jax.device_get(parser(jnp.asarray(tokens), lengths, jnp.array(given)))


@pytest.mark.parametrize("numbers", [3, 4])
def test_the_parser_agrees_with_pythons(numbers):
    rng = np.random.default_rng(numbers)
    given = rng.choice([1, 2, 3, 4, 6, 8, 10, 12, 24], (4000, numbers)).tolist()
    texts = [spoilt(rng, expression(rng, rng.permutation(some).tolist())) for some in given]
    expected = [legal_value(text, some) for text, some in zip(texts, given, strict=True)]
    legal, values = parse(texts, given)
    assert 0.1 < np.mean(legal) < 0.5
    differ = [(t, g, e) for t, g, e, mine in zip(texts, given, expected, legal, strict=True) if (e is not None) != mine]
    assert not differ
    np.testing.assert_array_equal(values[legal], [e for e in expected if e is not None])


def test_the_parser_on_what_is_easily_got_wrong():
    table = {
        "8-4-2": 2,
        "8-(4-2)": 6,
        "8/4/2": 1,
        "8/(4/2)": 4,
        "8/4*2": 4,
        "2*8/4": 4,
        "2/8*4": None,  # 1 in fractions, but 2/8 is not whole
        "2+4*8": 34,
        "(2+4)*8": 48,
        "2-4*8": -30,
        "(2-4)*8": -16,
        "(2-8)/4": None,
        "(4-8)/2": -2,
        "8/(2-4)": -4,
        "((2)+(4))+8": 14,
        "8*(4-2": None,
        "8*4-2)": None,
        "8*)4-2(": None,
        "8(4-2)": None,
        "(8)(4-2)": None,
        "(8)4-2": None,
        "()8+4+2": None,
        "8+4+": None,
        "-8+4+2": None,
        "8+-4+2": None,
        "8**4+2": None,
        "8//4+2": None,
        "8+4+2=14": None,
        "8+4 +2": None,
        "8+4": None,
        "8+4+2+2": None,
        "8+4+4": None,
        "08+4+2": None,
        "8+4+2+0": None,
        "84+2": None,
        "4294967298+4+8": None,  # 2 if it wrapped around
        "": None,
    }
    legal, values = parse(list(table), [[2, 4, 8]] * len(table))
    assert [int(v) if ok else None for v, ok in zip(values, legal, strict=True)] == list(table.values())


def test_division_by_zero_and_deep_nesting_are_not_legal():
    deep = ["(" * n + "6" + ")" * n + "/3-3" for n in (DEPTH, DEPTH + 1)]
    texts = ["6/(3-3)", "(3-3)/6", *deep]
    legal, values = parse(texts, [[3, 3, 6]] * 4)
    assert legal.tolist() == [False, True, True, False]
    assert values[1:3].tolist() == [0, -1]


@pytest.mark.parametrize("settings", [{}, {"numbers": 4, "largest": 30, "largest_target": 120}])
def test_problems_have_the_solution_that_is_shown(settings):
    task = TASKS["countdown"](think=True, **settings)
    limit = settings.get("largest_target", 99)

    def one(key):
        problem = task.draw(key)
        tokens = task.demonstration(problem, key)
        lengths = (tokens != PAD).sum() - jnp.arange(2)
        return task.prompt_tokens(problem), tokens, jax.vmap(lambda n: task.verify(problem, tokens, n))(lengths)

    prompts, tokens, verdicts = jit(jax.vmap(one))(jax.random.split(jax.random.key(2), 500))
    verdict, truncated = (jax.tree.map(lambda x, i=i: x[:, i], verdicts) for i in range(2))
    used: Counter[str] = Counter()
    for prompt, text in zip(
        map(CHARACTERS.decode, prompts.tolist()), map(CHARACTERS.decode, tokens.tolist()), strict=True
    ):
        shown = re.fullmatch(r"((?:\d+ )+\d+):(\d+)=", prompt)
        found = re.fullmatch(r"<think>(.*)</think><answer>(.*)</answer>", text)
        given, target = list(map(int, shown[1].split())), int(shown[2])
        assert len(given) == settings.get("numbers", 3)
        assert 1 <= min(given) <= max(given) <= settings.get("largest", 20)
        assert legal_value(found[2], given) == target
        assert not re.search(r"\(\d+\)", found[2])
        steps = [step.split("=") for step in found[1].split(",")]
        assert len(steps) == len(given) - 1
        assert all(value(ast.parse(left, mode="eval").body) == int(right) <= limit for left, right in steps)
        assert all(int(right) >= 1 for _, right in steps)
        assert int(steps[-1][1]) == target
        used.update(re.findall(r"[-+*/(]", text))
    assert min(used[symbol] for symbol in "+-*/(") > 25
    assert verdict.accuracy.min() == verdict.format.min() == 1
    assert truncated.accuracy.max() == truncated.format.max() == 0
    assert truncated.answer.max() == -1
    assert len(set(map(int, verdict.answer))) > 40


def test_the_verdict_of_an_expression():
    """Right for every solution; the answer is the value; what lies behind the length is not read."""
    task = TASKS["countdown"](max_tokens=16)
    problem = Countdown(jnp.array([3, 5, 2]), jnp.array(17), jnp.zeros((2, 2), jnp.int32), jnp.zeros(2, jnp.int32))
    texts = ["3*5+2", "2+(5*3)", "5*2+3", "3+5*2", "3*5", "17", "3*5+2+", "3*5+2"]
    tokens = np.full((len(texts), task.max_tokens), CHARACTERS.id("7"))
    lengths = [len(text) + 1 for text in texts]
    lengths[-1] -= 1  # the end is behind the length
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text) + 1] = [*CHARACTERS.encode(text), END]
    verify = jit(jax.vmap(lambda t, n: task.verify(problem, t, n)))
    accuracy, form, answer, _ = jax.device_get(verify(jnp.asarray(tokens), jnp.array(lengths)))
    assert accuracy.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert form.tolist() == [1, 1, 1, 1, 1, 1, 1, 0]
    assert answer[0] == answer[1] >= 0
    assert answer[2] == answer[3] >= 0
    assert answer[0] != answer[2]
    assert (answer[4:] == -1).all()
    assert CHARACTERS.decode(jit(task.prompt_tokens)(problem).tolist()) == "3 5 2:17="
