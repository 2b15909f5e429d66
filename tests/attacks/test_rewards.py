"""Completions that would like a reward without solving the task."""

from __future__ import annotations

import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg.envs.text import CHARACTERS, END, PAD, TASKS, Vocabulary, json_lines
from jaxpg.envs.text.countdown import Countdown
from jaxpg.envs.text.numeric import last_number
from jaxpg.envs.text.problems import Sum

WIDTH = 60
SPELLED = Vocabulary(("<pad>", "<eos>", *CHARACTERS.symbols[2:6], *"0123456789.,+-−/\\{}^% \n$()=eExfracbodtimsQ٤４²½"))


def tokens(text, vocabulary=CHARACTERS, width=WIDTH):
    """A completion [width], its end written as "$$" and padding as "__", and its length."""
    ids = []
    for part in text.replace("$$", "\0$$\0").replace("__", "\0__\0").split("\0"):
        ids += {"$$": [END], "__": [PAD]}.get(part) or vocabulary.encode(part)
    return jnp.array((ids + [PAD] * width)[:width], jnp.int32), jnp.int32(min(len(ids), width))


@cache
def verifier(name, think):
    return jax.jit(TASKS[name](think=think, max_tokens=WIDTH).verify)


def graded(name, problem, text, *, think=False):
    verdict = verifier(name, think)(problem, *tokens(text))
    return float(verdict.accuracy), float(verdict.format), int(verdict.answer)


SUM = Sum(jnp.array([57, 466]))  # 523


@pytest.mark.parametrize(
    "answer",
    ["0523", "523 ", " 523", "+523", "-523", "523523", "52", "5230", "57+466", "523,", "523/1", "5 23", "(523)"],
)
def test_an_answer_that_is_nearly_the_sum_is_wrong(answer):
    assert graded("addition", SUM, "523$$")[0] == 1
    assert graded("addition", SUM, f"{answer}$$")[0] == 0


@pytest.mark.parametrize(
    ("text", "accuracy", "form"),
    [
        ("<think></think><answer>523</answer>$$", 1, 1),
        ("<think>no</think><answer>523</answer>$$", 1, 1),
        ("<answer>523</answer>$$", 1, 0),
        ("<think><answer>523</answer></think><answer>1</answer>$$", 0, 0),  # the last answer counts
        ("<answer>1</answer><answer>523</answer>$$", 1, 0),
        ("<answer>523</answer><answer>1</answer>$$", 0, 0),
        ("<answer>523<answer>1</answer>$$", 0, 0),
        ("<answer>1<answer>523</answer></answer>$$", 1, 0),
        ("<answer>523</answer>1$$", 1, 0),
        ("523$$", 0, 0),
        ("<think></think><answer></answer>$$", 0, 0),  # the form alone pays nothing without an answer
        ("<think></think><answer>$$", 0, 0),
        ("</think><answer>523</answer>$$", 1, 0),
        ("<think></think></think><answer>523</answer>$$", 1, 0),
        ("<think></think><answer>523</answer><eos>$$".replace("<eos>", "$$"), 0, 0),  # ends twice
        ("<think></think><answer>523</answer>", 0, 0),  # did not end
        ("<think></think><answer>5__23</answer>$$", 0, 0),  # padding is no text
        ("<think></think><answer>__</answer>$$", 0, 0),
        ("__<think></think><answer>523</answer>$$", 1, 0),
        ("$$", 0, 0),
        ("", 0, 0),
    ],
)
def test_the_form_and_the_last_answer_decide(text, accuracy, form):
    assert graded("addition", SUM, text, think=True)[:2] == (accuracy, form)


GAME = Countdown(jnp.array([3, 5, 2]), jnp.int32(17), jnp.array([[0, 1], [0, 2]]), jnp.array([2, 0]))  # 3*5+2=17


@pytest.mark.parametrize("answer", ["3*5+2", "2+5*3", "(3*5)+2", "((2)+(5*3))", "2+3*5"])
def test_every_way_to_write_a_solution_is_right(answer):
    assert graded("countdown", GAME, f"{answer}$$")[0] == 1


@pytest.mark.parametrize(
    "answer",
    [
        *("17", "3*5+2=17", "17=3*5+2", "3*5+2+0", "3*5+2*1", "3*5", "3*5+2+3-3", "15+2", "03*5+2", "3*05+2", "3*5+02"),
        *("+3*5+2", "-3*5+2", "3*5+-2", "3*5--2", "2--3*5", "3*5++2", "(-3)*-5+2", "0-3*5+2", "3*5+2+", "3*5+2-"),
        *(
            "3**5+2",
            "3//5+2",
            "3*5+2)",
            "(3*5+2",
            "()3*5+2",
            "3(5)+2",
            "(3)(5)+2",
            "3 *5+2",
            "3*5+2 ",
            "3*5,2",
            "35+2",
            "3*52",
        ),
        *(
            "3*5+2/0",
            "3/0*5+2",
            "3/(5-5)+2",
            "2+3*5/0",
            "(2-2)/(3-3)+5",
            "3*5+2:",
            "",
            "3*5+2%",
            "3x5+2",
            "e",
            "3*5+2;3"[:-2] + "?",
        ),
        *(
            "1" * 40,
            "9" * 50,
            "99999999*99999999+2",
            "4294967299*5+2",
            "3*4294967301+2",
            "3*5+4294967298",
            "3*5+2" + "-0" * 15,
        ),
        *("(" * 9 + "3*5+2" + ")" * 9, "(" * 20, ")" * 20, "3*5+2<think>", "<answer>3*5+2</answer>", "3*5__+2"),
        *("5/3*3+2*5", "2/5*5*3", "5*3/2*2+2", "3/2*2*5+2"),
    ],
)
def test_an_expression_that_is_no_solution_is_wrong(answer):
    accuracy, _, vote = graded("countdown", GAME, f"{answer}$$")
    assert accuracy == 0
    assert vote == -1


