// Control without a model, in a table: Monte Carlo, SARSA, Q-learning, REINFORCE and actor-critic.
//
// A learner is {table [S, A], critic [S] or null, episode(world) -> Step[]}: it plays one episode, learns from it, and
// returns what happened. The world is {reset() -> s, step(s, a) -> {next, reward, terminated}, timeLimit}. All random
// numbers come from one function, in the order in which they are used: two per epsilon-greedy action, one per action of
// a softmax, one per move. An episode that reaches the time limit is cut off: methods that bootstrap do so there, too.
// Source: Sutton & Barto 2018, sections 5.4, 6.4, 6.5, 13.3 and 13.5.

import { NUM_ACTIONS, exactValues, row, rowMaxima } from "./solver.js";

// Uniform numbers in [0, 1) from a 32-bit seed. Source: mulberry32 by Tommy Ettinger, public domain.
export function makeRandom(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let x = Math.imul(state ^ (state >>> 15), state | 1);
    x = (x + Math.imul(x ^ (x >>> 7), x | 61)) ^ x;
    return ((x ^ (x >>> 14)) >>> 0) / 4294967296;
  };
}

// The world that samples an MDP. With `anywhere` an episode begins in any cell that is no end, else at the start.
export function makeWorld(mdp, random, { timeLimit, anywhere }) {
  const cells = mdp.terminal.flatMap((isTerminal, s) => (isTerminal ? [] : [s]));
  const [ahead, side] = mdp.probabilities;
  return {
    timeLimit,
    reset: () => (anywhere ? cells[Math.floor(random() * cells.length)] : mdp.start),
    step(s, action) {
      const u = random();
      const next = mdp.successors[NUM_ACTIONS * s + action][u < ahead ? 0 : u < ahead + side ? 1 : 2];
      return { next, reward: mdp.rewards[next], terminated: mdp.terminal[next] };
    },
  };
}

// With probability epsilon any action, else one of the best.
export function epsilonGreedy(q, epsilon, random) {
  const explores = random() < epsilon, u = random();
  if (explores) return Math.floor(u * q.length);
  const largest = Math.max(...q);
  const best = [...q.keys()].filter((a) => q[a] === largest);
  return best[Math.floor(u * best.length)];
}

export function softmax(logits) {
  const largest = Math.max(...logits);
  const weights = logits.map((x) => Math.exp(x - largest));
  const sum = weights.reduce((a, b) => a + b);
  return weights.map((x) => x / sum);
}

function sampleSoftmax(logits, random) {
  const u = random();
  let cumulative = 0;
  const probabilities = softmax(logits);
  for (let a = 0; a < probabilities.length - 1; a++) {
    cumulative += probabilities[a];
    if (u < cumulative) return a;
  }
  return probabilities.length - 1;
}

// d log pi(action) / d logits = 1[b = action] - pi(b).
export function gradLogProb(logits, action) {
  return softmax(logits).map((p, b) => (b === action) - p);
}

// G_t = r_t + gamma G_{t+1} of each step.
export function returnsToGo(steps, gamma) {
  const returns = new Float64Array(steps.length);
  for (let t = steps.length - 1, after = 0; t >= 0; t--) returns[t] = after = steps[t].reward + gamma * after;
  return returns;
}

// sum_t G_t d log pi(a_t|s_t) / d table, [S, A]. As is usual, steps are not weighted by gamma^t.
export function reinforceGradient(table, steps, gamma) {
  const gradient = new Float64Array(table.length);
  returnsToGo(steps, gamma).forEach((weight, t) => {
    addScaled(row(gradient, steps[t].s), gradLogProb(row(table, steps[t].s), steps[t].a), weight);
  });
  return gradient;
}

function addScaled(target, summand, scale) {
  summand.forEach((x, i) => (target[i] += scale * x));
}

// Steps {s, a, reward, next, terminated} of an episode; `learn` is called after each.
function play(world, choose, learn = () => {}) {
  const steps = [];
  for (let s = world.reset(); steps.length < world.timeLimit; s = steps.at(-1).next) {
    const a = choose(s);
    steps.push({ s, a, ...world.step(s, a) });
    learn(steps.at(-1));
    if (steps.at(-1).terminated) break;
  }
  return steps;
}

// First-visit Monte Carlo: q <- q + alpha (G_t - q) for the first time that an episode takes an action in a state.
function monteCarlo(mdp, { gamma, stepSize, epsilon }, random) {
  const table = new Float64Array(NUM_ACTIONS * mdp.numStates);
  const choose = (s) => epsilonGreedy(row(table, s), epsilon, random);
  return {
    table,
    episode(world) {
      const steps = play(world, choose), seen = new Set();
      returnsToGo(steps, gamma).forEach((G, t) => {
        const i = NUM_ACTIONS * steps[t].s + steps[t].a;
        if (!seen.has(i)) table[i] += stepSize * (G - table[i]);
        seen.add(i);
      });
      return steps;
    },
  };
}

