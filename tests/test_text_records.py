"""Tasks and pairs from a user's files: what is read, what is right, what the host says, and all that is refused."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec

from jaxpg import envs, parallel, preferences
from jaxpg.envs import text
from jaxpg.envs.text import CHARACTERS, END, PAD, TASKS, Vocabulary, json_lines, jsonl, preference_pairs, text_env
from jaxpg.envs.text.jsonl_reader import encode_fields, held_out_share, pad_rows
from jaxpg.envs.text.matching import extract_answer
from jaxpg.envs.text.rewards import grade, make_reward
from jaxpg.errors import UserError
from jaxpg.parallel import collectives, host_callback
from jaxpg.types import Prompt

POISON = CHARACTERS.id("4")
POINTED = Vocabulary((*CHARACTERS.symbols, "."))
SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
SPOKEN = {"prompt": "3*5=", "answer": "15", "completion": "<think>5+5+5</think><answer>15</answer>"}


pytestmark = pytest.mark.usefixtures("no_failures")


@pytest.fixture
def write(tmp_path):
    """Records, or lines as they are, as a file."""

    def write(lines, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
        return path

    return write


def completion(words, width, vocabulary=CHARACTERS):
    """Tokens [width] of a text, its end tag written as "$", poison behind it, and how many there are."""
    special = {"$": [END], "<pad>": [PAD]}
    ids = [i for piece in re.split(r"(\$|<pad>)", words) for i in special.get(piece) or vocabulary.encode(piece)]
    return jnp.array(ids + [POISON] * (width - len(ids)), jnp.int32), jnp.int32(len(ids))


def judge(task, words, problem=0):
    tokens, length = completion(words, task.max_tokens, task.vocabulary)
    verdict = tiny.jit(task.verify)(jnp.int32(problem), tokens, length)
    return float(verdict.accuracy), float(verdict.format), int(verdict.answer)


# What is read.


def test_a_record_becomes_a_prompt_and_a_demonstration(write):
    task = json_lines(write([*SUMS, SPOKEN]), "standard")
    assert (task.name, task.prompt_length, task.max_tokens) == ("data", 4, len("5+5+5") + 4 + len("15") + 1)
    spoken, key = jnp.int32(36), jax.random.key(0)
    assert CHARACTERS.decode(task.prompt_tokens(jnp.int32(8))) == "1+2="
    assert CHARACTERS.decode(task.prompt_tokens(spoken)) == "3*5="
    assert CHARACTERS.decode(task.demonstration(jnp.int32(8), key)) == "3"
    assert CHARACTERS.decode(task.demonstration(spoken, key)) == SPOKEN["completion"]
    np.testing.assert_array_equal(task.demonstration(jnp.int32(8), key)[:3], [CHARACTERS.id("3"), END, PAD])
    assert task.prompt_tokens(spoken).dtype == task.demonstration(spoken, key).dtype == jnp.int32


def test_every_demonstration_is_right(write):
    for split in ("train", "test"):
        task = json_lines(write([*SUMS, SPOKEN]), split=split, held_out=0.3)

        def demonstrated(key, task=task):
            problem = task.draw(key)
            tokens = task.demonstration(problem, key)
            return task.verify(problem, tokens, (tokens != PAD).sum()), problem

        verdict, problem = tiny.jit(jax.vmap(demonstrated))(jax.random.split(jax.random.key(0), 64))
        assert len(set(np.asarray(problem).tolist())) > 5
        np.testing.assert_array_equal(verdict.accuracy, 1)
        np.testing.assert_array_equal(verdict.format, 1)


def test_fields_have_the_names_they_are_given_and_numbers_are_answers(write):
    path = write([{"q": "7+5=", "a": 12, "prompt": 3, "more": [None]}, "", {"q": "1-4=", "a": -3}])
    task = json_lines(path, prompt_field="q", answer_field="a", held_out=0)
    assert [task.vocabulary.decode(task.demonstration(jnp.int32(i), jax.random.key(0))) for i in range(2)] == [
        "12",
        "-3",
    ]
    assert judge(task, "-3$", problem=1)[0] == 1


@pytest.mark.parametrize("written", ["1.50", "3.14159265358979323846", "12345678901234567890.5", "1e-3", "-0.10"])
def test_a_number_is_the_text_that_the_file_has(write, written):
    """Not that of the nearest float, which its own completion would not equal."""
    path = write([f'{{"prompt": "1=", "answer": {written}, "completion": "{written}"}}'])
    for match in ("exact", "numeric"):
        task = json_lines(path, match=match, held_out=0)
        assert task.answers(np.arange(1)) == [written]
        shown = task.demonstration(jnp.int32(0), jax.random.key(0))
        assert task.verify(jnp.int32(0), shown, jnp.int32((shown != PAD).sum())).accuracy == 1


def test_the_characters_of_a_file_are_a_vocabulary(write):
    path = write(
        [{"prompt": "né?\n", "answer": "ü<answer>"}, {"prompt": "日", "answer": "n", "extra": "z", "number": 3}]
    )
    vocabulary = text.character_vocabulary(path)
    assert vocabulary.symbols == (*CHARACTERS.symbols[:6], *sorted("né?\nü日z3"))
    assert vocabulary.decode(vocabulary.encode("né日<answer>")) == "né日<answer>"
    assert (vocabulary.end, vocabulary.size) == (END, 14)
    assert json_lines(path, held_out=0).vocabulary == vocabulary


def test_a_byte_order_mark_and_carriage_returns_are_no_text(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "1", "answer": "2"}\r\n\r\n{"prompt": "3", "answer": "4"}')
    assert json_lines(path, "standard", held_out=0).prompt_tokens(jnp.int32(1))[0] == CHARACTERS.id("3")


def test_text_of_data_is_never_a_special_token(write):
    """Padding and the end are tokens that only jaxpg writes; a user's text that spells them is characters."""
    path = write([{"prompt": "a<eos>b<pad>", "answer": "<eos>", "completion": "x<answer><eos></answer>"}])
    task = json_lines(path, held_out=0)
    prompt = np.asarray(task.prompt_tokens(jnp.int32(0)))
    assert len(prompt) == len("a<eos>b<pad>")
    assert not np.isin(prompt, [PAD, END]).any()
    assert task.vocabulary.decode(prompt) == "a<eos>b<pad>"
    shown = np.asarray(task.demonstration(jnp.int32(0), jax.random.key(0)))
    assert (shown == END).tolist() == [False] * (len(shown) - 1) + [True]
    assert task.verify(jnp.int32(0), jnp.asarray(shown), jnp.int32(len(shown))).accuracy == 1


