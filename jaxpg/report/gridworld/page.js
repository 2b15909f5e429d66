// The page: it solves the world again after every change, and shows one step of the solution.

import { drawBoard, drawLegend, drawPath, detailOf, formatNumber, makeCells } from "./board.js";
import { drawChart, markStep } from "./chart.js";
import { makeEditor } from "./editing.js";
import { COLUMNS, METHODS, PRESETS, ROWS, defaults, fromHash, learns, presetOf, toHash } from "./settings.js";
import { isPolicyGradient } from "./learners.js";
import { chartOf, pictureOf, solve } from "./solve.js";

const SPEEDS = [1, 2, 5, 10, 30, 60, 240];
const SLIDERS = ["gamma", "slip", "livingCost", "stepSize", "criticStepSize", "epsilon", "episodes"];
const $ = (id) => document.getElementById(id);

const settings = fromHash(location.hash);
let solution, picture, position = 0, looked = settings.start, playing = null, saving = 0;

const cells = makeCells($("board"), ROWS, COLUMNS);
cells[settings.start].tabIndex = 0;
const editor = makeEditor($("board"), cells, settings, { edited, say, look });

function say(sentence) {
  $("live").textContent = sentence;
}

// Solve, and show the last step.
function update() {
  solution = solve(settings);
  const values = pictureOf(solution.steps.at(-1), solution.mdp, settings).values.filter(Number.isFinite);
  solution.scale = Math.max(1, ...values.map(Math.abs));
  $("problem").hidden = solution.problem === "";
  $("problem").textContent = solution.problem;
  $("low").textContent = formatNumber(-solution.scale, 1);
  $("high").textContent = `+${formatNumber(solution.scale, 1)}`;
  $("progress").hidden = solution.steps.length === 1;
  const { title, summary, ...chart } = chartOf(solution, settings);
  $("chartTitle").textContent = title;
  $("chartSummary").textContent = summary;
  drawChart($("chart"), chart);
  $("position").max = solution.steps.length - 1;
  showControls();
  show(solution.steps.length - 1);
  clearTimeout(saving);
  saving = setTimeout(() => history.replaceState(null, "", `#${toHash(settings)}`), 300);
}

function showControls() {
  $("method").value = settings.method;
  $("about").textContent = METHODS[settings.method].about;
  $("preset").value = presetOf(settings);
  for (const name of SLIDERS) {
    $(name).value = settings[name];
    $(name).nextElementSibling.textContent = name === "episodes" ? settings[name] : formatNumber(settings[name]);
  }
  $("seed").value = settings.seed;
  $("anywhere").checked = settings.anywhere;
  $("showPath").checked = settings.showPath;
  document.querySelector(`[name="view"][value="${settings.view}"]`).checked = true;
  $("learning").hidden = !learns(settings);
  $("criticStepSize").parentElement.hidden = settings.method !== "actor_critic";
  $("epsilon").parentElement.hidden = isPolicyGradient(settings.method);
  $("improvement").hidden = settings.method !== "policy_iteration";
  $("actionsName").textContent = isPolicyGradient(settings.method) ? "Probabilities of actions" : "Action values";
}

function show(step) {
  position = Math.min(Math.max(step, 0), solution.steps.length - 1);
  picture = pictureOf(solution.steps[position], solution.mdp, settings);
  redraw();
  const last = solution.steps.length - 1;
  $("phase").textContent = solution.names[position];
  $("count").textContent = `${learns(settings) ? "episode" : "step"} ${position} of ${last}`;
  $("position").value = position;
  $("position").setAttribute("aria-valuetext", solution.names[position]);
  for (const id of ["first", "back"]) $(id).disabled = position === 0;
  for (const id of ["forward", "last"]) $(id).disabled = position === last;
  $("improvement").disabled = nextImprovement() === -1;
  markStep($("chart"), position);
  document.body.dataset.position = position;
}

function redraw() {
  $("board").classList.toggle("carrying", editor.carried() !== null);
  drawBoard(cells, { ...settings, columns: COLUMNS }, picture, { view: settings.view, scale: solution.scale, carried: editor.carried() });
  drawPath($("frame"), settings.showPath ? solution.steps[position].path : null, { rows: ROWS, columns: COLUMNS });
  look(looked);
}

function look(s) {
  looked = s;
  $("detail").textContent = detailOf({ ...settings, columns: COLUMNS }, picture, s);
}

