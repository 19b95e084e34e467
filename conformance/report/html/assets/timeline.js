"use strict";
// The timeline of one failure: drawing, slider, filters, the state at a step and its events.

const LEGEND = { local: "local hit", loaded: "loaded", computed: "computed", placeholder: "placeholder", accepted: "draft accepted", rejected: "draft rejected", draft: "draft" };
const TRANSFERS = { load: "load", save: "save", send: "blocks held until it is sent" };

function element(tag, attributes = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") found.className = value; else if (name.startsWith("on")) found.addEventListener(name.slice(2), value); else found.setAttribute(name, value);
  }
  found.append(...children);
  return found;
}

class Timeline {
  constructor(story, box) {
    this.story = story;
    this.box = box;
    this.mark = box.dataset.seq === "" ? null : Number(box.dataset.seq);
    this.cursor = { step: story.steps, row: 0 };
    this.only = ""; this.hook = "";
    this.id = `said-${box.closest(".failure").id}`;
    this.build();
    this.lanes = story.requests.map((_, i) => i);
    this.canvas.setAttribute("aria-label", `Timeline of ${story.run.case}: ${story.requests.length} requests, steps ${story.first} to ${story.steps}. Arrow keys go through steps and requests.`);
    this.drawing = new Drawing(story, this.canvas, this.view, this.lanes);
    this.size();
    new ResizeObserver(() => { this.size(); this.draw(); }).observe(this.view);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.toMark();
  }

  build() {
    const { story } = this;
    this.slider = element("input", { type: "range", min: story.first, max: story.steps, value: story.steps, "aria-label": "Step", oninput: () => this.go(Number(this.slider.value)) });
    this.where = element("output", { "aria-live": "polite" });
    this.requests = element("input", { type: "search", size: 9, "aria-label": "Only requests", placeholder: "request", oninput: () => this.filter() });
    this.hooks = element("select", { "aria-label": "Only the hook", onchange: () => this.filter() }, element("option", { value: "" }, "all hooks"), ...[...story.names].sort().map((name) => element("option", { value: name }, name)));
    const jump = element("button", { type: "button", class: "jump", onclick: () => this.toMark() }, "to the violation");
    if (this.mark !== null && !Object.values(story.marks).includes(this.mark)) { jump.disabled = true; jump.textContent = "the violation is not in the part that is drawn"; }
    this.canvas = element("canvas", { tabindex: 0, role: "application", "aria-describedby": this.id, onkeydown: (event) => this.key(event), onmousemove: (event) => this.hover(event), onmouseleave: () => this.tip(null), onclick: (event) => this.click(event) });
    this.spacer = element("div");
    this.view = element("div", { class: "view", onscroll: () => this.draw() }, this.canvas, this.spacer);
    this.state = element("div", { class: "state" });
    this.events = element("ol", { class: "events", tabindex: 0, "aria-label": "Events of the step" });
    this.box.append(element("div", { class: "bar" }, element("span", {}, "step"), this.slider, this.where, this.requests, this.hooks, jump), this.view, this.legend(), this.state, this.events);
  }

  // What the timeline shows, and nothing else.
  legend() {
    const { story } = this, list = element("ul", { class: "legend", "aria-label": "Legend" });
    const add = (words, width, paint) => {
      const swatch = paint ? element("canvas", { width, height: 14, "aria-hidden": "true" }) : "";
      if (paint) paint(swatch.getContext("2d"));
      list.append(element("li", {}, swatch, words));
    };
    const pieces = new Set(story.byLane.flat().flatMap((cell) => cell.shown.map(([, name]) => name)));
    for (const [name, words] of Object.entries(LEGEND)) if (pieces.has(name)) add((LETTERS[name] ? LETTERS[name] + " " : "") + words, 16, (g) => fillPiece(g, name, 0, 0, 16, 14));
    const states = new Set(story.stateBy.flat().map((one) => one.state).filter(tint));
    for (const state of states) add(state.toLowerCase().replaceAll("_", " ") + (state === "PREEMPTED" ? " ⏏" : ""), 16, (g) => { g.fillStyle = tint(state).slice(0, 7) + "55"; g.fillRect(0, 0, 16, 14); });
    const kinds = new Set(story.spanBy.flat().map((one) => (one.kind === "recv" ? "load" : one.kind)));
    for (const [kind, words] of Object.entries(TRANSFERS)) if (kinds.has(kind)) add(words, 22, (g) => stroke(g, kind, 0, 22, 7));
    const fail = getComputedStyle(document.documentElement).getPropertyValue("--fail").trim();
    HALVES.forEach((half, i) => { if (story.hooks.some((one) => one[1] === i)) add(`a hook of the ${half} half`, 10, (g) => [0, 4, 8].forEach((x) => fillHook(g, i, false, x, -4, 2, fail))); });
    if (story.hooks.some((one) => one[4])) add("a hook that raised", 6, (g) => fillHook(g, 0, true, 1, -4, 3, fail));
    if (story.wrong.length) add("wrong KV, with an arrow from where it was computed", 18, (g) => { g.strokeStyle = fail; g.lineWidth = 2; g.strokeRect(1, 1, 16, 12); });
    if (story.resets.size) add("⟲ the cache is reset");
    return list;
  }

