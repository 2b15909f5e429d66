"""The list of rewards of a text task: named functions, functions of one's own, and scores of reward models.

An entry of the list has a name, under which it is logged, and is a weight, a table of settings as a config states it,
or a `Reward`:

    rewards = {
        "accuracy": 1.0,                                                       # a named function
        "language": {"weight": 0.1, "alphabet": "0123456789+-*="},             # one with a setting of its own
        "brevity": {"function": "my_rewards:brevity", "weight": 0.2},          # one's own, called on the host
        "preference": Reward(score, weight=0.5, standardize="running"),        # any function of a GradedCompletion
    }

The reward of a completion is Σ weight · value, where the values of an entry are standardised first if it says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.envs.text.jsonl_reader import without_tags
from jaxpg.envs.text.task import Task, Verdict
from jaxpg.envs.text.tokenizer import TAGS
from jaxpg.envs.text.vocabulary import PAD, Tokenizer, Vocabulary, completion_text
from jaxpg.errors import UserError, excerpt, refuse_unknown
from jaxpg.parallel import host_callback
from jaxpg.types import Array, Prompt, RewardTerm, Tree
from jaxpg.user_input.domains import LARGEST_REWARD, as_reward
from jaxpg.user_input.user_code import describe_failure, import_user_code

STANDARDIZE = ("batch", "running")
"""What the values of an entry are standardised over: the episodes of one rollout, or all episodes so far."""


def overlong_penalty(length: Array, max_length: Array | float, cache: Array | float) -> Array:
    """0 up to max_length - cache, then linear to -1 at max_length, and -1 beyond: one number per sequence.

    `length`, `max_length` and `cache` are in tokens. With a cache of 0 it is 0 up to max_length and -1 beyond. Source:
    Yu et al. 2025 (DAPO), equation 13.
    """
    return jnp.clip((max_length - cache - length) / jnp.maximum(cache, 1e-6), -1, 0)


class GradedCompletion(NamedTuple):
    """A finished completion as reward functions see it.

    verdict: of the task.
    problem: as the task drew it.
    prompt: leaves [P].
    tokens: [T] int32, padded after `length` [] int32 tokens, the end token included where there is one.
    max_tokens: T.
    vocabulary: what the tokens stand for.
    overlong_cache: tokens before the maximum over which the overlong reward falls to -1.
    """

    verdict: Verdict
    problem: Tree
    prompt: Prompt
    tokens: Array
    length: Array
    max_tokens: int
    vocabulary: Tokenizer
    overlong_cache: int


def grade(task: Task, problem: Tree, tokens: Array, length: Array, overlong_cache: int = 0) -> GradedCompletion:
    """A completion `tokens` [T] of `length` [] tokens, verified, as reward functions see it."""
    return GradedCompletion(
        verdict=task.verify(problem, tokens, length),
        problem=problem,
        prompt=task.prompt(problem),
        tokens=tokens,
        length=length,
        max_tokens=task.max_tokens,
        vocabulary=task.vocabulary,
        overlong_cache=overlong_cache,
    )


RewardFunction = Callable[[GradedCompletion], Array]
"""A finished completion -> its value, [] float."""


class Reward(NamedTuple):
    """An entry of a list of rewards.

    function: the value of a completion.
    weight: of the value in the sum.
    standardize: None, or what the values are standardised over before they are weighted: "batch" or "running" (see
        `update.normalization.standardize_rewards`).
    """

    function: RewardFunction
    weight: Array | float = 1.0
    standardize: str | None = None


def language(graded: GradedCompletion, *, alphabet: str) -> Array:
    """The share of a completion's tokens that are written in `alphabet`: 1 if all are, and if there are none to count.

    The end token, padding and the tags around a scratchpad and an answer do not count. A token of several characters is
    in the alphabet if all of them are. Of a tokenizer.json, whose tokens may be parts of characters, it is the share of
    the text's characters, which are counted on the host. Source: DeepSeek-AI 2025 (DeepSeek-R1), section 2.3.2, the
    language consistency reward, there a share of words.

    Args:
        alphabet: the characters to stay in, spaces only if they are among them.
    """
    vocabulary = graded.vocabulary
    if not isinstance(vocabulary, Vocabulary):
        return _share_of_characters(graded, frozenset(alphabet))
    texts = [vocabulary.decode([i]) for i in range(vocabulary.size)]
    counts = jnp.array([i not in (PAD, vocabulary.end) and text not in TAGS for i, text in enumerate(texts)])
    inside = jnp.array([bool(text) and set(text) <= set(alphabet) for text in texts])
    counted = (jnp.arange(graded.max_tokens) < graded.length) & counts[graded.tokens]
    number = counted.sum()
    return jnp.where(number > 0, (counted & inside[graded.tokens]).sum() / jnp.maximum(number, 1), 1.0)


def _share_of_characters(graded: GradedCompletion, alphabet: frozenset[str]) -> Array:
    """The share of a completion's characters that are in the alphabet, without tags; 1 if there are none."""

    def share(completions: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray]:
        found = np.ones(lengths.shape, np.float32)
        for i in np.ndindex(lengths.shape):
            text = without_tags(graded.vocabulary.decode(completions[i][: lengths[i]].tolist()))
            if text:
                found[i] = sum(character in alphabet for character in text) / len(text)
        return (found,)

    of_one = (jax.ShapeDtypeStruct((), jnp.float32),)
    (found,) = host_callback.call(share, of_one, graded.tokens, graded.length)
    return found


