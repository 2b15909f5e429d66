r"""The line from REINFORCE to DAPO. Each algorithm is its parent with a few fields replaced; read it top to bottom.

    reinforce - reinforce_to_go - reinforce_baseline - actor_critic_mc - actor_critic_td - a2c - trpo
                                                                                           \- ppo - grpo - process_grpo
                                                                                                \     \- rloo
                                                                                                 \     \- dr_grpo
                                                                                                  \     \- gspo
                                                                                                   \     \- dapo - cispo
                                                                                                    \- rlhf

An algorithm is a function from settings, all of them keywords, to a record: a PolicyGradient. Its signature states its
own settings; `**inherited` stands for those that it passes on to its parent, and `child_of` names the parent and the
inherited settings whose default changes. A `Scalar` may be traced, so that learning rates, discounts and clip ranges
can be mapped over by `jax.vmap`; an int or a bool fixes shapes or code and is static.
"""

from __future__ import annotations

from functools import partial
from typing import Unpack

from jaxpg import rollout, update
from jaxpg.algorithm import PolicyGradient
from jaxpg.errors import UserError
from jaxpg.ladder_settings import (
    A2CSettings,
    Algorithm,
    ClipFreeDAPOSettings,
    CriticFreePPOSettings,
    CriticSettings,
    EpisodicPPOSettings,
    GRPOSettings,
    ReferenceFreeGRPOSettings,
    ReinforceSettings,
    child_of,
    root,
)
from jaxpg.objectives import advantages, loss_weights, surrogates
from jaxpg.objectives.adaptation import adaptive_kl
from jaxpg.objectives.kl import reference_kl
from jaxpg.types import Scalar
from jaxpg.update.optimizers import adam, annealed


@root
def reinforce(
    *,
    num_envs: int = 16,
    learning_rate: Scalar = 3e-3,
    anneal_steps: int | None = None,
    max_grad_norm: Scalar | None = None,
    adam_eps: Scalar = 1e-5,
    gamma: Scalar = 0.99,
    entropy_coefficient: Scalar = 0.0,
    normalize_advantages: bool = False,
) -> PolicyGradient:
    """REINFORCE (Williams 1992): every action is credited with the whole return of its episode.

        grad J = E[ sum_t grad log pi(a_t | s_t) R ],    R = sum_t gamma^t r_t

    The loss sums over the steps of an episode and averages over episodes, as the theorem does.

    Args:
        num_envs: parallel environments, over all devices; for whole-episode methods, episodes per iteration.
        learning_rate: step size of Adam.
        anneal_steps: environment steps over which the learning rate falls linearly to zero; none for a constant one.
        max_grad_norm: the gradient is scaled down to this global norm; none for no limit.
        adam_eps: added by Adam to the root of the second moment, so that small gradients make small steps.
        gamma: discount.
        entropy_coefficient: weight of the entropy bonus.
        normalize_advantages: standardise the psi of each minibatch to mean 0 and standard deviation 1.
    """
    return PolicyGradient(
        gamma=gamma,
        collector=rollout.episodic(num_envs=num_envs),
        credit=advantages.total_return,
        normalize=advantages.standardize if normalize_advantages else advantages.unchanged,
        surrogate=surrogates.score_function,
        loss_weights=partial(loss_weights.per_episode_over, length=1),
        value_loss=None,
        value_coefficient=0.0,
        entropy_coefficient=entropy_coefficient,
        reference_kl=None,
        reference_rate=0.0,
        update=update.gradient_step,
        optimizer=partial(adam, max_grad_norm=max_grad_norm, eps=adam_eps),
        learning_rate=annealed(learning_rate, anneal_steps),
    )


@child_of(reinforce)
def reinforce_to_go(**inherited: Unpack[ReinforceSettings]) -> PolicyGradient:
    """REINFORCE with reward-to-go: an action is credited only with the rewards that follow it.

        psi_t = G_t = sum_{k >= t} gamma^(k-t) r_k

    The factor gamma^t of the discounted policy gradient theorem is dropped, here and in all descendants, as in nearly
    all implementations (Thomas 2014, "Bias in Natural Actor-Critic Algorithms").
    """
    return reinforce(**inherited)._replace(credit=advantages.reward_to_go)


