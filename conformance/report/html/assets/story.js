"use strict";
// A run's story (kvconform/html/story.py), unpacked and indexed by step and lane.

const PIECES = ["local", "loaded", "computed", "placeholder", "accepted", "rejected", "draft"];

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Story(JSON.parse(await new Response(stream).text()));
}

class Story {
  constructor(data) {
    Object.assign(this, data);
    const lanes = this.requests.length;
    this.cellAt = new Map();
    this.byLane = Array.from({ length: lanes }, () => []);
    for (const [lane, step, seq, ...rest] of this.cells) {
      if (lane < 0) continue;
      const pieces = rest.slice(0, PIECES.length);
      const [C, N, table] = rest.slice(PIECES.length);
      const shown = pieces.map((n, i) => [n, PIECES[i]]).filter(([n]) => n > 0);
      const cell = { lane, step, seq, shown, C, N, table };
      this.cellAt.set(step * 4096 + lane, cell);
      this.byLane[lane].push(cell);
    }
    this.stateBy = Array.from({ length: lanes }, () => []);
    for (const [lane, step, state, reason] of this.states) if (lane >= 0) this.stateBy[lane].push({ step, state, reason });
    this.preempted = new Set(this.states.filter(([, , state]) => state === "PREEMPTED").map(([lane, step]) => step * 4096 + lane));
    this.hooksAt = new Map();
    for (const [step, half, name, seq, error] of this.hooks) {
      const key = step * 2 + half;
      if (!this.hooksAt.has(key)) this.hooksAt.set(key, []);
      this.hooksAt.get(key).push({ step, half, name: this.names[name], seq, error });
    }
    this.wrongAt = new Map();
    for (const [lane, step, seq, pos, count, found, text, from, fromStep, story] of this.wrong) {
      const key = step * 4096 + lane;
      if (!this.wrongAt.has(key)) this.wrongAt.set(key, []);
      this.wrongAt.get(key).push({ lane, step, seq, pos, count, found, text, from, fromStep, story });
    }
    this.spanBy = Array.from({ length: lanes }, () => []);
    for (const [lane, start, end, kind, seq] of this.spans) if (lane >= 0) this.spanBy[lane].push({ lane, start, end, kind, seq });
    this.linesAt = new Map();
    this.resets = new Set(this.lines.filter(([, , what, text]) => what === "cache.reset" && text.includes("asked")).map(([, step]) => step));
    for (const [seq, step, what, text, lane] of this.lines) {
      if (!this.linesAt.has(step)) this.linesAt.set(step, []);
      this.linesAt.get(step).push({ seq, step, what, text, lane });
    }
  }

  preemptedIn(step, lane) { return this.preempted.has(step * 4096 + lane); }

  cell(step, lane) { return this.cellAt.get(step * 4096 + lane); }

  state(step, lane) {
    let found = "";
    for (const one of this.stateBy[lane]) { if (one.step > step) break; found = one.state; }
    return found;
  }

  lastCell(step, lane) {
    let found = null;
    for (const cell of this.byLane[lane]) { if (cell.step > step) break; found = cell; }
    return found;
  }

  // Block id -> lanes whose table holds it at the end of a step.
  owners(step) {
    const found = new Map();
    this.requests.forEach((_, lane) => {
      const state = this.state(step, lane);
      if (state === "PREEMPTED" || state.startsWith("FINISHED")) return;
      const cell = this.lastCell(step, lane);
      for (const block of cell ? cell.table : []) {
        if (!found.has(block)) found.set(block, []);
        found.get(block).push(lane);
      }
    });
    return found;
  }

  // Everything of a step in the order in which it happened.
  eventsOf(step) {
    const lines = (this.linesAt.get(step) || []).map((line) => ({ ...line, hook: null }));
    const hooks = [0, 1].flatMap((half) => (this.hooksAt.get(step * 2 + half) || []).map((hook) => ({
      seq: hook.seq, step, what: half ? "worker" : "scheduler", text: hook.name + (hook.error ? " raised: " + hook.error : ""), lane: -1, hook: hook.name,
    })));
    return [...lines, ...hooks].sort((a, b) => a.seq - b.seq);
  }

  stepOf(seq) {
    for (const [step, lines] of this.linesAt) if (lines.some((line) => line.seq === seq)) return step;
    for (const [key, hooks] of this.hooksAt) if (hooks.some((hook) => hook.seq === seq)) return key >> 1;
    return null;
  }
}

function described(cell) {
  const words = { local: "found in the local prefix cache", loaded: "loaded by the connector", computed: "computed", placeholder: "placeholder", accepted: "draft accepted", rejected: "draft rejected", draft: "draft" };
  const plurals = { placeholder: "placeholders", accepted: "drafts accepted", rejected: "drafts rejected", draft: "drafts" };
  return cell.shown.map(([n, name]) => n + " " + (n === 1 ? words[name] : plurals[name] || words[name])).join(", ") || "nothing";
}

// Numbers as ranges: 3-7 12.
function ranges(numbers) {
  const found = [];
  for (const number of numbers) {
    const last = found[found.length - 1];
    if (last && number === last[1] + 1) last[1] = number; else found.push([number, number]);
  }
  return found.map(([from, to]) => (from === to ? String(from) : from + "-" + to)).join(" ");
}
