"""Learning from demonstrations and from preferences: fine-tuning, reward models, RLHF, DPO."""

from jaxpg.preferences.demonstrations import make_demonstrations
from jaxpg.preferences.dpo import dpo
from jaxpg.preferences.pairs import Pairs, PreferencePair, corrupted_demonstrations, judged_pairs, stored_pairs
from jaxpg.preferences.reward_model import held_out_accuracy, reward_model
from jaxpg.preferences.rlhf import SCORE, learned_reward_env, rlhf_env, score_of
from jaxpg.preferences.sft import sft
from jaxpg.preferences.sources import make_pairs

__all__ = [
    "SCORE",
    "Pairs",
    "PreferencePair",
    "corrupted_demonstrations",
    "dpo",
    "held_out_accuracy",
    "judged_pairs",
    "learned_reward_env",
    "make_demonstrations",
    "make_pairs",
    "reward_model",
    "rlhf_env",
    "score_of",
    "sft",
    "stored_pairs",
]
