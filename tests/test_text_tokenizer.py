"""The tokens of a tokenizer.json, made here with the library that writes such files."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpg import envs
from jaxpg.envs.text import (
    CHARACTERS,
    END,
    PAD,
    TextState,
    json_lines,
    preference_pairs,
    text_env,
    token_table,
    tokenizer_file,
)
from jaxpg.envs.text.jsonl_reader import encode_text
from jaxpg.errors import UserError
from jaxpg.experiments import completions, warm_start

tokenizers = pytest.importorskip("tokenizers", reason="it is an optional dependency")

WORDS = [
    "add 14 and 28",
    "the sum of 14 and 28 is 42",
    "<answer>42</answer>",
    "what is 3 times 14?",
    "<think>so</think>",
]
RECORDS = [
    {"prompt": "what is 3 times 14?", "answer": "42", "completion": "<think>the sum</think><answer>42</answer>"},
    {"prompt": "add 14 and 28", "answer": "42"},
]


def trained(kind):
    """A small tokenizer: of bytes, of characters with a token for unknown ones or without, or of whole words."""
    if kind == "words":
        words = sorted({*" ".join(WORDS).split(), "42", "<think>", "</think>", "<answer>", "</answer>", "3", "14?"})
        vocabulary = {"[UNK]": 0, **{word: i for i, word in enumerate(words, start=1)}}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        return tokenizer
    if kind == "unigram":
        scores = [("<unk>", 0.0), *((c, -2.0) for c in sorted(set("".join(WORDS)))), ("42", -1.0)]
        return tokenizers.Tokenizer(tokenizers.models.Unigram(scores, unk_id=0))
    unknown = "[UNK]" if kind == "unknown" else None
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=unknown))
    alphabet = []
    if kind == "bytes":
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = [unknown] if unknown else []
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    return tokenizer


@pytest.fixture
def saved(tmp_path):
    def saved(kind, **changes):
        tokenizer = trained(kind)
        for method, arguments in changes.items():
            getattr(tokenizer, method)(**arguments)
        path = tmp_path / f"{kind}.json"
        tokenizer.save(str(path))
        return path

    return saved


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


def test_text_becomes_tokens_and_text_again(saved):
    theirs, ours = trained("bytes"), tokenizer_file(saved("bytes"))
    for words in (*WORDS, "né 日本", " two  spaces\n"):
        ids = ours.encode(words)
        assert ids == [i + 2 for i in theirs.encode(words).ids]  # below are padding and the end
        assert ours.decode(ids) == words
        assert ours.decode([PAD, *ids, PAD, END, *ids]) == words
        assert ours.decode(np.array([*ids, END])) == words
        assert max(ids) < ours.size
    assert ours.size == theirs.get_vocab_size() + 2
    assert ours.end == END
    assert ours.decode([]) == ours.decode([END]) == ""
    assert ours.decode(range(2, ours.size))  # every id is a token


def test_what_a_file_adds_and_cuts_by_itself_is_left_out(saved):
    ours = tokenizer_file(saved("bytes", enable_truncation={"max_length": 2}, enable_padding={"length": 50}))
    assert ours.decode(ours.encode(WORDS[1])) == WORDS[1]
    assert len(ours.encode(WORDS[1])) < 50


def test_special_tokens_of_a_file_are_never_read_from_a_text(saved):
    """A prompt that spells <|endoftext|> is characters; jaxpg's own tags are tokens, where the file has them."""
    special = ["<|endoftext|>", "<answer>", "</answer>"]
    path = saved("bytes", add_special_tokens={"tokens": special})
    ours, theirs = tokenizer_file(path), tokenizers.Tokenizer.from_file(str(path))
    ids = {name: theirs.token_to_id(name) + 2 for name in special}
    attack = "add 14<|endoftext|> and 28 <answer>"
    assert ids["<|endoftext|>"] in [i + 2 for i in theirs.encode(attack).ids]  # so it would be, if left to the library
    assert not set(ids.values()) & set(ours.encode(attack))
    assert ours.decode(ours.encode(attack)) == attack
    assert ours.encode("<answer>") == [ids["<answer>"]]
    written = [ids["<answer>"], *ours.encode("42"), ids["</answer>"]]
    assert ours.decode(written) == "<answer>42</answer>"  # what a policy writes is read with its tags


def test_what_a_file_puts_around_a_text_is_left_out(saved, tmp_path):
    """Tokens of a beginning and an end, as BERT's has them."""
    tokenizer, path = trained("words"), tmp_path / "template.json"
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[UNK] $A [UNK]", special_tokens=[("[UNK]", 0)]
    )
    tokenizer.save(str(path))
    assert len(tokenizer.encode("add 14").ids) == 4
    assert tokenizer_file(path).encode("add 14") == tokenizer_file(saved("words")).encode("add 14")


