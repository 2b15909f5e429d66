"""The generated text tasks, against Python that reads their prompts as a person would."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import jit

from jaxpg import envs
from jaxpg.envs.text import CHARACTERS, END, PAD, TASKS, Task, Vocabulary
from jaxpg.envs.text.completion import parse_completion
from jaxpg.envs.text.generated import SPARE_TOKENS
from jaxpg.envs.text.problems import Chain, Sum
from jaxpg.envs.text.token_arrays import fingerprint, numeral, pack
from jaxpg.errors import UserError
from jaxpg.experiments.build import text_task
from jaxpg.experiments.config import resolve_tables
from jaxpg.experiments.signatures import options


def chain(prompt: str) -> list[int]:
    first, *rest = re.findall(r"[+*-]?\d+", prompt)
    values = [int(first)]
    for term in rest:
        values.append({"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[term[0]](values[-1], int(term[1:])) % 10)
    return values


def rows(prompt: str) -> list[str]:
    row, after = list("abcde"), []
    for i, j in prompt[:-1].split(" "):
        row[int(i) - 1], row[int(j) - 1] = row[int(j) - 1], row[int(i) - 1]
        after.append("".join(row))
    return after


def parities(prompt: str) -> str:
    return "".join(str(prompt[: i + 1].count("1") % 2) for i in range(len(prompt) - 1))


def total(prompt: str) -> str:
    return str(sum(map(int, prompt[:-1].split("+"))))


class Expected(NamedTuple):
    """What prompts look like, their answer and their scratchpad."""

    prompt: str
    answer: Callable[[str], str]
    thoughts: Callable[[str], str]


EXPECTED = {
    "reverse": Expected(r"[a-j]{3,5}=", lambda p: p[-2::-1], lambda p: ""),
    "sort": Expected(r"[a-j]{3,5}=", lambda p: "".join(sorted(p[:-1])), lambda p: ""),
    "addition": Expected(r"(0|[1-9]\d{0,2})\+(0|[1-9]\d{0,2})=", total, lambda p: total(p)[::-1]),
    "modular_chain": Expected(
        r"\d([+*-]\d){1,3}=", lambda p: str(chain(p)[-1]), lambda p: "".join(map(str, chain(p)[1:]))
    ),
    "parity": Expected(r"[01]{6,12}=", lambda p: parities(p)[-1], parities),
    "permutations": Expected(r"([1-5][1-5] ){2,5}[1-5][1-5]=", lambda p: rows(p)[-1], lambda p: " ".join(rows(p))),
}
BOTH = [(name, think) for name in EXPECTED for think in (False, True)]
SMALL = {
    "reverse": ({"length": 3, "min_length": 1, "letters": 5}, 155),
    "sort": ({"length": 3, "min_length": 1, "letters": 5}, 155),
    "addition": ({"digits": 2}, 5050),
    "modular_chain": ({"terms": 2, "modulus": 12}, 432),
    "parity": ({"length": 7, "min_length": 3}, 248),
    "permutations": ({"length": 3, "min_length": 1, "objects": 4}, 258),
    "countdown": ({"numbers": 2, "largest": 14, "largest_target": 28}, None),
    "summarise_toy": ({"length": 3}, None),
}


class Sample(NamedTuple):
    """Some problems of the training split; `demonstrations` and `tasks` without and with `think`."""

    tasks: tuple[Task, Task]
    problems: object
    prompts: list[str]
    demonstrations: tuple[np.ndarray, np.ndarray]


@cache
def sample(name: str) -> Sample:
    tasks = (TASKS[name](), TASKS[name](think=True))

    def one(key):
        problem = tasks[0].draw(key)
        return problem, tasks[0].prompt_tokens(problem), tuple(task.demonstration(problem, key) for task in tasks)

    problems, prompts, demonstrations = jit(jax.vmap(one))(jax.random.split(jax.random.key(3), 300))
    return Sample(tasks, problems, [CHARACTERS.decode(p) for p in prompts.tolist()], jax.device_get(demonstrations))


def drawn(task: Task, count: int, seed: int = 0) -> list[str]:
    """Prompts of so many draws."""
    draw = jit(jax.vmap(lambda key: task.prompt_tokens(task.draw(key))))
    return [CHARACTERS.decode(p) for p in draw(jax.random.split(jax.random.key(seed), count)).tolist()]


def judged(symbols: list[str], answer: str, think: bool) -> tuple[bool, bool, str | None]:
    """Accuracy, format and answer of a completion, its end included, by the definitions."""
    if symbols.count("<eos>") != 1 or symbols[-1] != "<eos>":
        return False, False, None
    text = "".join(symbols)
    plain = "(?:(?!<pad>|<eos>|</?think>|</?answer>).)"
    if not think:
        given = text.removesuffix("<eos>")
        found = bool(given) and "<pad>" not in given
        return found and given == answer, bool(re.fullmatch(plain + "+<eos>", text)), given if found else None
    pairs = re.findall(r"<answer>((?:(?!</?answer>).)*)</answer>", text)
    given = pairs[-1] if pairs and pairs[-1] and "<pad>" not in pairs[-1] else None
    formed = re.fullmatch(f"<think>{plain}*</think><answer>{plain}+</answer><eos>", text)
    return given == answer, bool(formed), given


def mutated(rng: np.random.Generator, tokens: list[int], pool: list[int]) -> list[int]:
    """Up to two tokens deleted, inserted, replaced, or a stretch written twice."""
    tokens = list(tokens)
    for _ in range(rng.integers(0, 3)):
        at, new = int(rng.integers(len(tokens) + 1)), int(rng.choice(pool))
        cut = int(rng.integers(4))
        if cut == 3:
            stop = min(len(tokens), at + int(rng.integers(1, 8)))
            tokens[at:at] = tokens[at:stop]
        else:
            tokens[at : at + (cut > 0)] = [new] * (cut < 2)
    return tokens


@pytest.mark.parametrize(("name", "think"), BOTH)
def test_prompts_and_demonstrations_are_what_a_person_would_write(name, think):
    tasks, _, prompts, demonstrations = sample(name)
    expected = EXPECTED[name]
    assert len(set(map(len, prompts))) > 1  # ragged
    for prompt, tokens in zip(prompts, demonstrations[think].tolist(), strict=True):
        assert re.fullmatch(expected.prompt, prompt)
        answer, thoughts = expected.answer(prompt), expected.thoughts(prompt)
        text = f"<think>{thoughts}</think><answer>{answer}</answer>" if think else answer
        right = [*CHARACTERS.encode(text), END]
        assert tokens == right + [PAD] * (tasks[think].max_tokens - len(right))


LENGTHS = {
    "reverse": (range(3, 6), "[a-j]"),
    "sort": (range(3, 6), "[a-j]"),
    "modular_chain": (range(2, 5), "[0-9]"),
    "parity": (range(6, 13), "[01]"),
    "permutations": (range(3, 7), "[1-5][1-5]"),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_every_length_is_equally_likely(name):
    lengths, item = LENGTHS[name]
    prompts = sample(name).prompts
    found = Counter(len(re.findall(item, prompt)) for prompt in prompts)
    assert found.keys() == set(lengths)
    share = 1 / len(lengths)
    for number in found.values():
        assert abs(number / len(prompts) - share) < 4 * (share * (1 - share) / len(prompts)) ** 0.5


def test_every_number_of_digits_is_equally_likely():
    terms = [term for prompt in drawn(TASKS["addition"](), 4000) for term in re.findall("[0-9]+", prompt)]
    found = Counter(map(len, terms))
    np.testing.assert_allclose([found[digits] / len(terms) for digits in (1, 2, 3)], 1 / 3, atol=0.02)


@pytest.mark.parametrize(("name", "think"), BOTH)
def test_a_verdict_is_that_of_the_definitions(name, think):
    """Of demonstrations, near misses, cut-off ones and empty ones, with garbage behind the end of each."""
    tasks, problems, prompts, demonstrations = sample(name)
    max_tokens = tasks[think].max_tokens
    rng = np.random.default_rng(0)
    pool = [*range(6), *CHARACTERS.encode("0123abcd")]
    completions = rng.integers(0, CHARACTERS.size, (len(prompts), max_tokens))
    lengths, expected = [], []
    for i, prompt in enumerate(prompts):
        whole = [t for t in demonstrations[think][i].tolist() if t != PAD]
        tokens = (whole if i < 20 else mutated(rng, whole, pool))[:max_tokens]
        tokens = tokens[: rng.integers(len(tokens))] if i % 20 == 19 else tokens
        completions[i, : len(tokens)] = tokens
        lengths.append(len(tokens))
        expected.append(judged([CHARACTERS.symbols[t] for t in tokens], EXPECTED[name].answer(prompt), think))
    verify = jit(jax.vmap(tasks[think].verify))
    verdict = verify(problems, jnp.asarray(completions), jnp.asarray(lengths))
    accuracy, formed, answers = zip(*expected, strict=True)
    np.testing.assert_array_equal(verdict.accuracy, np.array(accuracy, np.float32))
    np.testing.assert_array_equal(verdict.format, np.array(formed, np.float32))
    assert all(accuracy[:19])
    assert 0.1 < np.mean(accuracy) < 0.9
    # Completions gave the same answer exactly where their fingerprints are the same.
    fingerprints = np.asarray(verdict.answer)
    np.testing.assert_array_equal(fingerprints == -1, [answer is None for answer in answers])
    assert len(set(zip(fingerprints.tolist(), answers, strict=True))) == len(set(answers)) == len(set(fingerprints))
    poisoned = np.where(np.arange(max_tokens) < np.array(lengths)[:, None], completions, END)
    for left, right in zip(verdict, verify(problems, jnp.asarray(poisoned), jnp.asarray(lengths)), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("think", [False, True])
def test_a_completion_is_read_as_defined(think):
    """Short random strings, mostly of tags."""
    rng = np.random.default_rng(1)
    whole = [*CHARACTERS.encode("<think></think><answer>1</answer>" if think else "11"), END]
    pool = [*range(6), 7, 7, 7]
    size, tokens = 12, np.zeros((2000, 12), int)
    lengths, expected = [], []
    for i in range(len(tokens)):
        one = mutated(rng, whole, pool) if i % 2 else [*rng.choice(pool, rng.integers(0, size)).tolist(), END]
        one = one[:size]
        tokens[i, : len(one)] = one
        lengths.append(len(one))
        expected.append(judged([CHARACTERS.symbols[t] for t in one], "1", think))
    reading = jit(jax.vmap(lambda t, n: parse_completion(t, n, think=think)))(jnp.asarray(tokens), jnp.asarray(lengths))
    _, formed, answers = zip(*expected, strict=True)
    assert 0.02 < np.mean(formed) < 0.98
    assert 0.02 < np.mean([a is None for a in answers]) < 0.98
    np.testing.assert_array_equal(reading.well_formed, formed)
    np.testing.assert_array_equal(reading.found, [a is not None for a in answers])
    for given, length, answer in zip(reading.answer.tolist(), reading.length.tolist(), answers, strict=True):
        if answer is not None:
            assert given == CHARACTERS.encode(answer) + [PAD] * (size - length)


@pytest.mark.parametrize("name", TASKS)
def test_no_problem_is_in_both_splits_and_draws_cover_them(name):
    settings, size = SMALL[name]

    def kind(prompt: str) -> str:
        """Problems that are to be held out together have the same."""
        if name not in ("addition", "countdown"):
            return prompt
        parts = re.split(r"[ +:=]", prompt)
        return str([*sorted(parts[:2]), *parts[2:]])

    train, test = (
        set(map(kind, drawn(TASKS[name](**settings, split=split), 4000 if split == "train" else 600)))
        for split in ("train", "test")
    )
    assert not train & test
    assert 0.03 < len(test) / len(train | test) < 0.25
    if size is not None and size < 1000:
        assert len(train | test) == size
    elif size is not None:
        assert 0.3 * size < len(train | test) <= size  # as many draws as there are problems


@pytest.mark.parametrize("name", TASKS)
def test_a_prompt_as_text_is_held_out_as_its_problem_is(name):
    train, test = (TASKS[name](**SMALL[name][0], split=split) for split in ("train", "test"))
    for task, expected in ((train, False), (test, True)):
        prompts = drawn(task, 200)
        assert set(train.is_held_out(prompts)) == set(test.is_held_out(prompts)) == {expected}


def test_whether_a_problem_is_held_out_does_not_depend_on_the_settings():
    short = set(drawn(TASKS["parity"](length=7, min_length=3, split="test"), 300))
    long = set(drawn(TASKS["parity"](length=9, min_length=3, split="train"), 3000))
    assert len({p for p in long if len(p) <= 8}) > 150
    assert not short & long


def test_only_some_demonstrations_think():
    task = TASKS["parity"](think=True, scratchpad_share=0.25)
    keys = jax.random.split(jax.random.key(5), 400)
    texts = [CHARACTERS.decode(t) for t in jit(jax.vmap(lambda k: task.demonstration(task.draw(k), k)))(keys).tolist()]
    empty = sum(text.startswith("<think></think><answer>") for text in texts)
    assert 0.65 < empty / len(texts) < 0.85
    assert all(re.fullmatch(r"<think>([01]{6,12})?</think><answer>[01]</answer>", text) for text in texts)


def test_an_answer_may_be_asked_for_backwards():
    task = TASKS["addition"](digits=9, reversed_answer=True)
    problem = Sum(jnp.array([999_999_999, 999_999_999]))
    demonstration = jit(task.demonstration)(problem, jax.random.key(0))
    assert CHARACTERS.decode(demonstration.tolist()) == "8999999991"
    assert CHARACTERS.decode(jit(task.prompt_tokens)(problem).tolist()) == "999999999+999999999="
    assert jit(task.verify)(problem, demonstration, jnp.array(11)).accuracy == 1


def test_values_of_several_digits_are_separated():
    task = TASKS["modular_chain"](modulus=100, terms=3, min_terms=3, think=True)
    minus, times = CHARACTERS.encode("-*")
    problem = Chain(jnp.array([3, 40, 50]), jnp.array([PAD, minus, times]), jnp.array(3))
    assert CHARACTERS.decode(jit(task.prompt_tokens)(problem).tolist()) == "3-40*50="
    text = CHARACTERS.decode(jit(task.demonstration)(problem, jax.random.key(0)).tolist())
    assert text == "<think>63,50</think><answer>50</answer>"


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("reverse", {"split": "valid"}, "train or test"),
        ("reverse", {"length": 2, "letters": 3}, "only 12 problems"),
        ("reverse", {"letters": 27}, "letters must be from 1 to 26"),
        ("sort", {"length": 4, "min_length": 5}, "min_length"),
        ("addition", {"digits": 10}, "from 1 to 9"),
        ("addition", {"digits": 1}, "only 55 problems"),
        ("addition", {"max_tokens": 4}, "up to 5 tokens"),
        ("modular_chain", {"modulus": 1}, "modulus"),
        ("modular_chain", {"terms": 1}, "terms"),
        ("parity", {"scratchpad_share": 0.5}, "think = true"),
        ("parity", {"think": True, "scratchpad_share": 1.5}, "from 0 to 1"),
        ("parity", {"length": 1001}, "from 1 to 1000"),
        ("permutations", {"objects": 10}, "from 3 to 9"),
        ("countdown", {"numbers": 7}, "from 2 to 6"),
        ("countdown", {"largest": 50, "largest_target": 40}, "largest_target"),
        ("countdown", {"numbers": 6, "largest": 99}, "product"),
    ],
)
def test_bad_settings_are_refused(name, settings, words):
    with pytest.raises(UserError, match=words) as error:
        TASKS[name](**settings)
    assert name in str(error.value)


@pytest.mark.parametrize("name", TASKS)
def test_every_setting_has_a_meaning_and_a_token_limit_is_kept(name):
    assert all(option.meaning for option in options(TASKS[name]).values())
    task = TASKS[name](max_tokens=40)
    assert task.max_tokens == 40
    shapes = jax.eval_shape(lambda key: task.demonstration(task.draw(key), key), jax.random.key(0))
    assert shapes.shape == (40,)
    assert shapes.dtype == jnp.int32


def test_only_demonstrations_need_room_for_a_scratchpad():
    settings = {"length": 6, "think": True}
    longest = TASKS["parity"](**settings).max_tokens - SPARE_TOKENS
    enough, few = (TASKS["parity"](**settings, max_tokens=tokens) for tokens in (longest, longest - 1))
    enough.check_demonstrations()
    assert few.max_tokens == longest - 1  # and its completions can be verified
    with pytest.raises(UserError, match=f"up to {longest} tokens, so max_tokens = {longest - 1} is too few to learn"):
        few.check_demonstrations()
    with pytest.raises(UserError, match="answer alone has up to 6 tokens"):
        TASKS["parity"](**settings, max_tokens=5)


def test_text_is_encoded_by_the_longest_symbol():
    vocabulary = Vocabulary(("<pad>", "<eos>", "a", "ab", "b"))
    assert vocabulary.encode("ababba") == [3, 3, 4, 2]
    assert vocabulary.encode("abab<eos>ba", special_tokens=True) == [3, 3, 1, 4, 2]
    assert vocabulary.decode([0, 3, 0, 4, 1, 2]) == "abb"
    assert (vocabulary.size, vocabulary.end, vocabulary.id("b")) == (5, 1, 4)
    with pytest.raises(UserError, match="'c', character 3"):
        vocabulary.encode("abc")
    with pytest.raises(UserError, match="'<', character 2"):
        vocabulary.encode("a<eos>")
    assert Vocabulary(("<pad>", "<eos>", *"<eos>")).encode("<eos>") == [2, 3, 4, 5, 6]
    assert Vocabulary(("<pad>", "<eos>", "a.b", "\n")).encode("\na.b") == [3, 2]
    assert len(set(CHARACTERS.symbols)) == CHARACTERS.size == 54
    assert (CHARACTERS.symbols[PAD], CHARACTERS.symbols[END]) == ("<pad>", "<eos>")


@pytest.mark.parametrize("number", [0, 7, 10, 99, 100, 305])
def test_numerals(number):
    assert CHARACTERS.decode(pack("a", numeral(jnp.array(number), 3), "=").tolist()) == f"a{number}="


def test_a_fingerprint_tells_texts_apart_and_ignores_padding():
    texts = jnp.array([[a, b, c, 0] for a in range(6, 16) for b in range(6, 16) for c in range(6, 16)])
    hashes = np.asarray(jax.vmap(fingerprint)(texts))
    assert len(set(hashes.tolist())) == 1000
    np.testing.assert_array_equal(hashes, jax.vmap(fingerprint)(texts[:, :3]))
    shares = np.bincount(hashes % 10, minlength=10)
    assert shares.min() > 60
    assert shares.max() < 140


# A task of one's own by name.

OWN_TASK = """
from __future__ import annotations