@child_of(reinforce_to_go)
def reinforce_baseline(
    *,
    baseline_kind: str = "batch",
    baseline_rate: Scalar = 0.1,
    **inherited: Unpack[ReinforceSettings],
) -> PolicyGradient:
    """REINFORCE with a constant baseline (Williams 1992, section 4): was the return above or below average?

        psi_t = G_t - b

    Args:
        baseline_kind: b is the mean of G_t over the steps of this batch (batch), or an exponential average of the means
            of past batches (running).
        baseline_rate: weight of the newest batch in the running average.

    Raises:
        UserError: an unknown `baseline_kind`.
    """
    advantages.check_baseline_kind(baseline_kind)
    credit = partial(advantages.mean_baseline, baseline_kind=baseline_kind, rate=baseline_rate)
    return reinforce_to_go(**inherited)._replace(credit=credit)


@child_of(reinforce_baseline)
def actor_critic_mc(*, value_coefficient: Scalar = 0.5, **inherited: Unpack[ReinforceSettings]) -> PolicyGradient:
    """Actor-critic, Monte Carlo: the baseline is a learned function of the state (Sutton and Barto 2018, section 13.4).

        psi_t = G_t - V(s_t),    V regressed on G_t

    The source calls this REINFORCE with a baseline, and an actor-critic only what bootstraps, as actor_critic_td does.

    Args:
        value_coefficient: weight of the critic's loss relative to the policy's.
    """
    return reinforce_baseline(**inherited)._replace(
        credit=advantages.critic_baseline,
        value_loss=surrogates.squared_error,
        value_coefficient=value_coefficient,
    )


@child_of(actor_critic_mc, num_envs=1)
def actor_critic_td(*, num_steps: int = 16, **inherited: Unpack[CriticSettings]) -> PolicyGradient:
    """Actor-critic, temporal difference (Sutton and Barto 2018, section 13.5): updates before the episode ends.

        psi_t = r_t + gamma r_{t+1} + ... + gamma^n V(s_{t+n}) - V(s_t)

    n is the number of steps left in the segment. The loss averages over steps, since a segment need not hold whole
    episodes.

    Args:
        num_steps: steps of each environment between two updates; from a2c on, none for one whole episode of each.
    """
    parent = actor_critic_mc(**inherited)
    return parent._replace(
        collector=rollout.continuing(num_envs=parent.collector.num_envs, num_steps=num_steps),
        credit=partial(advantages.n_step, n=num_steps),
        loss_weights=loss_weights.per_step,
    )


@child_of(actor_critic_td, num_envs=16)
def a2c(
    *,
    num_steps: int | None = 16,
    gae_lambda: Scalar = 1.0,
    reset_pool: int = 0,
    **inherited: Unpack[CriticSettings],
) -> PolicyGradient:
    """Advantage actor-critic (Mnih et al. 2016, synchronous): many parallel environments, lambda-returns.

        psi_t = sum_l (gamma lambda)^l delta_{t+l},    delta_t = r_t + gamma V(s_{t+1}) - V(s_t)

    lambda = 1 within the segment is the classic form. The source has RMSProp and an entropy coefficient of 0.01.

    Args:
        gae_lambda: from 0, one-step targets that rely on V, to 1, all rewards of the segment.
        reset_pool: draw this many start states per environment and segment in advance, instead of one at every step.

    Raises:
        UserError: a `reset_pool` with `num_steps` none, since whole episodes begin with a reset each.
    """
    parent = actor_critic_td(**inherited)
    num_envs = parent.collector.num_envs
    if num_steps is None:
        if reset_pool:
            raise UserError(f"reset_pool is for rollouts of num_steps, and num_steps is none: leave out {reset_pool}.")
        collector = rollout.episodic(num_envs=num_envs)
    else:
        collector = rollout.continuing(num_envs=num_envs, num_steps=num_steps, reset_pool=reset_pool)
    return parent._replace(collector=collector, credit=partial(advantages.generalized_advantage, lambda_=gae_lambda))