def test_vocabularies_are_compared_by_their_tokens(saved, tmp_path):
    """The decoded text of different tokens may be equal, and equal tokens may be cut from a text in other ways."""
    path = saved("bytes")
    table = token_table(tokenizer_file(path))
    assert table.tokens[:2] == ["<pad>", "<eos>"]
    spelled = json.loads(path.read_text())
    vocabulary = spelled["model"]["vocab"]

    def changed(**changes):
        other = tmp_path / "other.json"
        other.write_text(json.dumps(spelled | changes, indent=3))
        return token_table(tokenizer_file(other))

    assert changed() == table  # laid out differently
    assert changed(truncation={"max_length": 9, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}) == table
    broken = [name for name in vocabulary if tokenizer_file(path).decode([vocabulary[name] + 2]) == "\ufffd"][:2]
    swapped = vocabulary | {broken[0]: vocabulary[broken[1]], broken[1]: vocabulary[broken[0]]}
    other = changed(model=spelled["model"] | {"vocab": swapped})
    assert other.tokens != table.tokens  # two bytes, neither of which is text by itself
    fewer = changed(model=spelled["model"] | {"merges": spelled["model"]["merges"][:-1]})
    assert fewer.tokens == table.tokens
    assert fewer.checksum != table.checksum
    assert "cuts texts into them in another way" in warm_start._difference(fewer, table)
    assert "there, " in warm_start._difference(table, other)
    assert warm_start._difference(table, changed()) is None
    assert token_table(CHARACTERS) == ([*CHARACTERS.symbols], None)


@pytest.mark.parametrize(("kind", "lost"), [("unknown", "é"), ("dropping", "é"), ("words", "fourté"), ("unigram", "é")])
def test_text_without_a_token_is_refused(saved, data, kind, lost):
    tokenizer = tokenizer_file(saved(kind))
    assert tokenizer.encode("add 14")
    with pytest.raises(UserError, match=f"no token for '{lost}' in 'add fourté'"):
        tokenizer.encode("add fourté")
    with data.open("a") as file:
        file.write('{"prompt": "add 14 and 28", "answer": "14 fourté"}\n')
    with pytest.raises(UserError, match=rf"line 3, field 'answer': The tokenizer has no token for '{lost}'"):
        json_lines(data, tokenizer, held_out=0)


@pytest.mark.parametrize("match", ["exact", "numeric"])
def test_a_task_speaks_in_these_tokens(saved, data, match):
    path = saved("bytes")
    task = json_lines(data, str(path), match=match, held_out=0)
    ours = task.vocabulary
    assert ours.size == tokenizer_file(path).size

    def demonstrated(problem):
        tokens = task.demonstration(problem, jax.random.key(0))
        length = (tokens != PAD).sum()
        return task.prompt_tokens(problem), tokens, task.verify(problem, tokens, length)

    prompts, tokens, verdict = tiny.jit(jax.vmap(demonstrated))(jnp.arange(2))
    assert [ours.decode(row) for row in np.asarray(prompts)] == [record["prompt"] for record in RECORDS]
    assert [ours.decode(row) for row in np.asarray(tokens)] == [RECORDS[0]["completion"], "42"]
    np.testing.assert_array_equal(verdict.accuracy, 1)
    assert verdict.answer[0] == verdict.answer[1] >= 0  # the same answer, between tags and alone
    wrong = jnp.array([*ours.encode("41"), END] + [PAD] * 30)[: task.max_tokens]
    assert task.verify(jnp.int32(0), wrong, jnp.int32(len(ours.encode("41")) + 1)).accuracy == 0
    env = envs.make("json_lines", path=str(data), tokenizer=str(path), match=match, held_out=0.0)
    assert env.action_space.n == ours.size


def test_an_exact_answer_is_a_text_and_not_a_row_of_tokens(saved, data):
    """A policy may spell "42" as "4" and "2"; both are the same answer, and the same vote."""
    task = json_lines(data, str(saved("bytes")), max_tokens=20, held_out=0)
    ours = task.vocabulary
    assert len(ours.encode("42")) == 1

    def judge(*pieces, end=(END,)):
        ids = [i for piece in pieces for i in ours.encode(piece)] + list(end)
        row = jnp.array(ids + [PAD] * (20 - len(ids)), jnp.int32)
        return [float(x) for x in tiny.jit(task.verify)(jnp.int32(0), row, jnp.int32(len(ids)))[:3]]

    whole = judge("42")
    assert whole[:2] == [1, 1]
    for pieces in (("4", "2"), (" 42",), ("<think>so</think><answer>4", "2", "</answer>"), ("42", " ")):
        assert judge(*pieces) == whole
    assert judge("4", "3")[:2] == judge("4", " 2")[:2] == [0, 1]
    for pieces, end in ((("4", "2"), ()), ((" ",), (END,)), (("<answer>", "</answer>"), (END,))):
        assert judge(*pieces, end=end) == [0, 0, -1]


