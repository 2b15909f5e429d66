"""How the tests run: in two lanes, on four devices, without silent broadcasting, compiled as fast as can be.

With JAXPG_ON_DEVICE in the environment (benchmarks/gpu.sh), those of the device lane run on the accelerator at hand, as
they are compiled for training, with products of matrices in full float32: tolerances are those of a CPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import pytest

if jax.__version_info__ < (0, 11):  # no fused kernels: half the time to compile; later versions cannot do without
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
ON_DEVICE = "JAXPG_ON_DEVICE" in os.environ
if ON_DEVICE:
    jax.config.update("jax_default_matmul_precision", "highest")
else:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", not ON_DEVICE)
gc.set_threshold(
    200_000, 50, 50
)  # traced programs are many objects that live on: looking through them takes 5% of a run

SECONDS = {
    "contracts": 490,
    "parallel": 370,
    "readme": 320,
    "cli": 270,
    "environments": 170,
    "processes": 170,
    "moved_runs": 150,
    "language": 150,
    "cli_text": 130,
    "preferences_learners": 130,
    "sweep": 110,
    "damaged_runs": 90,
    "packing": 90,
    "cli_records": 80,
    "importing": 80,
    "lunar_lander": 70,
    "shared_prompts": 70,
    "host": 60,
    "parts": 60,
    "update": 60,
    "machine": 60,
    "learning": 60,
    "reductions": 50,
    "host_faults": 50,
    "training": 50,
    "runs": 50,
    "values_control": 50,
}
"""Seconds of one worker for a file of the full lane, where they are many, so that its parts take equally long; on two
cores of an Intel Xeon (family 6, model 207).

