r"""The line from REINFORCE to DAPO. Each algorithm is its parent with a few fields replaced; read it top to bottom.

    reinforce - reinforce_to_go - reinforce_baseline - actor_critic_mc - actor_critic_td - a2c - trpo
                                                                                           \- ppo - grpo - rloo
                                                                                                \     \- dr_grpo
                                                                                                 \     \- dapo - cispo
                                                                                                  \- rlhf

A function of the ladder takes its own settings and those of its parents, all by keyword, and returns a PolicyGradient.
Numbers may be traced, so learning rates, discounts and clip ranges can be a `vmap`; what fixes shapes is static.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from jaxpg import rollout, update
from jaxpg.objectives import advantages, loss_weights, surrogates
from jaxpg.objectives.kl import reference_kl
from jaxpg.policy_gradient import PolicyGradient
from jaxpg.update.optimizers import adam, constant, linear_decay

Algorithm = Callable[..., PolicyGradient]
PARENT: dict[str, str | None] = {}
"""The tree above: the name of every algorithm, and of its parent."""


def child_of(parent: Algorithm | None, *, drops: tuple[str, ...] = ()) -> Callable[[Algorithm], Algorithm]:
    """Note an algorithm's parent, and let its signature show the parent's settings too.

    An algorithm states only the settings that it adds or whose default it changes; the others it passes on, but for
    those that mean nothing to it any more (`drops`). The signature is what the command line and the configs offer.
    """

    def register(algorithm: Algorithm) -> Algorithm:
        own = inspect.signature(algorithm).parameters.values()
        settings = dict(inspect.signature(parent).parameters) if parent else {}
        settings |= {p.name: p for p in own if p.kind is inspect.Parameter.KEYWORD_ONLY}
        settings = {name: p for name, p in settings.items() if name not in drops}

        @wraps(algorithm)
        def checked(**given: Any) -> PolicyGradient:
            unknown = ", ".join(given.keys() - settings.keys())
            if unknown:
                raise TypeError(f"{algorithm.__name__} has no setting {unknown}; it has {', '.join(settings)}.")
            return algorithm(**given)

        checked.__signature__ = inspect.Signature(list(settings.values()), return_annotation=PolicyGradient)  # type: ignore[attr-defined]
        PARENT[algorithm.__name__] = parent.__name__ if parent else None
        return checked

    return register


@child_of(None)
def reinforce(
    *,
    num_envs: int = 16,
    learning_rate: float = 3e-3,
    anneal_steps: int | None = None,
    max_grad_norm: float | None = None,
    adam_eps: float = 1e-5,
    gamma: float = 0.99,
    entropy_coefficient: float = 0.0,
    normalize_advantages: bool = False,
) -> PolicyGradient:
    """REINFORCE (Williams 1992): every action answers for the whole return of its episode.

        grad J = E[ sum_t grad log pi(a_t | s_t) R ],    R = sum_t gamma^t r_t

    The loss sums over the steps of an episode and averages over episodes, as the theorem does.

    Args:
        num_envs: environments side by side, over all devices; for whole-episode methods, episodes per iteration.
        learning_rate: step size of Adam.
        anneal_steps: environment steps over which the step size falls linearly to zero; constant if not given.
        max_grad_norm: the gradient is scaled down to this global norm.
        adam_eps: what Adam adds to the root of the second moment, so that small gradients make small steps.
        gamma: discount.
        entropy_coefficient: weight of the entropy bonus.
        normalize_advantages: standardise the psi of each minibatch to mean 0 and standard deviation 1.
    """
    schedule = constant if anneal_steps is None else partial(linear_decay, over=anneal_steps)
    return PolicyGradient(
        gamma=gamma,
        collect=rollout.episodic(num_envs=num_envs),
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
        learning_rate=partial(schedule, value=learning_rate),
    )


@child_of(reinforce)
def reinforce_to_go(**inherited: Any) -> PolicyGradient:
    """REINFORCE with reward-to-go: an action answers only for what came after it.

    psi_t = G_t = sum_{k >= t} gamma^(k-t) r_k

    The gamma^t that the discounted theorem puts in front is dropped, here and everywhere below, as all
    implementations do (Thomas 2014, "Bias in Natural Actor-Critic Algorithms").
    """
    return reinforce(**inherited)._replace(credit=advantages.reward_to_go)


@child_of(reinforce_to_go)
def reinforce_baseline(*, baseline_kind: str = "batch", baseline_rate: float = 0.1, **inherited: Any) -> PolicyGradient:
    """REINFORCE with a constant baseline (Williams 1992, section 4): better than usual, or worse?

    psi_t = G_t - b

    Args:
        baseline_kind: b is the mean return of this batch (batch), or an exponential average over past ones (running).
        baseline_rate: weight of the newest batch in the running average.
    """
    advantages.check_baseline_kind(baseline_kind)
    credit = partial(advantages.mean_baseline, baseline_kind=baseline_kind, rate=baseline_rate)
    return reinforce_to_go(**inherited)._replace(credit=credit)


@child_of(reinforce_baseline, drops=("baseline_kind", "baseline_rate"))
def actor_critic_mc(*, value_coefficient: float = 0.5, **inherited: Any) -> PolicyGradient:
    """Actor-critic, Monte Carlo (Sutton and Barto 2018, section 13.4): a baseline that knows the state, and is learned.

    psi_t = G_t - V(s_t),    V regressed on G_t

    Args:
        value_coefficient: weight of the critic's loss beside the policy's.
    """
    return reinforce_baseline(**inherited)._replace(
        credit=advantages.critic_baseline,
        value_loss=surrogates.squared_error,
        value_coefficient=value_coefficient,
    )


@child_of(actor_critic_mc)
def actor_critic_td(*, num_envs: int = 1, num_steps: int = 16, **inherited: Any) -> PolicyGradient:
    """Actor-critic, temporal difference (ibid., section 13.5): learn before the episode is over, from one environment.

        psi_t = r_t + gamma r_{t+1} + ... + gamma^n V(s_{t+n}) - V(s_t)

    n is what is left of the segment. The mean is now over steps, for there are no whole episodes to speak of.

    Args:
        num_steps: steps of each environment between two updates; none, from a2c on, for one whole episode of each.
    """
    return actor_critic_mc(num_envs=num_envs, **inherited)._replace(
        collect=rollout.continuing(num_envs=num_envs, num_steps=num_steps),
        credit=partial(advantages.n_step, n=num_steps),
        loss_weights=loss_weights.per_step,
    )


@child_of(actor_critic_td)
def a2c(
    *,
    num_envs: int = 16,
    num_steps: int | None = 16,
    gae_lambda: float = 1.0,
    reset_pool: int = 0,
    **inherited: Any,
) -> PolicyGradient:
    """Advantage actor-critic (Mnih et al. 2016, synchronous): many environments side by side, lambda-returns.

        psi_t = sum_l (gamma lambda)^l delta_{t+l},    delta_t = r_t + gamma V(s_{t+1}) - V(s_t)

    lambda = 1 within the segment is the classic form.

    Args:
        gae_lambda: between 0, one step and all trust in V, and 1, all rewards of the segment.
        reset_pool: draw this many start states per environment and segment beforehand, instead of one at every step.
    """
    if num_steps is None:
        collect = rollout.episodic(num_envs=num_envs)
    else:
        collect = rollout.continuing(num_envs=num_envs, num_steps=num_steps, reset_pool=reset_pool)
    return actor_critic_td(num_envs=num_envs, **inherited)._replace(
        collect=collect,
        credit=partial(advantages.generalized_advantage, lambda_=gae_lambda),
    )


@child_of(a2c)
def trpo(
    *,
    num_envs: int = 16,
    num_steps: int | None = 128,
    gae_lambda: float = 0.97,
    normalize_advantages: bool = True,
    max_kl: float = 0.01,
    conjugate_steps: int = 10,
    damping: float = 0.1,
    backtracks: int = 10,
    value_epochs: int = 10,
    value_minibatches: int = 4,
    **inherited: Any,
) -> PolicyGradient:
    """Trust region policy optimization (Schulman et al. 2015): the largest step that changes the policy little.

        minimise -E[ pi(a|s) / pi_old(a|s) psi ]    subject to    E[ KL(pi_old || pi) ] <= max_kl

    Args:
        max_kl: radius of the trust region, in nats.
        conjugate_steps: iterations of conjugate gradients on the Fisher matrix.
        damping: added to the Fisher matrix's diagonal.
        backtracks: how many step lengths the line search tries, each half the one before.
        value_epochs: passes of the critic over the batch.
        value_minibatches: gradient steps of the critic per pass.
    """
    parent = a2c(
        num_envs=num_envs,
        num_steps=num_steps,
        gae_lambda=gae_lambda,
        normalize_advantages=normalize_advantages,
        **inherited,
    )
    return parent._replace(
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


@child_of(a2c)
def ppo(
    *,
    num_envs: int = 64,
    num_steps: int | None = 128,
    learning_rate: float = 2.5e-4,
    max_grad_norm: float | None = 0.5,
    gae_lambda: float = 0.95,
    normalize_advantages: bool = True,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    value_clip: float | None = None,
    epochs: int = 4,
    num_minibatches: int = 4,
    target_kl: float | None = None,
    chunk_rows: int | None = None,
    **inherited: Any,
) -> PolicyGradient:
    """Proximal policy optimization (Schulman et al. 2017): no reward for leaving the old policy's neighbourhood.

        loss_t = -min( rho_t psi_t, clip(rho_t, 1 - clip, 1 + clip_high) psi_t ),
        rho_t = pi(a_t | s_t) / pi_old(a_t | s_t)

    over several epochs of minibatches of the same batch.

    Args:
        clip: how far the ratio may fall below 1, and rise above it, before it stops to count.
        clip_high: how far it may rise, where that differs.
        dual_clip: for an action worse than expected, the objective is at least so many times its psi; 1 or more.
        value_clip: how far the critic may move from its old value before it stops to count; not limited if none.
        epochs: passes over the batch.
        num_minibatches: gradient steps per pass.
        target_kl: stop the passes once the approximate KL exceeds 1.5 times this.
        chunk_rows: sum a minibatch's gradient over chunks of at most so many rows; the result is the same.
    """
    parent = a2c(
        num_envs=num_envs,
        num_steps=num_steps,
        learning_rate=learning_rate,
        max_grad_norm=max_grad_norm,
        gae_lambda=gae_lambda,
        normalize_advantages=normalize_advantages,
        **inherited,
    )
    return parent._replace(
        surrogate=partial(
            surrogates.clipped_ratio,
            clip_low=clip,
            clip_high=clip if clip_high is None else clip_high,
            dual_clip=dual_clip,
        ),
        value_loss=surrogates.squared_error
        if value_clip is None
        else partial(surrogates.clipped_squared_error, clip=value_clip),
        update=partial(
            update.minibatch_epochs,
            epochs=epochs,
            num_minibatches=num_minibatches,
            target_kl=target_kl,
            chunk_rows=chunk_rows,
        ),
    )


@child_of(ppo, drops=("num_steps", "reset_pool"))
def rlhf(
    *,
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
    kl: str = "reward_k1",
    kl_coefficient: float = 0.05,
    reference_rate: float = 0.0,
    **inherited: Any,
) -> PolicyGradient:
    """PPO from human feedback (Ouyang et al. 2022, section 3.5, step 3): whole episodes, and a price on every change.

        r_t - kl_coefficient log( pi(a_t | s_t) / ref(a_t | s_t) )

    is what is credited: an episode is judged at its end, and every step pays for leaving the reference.

    Args:
        kl: where the KL to the reference stands: reward_k1, loss_k2, loss_k3 or loss_ratio_k3.
        kl_coefficient: its weight.
        reference_rate: share of the way the reference moves to the policy per iteration; 0 keeps the initial policy.
    """
    parent = ppo(num_steps=None, gamma=gamma, gae_lambda=gae_lambda, **inherited)
    return parent._replace(reference_kl=reference_kl(kl, kl_coefficient), reference_rate=reference_rate)


@child_of(ppo, drops=("num_steps", "reset_pool", "gae_lambda", "value_clip", "value_coefficient"))
def grpo(
    *,
    group_size: int = 8,
    kl: str | None = "loss_k3",
    kl_coefficient: float = 0.04,
    reference_rate: float = 0.0,
    normalize_advantages: bool = False,
    **inherited: Any,
) -> PolicyGradient:
    """Group relative policy optimization (Shao et al. 2024, section 4.1): the group is the critic.

        psi_it = (R_i - mean(R)) / std(R)  over a group of episodes from one start state

    Mean over the steps of an episode, then over episodes; plus a KL to a reference policy in the loss.

    Args:
        group_size: episodes per group.
        kl: where the KL to the reference stands: reward_k1, loss_k2, loss_k3, loss_ratio_k3, or none.
        kl_coefficient: its weight.
        reference_rate: share of the way the reference moves to the policy per iteration; 0 keeps the initial policy.
    """
    parent = ppo(normalize_advantages=normalize_advantages, **inherited)
    return parent._replace(
        collect=rollout.episodic(num_envs=parent.collect.num_envs, group_size=group_size),
        credit=partial(advantages.group_relative, group_size=group_size),
        loss_weights=loss_weights.per_episode,
        value_loss=None,
        reference_kl=reference_kl(kl, kl_coefficient) if kl else None,
        reference_rate=reference_rate,
    )


@child_of(grpo)
def rloo(*, group_size: int = 8, **inherited: Any) -> PolicyGradient:
    """REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024): the baseline of one is the mean of the others.

    psi_it = R_i - mean_{j != i} R_j, an unbiased baseline, since it does not depend on the episode it is taken from
    """
    credit = partial(advantages.leave_one_out, group_size=group_size)
    return grpo(group_size=group_size, **inherited)._replace(credit=credit)


@child_of(grpo)
def dr_grpo(*, group_size: int = 8, max_length: int, **inherited: Any) -> PolicyGradient:
    """GRPO done right (Liu et al. 2025, section 3.2): two divisions fewer, two biases fewer.

        psi_it = R_i - mean(R),    weights 1 / (B max_length)

    Division by std favours questions that are too easy or too hard; division by an episode's own length makes long
    wrong answers cheap.

    Args:
        max_length: the constant that takes the place of an episode's length, usually the time limit.
    """
    return grpo(group_size=group_size, **inherited)._replace(
        credit=partial(advantages.group_relative, group_size=group_size, divide_by_std=False),
        loss_weights=partial(loss_weights.per_episode_over, length=max_length),
    )


@child_of(grpo, drops=("kl", "kl_coefficient", "reference_rate"))
def dapo(
    *,
    group_size: int = 8,
    clip_high: float | None = 0.28,
    max_resample_rounds: int | None = 4,
    overlong_filtering: bool = False,
    **inherited: Any,
) -> PolicyGradient:
    """Decoupled clip and dynamic sampling policy optimization (Yu et al. 2025, section 3).

    More room upwards in the clip, so that unlikely actions can grow; groups without signal replaced by fresh ones;
    every step of the batch weighs the same; no KL.

    Args:
        max_resample_rounds: rounds of sampling at most, to fill the batch with groups that carry signal; none to
            train on groups as they come.
        overlong_filtering: episodes that the time limit cut off do not train.
    """
    parent = grpo(group_size=group_size, clip_high=clip_high, kl=None, **inherited)
    collect = parent.collect
    if max_resample_rounds is not None:
        collect = rollout.with_dynamic_sampling(collect, max_resample_rounds=max_resample_rounds, gamma=parent.gamma)
    return parent._replace(
        collect=rollout.with_overlong_filtering(collect) if overlong_filtering else collect,
        loss_weights=loss_weights.per_step,
    )


@child_of(dapo, drops=("dual_clip",))
def cispo(*, clip: float = 1.0, clip_high: float = 0.28, **inherited: Any) -> PolicyGradient:
    """Clipped importance sampling policy optimization (MiniMax 2025): clip the weight of a step, never its gradient.

    loss_t = -sg[ clip(rho_t, 1 - clip, 1 + clip_high) ] psi_t log pi(a_t | s_t)

    Rare words that turn an answer round soon leave PPO's clip, and then learn no more; here they go on. A `clip` of 1
    means that a weight may fall to nothing.
    """
    surrogate = partial(surrogates.clipped_weight, clip_low=clip, clip_high=clip_high)
    return dapo(clip=clip, clip_high=clip_high, **inherited)._replace(surrogate=surrogate)


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
        rloo,
        dr_grpo,
        dapo,
        cispo,
    )
}


def changed_fields(child: PolicyGradient, parent: PolicyGradient) -> tuple[str, ...]:
    """The fields in which two records differ. Functions with bound arguments are equal if both parts are."""

    def plain(part: Any) -> Any:
        if isinstance(part, partial):
            return plain(part.func), plain(part.args), {name: plain(value) for name, value in part.keywords.items()}
        if isinstance(part, tuple):
            return tuple(map(plain, part))
        return part

    return tuple(n for n, a, b in zip(child._fields, child, parent, strict=True) if plain(a) != plain(b))