  // The view is as high as its lanes, and scrolls if they are many.
  size() {
    const { view, drawing } = this;
    drawing.fit(view.clientWidth);
    this.spacer.style.width = drawing.width + "px";
    this.spacer.style.height = drawing.height + "px";
    const bar = drawing.width > view.clientWidth ? view.offsetHeight - 2 - view.clientHeight : 0;
    view.style.height = Math.min(460, drawing.height + bar + 2) + "px";
  }

  filter() {
    this.only = this.requests.value.trim().toLowerCase();
    this.hook = this.hooks.value;
    const kept = this.story.requests.map((name, i) => [name, i]).filter(([name]) => name.toLowerCase().includes(this.only)).map(([, i]) => i);
    this.lanes = this.drawing.lanes = kept;
    this.cursor.row = Math.max(0, Math.min(this.cursor.row, kept.length - 1));
    this.size();
    this.go(this.cursor.step);
  }

  toMark() {
    const step = this.mark === null ? null : this.story.stepOf(this.mark);
    const wrong = this.story.wrong.find((one) => one[2] === this.mark);
    const line = (this.story.linesAt.get(step) || []).find((one) => one.seq === this.mark);
    const known = this.lanes.indexOf(wrong ? wrong[0] : line ? line.lane : -1);
    const row = known >= 0 ? known : this.lanes.findIndex((lane) => this.story.cell(step, lane));
    if (row >= 0) this.cursor.row = row;
    this.go(step === null ? this.story.steps : step);
  }

  go(step) {
    const { story, view } = this;
    this.cursor.step = Math.max(story.first, Math.min(story.steps, step));
    const { gutter, column } = this.drawing, x = gutter + (this.cursor.step - story.first) * column, y = HEAD + this.cursor.row * LANE;
    if (x - gutter < view.scrollLeft || x + column > view.scrollLeft + view.clientWidth) view.scrollLeft = x - gutter - (view.clientWidth - gutter - column) / 2;
    if (y - HEAD < view.scrollTop || y + LANE > view.scrollTop + view.clientHeight) view.scrollTop = y - view.clientHeight / 2;
    this.slider.value = this.cursor.step;
    this.draw();
    this.tell();
  }

  draw() { this.drawing.draw(this.cursor, this.hook); }

  // Where wrong KV was found, what it is, and where it was before.
  told(one) {
    const last = one.pos + one.count - 1;
    return [`WRONG KV: ${one.count > 1 ? `positions ${one.pos}-${last}` : `position ${one.pos}`}: ${one.found}: ${one.text}`, one.story];
  }

  facts(step, row) {
    const lane = this.lanes[row];
    if (lane === undefined) return [`step ${step}`];
    const cell = this.story.cell(step, lane), state = this.story.state(step, lane) || "not admitted yet";
    const parts = [`step ${step}, request ${this.story.requests[lane]}: ${state}`];
    if (cell) parts.push(described(cell) + `; ${cell.C} tokens before, ${cell.N} in all; blocks ${ranges(cell.table) || "none"}`);
    return parts;
  }

  wrongAt(step, row) { return this.story.wrongAt.get(step * 4096 + this.lanes[row]) || []; }

  sentence(step, row) {
    return [...this.facts(step, row), ...this.wrongAt(step, row).map((one) => this.told(one)[0])].join("\n");
  }

