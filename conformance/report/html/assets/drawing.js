"use strict";
// Draws the part of a story that is in view: lanes down, steps across.
//
// A lane has a channel for arrows on top, the cell below it, and the tracks of transfers below that.
// Arrows run in channels and in the gaps between columns only, so they cross no number.

const LANE = 44, HEAD = 20, HOOKS = 22;
const CELL = 11, TALL = 18, GAP = 3; // the cell's top and height in its lane; the gap at its sides
const TRACKS = { load: 33, recv: 33, save: 37, send: 40 };
const NARROWEST = 34, WIDEST = 120, PAD = 4;
const TEXT = "11px system-ui, sans-serif", SIGN = 14;
const FILL = { local: "#8cc8ff", loaded: "#c9a2ff", computed: "#9be29b", placeholder: "#ffe08a", accepted: "#5fcf8f", rejected: "#f4a09a", draft: "#d8d8d8" };
const STATES = { RUNNING: "#2da44e22", PREEMPTED: "#d1242f2e", WAITING_FOR_REMOTE_KVS: "#8250df2e", WAITING: "#88888824" };
const LETTERS = { local: "h", loaded: "↓", computed: "", placeholder: "?", accepted: "✓", rejected: "✗", draft: "d" };
const OWNERS = ["#8cc8ff", "#9be29b", "#ffd27a", "#f4a0c8", "#c9a2ff", "#86e0d5", "#f2b38a", "#c7d36f"];
const HALVES = ["scheduler", "worker"], HALF_FILL = ["#0969da", "#8250df"];

const measured = new Map(), measuring = document.createElement("canvas").getContext("2d");
measuring.font = TEXT;
function textWidth(text) {
  if (!measured.has(text)) measured.set(text, measuring.measureText(text).width);
  return measured.get(text);
}

// The colour of a state; "" if it has none.
function tint(state) { return STATES[state] || (state.startsWith("WAITING") ? STATES.WAITING : ""); }

function stroke(g, kind, from, to, y) {
  const load = kind === "load" || kind === "recv";
  g.strokeStyle = load ? "#8250df" : kind === "send" ? "#bf8700" : "#1a7f37"; g.lineWidth = 3;
  g.setLineDash(load ? [] : [4, 2]);
  g.beginPath(); g.moveTo(from, y); g.lineTo(to, y); g.stroke();
  g.setLineDash([]);
}

function fillPiece(g, name, x, y, width, height) {
  g.fillStyle = FILL[name];
  g.fillRect(x, y, width, height);
  if (name !== "placeholder" && name !== "rejected") return;
  g.save();
  g.beginPath(); g.rect(x, y, width, height); g.clip();
  g.strokeStyle = "#0004"; g.lineWidth = 1; g.beginPath();
  for (let i = -height; i < width + height; i += 5) {
    g.moveTo(x + i, y + height); g.lineTo(x + i + height, y);
    if (name === "rejected") { g.moveTo(x + i, y); g.lineTo(x + i + height, y + height); }
  }
  g.stroke(); g.restore();
}

function fillHook(g, half, raised, x, y, width, failed) {
  g.fillStyle = raised ? failed : HALF_FILL[half];
  g.fillRect(x, y + (raised ? 1 : 5), raised ? Math.max(3, width) : width, raised ? HOOKS - 3 : HOOKS - 10);
}

class Drawing {
  constructor(story, canvas, view, lanes) {
    Object.assign(this, { story, canvas, view, lanes });
    this.first = story.first;
    this.columns = story.steps - story.first + 1;
    this.needed = Math.min(WIDEST, story.byLane.flat().reduce((most, cell) => Math.max(most, this.room(cell)), NARROWEST));
    this.labels = Math.max(...story.requests.map((name) => name.length), 0) * 7.3 + 14;
    this.column = this.needed; this.gutter = 112;
  }

  // Width of the column in which all numbers of a cell are legible.
  room(cell) {
    const sign = this.story.preemptedIn(cell.step, cell.lane) ? SIGN : 0;
    return cell.shown.reduce((sum, [n, name]) => sum + textWidth(LETTERS[name] + n) + 2 * PAD, 2 * GAP + sign);
  }

  get width() { return this.gutter + this.columns * this.column + 2; }
  get height() { return HEAD + this.lanes.length * LANE + 2 * HOOKS + 6; }
  x(step) { return this.gutter + (step - this.first) * this.column - this.view.scrollLeft; }
  y(row) { return HEAD + row * LANE - this.view.scrollTop; }

  // Columns share the width; where they do not fit, they are as narrow as their numbers allow.
  fit(width) {
    this.gutter = Math.round(Math.max(100, Math.min(width < 520 ? 100 : 170, this.labels)));
    this.column = Math.floor(Math.max(this.needed, Math.min(WIDEST, (width - this.gutter - 2) / this.columns)));
  }