In both lanes these files come first, the longest before the others, so that no worker is left alone with one of them at
the end.
"""
OTHER_SECONDS = 20
"""Those of any other file, on average."""

FULL = {
    "prediction": ("test_errors_on_the_random_walk",),
    "probes": ("test_probe_is_solved[*-a2c]",),
    "cli_plan": (
        "test_a_picture_of_what_changes_with_a_setting",
        "test_every_method_finds_the_same_start_value",
    ),
    "gridworld": ("test_every_sweep_is_jaxpgs[chromium*",),
    "planning": (
        "test_worlds_are_gymnasiums[frozen_lake 8]",
        "test_success_within_the_time_limit_exact_and_simulated[8]",
        "test_with_a_discount_of_one_the_policy_still_arrives[8]",
        "test_discounts_slips_and_places_of_the_goal_are_mapped_over",
        "test_what_has_values_is_not_refused",
        "test_methods_find_what_a_linear_program_finds[dense-value iteration, Gauss-Seidel]",
        "test_methods_find_what_a_linear_program_finds[dense-policy*",
        "test_methods_find_what_a_linear_program_finds[dense-modified*",
        "test_methods_find_what_a_linear_program_finds[sparse-value*",
        "test_steps_are_those_of_the_methods[a cost below the tolerance]",
    ),
    "values_control": (
        "test_the_commands_train_and_draw_the_table",
        "test_a_method_is_the_loop_of_the_textbook[double_q_learning]",
        "test_the_actor_takes_the_best_action_of_the_mean_of_the_tables",
        "test_with_the_change_switched_off_a_child_is_its_parent",
        "test_environments_side_by_side_move_the_table_by_their_mean",
        "test_a_method_is_the_loop_of_the_textbook[expected_sarsa]",
        "test_a_method_is_the_loop_of_the_textbook[q_learning]",
        "test_a_method_is_the_loop_of_the_textbook[sarsa]",
        "test_the_length_of_an_iteration_changes_no_schedule",
        "test_metrics_of_a_step_are_means_over_the_entries_that_change",
    ),
    "cli": (
        "test_play_draws_the_seed_that_did_best[0]",
        "test_compare",
        "test_a_comparison_goes_on_without_an_algorithm_that_diverges",
        "test_interrupt_twice_stops_at_once",
        "test_a_run_whose_output_nobody_reads_any_more_is_saved[together]",
        "test_every_core_is_a_device_unless_another_number_is_asked_for",
        "test_a_run_goes_on_with_other_devices",
        "test_devices_share_the_seeds_and_the_environments[--devices 4]",
        "test_devices_share_the_seeds_and_the_environments[--mesh shard=4]",
        "test_devices_share_the_seeds_and_the_environments[--mesh data=4]",
        "test_progress_is_a_line_for_each_tenth",
        "test_devices_are_made_before_anything_computes",
        "test_a_backend_that_matplotlib_does_not_know_is_no_matter",
        "test_a_run_begins_with_the_devices_that_it_leaves_unused",
        "test_a_run_whose_output_cannot_be_written_is_saved",
        "test_a_run_whose_output_nobody_reads_any_more_is_saved[apart]",
        "test_eval_and_play_are_greedy_where_the_evaluations_of_the_run_are",
        "test_play_draws_the_seed_that_did_best[1]",
    ),
    "cli_records": (
        "test_the_page_of_a_run_goes_with_it",
        "test_rlhf_trains_what_it_needs_and_is_paid_by_the_reward_model",
        "test_what_it_needs_may_be_named",
        "test_dpo_learns_from_the_pairs_of_a_file",
        "test_what_does_not_fit_is_refused_by_its_cause",
        "test_a_reward_function_that_fails_is_named",
        "test_a_run_does_not_go_on_with_other_data[own.jsonl]",
        "test_a_run_does_not_go_on_with_other_data[own_pairs.jsonl]",
    ),
    "cli_surroundings": (
        "test_a_checkpoint_of_another_learner_is_refused",
        "test_full_disk",
        "test_a_checkpoint_of_another_run_is_refused",
        "test_a_narrow_terminal_loses_no_number[0]",
        "test_play_takes_the_seed_that_was_best_at_its_checkpoint",
    ),
    "cli_text": (
        "test_what_a_run_begins_with_is_trained_first",
        "test_completions_are_written_after_every_evaluation",
        "test_eval_says_how_many_prompts_there_are",
        "test_sample",
        "test_compare_shares_what_its_runs_begin_with",
        "test_stopping_and_going_on_is_exact",
        "test_mistakes_are_refused_with_a_sentence",
        "test_a_stage_of_control_learns_from_its_episodes",
        "test_sample_takes_the_best_seed_unless_told_another[0]",
        "test_sample_takes_the_best_seed_unless_told_another[1]",
    ),
    "moved_runs": (
        "test_ctrl_c_in_a_stage_of_fit_names_what_goes_on",
        "test_a_copy_does_not_use_the_stages_of_what_it_is_a_copy_of",
        "test_a_moved_run_goes_on_with_its_own_stages",
        "test_a_reward_model_that_was_trained_on_is_noticed",
        "test_an_interval_over_few_prompts_says_so",
    ),
    "contracts": (
        "test_four_shards_of_a_batch_are_one[grpo, text]",
        "test_four_shards_of_a_batch_are_one[rainbow]",
        "test_four_shards_of_a_batch_are_one[dapo]",
        "test_four_shards_of_a_batch_are_one[trpo]",
        "test_evaluating_a_batch_gives_the_log_probabilities_of_acting[cnn-episodic]",
        "test_evaluating_a_batch_gives_the_log_probabilities_of_acting[gru-episodic]",
        "test_vmap_over_seeds_is_a_loop_over_seeds[trpo]",
        "test_vmap_over_seeds_is_a_loop_over_seeds[reinforce]",
        "test_vmap_over_seeds_is_a_loop_over_seeds[rainbow]",
        "test_vmap_over_seeds_is_a_loop_over_seeds[ppo, gru, pool]",
        "test_vmap_over_seeds_is_a_loop_over_seeds[grpo, text]",
        "test_evaluating_a_batch_gives_the_log_probabilities_of_acting[transformer-episodic]",
        "test_four_shards_of_a_batch_are_one[ppo, gru, pool]",
        "test_vmap_over_seeds_is_a_loop_over_seeds[a2c]",
        "test_evaluating_a_batch_gives_the_log_probabilities_of_acting[gru-continuing]",
        "test_four_shards_of_a_batch_are_one[actor_critic_mc]",
        "test_vmap_over_seeds_is_a_loop_over_seeds[dqn]",
        "test_four_shards_of_a_batch_are_one[grpo]",
        "test_four_shards_of_a_batch_are_one[ppo]",
        "test_vmap_over_seeds_is_a_loop_over_seeds[ppo, adam]",
    ),
    "controls": (
        "test_groups_that_are_shuffled_compare_what_cannot_be_compared",
        "test_ends_that_are_noted_one_step_late_give_wrong_values",
        "test_time_outs_that_count_as_terminations_lose_the_future",
    ),
    "envs": (
        "test_every_environment_plays[LunarLander*",
        "test_every_environment_plays[Asterix-MinAtar]",
        "test_every_environment_plays[Freeway-MinAtar]",
        "test_every_environment_plays[Seaquest-MinAtar]",
        "test_every_environment_plays[Pong-misc]",
        "test_every_environment_plays[SpaceInvaders-MinAtar]",
    ),
    "lunar_lander": ("test_a_flight_is_that_of_box2d[settings1]", "test_the_wind_rests_while_a_leg_stands*"),
    "evaluation": (
        "test_a_config_sets_whether_evaluations_are_greedy",
        "test_a_run_draws_no_random_number_twice[cliff_walking-sarsa]",
    ),
    "ladder": ("test_numbers_may_be_traced",),
    "language": (
        "test_parts_of_a_batch_give_the_gradient_of_the_whole[dapo]",
        "test_half_precision_is_near_and_its_parameters_are_whole",
        "test_generation_is_a_rollout_without_its_bookkeeping",
        "test_what_acting_said_is_what_evaluation_says[True-left]",
        "test_a_reward_model_reads_the_last_real_token",
        "test_values_shift_by_one_and_end_in_nothing[True]",
        "test_seeds_side_by_side_wait_for_the_longest_and_change_nothing",
        "test_saving_memory_changes_nothing",
        "test_only_what_enters_a_block_is_kept_for_the_gradient",
        "test_a_first_step_of_gspo_is_inside_of_its_clip_range[bfloat16-False]",
        "test_a_first_step_of_gspo_is_inside_of_its_clip_range[bfloat16-True]",
        "test_a_first_step_of_gspo_is_inside_of_its_clip_range[float32-True]",
        "test_a_trust_region_holds_for_a_transformer",
        "test_completions_are_written_with_the_parameters_of_acting",
    ),
    "losses": (
        "test_a_loss_and_its_gradient_steps_are_those_of_slow_loops[ppo]",
        "test_a_loss_and_its_gradient_steps_are_those_of_slow_loops[rlhf]",
        "test_a_loss_and_its_gradient_steps_are_those_of_slow_loops[rloo]",
        "test_a_loss_and_its_gradient_steps_are_those_of_slow_loops[dr_grpo]",
        "test_a_loss_and_its_gradient_steps_are_those_of_slow_loops[grpo]",
        "test_a_loss_and_its_gradient_steps_are_those_of_slow_loops[cispo]",
        "test_a_loss_and_its_gradient_steps_are_those_of_slow_loops[gspo]",
    ),
    "networks": (
        "test_the_critic_reads_the_policys_torso_only_if_it_is_shared[cnn-env1-True]",
        "test_without_orthogonal_initial_weights_are_those_of_flax[cnn]",
        "test_initial_weights_are_orthogonal_with_the_gains_of_ppo[network1]",
        "test_the_critic_reads_the_policys_torso_only_if_it_is_shared[cnn-env1-False]",
        "test_gradients_reach_the_memory_through_time_but_not_across_ends[min_gru]",
        "test_the_critic_reads_the_policys_torso_only_if_it_is_shared[mlp-env0-False]",
        "test_a_batch_is_evaluated_as_step_by_step_with_the_memory_cleared_at_ends[min_gru]",
        "test_the_critic_reads_the_policys_torso_only_if_it_is_shared[mlp-env0-True]",
        "test_policy_and_critic_evaluated_together_are_what_they_are_apart[min_gru]",
        "test_an_unrolled_gru_has_the_derivative_of_flaxs_cell[4]",
    ),
    "normalization": (
        "test_a_learner_scales_rewards_by_the_spread_of_discounted_sums_across_rollouts",
        "test_successors_are_on_the_same_scale_as_observations",
        "test_a_learner_acts_and_learns_on_the_same_scale_of_observations",
    ),
    "oracle": (
        "test_variance_falls_up_the_ladder",
        "test_a_mean_over_each_episode_*",
        "test_grpo_*",
        "test_actor_critic_td_*",
        "test_a2c_is_unbiased_with_the_exact_critic_*[0.0]",
        "test_a2c_is_unbiased_with_the_exact_critic_*[1.0]",
        "test_a2c_with_a_wrong_critic_*[0.0]",
        "test_without_discount_both_are_the_gradient_of_the_return",
        "test_a2c_over_whole_episodes_is_unbiased_with_any_critic_at_lambda_one",
        "test_a_running_baseline_is_unbiased",
        "test_reward_to_go_drops_the_discounted_weighting_of_states",
    ),
    "parallel": (
        "test_devices_that_share_a_batch_put_their_own_texts_side_by_side",
        "test_devices_that_share_the_parameters_are_one_as_well[{'logit_chunks': 2}]",
        "test_devices_that_share_the_parameters_are_one_as_well[{'remat': True, 'tied': True, 'layers': 2}]",
        "test_devices_wait_for_each_other_while_groups_are_refilled",
        "test_four_devices_are_one[grpo, text]",
        "test_four_devices_are_four_shards_on_one[ppo]",
        "test_it_is_the_sum_over_devices_that_makes_them_one[ppo]",
    ),
    "preferences_learners": (
        "test_a_sharp_judge_is_always_right_and_a_dull_one_tosses_coins",
        "test_four_devices_are_one[sft]",
        "test_four_devices_are_one[ipo]",
        "test_four_devices_are_one[dpo]",
        "test_four_devices_are_one[reward_model]",
        "test_vmap_over_seeds_and_learning_rates_is_a_loop[sft]",
        "test_vmap_over_seeds_and_learning_rates_is_a_loop[ipo]",
        "test_vmap_over_seeds_and_learning_rates_is_a_loop[dpo]",
        "test_vmap_over_seeds_and_learning_rates_is_a_loop[reward_model]",
        "test_micro_batches_change_nothing[sft]",
        "test_micro_batches_change_nothing[ipo]",
        "test_it_is_the_sum_over_devices_that_makes_them_one[sft]",
        "test_fine_tuning_learns_to_copy_backwards",
        "test_a_reward_model_tells_held_out_pairs_apart",
        "test_pairs_of_a_task_are_those_of_a_file_or_of_a_judge",
        "test_the_judge_of_a_task_is_as_sharp_and_has_as_many_pairs_as_is_set",
        "test_it_is_the_sum_over_devices_that_makes_them_one[reward_model]",
        "test_micro_batches_change_nothing[dpo]",
        "test_micro_batches_change_nothing[reward_model]",
        "test_dpo_moves_towards_the_chosen_ones",
        "test_a_memory_begins_anew_with_each_text_of_the_data[dpo]",
        "test_a_memory_begins_anew_with_each_text_of_the_data[sft]",
        "test_vmap_over_seeds_and_learning_rates_is_a_loop[process_reward_model]",
        "test_learning_starts_from_the_policy_of_with_policy",
        "test_fine_tuning_reads_the_noise_of_the_policy[2]",
    ),
    "readme": (
        "test_code_runs_as_it_stands",
        "test_commands_work_in_order",
    ),
    "reductions": (
        "test_ppo_of_one_epoch_and_one_minibatch_is_a2c[False]",
        "test_a_baseline_that_has_seen_nothing_is_none",
        "test_a_penalty_without_weight_or_a_reference_that_keeps_up_is_none",
        "test_refilling_where_every_group_has_signal_changes_nothing",
        "test_a_small_trust_region_step_is_the_natural_gradient",
        "test_dapo_with_signal_everywhere_is_grpo_weighing_all_steps_alike",
        "test_one_group_is_the_batch_and_its_mean_the_batch_baseline",
        "test_an_episode_of_one_step_has_one_return",
        "test_lambda_one_is_the_n_step_return_of_the_segment_and_lambda_zero_one_step",
        "test_an_infinite_clip_is_the_importance_ratio",
        "test_ppo_of_one_epoch_and_one_minibatch_is_a2c[True]",
    ),
    "report_gif": (
        "test_every_environment_plays[Pong-misc]",
        "test_every_environment_plays[cliff_walking]",
        "test_every_environment_plays[LunarLander*",
        "test_every_environment_plays[Asterix-MinAtar]",
        "test_every_environment_plays[Breakout-MinAtar]",
        "test_every_environment_plays[Freeway-MinAtar]",
        "test_every_environment_plays[Seaquest-MinAtar]",
    ),
    "shuffle": (
        "*[1100]",
        "*[1100 of 1200]",
        "*[300]",
    ),
    "summarise": ("test_an_algorithm_of_the_ladder_learns_from_a_reward_model",),
    "sweep": (
        "test_every_point_is_the_run_of_its_own",
        "test_it_leaves_a_table_a_picture_and_the_best_as_a_task",
        "test_a_run_that_*",
        "test_waves_fit_the_memory_and_are_all_alike",
        "test_too_little_memory_is_told_before_anything_is_trained",
        "test_a_sweep_goes_on_with_other_devices",
        "test_a_wave_is_resumed_by_its_sweep_alone",
        "test_every_point_begins_as_the_run_of_its_own[catch-a2c-overrides2-grid_of2]",
        "test_every_point_begins_as_the_run_of_its_own[sort-rlhf-overrides1-grid_of1]",
    ),
    "text_countdown": (
        "test_problems_have_the_solution_that_is_shown[settings1]",
        "test_problems_have_the_solution_that_is_shown[settings0]",
    ),
    "text_environment": (
        "test_what_is_measured_under_dynamic_sampling_is_what_was_drawn_first",
        "test_every_task_is_made_by_name_and_pays_for_its_demonstrations[addition]",
        "test_every_task_is_made_by_name_and_pays_for_its_demonstrations[modular_chain]",
        "test_every_task_is_made_by_name_and_pays_for_its_demonstrations[permutations]",
        "test_a_scratchpad_counts_if_something_is_in_it",
        "test_settings_of_the_task_and_of_its_rewards_go_together",
        "test_weights_may_differ_between_runs_side_by_side",
        "test_every_task_is_made_by_name_and_pays_for_its_demonstrations[countdown]",
    ),
    "text_measures": (
        "test_the_order_within_a_group_and_of_groups_does_not_matter",
        "test_pass_at_k_takes_any_leading_axes",
    ),
    "text_records": (
        "test_a_demonstration_has_the_same_tokens_for_its_answer_as_the_answer_alone",
        "test_every_prompt_is_in_one_split",
    ),
    "text_tasks": (
        "test_no_problem_is_in_both_splits_and_draws_cover_them[addition]",
        "test_no_problem_is_in_both_splits_and_draws_cover_them[modular_chain]",
        "test_no_problem_is_in_both_splits_and_draws_cover_them[parity]",
        "test_no_problem_is_in_both_splits_and_draws_cover_them[permutations]",
        "test_a_prompt_as_text_is_held_out_as_its_problem_is[addition]",
        "test_a_prompt_as_text_is_held_out_as_its_problem_is[countdown]",
        "test_a_prompt_as_text_is_held_out_as_its_problem_is[permutations]",
        "test_no_problem_is_in_both_splits_and_draws_cover_them[countdown]",
        "test_no_problem_is_in_both_splits_and_draws_cover_them[summarise_toy]",
        "test_a_prompt_as_text_is_held_out_as_its_problem_is[reverse]",
        "test_a_function_that_returns_a_task_is_an_environment_and_a_task",
    ),
    "text_tokenizer": ("test_a_task_speaks_in_these_tokens[exact]",),
    "training": (
        "test_a_full_disk_leaves_the_last_checkpoint_intact[arrays]",
        "test_a_full_disk_leaves_the_last_checkpoint_intact[metrics]",
        "test_a_seed_learns_the_same_alone_and_beside_others",
        "test_where_chunks_are_cut_changes_nothing[1]",
        "test_where_chunks_are_cut_changes_nothing[60]",
        "test_side_by_side_is_the_same_as_one_after_the_other",
        "test_no_seed_waits_for_another",
        "test_devices_change_nothing",
        "test_a_full_disk_leaves_the_last_checkpoint_intact[checkpoint]",
        "test_a_run_whose_checkpoints_are_gone_does_not_begin_anew",
        "test_where_chunks_are_cut_changes_nothing[7]",
    ),
    "update": (
        "test_chunks_change_neither_parameters_nor_metrics[columns, gathered late]",
        "test_chunks_change_neither_parameters_nor_metrics[columns]",
        "test_more_passes_of_the_critic_leave_the_policy_alone",
        "test_weight_decay_of_the_critic_leaves_the_policy_where_the_search_ended",
        "test_the_step_is_halved_until_the_loss_falls[10-5]",
        "test_minibatches_of_padding_do_not_make_the_policy_look_certain[1]",
        "test_rows_behind_the_end_of_an_episode_make_no_infinite_ratio[grpo-recurrent]",
        "test_steps_in_float64_are_those_of_a_loop[None]",
        "test_rows_behind_the_end_of_an_episode_make_no_infinite_ratio[algorithm2-recurrent]",
        "test_rows_behind_the_end_of_an_episode_make_no_infinite_ratio[grpo-mlp]",
        "test_where_no_group_has_signal_the_entropy_is_measured_or_no_update_is_counted[2-False]",
    ),
    "importing": (
        "test_a_key_of_the_old_form_is_one_of_the_new[dqn]",
        "test_a_key_of_the_old_form_is_one_of_the_new[grpo]",
        "test_a_key_of_the_old_form_is_one_of_the_new[ppo]",
        "test_a_second_fit_reads_what_the_first_has_compiled",
        "test_a_table_may_be_learned_where_there_are_64_bits[sarsa]",
        "test_fit_says_how_to_go_on_with_what_is_there",
        "test_weight_decay_does_not_move_a_policy_out_of_its_trust_region",
        "test_integers_to_begin_with_become_floats",
    ),
    "parts": (
        "test_fit_takes_a_deep_q",
        "test_a_deep_q_of_the_user_is_trained_as_those_of_the_family[0.0-dqn]",
        "test_a_deep_q_of_the_user_is_trained_as_those_of_the_family[1.0-double_dqn]",
        "test_a_run_that_a_callback_ends_is_evaluated_and_over",
    ),
    "kills": ("test_a_killed_run_ends_as_an_uninterrupted_one[library]",),
    "tree_observations": (
        "test_a_number_that_is_seldom_none_is_found_in_the_last_array",
        "test_a_replay_buffer_keeps_them",
        "test_a_trained_policy_takes_them_and_so_does_its_exported_file",
        "test_bounds_are_looked_at_in_each_array",
        "test_several_arrays_are_learned_from_as_from_one[mlp-grpo]",
        "test_several_arrays_are_learned_from_as_from_one[recurrent-a2c]",
        "test_the_command_line_takes_them",
        "test_a_mask_may_be_an_array_of_its_own",
        "test_a_record_of_arrays_is_learned_from_and_not_exported",
        "test_a_sound_environment_passes_the_battery",
    ),
    "shared_prompts": (
        "test_an_update_is_that_of_texts_with_their_own_prompts[1-15-{}-True]",
        "test_part_of_the_gradient_comes_through_the_prompts",
        "test_many_prompts_are_read_in_chunks",
        "test_what_chunks_add_up_for_prompts_is_float32_in_every_arithmetic",
    ),
    "episode_metrics": (
        "test_devices_add_up_their_episodes[a2c]",
        "test_rows_and_evaluations_have_it",
        "test_the_lander_counts_its_landings",
        "test_the_mean_over_episodes_is_a_metric[a2c-gpu]",
        "test_the_mean_over_episodes_is_a_metric[ppo-gpu]",
        "test_the_mean_over_episodes_is_a_metric[a2c-cpu]",
        "test_devices_add_up_their_episodes[reinforce]",
        "test_the_mean_over_episodes_is_a_metric[q_learning-cpu]",
    ),
    "wrong_parts": (
        "test_an_axis_of_the_users_own_joins_no_runs",
        "test_an_optimizer_with_a_traced_setting_is_not_tried",
        "test_labels_of_the_parameters_themselves_hide_no_sign",
    ),
    "packing": (
        "test_an_update_is_that_of_one_text_per_row[grpo-4-loss_k3]",
        "test_an_update_visits_hardly_more_than_what_trains",
        "test_successors_are_of_the_same_text[False]",
        "test_what_is_computed_before_an_update_is_that_of_one_text_per_row[rlhf-{}]",
    ),
    "language_turns": ("test_the_reward_on_the_host_is_that_of_the_compiled_one_and_is_asked_for_once",),
    "runs": (
        "test_double_precision_of_the_session_changes_nothing",
        "test_an_exported_policy_acts_as_the_policy_does[recurrent]",
    ),
    "environments": ("test_what_is_not_finite_is_named_at_its_source[obs at step 37]",),
    "host_faults": ("test_an_environment_that_nobody_has_is_forgotten",),
    "host": ("test_a_policy_acts_in_gymnasium_as_it_was_trained[True]",),
    "padding": (
        "test_a_gradient_step_is_the_one_over_all_rows[reinforce-True]",
        "test_four_devices_that_skip_padding_are_one_that_does_not[dr_grpo]",
        "test_one_minibatch_is_the_one_over_all_rows[dapo-False]",
        "test_one_minibatch_is_the_one_over_all_rows[grpo-False]",
        "test_four_devices_that_skip_padding_are_one_that_does_not[grpo]",
    ),
    "cli_directories": ("test_what_was_killed_before_its_first_chunk_is_begun_anew_with_other_seeds",),
    "initial_weights": (
        "test_in_one_loop_the_weights_are_those_of_a_loop_each[plain-1024]",
        "test_in_one_loop_the_weights_are_those_of_a_loop_each[a network that jits-1024]",
        "test_in_one_loop_the_weights_are_those_of_a_loop_each[a network that jits-1073741824]",
    ),
    "gradients_through_steps": (
        "test_a_weight_of_the_rewards_has_the_gradient_of_finite_differences[False-minibatches*",
        "test_a_weight_of_the_rewards_has_the_gradient_of_finite_differences[True-one gradient]",
        "test_a_weight_of_the_rewards_has_the_gradient_of_finite_differences[True-minibatches]",
    ),
    "values_learner": (
        "test_every_new_step_can_be_drawn",
        "test_exploration_falls_with_the_steps_of_the_environments",
        "test_the_steps_of_an_iteration_are_in_the_order_of_time",
        "test_learning_waits_for_as_many_steps_as_a_target_has",
        "test_an_update_of_pqn_goes_towards_its_lambda_returns",
    ),
    "values_replay": (
        "test_prioritised_draws_and_weights_are_those_of_the_paper[1-1]",
        "test_prioritised_draws_and_weights_are_those_of_the_paper[64-1]",
        "test_prioritised_draws_and_weights_are_those_of_the_paper[4169-3]",
    ),
}
"""Tests of the full lane beside those marked `full` where they stand: by file, by name or by name and parameters, with
* for any text.

