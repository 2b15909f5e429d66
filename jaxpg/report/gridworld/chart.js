// The curve beside the board: the change of the values per sweep, or the returns of the episodes.

import { element, formatNumber } from "./board.js";

const LEFT = 44, RIGHT = 350, TOP = 10, BOTTOM = 172;

// The mean of the last `width` numbers up to each.
export function movingMean(numbers, width = 20) {
  return numbers.map((_, i) => {
    const window = numbers.slice(Math.max(0, i - width + 1), i + 1);
    return window.reduce((a, b) => a + b) / window.length;
  });
}

// Draw one step per entry of `numbers` (null for none), step 1 first; returns nothing.
//
// logarithmic: of the vertical axis. optimum: height of the dashed line, or null. events: steps with a mark.
export function drawChart(svg, { numbers, faint, logarithmic, optimum, events, label }) {
  const transform = logarithmic ? (y) => Math.log10(Math.max(y, 1e-9)) : (y) => y;
  const drawn = [...numbers, ...(faint ?? []), optimum].filter((y) => y !== null && Number.isFinite(y)).map(transform);
  const range = logarithmic ? [Math.floor(Math.min(...drawn, -1)), Math.ceil(Math.max(...drawn, 0))] : padded(drawn);
  const xOf = (step) => LEFT + ((RIGHT - LEFT) * (step - 1)) / Math.max(numbers.length - 1, 1);
  const yOf = (y) => BOTTOM - ((BOTTOM - TOP) * (transform(y) - range[0])) / (range[1] - range[0]);
  const parts = ticks(range, logarithmic).flatMap((tick) => {
    const value = logarithmic ? 10 ** tick : tick;
    const text = logarithmic ? tick === 0 ? "1" : `1e${formatNumber(tick, 0)}` : formatNumber(tick, range[1] - range[0] > 8 ? 0 : 1);
    return [
      element("line", { x1: LEFT, x2: RIGHT, y1: yOf(value), y2: yOf(value), class: "axis" }),
      element("text", { x: LEFT - 5, y: yOf(value) + 4, "text-anchor": "end" }, text),
    ];
  });
  for (const step of events) parts.push(element("line", { x1: xOf(step), x2: xOf(step), y1: BOTTOM - 7, y2: BOTTOM, class: "event" }));
  if (optimum !== null) parts.push(element("line", { x1: LEFT, x2: RIGHT, y1: yOf(optimum), y2: yOf(optimum), class: "optimum" }));
  if (faint) parts.push(element("path", { d: line(faint, xOf, yOf), class: "faint" }));
  parts.push(element("path", { d: line(numbers, xOf, yOf), class: "curve" }));
  parts.push(element("text", { x: LEFT, y: BOTTOM + 18 }, "1"));
  parts.push(element("text", { x: RIGHT, y: BOTTOM + 18, "text-anchor": "end" }, String(numbers.length)));
  parts.push(element("text", { x: (LEFT + RIGHT) / 2, y: BOTTOM + 18, "text-anchor": "middle" }, label));
  parts.push(element("line", { y1: TOP, y2: BOTTOM, class: "now" }));
  svg.replaceChildren(...parts);
  svg.dataset.steps = numbers.length;
}

// Move the mark of the step that is shown.
export function markStep(svg, step) {
  const x = LEFT + ((RIGHT - LEFT) * (Math.max(step, 1) - 1)) / Math.max(svg.dataset.steps - 1, 1);
  const now = svg.querySelector(".now");
  now.setAttribute("x1", x);
  now.setAttribute("x2", x);
}

function line(numbers, xOf, yOf) {
  let d = "", pen = "M";
  numbers.forEach((y, i) => {
    if (y === null || !Number.isFinite(y)) return;
    d += `${pen}${xOf(i + 1).toFixed(1)} ${yOf(y).toFixed(1)}`;
    pen = "L";
  });
  return d;
}

function padded(numbers) {
  const low = Math.min(...numbers, 0), high = Math.max(...numbers, 0);
  return low === high ? [low - 1, high + 1] : [low - 0.05 * (high - low), high + 0.05 * (high - low)];
}

function ticks([low, high], logarithmic) {
  const steps = logarithmic ? [1, 2, 4, 8] : [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50];
  const step = steps.find((size) => (high - low) / size <= 5.5) ?? (high - low) / 5;
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, i) => (first + i) * step);
}
