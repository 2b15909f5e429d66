"""The records of a finite Markov decision process, and what is refused of them and of a policy.

Notation of Sutton & Barto, "Reinforcement Learning" (2018), chapter 3. `S` states, `A` actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.errors import UserError, check_record
from jaxpg.types import Array


class MDP(NamedTuple):
    """A finite Markov decision process.

    P: [S, A, S], P[s, a, s'] = p(s' | s, a).
    R: [S, A, S], the reward of the transition; expected rewards r(s, a) are `(P * R).sum(-1)`.
    start: [S], the distribution of the first state.
    terminal: [S] bool. Entering such a state ends the episode; it has no rewards.
    """

    P: Array
    R: Array
    start: Array
    terminal: Array


class SparseMDP(NamedTuple):
    """A finite Markov decision process whose actions have at most K outcomes, for worlds too large for `[S, A, S]`.

    successors: [S, A, K] int32. The same state may stand there twice, with another reward.
    probabilities: [S, A, K]; outcomes that do not happen have probability 0.
    rewards: [S, A, K].
    start, terminal: as in MDP.
    """

    successors: Array
    probabilities: Array
    rewards: Array
    start: Array
    terminal: Array


AnyMDP = MDP | SparseMDP


def num_states_and_actions(mdp: AnyMDP) -> tuple[int, int]:
    """S and A.

    Raises:
        UserError: the arrays do not have the shapes of an MDP; others, such as rewards `[S]` or `[S, A]`, would be
            broadcast to them. Or what is no array, and arrays of other types.
    """
    _check_arrays(mdp)
    num_states = len(mdp.terminal)
    names = ("successors", "probabilities", "rewards") if isinstance(mdp, SparseMDP) else ("P", "R")
    shapes = [jnp.shape(getattr(mdp, name)) for name in names]
    last = shapes[0][-1:] if isinstance(mdp, SparseMDP) else (num_states,)
    num_actions = shapes[0][1] if len(shapes[0]) == 3 else 0
    wanted = "[S, A, K]" if isinstance(mdp, SparseMDP) else "[S, A, S]"
    for name, shape in zip(names, shapes, strict=True):
        if shape != (num_states, num_actions, *last):
            raise UserError(
                f"{name} of an MDP with {num_states} states has the shape {wanted}, not {list(shape)}. Rewards r(s, a) "
                "are the same for every next state: jnp.broadcast_to(r[:, :, None], P.shape)."
            )
    return num_states, num_actions


def _check_arrays(mdp: AnyMDP) -> None:
    """Raise a UserError for what is no array, for other types, and for a start and terminal states of other shapes."""
    for name, x in zip(mdp._fields, mdp, strict=True):
        if not hasattr(x, "dtype"):
            raise UserError(f"{name} of an MDP is an array, not a {type(x).__name__}: take jnp.asarray({name}).")
    if mdp.terminal.dtype != bool or mdp.terminal.ndim != 1:
        raise UserError(
            "terminal of an MDP is an array of bool with the axis [S], true where a state is terminal, not one of "
            f"{mdp.terminal.dtype} with the axes {list(mdp.terminal.shape)}."
        )
    if mdp.start.shape != mdp.terminal.shape:
        raise UserError(
            f"start of an MDP holds the probability of each of its {len(mdp.terminal)} states to be the first, and "
            f"cannot have the axes {list(mdp.start.shape)}."
        )
    if isinstance(mdp, SparseMDP) and not jnp.issubdtype(mdp.successors.dtype, jnp.integer):
        raise UserError(f"successors of an MDP are integers, the numbers of its states, not {mdp.successors.dtype}.")


def check_discount(gamma: Array | float) -> None:
    """Raise a UserError for a discount outside of [0, 1], unless it is traced."""
    if not is_traced(gamma) and not np.all((np.asarray(gamma) >= 0) & (np.asarray(gamma) <= 1)):
        raise UserError(f"The discount must be between 0 and 1, not {gamma}.")


def check_probabilities(mdp: AnyMDP) -> None:
    """Raise a UserError where p(. | s, a) or the start is no distribution, or an outcome leads to no state.

    Arrays that are traced pass: their numbers are not known.
    """
    num_states_and_actions(mdp)  # refuses other shapes
    p = mdp.probabilities if isinstance(mdp, SparseMDP) else mdp.P
    _check_distributions(p, lambda s, a: f"P is not a distribution for state {s} and action {a}", "its successors")
    _check_start(mdp)
    if isinstance(mdp, SparseMDP) and not is_traced(p) and not is_traced(mdp.successors):
        _check_successors(np.asarray(mdp.successors), np.asarray(p), len(mdp.terminal))


def _check_successors(successors: np.ndarray, probabilities: np.ndarray, num_states: int) -> None:
    """Raise a UserError where an outcome leads to no state; JAX would take the nearest one, or count from the end."""
    nowhere = (probabilities > 0) & ((successors < 0) | (successors >= num_states))
    if nowhere.any():
        s, a, k = np.argwhere(nowhere)[0].tolist()
        raise UserError(
            f"Action {a} of state {s} leads to the state {successors[s, a, k]}, and the states of this MDP are 0 to "
            f"{num_states - 1}."
        )


def _check_start(mdp: AnyMDP) -> None:
    _check_distributions(mdp.start, lambda: "start is not a distribution", "the first states")


def _check_distributions(p: Array | np.ndarray, of: Callable[..., str], outcomes: str) -> None:
    """Raise a UserError where `p` `[..., outcomes]` is no distribution; `of` says which, given its indices."""
    if is_traced(p):
        return
    exact = np.asarray(p, np.float64)
    wrong = (exact < 0).any(-1) | ~(np.abs(exact.sum(-1) - 1) < 1e-5)
    if wrong.any():
        place = tuple(np.argwhere(wrong)[0].tolist())
        raise UserError(
            f"{of(*place)}: the probabilities of {outcomes} must be at least 0 and sum to 1, but the least is "
            f"{exact[place].min():g}, and they sum to {exact[place].sum():g}."
        )


def is_traced(x: Any) -> bool:
    """Whether the number of `x` is unknown, inside of a transformation of JAX."""
    return isinstance(x, jax.core.Tracer)


def check_policy(mdp: AnyMDP, policy: Array) -> None:
    """Raise a UserError for a policy that is not `[S, A]`, or no distribution in a state that is not terminal.

    A policy that is traced passes by its shape.
    """
    if jnp.shape(policy) != (shape := num_states_and_actions(mdp)):
        raise UserError(
            f"A policy holds pi(a | s), of the shape {list(shape)} here, not {list(jnp.shape(policy))}. An action for "
            "each state is jax.nn.one_hot(actions, num_actions)."
        )
    if not is_traced(policy) and not is_traced(mdp.terminal):
        in_live_states = np.where(np.asarray(mdp.terminal)[:, None], 1 / shape[1], np.asarray(policy))
        _check_distributions(in_live_states, lambda s: f"The policy is not a distribution for state {s}", "its actions")


def check_arguments(taker: str, given: Mapping[str, Any]) -> None:
    """Raise a UserError for an `mdp` or a `policy` that is none, by their numbers where these are not traced.

    Args:
        taker: the function that takes them, for the sentence.
        given: its arguments, by name.
    """
    mdp = given["mdp"]
    if not isinstance(mdp, SparseMDP):
        check_record(taker, mdp, MDP, 'envs.MDPS["frozen_lake"]()')
    check_probabilities(mdp)
    if "policy" in given:
        check_policy(mdp, given["policy"])
