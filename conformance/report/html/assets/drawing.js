"use strict";
// Draws the part of a story that is in view: lanes down, steps across.

const GUTTER = 112, COLUMN = 34, LANE = 38, HEAD = 20, HOOKS = 22;
const FILL = { local: "#8cc8ff", loaded: "#c9a2ff", computed: "#9be29b", placeholder: "#ffe08a", accepted: "#5fcf8f", rejected: "#f4a09a", draft: "#d8d8d8" };
const STATES = { RUNNING: "#2da44e22", PREEMPTED: "#d1242f2e", WAITING_FOR_REMOTE_KVS: "#8250df2e", WAITING: "#88888818" };
const LETTERS = { local: "h", loaded: "↓", computed: "", placeholder: "?", accepted: "✓", rejected: "✗", draft: "d" };
const OWNERS = ["#8cc8ff", "#9be29b", "#ffd27a", "#f4a0c8", "#c9a2ff", "#86e0d5", "#f2b38a", "#c7d36f"];

const TRANSFERS = [["load", "load"], ["save", "save"], ["send", "blocks held until it is sent"]];

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
  g.strokeStyle = "#0007"; g.lineWidth = 1; g.beginPath();
  for (let i = -height; i < width + height; i += 5) {
    g.moveTo(x + i, y + height); g.lineTo(x + i + height, y);
    if (name === "rejected") { g.moveTo(x + i, y); g.lineTo(x + i + height, y + height); }
  }
  g.stroke(); g.restore();
}

class Drawing {
  constructor(story, canvas, view, lanes) {
    Object.assign(this, { story, canvas, view, lanes });
    this.first = story.first;
    this.columns = story.steps - story.first + 1;
  }

  get width() { return GUTTER + this.columns * COLUMN + 8; }
  get height() { return HEAD + this.lanes.length * LANE + 2 * HOOKS + 6; }
  x(step) { return GUTTER + (step - this.first) * COLUMN - this.view.scrollLeft; }
  y(row) { return HEAD + row * LANE - this.view.scrollTop; }

  draw(cursor, hook) {
    const { canvas, view } = this, ratio = window.devicePixelRatio || 1;
    const width = view.clientWidth, height = Math.min(view.clientHeight || 9999, this.height);
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
    const from = Math.max(0, Math.floor(view.scrollLeft / COLUMN) - 1), to = Math.min(this.columns, from + Math.ceil(width / COLUMN) + 2);
    const top = Math.max(0, Math.floor(view.scrollTop / LANE) - 1), bottom = Math.min(this.lanes.length, top + Math.ceil(height / LANE) + 2);
    g.save(); g.beginPath(); g.rect(GUTTER, 0, width, height); g.clip();
    g.fillStyle = color("--cursor"); g.fillRect(this.x(cursor.step), 0, COLUMN, height);
    for (let row = top; row < bottom; row++) for (let i = from; i < to; i++) this.cell(g, this.first + i, row);
    for (let row = top; row < bottom; row++) this.transfers(g, row, this.first + from, this.first + to);
    for (let i = from; i < to; i++) this.hooks(g, this.first + i, hook);
    this.wrong(g);
    g.restore();
    this.heads(g, from, to, top, bottom, width, cursor);
  }

  cell(g, step, row) {
    const lane = this.lanes[row], x = this.x(step), y = this.y(row), state = this.story.state(step, lane);
    const tint = STATES[state] || (state.startsWith("WAITING") ? STATES.WAITING : null);
    if (tint) { g.fillStyle = tint; g.fillRect(x, y + 1, COLUMN, LANE - 2); }
    if (state === "PREEMPTED" && this.story.stateBy[lane].some((one) => one.step === step && one.state === "PREEMPTED")) {
      g.fillStyle = this.fail; g.font = "600 11px system-ui"; g.textAlign = "center"; g.fillText("⏏", x + COLUMN / 2, y + LANE - 9);
    }
    const cell = this.story.cell(step, lane);
    if (!cell) return;
    const total = cell.pieces.reduce((sum, n) => sum + Math.max(0, n), 0);
    if (!total) return;
    const wide = COLUMN - 4, shown = cell.pieces.map((n, i) => [n, PIECES[i]]).filter(([n]) => n > 0);
    let left = x + 2;
    const share = shown.map(([n]) => Math.max(7, (wide * n) / total)), scale = wide / share.reduce((a, b) => a + b, 0);
    shown.forEach(([n, name], i) => {
      const w = share[i] * scale;
      fillPiece(g, name, left, y + 4, w, 18);
      g.fillStyle = "#111"; g.font = "10px system-ui"; g.textAlign = "center";
      const text = LETTERS[name] + n;
      if (g.measureText(text).width <= w) g.fillText(text, left + w / 2, y + 13);
      left += w;
    });
    g.strokeStyle = "#0005"; g.lineWidth = 1; g.strokeRect(x + 2, y + 4, wide, 18);
  }