def test_a_file_that_is_read_again_warns_no_more(write, caplog):
    path = write([SPOKEN])
    for _ in range(2):
        for split in ("train", "test"):
            json_lines(path, split=split, held_out=0)
    assert len(caplog.records) == 1


def test_a_long_prompt_may_be_left_out(write, caplog):
    path = write([SUMS[3], {"prompt": "1+2+3=", "answer": "6"}, SUMS[4]])
    task = json_lines(path, "standard", prompt_length=4, skip_long_prompts=True, held_out=0)
    assert [CHARACTERS.decode(task.prompt_tokens(jnp.int32(i))) for i in range(2)] == ["0+3=", "0+4="]
    assert drawn(task) == {0, 1}
    assert judge(task, "4$", problem=1)[0] == 1
    assert "Left out 1 of 3 records" in caplog.text
    assert "line 2: the field 'prompt' has 6 tokens" in caplog.text
    pairs = [{"prompt": p, "chosen": "1", "rejected": "2"} for p in ("ab", "abcd", "c")]
    settings = {"prompt_length": 3, "skip_long_prompts": True, "held_out": 0}
    assert len(preference_pairs(write(pairs, "pairs.jsonl"), "standard", **settings).chosen) == 2


def test_max_tokens_below_a_demonstration_is_refused_where_one_is_needed(write):
    task = json_lines(write([SPOKEN, *SUMS]), "standard", max_tokens=4, held_out=0)
    assert task.max_tokens == 4
    assert judge(task, "15$")[0] == 1
    sentence = "line 1: the field 'completion' has 12 tokens with its end, more than max_tokens = 4.*Raise max_tokens"
    with pytest.raises(UserError, match=sentence):
        task.demonstration(jnp.int32(5), jax.random.key(0))
    with pytest.raises(UserError, match=sentence):
        preferences.sft(task, tiny.softmax_policy(jnp.zeros((2, 3))))
    with pytest.raises(UserError, match=sentence):
        preferences.make_pairs(task, task, slip_rate=0.5)


def test_a_file_is_read_once(write, monkeypatch):
    """Both splits, and a task that is made again, take the same arrays; a file that has changed is read again."""
    path, encoded = write(SUMS), []
    monkeypatch.setattr(jsonl, "encode_fields", lambda *a, **k: encoded.append(1) or encode_fields(*a, **k))
    train, test, again = (json_lines(path, split=split, held_out=0.3) for split in ("train", "test", "train"))
    assert len(encoded) == 1
    assert train.vocabulary == test.vocabulary == again.vocabulary
    write([{"prompt": "9+9=", "answer": "9"}, *SUMS[1:]])  # as many bytes
    assert CHARACTERS.decode(json_lines(path, "standard", held_out=0).prompt_tokens(jnp.int32(0))) == "9+9="
    assert len(encoded) == 2


def test_a_completion_may_be_empty(write):
    """A policy that ends at once has written a completion, which may be learned from, or rejected."""
    task = json_lines(write([completed("")]), "standard", max_tokens=3, held_out=0)
    assert task.demonstration(jnp.int32(0), jax.random.key(0)).tolist() == [END, PAD, PAD]
    pairs = preference_pairs(write([{"prompt": "1", "chosen": "2", "rejected": ""}]), "standard", held_out=0)
    assert pairs.rejected.tolist() == [[END, PAD]]


def test_a_truncated_completion_is_no_demonstration(write):
    path = write([GOOD, completed("3") | {"ended": False}, completed("3") | {"ended": True}])
    task = json_lines(path, "standard", held_out=0)
    assert task.prompt_tokens(jnp.int32(1)).shape == (4,)  # its prompts are prompts
    with pytest.raises(UserError, match=r"line 2: the completion was truncated .* sample --only ended writes none"):
        task.demonstration(jnp.int32(0), jax.random.key(0))


# The split.


def drawn(task, count=400):
    return set(np.asarray(jax.vmap(task.draw)(jax.random.split(jax.random.key(0), count))).tolist())