What goes here costs seconds and has a sibling in the quick lane that notices the same mistakes, takes a whole run, or
is among the slowest.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=_part, metavar="N/M", help="the N-th of M parts of the full lane, whole files each")


def _part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part: 1/3, 2/3 and 3/3 are the three thirds")
    return int(number), int(parts)


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled programs in pytest's own cache; `pytest --cache-clear` forgets them.

    An entry is found by a hash of the whole program and the compiler's version, so a changed function is compiled anew.
    Each worker of pytest-xdist has a folder to itself, and so have the command lines that its tests start and kill: jax
    writes entries in place, and another process could read half of one. With `-p no:cacheprovider` the folders last for
    the run: the same program is often compiled twice within one.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    cache = getattr(config, "cache", None)
    if cache is None:
        folder = tempfile.TemporaryDirectory(prefix="jaxpg-tests-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        own, commands = folder.name, os.path.join(folder.name, "commands")
    else:
        own, commands = (str(cache.mkdir(f"xla-{worker}{suffix}")) for suffix in ("", "-commands"))
    os.environ["JAXPG_CACHE"] = commands
    jax.config.update("jax_compilation_cache_dir", own)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the full lane and begin with the longest files.

    Raises:
        pytest.UsageError: FULL has a name that no test of its file has, or SECONDS that of no file.
    """
    unused = {(file, pattern) for file in {_file(item) for item in items} for pattern in FULL.get(file, ())}
    for item in items:
        names = (item.name, getattr(item, "originalname", item.name))
        patterns = [x for x in FULL.get(_file(item), ()) if any(fnmatchcase(n, x.replace("[", "[[]")) for n in names)]
        unused -= {(_file(item), pattern) for pattern in patterns}
        if patterns:
            item.add_marker(pytest.mark.full)
    lost = [f"{file}: {pattern}" for file, pattern in sorted(unused)]
    if lost and not any("::" in argument for argument in config.args):
        raise pytest.UsageError("conftest.FULL names tests that do not exist: " + ", ".join(lost))
    if gone := SECONDS.keys() - {path.stem.removeprefix("test_") for path in Path(__file__).parent.rglob("test_*.py")}:
        raise pytest.UsageError("conftest.SECONDS names files that do not exist: " + ", ".join(sorted(gone)))
    items.sort(key=lambda item: -SECONDS.get(_file(item), 0))
    if part := config.getoption("part"):
        _keep_part(config, items, *part)


def _keep_part(config: pytest.Config, items: list[pytest.Item], number: int, parts: int) -> None:
    """Every file of the full lane is in one of its parts: each, the longest first, in what is the shortest so far."""
    files = {item.path: SECONDS.get(_file(item), OTHER_SECONDS) for item in items if item.get_closest_marker("full")}
    seconds: list[int] = [0] * parts
    part_of = {}
    for path in sorted(files, key=lambda path: (-files[path], path)):
        part_of[path] = seconds.index(min(seconds))
        seconds[part_of[path]] += files[path]
    kept = {path for path, part in part_of.items() if part == number - 1}
    config.hook.pytest_deselected(items=[item for item in items if item.path not in kept])
    items[:] = [item for item in items if item.path in kept]


def _file(item: pytest.Item) -> str:
    """The file of a test as FULL and SECONDS call it."""
    return item.path.stem.removeprefix("test_")


@pytest.fixture(autouse=True, scope="session")
def command_lines_compile_in_a_hurry() -> Iterator[None]:
    """Training programs of the command line too: they ask for some optimisation, which a few steps never pay back."""
    advance = importlib.import_module("jaxpg.training.advance")
    options = advance.compiler_options

    def in_a_hurry(*, runs_once: bool = False) -> dict[str, int | bool]:
        return options(runs_once=runs_once or jax.config.read("jax_disable_most_optimizations"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advance, "compiler_options", in_a_hurry)
        yield


@pytest.fixture(autouse=True)
def optimised_where_it_matters(request: pytest.FixtureRequest) -> Iterator[None]:
    """Most programs here run once, for a few steps, so compiling them well would take longer than running them."""
    if not any(request.node.get_closest_marker(name) for name in ("learning", "optimised")):
        yield
        return
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", not ON_DEVICE)


@pytest.fixture
def machine_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`machine_with(chunk_tokens=8)`: the choices for the machine at hand, see parallel/machine.py, but for these."""
    machine = importlib.import_module("jaxpg.parallel.machine")
    usual = machine.machine()

    def change(**choices: Any) -> None:
        monkeypatch.setitem(machine.MACHINES, machine.platform(), usual._replace(**choices))

    return change


@pytest.fixture
def no_failures() -> Iterator[None]:
    """Failures of functions on the host belong to the test that made them."""
    host_callback = importlib.import_module("jaxpg.parallel.host_callback")
    host_callback.clear_failures()
    yield
    host_callback.clear_failures()
