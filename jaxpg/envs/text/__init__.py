"""Text tasks: an episode is a completion, an action is a token."""

from jaxpg.envs.text.by_name import TASKS
from jaxpg.envs.text.environment import REWARDS, Writing, text_env
from jaxpg.envs.text.measures import majority_vote, pass_at_k
from jaxpg.envs.text.records import PairData, json_lines, preference_pairs
from jaxpg.envs.text.task import Task, Verdict
from jaxpg.envs.text.tokenizer import characters_of, tokenizer_file
from jaxpg.envs.text.vocabulary import CHARACTERS, END, PAD, Tokenizer, Vocabulary

__all__ = [
    "CHARACTERS",
    "END",
    "PAD",
    "REWARDS",
    "TASKS",
    "PairData",
    "Task",
    "Tokenizer",
    "Verdict",
    "Vocabulary",
    "Writing",
    "characters_of",
    "json_lines",
    "majority_vote",
    "pass_at_k",
    "preference_pairs",
    "text_env",
    "tokenizer_file",
]