def test_every_prompt_is_in_one_split(write):
    records = [{"prompt": f"{i % 30}", "answer": str(i)} for i in range(90)]  # every prompt three times
    path = write(records)
    train, test = (json_lines(path, split=split, held_out=0.3) for split in ("train", "test"))
    in_train, in_test = drawn(train), drawn(test)
    assert in_train | in_test == set(range(90))
    assert not {i % 30 for i in in_train} & {i % 30 for i in in_test}
    assert 3 * 3 <= len(in_test) <= 3 * 16
    assert (train.prompt_length, train.max_tokens) == (test.prompt_length, test.max_tokens)
    # Records that are added move none of the others.
    longer = write([*records, *({"prompt": f"x{i}", "answer": "0"} for i in range(30))], "longer.jsonl")
    more = drawn(json_lines(longer, split="test", held_out=0.3), 800)
    assert {i for i in more if i < 90} == in_test


def test_more_held_out_holds_out_more(write):
    path = write([{"prompt": str(i), "answer": "1"} for i in range(500)])
    shares = [len(drawn(json_lines(path, split="test", held_out=h), 4000)) / 500 for h in (0.05, 0.4, 1.0)]
    np.testing.assert_allclose(shares, [0.05, 0.4, 1.0], atol=0.07)
    assert len(drawn(json_lines(path, held_out=0), 8000)) == 500


def test_a_split_says_how_many_problems_it_has(write):
    train, test = (json_lines(write(SUMS), split=split, held_out=0.3) for split in ("train", "test"))
    assert [task.num_problems for task in (train, test)] == [len(drawn(task)) for task in (train, test)]
    assert train.num_problems + test.num_problems == len(SUMS)


def test_space_around_a_prompt_moves_it_into_no_other_split():
    """What differs by that alone is the same question, whose answer would be known from the other split."""
    prompts, split = [f"{i}+{i}" for i in range(200)], held_out_share(0.5)
    assert split(prompts) == split([f" {prompt}\n" for prompt in prompts])
    assert 0.3 < np.mean(split(prompts)) < 0.7


@pytest.mark.parametrize("records", [SUMS, [SPOKEN]])
def test_with_nothing_held_out_both_splits_are_all_records(write, records, caplog):
    path = write(records)
    train, test = (json_lines(path, split=split, held_out=0.0) for split in ("train", "test"))
    assert drawn(train) == drawn(test) == set(range(len(records)))
    assert "held_out is 0: evaluations are of the prompts" in caplog.text
    pairs = write([{"prompt": "3*5=", "chosen": "15", "rejected": "1"}], "pairs.jsonl")
    for held_out in (0.0, train.is_held_out):  # its own share, or that of a task
        of_test = preference_pairs(pairs, "standard", split="test", held_out=held_out)
        assert CHARACTERS.decode(np.asarray(of_test.chosen)[0]) == "15"


# What is right.


@pytest.mark.parametrize(
    ("words", "right"),
    [
        ("15$", True),
        ("<think>5+5+5</think><answer>15</answer>$", True),
        ("<answer>15</answer>14$", True),
        ("<answer>14</answer><answer>15</answer>$", True),
        ("<answer>15</answer><answer>14</answer>$", False),
        ("<answer>15</answer><answer>14$", True),  # never closed
        ("<answer>15<answer>15</answer>$", True),
        ("<answer>14</answer>15$", False),
        ("</answer>15$", False),
        ("1$", False),
        ("155$", False),
        ("<answer></answer>$", False),
        ("$", False),
        ("15", False),  # did not end
        ("15<pad>$", False),
        (" 15 $", True),
        ("<answer> 15  </answer>1$", True),
        ("<answer>15</answer> $", True),
        ("1 5$", False),
        (" $", False),
    ],
)
def test_an_exact_answer(write, words, right):
    task = json_lines(write([SPOKEN]), "standard", max_tokens=30, held_out=0)
    accuracy, form, answer = judge(task, words)
    assert accuracy == right
    if right:
        assert (form, answer) == judge(task, "15$")[1:]
    else:
        assert answer != judge(task, "15$")[2]
    assert (answer >= 0) == form == (words not in ("$", " $", "15", "<answer></answer>$", "15<pad>$"))


@pytest.mark.parametrize("vocabulary", ["standard", POINTED], ids=["tokens", "texts"])
def test_the_answer_of_a_record_is_read_as_that_of_a_completion(write, vocabulary):
    """`<answer>15</answer>` in the file is the answer 15, whatever is around it; nothing between its tags is none."""
    tagged = SPOKEN | {"answer": "<think>5+5+5</think><answer> 15 </answer>"}
    task = json_lines(write([tagged]), vocabulary, max_tokens=45, held_out=0)
    for words in ("15$", "<answer>15</answer>$", tagged["answer"] + "$"):
        assert judge(task, words)[0] == 1
    assert judge(task, "14$")[0] == 0
    with pytest.raises(UserError, match="line 1: the field 'answer' has no text between its answer tags"):
        json_lines(write([SPOKEN | {"answer": "<answer> </answer>"}]), vocabulary, max_tokens=45, held_out=0)


LETTERS = {END: "$", PAD: "_", CHARACTERS.id("<answer>"): "<", CHARACTERS.id("</answer>"): ">"}
LETTERS |= {CHARACTERS.id(c): c for c in "45"}


def read(word):
    """The answer in a completion, a letter per token, by a regular expression; None if there is none."""
    body, end, _ = word.partition("$")
    if not end:
        return None
    tagged = re.match(r".*<(.*?)>", body)
    answer = tagged[1] if tagged else body
    return answer if answer and "_" not in answer else None


