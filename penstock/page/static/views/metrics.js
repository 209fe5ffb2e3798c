// The view Metrics shows every metric of a step as a curve: the most important first, the others by a search word.

import { get } from "../api.js";
import { ChartSet } from "../chart_set.js";
import { choice, el, empty, fill } from "../dom.js";
import { adjust } from "../router.js";

const KINDS = [
  ["Learning", /^(reward|heldout|loss|entropy|kl$|grad_norm|learning_rate|advantage)/],
  ["Off-policy", /^(ess|kl|ratio|staleness|max_staleness|tokens_age|version|correction|clip|masked|logprob|topr|routing)/],
  ["Answers", /^(answer|truncated|num_loss|samples|prompt|zero)/],
  ["Time", /_s$/],
  ["Sync", /^sync_/],
];

export async function metrics(root, { run, query, keys }) {
  const { names: all, same } = await get(`run/${run}/metrics`);
  const titles = new Map(all.filter((name) => !same[name]).map((name) => [name, [name, ...all.filter((other) => same[other] === name)].join(" = ")]));
  const names = [...titles.keys()];
  const axis = query.x ?? "step";
  const charts = new ChartSet(run, axis);
  const field = el("input", { type: "search", placeholder: "Find a metric", "aria-label": "Find a metric", value: query.find ?? "", oninput: () => show() });
  const body = el("div");
  fill(root, el("h1", null, "Metrics"), el("div.tools", null, field, choice("Over", [["step", "steps"], ["time", "time"], ["tokens", "tokens"]], axis, (x) => adjust({ x }))), body);
  const nodes = new Map(names.map((name) => [name, charts.add(name, titles.get(name))]));
  show();
  keys["/"] = { what: "find a metric", act: () => field.focus() };

  function show() {
    const word = field.value.trim().toLowerCase();
    const left = new Set(names.filter((name) => titles.get(name).toLowerCase().includes(word)));
    if (!left.size) return fill(body, names.length ? empty("No metric has such a name") : empty("No step yet", "Curves begin with the first one."));
    const groups = [...KINDS, ["Others", /./]].map(([title, fits]) => {
      const some = [...left].filter((name) => fits.test(name));
      some.forEach((name) => left.delete(name));
      return some.length ? el("section", null, el("h2", null, title), el("div.charts", null, some.map((name) => nodes.get(name)))) : null;
    });
    fill(body, groups);
  }

  return { live: (message) => charts.live(message), close: () => charts.close() };
}
