"""Which states of an MDP can be reached, from which a terminal state can be, and whether it has values at all."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpg.envs.tabular import AnyMDP, SparseMDP, check_probabilities, num_states_and_actions
from jaxpg.errors import UserError
from jaxpg.types import Array


def check_mdp(mdp: AnyMDP, gamma: float) -> None:
    """Refuse what has no values.

    Raises:
        UserError: a discount outside [0, 1], rows of P that are no distributions, rewards that are not finite, no
            terminal state within reach of the start, or with a discount of 1 a state from which none can be reached.
    """
    if not 0 <= gamma <= 1:
        raise UserError(f"The discount must be between 0 and 1, not {gamma}.")
    check_probabilities(mdp)
    if not np.isfinite(np.asarray(mdp.rewards if isinstance(mdp, SparseMDP) else mdp.R)).all():
        raise UserError("The rewards of an MDP must be finite.")
    ends, reached = _can_end(mdp), reached_states(mdp)
    if not np.asarray(mdp.terminal)[reached].any():
        raise UserError("No terminal state is within reach of the start, so no episode could end.")
    if gamma == 1 and not ends[reached].all():
        s = int(np.flatnonzero(reached & ~ends)[0])
        raise UserError(f"With a discount of 1 every state needs a way to a terminal one, and state {s} has none.")


def steps_to_terminal(mdp: AnyMDP, allowed: Array) -> Array:
    """The fewest steps in which an action can lead to a terminal state, [S, A], infinite if it cannot.

    Args:
        mdp: the process.
        allowed: [S, A] bool, the actions that may be taken.
    """

    def steps(nearest: Array) -> Array:
        if isinstance(mdp, SparseMDP):
            ahead = jnp.where(mdp.probabilities > 0, nearest[mdp.successors], jnp.inf)
        else:
            ahead = jnp.where(mdp.P > 0, nearest, jnp.inf)
        return jnp.where(allowed, 1 + ahead.min(-1), jnp.inf)

    def relax(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        nearest, _ = carry
        closer = jnp.where(mdp.terminal, 0.0, steps(nearest).min(-1))
        return closer, (closer != nearest).any()

    start = jnp.where(mdp.terminal, 0.0, jnp.inf)
    nearest, _ = lax.while_loop(lambda carry: carry[1], relax, (start, jnp.bool_(True)))
    return steps(nearest)


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