@child_of(a2c, num_steps=128, gae_lambda=0.97, normalize_advantages=True)
def trpo(
    *,
    max_kl: Scalar = 0.01,
    conjugate_steps: int = 10,
    damping: Scalar = 0.1,
    backtracks: int = 10,
    value_epochs: int = 10,
    value_minibatches: int = 4,
    **inherited: Unpack[A2CSettings],
) -> PolicyGradient:
    """Trust region policy optimization (Schulman et al. 2015): the largest step that changes the policy little.

        minimise -E[ pi(a|s) / pi_old(a|s) psi ]    subject to    E[ KL(pi_old || pi) ] <= max_kl

    Args:
        max_kl: radius of the trust region, in nats.
        conjugate_steps: iterations of conjugate gradients on the Fisher matrix.
        damping: added to the Fisher matrix's diagonal.
        backtracks: number of step lengths that the line search tries, each half the one before.
        value_epochs: passes of the critic over the batch.
        value_minibatches: gradient steps of the critic per pass.
    """
    return a2c(**inherited)._replace(
        surrogate=surrogates.importance_ratio,
        update=partial(
            update.trust_region_step,
            max_kl=max_kl,
            conjugate_steps=conjugate_steps,
            damping=damping,
            backtracks=backtracks,
            value_epochs=value_epochs,
            value_minibatches=value_minibatches,
        ),
    )


@child_of(
    a2c,
    num_envs=64,
    num_steps=128,
    learning_rate=2.5e-4,
    max_grad_norm=2.0,
    gae_lambda=0.95,
    normalize_advantages=True,
)
def ppo(
    *,
    clip: Scalar = 0.2,
    clip_high: Scalar | None = None,
    dual_clip: Scalar | None = None,
    value_clip: Scalar | None = None,
    epochs: int = 4,
    num_minibatches: int = 4,
    target_kl: Scalar | None = None,
    chunk_rows: int | None = None,
    **inherited: Unpack[A2CSettings],
) -> PolicyGradient:
    """Proximal policy optimization (Schulman et al. 2017): no gain from moving the ratio outside the clip range.

        loss_t = -min( rho_t psi_t, clip(rho_t, 1 - clip, 1 + clip_high) psi_t ),
        rho_t = pi(a_t | s_t) / pi_old(a_t | s_t)

    over several epochs of minibatches of the same batch. `max_grad_norm` is 2, where CleanRL and Stable-Baselines3 have
    0.5, by which 64 seeds of CartPole learn later (benchmarks/LOG.md, "PPO with a norm of 2").

    Args:
        clip: the ratio is clipped to [1 - clip, 1 + clip].
        clip_high: the upper limit is 1 + clip_high instead; none for the same as below.
        dual_clip: for psi < 0 the objective is at least dual_clip psi (Ye et al. 2020); above 1, none for no limit.
        value_clip: how far the clipped value loss lets V move from its old value; none for the plain value loss.
        epochs: passes over the batch.
        num_minibatches: gradient steps per pass.
        target_kl: stop the passes once the approximate KL exceeds 1.5 times this; none for no limit.
        chunk_rows: sum the gradient of a minibatch over chunks of at most this many rows, with the same result; none
            for a size that suits the machine.
    """
    value_loss = surrogates.squared_error
    if value_clip is not None:
        value_loss = partial(surrogates.clipped_squared_error, clip=value_clip)
    return a2c(**inherited)._replace(
        surrogate=partial(
            surrogates.clipped_ratio,
            clip_low=clip,
            clip_high=clip if clip_high is None else clip_high,
            dual_clip=dual_clip,
        ),
        value_loss=value_loss,
        update=partial(
            update.minibatch_epochs,
            epochs=epochs,
            num_minibatches=num_minibatches,
            target_kl=target_kl,
            chunk_rows=chunk_rows,
        ),
    )


