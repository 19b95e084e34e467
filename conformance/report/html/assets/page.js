"use strict";
// The page around the timelines: they are made when they come into view; filters, keys, copying.

function story(run) {
  const script = [...document.querySelectorAll('script[type="application/kvconform"]')].find((one) => one.dataset.run === run);
  return script ? unpacked(script.textContent) : null;
}

const timelines = new Map();

async function open(box) {
  if (timelines.has(box)) return;
  timelines.set(box, null);
  try {
    const data = await story(box.dataset.run);
    box.style.minHeight = "";
    timelines.set(box, new Timeline(data, box));
  } catch (error) {
    box.textContent = "The timeline cannot be shown in this browser (" + error.message + "); the excerpt below can.";
  }
}

const boxes = [...document.querySelectorAll(".timeline")];
const seen = new IntersectionObserver((entries) => entries.filter((one) => one.isIntersecting).forEach((one) => open(one.target)), { rootMargin: "400px" });
boxes.forEach((box) => { box.style.minHeight = "200px"; seen.observe(box); });

const failures = [...document.querySelectorAll(".failure")];
function toFailure(by) {
  if (!failures.length) return;
  const now = failures.findIndex((one) => one.contains(document.activeElement));
  const next = failures[Math.max(0, Math.min(failures.length - 1, now < 0 ? (by > 0 ? 0 : failures.length - 1) : now + by))];
  next.querySelector("h3 a, summary").focus();
  next.scrollIntoView({ block: "start" });
}
// A link to a consequence opens it.
function reveal() {
  const linked = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!linked || !linked.matches("details.failure")) return;
  linked.open = true;
  linked.scrollIntoView({ block: "start" });
}
window.addEventListener("hashchange", reveal);
reveal();

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  if (event.key === "n") toFailure(1); else if (event.key === "p") toFailure(-1); else return;
  event.preventDefault();
});

document.querySelectorAll("button.copy").forEach((button) => button.addEventListener("click", async () => {
  const text = button.previousElementSibling.textContent;
  try { await navigator.clipboard.writeText(text); button.textContent = "copied"; } catch { getSelection().selectAllChildren(button.previousElementSibling); button.textContent = "selected"; }
}));

const find = document.getElementById("find"), show = document.getElementById("show"), found = document.getElementById("found");
function filterMatrix() {
  const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  document.querySelectorAll(".area").forEach((area) => {
    let here = 0;
    area.querySelectorAll("tbody tr").forEach((row) => {
      const text = row.textContent.toLowerCase();
      row.hidden = !(words.every((word) => text.includes(word)) && (!show.value || row.dataset.verdict === show.value));
      here += !row.hidden;
    });
    area.hidden = !here;
    if (words.length || show.value) area.open = here > 0;
    count += here;
  });
  found.textContent = count + " requirements";
}
find.addEventListener("input", filterMatrix);
show.addEventListener("change", filterMatrix);
document.querySelector(".filters").addEventListener("submit", (event) => event.preventDefault());
