// The view Drops shows groups that were sampled and not trained, why, and whether they are alike.

import { get } from "../api.js";
import { bars } from "../bars.js";
import { el, empty, fill, link, section, table } from "../dom.js";
import { count, duration, number, percent, plural } from "../format.js";
import { address, adjust } from "../router.js";

export async function drops(root, { run, query }) {
  const found = await get(`run/${run}/drops`, { reason: query.reason });
  fill(root, el("h1", null, "Drops"), el("p.note", null, "Every group that was not trained has a reason. Dropped groups that are longer or of other tasks than the kept ones bias what the model learns."));
  if (!found.total) root.append(empty("No group was dropped", "All that was generated so far was trained, or waits for its step."));
  else root.append(reasons(found, query), compared(found), list(found, run));
  const before = found.total;
  return { live: ({ now }) => now.drops !== before && adjust({}) };
}

function reasons(found, query) {
  const head = [{ name: "reason" }, { name: "groups", kind: "number" }, { name: "share", kind: "number" }, { name: "tokens lost", kind: "number" }];
  const pick = (reason) => el("button.link", { type: "button", "aria-pressed": String(query.reason === reason), onclick: () => adjust({ reason: query.reason === reason ? null : reason }) }, reason);
  return section(`${plural(found.total, "group")}, ${plural(found.tokens, "token")}`, null, table(head, found.reasons.map((one) => [pick(one.reason), count(one.groups), percent(one.groups / found.total), count(one.tokens)]), "Drops by reason"));
}

function compared({ lengths, tasks }) {
  if (!lengths) return el("p.note", null, "No text of a dropped group is kept, so they can't be compared with the others.");
  const top = lengths.kept.map((_, at) => ({
    value: Math.max(lengths.kept[at], lengths.dropped[at]),
    parts: [[lengths.kept[at], "kept"]],
    title: `${number(lengths.edges[at])} to ${number(lengths.edges[at + 1])} tokens: ${percent(lengths.kept[at], 1)} of kept`,
  }));
  const low = top.map((bar, at) => ({ value: bar.value, parts: [[lengths.dropped[at], "dropped"]], title: `${number(lengths.edges[at])} to ${number(lengths.edges[at + 1])} tokens: ${percent(lengths.dropped[at], 1)} of dropped` }));
  const head = [{ name: "task" }, { name: "dropped", kind: "number" }, { name: "kept", kind: "number" }];
  return el(
    "div.pair",
    null,
    section("By length", `A kept answer has ${number(lengths.kept_mean)} tokens in the mean, a dropped one ${number(lengths.dropped_mean)}.`, el("div.mirror", null, bars("Kept", top, { height: 60 }), bars("Dropped", low, { height: 60 })), el("div.legend", null, el("span", null, el("i.swatch.kept"), "kept"), el("span", null, el("i.swatch.dropped"), "dropped"))),
    section("By task", "Those that lose the most answers.", table(head, tasks.slice(0, 10).map((one) => [one.task, count(one.dropped), count(one.kept)]), "Drops by task")),
  );
}

function list(found, run) {
  const item = (drop) =>
    el(
      "article.drop",
      null,
      el("header", null, el("span.tag.bad", null, drop.reason), el("b", null, link(address(drop.samples ? "group" : "drops", { run }, drop.samples ? drop.group : null), `group ${drop.group}`)), el("span.muted", null, `task ${drop.task}, at ${duration(drop.time)}, ${drop.age === null ? "age unknown" : `age ${drop.age}`}, ${plural(drop.tokens, "token")} lost`)),
      el("p", null, drop.message),
      drop.sample ? el("pre", null, `${drop.sample.prompt}${drop.sample.answer}`) : el("p.muted", null, "No text: none of its answers had ended, or it is no longer kept."),
    );
  return section("Newest first", found.matched > found.rows.length ? `${count(found.rows.length)} of ${count(found.matched)}` : null, el("div.drops", null, found.rows.map(item)));
}