from jaxpg.envs.text import TASKS, Task


def mine(*, length: int = 3, split: str = "train") -> Task:
    return TASKS["sort"](length=length, split=split)


def quiet(length: int = 3):
    return TASKS["sort"](length=length)


def broken() -> Task:
    raise ValueError("no words")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_task_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_function_that_returns_a_task_is_an_environment_and_a_task(own: str) -> None:
    """With the settings of the function and those of every text task; the split is jaxpg's to choose."""
    assert envs.default_settings(f"{own}:mine").keys() > {"length", "split", "rewards", "overlong_cache"}
    env = envs.make(f"{own}:mine", length=2, rewards={"format": 1.0})
    assert env.outcome is not None
    sizes = {"environment": f"{own}:mine", "environment_settings": {"length": 2}, "network": {"kind": "transformer"}}
    config = resolve_tables({**sizes, "rewards": {"accuracy": 0.5}}, "grpo", source=Path("own.toml"))
    train, test = (text_task(config, split) for split in ("train", "test"))
    assert train.prompt_length == TASKS["sort"](length=2).prompt_length
    drawn = [{tuple(np.asarray(x)) for x in draw_prompts(task)} for task in (train, test)]
    assert not drawn[0] & drawn[1]


def draw_prompts(task: Task) -> jax.Array:
    return jax.vmap(lambda key: task.prompt_tokens(task.draw(key)))(jax.random.split(jax.random.key(0), 64))


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("quiet", "quiet returns a text task, which the signature of its function must say: -> Task"),
        ("broken", r"broken cannot be made: its function raised ValueError: no words \(own_task_.*, line"),
    ],
)
def test_a_task_of_ones_own_that_cannot_be_is_refused(own: str, function: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        envs.make(f"{own}:{function}")