REWARDS: dict[str, Callable[..., Array]] = {
    "accuracy": lambda graded: graded.verdict.accuracy,
    "format": lambda graded: graded.verdict.format,
    "length": lambda graded: -graded.length / graded.max_tokens,
    "overlong": lambda graded: overlong_penalty(graded.length, graded.max_tokens, graded.overlong_cache),
    "language": language,
}
"""Reward functions by name: a right answer, the required form, a price per token (-1 for max_tokens),
`overlong_penalty`, and `language`. Their keyword-only arguments are settings of an entry."""
ACCURACY = {"accuracy": 1.0}
"""The default list: 1 for a right answer, else 0."""
RESERVED = ("weight", "standardize", "function", "model")
"""What a table may have beside the settings of its function."""

Entry = Array | float | RewardFunction | Mapping[str, Any] | Reward
"""How an entry of a list of rewards may be given."""


def make_rewards(task: Task, rewards: Mapping[str, Entry], overlong_cache: int) -> dict[str, Reward]:
    """A list of rewards with every entry as a `Reward`.

    Raises:
        UserError: no reward, an unknown one or one with other settings than its own, a weight that is not finite, an
            overlong_cache that is out of range or that no reward uses.
    """
    if not rewards:
        raise UserError(f"{task.name} needs a reward. There are: {', '.join(REWARDS)}.")
    made = {name: make_reward(name, entry, task) for name, entry in rewards.items()}
    pays_overlong = any(reward.function is REWARDS["overlong"] for reward in made.values())
    if pays_overlong and not 1 <= overlong_cache <= task.max_tokens:
        raise UserError(
            f"{task.name}: the reward overlong needs an overlong_cache from 1 to max_tokens = {task.max_tokens}, "
            f"not {overlong_cache!r}."
        )
    if overlong_cache and not pays_overlong:
        raise UserError(f"{task.name}: overlong_cache = {overlong_cache!r} has no effect without the reward overlong.")
    return made


def make_reward(name: str, entry: Entry, task: Task, model: RewardFunction | None = None) -> Reward:
    """One entry of a list of rewards as a `Reward`; `model` is the score that its setting `model` names.

    Raises:
        UserError: as `make_rewards`.
    """
    if callable(entry) and not isinstance(entry, Reward):
        entry = {"function": entry}
    if not isinstance(entry, Mapping | Reward):
        entry = {"weight": entry}
    if isinstance(entry, Reward):
        reward = entry
    else:
        settings = {key: value for key, value in entry.items() if key not in RESERVED}
        function = _function(name, entry, settings, task, model)
        reward = Reward(function, entry.get("weight", 1.0), entry.get("standardize"))
    _check_reward(name, reward, task)
    return reward


def reward_terms(rewards: Mapping[str, Reward]) -> dict[str, RewardTerm] | None:
    """`Env.reward_terms` of a list of rewards: None where nothing is standardised."""
    if all(reward.standardize is None for reward in rewards.values()):
        return None
    return {name: RewardTerm(reward.weight, reward.standardize) for name, reward in rewards.items()}


def check_weight(task: Task, of: str, weight: Any) -> None:
    """Raise a UserError unless a weight is a finite number; a traced one, one per run, is not known here."""
    if isinstance(weight, Array):
        return
    if isinstance(weight, bool) or not isinstance(weight, int | float) or as_reward(weight) is None:
        raise UserError(
            f"{task.name}: the weight {of} must be a finite number, not {excerpt(weight)}: one of at most "
            f"{LARGEST_REWARD:g} in size."
        )


def _check_reward(name: str, reward: Reward, task: Task) -> None:
    """Refuse a name that cannot be that of a metric, a weight that is not finite, an unknown way to standardise."""
    if not name.isidentifier():
        raise UserError(f"{task.name}: a reward is logged by its name, of letters, digits and _; not {excerpt(name)}.")
    check_weight(task, f"of the reward {name}", reward.weight)
    if reward.standardize not in (None, *STANDARDIZE):
        ways = " or ".join(STANDARDIZE)
        raise UserError(
            f"{task.name}: standardize of the reward {name} must be {ways}, or left out, not "
            f"{excerpt(reward.standardize)}."
        )