def test_exact_answers_are_those_a_regular_expression_finds(write):
    """Random tokens, most of them tags; what stands behind the length is poison."""
    task = json_lines(write([{"prompt": "4", "answer": "4"}]), "standard", max_tokens=9, held_out=0)
    rng = np.random.default_rng(0)
    tokens = rng.choice(list(LETTERS), size=(3000, 9), p=[0.12, 0.04, 0.22, 0.22, 0.2, 0.2]).astype(np.int32)
    lengths = rng.integers(1, 10, 3000).astype(np.int32)
    verdict = tiny.jit(jax.vmap(task.verify, (None, 0, 0)))(jnp.int32(0), tokens, lengths)
    answers = [read("".join(LETTERS[i] for i in row[:n].tolist())) for row, n in zip(tokens, lengths, strict=True)]
    expected = [answer == "4" for answer in answers]
    assert 20 < sum(expected) < 1000
    np.testing.assert_array_equal(verdict.accuracy, expected)
    np.testing.assert_array_equal(verdict.format, [answer is not None for answer in answers])
    fingerprints = dict(zip(answers, np.asarray(verdict.answer).tolist(), strict=True))
    np.testing.assert_array_equal(verdict.answer, [fingerprints[answer] for answer in answers])
    assert fingerprints.pop(None) == -1
    assert len(set(fingerprints.values())) == len(fingerprints) > 50  # no two answers look alike
    assert min(fingerprints.values()) >= 0


def test_tags_may_take_many_tokens_or_none(write):
    path = write([{"prompt": "?", "answer": "15", "completion": "<answer>15</answer>"}])
    spelled = json_lines(path, Vocabulary(("<pad>", "<eos>", *"?15<>/answer")), held_out=0, max_tokens=30)
    assert len(spelled.vocabulary.encode("<answer>")) == 8
    assert judge(spelled, "5<answer>15</answer>1$")[0] == judge(spelled, "15$")[0] == 1
    assert judge(spelled, "5<answer>15</answe>1$")[0] == judge(spelled, "15<answer>1</answer>$")[0] == 0
    path = write([{"prompt": "?", "answer": "15"}])
    untagged = json_lines(path, Vocabulary(("<pad>", "<eos>", *"?15")), held_out=0)
    assert judge(untagged, "15$")[0] == 1
    assert judge(untagged, "51$")[0] == 0


@pytest.mark.parametrize(
    ("words", "accuracy", "form"),
    [
        ("so 14, or 15.0$", 1, 1),
        ("15 or 14$", 0, 1),
        ("<answer>15</answer>$", 1, 1),
        ("1,5$", 0, 0),
        ("30/2$", 1, 1),
        ("none$", 0, 0),
        ("15", 0, 0),  # did not end
    ],
)
def test_a_numeric_answer(write, words, accuracy, form):
    task = json_lines(write([SPOKEN | {"answer": "3*5 is 15"}]), POINTED, match="numeric", max_tokens=30, held_out=0)
    assert judge(task, words)[:2] == (accuracy, form)
    assert (judge(task, words)[2] >= 0) == form


def test_padding_inside_of_a_completion_is_no_part_of_an_answer(write):
    """A policy can write it, and is not paid for it: on the host as where tokens are compared."""
    record = SPOKEN | {"answer": "42"}
    seen = []

    def looked_at(prompt, completion, answer):
        seen.append(completion)
        return float(completion == answer)

    for match in ("exact", "numeric", looked_at):
        task = json_lines(write([record]), POINTED, match=match, max_tokens=30, held_out=0)
        assert judge(task, "42$")[0] == 1
        assert judge(task, "4<pad><pad>2$")[0] == 0
    assert seen == ["42", "4<pad><pad>2"]


def test_equal_numbers_are_one_answer(write):
    task = json_lines(write([SPOKEN]), POINTED, match="numeric", max_tokens=30, held_out=0)
    answers = [judge(task, words)[2] for words in ("15$", "15.0$", "+15$", "15e0$", "14$", "-15$")]
    assert len(set(answers[:4])) == 1
    assert len(set(answers)) == 3


# The host.


def share_of_fives(prompt, completion, answer):
    """A graded reward: 1 for the answer, less for others, below 0 for none."""
    return 1 if completion == answer else completion.count("5") / 10 - (completion == "")


def test_a_function_says_how_good_a_completion_is(write):
    task = json_lines(write([SPOKEN, *SUMS]), "standard", match=share_of_fives, max_tokens=30, held_out=0)
    assert judge(task, "15$")[:2] == (1, 1)
    np.testing.assert_allclose(judge(task, "555$")[:2], (0.3, 1), rtol=1e-6)
    np.testing.assert_allclose(judge(task, "555"), (0.3, 0, -1), rtol=1e-6)  # cut off, and asked about all the same
    assert judge(task, "$")[:2] == (-1, 1)
    assert judge(task, "3$", problem=9)[0] == 1  # 1+2=
    assert judge(task, "<think>5</think><answer>1</answer>$")[2] == judge(task, "1$")[2] != judge(task, "2$")[2]


def test_what_tags_enclose():
    assert extract_answer("a<answer> 1 </answer>b") == "1"
    assert extract_answer("<answer>1</answer><answer>2</answer>") == "2"
    assert extract_answer(" <answer>1 ") == "<answer>1"
    assert (
        extract_answer("<answer>1</answer>, 2</answer>") == "1"
    )  # as `_verify_exactly` and `parse_completion` read it
    assert extract_answer("1</answer> ") == "1</answer>"