  tell() {
    const { story } = this, step = this.cursor.step;
    this.where.textContent = `${step} of ${story.steps}`;
    const groups = { running: [], waiting: [], preempted: [] };
    story.requests.forEach((name, lane) => {
      const state = story.state(step, lane);
      if (state === "RUNNING") groups.running.push(name); else if (state === "PREEMPTED") groups.preempted.push(name); else if (state.startsWith("WAITING")) groups.waiting.push(name + (state === "WAITING" ? "" : " (" + state.toLowerCase() + ")"));
    });
    const owners = story.owners(step), total = story.run.num_blocks || 0;
    const blocks = element("div", { class: "blocks", role: "img", "aria-label": `${owners.size} of ${total} blocks are in a table` });
    for (let id = 1; id < Math.min(total, 513); id++) {
      const lanes = owners.get(id) || [], cell = element("span", { title: lanes.length ? `block ${id}: ${lanes.map((lane) => story.requests[lane]).join(", ")}` : `block ${id}: in no table` }, String(id));
      if (lanes.length) { cell.className = "owned"; cell.style.background = lanes.length > 1 ? `linear-gradient(90deg, ${OWNERS[lanes[0] % 8]} 50%, ${OWNERS[lanes[1] % 8]} 50%)` : OWNERS[lanes[0] % 8]; }
      blocks.append(cell);
    }
    const here = element("div", { id: this.id, "aria-live": "polite" }, ...this.facts(step, this.cursor.row).map((text) => element("p", {}, text)));
    for (const [text, before] of this.wrongAt(step, this.cursor.row).map((one) => this.told(one))) {
      here.append(element("p", { class: "wrong" }, text), ...(before ? [element("p", { class: "story" }, before)] : []));
    }
    const scheduler = element("div", {}, ...Object.entries(groups).filter(([, names]) => names.length).map(([word, names]) => element("p", {}, `${word}: ${names.join(", ")}`)), element("p", {}, `blocks in a table: ${owners.size} of ${Math.max(0, total - 1)}`), blocks);
    this.state.replaceChildren(here, scheduler);
    const lane = this.lanes[this.cursor.row];
    const shown = story.eventsOf(step).filter((event) => (!this.hook || event.hook === this.hook || event.hook === null) && (!this.only || event.lane < 0 || this.lanes.includes(event.lane)));
    this.events.replaceChildren(...shown.slice(0, 600).map((event) => element("li", { class: event.seq === this.mark ? "marked" : event.lane === lane && lane !== undefined ? "now" : "" }, element("span", {}, String(event.step)), element("span", {}, event.what), element("span", {}, event.text))));
    const marked = this.events.querySelector(".marked");
    if (marked) this.events.scrollTop = marked.offsetTop - this.events.offsetTop - 80;
  }

  key(event) {
    const jumps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], PageUp: [-10, 0], PageDown: [10, 0] };
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key in jumps) {
      const [dx, dy] = jumps[event.key];
      this.cursor.row = Math.max(0, Math.min(this.lanes.length - 1, this.cursor.row + dy));
      this.go(this.cursor.step + dx);
    } else if (event.key === "Home") this.go(this.story.first);
    else if (event.key === "End") this.go(this.story.steps);
    else if (event.key === "f") this.toMark();
    else return;
    event.preventDefault();
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const { gutter, column } = this.drawing;
    if (x < gutter || y < HEAD) return null;
    const step = this.story.first + Math.floor((x - gutter + this.view.scrollLeft) / column), down = y - HEAD + this.view.scrollTop;
    if (step > this.story.steps) return null;
    const row = Math.floor(down / LANE);
    return row < this.lanes.length ? { step, row } : { step, row: -1, half: Math.floor((down - this.lanes.length * LANE) / HOOKS) };
  }

  click(event) {
    const place = this.at(event);
    if (!place) return;
    if (place.row >= 0) this.cursor.row = place.row;
    this.go(place.step);
  }

  hover(event) {
    const place = this.at(event);
    if (!place) return this.tip(null);
    const hooks = place.row < 0 ? this.story.hooksAt.get(place.step * 2 + place.half) || [] : null;
    this.tip(hooks ? `step ${place.step}\n` + hooks.map((hook) => hook.name + (hook.error ? " raised: " + hook.error : "")).join("\n") : this.sentence(place.step, place.row), event);
  }

  tip(text, event) {
    const tip = document.getElementById("tip");
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    tip.style.left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8) + "px";
  }
}
