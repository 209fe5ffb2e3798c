// The view Staleness shows the age of trained tokens by cause, what age does to the policy, and other bounds.

import { get } from "../api.js";
import { bars } from "../bars.js";
import { ChartSet } from "../chart_set.js";
import { el, empty, fill, section, table } from "../dom.js";
import { count, number, percent } from "../format.js";

const CURVES = [["staleness_mean", "Mean staleness"], ["staleness_max", "Oldest token"], ["ess", "Effective sample size"], ["kl", "KL to the policy that sampled"]];

export async function staleness(root, { run, query }) {
  const [found, known] = await Promise.all([get(`run/${run}/ages`, { step: query.step }), get(`run/${run}/metrics`)]);
  const charts = new ChartSet(run);
  const shown = CURVES.filter(([name]) => known.names.includes(name));
  const total = found.bars.reduce((sum, bar) => sum + bar.tokens, 0);
  fill(
    root,
    el("h1", null, "Staleness"),
    el("p.note", null, `Updates between the weights that sampled a token and those that train on it, of all tokens that were trained. ${found.bound === null ? "" : `The bound is ${found.bound}.`}`),
    total ? ages(found, total) : empty("No token was trained yet", "This fills with the first step."),
    total ? section("By age", "Means over steps, weighted by tokens. ESS: the share of samples that importance weights leave. KL and gap (the trainer's logprob minus the engine's; 98 of 100 lie between the two columns): how far the policy had moved.", byAge(found.by_age)) : null,
    found.what_if.length ? section("If the bound were", "Counts of this run's own groups and tokens; a run with another bound would also generate others.", whatIf(found)) : null,
    el("div.charts", null, shown.map(([name, title]) => charts.add(name, title))),
  );
  return { live: (message) => charts.live(message), close: () => charts.close() };
}

function ages({ bars: list, bound, generating, waiting }, total) {
  const rows = list.map((bar) => {
    const sum = Math.max(1e-9, bar.generating + bar.waiting);
    const share = bar.tokens / total;
    return {
      value: bar.tokens,
      parts: bar.age === 0 ? [[bar.tokens, "main"]] : [[(bar.tokens * bar.generating) / sum, "generating"], [(bar.tokens * bar.waiting) / sum, "waiting"]],
      title: `age ${bar.age}: ${count(bar.tokens)} tokens, ${percent(share, 1)}; of the age ${number(bar.generating)} came while generating, ${number(bar.waiting)} while waiting`,
      label: bar.age,
      share,
    };
  });
  const axis = el("div.ticks", null, rows.map((bar) => el("span", { "data-beyond": bound !== null && bar.label > bound ? "yes" : null }, String(bar.label), el("small", null, percent(bar.share)))));
  const legend = el("div.legend", null, el("span", null, el("i.swatch.main"), "fresh"), el("span", null, el("i.swatch.generating"), "aged while generating ", el("b", null, percent(share(generating)))), el("span", null, el("i.swatch.waiting"), "aged while waiting ", el("b", null, percent(share(waiting)))));
  return section("Tokens by age", null, el("div.ages", null, bars("Tokens by age", rows, { height: 140 }), axis), legend);

  function share(pairs) {
    const sum = (some) => some.reduce((all, [age, tokens]) => all + age * tokens, 0);
    return sum(pairs) / Math.max(1e-9, sum(generating) + sum(waiting));
  }
}

function byAge(rows) {
  const columns = [["ess", "ESS"], ["kl", "KL"], ["gap_low", "gap, 1 %"], ["gap_high", "gap, 99 %"], ["clip_fraction", "clipped"], ["ratio_mean", "mean ratio"]].filter(([name]) => rows.some((row) => row[name] !== undefined));
  const head = [{ name: "age" }, { name: "tokens", kind: "number" }, ...columns.map(([, name]) => ({ name, kind: "number" }))];
  const label = ({ first, last }) => (last === null ? String(first) : last === "up" ? `${first} and more` : `${first}–${last}`);
  return table(head, rows.map((row) => [label(row), percent(row.share, 1), ...columns.map(([name]) => number(row[name] ?? null, 4))]), "By age");
}

function whatIf({ what_if, bound }) {
  const head = [{ name: "bound", kind: "number" }, { name: "groups too old", kind: "number" }, { name: "tokens too old", kind: "number" }, { name: "drops spared", kind: "number" }];
  return table(head, what_if.map((one) => [one.bound === bound ? el("b", null, `${one.bound} (this run)`) : String(one.bound), count(one.groups_too_old), count(one.tokens_too_old), count(one.drops_spared)]), "If the bound were");
}
