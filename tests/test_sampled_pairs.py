"""Preference pairs of a policy's own completions: which are drawn, how they are kept, and reward models trained on."""

from __future__ import annotations

import io
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg import preferences
from jaxpg.cli.main import main
from jaxpg.envs.text import TASKS, PairData
from jaxpg.errors import UserError
from jaxpg.experiments import sampling, stages
from jaxpg.experiments.config import load_config, resolve_config
from jaxpg.experiments.pair_sampling import draw_pairs
from jaxpg.experiments.stages import plan_stages
from jaxpg.preferences import Pairs, PreferencePair
from jaxpg.preferences.reward_model import begin_with
from jaxpg.preferences.sampled_pairs import load_pairs
from jaxpg.types import Array, Prompt

SORT = TASKS["sort"](length=3, letters=6)


def numbered(learned: int, held_out: int) -> Pairs:
    """Pairs whose chosen completion says where they come from, and whose rejected one is random."""

    def drawing(source: int):
        def draw(key: Array) -> PreferencePair:
            prompt = jnp.zeros(SORT.prompt_length, jnp.int32)
            chosen = jnp.full(SORT.max_tokens, source)
            return PreferencePair(Prompt(prompt, prompt == 0), chosen, jax.random.randint(key, chosen.shape, 0, 99))

        return draw

    return Pairs(drawing(learned), drawing(held_out), SORT.vocabulary.end)


@pytest.mark.parametrize(("share", "replayed"), [(0.0, 0), (0.1, 4), (0.3, 12), (1.0, 40)])
def test_a_share_of_the_pairs_to_learn_from_is_drawn_from_earlier_ones(share: float, replayed: int) -> None:
    new, earlier = numbered(1, 2), numbered(3, 4)
    pairs, held_out = draw_pairs(new, jax.random.key(0), num_pairs=40, earlier=earlier, earlier_share=share)
    assert np.unique(pairs.chosen, return_counts=True)[1].tolist() == [
        n * SORT.max_tokens for n in (40 - replayed, replayed) if n
    ]
    assert (np.asarray(held_out.chosen) == 2).all()
    assert len(held_out.chosen) == 4
    assert len(np.unique(np.concatenate([pairs.rejected, held_out.rejected]), axis=0)) == 44  # no key is used twice


def test_more_pairs_than_are_drawn_at_once_begin_as_fewer_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpg.experiments.pair_sampling.SIDE_BY_SIDE", 16)
    few, many = (draw_pairs(numbered(1, 2), jax.random.key(0), num_pairs=n)[0] for n in (16, 37))
    assert many.rejected.shape == (37, SORT.max_tokens)
    np.testing.assert_array_equal(many.rejected[:16], few.rejected)


def test_a_file_holds_the_same_tokens_also_without_an_end(tmp_path: Path) -> None:
    pairs, held_out = draw_pairs(numbered(1, 2), jax.random.key(1), num_pairs=10)
    preferences.save_pairs(tmp_path / "pairs.npz", pairs, held_out)
    for read, written in zip(load_pairs(tmp_path / "pairs.npz", SORT), (pairs, held_out), strict=True):
        assert isinstance(read, PairData)
        jax.tree.map(np.testing.assert_array_equal, read, written)
    source = preferences.make_pairs(SORT, SORT, file=str(tmp_path / "pairs.npz"), sampled_from="run", num_pairs=10)
    drawn = jax.vmap(source.draw)(jax.random.split(jax.random.key(0), 64))
    assert {tuple(x) for x in np.asarray(drawn.rejected)} == {tuple(x) for x in np.asarray(pairs.rejected)}


def arrays(**changes: np.ndarray) -> bytes:
    data = {
        f"{split}_{name}": np.zeros((2, SORT.max_tokens if name in ("chosen", "rejected") else SORT.prompt_length), int)
        for split in ("train", "held_out")
        for name in ("prompt", "prompt_mask", "chosen", "rejected")
    }
    buffer = io.BytesIO()
    np.savez(buffer, **(data | changes))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "cannot be read"),
        (b"not an archive", "cannot be read"),
        (arrays()[:200], "cannot be read"),
        (arrays(train_chosen=np.array([{}], object)), "cannot be read: Object arrays cannot be loaded"),
        (arrays(train_chosen=np.zeros((2, 99), int)), r"does not hold preference pairs of sort, with prompts of"),
        (arrays(train_chosen=np.zeros((2, SORT.max_tokens))), "does not hold preference pairs"),
        (arrays(held_out_chosen=np.zeros((3, SORT.max_tokens), int)), "does not hold preference pairs"),
        (arrays(more=np.zeros((2, 2), int)), "does not hold preference pairs"),
    ],
)
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "pairs.npz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        load_pairs(path, SORT)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """Whichever byte is another one: of the archive, of compressed numbers, or of the header of an array."""
    path = tmp_path / "pairs.npz"
    preferences.save_pairs(path, *draw_pairs(numbered(1, 2), jax.random.key(1), num_pairs=10))
    written, refused = path.read_bytes(), 0
    for place in range(0, len(written), 3):
        path.write_bytes(written[:place] + bytes([written[place] ^ 0xFF]) + written[place + 1 :])
        try:
            load_pairs(path, SORT)  # some bytes are not read
        except UserError:
            refused += 1
    assert refused > len(written) // 6


def test_a_reward_model_keeps_the_head_of_another_one_and_replaces_that_of_a_policy() -> None:
    own = {"params": {"body": jnp.zeros(3), "head": jnp.zeros((4, 1))}}
    other, policy = ({"params": {"body": jnp.ones(3), "head": jnp.ones((4, n))}} for n in (1, 9))
    assert begin_with(other, own) is other
    begun = begin_with(policy, own)["params"]
    assert (begun["body"].sum(), begun["head"].sum()) == (3, 0)


ROUNDS = """
environment = "sort"
environment_settings = { length = 3, letters = 6 }
evaluations = 1
evaluation_episodes = 8
total_steps = 300
network = { kind = "transformer", width = 16, layers = 1, heads = 2, kv_heads = 1 }
pairs = { num_pairs = 40, slip_rate = 0.3, judge = "accuracy" }

