"""Text tasks: an episode is a completion, an action is a token."""

from jaxpg.envs.text.jsonl import PairData, demonstrations, json_lines, preference_pairs
from jaxpg.envs.text.labelled_steps import StepData, labelled_steps
from jaxpg.envs.text.metrics import best_of_n, majority_vote, pass_at_k, weighted_vote
from jaxpg.envs.text.registry import TASKS
from jaxpg.envs.text.rewards import REWARDS, GradedCompletion, Reward, RewardFunction
from jaxpg.envs.text.task import Task, Verdict
from jaxpg.envs.text.text_env import TextState, text_env
from jaxpg.envs.text.tokenizer import TokenTable, character_vocabulary, token_table, tokenizer_file
from jaxpg.envs.text.vocabulary import CHARACTERS, END, PAD, Tokenizer, Vocabulary, completion_text

__all__ = [
    "CHARACTERS",
    "END",
    "PAD",
    "REWARDS",
    "TASKS",
    "GradedCompletion",
    "PairData",
    "Reward",
    "RewardFunction",
    "StepData",
    "Task",
    "TextState",
    "TokenTable",
    "Tokenizer",
    "Verdict",
    "Vocabulary",
    "best_of_n",
    "character_vocabulary",
    "completion_text",
    "demonstrations",
    "json_lines",
    "labelled_steps",
    "majority_vote",
    "pass_at_k",
    "preference_pairs",
    "text_env",
    "token_table",
    "tokenizer_file",
    "weighted_vote",
]