// q <- q + alpha (r + gamma q(s', a') - q), with the action a' that is taken next.
function sarsa(mdp, { gamma, stepSize, epsilon }, random) {
  const table = new Float64Array(NUM_ACTIONS * mdp.numStates);
  const choose = (s) => epsilonGreedy(row(table, s), epsilon, random);
  return {
    table,
    episode(world) {
      const steps = [];
      for (let s = world.reset(), a = choose(s), ended = false; !ended && steps.length < world.timeLimit; ) {
        const { next, reward, terminated } = world.step(s, a);
        const nextAction = terminated ? 0 : choose(next);
        const bootstrap = terminated ? 0 : table[NUM_ACTIONS * next + nextAction];
        const i = NUM_ACTIONS * s + a;
        table[i] += stepSize * (reward + gamma * bootstrap - table[i]);
        steps.push({ s, a, reward, next, terminated });
        [s, a, ended] = [next, nextAction, terminated];
      }
      return steps;
    },
  };
}

// q <- q + alpha (r + gamma max_a' q(s', a') - q).
function qLearning(mdp, { gamma, stepSize, epsilon }, random) {
  const table = new Float64Array(NUM_ACTIONS * mdp.numStates);
  const choose = (s) => epsilonGreedy(row(table, s), epsilon, random);
  const learn = ({ s, a, reward, next, terminated }) => {
    const bootstrap = terminated ? 0 : Math.max(...row(table, next));
    const i = NUM_ACTIONS * s + a;
    table[i] += stepSize * (reward + gamma * bootstrap - table[i]);
  };
  return { table, episode: (world) => play(world, choose, learn) };
}

// One step along the gradient of `reinforceGradient` per episode.
function reinforce(mdp, { gamma, stepSize }, random) {
  const table = new Float64Array(NUM_ACTIONS * mdp.numStates);
  return {
    table,
    episode(world) {
      const steps = play(world, (s) => sampleSoftmax(row(table, s), random));
      addScaled(table, reinforceGradient(table, steps, gamma), stepSize);
      return steps;
    },
  };
}

// After each step delta = r + gamma v(s') - v(s), v <- v + beta delta, table <- table + alpha delta d log pi / d table.
function actorCritic(mdp, { gamma, stepSize, criticStepSize }, random) {
  const table = new Float64Array(NUM_ACTIONS * mdp.numStates);
  const critic = new Float64Array(mdp.numStates);
  const learn = ({ s, a, reward, next, terminated }) => {
    const delta = reward + gamma * (terminated ? 0 : critic[next]) - critic[s];
    critic[s] += criticStepSize * delta;
    addScaled(row(table, s), gradLogProb(row(table, s), a), stepSize * delta);
  };
  return { table, critic, episode: (world) => play(world, (s) => sampleSoftmax(row(table, s), random), learn) };
}

export const LEARNERS = {
  monte_carlo: monteCarlo,
  sarsa,
  q_learning: qLearning,
  reinforce,
  actor_critic: actorCritic,
};

// Every episode of a learner: {kind, table, critic, length, outcome, discountedReturn, path}, before the first included.
export function* learningSteps(name, mdp, settings, random) {
  const learner = LEARNERS[name](mdp, settings, random);
  const world = makeWorld(mdp, random, settings);
  const snapshot = () => ({ table: learner.table.slice(), critic: learner.critic?.slice() });
  yield { kind: "start", ...snapshot(), path: [] };
  for (let episode = 1; episode <= settings.episodes; episode++) {
    const steps = learner.episode(world);
    const last = steps.at(-1);
    yield {
      kind: "episode",
      ...snapshot(),
      length: steps.length,
      end: last.terminated ? last.next : null,
      discountedReturn: returnsToGo(steps, settings.gamma)[0],
      path: Int16Array.of(steps[0].s, ...steps.map((step) => step.next)),
    };
  }
}

export function isPolicyGradient(name) {
  return name === "reinforce" || name === "actor_critic";
}

// The policy that a table stands for: the softmax, or for action values those within 1e-9 of the best.
export function policyOf(name, table) {
  const policy = new Float64Array(table.length);
  for (let s = 0; s < table.length / NUM_ACTIONS; s++) {
    row(policy, s).set(isPolicyGradient(name) ? softmax(row(table, s)) : bestActions(row(table, s)));
  }
  return policy;
}

// Equal probabilities for the actions within 1e-9 of the best.
export function bestActions(q) {
  const best = q.map((value) => value >= Math.max(...q) - 1e-9);
  const count = best.reduce((a, b) => a + b);
  return best.map((isBest) => isBest / count);
}

// The values of a learner: its critic; the largest of its action values; and for REINFORCE, which has none, the exact
// values of its policy.
export function valuesOf(name, mdp, step, gamma) {
  if (step.critic) return step.critic;
  if (isPolicyGradient(name)) return exactValues(mdp, policyOf(name, step.table), gamma);
  return rowMaxima(step.table);
}
