"""Methods that compute or learn values: planning on a known MDP, prediction from experience."""

from jaxpg.values.planning import (
    FiniteHorizonPlan,
    Plan,
    finite_horizon,
    gauss_seidel,
    greedy_policy,
    policy_evaluation,
    policy_iteration,
    synchronous,
    value_iteration,
)
from jaxpg.values.planning_steps import Step, policy_iteration_steps, value_iteration_steps
from jaxpg.values.prediction import (
    Experience,
    PredictionError,
    monte_carlo,
    n_step_td,
    prediction_error,
    sample_experience,
    td_lambda,
)

__all__ = [
    "Experience",
    "FiniteHorizonPlan",
    "Plan",
    "PredictionError",
    "Step",
    "finite_horizon",
    "gauss_seidel",
    "greedy_policy",
    "monte_carlo",
    "n_step_td",
    "policy_evaluation",
    "policy_iteration",
    "policy_iteration_steps",
    "prediction_error",
    "sample_experience",
    "synchronous",
    "td_lambda",
    "value_iteration",
    "value_iteration_steps",
]