def test_functions_and_tokenizers_may_stand_for_their_names(write):
    settings = {"path": str(write([SPOKEN])), "max_tokens": 20, "held_out": 0.0}
    env = envs.make("json_lines", tokenizer=CHARACTERS, match=share_of_fives, **settings)
    assert env.action_space.n == CHARACTERS.size
    task = envs.make_task("json_lines", tokenizer=CHARACTERS, match=share_of_fives, **settings)
    np.testing.assert_allclose(judge(task, "555$")[0], 0.3, rtol=1e-6)
    for wrong, sentence in (
        ({"match": CHARACTERS}, "match must be exact, numeric, a function or its name"),
        ({"tokenizer": share_of_fives}, "tokenizer must be a name, the path of a tokenizer.json, or have size"),
    ):
        with pytest.raises(UserError, match=sentence):
            envs.make("json_lines", **settings, **wrong)


def test_a_reward_function_may_ask_for_its_record(write):
    """With the fields that the task does not read, and with a setting of its own."""
    records = [{"prompt": f"{i}=", "answer": i, "costs": [i, 10]} for i in range(4)]
    seen = []

    def price(prompt, completion, record, *, scale):
        seen.append((prompt, completion, record))
        return scale * record["costs"][0]

    task = json_lines(write(records), "standard", max_tokens=4, held_out=0)
    reward = make_reward("price", {"function": price, "scale": 0.5}, task)
    tokens, length = completion("2$", 4)
    values = jax.vmap(lambda i: reward.function(grade(task, i, tokens, length)))(jnp.array([3, 1]))
    np.testing.assert_allclose(values, [1.5, 0.5])
    assert seen == [(f"{i}=", "2", {"prompt": f"{i}=", "answer": str(i), "costs": [i, 10]}) for i in (3, 1)]
    own = make_reward(
        "price", {"function": price, "scale": 2.0, "record": {"costs": [7]}}, task
    )  # a setting of that name
    np.testing.assert_allclose(own.function(grade(task, 3, tokens, length)), 14)
    with pytest.raises(UserError, match="price takes the record of a file, and the problems of sort are generated"):
        make_reward("price", {"function": price, "scale": 0.5}, TASKS["sort"]())


def test_a_function_is_found_by_its_name(write, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_rewards.py").write_text(
        "THREE = 3\ndef length(prompt, completion, answer): return len(completion)\n"
    )
    env = envs.make(
        "json_lines",
        path=str(write([SPOKEN])),
        tokenizer="standard",
        match="my_rewards:length",
        max_tokens=20,
        held_out=0.0,
        rewards={"accuracy": 0.5, "format": 1.0},
    )
    state, _ = env.reset(jax.random.key(0))
    for token in CHARACTERS.encode("abc"):
        state, _ = env.step(jax.random.key(0), state, jnp.int32(token))
    outcome = env.outcome(state)
    assert (outcome.reward, outcome.parts["accuracy"], outcome.parts["truncated"]) == (1.5, 3, 1)
    path = write([SPOKEN])
    for name, sentence in {
        "my_rewards:lenght": "my_rewards:lenght cannot be imported: my_rewards has no 'lenght'. Did you",
        "no_such_module:f": "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'",
        "my_rewards:THREE": "must be a function, not 3",
        "numerc": "no way to match 'numerc'. Did you mean 'numeric'",
    }.items():
        with pytest.raises(UserError, match=sentence):
            json_lines(path, match=name, held_out=0)