@child_of(ppo, max_grad_norm=1.0, gamma=1.0, gae_lambda=1.0)
def rlhf(
    *,
    kl: str = "reward_k1",
    kl_coefficient: Scalar = 0.05,
    reference_rate: Scalar = 0.0,
    reference_kl_target: Scalar | None = None,
    kl_gain: Scalar = 0.1,
    **inherited: Unpack[EpisodicPPOSettings],
) -> PolicyGradient:
    """PPO from human feedback (Ouyang et al. 2022, section 3.5): whole episodes, and a KL to a reference.

        reward_t = r_t - kl_coefficient log( pi(a_t | s_t) / ref(a_t | s_t) )

    The reward model scores an episode at its end; the KL is charged at every step. With `reference_kl_target` its
    weight is adapted (Ziegler et al. 2019, section 2.2). `gae_lambda` is 1 here, and 0.95 in Ziegler et al. and TRL.

    Args:
        kl: where the KL to the reference enters: reward_k1, loss_k2, loss_k3 or loss_ratio_k3.
        kl_coefficient: weight of the KL.
        reference_rate: share of the way the reference moves to the policy per iteration; 0 keeps the initial policy.
        reference_kl_target: the weight is adapted towards a KL of this many nats per episode; none for a constant
            weight.
        kl_gain: gain of that controller, without which it is not read; the weight changes by a share of at most
            0.2 kl_gain per iteration.

    Raises:
        UserError: an unknown `kl`, or loss_k1, whose expected gradient is zero.
    """
    adaptation = None
    if reference_kl_target is not None:
        adaptation = adaptive_kl(kl, kl_coefficient, target=reference_kl_target, gain=kl_gain)
    return ppo(num_steps=None, **inherited)._replace(
        reference_kl=reference_kl(kl, kl_coefficient),
        reference_rate=reference_rate,
        adaptation=adaptation,
    )


@child_of(ppo, max_grad_norm=1.0, gamma=1.0, normalize_advantages=False)
def grpo(
    *,
    group_size: int = 8,
    kl: str | None = "loss_k3",
    kl_coefficient: Scalar = 0.04,
    reference_rate: Scalar = 0.0,
    **inherited: Unpack[CriticFreePPOSettings],
) -> PolicyGradient:
    """Group relative policy optimization (Shao et al. 2024, section 4.1): the mean of a group replaces the critic.

        psi_it = (R_i - mean(R)) / std(R)  over a group of episodes from one start state

    The loss averages over the steps of an episode, then over episodes, and adds a KL to a reference policy. R is the
    sum of rewards: with a discount below 1, an early reward, and so a short answer, would count for more. A batch is
    used for PPO's 4 epochs of 4 minibatches. The source takes one step per batch, with groups of 64: epochs = 1,
    num_minibatches = 1, group_size = 64.

    Args:
        group_size: episodes per group.
        kl: where the KL to the reference enters: reward_k1, loss_k2, loss_k3, loss_ratio_k3, or none. In the reward it
            is divided by std(R) with the rest: in a group whose other rewards are equal, psi is the KL alone, at full
            size whatever its weight.
        kl_coefficient: weight of the KL.
        reference_rate: share of the way the reference moves to the policy per iteration; 0 keeps the initial policy.

    Raises:
        UserError: groups of one, or that do not divide `num_envs`; an unknown `kl`, or loss_k1, whose expected gradient
            is zero.
    """
    parent = ppo(**inherited)
    return parent._replace(
        collector=rollout.episodic(num_envs=parent.collector.num_envs, group_size=group_size),
        credit=partial(advantages.group_relative, group_size=group_size),
        loss_weights=loss_weights.per_episode,
        value_loss=None,
        reference_kl=reference_kl(kl, kl_coefficient) if kl else None,
        reference_rate=reference_rate,
    )


@child_of(grpo)
def process_grpo(**inherited: Unpack[GRPOSettings]) -> PolicyGradient:
    """GRPO with process supervision (Shao et al. 2024, section 4.1.3): a reward for every step of the reasoning.

        psi_it = sum of z_ij over the steps j of episode i that end at t or later,
        z_ij = (r_ij - mean(r)) / std(r)  over all steps of a group of episodes from one start state

    An action is not credited with the steps before it, and a wrong step is charged where it is made. Where rewards are
    for whole episodes, an episode is one step, and with gamma = 1 this is GRPO.
    """
    parent = grpo(**inherited)
    return parent._replace(credit=partial(advantages.process_relative, group_size=parent.collector.group_size))


@child_of(grpo)
def rloo(**inherited: Unpack[GRPOSettings]) -> PolicyGradient:
    """REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024): the baseline is the mean of the others.

        psi_it = R_i - mean_{j != i} R_j

    The baseline is unbiased, since it does not depend on the episode that it is subtracted from. Ratio, clip, the mean
    over an episode's steps and a KL in the loss are GRPO's; the sources have a KL in the reward, and no others of them.
    """
    parent = grpo(**inherited)
    return parent._replace(credit=partial(advantages.leave_one_out, group_size=parent.collector.group_size))


