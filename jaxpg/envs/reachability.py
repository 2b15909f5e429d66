"""Which states of an MDP can be reached, from which a terminal state can be, and whether it has values at all."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpg.envs.mdp_records import AnyMDP, SparseMDP, check_discount, check_probabilities, num_states_and_actions
from jaxpg.envs.tabular import expected_rewards
from jaxpg.errors import UserError
from jaxpg.types import Array


def check_mdp(mdp: AnyMDP, gamma: float) -> None:
    """Refuse what has no values.

    With a discount of 1 it does not find every infinite value: rewards that outweigh losses again and again pass.

    Raises:
        UserError: a discount outside [0, 1], rows of P that are no distributions, rewards that are not finite, no
            terminal state within reach of the start, or with a discount of 1 a state from which none can be reached, or
            one from which rewards can be collected for ever without a loss.
    """
    check_discount(gamma)
    check_probabilities(mdp)
    if not np.isfinite(np.asarray(mdp.rewards if isinstance(mdp, SparseMDP) else mdp.R)).all():
        raise UserError("The rewards of an MDP must be finite.")
    ends, reached = _can_end(mdp), reached_states(mdp)
    if not np.asarray(mdp.terminal)[reached].any():
        raise UserError("No terminal state is within reach of the start, so no episode could end.")
    if gamma == 1 and not ends.all():
        s = int(np.flatnonzero(~ends)[0])
        raise UserError(f"With a discount of 1 every state needs a way to a terminal one, and state {s} has none.")
    if gamma == 1 and (endless := _earns_for_ever(mdp)).any():
        s = int(np.flatnonzero(endless)[0])
        raise UserError(
            f"With a discount of 1 no rewards may be collected for ever without a loss, as from state {s}, whose value "
            "is infinite: take a discount below 1, or let every step cost something."
        )


@jax.jit
def steps_to_terminal(mdp: AnyMDP, allowed: Array) -> Array:
    """The fewest steps in which an action can lead to a terminal state, [S, A], infinite if it cannot.

    Args:
        mdp: the process.
        allowed: [S, A] bool, the actions that may be taken.
    """

    def steps(nearest: Array) -> Array:
        return jnp.where(allowed, 1 + _of_successors(mdp, nearest, jnp.inf).min(-1), jnp.inf)

    def relax(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        nearest, _ = carry
        closer = jnp.where(mdp.terminal, 0.0, steps(nearest).min(-1))
        return closer, (closer != nearest).any()

    start = jnp.where(mdp.terminal, 0.0, jnp.inf)
    nearest, _ = lax.while_loop(lambda carry: carry[1], relax, (start, jnp.bool_(True)))
    return steps(nearest)


@jax.jit
def lasting_actions(mdp: AnyMDP, allowed: Array) -> Array:
    """[S, A] bool, the allowed actions after which, whatever follows, there is always another of them: none ends.

    Args:
        mdp: the process.
        allowed: [S, A] bool, the actions that may be taken.
    """

    def remove(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        lasting, _ = carry
        kept = lasting & _of_successors(mdp, lasting.any(-1), True).all(-1)
        return kept, (kept != lasting).any()

    start = allowed & ~mdp.terminal[:, None]
    lasting, _ = lax.while_loop(lambda carry: carry[1], remove, (start, jnp.bool_(True)))
    return lasting


def _of_successors(mdp: AnyMDP, x: Array, impossible: float | bool) -> Array:
    """[S, A, K] or [S, A, S], `x` `[S]` of every successor; `impossible` where it has no probability."""
    if isinstance(mdp, SparseMDP):
        return jnp.where(mdp.probabilities > 0, x[mdp.successors], impossible)
    return jnp.where(mdp.P > 0, x, impossible)


def _earns_for_ever(mdp: AnyMDP) -> np.ndarray:
    """[S] bool, from where a policy can go on for ever without a loss, and be paid again and again.

    The largest set of actions that last, have expected rewards of at least 0, and can always lead to a reward again.
    """
    rewards = expected_rewards(mdp)
    pays = rewards > 8 * jnp.finfo(rewards.dtype).eps * jnp.abs(rewards).max()  # more than by rounding
    actions = lasting_actions(mdp, rewards >= 0)
    while (paid := (actions & pays).any(-1)).any():
        steps = steps_to_terminal(mdp._replace(terminal=paid), actions)
        kept = lasting_actions(mdp, actions & (paid | jnp.isfinite(steps).any(-1))[:, None])
        if (kept == actions).all():
            return np.asarray(paid)
        actions = kept
    return np.zeros(len(mdp.terminal), bool)


def _can_end(mdp: AnyMDP) -> np.ndarray:
    """[S] bool, whether a terminal state is within reach."""
    everything = jnp.ones(num_states_and_actions(mdp), bool)
    return np.asarray(mdp.terminal | jnp.isfinite(steps_to_terminal(mdp, everything)).any(-1))


def reached_states(mdp: AnyMDP) -> np.ndarray:
    """[S] bool, whether an episode can come to a state."""
    if isinstance(mdp, SparseMDP):
        before, a, k = np.nonzero(np.asarray(mdp.probabilities) > 0)
        after = np.asarray(mdp.successors)[before, a, k]
    else:
        before, after = np.nonzero((np.asarray(mdp.P) > 0).any(1))
    live = ~np.asarray(mdp.terminal)[before]
    reached, count = np.asarray(mdp.start) > 0, -1
    while count != reached.sum():
        count = reached.sum()
        reached[after[live & reached[before]]] = True
    return reached
