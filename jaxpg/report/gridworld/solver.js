// Policy iteration and value iteration on a grid world, step by step: jaxpg's envs.grid_world and
// values.policy_iteration_steps and value_iteration_steps, in double precision.
//
// Cells are counted row by row from the top left. Actions are left, down, right, up. A table of actions [S, A] is flat:
// the entry of state s and action a is at NUM_ACTIONS * s + a.

export const MOVES = [[0, -1], [1, 0], [0, 1], [-1, 0]];
export const ACTION_NAMES = ["left", "down", "right", "up"];
export const NUM_ACTIONS = 4;
const EPSILON = Number.EPSILON, MAX_SWEEPS = 100_000;

// The MDP of a world {rows, columns, goal, trap, start, walls, slip, livingCost}, whose cells are numbers.
//
// successors[4 s + a]: where action a leads: ahead, and to either side, with the three `probabilities`.
// rewards: per cell, on entering it. terminal: per cell; a wall is never entered, and has no value either.
export function makeMDP(world) {
  const numStates = world.rows * world.columns;
  const walls = new Set(world.walls);
  const terminal = Array.from({ length: numStates }, (_, s) => s === world.goal || s === world.trap || walls.has(s));
  const rewards = Float64Array.from({ length: numStates }, (_, s) => (s === world.goal) - (s === world.trap) - world.livingCost);
  const neighbour = (s, action) => {
    const [down, right] = MOVES[action];
    const row = Math.min(Math.max(Math.floor(s / world.columns) + down, 0), world.rows - 1);
    const column = Math.min(Math.max((s % world.columns) + right, 0), world.columns - 1);
    const to = row * world.columns + column;
    return walls.has(to) ? s : to;
  };
  const successors = [];
  for (let s = 0; s < numStates; s++) {
    for (let a = 0; a < NUM_ACTIONS; a++) {
      successors.push([a, (a + 3) % NUM_ACTIONS, (a + 1) % NUM_ACTIONS].map((towards) => neighbour(s, towards)));
    }
  }
  const probabilities = [1 - world.slip, world.slip / 2, world.slip / 2];
  return { numStates, successors, probabilities, rewards, terminal, start: world.start };
}

// q(s, a) = sum_s' p(s'|s, a) (r(s') + gamma v(s')), 0 in terminal states, where v must be 0 as well.
export function actionValues(mdp, values, gamma) {
  const q = new Float64Array(NUM_ACTIONS * mdp.numStates);
  for (let i = 0; i < q.length; i++) {
    if (mdp.terminal[Math.floor(i / NUM_ACTIONS)]) continue;
    let reward = 0, next = 0;
    mdp.successors[i].forEach((to, k) => {
      reward += mdp.probabilities[k] * mdp.rewards[to];
      next += mdp.probabilities[k] * values[to];
    });
    q[i] = reward + gamma * next;
  }
  return q;
}

// The largest entry of every state's row of a table [S, A].
export function rowMaxima(table) {
  return Float64Array.from({ length: table.length / NUM_ACTIONS }, (_, s) => Math.max(...row(table, s)));
}

export function row(table, s) {
  return table.subarray(NUM_ACTIONS * s, NUM_ACTIONS * (s + 1));
}

export function uniformPolicy(mdp) {
  return new Float64Array(NUM_ACTIONS * mdp.numStates).fill(1 / NUM_ACTIONS);
}

// The first action of the best of q, as a table of ones and zeros. With gamma 1 actions can be as good as the best and
// lead in circles; then one within the tolerance of the best that leads to a terminal state by the fewest such actions.
export function greedyPolicy(mdp, values, gamma, tolerance) {
  const q = actionValues(mdp, values, gamma);
  const maxima = rowMaxima(q);
  const slack = maxima.map((_, s) => Math.max(gamma === 1 ? tolerance : 0, rounding(row(q, s))));
  const best = Array.from(q, (value, i) => value >= maxima[Math.floor(i / NUM_ACTIONS)] - slack[Math.floor(i / NUM_ACTIONS)]);
  const steps = gamma === 1 ? stepsToTerminal(mdp, best) : null;
  const policy = new Float64Array(q.length);
  for (let s = 0; s < mdp.numStates; s++) {
    let action = best.indexOf(true, NUM_ACTIONS * s);
    if (steps !== null) {
      const fewest = Math.min(...row(steps, s));
      if (fewest < Infinity) action = steps.indexOf(fewest, NUM_ACTIONS * s);
    }
    policy[action] = 1;
  }
  return policy;
}