@child_of(grpo)
def dr_grpo(*, max_length: int, **inherited: Unpack[GRPOSettings]) -> PolicyGradient:
    """GRPO done right (Liu et al. 2025, section 3.2): without two divisions, each of which is a bias.

        psi_it = R_i - mean(R),    weights 1 / (B max_length)

    Division by std favours questions that are too easy or too hard; division by an episode's own length favours long
    wrong answers. The KL is GRPO's, and the source trains without: kl = none.

    Args:
        max_length: the constant that replaces an episode's length, usually the time limit.
    """
    parent = grpo(**inherited)
    return parent._replace(
        credit=partial(advantages.group_relative, group_size=parent.collector.group_size, divide_by_std=False),
        loss_weights=partial(loss_weights.per_episode_over, length=max_length),
    )


@child_of(grpo, clip=3e-4, clip_high=4e-4)
def gspo(**inherited: Unpack[GRPOSettings]) -> PolicyGradient:
    """Group sequence policy optimization (Zheng et al. 2025, section 4.1): the ratio is that of the whole answer.

        loss_i = -min( s_i psi_i, clip(s_i, 1 - clip, 1 + clip_high) psi_i ),
        s_i = ( pi(o_i) / pi_old(o_i) )^(1 / |o_i|)

    The reward is for the whole answer, and a ratio of single tokens adds noise that grows with its length. s_i hardly
    leaves 1, so that its clip range is far narrower (section 5.1). The KL is GRPO's, which the source leaves out of its
    formulas: kl = none.
    """
    parent = grpo(**inherited)
    return parent._replace(surrogate=surrogates.per_episode(parent.surrogate))


@child_of(grpo, clip_high=0.28)
def dapo(
    *,
    max_resample_rounds: int | None = 4,
    overlong_filtering: bool = False,
    **inherited: Unpack[ReferenceFreeGRPOSettings],
) -> PolicyGradient:
    """Decoupled clip and dynamic sampling policy optimization (Yu et al. 2025, section 3).

    A higher upper clip limit, so that unlikely actions can grow; groups without signal are replaced by fresh ones;
    every step of the batch has the same weight; no KL.

    Args:
        max_resample_rounds: maximum number of sampling rounds to fill the batch with groups that carry signal, all of
            whose steps are counted; none for no resampling.
        overlong_filtering: exclude episodes that the time limit truncated from training.
    """
    parent = grpo(kl=None, **inherited)
    collector = parent.collector
    if max_resample_rounds is not None:
        collector = rollout.with_dynamic_sampling(
            collector, max_resample_rounds=max_resample_rounds, gamma=parent.gamma
        )
    if overlong_filtering:
        collector = rollout.with_overlong_filtering(collector)
    return parent._replace(collector=collector, loss_weights=loss_weights.per_step)


@child_of(dapo)
def cispo(*, clip: Scalar = 1.0, clip_high: Scalar = 0.28, **inherited: Unpack[ClipFreeDAPOSettings]) -> PolicyGradient:
    """Clipped importance sampling policy optimization (MiniMax 2025): clips the weight of a step, never its gradient.

        loss_t = -sg[ clip(rho_t, 1 - clip, 1 + clip_high) ] psi_t log pi(a_t | s_t)

    Rare tokens that change the course of an answer soon leave PPO's clip range and get no gradient from then on; here
    they keep it. A `clip` of 1 leaves the weight without a lower limit. The source gives no number for the upper one;
    0.28 is DAPO's.
    """
    surrogate = partial(surrogates.clipped_weight, clip_low=clip, clip_high=clip_high)
    return dapo(**inherited)._replace(surrogate=surrogate)


ALGORITHMS: dict[str, Algorithm] = {
    algorithm.__name__: algorithm
    for algorithm in (
        reinforce,
        reinforce_to_go,
        reinforce_baseline,
        actor_critic_mc,
        actor_critic_td,
        a2c,
        trpo,
        ppo,
        rlhf,
        grpo,
        process_grpo,
        rloo,
        dr_grpo,
        gspo,
        dapo,
        cispo,
    )
}
