"""Learning from demonstrations and from preferences: fine-tuning, reward models, RLHF, DPO."""

from jaxpg.preferences.dpo import dpo
from jaxpg.preferences.pairs import Pairs, PreferencePair, corrupted_demonstrations, judged_pairs, stored_pairs
from jaxpg.preferences.reward_model import held_out_accuracy, reward_model
from jaxpg.preferences.rlhf import rlhf_env
from jaxpg.preferences.sft import sft
from jaxpg.preferences.sources import make_pairs

__all__ = [
    "Pairs",
    "PreferencePair",
    "corrupted_demonstrations",
    "dpo",
    "held_out_accuracy",
    "judged_pairs",
    "make_pairs",
    "reward_model",
    "rlhf_env",
    "sft",
    "stored_pairs",
]