  draw(cursor, hook) {
    const { canvas, view, column } = this, ratio = window.devicePixelRatio || 1;
    const width = view.clientWidth, height = view.clientHeight || this.height;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
      canvas.style.width = width + "px"; canvas.style.height = height + "px";
    }
    const style = getComputedStyle(document.documentElement), color = (name) => style.getPropertyValue(name).trim();
    this.ink = color("--ink"); this.quiet = color("--quiet"); this.paper = color("--paper"); this.line = color("--line"); this.fail = color("--fail");
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.fillStyle = this.paper; g.fillRect(0, 0, width, height);
    g.textBaseline = "middle";
    const from = Math.max(0, Math.floor(view.scrollLeft / column) - 1), to = Math.min(this.columns, from + Math.ceil(width / column) + 2);
    const top = Math.max(0, Math.floor(view.scrollTop / LANE) - 1), bottom = Math.min(this.lanes.length, top + Math.ceil(height / LANE) + 2);
    g.save(); g.beginPath(); g.rect(this.gutter, 0, width, height); g.clip();
    g.fillStyle = color("--cursor"); g.fillRect(this.x(cursor.step), 0, column, height);
    for (let row = top; row < bottom; row++) for (let i = from; i < to; i++) this.cell(g, this.first + i, row);
    for (let row = top; row < bottom; row++) this.transfers(g, row, this.first + from, this.first + to);
    for (let i = from; i < to; i++) this.hooks(g, this.first + i, hook);
    this.wrong(g);
    g.restore();
    this.heads(g, from, to, top, bottom, width, cursor);
  }

  // Left edge and width of a cell, from the left edge of its column.
  span(step, lane) {
    return [GAP, this.column - 2 * GAP - (this.story.preemptedIn(step, lane) ? SIGN : 0)];
  }

  // The pieces of a cell with their places in its column. Each has room for its number first.
  pieces(cell) {
    const [left, wide] = this.span(cell.step, cell.lane);
    const shown = cell.shown, room = shown.map(([n, name]) => textWidth(LETTERS[name] + n) + 2 * PAD);
    const total = shown.reduce((sum, [n]) => sum + n, 0), free = wide - room.reduce((a, b) => a + b, 0);
    let x = left;
    return shown.map(([n, name], i) => {
      const w = free >= 0 ? room[i] + (free * n) / total : (wide * room[i]) / (wide - free);
      x += w;
      return { name, n, text: LETTERS[name] + n, x: x - w, w };
    });
  }

  cell(g, step, row) {
    const lane = this.lanes[row], x = this.x(step), y = this.y(row), fill = tint(this.story.state(step, lane));
    if (fill) { g.fillStyle = fill; g.fillRect(x, y + 1, this.column, LANE - 2); }
    const [left, wide] = this.span(step, lane);
    if (this.story.preemptedIn(step, lane)) {
      g.fillStyle = this.fail; g.font = "600 12px system-ui, sans-serif"; g.textAlign = "center"; g.fillText("⏏", x + left + wide + SIGN / 2, y + CELL + TALL / 2);
    }
    const cell = this.story.cell(step, lane);
    if (!cell || !cell.shown.length) return;
    for (const [i, piece] of this.pieces(cell).entries()) {
      fillPiece(g, piece.name, x + piece.x, y + CELL, piece.w, TALL);
      if (i) { g.fillStyle = "#0009"; g.fillRect(x + piece.x - .5, y + CELL, 1, TALL); }
      g.fillStyle = "#111"; g.font = TEXT; g.textAlign = "center";
      if (textWidth(piece.text) + 2 <= piece.w) g.fillText(piece.text, x + piece.x + piece.w / 2, y + CELL + TALL / 2 + .5);
    }
    g.strokeStyle = "#0005"; g.lineWidth = 1; g.strokeRect(x + left, y + CELL, wide, TALL);
  }

  transfers(g, row, from, to) {
    for (const span of this.story.spanBy[this.lanes[row]]) {
      if (span.end < from || span.start > to) continue;
      stroke(g, span.kind, this.x(span.start) + GAP + 1, this.x(span.end) + this.column - GAP - 1, this.y(row) + (TRACKS[span.kind] || TRACKS.save));
    }
  }

  hooks(g, step, only) {
    for (const half of [0, 1]) {
      const hooks = (this.story.hooksAt.get(step * 2 + half) || []).filter((hook) => !only || hook.name === only);
      const y = HEAD + this.lanes.length * LANE + half * HOOKS - this.view.scrollTop, gap = Math.min(5, (this.column - 2 * GAP) / Math.max(1, hooks.length));
      hooks.forEach((hook, i) => fillHook(g, half, hook.error, this.x(step) + GAP + i * gap, y, Math.max(1, gap - 1.5), this.fail));
    }
  }

  // Corners of the arrow from where wrong bytes were computed to where they were found. It leaves
  // above the number that it starts from, and arrives above what was loaded.
  route(one, number) {
    const row = this.lanes.indexOf(one.lane), origin = this.lanes.indexOf(one.from);
    if (row < 0 || origin < 0) return null;
    const middle = (step, lane, name) => {
      const cell = this.story.cell(step, lane), pieces = cell ? this.pieces(cell) : [];
      const piece = pieces.find((each) => each.name === name) || pieces[pieces.length - 1];
      return this.x(step) + (piece ? piece.x + piece.w / 2 : this.column / 2);
    };
    const shift = (number % 3) * 2, start = middle(one.fromStep, one.from, "computed"), end = middle(one.step, one.lane, "loaded") + shift - 2;
    const high = this.y(origin) + 2 + shift, low = this.y(row) + 2 + shift, across = this.x(one.step) - 2 + shift;
    const channel = origin === row ? [[start, high], [end, high]] : [[start, high], [across, high], [across, low], [end, low]];
    return [[start, this.y(origin) + CELL - 3], ...channel, [end, this.y(row) + CELL]];
  }

  wrong(g) {
    let number = 0;
    for (const list of this.story.wrongAt.values()) for (const one of list) {
      const row = this.lanes.indexOf(one.lane);
      if (row < 0) continue;
      const [left, wide] = this.span(one.step, one.lane);
      g.strokeStyle = this.fail; g.lineWidth = 2.5; g.strokeRect(this.x(one.step) + left - .5, this.y(row) + CELL - .5, wide + 1, TALL + 1);
      const corners = this.route(one, number++);
      if (corners) this.arrow(g, corners);
    }
  }

  arrow(g, corners) {
    const [[x1, y1]] = corners, [x2, y2] = corners[corners.length - 1];
    const path = () => {
      g.beginPath(); g.moveTo(x1, y1);
      for (let i = 1; i < corners.length - 1; i++) g.arcTo(...corners[i], ...corners[i + 1], 3);
      g.lineTo(x2, y2 - 3);
    };
    path(); g.strokeStyle = this.paper; g.lineWidth = 3; g.stroke();
    path(); g.strokeStyle = this.fail; g.lineWidth = 1.75; g.stroke();
    g.fillStyle = this.fail; g.beginPath(); g.arc(x1, y1, 3, 0, 7); g.fill();
    g.beginPath(); g.moveTo(x2, y2 + 1); g.lineTo(x2 - 4, y2 - 6); g.lineTo(x2 + 4, y2 - 6); g.fill();
  }

  heads(g, from, to, top, bottom, width, cursor) {
    g.fillStyle = this.paper; g.fillRect(0, 0, width, HEAD);
    g.textAlign = "center";
    for (let i = from; i < to; i++) {
      const step = this.first + i, reset = this.story.resets.has(step);
      g.fillStyle = reset ? this.fail : step === cursor.step ? this.ink : this.quiet;
      g.font = (step === cursor.step ? "700 " : "") + TEXT;
      g.fillText(reset ? step + "⟲" : step, this.x(step) + this.column / 2, HEAD / 2);
    }
    g.fillStyle = this.paper; g.fillRect(0, 0, this.gutter, 9999);
    g.textAlign = "left";
    const label = (text, y, strong, font = "12px ui-monospace, monospace") => {
      g.fillStyle = strong ? this.ink : this.quiet; g.font = (strong ? "700 " : "") + font;
      let shown = text;
      while (shown.length > 3 && g.measureText(shown).width > this.gutter - 10) shown = shown.slice(0, -2) + "…";
      g.fillText(shown, 6, y);
    };
    g.strokeStyle = this.line; g.lineWidth = 1;
    for (let row = top; row < bottom; row++) {
      label(this.story.requests[this.lanes[row]], this.y(row) + CELL + TALL / 2, row === cursor.row);
      g.beginPath(); g.moveTo(0, this.y(row) + LANE - .5); g.lineTo(width, this.y(row) + LANE - .5); g.stroke();
    }
    const hooks = HEAD + this.lanes.length * LANE - this.view.scrollTop;
    HALVES.forEach((half, i) => label(half + " hooks", hooks + HOOKS * (i + .5), false, TEXT));
    g.fillStyle = this.paper; g.fillRect(0, 0, this.gutter, HEAD); label("step", HEAD / 2, false, TEXT);
  }
}
