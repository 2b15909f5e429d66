// What the reader chooses: the world, the method and its settings; kept in the address, so that a link shows the same.

import { LEARNERS } from "./learners.js";

export const ROWS = 8, COLUMNS = 8;
export const TIME_LIMIT = 200;
export const PIECES = ["goal", "trap", "start"];

// Four rooms with two doors in each wall between them.
const ROOMS = Array.from({ length: 8 }, (_, i) => [8 * i + 4, 32 + i]).flat().filter((s) => ![12, 52, 33, 38].includes(s));

export const PRESETS = {
  plain: { title: "Plain", goal: 7, trap: 27, start: 56, walls: [], slip: 0, livingCost: 0, gamma: 0.9 },
  defaults: { title: "jaxpg's grid_world", goal: 7, trap: 15, start: 56, walls: [], slip: 0.2, livingCost: 0.04, gamma: 0.99 },
  rooms: { title: "Four rooms", goal: 7, trap: 18, start: 56, walls: [...new Set(ROOMS)].sort((a, b) => a - b), slip: 0.1, livingCost: 0.02, gamma: 0.95 },
};

export const METHODS = {
  policy_iteration: {
    title: "Policy iteration",
    about: "Sweeps find the values of the policy, v(s) ← Σₐ π(a|s) q(s, a), until they no longer change; then the policy takes the best action everywhere; and so on.",
  },
  value_iteration: { title: "Value iteration", about: "Every sweep gives each cell the value of its best action: v(s) ← maxₐ q(s, a)." },
  monte_carlo: { title: "Monte Carlo control", about: "After each episode, q(s, a) moves towards the return that followed the first visit.", stepSize: 0.1 },
  sarsa: { title: "SARSA", about: "After each step, q(s, a) moves towards r + γ q(s′, a′), where a′ is the action that is taken next.", stepSize: 0.3 },
  q_learning: { title: "Q-learning", about: "After each step, q(s, a) moves towards r + γ maxₐ′ q(s′, a′), whichever action is taken next.", stepSize: 0.3 },
  reinforce: {
    title: "REINFORCE",
    about: "A softmax policy. After each episode log π(a|s) is raised in proportion to the return that followed. The numbers are the exact values of the policy.",
    stepSize: 0.5,
  },
  actor_critic: {
    title: "Actor-critic",
    about: "A softmax policy and a table of its values. After each step both learn from δ = r + γ v(s′) − v(s). The numbers are the critic's.",
    stepSize: 0.5,
  },
};

// Ranges of the numbers; those of the sliders are narrower.
const NUMBERS = {
  goal: [0, ROWS * COLUMNS - 1], trap: [0, ROWS * COLUMNS - 1], start: [0, ROWS * COLUMNS - 1],
  slip: [0, 1], livingCost: [-1, 1], gamma: [0, 1],
  stepSize: [0, 10], criticStepSize: [0, 10], epsilon: [0, 1], episodes: [1, 2000], seed: [0, 999999],
};
const INTEGERS = ["goal", "trap", "start", "episodes", "seed"];
const SWITCHES = ["anywhere", "showPath"];

export function defaults() {
  const { title, ...world } = PRESETS.plain;
  return {
    ...world, walls: [], method: "policy_iteration", view: "values",
    stepSize: 0.3, criticStepSize: 0.2, epsilon: 0.1, episodes: 500, seed: 1, anywhere: false, showPath: true,
  };
}

export function learns(settings) {
  return Object.hasOwn(LEARNERS, settings.method);
}

// The preset with this world and this discount, or "".
export function presetOf(settings) {
  const same = ([, { title, ...preset }]) => Object.keys(preset).every((key) => String(settings[key]) === String(preset[key]));
  return Object.entries(PRESETS).find(same)?.[0] ?? "";
}

// The settings that differ from the defaults, for the address.
export function toHash(settings) {
  const usual = defaults();
  const changed = Object.entries(settings).filter(([key, value]) => String(value) !== String(usual[key]));
  return changed.map(([key, value]) => `${key}=${Array.isArray(value) ? value.join(".") : value}`).join("&");
}

// The settings of an address. What makes no sense keeps its default; two pieces in one cell make a world of the defaults.
export function fromHash(hash) {
  const settings = defaults();
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  if (Object.hasOwn(METHODS, given.get("method") ?? "")) settings.method = given.get("method");
  settings.stepSize = METHODS[settings.method].stepSize ?? settings.stepSize;
  if (given.get("view") === "actions") settings.view = "actions";
  for (const name of SWITCHES) if (given.has(name)) settings[name] = given.get(name) === "true";
  for (const [name, [low, high]] of Object.entries(NUMBERS)) {
    const number = Number(given.get(name) || NaN);
    const fits = number >= low && number <= high && (!INTEGERS.includes(name) || Number.isInteger(number));
    if (fits) settings[name] = number;
  }
  const { goal, trap, start } = defaults();
  if (new Set(PIECES.map((piece) => settings[piece])).size < PIECES.length) Object.assign(settings, { goal, trap, start });
  const walls = (given.get("walls") || "").split(".").filter(Boolean).map(Number);
  const free = (s) => Number.isInteger(s) && s >= 0 && s < ROWS * COLUMNS && PIECES.every((piece) => settings[piece] !== s);
  settings.walls = [...new Set(walls.filter(free))].sort((a, b) => a - b);
  return settings;
}