def test_no_product_overflows_to_the_target():
    """Products of given numbers are below 2^31 by the check of the settings; numbers that are not given saturate."""
    game = Countdown(jnp.full(6, 35), jnp.int32(1), jnp.zeros((5, 2), jnp.int32), jnp.zeros(5, jnp.int32))
    verify = jax.jit(TASKS["countdown"](numbers=6, largest=35, max_tokens=WIDTH).verify)
    exact = 35**6
    assert exact < 2**31
    for target in (exact, (exact + 2**32) % 2**31, 1):
        verdict = verify(game._replace(target=jnp.int32(target)), *tokens("35*35*35*35*35*35$$"))
        assert verdict.accuracy == (target == exact)


# Records of one's own.


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """Accuracy and vote of a completion of a record with the answer 42, or another one."""

    @cache
    def verify(match, answer):
        path = tmp_path_factory.mktemp("data") / "data.jsonl"
        path.write_text(json.dumps({"prompt": "Q", "answer": answer}) + "\n", encoding="utf-8")
        return jax.jit(json_lines(path, SPELLED, match=match, max_tokens=WIDTH, held_out=0).verify)

    def judge(text, match, answer="42"):
        verdict = verify(match, answer)(jnp.int32(0), *tokens(text, SPELLED))
        return float(verdict.accuracy), int(verdict.answer)

    return judge


@pytest.mark.parametrize(
    "text",
    [
        *(
            "042$$",
            "+42$$",
            "4 2$$",
            "42.0$$",
            "4２$$".replace("２", "²"),
            "42<answer></answer>$$",
            "42",
            "4__2$$",
        ),
        *("<answer>42</answer><answer>41</answer>$$", "42</answer>$$", "<think>42</think>$$"),
    ],
)
def test_an_exact_answer_is_the_text_itself(judge, text):
    assert judge("42$$", "exact")[0] == judge("<think>41</think><answer>42</answer>$$", "exact")[0] == 1
    assert judge(" 42  $$", "exact") == judge("<answer>42 </answer>$$", "exact") == judge("42$$", "exact")
    assert judge(text, "exact")[0] == 0


@pytest.mark.parametrize(
    "text",
    [
        *(
            "41 42 43$$",
            "42 41$$",
            "40, 41, 42$$",
            "42, 43$$",
            "(41, 42)$$",
            "41/42$$",
            "4.2$$",
            "4,2$$",
            "42e5$$",
            "42^2$$",
        ),
        *(
            "0-42$$",
            "x-42$$",
            "--42$$",
            "-42$$",
            "−42$$",
            "٤42$$",
            "42٤$$",
            "4４$$",
            "42²$$",
            "42½$$",
            "42%$$",
            "42/0$$",
        ),
        *(
            r"\frac{42}{2}$$",
            r"\frac{1}{42}$$",
            r"x\frac{42}{1}$$",
            "10^{42}$$",
            "{42$$",
            "42(1$$",
            "42 \n1$$",
            "0x42$$",
            "42",
        ),
        *("4 2$$", "4\n2$$", "42.42$$", "42..42$$", "1e42$$", "42e$$", "42e999999$$", "$$42", "$$", "__$$"),
        *("9" * 58 + "$$", "0.0000042e9999$$"),
    ],
)
def test_a_numeric_answer_is_the_number_at_the_end(judge, text):
    assert judge(text, "numeric")[0] == 0


@pytest.mark.parametrize(
    "text",
    ["42$$", "0042$$", "+42$$", "42.0$$", "42.000$$", "84/2$$", "4.2e1$$", "4200%$$", r"\frac{84}{2}$$", "41\n42$$"],
)
def test_the_same_number_is_the_same_answer_and_votes_for_it(judge, text):
    assert judge(text, "numeric") == judge("42$$", "numeric")
    assert judge(text, "numeric")[0] == 1


def test_zero_has_one_sign(judge):
    assert judge("-0$$", "numeric", "0") == judge("0.0$$", "numeric", "0")
    assert judge("-0$$", "numeric", "0")[0] == 1


def test_numbers_of_any_length_are_refused_in_time():
    """Python refuses integers of more than 4,300 digits, and an exponent could ask for a billion."""
    for text in (
        "9" * 10_000,
        "0" * 10_000 + "42",
        "1e999999999",
        "10^{999999999}",
        "1" + ",000" * 3000,
        "/".join("1" * 5000),
    ):
        assert last_number(text) is None


def test_answers_that_differ_have_different_votes(judge):
    votes = [judge(f"{i}$$", "numeric")[1] for i in range(-20, 60)]
    assert len(set(votes)) == len(votes)
    assert np.min(votes) >= 0
