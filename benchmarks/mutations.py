"""Deliberate faults, and which test notices each: what the suite is worth, lane by lane.

    python benchmarks/mutations.py                      # all of them, by the tests named for each
    python benchmarks/mutations.py --only gae clip      # those whose names contain one of these
    python benchmarks/mutations.py --lane quick         # by the whole quick lane: hours
    python benchmarks/mutations.py --anchors            # only whether each still finds its text

Every fault is one replacement of text in a temporary copy of the tree. Its tests run in the quick lane first and, if
all of them pass there, in the full lane. Results are kept in results/mutations.json, from which results/mutations.md is
written; a fault that is not run again keeps its last result. A fault whose text is no longer there exactly once must be
given a new anchor.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
LIMIT = 900  # seconds for the tests of one fault
SEES_TEXT = "tests/test_benchmarks.py::test_every_deliberate_fault_still_finds_its_text"
"""It would notice every fault by its text alone."""
COPIED = (
    "jaxpg",
    "tests",
    "configs",
    "benchmarks",
    "docs",
    "README.md",
    "ARCHITECTURE.md",
    "mkdocs.yml",
    "pyproject.toml",
)


class Mutation(NamedTuple):
    """A fault.

    name: what is wrong then.
    file: below jaxpg/.
    old, new: the text that is replaced, which the file has exactly once.
    tests: arguments of pytest that select the tests meant to notice it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


def shards(*rows: str) -> str:
    """The rows of the table of cases in the test that four shards of a batch are one."""
    return " ".join(shlex.quote(f"tests/test_contracts.py::test_four_shards_of_a_batch_are_one[{row}]") for row in rows)


RETURNS, ADVANTAGES = "tests/test_returns.py", "tests/test_advantages.py"
SURROGATES, KL, WEIGHTS = "tests/test_surrogates.py", "tests/test_kl.py", "tests/test_loss_weights.py"
UPDATE, ROLLOUT, MEASURES = "tests/test_update.py", "tests/test_rollout.py", "tests/test_text_measures.py"
LOSSES = "tests/test_losses.py::test_a_loss_and_its_gradient_steps_are_those_of_slow_loops"