// The fewest steps in which an action can lead to a terminal state by allowed actions, [S, A], infinite if it cannot.
export function stepsToTerminal(mdp, allowed) {
  const nearest = Float64Array.from(mdp.terminal, (isTerminal) => (isTerminal ? 0 : Infinity));
  const steps = new Float64Array(NUM_ACTIONS * mdp.numStates);
  for (let changed = true; changed; ) {
    for (let i = 0; i < steps.length; i++) {
      const possible = mdp.successors[i].filter((_, k) => mdp.probabilities[k] > 0);
      steps[i] = allowed[i] ? 1 + Math.min(...possible.map((to) => nearest[to])) : Infinity;
    }
    changed = false;
    for (let s = 0; s < mdp.numStates; s++) {
      const closer = mdp.terminal[s] ? 0 : Math.min(...row(steps, s));
      changed ||= closer !== nearest[s];
      nearest[s] = closer;
    }
  }
  return steps;
}

// What cells are worth at least: with gamma 1, 0 where a policy can go on for ever without a loss, else -Infinity. So it
// can where allowed actions remain once those are removed that may lead to a cell without any.
export function restingValues(mdp, gamma) {
  const rewards = actionValues(mdp, new Float64Array(mdp.numStates), gamma);
  const lasting = Array.from(rewards, (reward, i) => gamma === 1 && reward >= 0 && !mdp.terminal[Math.floor(i / NUM_ACTIONS)]);
  const rests = (s) => lasting.slice(NUM_ACTIONS * s, NUM_ACTIONS * (s + 1)).includes(true);
  for (let changed = true; changed; ) {
    changed = false;
    for (let i = 0; i < lasting.length; i++) {
      if (!lasting[i] || mdp.successors[i].every((to, k) => mdp.probabilities[k] === 0 || rests(to))) continue;
      lasting[i] = false;
      changed = true;
    }
  }
  return Float64Array.from({ length: mdp.numStates }, (_, s) => (rests(s) ? 0 : -Infinity));
}

// A cell from which neither goal nor trap can be reached, or -1.
export function cellWithoutEnd(mdp) {
  const steps = stepsToTerminal(mdp, new Array(NUM_ACTIONS * mdp.numStates).fill(true));
  return mdp.terminal.findIndex((isTerminal, s) => !isTerminal && Math.min(...row(steps, s)) === Infinity);
}

// A sweep that changes no value by more than this is the last.
export function smallestChange(values, gamma, tolerance) {
  const bound = gamma === 1 ? tolerance : gamma > 0 ? (tolerance * (1 - gamma)) / gamma : tolerance;
  return Math.max(bound, 4 * EPSILON * Math.max(...values.map(Math.abs)));
}

// Where value iteration begins: zeros; or, with gamma 1, the values of the uniform policy, raised to `restingValues`, if
// there are gains, losses and a cell in which one can rest for nothing. Such a cell keeps any value that it has come to,
// and from zero a gain can be seen a sweep before the loss behind it.
function belowOptimum(mdp, gamma, tolerance) {
  const least = restingValues(mdp, gamma), policy = uniformPolicy(mdp);
  let values = new Float64Array(mdp.numStates), change = Infinity;
  const rewards = actionValues(mdp, values, gamma);
  if (!least.includes(0) || !rewards.some((r) => r > 0) || !rewards.some((r) => r < 0)) return values;
  for (let sweeps = 0; sweeps < MAX_SWEEPS && change > smallestChange(values, gamma, tolerance); sweeps++) {
    const after = expectedActionValues(policy, actionValues(mdp, values, gamma));
    change = largestDifference(after, values);
    values = after;
  }
  return values.map((value, s) => Math.max(value, least[s]));
}

