// All steps of the chosen method in the chosen world, and what there is to see and say at each.

import { actionValues, cellWithoutEnd, makeMDP, policyIterationSteps, valueIterationSteps } from "./solver.js";
import { isPolicyGradient, learningSteps, makeRandom, policyOf, valuesOf } from "./learners.js";
import { cellName, drawnPolicy, formatNumber } from "./board.js";
import { movingMean } from "./chart.js";
import { COLUMNS, ROWS, TIME_LIMIT, learns } from "./settings.js";

const MAX_STEPS = 20000;

// {mdp, steps, names: of the steps, optimum: the best return to expect, problem: a sentence or ""}.
export function solve(settings) {
  const mdp = makeMDP({ ...settings, rows: ROWS, columns: COLUMNS });
  const lost = cellWithoutEnd(mdp);
  if (settings.gamma === 1 && lost >= 0) {
    const problem = `With a discount of 1 every cell needs a way to the goal or the trap, and ${cellName(lost, COLUMNS)} has none.`;
    return { mdp, steps: [...take(planningSteps(mdp, settings), 1)], names: ["Start"], optimum: NaN, problem };
  }
  const optimal = [...take(valueIterationSteps(mdp, settings.gamma), MAX_STEPS)].at(-1).values;
  const live = [...optimal.keys()].filter((s) => !mdp.terminal[s]);
  const optimum = settings.anywhere ? live.reduce((sum, s) => sum + optimal[s], 0) / live.length : optimal[mdp.start];
  const steps = [...take(learns(settings) ? experience(mdp, settings) : planningSteps(mdp, settings), MAX_STEPS)];
  const problem = steps.length === MAX_STEPS ? `Stopped after ${MAX_STEPS} steps, before the values converged.` : "";
  return { mdp, steps, names: learns(settings) ? episodeNames(steps, mdp, settings) : sweepNames(steps), optimum, problem };
}

function planningSteps(mdp, { method, gamma }) {
  return method === "policy_iteration" ? policyIterationSteps(mdp, gamma) : valueIterationSteps(mdp, gamma);
}

function experience(mdp, settings) {
  return learningSteps(settings.method, mdp, { ...settings, timeLimit: TIME_LIMIT }, makeRandom(settings.seed));
}

function* take(steps, count) {
  for (const step of steps) {
    if (count-- <= 0) return;
    yield step;
  }
}

function sweepNames(steps) {
  let improvements = 0, sweeps = 0;
  return steps.map(({ kind, values, change }) => {
    if (kind === "start") return `Start: ${values.some((value) => value !== 0) ? "the values of every action alike" : "all values 0, every action alike"}`;
    if (kind === "improvement") {
      sweeps = 0;
      return `Improvement ${++improvements} of the policy`;
    }
    const place = kind === "evaluation" ? `Evaluation ${improvements + 1}, sweep ${++sweeps}` : `Sweep ${++sweeps}`;
    return `${place}: change ${change < 0.001 && change > 0 ? change.toExponential(1).replace("-", "−") : formatNumber(change, 3)}`;
  });
}

function episodeNames(steps, mdp, settings) {
  return steps.map(({ kind, end, length, discountedReturn }, i) => {
    if (kind === "start") return "Before the first episode";
    const ending = end === null ? "cut off" : end === settings.goal ? "goal" : "trap";
    return `Episode ${i}: ${ending}, ${length} step${length === 1 ? "" : "s"}, return ${formatNumber(discountedReturn)}`;
  });
}

// What the board shows of a step: {values, q, policy, probabilities}.
export function pictureOf(step, mdp, { method, gamma }) {
  if (step.table) {
    const policy = policyOf(method, step.table), probabilities = isPolicyGradient(method);
    return { values: valuesOf(method, mdp, step, gamma), q: probabilities ? policy : step.table, policy, probabilities };
  }
  const q = actionValues(mdp, step.values, gamma);
  return { values: step.values, q, policy: drawnPolicy(step, q, gamma), probabilities: false };
}

// What the chart shows, and the sentence below it.
export function chartOf({ steps, optimum }, settings) {
  const after = steps.slice(1);
  if (!learns(settings)) {
    const events = after.flatMap(({ kind }, i) => (kind === "improvement" ? [i + 1] : []));
    const sweeps = after.length - events.length, improved = events.length ? ` and ${events.length} improvements (marks)` : "";
    const numbers = after.map(({ kind, change }) => (kind === "improvement" ? null : change));
    return {
      title: "Largest change of a value per sweep",
      summary: `${sweeps} sweeps${improved} to a tolerance of 1e−6.`,
      numbers, faint: null, logarithmic: true, optimum: null, events, label: "step",
    };
  }
  const returns = after.map(({ discountedReturn }) => discountedReturn), means = movingMean(returns);
  return {
    title: "Discounted return per episode",
    summary: `Bold: mean of 20 episodes, ${formatNumber(means.at(-1) ?? NaN)} at the end. Dashed: the optimum, ${formatNumber(optimum)}.`,
    numbers: means, faint: returns, logarithmic: false, optimum, events: [], label: "episode",
  };
}
