// The view Samples lists every answer that is kept, by step, filtered and ordered; a histogram's bar opens its samples.

import { get } from "../api.js";
import { histogram, range, rangeText } from "../bars.js";
import { el, empty, fill } from "../dom.js";
import { count, plural } from "../format.js";
import { adjust, go } from "../router.js";
import { facts, fate, reward, texts, ways } from "../sample_parts.js";

const SORTS = [["new", "newest"], ["best", "best"], ["worst", "worst"], ["long", "longest"], ["short", "shortest"], ["stale", "stalest"], ["old", "oldest"]];
const FILTERS = ["step", "reward", "tokens", "age", "drop", "group", "task"];
const PAGE = 50;

export async function samples(root, { run, query, keys }) {
  const wanted = Object.fromEntries([...FILTERS, "sort"].map((name) => [name, query[name]]));
  const list = el("div.samples", { role: "list" });
  const state = { rows: [], offset: 0, matched: 0, chosen: Number(query.row ?? -1), run };
  const more = el("button", { type: "button", onclick: () => load() }, "Show more");
  const news = el("button.news", { type: "button", hidden: true, onclick: () => adjust({ row: null }) }, "New samples: show them");
  const [found, counts] = await Promise.all([get(`run/${run}/samples`, { ...wanted, limit: PAGE }), get(`run/${run}/counts`, wanted)]);
  fill(root, el("h1", null, "Samples"), head(found, wanted), filters(counts, wanted), news, found.rows.length ? columns() : null, list, more);
  take(found);

  async function load() {
    take(await get(`run/${run}/samples`, { ...wanted, limit: PAGE, offset: state.offset }));
  }

  function take(page) {
    state.matched = page.matched;
    state.offset = page.offset + page.rows.length;
    for (const sample of page.rows) {
      state.rows.push(sample);
      list.append(row(sample, state));
    }
    more.hidden = state.offset >= page.matched;
    if (!state.rows.length) fill(list, page.kept ? empty("No sample fits", "Take a filter away.") : empty("No samples yet", "They appear when the first group is trained or dropped."));
  }

  Object.assign(keys, {
    j: { what: "next sample", act: () => move(list, 1) },
    k: { what: "previous sample", act: () => move(list, -1) },
    n: { what: "next step", act: () => step(found, wanted, 1) },
    p: { what: "previous step", act: () => step(found, wanted, -1) },
    g: { what: "the group of the sample, side by side", act: () => open(list, (sample) => go("group", { run }, sample.group)) },
    x: { what: "the tokens of the sample", act: () => open(list, (sample) => sample.has_tokens && go("tokens", { run }, sample.row)) },
    c: { what: "no filters", act: () => go("samples", { run }) },
  });
  const kept = found.kept;
  return {
    live: ({ now }) => {
      news.hidden = now.samples <= kept;
      if (!news.hidden) news.firstChild.data = `${plural(now.samples - kept, "new sample")}: show`;
    },
  };
}

function columns() {
  return el("div.sample-head", { "aria-hidden": "true" }, ["step", "reward", "tokens", "age", "prompt and answer"].map((name) => el("span", null, name)));
}

function head(found, wanted) {
  const last = found.steps?.[1] ?? 0;
  const at = range(wanted.step)?.[0] ?? null;
  const field = el("input", { type: "number", min: 1, max: last, value: at ?? "", placeholder: "all", "aria-label": "Step", onchange: (event) => adjust({ step: event.target.value || null, row: null }) });
  return el(
    "div.tools",
    null,
    el("label", null, "Step ", el("button", { type: "button", "aria-label": "Previous step", title: "key p", onclick: () => step(found, wanted, -1) }, "‹"), field, el("button", { type: "button", "aria-label": "Next step", title: "key n", onclick: () => step(found, wanted, 1) }, "›")),
    el("label", null, "Order ", el("select", { onchange: (event) => adjust({ sort: event.target.value, row: null }) }, SORTS.map(([value, name]) => el("option", { value, selected: (wanted.sort ?? "new") === value }, name)))),
    el("span.muted", null, `${count(found.matched)} of ${plural(found.kept, "kept sample")}`),
    FILTERS.filter((name) => wanted[name]).map((name) => el("button.chip", { type: "button", title: "Take this filter away", onclick: () => adjust({ [name]: null, row: null }) }, `${NAMES[name] ?? name} ${shown(wanted[name])} ✕`)),
  );
}

const NAMES = { tokens: "length", age: "staleness", drop: "dropped:" };

function shown(text) {
  const pair = text.includes("..") ? range(text) : null;
  if (!pair || pair.some(Number.isNaN)) return text;
  return pair.map((one) => (Number.isFinite(one) ? String(Number(one.toPrecision(3))) : "")).join("–");
}

function step({ steps }, wanted, by) {
  if (!steps) return;
  const from = range(wanted.step)?.[0] ?? (by > 0 ? steps[0] - 1 : steps[1] + 1);
  adjust({ step: Math.max(steps[0], Math.min(steps[1], from + by)), row: null });
}

function filters(counts, wanted) {
  const one = (title, name) => histogram(title, counts[name], range(wanted[name]), (pair) => adjust({ [name]: rangeText(pair), row: null }), name !== "reward");
  const total = counts.drop.reduce((sum, { count: amount }) => sum + amount, 0);
  const reasons = counts.drop.map(({ name, count: amount }) => {
    const value = name || "none";
    return el("button.reason", { type: "button", "aria-pressed": String(wanted.drop === value), onclick: () => adjust({ drop: wanted.drop === value ? null : value, row: null }) }, el("span", null, name ? `dropped: ${name}` : "trained"), el("b", null, count(amount)), el("i", { style: { width: `${(100 * amount) / Math.max(1, total)}%` } }));
  });
  return el("div.filters", null, one("Reward", "reward"), one("Length in tokens", "tokens"), one("Staleness", "age"), el("figure.histogram", null, el("figcaption", null, "What became of them"), reasons));
}

function row(sample, state) {
  const line = el(
    "button.sample",
    { type: "button", "aria-expanded": "false", onclick: () => toggle(item, sample, state.run) },
    el("span.fate", { title: "step" }, fate(sample)),
    reward(sample.reward),
    el("span.size", { title: "tokens" }, count(sample.tokens)),
    el("span.age", { title: "staleness: updates behind, of its oldest token" }, sample.age < 0 ? "–" : count(sample.age)),
    el("span.words", null, el("span.prompt", null, flat(sample.prompt)), " ", el("span.answer", null, flat(sample.answer))),
  );
  const item = el("div.item", { role: "listitem", "data-row": sample.row }, line);
  item.sample = sample;
  if (sample.row === state.chosen) toggle(item, sample, state.run);
  return item;
}

function flat(text) {
  return text.replace(/\s+/g, " ");
}

async function toggle(item, sample, run) {
  const line = item.firstChild;
  if (item.children.length > 1) {
    item.lastChild.remove();
    line.setAttribute("aria-expanded", "false");
    return;
  }
  const body = el("div.opened");
  item.append(body);
  line.setAttribute("aria-expanded", "true");
  const whole = await get(`run/${run}/sample/${sample.row}`);
  fill(body, el("div.texts", null, texts(whole)), el("aside", null, facts(whole), ways(whole, run)));
}

function move(list, by) {
  const lines = [...list.querySelectorAll("button.sample")];
  const at = lines.indexOf(document.activeElement);
  const next = lines[Math.max(0, Math.min(lines.length - 1, at + by))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

function open(list, act) {
  const item = document.activeElement?.closest?.(".item") ?? list.querySelector(".item");
  if (item?.sample) act(item.sample);
}