[reward_model]
initial = "sft"
batch_size = 16

[grpo]
initial = "sft"
num_envs = 16
reward = "reward_model"

[stages.judge_2]
algorithm = "reward_model"
initial = "reward_model"
pairs = { sampled_from = "sft", earlier_share = 0.25 }

[stages.round_2]
algorithm = "grpo"
initial = "grpo"
reward = "judge_2"
"""


@pytest.fixture
def rounds(tmp_path: Path) -> Path:
    path = tmp_path / "rounds.toml"
    path.write_text(ROUNDS)
    return path


def plan(rounds: Path | str, name: str) -> list[stages.Stage]:
    config = resolve_config(rounds, name)
    return plan_stages(config, Path("out"), Path("out"), task=rounds, overrides={}, name=name)


def test_rounds_are_planned_with_the_file_of_their_pairs(rounds: Path) -> None:
    planned = plan(rounds, "round_2")
    assert [stage.name for stage in planned] == ["sft", "reward_model", "judge_2", "grpo", "round_2"]
    judge = planned[2].config
    assert judge.initial == "out/reward_model"
    assert judge.pairs["sampled_from"] == "out/sft"
    assert judge.pairs["file"] == "out/judge_2/pairs.npz"
    stages.check_plan(planned)


def test_the_rounds_of_a_shipped_task() -> None:
    planned = plan("summarise_toy", "rlhf_2")
    assert [stage.name for stage in planned] == ["sft", "reward_model", "rlhf", "judge_2", "rlhf_2"]
    stages.check_plan(planned, finished=lambda stage: False)


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ('initial = "reward_model"', 'initial = "sft"', "earlier_share is a share of the pairs of the reward model"),
        ('initial = "grpo"\nreward = "judge_2"', 'initial = "judge_2"', "of reward_model and contains no policy"),
        ("num_pairs = 40, ", "", "num_pairs must say how many pairs are sampled, at least 1; it is none"),
        ("earlier_share", 'judge = "lenght", earlier_share', "no reward 'lenght' of sort. Did you mean 'length'"),
        ('initial = "reward_model"', 'initial = "none"', "earlier_share is a share of .* not to none"),
        ('initial = "reward_model"', 'initial = "nowhere"', "nowhere is not the directory of a run"),
        ("earlier_share = 0.25", "earlier_share = 1.5", "earlier_share must be at most 1, not 1.5"),
        ('sampled_from = "sft", ', "", "earlier_share is a share of sampled pairs"),
        ('sampled_from = "sft"', 'sampled_from = "judge_2"', "judge_2 needs judge_2"),
        ('sampled_from = "sft"', 'sampled_from = "nowhere"', "nowhere is not the directory of a run"),
    ],
)
def test_rounds_that_cannot_be_are_refused_before_anything_trains(
    rounds: Path, before: str, after: str, sentence: str
) -> None:
    assert before in ROUNDS
    rounds.write_text(ROUNDS.replace(before, after))
    with pytest.raises(UserError, match=sentence):
        stages.check_plan(plan(rounds, "round_2" if "reward = " in before or "judge" in after else "judge_2"))


def test_pairs_of_the_command_line_are_those_of_the_stages_that_learn_from_pairs(rounds: Path) -> None:
    """Fine-tuning and GRPO take over the table and do not read it."""
    given = {"pairs.sampled_from": "sft"}
    config = resolve_config(rounds, "grpo", given)
    planned = plan_stages(config, Path("out"), Path("out"), task=rounds, overrides=given)
    assert [stage.name for stage in planned] == ["sft", "reward_model", "grpo"]
    assert [sampling.sampled_table(stage.config) for stage in planned] == [None, "pairs", None]
    sampling.sample_data(planned[0].config, Path("out"))  # nothing to do


@pytest.mark.full
def test_a_reward_model_is_trained_on_with_completions_of_a_policy(rounds: Path, tmp_path: Path) -> None:
    """It begins with what the first one learned, and goes on with the same pairs after an interruption."""
    out = tmp_path / "run"
    assert main(["train", str(rounds), "judge_2", "--out", str(out)]) == 0
    config = load_config(out)
    pairs, held_out = load_pairs(out / sampling.SAMPLED_FILES["pairs"], SORT)
    assert (len(pairs.chosen), len(held_out.chosen)) == (40, 4)
    table = (out / "report.html").read_text()
    assert "preference pairs of sft, 0.25 of them earlier ones" in table
    written = (out / sampling.SAMPLED_FILES["pairs"]).read_bytes()
    (out / sampling.SAMPLED_FILES["pairs"]).unlink()
    sampling.sample_data(config, out)
    again = load_pairs(out / sampling.SAMPLED_FILES["pairs"], SORT)
    jax.tree.map(np.testing.assert_array_equal, again, (pairs, held_out))
    assert len(written) == (out / sampling.SAMPLED_FILES["pairs"]).stat().st_size