function nextImprovement() {
  return solution.steps.findIndex(({ kind }, i) => i > position && kind === "improvement");
}

// Go to a step that the reader asked for.
function go(step) {
  pause();
  show(step);
  say(solution.names[position]);
}

function edited(sentence) {
  pause();
  update();
  if (sentence) say(`${sentence} ${outcome()}`);
}

function outcome() {
  return solution.problem || `${METHODS[settings.method].title}: ${$("chartSummary").textContent}`;
}

function startPlaying() {
  if (position === solution.steps.length - 1) show(0);
  playing = { from: position, since: performance.now() };
  showPlaying();
  say("Playing");
  requestAnimationFrame(advance);
}

function advance(now) {
  if (playing === null) return;
  const step = playing.from + Math.floor((Math.max(now - playing.since, 0) / 1000) * SPEEDS[$("speed").value]);
  if (step > position) show(step);
  if (position < solution.steps.length - 1) return requestAnimationFrame(advance);
  pause();
  say(`${solution.names[position]}. End.`);
}

function pause() {
  playing = null;
  showPlaying();
}

function showSpeed() {
  $("speed").setAttribute("aria-valuetext", `${SPEEDS[$("speed").value]} steps per second`);
}

function showPlaying() {
  $("play").classList.toggle("playing", playing !== null);
  $("play").setAttribute("aria-label", playing === null ? "Play" : "Pause");
}

function togglePlay() {
  if (playing === null) return startPlaying();
  pause();
  say(`Paused at ${solution.names[position]}`);
}

function usePreset(name) {
  const { title, ...world } = PRESETS[name];
  Object.assign(settings, world, { walls: [...world.walls] });
  edited(`${title}.`);
}

for (const [name, { title }] of Object.entries(PRESETS)) $("preset").add(new Option(title, name));
$("preset").add(new Option("Your own", "", false, false));
$("preset").options[$("preset").options.length - 1].disabled = true;
$("preset").addEventListener("change", () => usePreset($("preset").value));
$("reset").addEventListener("click", () => {
  Object.assign(settings, { ...defaults(), method: settings.method, stepSize: METHODS[settings.method].stepSize ?? 0.3 });
  edited("Everything is as in the beginning.");
});
$("method").addEventListener("change", () => {
  settings.method = $("method").value;
  settings.stepSize = METHODS[settings.method].stepSize ?? settings.stepSize;
  edited(`${METHODS[settings.method].title}.`);
});
for (const name of SLIDERS) {
  $(name).addEventListener("input", () => {
    settings[name] = Number($(name).value);
    edited("");
  });
  $(name).addEventListener("change", () => say(outcome()));
}
$("speed").addEventListener("input", () => {
  showSpeed();
  if (playing !== null) playing = { from: position, since: performance.now() };
});
$("seed").addEventListener("change", () => {
  settings.seed = Math.min(Math.max(Math.round(Number($("seed").value)) || 0, 0), 999999);
  edited(`Seed ${settings.seed}.`);
});
$("anywhere").addEventListener("change", () => {
  settings.anywhere = $("anywhere").checked;
  edited(settings.anywhere ? "Episodes begin in any cell." : "Episodes begin at the start.");
});
$("showPath").addEventListener("change", () => {
  settings.showPath = $("showPath").checked;
  redraw();
});
for (const choice of document.querySelectorAll('[name="view"]')) {
  choice.addEventListener("change", () => {
    settings.view = choice.value;
    redraw();
  });
}
$("first").addEventListener("click", () => go(0));
$("back").addEventListener("click", () => go(position - 1));
$("forward").addEventListener("click", () => go(position + 1));
$("last").addEventListener("click", () => go(solution.steps.length - 1));
$("improvement").addEventListener("click", () => go(nextImprovement()));
$("play").addEventListener("click", togglePlay);
$("position").addEventListener("input", () => {
  pause();
  show(Number($("position").value));
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input[type=number], select")) return;
  if (event.key === ",") go(position - 1);
  else if (event.key === ".") go(position + 1);
  else if (event.key === "p") togglePlay();
});
addEventListener("hashchange", () => {
  Object.assign(settings, fromHash(location.hash));
  edited("");
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  drawLegend($("ramp"));
  redraw();
});

showSpeed();
drawLegend($("ramp"));
update();