MUTATIONS = (
    # Returns and advantages
    Mutation(
        "the trace of GAE runs through time-outs",
        "objectives/returns.py",
        "_backward(delta, discount * jnp.where(last, 0.0, lambda_)",
        "_backward(delta, discount * lambda_",
        RETURNS,
    ),
    Mutation(
        "λ-returns run through time-outs: (1 - last) is missing",
        "objectives/returns.py",
        "trace = jnp.where(last, 0.0, lambda_)",
        "trace = jnp.where(last, lambda_, lambda_)",
        RETURNS,
    ),
    Mutation(
        "GAE bootstraps from a terminal state",
        "objectives/returns.py",
        "delta = reward + discount * v_t - v_tm1",
        "delta = reward + gamma * v_t - v_tm1",
        RETURNS,
    ),
    Mutation(
        "n-step targets are one step short",
        "objectives/returns.py",
        "lax.fori_loop(1, min(n,",
        "lax.fori_loop(2, min(n,",
        RETURNS,
    ),
    Mutation(
        "the standard deviation of a group divides by G",
        "objectives/advantages.py",
        "/ (group_size - ddof)",
        "/ group_size",
        ADVANTAGES,
    ),
    Mutation(
        "leave-one-out keeps the member itself",
        "objectives/advantages.py",
        " * (group_size / (group_size - 1))",
        "",
        ADVANTAGES,
    ),
    Mutation(
        "groups are strided columns, not neighbours",
        "objectives/advantages.py",
        "r = r.reshape(-1, group_size)",
        "r = r.reshape(group_size, -1).T",
        ADVANTAGES,
    ),
    Mutation(
        "advantages are centred by the mean over padding too",
        "objectives/advantages.py",
        "(advantage - mean) / (std + eps)",
        "(advantage - advantage.mean()) / (std + eps)",
        ADVANTAGES,
    ),
    Mutation(
        "means of returns are those of one device",
        "objectives/moments.py",
        "return own if collectives.num_shards() == 1 else _together(collectives.of_each_device(own))",
        "return own",
        shards("reinforce_baseline"),
    ),
    Mutation(
        "a whole return is credited from the wrong step",
        "objectives/advantages.py",
        "begins = jnp.concatenate([jnp.ones_like(last[:1]), last[:-1]])",
        "begins = last.at[0].set(True)",
        ADVANTAGES,
    ),
    # Surrogate losses
    Mutation(
        "the upper clip holds bad actions",
        "objectives/surrogates.py",
        "too_high = (advantage > 0)",
        "too_high = (advantage < 0)",
        SURROGATES,
    ),
    Mutation(
        "the lower clip is the upper one",
        "objectives/surrogates.py",
        "(ratio < 1 - clip_low)",
        "(ratio < 1 - clip_high)",
        SURROGATES,
    ),
    Mutation(
        "the dual clip holds good actions",
        "objectives/surrogates.py",
        "(advantage < 0) & (ratio > dual_clip)",
        "(advantage > 0) & (ratio > dual_clip)",
        SURROGATES,
    ),
    Mutation(
        "CISPO differentiates its weight",
        "objectives/surrogates.py",
        "-lax.stop_gradient(weight * advantage) * log_prob",
        "-weight * lax.stop_gradient(advantage) * log_prob",
        SURROGATES,
    ),
    Mutation(
        "the value clip holds what hardly moved",
        "objectives/surrogates.py",
        "where=jnp.abs(moved) > clip",
        "where=jnp.abs(moved) < clip",
        SURROGATES,
    ),
    # KL
    Mutation(
        "k3 has its ratio upside down",
        "objectives/kl.py",
        "log_ratio = capped_log_ratio(ref_log_prob, log_prob)",
        "log_ratio = capped_log_ratio(log_prob, ref_log_prob)",
        KL,
    ),
    Mutation(
        "the KL in the reward is paid, not charged",
        "objectives/kl.py",
        "return -coefficient * lax.stop_gradient(k1(",
        "return coefficient * lax.stop_gradient(k1(",
        KL,
    ),
    Mutation(
        "the KL in the loss is maximised",
        "objectives/kl.py",
        "return coefficient * k3(",
        "return -coefficient * k3(",
        KL,
    ),
    Mutation(
        "rows behind the end of an episode have a ratio",
        "algorithm.py",
        "    if algorithm.collector.whole_episodes:\n        log_prob, batch =",
        "    if False:\n        log_prob, batch =",
        UPDATE,
    ),
    Mutation(
        "the weight of a KL may become 0",
        "objectives/adaptation.py",
        'jnp.maximum(state["kl_coefficient"] * (1 + gain * error), LEAST)',
        'state["kl_coefficient"] * (1 + gain * error)',
        "tests/test_adaptation.py",
    ),
    # Weights of a loss
    Mutation(
        "GRPO divides by the padded width",
        "objectives/loss_weights.py",
        "per_episode_over(mask, jnp.maximum(mask.sum(0, keepdims=True), 1))",
        "per_episode_over(mask, mask.shape[0])",
        WEIGHTS,
    ),
    Mutation(
        "Dr. GRPO divides by the padded width",
        "objectives/loss_weights.py",
        "mask / (length *",
        "mask / (mask.shape[0] *",
        WEIGHTS,
    ),
    Mutation(
        "empty columns count as episodes",
        "objectives/loss_weights.py",
        "collectives.psum(mask.max(0).sum())",
        "collectives.psum(mask.shape[1])",
        WEIGHTS,
    ),
    Mutation(
        "steps are counted on one device",
        "objectives/loss_weights.py",
        "collectives.psum(mask.sum())",
        "mask.sum()",
        shards("ppo"),
    ),
    # The objective
    Mutation(
        "entropy is punished",
        "algorithm.py",
        "(loss - algorithm.entropy_coefficient * entropy)",
        "(loss + algorithm.entropy_coefficient * entropy)",
        f"{LOSSES}[ppo] {LOSSES}[grpo]",
    ),
    Mutation(
        "the reference never moves",
        "policy_gradient.py",
        "reference=polyak_update(state.reference, params.policy, algorithm.reference_rate)",
        "reference=state.reference",
        "tests/test_reductions.py -k penalty_without_weight",
    ),
    Mutation(
        "what does not train has weight all the same",
        "algorithm.py",
        "algorithm.loss_weights(rollout.loss_mask)",
        "algorithm.loss_weights(rollout.steps.mask)",
        "tests/test_losses.py tests/test_reductions.py -k 'dapo or refill or overlong'",
    ),
    # Updates
    Mutation(
        "gradients are not summed over devices",
        "update/gradients.py",
        "return collectives.psum(_summed(loss, params, batch, num_chunks, chunk, lifted))",
        "return _summed(loss, params, batch, num_chunks, chunk, lifted)",
        shards("a2c"),
    ),
    Mutation(
        "the first chunk of a minibatch is left out",
        "update/gradients.py",
        "lax.fori_loop(first, num_chunks, add, zeros)",
        "lax.fori_loop(first + 1, num_chunks, add, zeros)",
        f"{UPDATE} -k chunks",
    ),
    Mutation(
        "every chunk is the first",
        "update/batching.py",
        "lax.dynamic_slice_in_dim(x, i * size, size, axis)",
        "lax.dynamic_slice_in_dim(x, 0 * i, size, axis)",
        f"{UPDATE} -k chunks",
    ),
    Mutation(
        "the weights of a minibatch are those of the batch",
        "update/minibatches.py",
        "batch._replace(weight=batch.weight * num_minibatches)",
        "batch._replace(weight=batch.weight)",
        f"{UPDATE} -k epoch",
    ),
    Mutation(
        "the early stop is off",
        "update/minibatches.py",
        'running & (metrics["approx_kl"] <= 1.5 * target_kl)',
        "running",
        f"{UPDATE} -k 'stop or passes'",
    ),
    Mutation(
        "advantages are normalised over steps that do not train",
        "update/objective.py",
        "self.normalize(batch.advantage, batch.rollout.loss_mask)",
        "self.normalize(batch.advantage, batch.rollout.steps.mask)",
        f"{UPDATE} tests/test_losses.py",
    ),
    Mutation(
        "Adam has the eps of its paper",
        "update/optimizers.py",
        "scale_by_adam(eps=eps)",
        "scale_by_adam(eps=1e-8)",
        "tests/test_ladder.py -k adam",
    ),
    Mutation(
        "gradients are clipped number by number",
        "update/optimizers.py",
        "else optax.clip_by_global_norm(max_grad_norm)\n    return flat_if_small",
        "else optax.clip(max_grad_norm)\n    return flat_if_small",
        "tests/test_optimizers.py",
    ),
    Mutation(
        "the step in a trust region is too short by √2",
        "update/trust_region.py",
        "jnp.sqrt(2 * max_kl /",
        "jnp.sqrt(max_kl /",
        f"{UPDATE} tests/test_reductions.py -k 'trust_region or float64 or halved'",
    ),
    Mutation(
        "the Fisher information is that of one device",
        "update/trust_region.py",
        "collectives.psum(jax.jvp(jax.grad(local_kl), (flat,), (vector,))[1])",
        "jax.jvp(jax.grad(local_kl), (flat,), (vector,))[1]",
        shards("trpo"),
    ),
    # Rollouts
    Mutation(
        "final observations are off by one slot",
        "rollout/successors.py",
        "jnp.cumsum(bootstraps, 0) - 1, 0,",
        "jnp.cumsum(bootstraps, 0), 0,",
        "tests/test_networks.py -k successors",
    ),
    Mutation(
        "a termination counts as a time-out",
        "rollout/successors.py",
        "return steps.last & (steps.discount > 0)",
        "return steps.last",
        ROLLOUT,
    ),
    Mutation(
        "all environments start from one key",
        "rollout/segments.py",
        "return jax.vmap(reset)(reset_key)",
        "return jax.vmap(lambda _: reset(reset_key[0]))(reset_key)",
        ROLLOUT,
    ),
    Mutation(
        "overlong episodes train",
        "rollout/episodes.py",
        "rollout.loss_mask * ~truncated(rollout.steps)[None]",
        "rollout.loss_mask",
        ROLLOUT,
    ),
    Mutation(
        "dynamic sampling fills every place with one group",
        "rollout/dynamic_sampling.py",
        "candidates[rank]",
        "candidates[0 * rank]",
        "tests/test_dynamic_sampling.py",
    ),
    Mutation(
        "dynamic sampling discards what it has drawn",
        "rollout/dynamic_sampling.py",
        "jnp.take(new, source_column, axis), old)",
        "old, old)",
        ROLLOUT,
    ),
    Mutation(
        "the steps of discarded groups are not counted",
        "rollout/dynamic_sampling.py",
        "jax.tree.map(jnp.add, state.stats, stats)",
        "state.stats",
        ROLLOUT,
    ),
    Mutation(
        "an evaluation adds rewards behind the end",
        "rollout/evaluation.py",
        "jnp.where(carry.running, timestep.reward, 0.0)",
        "timestep.reward",
        "tests/test_evaluation.py",
    ),
    Mutation(
        "returns are the difference of two totals",
        "rollout/segments.py",
        "return_sum=jnp.where(ended, ended_return, 0.0)",
        "return_sum=ended * (before.episode_return + steps.reward.sum(0) - new_return)",
        ROLLOUT,
    ),
    # Values
    Mutation(
        "batches are drawn from rows that nothing was written to",
        "values/replay_learning.py",
        "steps // parts.algorithm.collector.num_envs",
        "steps * parts.algorithm.collector.num_envs",
        "tests/test_values_learner.py",
    ),
    Mutation(
        "metrics of gradient steps are their sum",
        "values/replay_learning.py",
        "x.sum() / jnp.maximum(updates, 1)",
        "x.sum()",
        "tests/test_values_learner.py",
    ),
    # Text
    Mutation(
        "evaluation runs on the split that trains",
        "envs/text/generated.py",
        "held_out=from_test_split",
        "held_out=False",
        "tests/test_text_tasks.py -k both_splits",
    ),
    Mutation(
        "padding ends a completion, the end token does not",
        "envs/text/text_env.py",
        "ended = token == vocabulary.end",
        "ended = token == PAD",
        "tests/test_text_environment.py -k 'step_by_step or completion'",
    ),
    Mutation(
        "the ids of a tokenizer collide with the end",
        "envs/text/tokenizer.py",
        "SHIFT = 2",
        "SHIFT = 1",
        "tests/test_text_tokenizer.py",
    ),
    Mutation(
        "pass@k is biased",
        "envs/text/metrics.py",
        "all_wrong = jnp.maximum(i - k, 0) / i",
        "all_wrong = jnp.full_like(i, (n - k) / n)",
        MEASURES,
    ),
    Mutation(
        "tied answers win together",
        "envs/text/metrics.py",
        "(wins * correct).sum(-1) / jnp.maximum(wins.sum(-1), 1)",
        "(wins * correct).max(-1)",
        MEASURES,
    ),
    # Preferences
    Mutation(
        "the margin of Bradley-Terry has the wrong sign",
        "preferences/losses.py",
        "jax.nn.softplus(rejected - chosen + margin)",
        "jax.nn.softplus(rejected - chosen - margin)",
        "tests/test_preferences_losses.py",
    ),
    Mutation(
        "smoothed labels are not turned round",
        "preferences/losses.py",
        "label_smoothing * loss(-h)",
        "label_smoothing * loss(h)",
        "tests/test_preferences_losses.py",
    ),
    # Runs
    Mutation(
        "rows are written to a file that was deleted",
        "training/metrics_writer.py",
        "            self._check_place()\n",
        "",
        "tests/test_training.py -k taken_away",
    ),
    Mutation(
        "the keys of iterations depend on where chunks are cut",
        "training/advance.py",
        "learner_state, metrics = step(state.learner, jax.random.fold_in(key, state.iteration))",
        "learner_state, metrics = step(state.learner, jax.random.fold_in(key, carry[1]['steps'].astype(jnp.int32)))",
        "tests/test_training.py -k 'chunks_are_cut or resuming_is_exact or documented_keys'",
    ),
    Mutation(
        "a checkpoint loses its manifest last",
        "training/checkpoint.py",
        "    (path / manifests.MANIFEST).unlink(missing_ok=True)\n    _delete_rest(path)",
        "    _delete_rest(path)\n    (path / manifests.MANIFEST).unlink(missing_ok=True)",
        "tests/test_checkpoint.py",
    ),
    Mutation(
        "the bootstrap interval is half as wide as it says",
        "report/statistics.py",
        "confidence_level=level,",
        "confidence_level=level / 2,",
        "tests/test_report.py -k interval",
    ),
    # What a sceptic found on 2026-11-26
    Mutation(
        "the legs of the lander stand too far out",
        "envs/lunar_lander/craft.py",
        "upper=(0.9 if side < 0 else -0.4) + side * LEG_TILT,",
        "upper=(0.9 if side < 0 else -0.4),",
        "tests/test_lunar_lander.py -k 'whole_flight or between_the_angles'",
    ),
    Mutation(
        "ratios of whole answers are to what half precision wrote",
        "algorithm.py",
        "if policy.acts_rounded and",
        "if False and policy.acts_rounded and",
        "tests/test_language.py -k first_step_of_gspo",
    ),
    Mutation(
        "an exact answer is compared as its file spells it",
        "envs/text/matching.py",
        "return tuple(tokenizer.decode(row).strip() for row in rows)",
        "return tuple(record.fields[field] for record in stripped)",
        "tests/test_text_tokenizer.py -k changes_letters",
    ),
    Mutation(
        "padding inside of an answer is read over",
        "envs/text/vocabulary.py",
        "if PAD not in written:",
        "if True:",
        "tests/test_text_records.py -k padding_inside",
    ),
    Mutation(
        "the lower of two middle seeds is the median",
        "report/comparison.py",
        "float(np.median(steps))",
        "float(np.sort(steps)[(len(steps) - 1) // 2])",
        "tests/test_report.py -k more_than_half",
    ),
    Mutation(
        "a path with a bracket goes to orbax as it is",
        "training/array_files.py",
        'set("[]*?',
        'set("*?',
        "tests/test_cli_directories.py -k written_where",
    ),
    # What no test noticed on 2026-11-28
    Mutation(
        "every token is drawn by the same random number",
        "models/generation.py",
        "jax.random.fold_in(key, t)",
        "jax.random.fold_in(key, 0 * t)",
        "tests/test_language.py -k draw_of_its_own",
    ),
    Mutation(
        "segments have a slot too few for final observations",
        "rollout/segments.py",
        "return 1 + -(-(num_steps - 1) // env.min_truncation_step)",
        "return -(-num_steps // env.min_truncation_step)",
        "tests/test_rollout.py -k as_many_time_outs",
    ),
    Mutation(
        "devices shuffle by one key",
        "parallel/collectives.py",
        "return jax.random.fold_in(key, lax.axis_index(DATA)) if num_shards() > 1 else key",
        "return key",
        "tests/test_parallel.py -k numbers_of_their_own",
    ),
    Mutation(
        "the reference of a run that begins with a policy is that of init",
        "policy_gradient.py",
        "reference = copy_tree(params) if algorithm.reference_kl else ()",
        "reference = state.reference",
        "tests/test_reductions.py -k begins_with",
    ),
    Mutation(
        "the critic's weight decay moves the policy of a trust region",
        "update/trust_region.py",
        "return fitted._replace(policy=params.policy), opt_state",
        "return fitted, opt_state",
        "tests/test_update.py -k weight_decay",
    ),
    Mutation(
        "priorities fall before anything is learned",
        "values/prioritized.py",
        "jnp.where(where, (jnp.abs(td_error) + SMALLEST_ERROR) ** alpha, old)",
        "(jnp.abs(td_error) + SMALLEST_ERROR) ** alpha",
        "tests/test_values_replay.py -k something_was_learned",
    ),
    Mutation(
        "the lengths of wrong completions count as those of right ones",
        "training/advance.py",
        '"length_incorrect": "incorrect"',
        '"length_incorrect": "correct"',
        "tests/test_training.py -k lengths_are_means",
    ),
    Mutation(
        "no checkpoint is the best once a seed has diverged",
        "training/loop.py",
        'row["evaluation_return"][healthy].mean()',
        'row["evaluation_return"].mean()',
        "tests/test_training.py -k seeds_that_are_left",
    ),
    Mutation(
        "the seconds of a run begin anew where it goes on",
        "training/loop.py",
        "time.monotonic() - resume_point.seconds, time.monotonic()",
        "time.monotonic(), time.monotonic()",
        "tests/test_training.py -k seconds_of_a_run",
    ),
    Mutation(
        "every device may use all of the memory that is given",
        "training/memory.py",
        "gibibytes * 2**30 / mesh.size",
        "gibibytes * 2**30",
        "tests/test_sweep.py -k memory_that_is_given",
    ),
    Mutation(
        "a loop per device is divided by the devices once more",
        "training/memory.py",
        "_loop_bytes(inner, 1 if per_device else devices)",
        "_loop_bytes(inner, devices)",
        "tests/test_sweep.py -k least_memory",
    ),
    Mutation(
        "seeds begin with the policies of others",
        "experiments/warm_start.py",
        "index = jnp.asarray([list(seeds).index(seed) for seed in config.seeds])",
        "index = jnp.arange(len(config.seeds))",
        "tests/test_stages.py -k policy_of_the_same_seed",
    ),
    Mutation(
        "a mask is read off the oldest of the stacked frames",
        "envs/wrappers.py",
        "mask(obs[..., -channels:])",
        "mask(obs[..., :channels])",
        "tests/test_envs_wrappers.py -k newest_observation",
    ),
    Mutation(
        "weighted votes are plain ones",
        "preferences/selection.py",
        "weight = jnp.exp(score - score.max(-1, keepdims=True))",
        "weight = jnp.ones_like(score)",
        "tests/test_process_reward.py -k selects_is_measured",
    ),
    Mutation(
        "held-out steps are labelled as wrongly as those to learn from",
        "preferences/step_labels.py",
        "labelled(held_out, writer, key, 0.0)",
        "labelled(held_out, writer, key, label_noise)",
        "tests/test_process_reward.py -k wrong_at_their_rate",
    ),
    Mutation(
        "side engines of the lander cost nothing",
        "envs/lunar_lander/environment.py",
        "- 0.3 * engines.main - 0.03 * engines.side",
        "- 0.3 * engines.main",
        "tests/test_lunar_lander.py -k fuel_costs",
    ),
    Mutation(
        "the lander's view has no left edge",
        "envs/lunar_lander/environment.py",
        "| (jnp.abs(obs[0]) >= 1)",
        "| (obs[0] >= 1)",
        "tests/test_lunar_lander.py -k view_ends",
    ),
    Mutation(
        "the lander's wind goes on while it stands",
        "envs/lunar_lander/environment.py",
        "return craft, (state.wind[0] + flies, state.wind[1] + flies)",
        "return craft, (state.wind[0] + 1, state.wind[1] + 1)",
        "tests/test_lunar_lander.py -k wind_rests",
    ),
    Mutation(
        "the host takes a state of another process for one of its own",
        "envs/host/host_env.py",
        "itertools.count(secrets.randbits(30))",
        "itertools.count()",
        "tests/test_host.py -k another_process",
    ),
    Mutation(
        "a termination that is also a time-out is refused as an early one",
        "envs/host/host_env.py",
        "self._check_truncations(truncated & ~terminated)",
        "self._check_truncations(truncated)",
        "tests/test_host_faults.py -k also_a_time_out",
    ),
    Mutation(
        "a worker counts the steps of all its episodes",
        "sub_env.py",
        "self._resting, self._steps = False, 0\n        try:",
        "self._resting = False\n        try:",
        "tests/test_host_faults.py -k rest_has_an_end",
    ),
    Mutation(
        "an environment in a worker that rests is never woken",
        "sub_env.py",
        "self._resting = options == REST",
        "self._resting = True",
        "tests/test_host_faults.py -k rest_has_an_end",
    ),
    Mutation(
        "pictures are of an episode with another seed",
        "envs/host/packages.py",
        "        env.reset(seed=seed)\n        pictures",
        "        env.reset()\n        pictures",
        "tests/test_host.py -k or_not_shown",
    ),
    Mutation(
        "pictures of another episode are shown",
        "report/episodes/gif.py",
        "if not np.allclose(rewards, episode.rewards, atol=1e-4):",
        "if False:",
        "tests/test_host.py -k or_not_shown",
    ),
    Mutation(
        "an episode takes the environment of another that is not over",
        "envs/host/host_env.py",
        "if group.size == size and group.is_free() and group.number not in taken:",
        "if group.size == size and group.number not in taken:",
        "tests/test_host.py -k keeps_its_environment",
    ),
    Mutation(
        "an environment is made with the defaults of its class in place of what it is registered with",
        "envs/host/packages.py",
        "of_the_class | spec.kwargs | {",
        "spec.kwargs | of_the_class | {",
        "tests/test_host.py -k test_spaces",
    ),
    Mutation(
        "an episode of one step counts against a reset",
        "envs/battery.py",
        "ended = end.timestep.last & (end.t > 1)",
        "ended = end.timestep.last",
        "tests/test_battery.py -k jump_back",
    ),
    Mutation(
        "no observation is below its bounds",
        "envs/battery.py",
        "outside = (lowest < low - margin) | (highest > high + margin)",
        "outside = highest > high + margin",
        "tests/test_battery.py -k both_bounds",
    ),
    Mutation(
        "bytes of an observation are from 0 to 1",
        "envs/adapting.py",
        '"uint8": (0.0, 255.0)',
        '"uint8": (0.0, 1.0)',
        "tests/test_suites.py -k bounds_of_an_observation",
    ),
    Mutation(
        "steps of a chain end behind the episode",
        "rollout/episodes.py",
        "step_end=rewards.end * steps.mask)",
        "step_end=rewards.end)",
        "tests/test_rollout.py -k rewards_by_step",
    ),
    Mutation(
        "rewards by step go on behind the episode",
        "rollout/episodes.py",
        "rewards.reward * steps.mask",
        "rewards.reward",
        "tests/test_rollout.py -k rewards_by_step",
    ),
    Mutation(
        "what the mask hides is a time-out",
        "rollout/episodes.py",
        "(timed_out(steps) & (steps.mask > 0)).any(0)",
        "timed_out(steps).any(0)",
        "tests/test_rollout.py -k mask_hides",
    ),
    Mutation(
        "a greedy evaluation is measured twice",
        "rollout/evaluation.py",
        "if env.outcome is None or greedy:",
        "if env.outcome is None:",
        "tests/test_evaluation.py -k measured_twice",
    ),
    Mutation(
        "large arrays are not summed over devices",
        "parallel/collectives.py",
        "zip(large, lax.psum([leaves[i] for i in large], DATA), strict=True)",
        "zip(large, [leaves[i] for i in large], strict=True)",
        "tests/test_parallel.py -k every_size",
    ),
    Mutation(
        "the sum over devices leaves out the largest small array",
        "parallel/collectives.py",
        "if jnp.size(x) >= TOGETHER_BELOW]",
        "if jnp.size(x) > TOGETHER_BELOW]",
        "tests/test_parallel.py -k every_size",
    ),
    Mutation(
        "rows of packed texts are rounded down",
        "update/packing.py",
        "-(-texts // chunks), chunks)",
        "texts // chunks, chunks)",
        "tests/test_packing.py -k fills_one",
    ),
    Mutation(
        "an evaluation in training is taken for that before it",
        "training/stalls.py",
        'untrained=np.where(trained[0], np.nan, metrics.get("evaluation_return", nothing)[0])',
        'untrained=metrics.get("evaluation_return", nothing)[0]',
        "tests/test_stalls.py -k none_of_before",
    ),
    Mutation(
        "any better evaluation counts as learning",
        "training/stalls.py",
        "evaluated > window.untrained + np.sqrt(noise)",
        "evaluated > window.untrained",
        "tests/test_stalls.py -k explores",
    ),
    Mutation(
        "a task is solved with 90 of 100 answers right",
        "training/stalls.py",
        ">= 0.99 if",
        ">= 0.9 if",
        "tests/test_stalls.py -k 99_of_100",
    ),
    Mutation(
        "warnings in training do not read whether completions end",
        "training/stalls.py",
        '    "truncated",\n    "entropy",',
        '    "entropy",',
        "tests/test_stalls.py -k needs_no_other",
    ),
    Mutation(
        "rewards behind the end of an evaluated episode are faults",
        "training/diagnosis.py",
        "_is_sound(rewards[:length])",
        "_is_sound(rewards)",
        "tests/attacks/test_environments.py -k first_fault_of_an_evaluation",
    ),
    Mutation(
        "the observation that an unsound reward follows is not looked at",
        "training/diagnosis.py",
        "observed[: unsound[0] + 1]",
        "observed[: unsound[0]]",
        "tests/attacks/test_environments.py -k first_fault_of_an_evaluation",
    ),
    Mutation(
        "the last fault of an evaluation is named",
        "training/diagnosis.py",
        "return min(faults, key=lambda fault: fault.step, default=None)",
        "return max(faults, key=lambda fault: fault.step, default=None)",
        "tests/attacks/test_environments.py -k first_fault_of_an_evaluation",
    ),
    Mutation(
        "means in TensorBoard are NaN where a seed has diverged",
        "training/metrics_writer.py",
        "np.asarray(x, float)[np.isfinite(x)] for name",
        "np.asarray(x, float) for name",
        "tests/test_training.py -k slowest",
    ),
    Mutation(
        "places of a batch draw the same samples",
        "runs/policy.py",
        "jax.random.fold_in(key, place), greedy)",
        "key, greedy)",
        "tests/test_runs.py -k samples_of_their_own",
    ),
    Mutation(
        "an exported policy begins without a memory",
        "runs/load_policy.py",
        "jnp.asarray(memory is None or begins, bool)",
        "jnp.asarray(begins, bool)",
        "tests/test_runs.py -k memory_of_its_first",
    ),
    Mutation(
        "the last evaluation is one that some seeds lack",
        "runs/results.py",
        "values[np.isfinite(values).all(1)]",
        "values[np.isfinite(values).any(1)]",
        "tests/test_runs.py -k all_seeds_have",
    ),
    Mutation(
        "the first evaluation in training is that before it",
        "runs/results.py",
        'evaluations is None or metrics["steps"][0].any() else',
        "evaluations is None else",
        "tests/test_runs.py -k score_before",
    ),
    Mutation(
        "images of 36 pixels a side have the network of boards",
        "experiments/config.py",
        "large = min(images[0][:2]) >= 36",
        "large = max(images[0][:2]) >= 36",
        "tests/test_config.py -k network_of_atari",
    ),
    Mutation(
        "a policy of other heads is begun with",
        "experiments/warm_start.py",
        '("heads", "kv_heads",',
        '("kv_heads",',
        "tests/test_stages.py -k same_shapes",
    ),
    Mutation(
        "a policy with other strides is begun with",
        "experiments/warm_start.py",
        '"squash", "strides")',
        '"squash")',
        "tests/test_stages.py -k same_shapes",
    ),
    Mutation(
        "a report shows the last row as the evaluation before",
        "cli/stage_report.py",
        "{np.mean(x[0]):.3g}",
        "{np.mean(x[-1]):.3g}",
        "tests/test_stages.py -k first_and_the_last",
    ),
    Mutation(
        "the last evaluation of a stage is its last row",
        "cli/stage_report.py",
        "return measured[-1] if len(measured) else values[-1]",
        "return values[-1]",
        "tests/test_stages.py -k first_and_the_last",
    ),
    Mutation(
        "the frame of a map is around its mirrored cell",
        "report/heatmap.py",
        "Rectangle((column - 0.48, row - 0.48)",
        "Rectangle((row - 0.48, column - 0.48)",
        "tests/test_sweep.py -k each_cell",
    ),
    Mutation(
        "the interval in a cell is of another point",
        "report/heatmap.py",
        "format_estimate(_at(estimate, place)).partition",
        "format_estimate(_at(estimate, best)).partition",
        "tests/test_sweep.py -k each_cell",
    ),
    Mutation(
        "the mean in the table of a sweep is the interquartile one",
        "report/heatmap.py",
        "float(scores[place].mean())",
        "float(estimate.value[place])",
        "tests/test_sweep.py -k row_of_the_table",
    ),
    Mutation(
        "arrows in four rooms point as in a lake",
        "report/episodes/boards.py",
        'cell=lambda state: state.pos, actions=("up", "right", "down", "left")',
        'cell=lambda state: state.pos, actions=("left", "down", "right", "up")',
        "tests/test_report_gif.py -k arrow_points",
    ),
    Mutation(
        "arrows on the cliff point as in a lake",
        "report/episodes/gif.py",
        'partial(boards.grid_world, actions=("up", "right", "down", "left"))',
        "boards.grid_world",
        "tests/test_report_gif.py -k arrow_points",
    ),
    Mutation(
        "ball and paddle of Catch have each other's colour",
        "report/episodes/boards.py",
        "(SKY, YELLOW), fps=5",
        "(YELLOW, SKY), fps=5",
        "tests/test_report_gif.py -k ball_of_catch",
    ),
    Mutation(
        "the flag of a continuous mountain car is at 0.5",
        "report/episodes/control.py",
        "goal = 0.45 if continuous else 0.5",
        "goal = 0.5",
        "tests/test_report_gif.py -k flag_of_a",
    ),
    Mutation(
        "side flames are on the wrong side",
        "report/episodes/lander.py",
        "{1: -1, 3: 1}",
        "{1: 1, 3: -1}",
        "tests/test_report_gif.py -k flames",
    ),
    Mutation(
        "frames of a GIF follow faster than viewers show them",
        "report/episodes/gif.py",
        "10 * max(2, round(",
        "10 * max(1, round(",
        "tests/test_report_gif.py -k no_faster",
    ),
    Mutation(
        "a caption names the next action of the list",
        "report/episodes/gif.py",
        "return scene.actions[int(action)] if",
        "return scene.actions[int(action) - 1] if",
        "tests/test_report_gif.py -k names_the_action",
    ),
    Mutation(
        "the line of Acrobot is green below it",
        "report/episodes/control.py",
        "GREEN if foot[1] > 1 else QUIET",
        "GREEN if foot[1] < 1 else QUIET",
        "tests/test_report_gif.py -k line_of_acrobot",
    ),
    Mutation(
        "the goal at the end of the cliff is red",
        "report/episodes/boards.py",
        "GREEN if value > 0 or len(rewards) == 1 else RED",
        "GREEN if value > 0 else RED",
        "tests/test_report_gif.py -k green_or_red",
    ),
    Mutation(
        "the interval of a final score ends at its mean",
        "report/figures.py",
        "axes.plot([estimate.low, estimate.high]",
        "axes.plot([estimate.low, estimate.value]",
        "tests/test_report_pictures.py -k final_scores_are_dots",
    ),
    # Action values, preferences, worlds and texts: what the quick lane did not notice on 2026-11-28
    Mutation(
        "plans read what terminal states hold",
        "values/planning.py",
        "    return jnp.where(mdp.terminal[s][..., None], 0.0, q)",
        "    return q",
        "tests/test_planning.py -k hold_is_in_no_plan",
    ),
    Mutation(
        "the greedy policy tells actions apart by rounding",
        "values/planning.py",
        "return (q >= q.max(-1, keepdims=True) - rounding).argmax(-1)",
        "return (q >= q.max(-1, keepdims=True)).argmax(-1)",
        "tests/test_planning.py -k differ_by_rounding_the",
    ),
    Mutation(
        "errors of a prediction are means over all states",
        "values/prediction.py",
        "jnp.sqrt(squares @ states / states.sum())",
        "jnp.sqrt(squares @ states / len(states))",
        "tests/test_prediction.py -k states_that_count",
    ),
    Mutation(
        "an action and its outcome are drawn by one key",
        "values/prediction.py",
        "env.step(step_key, state, action)",
        "env.step(action_key, state, action)",
        "tests/test_prediction.py -k drawn_apart",
    ),
    Mutation(
        "a table's loss is not halved",
        "values/tabular_control.py",
        "(due * error**2).sum() / 2",
        "(due * error**2).sum()",
        "tests/test_values_control.py -k metrics_of_a_step",
    ),
    Mutation(
        "returns of a table go on through its episodes",
        "values/tabular_control.py",
        "episode_return=jnp.zeros_like(total),",
        "episode_return=total,",
        "tests/test_values_control.py -k metrics_of_a_step",
    ),
    Mutation(
        "exploration falls with gradient steps",
        "values/deep_q.py",
        "self.algorithm.collector.collect, self.policy(state.steps)",
        "self.algorithm.collector.collect, self.policy(state.updates)",
        "tests/test_values_learner.py -k exploration_falls",
    ),
    Mutation(
        "the step size of DQN falls with gradient steps",
        "values/replay_learning.py",
        "rate = algorithm.learning_rate(steps)",
        "rate = algorithm.learning_rate(learned.updates)",
        "tests/test_values_learner.py -k slow_loop",
    ),
    Mutation(
        "weights of prioritised rows are left out",
        "values/replay_learning.py",
        "total = (drawn.weight * errors).sum() / batch_size",
        "total = errors.sum() / batch_size",
        "tests/test_values_learner.py -k slow_loop",
    ),
    Mutation(
        "errors of a distribution are those of its first quantile",
        "values/replay_learning.py",
        "td_error = target.mean(-1) - prediction.mean(-1)",
        "td_error = target[..., 0] - prediction[..., 0]",
        "tests/test_values_learner.py -k slow_loop",
    ),
    Mutation(
        "the target network chooses by its first quantile",
        "values/replay_learning.py",
        "parts.algorithm.selector(q_online, estimates.mean(-1))",
        "parts.algorithm.selector(q_online, estimates[..., 0])",
        "tests/test_values_learner.py -k slow_loop",
    ),
    Mutation(
        "the value of an action is its largest quantile",
        "values/q_networks.py",
        "self.masked(self.returns(params, obs).mean(-1), obs)",
        "self.masked(self.returns(params, obs).max(-1), obs)",
        "tests/test_values_learner.py -k slow_loop",
    ),
    Mutation(
        "batches are drawn before a target is complete",
        "values/replay_learning.py",
        "(state.steps >= settings.learning_starts) & (window.filled >= algorithm.n_steps)",
        "state.steps >= settings.learning_starts",
        "tests/test_values_learner.py -k waits_for",
    ),
    Mutation(
        "of new steps only the newest can be drawn",
        "values/replay_learning.py",
        "algorithm.sampling.add(memory.sampling, after, rows.reward.shape[1], algorithm.n_steps)",
        "algorithm.sampling.add(memory.sampling, after, 1, algorithm.n_steps)",
        "tests/test_values_learner.py -k every_new_step",
    ),
    Mutation(
        "beta rises beyond 1",
        "values/prioritized.py",
        "jnp.minimum(steps / over, 1.0)",
        "steps / over",
        "tests/test_values_replay.py -k beta_rises",
    ),
    Mutation(
        "a buffer may be shorter than a target",
        "values/replay_learning.py",
        "if slots < max(steps, algorithm.n_steps):",
        "if slots < steps:",
        "tests/test_values_learner.py -k whole_target",
    ),
    Mutation(
        "PQN's targets are all rewards",
        "values/rollout_learning.py",
        "rollout, settings.lambda_)",
        "rollout, 1.0)",
        "tests/test_values_learner.py -k lambda_returns",
    ),
    Mutation(
        "evaluated action values explore what is not allowed",
        "values/q_networks.py",
        "epsilon, network.allowed(obs))\n\n",
        "epsilon)\n\n",
        "tests/test_networks.py -k explore_and_choose",
    ),
    Mutation(
        "the steps of an iteration are mixed over its rounds",
        "values/replay_learning.py",
        "x.swapaxes(1, 2).reshape(-1, x.shape[1], *x.shape[3:])",
        "x.reshape(-1, x.shape[1], *x.shape[3:])",
        "tests/test_values_learner.py -k order_of_time",
    ),
    Mutation(
        "DPO takes every label for right",
        "preferences/dpo.py",
        "PairLoss(loss, beta, label_smoothing))",
        "PairLoss(loss, beta, 0.0))",
        "tests/test_preferences_learners.py -k step_of_dpo",
    ),
    Mutation(
        "log-probabilities of pairs are named the other way round",
        "preferences/dpo.py",
        '"log_prob_chosen": chosen,',
        '"log_prob_chosen": rejected,',
        "tests/test_preferences_learners.py -k step_of_dpo",
    ),
    Mutation(
        "gradients of examples are not clipped",
        "preferences/supervised.py",
        "optimizers.adam(max_grad_norm=settings.max_grad_norm)",
        "optimizers.adam(max_grad_norm=None)",
        "tests/test_preferences_learners.py -k scaled_down",
    ),
    Mutation(
        "the entropy of fine-tuning has the wrong sign",
        "preferences/sft.py",
        '"entropy": _weighted_sum(batch.weight, entropy)',
        '"entropy": -_weighted_sum(batch.weight, entropy)',
        "tests/test_preferences_learners.py -k step_of_fine_tuning",
    ),
    Mutation(
        "the scores of rejected completions are those of chosen ones",
        "preferences/reward_model.py",
        '"reward_rejected": rejected.sum() / batch_size',
        '"reward_rejected": chosen.sum() / batch_size',
        "tests/test_preferences_learners.py -k step_of_the_reward_model",
    ),
    Mutation(
        "the judge of a task is always as sharp",
        "preferences/sources.py",
        "        sharpness=sharpness,\n    )",
        "    )",
        "tests/test_preferences_learners.py -k judge_of_a_task",
    ),
    Mutation(
        "pairs of a judge are new every time",
        "preferences/sources.py",
        "        num_pairs=num_pairs,\n        sharpness",
        "        sharpness",
        "tests/test_preferences_learners.py -k judge_of_a_task",
    ),
    Mutation(
        "no slip writes the last token",
        "preferences/pairs.py",
        "jax.random.randint(token_key, tokens.shape, 0, size)",
        "jax.random.randint(token_key, tokens.shape, 0, size - 1)",
        "tests/test_preferences_learners.py -k slip_writes",
    ),
    Mutation(
        "right and wrong steps are mixed up in an evaluation",
        "preferences/process_reward.py",
        "share(steps & right), share(steps & ~right)",
        "share(steps & ~right), share(steps & right)",
        "tests/test_process_reward.py -k told_apart_for_right",
    ),
    Mutation(
        "a completion weighs its score, not what it says",
        "preferences/selection.py",
        "return jax.nn.log_sigmoid(model.score(params, rollout))",
        "return model.score(params, rollout)",
        "tests/test_process_reward.py -k weighs_what",
    ),
    Mutation(
        "the answer is no step",
        "preferences/step_labels.py",
        "jnp.where(is_last, accuracy, task.check_steps(problem, tokens, length))",
        "task.check_steps(problem, tokens, length)",
        "tests/test_process_reward.py -k last_step_is_right",
    ),
    Mutation(
        "labels of a task are never wrong",
        "preferences/step_labels.py",
        "num_completions=num_completions, label_noise=label_noise)\n    checking",
        "num_completions=num_completions)\n    checking",
        "tests/test_process_reward.py -k made_as_they_are_set",
    ),
    Mutation(
        "held-out steps are those that are learned from",
        "preferences/step_labels.py",
        "drawing(data), drawing(held_out)",
        "drawing(data), drawing(data)",
        "tests/test_process_reward.py -k stored_steps",
    ),
    Mutation(
        "a completion that is half right is right for a vote",
        "preferences/selection.py",
        '(outcome.parts["accuracy"] >= 1)',
        '(outcome.parts["accuracy"] > 0)',
        "tests/test_process_reward.py -k selects_is_measured",
    ),
    Mutation(
        "a labelled completion may be a token too long",
        "envs/text/labelled_steps.py",
        "if ends[-1] >= task.max_tokens:",
        "if ends[-1] > task.max_tokens:",
        "tests/test_process_reward.py -k tokens_of_the_task",
    ),
    Mutation(
        "the cliff's map ends a cell early",
        "envs/mdps.py",
        "for column in range(1, 11)}",
        "for column in range(1, 10)}",
        "tests/test_planning.py -k grid_of_a_world",
    ),
    Mutation(
        "a grid may start in its goal",
        "envs/mdps.py",
        '("trap", special[1]), ("start", special[2])',
        '("trap", special[1])',
        "tests/test_planning.py -k make_no_sense",
    ),
    Mutation(
        "terms of few digits are the likelier ones",
        "envs/text/problems.py",
        "lower = jnp.where(upper == 10, 0, upper // 10)",
        "lower = jnp.zeros_like(upper)",
        "tests/test_text_tasks.py -k digits_is_equally",
    ),
    Mutation(
        "the longest chain is never drawn",
        "envs/text/problems.py",
        "length = jax.random.randint(length_key, (), shortest, terms + 1)",
        "length = jax.random.randint(length_key, (), shortest, terms)",
        "tests/test_text_tasks.py -k every_length",
    ),
    Mutation(
        "the longest row of swaps is never drawn",
        "envs/text/tracking.py",
        "jax.random.randint(length_key, (), shortest, length + 1)",
        "jax.random.randint(length_key, (), shortest, length)",
        "tests/test_text_tasks.py -k every_length",
    ),
    Mutation(
        "space around a prompt moves it into the other split",
        "envs/text/jsonl_reader.py",
        "prompt.strip().encode()",
        "prompt.encode()",
        "tests/test_text_records.py -k space_around",
    ),
    Mutation(
        "a split has as many problems as its file",
        "envs/text/jsonl.py",
        "num_problems=len(in_split)",
        "num_problems=len(rows.records)",
        "tests/test_text_records.py -k how_many_problems",
    ),
    Mutation(
        "a tokenizer frames every text",
        "envs/text/tokenizer.py",
        "add_special_tokens=False",
        "add_special_tokens=True",
        "tests/test_text_tokenizer.py -k puts_around",
    ),
    Mutation(
        "special tokens are not spelled",
        "envs/text/tokenizer.py",
        "skip_special_tokens=False",
        "skip_special_tokens=True",
        "tests/test_text_tokenizer.py -k special_tokens_of",
    ),
    Mutation(
        "what a block adds does not shrink with their number",
        "models/decoder.py",
        "(2 * self.config.layers * width) ** -0.5",
        "(2 * width) ** -0.5",
        "tests/test_language.py -k begins_with_weights",
    ),
    Mutation(
        "a convolution strides one cell at a time",
        "models/layers.py",
        "step = stride if stride > 1 else None",
        "step = None",
        "tests/test_networks.py -k strides_over",
    ),
    Mutation(
        "a layer's norm has the eps of torch",
        "models/layers.py",
        "centred * _spread(lax.rsqrt(_row_mean(centred**2) + 1e-6), x)",
        "centred * _spread(lax.rsqrt(_row_mean(centred**2) + 1e-5), x)",
        "tests/test_values_learner.py -k added_to_a_variance",
    ),
)


