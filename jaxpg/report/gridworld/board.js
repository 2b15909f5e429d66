// The board: a colour and a number per cell, and an arrow per action of the policy.

import { ACTION_NAMES, MOVES, NUM_ACTIONS, row } from "./solver.js";
import { bestActions } from "./learners.js";

const SVG = "http://www.w3.org/2000/svg";
// Red below zero, blue above, which colour-blind readers tell apart (ColorBrewer's RdBu); dark in the middle in the dark.
const LIGHT = ["#67001f", "#b2182b", "#d6604d", "#f4a582", "#fddbc7", "#f7f7f7", "#d1e5f0", "#92c5de", "#4393c3", "#2166ac", "#053061"];
const DARK = ["#ffc3ae", "#f4937a", "#d6604d", "#a13a35", "#5c2428", "#222a33", "#1d3c58", "#21608f", "#3488c4", "#67b4e6", "#b4deff"];
const TRIANGLES = ["0,0 30,30 0,60", "0,60 30,30 60,60", "60,60 30,30 60,0", "60,0 30,30 0,0"];
const TRIANGLE_NUMBERS = [[14, 33.5], [30, 54.5], [46, 33.5], [30, 12.5]];

export function element(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

export function formatNumber(x, digits = 2) {
  if (!Number.isFinite(x)) return "–";
  const text = x.toFixed(digits);
  return (/^-0\.?0*$/.test(text) ? text.slice(1) : text).replace("-", "−");
}

// The colour of a value in [-1, 1].
function shade(x) {
  const stops = matchMedia("(prefers-color-scheme: dark)").matches ? DARK : LIGHT;
  const place = ((Math.min(Math.max(x || 0, -1), 1) + 1) / 2) * (stops.length - 1);
  const below = Math.min(Math.floor(place), stops.length - 2);
  const [from, to] = [stops[below], stops[below + 1]].map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
  return from.map((channel, i) => Math.round(channel + (to[i] - channel) * (place - below)));
}

const css = (rgb) => `rgb(${rgb.join(" ")})`;

// Black or white, whichever has the larger contrast (WCAG's relative luminance).
function inkOn(rgb) {
  const [r, g, b] = rgb.map((x) => (x / 255 <= 0.04045 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}

export function cellName(s, columns) {
  return `row ${Math.floor(s / columns) + 1}, column ${(s % columns) + 1}`;
}

// The cells of the board: {cell, svg}, made once.
export function makeCells(board, rows, columns) {
  board.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
  board.setAttribute("aria-rowcount", rows);
  board.setAttribute("aria-colcount", columns);
  const cells = [];
  for (let r = 0; r < rows; r++) {
    const line = document.createElement("div");
    line.setAttribute("role", "row");
    for (let c = 0; c < columns; c++) {
      const cell = document.createElement("div");
      cell.setAttribute("role", "gridcell");
      cell.tabIndex = -1;
      cell.dataset.state = cells.length;
      cell.append(element("svg", { viewBox: "0 0 60 60", "aria-hidden": "true" }));
      line.append(cell);
      cells.push(cell);
    }
    board.append(line);
  }
  return cells;
}

// Draw {values [S], q [S, A], policy [S, A], probabilities: whether q are probabilities} of a world into the cells.
export function drawBoard(cells, world, picture, { view, scale, carried }) {
  cells.forEach((cell, s) => {
    const svg = cell.firstChild, piece = pieceAt(world, s), wall = world.walls.includes(s);
    const isEnd = piece === "goal" || piece === "trap";
    const fill = isEnd ? shade(piece === "goal" ? 0.9 : -0.9) : shade(picture.values[s] / scale);
    cell.className = ["cell", wall && "wall", piece && "piece", piece, piece && piece === carried && "carried"].filter(Boolean).join(" ");
    cell.style.backgroundColor = wall ? "" : css(fill);
    cell.style.color = inkOn(fill);
    cell.dataset.value = picture.values[s];
    cell.setAttribute("aria-label", describeCell(world, picture, s));
    if (wall) svg.replaceChildren();
    else if (isEnd) svg.replaceChildren(...drawEnd(piece));
    else if (view === "actions") svg.replaceChildren(...drawActions(row(picture.q, s), picture.probabilities ? 1 : scale));
    else svg.replaceChildren(...drawValue(picture.values[s], row(picture.policy, s)));
  });
}

export function pieceAt(world, s) {
  return ["goal", "trap", "start"].find((name) => world[name] === s);
}

function drawEnd(piece) {
  const [label, name] = piece === "goal" ? ["+1", "goal"] : ["−1", "trap"];
  return [element("text", { x: 30, y: 34, class: "label" }, label), element("text", { x: 30, y: 50, class: "name" }, name)];
}

function drawValue(value, policy) {
  const taken = [...policy.keys()].filter((a) => policy[a] > 0.04);
  const arrows = taken.map((a) => drawArrow(MOVES[a], policy[a], taken.length));
  return [...arrows, element("text", { x: 30, y: 54, class: "value" }, formatNumber(value))];
}

// One of `count` arrows, from the middle outwards and as long as its probability is large; alone it goes through the middle.
function drawArrow([down, right], probability, count) {
  const alone = count === 1, even = Math.abs(probability - 0.25) < 1e-9;
  const x = 30, y = 23, from = alone ? -11 : 4, to = alone ? 11 : Math.min(6 + 9 * count * probability, 16), head = alone ? 5.5 : 3.5;
  const at = (along, across) => `${x + right * along + down * across} ${y + down * along + right * across}`;
  const d = `M${at(from, 0)}L${at(to, 0)}M${at(to - head, head)}L${at(to, 0)}L${at(to - head, -head)}`;
  return element("path", { d, class: even ? "arrow every" : "arrow" });
}

function drawActions(q, scale) {
  return [...q].flatMap((value, a) => {
    const fill = shade(value / scale), [x, y] = TRIANGLE_NUMBERS[a];
    return [
      element("polygon", { points: TRIANGLES[a], fill: css(fill), class: "split" }),
      element("text", { x, y, class: "number", style: `fill: ${inkOn(fill)}` }, formatNumber(value)),
    ];
  });
}

// The sentence that a screen reader says.
function describeCell(world, picture, s) {
  const name = cellName(s, world.columns);
  if (world.walls.includes(s)) return `wall, ${name}`;
  const piece = pieceAt(world, s);
  if (piece === "goal") return `goal, +1, ${name}`;
  if (piece === "trap") return `trap, −1, ${name}`;
  const policy = row(picture.policy, s), largest = Math.max(...policy);
  const taken = ACTION_NAMES.filter((_, a) => policy[a] > largest - 1e-9).join(" or ");
  return `${piece ? "start, " : ""}${name}, value ${formatNumber(picture.values[s])}, ${taken}`;
}

// The exact numbers of a cell, for the line below the board.
export function detailOf(world, picture, s) {
  if (world.walls.includes(s) || s === world.goal || s === world.trap) return describeCell(world, picture, s);
  const actions = ["←", "↓", "→", "↑"].map((arrow, a) => `${arrow}\u00a0${formatNumber(picture.q[NUM_ACTIONS * s + a], 3)}`).join("  ");
  return `${cellName(s, world.columns)}:  v ${formatNumber(picture.values[s], 4)}  ${picture.probabilities ? "π" : "q"} ${actions}`;
}

// The path of an episode over the board, beside the arrows and the numbers.
export function drawPath(frame, path, { rows, columns }) {
  frame.querySelector("#path")?.remove();
  if (!path || path.length < 2) return;
  const place = (s) => [(s % columns) + 0.92, Math.floor(s / columns) + 0.66].map((x) => x * 60);
  const overlay = element("svg", { id: "path", viewBox: `0 0 ${60 * columns} ${60 * rows}`, "aria-hidden": "true" });
  const points = [...path].map((s) => place(s).join(",")).join(" ");
  overlay.append(element("polyline", { points, class: "halo" }), element("polyline", { points }));
  for (const s of [path[0], path.at(-1)]) {
    const [cx, cy] = place(s);
    overlay.append(element("circle", { cx, cy, r: 3.5 }));
  }
  frame.append(overlay);
}

export function drawLegend(ramp) {
  const stops = Array.from({ length: 11 }, (_, i) => css(shade(i / 5 - 1)));
  ramp.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
}

// The policy that is drawn for a step of planning: all best actions of value iteration, the one policy of policy iteration.
// With gamma 1 every way is as good, so the one that leads to an end is drawn.
export function drawnPolicy(step, q, gamma) {
  if (step.kind !== "sweep" || gamma === 1) return step.policy;
  const drawn = new Float64Array(q.length);
  for (let s = 0; s < q.length / NUM_ACTIONS; s++) row(drawn, s).set(bestActions(row(q, s)));
  return drawn;
}