  transfers(g, row, from, to) {
    const tracks = { load: 26, recv: 26, save: 30, send: 33 };
    for (const span of this.story.spanBy[this.lanes[row]]) {
      if (span.end < from || span.start > to) continue;
      stroke(g, span.kind, this.x(span.start) + 4, this.x(span.end) + COLUMN - 4, this.y(row) + (tracks[span.kind] || 30));
    }
  }

  hooks(g, step, only) {
    for (const half of [0, 1]) {
      const hooks = (this.story.hooksAt.get(step * 2 + half) || []).filter((hook) => !only || hook.name === only);
      const y = HEAD + this.lanes.length * LANE + half * HOOKS - this.view.scrollTop, x = this.x(step) + 3, gap = Math.min(4, (COLUMN - 6) / Math.max(1, hooks.length));
      hooks.forEach((hook, i) => {
        g.fillStyle = hook.error ? this.fail : half ? "#8250df" : "#0969da";
        g.fillRect(x + i * gap, y + (hook.error ? 1 : 5), hook.error ? 3 : Math.max(1, gap - 1), hook.error ? HOOKS - 3 : HOOKS - 10);
      });
    }
  }

  wrong(g) {
    for (const list of this.story.wrongAt.values()) for (const one of list) {
      const row = this.lanes.indexOf(one.lane);
      if (row < 0) continue;
      const x = this.x(one.step), y = this.y(row);
      g.strokeStyle = this.fail; g.lineWidth = 2.5; g.strokeRect(x + 1, y + 2, COLUMN - 2, 22);
      const origin = this.lanes.indexOf(one.from);
      if (origin < 0) continue;
      const x2 = this.x(one.fromStep) + COLUMN / 2, y2 = this.y(origin) + 13, x1 = x + COLUMN / 2, y1 = y + 13;
      g.beginPath(); g.moveTo(x2, y2); g.quadraticCurveTo((x1 + x2) / 2, Math.min(y1, y2) - 26, x1, y1 - 11); g.stroke();
      g.fillStyle = this.fail; g.beginPath(); g.moveTo(x1, y1 - 9); g.lineTo(x1 - 5, y1 - 18); g.lineTo(x1 + 5, y1 - 18); g.fill();
      g.beginPath(); g.arc(x2, y2, 4, 0, 7); g.fill();
    }
  }

  heads(g, from, to, top, bottom, width, cursor) {
    g.fillStyle = this.paper; g.fillRect(0, 0, width, HEAD);
    g.font = "11px system-ui"; g.textAlign = "center";
    for (let i = from; i < to; i++) {
      const step = this.first + i;
      g.fillStyle = step === cursor.step ? this.ink : this.quiet;
      g.font = (step === cursor.step ? "700 " : "") + "11px system-ui";
      const reset = this.story.resets.has(step);
      if (reset) g.fillStyle = this.fail;
      g.fillText(reset ? step + "⟲" : step, this.x(step) + COLUMN / 2, HEAD / 2);
    }
    g.fillStyle = this.paper; g.fillRect(0, 0, GUTTER, 9999);
    g.textAlign = "left";
    const label = (text, y, strong) => {
      g.fillStyle = strong ? this.ink : this.quiet; g.font = (strong ? "700 " : "") + "12px ui-monospace, monospace";
      let shown = text;
      while (shown.length > 3 && g.measureText(shown).width > GUTTER - 10) shown = shown.slice(0, -2) + "…";
      g.fillText(shown, 6, y);
    };
    for (let row = top; row < bottom; row++) {
      label(this.story.requests[this.lanes[row]], this.y(row) + 14, row === cursor.row);
      g.strokeStyle = this.line; g.lineWidth = 1; g.beginPath(); g.moveTo(0, this.y(row) + LANE - .5); g.lineTo(width, this.y(row) + LANE - .5); g.stroke();
    }
    const bottomLine = HEAD + this.lanes.length * LANE - this.view.scrollTop;
    label("scheduler half", bottomLine + HOOKS / 2, false); label("worker half", bottomLine + HOOKS * 1.5, false);
    g.fillStyle = this.paper; g.fillRect(0, 0, GUTTER, HEAD); label("step", HEAD / 2, false);
  }
}