def applies(mutation: Mutation, root: Path) -> bool:
    """Whether the file has the text exactly once."""
    file = root / "jaxpg" / mutation.file
    return file.exists() and file.read_text(encoding="utf-8").count(mutation.old) == 1


def first_failure(tree: Path, arguments: list[str], cache: Path) -> tuple[str, str]:
    """How pytest ended, "failed", "passed", "too long" or "broken", and the first test that failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-o", f"cache_dir={cache}", "--deselect", SEES_TEXT]
    command += arguments
    environment = os.environ | {"PYTHONPATH": str(tree), "MPLBACKEND": "Agg"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return "too long", ""
    found = re.search(r"^(?:FAILED|ERROR) tests/(\S+\.py(?:::.+?)?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if found and done.returncode == 1:
        return "failed", found[1]
    return ("passed" if done.returncode in (0, 5) else "broken"), done.stdout[-2000:]  # 5: none of them in this lane


def tried(mutation: Mutation, tree: Path, cache: Path, lane: str | None) -> dict[str, str]:
    """The row of a fault that has been applied: who noticed it, and in which lane."""
    for name in (lane,) if lane else ("quick", "full"):
        selected = ["-n", "auto"] if lane else shlex.split(mutation.tests)
        ended, test = first_failure(tree, [*selected, *(["-m", "full"] if name == "full" else [])], cache)
        if ended == "failed":
            return {"lane": name, "noticed": test}
        if ended != "passed":
            print(test)
            return {"lane": name, "noticed": f"({ended})"}
    return {"lane": lane or "none", "noticed": "nobody"}


def written(results: dict[str, dict[str, str]], root: Path) -> str:
    """The table."""
    rows = ["| fault | file | lane | noticed by |", "|---|---|---|---|"]
    for mutation in MUTATIONS:
        result = results.get(mutation.name, {"lane": "–", "noticed": "not run"})
        lost = "" if applies(mutation, root) else " (its text is no longer there)"
        noticed = f"`{result['noticed']}`" if "::" in result["noticed"] else result["noticed"]
        rows.append(f"| {mutation.name}{lost} | `{mutation.file}` | {result['lane']} | {noticed} |")
    run = [results[m.name] for m in MUTATIONS if m.name in results]
    counts = {lane: sum(r["lane"] == lane for r in run) for lane in ("quick", "full", "none")}
    return (
        "# Deliberate faults, and the first test that notices each\n\n"
        f"Written by `benchmarks/mutations.py`. {len(MUTATIONS)} faults, {len(run)} of them run: the quick lane "
        f"notices {counts['quick']}, the full lane {counts['full']} more, nobody {counts['none']}.\n\n"
        + "\n".join(rows)
        + "\n"
    )


def main() -> None:
    """Apply, test, restore; write the table after every fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of faults")
    parser.add_argument("--lane", choices=["quick", "full"], help="run this whole lane instead of the tests named")
    parser.add_argument("--anchors", action="store_true", help="only say which faults no longer find their text")
    parser.add_argument("--missing", action="store_true", help="only those without a result")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to copy")
    arguments = parser.parse_args()
    lost = [m for m in MUTATIONS if not applies(m, arguments.tree)]
    for mutation in lost:
        print(f"no longer applies: {mutation.name} ({mutation.file})")
    if arguments.anchors:
        sys.exit(bool(lost))
    kept = RESULTS / "mutations.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree, cache = Path(folder) / "tree", Path(folder) / "cache"
        tree.mkdir()
        for name in COPIED:
            copy = shutil.copytree if (arguments.tree / name).is_dir() else shutil.copy
            copy(arguments.tree / name, tree / name)
        for mutation in MUTATIONS:
            chosen = any(part in mutation.name for part in arguments.only)
            if mutation in lost or not chosen or (arguments.missing and mutation.name in results):
                continue
            began, file = time.monotonic(), tree / "jaxpg" / mutation.file
            text = file.read_text(encoding="utf-8")
            file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
            results[mutation.name] = tried(mutation, tree, cache, arguments.lane)
            file.write_text(text, encoding="utf-8")
            print(f"{mutation.name}: {results[mutation.name]} [{time.monotonic() - began:.0f} s]", flush=True)
            kept.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            (RESULTS / "mutations.md").write_text(written(results, arguments.tree), encoding="utf-8")


if __name__ == "__main__":
    main()
