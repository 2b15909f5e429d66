"""Text tasks: an episode is a completion, an action is a token."""

from jaxpg.envs.text.by_name import TASKS
from jaxpg.envs.text.task import Task, Verdict
from jaxpg.envs.text.vocabulary import CHARACTERS, END, PAD, Tokenizer, Vocabulary

__all__ = ["CHARACTERS", "END", "PAD", "TASKS", "Task", "Tokenizer", "Verdict", "Vocabulary"]
