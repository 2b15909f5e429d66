// Moving the goal, the trap and the start, and building walls: by mouse, by touch and by keyboard.

import { cellName, pieceAt } from "./board.js";
import { COLUMNS, PIECES, ROWS } from "./settings.js";

const ARROWS = { ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowRight: [0, 1], ArrowUp: [-1, 0] };

// Editing of the world in `settings`; `edited(sentence)` is called after a change, `say(sentence)` where nothing changed,
// `look(s)` when a cell is looked at. Returns {carried(): the piece that is held or null}.
export function makeEditor(board, cells, settings, { edited, say, look }) {
  let carried = null, origin = null, drag = null, ignoreClick = false;

  const free = (s) => !settings.walls.includes(s) && PIECES.every((piece) => settings[piece] !== s);

  function pickUp(s) {
    carried = pieceAt(settings, s);
    origin = s;
    edited(`Picked up the ${carried}. Choose a cell for it.`);
  }

  function moveTo(s) {
    settings[carried] = s;
    edited("");
  }

  function putDown() {
    const piece = carried, moved = settings[piece] !== origin;
    carried = null;
    edited(moved ? `The ${piece} is at ${cellName(settings[piece], COLUMNS)}.` : `The ${piece} stays where it was.`);
  }

  function putBack() {
    settings[carried] = origin;
    putDown();
  }

  function toggleWall(s) {
    const there = settings.walls.includes(s);
    settings.walls = there ? settings.walls.filter((wall) => wall !== s) : [...settings.walls, s].sort((a, b) => a - b);
    edited(`${there ? "Removed the wall" : "Built a wall"} at ${cellName(s, COLUMNS)}.`);
  }

  // A click, or Enter.
  function activate(s) {
    if (carried === null) return pieceAt(settings, s) ? pickUp(s) : toggleWall(s);
    if (s === settings[carried]) return putDown();
    if (!free(s)) return say(`The cell at ${cellName(s, COLUMNS)} is taken.`);
    settings[carried] = s;
    putDown();
  }

  function focus(s) {
    cells.forEach((cell, i) => (cell.tabIndex = i === s ? 0 : -1));
    cells[s].focus();
  }

  const stateOf = (target) => Number(target?.closest?.(".cell")?.dataset.state ?? NaN);

  board.addEventListener("keydown", (event) => {
    const s = stateOf(event.target);
    if (event.ctrlKey || event.metaKey || event.altKey || Number.isNaN(s)) return;
    if (event.key in ARROWS) {
      const [down, right] = ARROWS[event.key];
      const row = Math.floor(s / COLUMNS) + down, column = (s % COLUMNS) + right;
      if (row < 0 || row >= ROWS || column < 0 || column >= COLUMNS) return event.preventDefault();
      const to = row * COLUMNS + column;
      if (carried !== null && free(to)) moveTo(to);
      focus(to);
    } else if (event.key === "Home") focus(s - (s % COLUMNS));
    else if (event.key === "End") focus(s - (s % COLUMNS) + COLUMNS - 1);
    else if (event.key === "Enter" || event.key === " ") activate(s);
    else if (event.key === "Escape" && carried !== null) {
      focus(origin);
      putBack();
    } else return;
    event.preventDefault();
  });

  board.addEventListener("pointerdown", (event) => {
    ignoreClick = false;
    const s = stateOf(event.target);
    if (carried !== null || event.button !== 0 || Number.isNaN(s) || !pieceAt(settings, s)) return;
    drag = { s, moved: false };
    board.setPointerCapture(event.pointerId);
  });

  board.addEventListener("pointermove", (event) => {
    const to = stateOf(document.elementFromPoint(event.clientX, event.clientY));
    if (Number.isNaN(to)) return;
    look(to);
    if (drag === null || !free(to)) return;
    if (!drag.moved) [carried, origin, drag.moved] = [pieceAt(settings, drag.s), drag.s, true];
    moveTo(to);
  });

  board.addEventListener("pointerup", () => {
    if (drag === null) return;
    // A captured pointer clicks the board, not the cell, so a click on a piece is handled here.
    ignoreClick = true;
    const { s, moved } = drag, piece = carried;
    drag = null;
    if (moved) putDown();
    else activate(s);
    focus(moved ? settings[piece] : s);
  });

  board.addEventListener("pointercancel", () => {
    if (drag?.moved) putBack();
    drag = null;
  });

  board.addEventListener("click", (event) => {
    const s = stateOf(event.target);
    if (!ignoreClick && !Number.isNaN(s)) {
      activate(s);
      focus(s);
    }
    ignoreClick = false;
  });

  board.addEventListener("focusin", (event) => look(stateOf(event.target)));

  return { carried: () => carried };
}
