// Draws the line that is always shown: which run, whether it is running, how far it is, and how well it does.

import { el, fill } from "./dom.js";
import { count, duration, lastSteps, number } from "./format.js";

const STATES = { done: ["done", "ended"], died: ["died", "lost"], "": ["running", "going"] };

export function showTop(top, { runs, at, isThere, pick }) {
  const run = runs[at];
  fill(
    top,
    el("a.brand", { href: "#/now", title: "To the view Now" }, "penstock"),
    run && runs.length > 1 ? picker(runs, at, pick) : run && el("span.run", { title: run.folder }, run.name),
    run && state(run, isThere),
    run && facts(run),
    el("span.push"),
    el("button.quiet", { type: "button", title: "Light or dark (key t)", "aria-label": "Light or dark", onclick: () => document.dispatchEvent(new Event("penstock-theme")) }, "◐"),
    el("button.quiet", { type: "button", title: "Keys (key ?)", "aria-label": "Keys", onclick: () => document.dispatchEvent(new Event("penstock-keys")) }, "?"),
  );
}

function picker(runs, at, pick) {
  return el(
    "select",
    { "aria-label": "Run", onchange: (event) => pick(event.target.value) },
    runs.map((run, number) => el("option", { value: String(number), selected: number === at }, run.name)),
  );
}

function state(run, isThere) {
  if (!isThere) return el("span.state.lost", { role: "status" }, "server gone");
  const [word, kind] = STATES[run.ended];
  const phase = run.ended === "" && run.status.phase !== "training" ? run.status.phase : word;
  return el(`span.state.${kind}`, { role: "status" }, phase);
}

function facts(run) {
  const status = run.status;
  const left = run.ended === "" && status.left_s !== null ? `about ${duration(status.left_s)}` : duration(status.elapsed_s);
  const heldout = status.heldout.length ? status.heldout[status.heldout.length - 1][1] : null;
  return el(
    "dl.facts",
    null,
    fact("step", `${count(status.step)} / ${count(status.steps)}`),
    fact(`reward, ${lastSteps(run)}`, number(status.reward)),
    heldout !== null && fact("held-out", number(heldout)),
    fact(run.ended === "" && status.left_s !== null ? "to go" : "took", left),
  );
}

function fact(name, value) {
  return el("div", null, el("dt", null, name), el("dd", null, value));
}