// Steps are {kind, values, policy, change}: kind is "start", "evaluation", "improvement" or "sweep", change the largest
// change of a value in the sweep; an improvement changes the policy, and raises what is worth less than `restingValues`.
export function* valueIterationSteps(mdp, gamma, tolerance = 1e-6) {
  let values = belowOptimum(mdp, gamma, tolerance), change = Infinity;
  yield { kind: "start", values, policy: uniformPolicy(mdp), change };
  while (change > smallestChange(values, gamma, tolerance)) {
    const after = rowMaxima(actionValues(mdp, values, gamma));
    change = largestDifference(after, values);
    values = after;
    yield { kind: "sweep", values, policy: greedyPolicy(mdp, values, gamma, tolerance), change };
  }
}

export function* policyIterationSteps(mdp, gamma, tolerance = 1e-6, maxImprovements = 1000) {
  const least = restingValues(mdp, gamma);
  let values = new Float64Array(mdp.numStates), policy = uniformPolicy(mdp);
  yield { kind: "start", values, policy, change: Infinity };
  for (let improvements = 0, ends = false; !ends; improvements++) {
    const before = values;
    let change = Infinity;
    while (change > smallestChange(values, gamma, tolerance)) {
      const after = expectedActionValues(policy, actionValues(mdp, values, gamma));
      change = largestDifference(after, values);
      values = after;
      yield { kind: "evaluation", values, policy, change };
    }
    values = values.map((value, s) => Math.max(value, least[s]));
    const rise = improvements > 0 ? largestDifference(values, before) : Infinity; // the first began with no policy's values
    ends = rise <= smallestChange(values, gamma, tolerance) || improvements === maxImprovements;
    const greedy = greedyPolicy(mdp, values, gamma, tolerance);
    policy = ends ? greedy : unlessAsGood(actionValues(mdp, values, gamma), policy, greedy);
    yield { kind: "improvement", values, policy, change: 0 };
  }
}

// The greedy policy; in states where another is as good, up to rounding, that other one.
function unlessAsGood(q, policy, greedy) {
  const expected = expectedActionValues(policy, q), maxima = rowMaxima(q);
  return policy.map((probability, i) => {
    const s = Math.floor(i / NUM_ACTIONS);
    return expected[s] >= maxima[s] - rounding(row(q, s)) ? probability : greedy[i];
  });
}

// The errors of the action values of a state.
function rounding(q) {
  return 8 * EPSILON * Math.max(...q.map(Math.abs));
}

// sum_a pi(a|s) q(s, a), [S].
export function expectedActionValues(policy, q) {
  const values = new Float64Array(q.length / NUM_ACTIONS);
  q.forEach((value, i) => (values[Math.floor(i / NUM_ACTIONS)] += policy[i] * value));
  return values;
}

// The exact values of a policy: (I - gamma P_pi) v = r_pi by Gaussian elimination with pivots.
export function exactValues(mdp, policy, gamma) {
  const n = mdp.numStates;
  const rewards = expectedActionValues(policy, actionValues(mdp, new Float64Array(n), gamma));
  const system = Array.from({ length: n }, (_, s) => {
    const equation = new Float64Array(n + 1);
    equation[s] = 1;
    equation[n] = rewards[s];
    for (let a = 0; a < NUM_ACTIONS && !mdp.terminal[s]; a++) {
      const i = NUM_ACTIONS * s + a;
      mdp.successors[i].forEach((to, k) => {
        if (!mdp.terminal[to]) equation[to] -= gamma * policy[i] * mdp.probabilities[k];
      });
    }
    return equation;
  });
  for (let i = 0; i < n; i++) {
    let pivot = i;
    for (let j = i + 1; j < n; j++) if (Math.abs(system[j][i]) > Math.abs(system[pivot][i])) pivot = j;
    [system[i], system[pivot]] = [system[pivot], system[i]];
    for (let j = i + 1; j < n; j++) {
      const factor = system[j][i] / system[i][i];
      if (factor !== 0) for (let k = i; k <= n; k++) system[j][k] -= factor * system[i][k];
    }
  }
  const values = new Float64Array(n);
  for (let i = n - 1; i >= 0; i--) {
    let sum = system[i][n];
    for (let k = i + 1; k < n; k++) sum -= system[i][k] * values[k];
    values[i] = sum / system[i][i];
  }
  return values;
}

function largestDifference(a, b) {
  return a.reduce((largest, value, i) => Math.max(largest, Math.abs(value - b[i])), 0);
}
