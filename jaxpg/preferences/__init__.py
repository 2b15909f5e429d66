"""Learning from demonstrations and from preferences: fine-tuning, reward models, RLHF, DPO."""

from jaxpg.preferences.dpo import dpo
from jaxpg.preferences.pairs import Pairs, PreferencePair, corrupted, labelled, recorded
from jaxpg.preferences.reward_model import held_out_accuracy, reward_model
from jaxpg.preferences.rlhf import rlhf_env
from jaxpg.preferences.sft import sft
from jaxpg.preferences.sources import pairs_of

__all__ = [
    "Pairs",
    "PreferencePair",
    "corrupted",
    "dpo",
    "held_out_accuracy",
    "labelled",
    "pairs_of",
    "recorded",
    "reward_model",
    "rlhf_env",
    "sft",
]