def batch(width, rows, seed=0):
    """Problems, completions [rows, width] and lengths of any kind."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, CHARACTERS.size, (rows, width)).astype(np.int32)
    problems, lengths = rng.integers(0, 36, rows).astype(np.int32), rng.integers(1, width + 1, rows).astype(np.int32)
    return jnp.asarray(problems), jnp.asarray(tokens), jnp.asarray(lengths)


def noting(calls):
    def note(prompt, completion, answer):
        calls.append((prompt, completion, answer))
        return len(completion) % 7

    return note


@pytest.mark.parametrize("width", [3, 8, 19])
def test_a_batch_goes_to_the_host_row_by_row(write, width):
    calls = []
    task = json_lines(write(SUMS), "standard", match=noting(calls), max_tokens=width, held_out=0)
    problems, tokens, lengths = batch(width, rows=6)
    verdict = tiny.jit(jax.vmap(task.verify))(problems, tokens, lengths)
    rows = [row[:n].tolist() for row, n in zip(np.asarray(tokens), lengths, strict=True)]
    written = ["".join(CHARACTERS.symbols[i] for i in row).partition("<eos>")[0] for row in rows]  # "<pad>" too
    np.testing.assert_array_equal(verdict.accuracy, [len(words) % 7 for words in written])
    asked = [(SUMS[i]["prompt"], words, SUMS[i]["answer"]) for i, words in zip(problems, written, strict=True)]
    assert calls == asked
    # Two runs side by side, each with a batch.
    stacked = jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), (problems, tokens, lengths))
    twice = tiny.jit(jax.vmap(jax.vmap(task.verify)))(*stacked)
    jax.tree.map(np.testing.assert_array_equal, twice, jax.tree.map(lambda x: x.reshape(2, 3), verdict))
    # And problems that are all the same.
    alike = tiny.jit(jax.vmap(task.verify, (None, 0, 0)))(jnp.int32(7), tokens, lengths)
    np.testing.assert_array_equal(alike.accuracy, verdict.accuracy)
    assert {(prompt, answer) for prompt, _, answer in calls[-6:]} == {("1+1=", "2")}


def test_the_host_is_called_once_for_a_batch(monkeypatch):
    calls = []

    def count(rows, number):
        calls.append(rows.shape)
        return (rows.sum(-1) + number,)

    shape = (jax.ShapeDtypeStruct((), jnp.int32),)
    (sums,) = jax.jit(jax.vmap(lambda x, n: host_callback.call(count, shape, x, n)))(
        jnp.ones((5, 21), int), jnp.arange(5)
    )
    np.testing.assert_array_equal(sums, 21 + np.arange(5))
    assert calls == [(5, 21)]


def test_a_demonstration_has_the_same_tokens_for_its_answer_as_the_answer_alone(write):
    """With tokens of several characters, one could else swallow a part of a tag."""
    vocabulary = Vocabulary(("<pad>", "<eos>", ">15<", *"?15<>/answer"))
    record = {"prompt": "?", "answer": "15", "completion": "<answer>15</answer>"}
    task = json_lines(write([record]), vocabulary, held_out=0)
    tokens = task.demonstration(jnp.int32(0), jax.random.key(0))
    assert task.verify(jnp.int32(0), tokens, jnp.int32(len(tokens))).accuracy == 1


WRONG = {
    "nan": float("nan"),
    "inf": np.float32(np.inf),
    "none": None,
    "text": "0.5",
    "complex": 1j,
    "an axis": np.ones(1),
    "complex array": np.array(1j),
    "large": 1e16,
    "huge": 10**400,
    "beyond": 10**5000,
}


def broken(kind):
    def reward(prompt, completion, answer):
        if prompt != "1+2=":
            return 1.0
        if kind == "raises":
            return 1 / 0
        return WRONG[kind]

    return reward


REASONS = {
    "raises": "raised ZeroDivisionError: division by zero",
    "nan": "returned nan instead of a finite number",
    "inf": r"returned np.float32\(inf\) instead",
    "none": "returned None instead",
    "text": "returned '0.5' instead",
    "complex": "returned 1j instead",
    "an axis": r"returned array\(\[1\.\]\) instead",
    "complex array": r"returned array\(0\.\+1\.j\) instead",
    "large": r"returned 1e\+16 instead of a finite number of at most 1e\+15 in size",
    "huge": r"returned 1000000.* instead of a finite number of at most 1e\+15 in size",
    "beyond": r"returned a value too long to show instead of a finite number of at most 1e\+15 in size",
}


@pytest.mark.parametrize("kind", REASONS)
def test_a_reward_that_fails_is_told_with_its_record(write, kind):
    path = write(["", *SUMS])
    task = json_lines(path, "standard", match=broken(kind), max_tokens=4, held_out=0)
    tokens, length = completion("12$", 4)
    verify = tiny.jit(jax.vmap(task.verify, (0, None, None)))
    assert (verify(jnp.arange(3), tokens, length).accuracy == 1).all()
    host_callback.raise_failure()  # nothing yet
    verdict = verify(jnp.arange(7, 10), tokens, length)
    assert np.isnan(verdict.accuracy).all()
    assert (verdict.answer == -1).all()
    sentence = f"^The reward function reward {REASONS[kind]}.*, for the record of .*data.jsonl, line 10 and .* '12'"
    with pytest.raises(UserError, match=sentence):
        host_callback.raise_failure()
    host_callback.clear_failures()
    host_callback.raise_failure()


@pytest.mark.parametrize("value", [True, np.bool_(True), 1, np.int64(1), np.float64(1.0), np.array(1), jnp.float32(1)])
def test_any_real_number_is_a_reward(write, value):
    task = json_lines(write([SPOKEN]), "standard", match=lambda prompt, completion, answer: value, held_out=0)
    assert judge(task, "1$")[0] == 1
    host_callback.raise_failure()


def test_the_first_failure_is_told():
    def fail(rows, number):
        raise UserError(f"number {number}")

    for i in (3, 4):
        host_callback.call(fail, (jax.ShapeDtypeStruct((), jnp.float32),), jnp.zeros(2), jnp.int32(i))
    with pytest.raises(UserError, match="number 3"):
        host_callback.raise_failure()


def test_a_failure_reaches_the_metrics_so_that_training_stops(write):
    task = json_lines(write(SUMS), "standard", match=broken("raises"), max_tokens=4, held_out=0)
    env = text_env(task, rewards={"format": 1.0})
    state, _ = env.reset(jax.random.key(0))
    state = state._replace(problem=jnp.int32(8), tokens=completion("1$", 4)[0], length=jnp.int32(2))
    assert np.isnan(env.outcome(state).parts["accuracy"])


@pytest.mark.parametrize("match", [broken("raises"), share_of_fives])
def test_devices_that_wait_for_each_other_do_not_wait_for_ever(write, match):
    """One of four fails, or sends so much that XLA would copy it in a thread that waits for the others."""
    width, rows = 512, 4 * 64
    task = json_lines(write(SUMS), "standard", match=match, max_tokens=width, held_out=0)
    problems, tokens, lengths = batch(width, rows)
    problems = jnp.zeros_like(problems).at[200].set(8)

    def mean(problems, tokens, lengths):
        def body(total, _):
            verdict = jax.vmap(task.verify)(problems, tokens, lengths)
            return total + collectives.mean(verdict.accuracy), ()

        return jax.lax.scan(body, jnp.zeros(()), length=3)[0]

    mesh = parallel.make_mesh(1, rows, jax.devices()[:4])
    split, whole = PartitionSpec(collectives.DATA), PartitionSpec()
    total = tiny.jit(parallel.spread(mean, mesh, in_specs=split, out_specs=whole))(problems, tokens, lengths)
    if match is share_of_fives:
        one = tiny.jit(mean)(problems, tokens, lengths)
        np.testing.assert_allclose(total, one, rtol=1e-5)
        host_callback.raise_failure()
    else:
        assert np.isnan(total)
        with pytest.raises(UserError, match=r"line 9"):
            host_callback.raise_failure()


# Pairs.

PAIRS = [{"prompt": "a" * n, "chosen": "bb", "rejected": "c" * (n + 1)} for n in range(1, 4)]


def test_pairs_are_prompts_and_two_completions(write):
    pairs = preference_pairs(write(PAIRS), "standard", held_out=0)
    a, b, c = (CHARACTERS.id(symbol) for symbol in "abc")
    np.testing.assert_array_equal(pairs.prompt.tokens, [[a, PAD, PAD], [a, a, PAD], [a, a, a]])
    np.testing.assert_array_equal(pairs.prompt.mask, np.asarray(pairs.prompt.tokens) == a)
    np.testing.assert_array_equal(pairs.chosen, [[b, b, END, PAD, PAD]] * 3)
    np.testing.assert_array_equal(pairs.rejected, [[c, c, END, PAD, PAD], [c, c, c, END, PAD], [c, c, c, c, END]])
    assert isinstance(pairs.prompt, Prompt)
    assert pairs.chosen.dtype == pairs.prompt.tokens.dtype == jnp.int32
    wide = preference_pairs(write(PAIRS), "standard", held_out=0, prompt_length=7, max_tokens=9)
    assert (wide.prompt.tokens.shape, wide.chosen.shape, wide.rejected.shape) == ((3, 7), (3, 9), (3, 9))


def test_pairs_are_split_by_their_prompts(write):
    path = write([{"x": f"{i % 20}", "y": str(i), "z": "00"} for i in range(40)])
    fields = {"prompt_field": "x", "chosen_field": "y", "rejected_field": "z", "held_out": 0.3}
    train, test = (preference_pairs(path, split=split, **fields) for split in ("train", "test"))
    assert len(train.chosen) + len(test.chosen) == 40
    rows = [{row.tobytes() for row in np.asarray(part.prompt.tokens)} for part in (train, test)]
    assert not rows[0] & rows[1]
    assert len(rows[0] | rows[1]) == 20


# What is refused.

GOOD = {"prompt": "1+2=", "answer": "3"}


def asked(prompt):
    return GOOD | {"prompt": prompt}


def answered(answer):
    return GOOD | {"answer": answer}


def completed(completion):
    return GOOD | {"completion": completion}


BAD = {
    "malformed": (
        ['{"prompt": "1", "answer": }'],
        {},
        r"data.jsonl, line 2 is not valid JSON: Expecting .*, at column 27",
    ),
    "cut short": (['{"prompt": "1'], {}, "line 2 is not valid JSON: Unterminated string"),
    "deep": (["[" * 100_000], {}, "line 2 cannot be read"),
    "a huge number": (["9" * 5000], {}, "line 2 cannot be read"),
    "two objects": (['{"prompt": "1", "answer": "1"} {}'], {}, "line 2 is not valid JSON: Extra data"),
    "a list": (['["1", "2"]'], {}, r'line 2 is not an object such as {"prompt".*, but \["1", "2"\]'),
    "a string": (['"' + "x" * 99 + '"'], {}, r'line 2 is not an object .*, but "x{36}\.\.\.'),
    "missing": ([{"prompt": "1"}], {}, "line 2 has no field 'answer'. It has: 'prompt'"),
    "empty object": (["", {}], {}, "line 3 has no field 'prompt'. It has: none"),
    "wrong type": ([answered(["3"])], {}, r"line 2: the field 'answer' must be a string or a number, not \[\"3\"\]"),
    "null": ([GOOD | {"prompt": None}], {}, "line 2: the field 'prompt' must be a string or a number, not null"),
    "boolean": ([answered(True)], {}, "the field 'answer' must be a string or a number, not true"),
    "optional wrong": ([completed({})], {}, "line 2: the field 'completion' must be a string or a number, not {}"),
    "half a character": (['{"prompt": "\\ud800", "answer": "1"}'], {}, "line 2: .* 'prompt' holds half of a surrogate"),
    "half a character that no one asks for": (
        [GOOD | {"note": "\ud800"}],
        {"tokenizer": "characters"},
        "line 2: the field 'note' holds half of a surrogate pair, which is not a character",
    ),
    "a field twice": (
        ['{"prompt": "1", "answer": "1", "prompt": "2"}'],
        {},
        "line 2 cannot be read: the field 'prompt' is there twice, remove or rename one",
    ),
    "a field of a field twice": (['{"prompt": "1", "answer": "1", "more": [{"a": 1, "a": 1}]}'], {}, "line 2 .*'a' is"),
    "empty prompt": ([asked("")], {}, "line 2: the field 'prompt' is empty"),
    "blank prompt": ([asked(" \n")], {}, "line 2: the field 'prompt' is empty"),
    "empty answer": ([answered("")], {}, "line 2: the field 'answer' is empty"),
    "long prompt": ([asked("1+2+3=")], {"prompt_length": 5}, "'prompt' has 6 tokens, more than prompt_length = 5"),
    "long prompts": (
        [asked("1+2+3="), GOOD, asked("1+2+3+4=")],
        {"prompt_length": 5},
        "line 2: .* 6 tokens, .* = 5, and so have 1 other records. Raise prompt_length, or .* skip_long_prompts = true",
    ),
    "only long prompts": ([], {"prompt_length": 3, "skip_long_prompts": True}, "line 1: .* No record is left"),
    "nothing is long": ([], {"skip_long_prompts": True}, "skip_long_prompts = true has no effect without"),
    "long answer": (
        [GOOD, answered("12345") | {"completion": "1"}],
        {},
        "line 3: .* has 6 .*, more than max_tokens = 2. No completion could be right",
    ),
    "unknown token": ([asked("1+é=")], {}, "line 2, field 'prompt': There is no token for 'é', character 3"),
    "unknown, tagged": ([completed("<answer>É</answer>")], {}, "line 2, field 'completion': .* no token for 'É'"),
    "padding as text": ([asked("<pad>")], {}, "line 2, field 'prompt': There is no token for '<', character 1"),
    "an end as text": (
        [completed("1<eos>2")],
        {},
        "line 2, field 'completion': There is no token for '<', character 2",
    ),
    "no finite number": (['{"prompt": "1", "answer": NaN}'], {}, "line 2: the field 'answer' must be a .*, not NaN"),
    "too large a number": (['{"prompt": "1", "answer": 1e999}'], {}, "line 2: the field 'answer' must be .* Infinity"),
    "no number": ([answered("three")], {"match": "numeric"}, "line 2: the field 'answer' ends on no number .* 'three'"),
    "an unknown": ([answered("x-3")], {"match": "numeric"}, "line 2: the field 'answer' ends on no number .* 'x-3'"),
    "no such match": ([], {"match": "fuzzy"}, "no way to match 'fuzzy'"),
    "no such split": ([], {"split": "held_out"}, "split must be train or test, not 'held_out'"),
    "no share": ([], {"held_out": 1.5}, "held_out must be a share from 0 to 1, not 1.5"),
    "a share as text": ([], {"held_out": "0.1"}, "held_out must be a share from 0 to 1, not '0.1'"),
    "hardly any held out": (
        [],
        {"split": "test", "held_out": 1e-9},
        "None of the 1 records of .*data.jsonl is in the test split: .* with 0, evaluations are of the prompts",
    ),
    "nothing left": ([], {"held_out": 1}, "None of the 1 records .* in the train split"),
    "no length": ([], {"prompt_length": 0}, "prompt_length must be a number of tokens, at least 1, not 0"),
    "half a token": ([], {"max_tokens": 2.5}, "max_tokens must be a number of tokens, at least 1, not 2.5"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_records_are_refused(write, name):
    lines, settings, sentence = BAD[name]
    with pytest.raises(UserError, match=sentence):
        json_lines(write([GOOD, *lines]), **{"tokenizer": "standard", "held_out": 0, **settings})


def test_the_example_of_a_pair_has_the_fields_of_a_pair(tmp_path):
    (tmp_path / "pairs.jsonl").write_text("[1]\n")
    with pytest.raises(UserError, match=r'such as {"prompt": "\.\.\.", "chosen": "\.\.\.", "rejected": "\.\.\."}, but'):
        preference_pairs(tmp_path / "pairs.jsonl", "standard")


@pytest.mark.parametrize("content", [b"", b"\n \n\r\n"])
def test_an_empty_file_is_refused(tmp_path, content):
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    for read in (json_lines, preference_pairs, text.character_vocabulary):
        with pytest.raises(UserError, match=r"empty.jsonl is empty"):
            read(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    """With the directory that a relative path counts from, since a run may be looked at from another one."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"cannot be read: No such file.* The path counts from {tmp_path}: "):
        json_lines("none.jsonl")
    with pytest.raises(UserError, match=r"none.jsonl cannot be read: No such file"):
        json_lines(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        json_lines(tmp_path)
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"prompt": "1", "answer": "1"}\n{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(UserError, match=r"latin.jsonl, line 2 is not UTF-8: byte 13 is 0xe9"):
        json_lines(path)


@pytest.mark.parametrize(
    ("line", "settings", "sentence"),
    [
        ({"prompt": "a", "chosen": "b"}, {}, "line 4 has no field 'rejected'"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "b"},
            {},
            "line 4 has the same completion as chosen and as rejected",
        ),
        ({"prompt": "a", "chosen": "", "rejected": ""}, {}, "line 4 has the same completion as chosen and as rejected"),
        ({"prompt": "a", "chosen": 3.5, "rejected": []}, {}, "line 4: the field 'rejected' must be a string"),
        ({"prompt": "a" * 4, "chosen": "b", "rejected": "c"}, {"prompt_length": 3}, "line 4: the field 'prompt' has 4"),
        ({"prompt": "a", "chosen": "b" * 5, "rejected": "c"}, {"max_tokens": 5}, "line 4: the field 'chosen' has 6"),
        ("{", {}, "line 4 is not valid JSON"),
    ],
)
def test_bad_pairs_are_refused(write, line, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        preference_pairs(write([*PAIRS, line]), "standard", held_out=0, **settings)


def test_rows_are_padded_to_the_width_that_is_asked_for():
    np.testing.assert_array_equal(pad_rows([[3], [4, 5]]), [[3, PAD], [4, 5]])
    np.testing.assert_array_equal(pad_rows([[3], [4, 5]], 3), [[3, PAD, PAD], [4, 5, PAD]])