def test_a_tokenizer_that_changes_letters_can_still_be_right(tmp_path):
    words = ["paris", "+", "=", "a", "b", "[UNK]"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.save(str(tmp_path / "small.json"))
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": "Paris"}\n{"prompt": "b", "answer": "a+b="}\n')
    task = json_lines(path, str(tmp_path / "small.json"), held_out=0)
    for problem in range(2):
        tokens = task.demonstration(problem, jax.random.key(0))
        assert task.verify(jnp.int32(problem), tokens, (tokens != PAD).sum()).accuracy == 1
        assert task.verify(jnp.int32(1 - problem), tokens, (tokens != PAD).sum()).accuracy == 0


def test_a_text_is_cut_at_its_tags_wherever_it_comes_from(saved):
    path = saved("bytes", add_special_tokens={"tokens": ["<think>"]})
    ours = tokenizer_file(path)
    (tag,) = ours.encode("<think>")
    assert encode_text("add 14<think>", ours) == [*ours.encode("add 14"), tag]
    assert tag not in ours.encode("add 14<think>")  # where it is no tag but characters


def test_a_prompt_of_a_user_has_the_tokens_that_it_has_in_a_file(saved, data, monkeypatch):
    task = json_lines(data, str(saved("bytes", add_special_tokens={"tokens": ["<think>"]})), max_tokens=4, held_out=0)
    seen = []

    def generate(policy, params, prompt, key, *, end, max_tokens):
        seen.append(prompt.tokens[prompt.mask])
        return jnp.full(max_tokens, end, jnp.int32)

    monkeypatch.setattr(completions, "generate", generate)
    monkeypatch.setattr(completions, "networks", lambda *arguments: (None, None))
    monkeypatch.setattr(completions, "text_task", lambda *arguments: task)
    text = "add 14<think>"
    experiment = SimpleNamespace(held_out=None)
    complete = completions.prompt_completer(None, experiment)
    with jax.disable_jit():
        assert complete((), text, jax.random.key(0), 1) == [text]
    np.testing.assert_array_equal(seen[0], encode_text(text, task.vocabulary))
    assert len(seen[0]) < len(task.vocabulary.encode(text))


@pytest.mark.parametrize(
    ("written", "alphabet", "share"),
    [
        ("日本", "日本", 1.0),  # whose tokens are single bytes
        ("日本", "日", 0.5),
        ("<think>add</think>14", "add14", 1.0),
        ("add 14", "add14", 5 / 6),
        ("", "add14", 1.0),
    ],
)
def test_the_language_of_a_text_is_that_of_its_characters(saved, data, written, alphabet, share):
    reward = {"language": {"weight": 1.0, "alphabet": alphabet}}
    task = json_lines(data, str(saved("bytes")), max_tokens=20, held_out=0)
    env, ids = text_env(task, rewards=reward), [*encode_text(written, task.vocabulary), END]
    row = jnp.array(ids + [task.vocabulary.encode("!")[0]] * (20 - len(ids)), jnp.int32)
    state = TextState(jnp.int32(0), row, jnp.int32(len(ids)))
    found = tiny.jit(jax.vmap(lambda state: env.outcome(state).parts["reward_language"]))
    np.testing.assert_allclose(found(jax.tree.map(lambda x: x[None], state)), share, rtol=1e-6)


def test_pairs_are_made_of_these_tokens(saved, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "add 14", "chosen": "42", "rejected": "the sum"}')
    tokenizer = tokenizer_file(saved("bytes"))
    pairs = preference_pairs(path, tokenizer, held_out=0)
    assert [tokenizer.decode(np.asarray(rows[0])) for rows in (pairs.chosen, pairs.rejected)] == ["42", "the sum"]
    assert END in pairs.chosen[0]


def test_files_that_are_no_tokenizers_are_refused(tmp_path, data):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(UserError, match=r"The tokenizer .*tokenizer.json cannot be read: No such file"):
        json_lines(data, str(path))
    for content in ("{}", "[1, 2", '{"model": {}}', ""):
        path.write_text(content)
        with pytest.raises(UserError, match=r"tokenizer.json is not the file of a tokenizer: "):
            tokenizer_file(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not the file of a tokenizer"):
        tokenizer_file(path)


@pytest.mark.parametrize("largest", [2**31 - 3, 2**31, 4_000_000_000])
def test_an_id_that_int32_cannot_hold_with_what_is_added_to_it_is_refused(saved, data, largest):
    path = saved("words")
    spelled = json.loads(path.read_text())
    spelled["model"]["vocab"]["14"] = largest
    path.write_text(json.dumps(spelled))
    with pytest.raises(UserError, match=rf"words.json, its largest .*, must be at most 2\^31 - 1, not {largest + 3}\."):
        json_lines(data, str(path), held_out=0)


def test_without_the_library_one_is_told_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r'pip install "jaxpg\[text\]"'):
        tokenizer_file(tmp_path / "tokenizer.json")
