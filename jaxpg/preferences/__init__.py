"""Learning from demonstrations, preferences and labelled steps: fine-tuning, reward models, RLHF, DPO."""

from jaxpg.preferences.demonstrations import make_demonstrations
from jaxpg.preferences.dpo import DPOSettings, dpo, held_out_preferences
from jaxpg.preferences.pairs import Pairs, PreferencePair, corrupted_demonstrations, judged_pairs, stored_pairs
from jaxpg.preferences.process_reward import held_out_step_accuracy, judged_by_model, process_reward_model
from jaxpg.preferences.reward_model import held_out_accuracy, reward_model
from jaxpg.preferences.rlhf import SCORE, rlhf_env, score_of, with_true_reward
from jaxpg.preferences.sampled_pairs import save_pairs
from jaxpg.preferences.selection import selecting_env
from jaxpg.preferences.sft import sft
from jaxpg.preferences.sources import check_sampled, make_pairs, true_reward
from jaxpg.preferences.step_labels import LabelledCompletion, StepLabels, checked_steps, make_step_labels, stored_steps

__all__ = [
    "SCORE",
    "DPOSettings",
    "LabelledCompletion",
    "Pairs",
    "PreferencePair",
    "StepLabels",
    "check_sampled",
    "checked_steps",
    "corrupted_demonstrations",
    "dpo",
    "held_out_accuracy",
    "held_out_preferences",
    "held_out_step_accuracy",
    "judged_by_model",
    "judged_pairs",
    "make_demonstrations",
    "make_pairs",
    "make_step_labels",
    "process_reward_model",
    "reward_model",
    "rlhf_env",
    "save_pairs",
    "score_of",
    "selecting_env",
    "sft",
    "stored_pairs",
    "stored_steps",
    "true_reward",
    "with_true_reward",
]