def _function(
    name: str, entry: Mapping[str, Any], settings: Mapping[str, Any], task: Task, model: RewardFunction | None
) -> RewardFunction:
    """The function of a table: the score of a model, a named function, or one of the user's own."""
    if "model" in entry and "function" in entry:
        raise UserError(f"{task.name}: the reward {name} has a function and a model: remove one of them.")
    if "model" in entry:
        if model is None:
            raise UserError(
                f"{task.name}: the reward model of {name} is loaded for a config alone. In Python give the entry as "
                "envs.text.Reward(preferences.score_of(model, params))."
            )
        _check_settings(name, (), settings, task)
        return model
    function = entry.get("function", name)
    if callable(function):
        return _on_host(function, getattr(function, "__name__", name), settings, task)
    if not isinstance(function, str):
        raise UserError(f"{task.name}: function of the reward {name} must be a name, not {excerpt(function)}.")
    if ":" in function:
        return _on_host(import_user_code(function, "reward function"), function, settings, task)
    if function not in REWARDS:
        refuse_unknown("reward", function, REWARDS, f" of {task.name}")
    named = REWARDS[function]
    known = [p.name for p in inspect.signature(named).parameters.values() if p.kind is p.KEYWORD_ONLY]
    _check_settings(name, known, settings, task)
    return partial(named, **settings) if known else named


def _check_settings(name: str, known: Any, settings: Mapping[str, Any], task: Task) -> None:
    """Refuse settings that a named function does not have, and ask for those that it needs, which are texts."""
    for key in settings:
        if key not in known:
            refuse_unknown("setting", key, [*RESERVED, *known], f" of the reward {name} of {task.name}")
    for key in known:
        value = settings.get(key)
        if not isinstance(value, str) or not value:
            given = "" if key not in settings else f", not {excerpt(value)}"
            raise UserError(f"{task.name}: the reward {name} needs {key}, a non-empty string{given}.")


def _on_host(function: Callable[..., Any], called: str, settings: Mapping[str, Any], task: Task) -> RewardFunction:
    """A user's function of prompt and completion, as texts, and its settings; called on the host, a batch at a time.

    A function with a parameter `record` gets the fields of the record that the problem is, too.
    """
    record = _record_of(function, called, settings, task)
    _check_parameters(function, called, settings if record is None else {**settings, "record": {}})
    vocabulary, width = task.vocabulary, task.prompt_length

    def value_of(prompt: str, completion: str, further: Mapping[str, Any]) -> float:
        try:
            value: Any = function(prompt, completion, **settings, **further)
        except (Exception, SystemExit) as error:
            raise UserError(
                f"The reward function {called} raised {describe_failure(error)}, for the prompt {prompt!r} and the "
                f"completion {completion!r}."
            ) from error
        if (number := as_reward(value)) is None:
            raise UserError(
                f"The reward function {called} returned {excerpt(value)} instead of a finite number of at most "
                f"{LARGEST_REWARD:g} in size, for the prompt {prompt!r} and the completion {completion!r}."
            )
        return number

    def batch(rows: np.ndarray, lengths: np.ndarray, *problems: np.ndarray) -> tuple[np.ndarray]:
        values = np.empty(lengths.shape, np.float32)
        for i in np.ndindex(lengths.shape):
            prompt, completion = rows[i][:width], rows[i][width : width + lengths[i]]
            text = completion_text(vocabulary, completion.tolist())
            further = {"record": record(problems[0][i])} if record else {}
            values[i] = value_of(vocabulary.decode(prompt[prompt != PAD].tolist()), text, further)
        return (values,)

    def on_host(graded: GradedCompletion) -> Array:
        row = jnp.concatenate([jnp.where(graded.prompt.mask, graded.prompt.tokens, PAD), graded.tokens])
        problems = (graded.problem,) if record else ()
        of_one = (jax.ShapeDtypeStruct((), jnp.float32),)
        (value,) = host_callback.call(batch, of_one, row, graded.length, *problems)
        return value

    return on_host


def _record_of(
    function: Callable[..., Any], called: str, settings: Mapping[str, Any], task: Task
) -> Callable[[Tree], Mapping[str, Any]] | None:
    """`Task.record` where a function asks for it by a parameter of that name, else None."""
    if "record" in settings or "record" not in inspect.signature(function).parameters:
        return None
    if task.record is None:
        raise UserError(
            f"The reward function {called} takes the record of a file, and the problems of {task.name} are generated: "
            "leave out its parameter record."
        )
    return task.record


def _check_parameters(function: Callable[..., Any], called: str, given: Mapping[str, Any]) -> None:
    """Raise a UserError unless a function can be called with a prompt, a completion and what else it is given."""
    try:
        inspect.signature(function).bind("", "", **given)
    except TypeError as error:
        raise UserError(
            f"The reward function {called} is called with a prompt, a completion and its settings, and takes "
            f"{inspect.signature(function)}: {error}."
        ) from error
