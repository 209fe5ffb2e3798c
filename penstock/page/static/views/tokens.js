// The view Tokens shows one answer, each token coloured by what is known of it.

import { get } from "../api.js";
import { choice, el, empty, fill, link, section, table, visible } from "../dom.js";
import { count, number, plural, versions } from "../format.js";
import { adjust, address } from "../router.js";
import { MODES } from "../token_colors.js";
import { TokenText } from "../token_text.js";

const LISTED = 300;
/** Most tokens of an answer that also gets a table. */

export async function tokens(root, context) {
  if (context.thing === null) return chooseOne(root, context);
  const { run, query, keys } = context;
  const found = await get(`run/${run}/tokens/${Number(context.thing)}`);
  const trace = found.traces[Math.min(Number(query.part ?? 0), found.traces.length - 1)];
  const begun = performance.now();
  const text = new TokenText(trace);
  const state = { mode: MODES[query.by] ? query.by : "version", chosen: null, worst: worstFirst(trace), rank: -1 };
  const tools = el("div.tools");
  const scale = el("div.scale", { "aria-label": "Scale" });
  const detail = el("div.token-detail", { role: "status" });
  fill(root, el("h1", null, "Tokens"), title(found.sample, trace, run), parts(found, query), tools, scale, detail, text.node, trace.texts.length <= LISTED ? list(trace) : null);

  function paint(mode) {
    const begun = performance.now();
    state.mode = mode;
    fill(tools, choice("Colour by", Object.entries(MODES).map(([name, { label, key }]) => [name, label, `key ${key}`]), mode, paint), el("button", { type: "button", title: "key w", disabled: !state.worst.length, onclick: () => jump(1) }, "Worst token"));
    const { of, scale: steps } = MODES[mode].make(trace);
    text.paint(of, (at) => !trace.mask[at]);
    text.mark(state.chosen);
    fill(scale, steps.map(([label, name]) => el("span", null, el(`i.${name ? `k-${name}` : "none"}`), label)), el("span", null, el("i.dimmed"), "not in the loss"));
    show(state.chosen);
    performance.measure("penstock-recolour", { start: begun, end: performance.now() });
  }

  function show(at) {
    state.chosen = at;
    text.mark(at);
    fill(detail, at === null ? el("span.muted", null, "Point at a token, or press w for the one on which engine and trainer differ most.") : describe(trace, at));
  }

  function jump(by) {
    if (!state.worst.length) return;
    state.rank = (state.rank + by + state.worst.length) % state.worst.length;
    show(state.worst[state.rank]);
    text.scrollTo(state.chosen);
  }

  function step(by) {
    show(Math.max(0, Math.min(trace.texts.length - 1, (state.chosen ?? -1) + by)));
  }

  let asked = false;
  text.node.addEventListener("pointermove", (event) => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      const at = text.at(event.clientX, event.clientY);
      if (at !== null) show(at);
    });
  });
  for (const [name, { label, key }] of Object.entries(MODES)) keys[key] = { what: `colour by ${label.toLowerCase()}`, act: () => paint(name) };
  keys.w = { what: "worst token, then the next worst", act: () => jump(1) };
  keys.W = { what: "the one before", act: () => jump(-1) };
  keys.ArrowRight = { what: "next token", act: () => step(1) };
  keys.ArrowLeft = { what: "previous token", act: () => step(-1) };
  paint(state.mode);
  if (query.at === "worst") jump(1);
  performance.measure("penstock-tokens", { start: begun, end: performance.now() });
  return { close: () => text.close() };
}

/** Makes a table of all numbers of a short answer. */
function list(trace) {
  const modes = Object.values(MODES);
  const head = [{ name: "token", kind: "number" }, { name: "text" }, ...modes.map(({ label }) => ({ name: label.toLowerCase(), kind: "number" })), { name: "age", kind: "number" }, { name: "in the loss" }];
  const rows = trace.texts.map((piece, at) => [count(at), el("code", null, JSON.stringify(visible(piece))), ...modes.map(({ show }) => show(trace, at)), trace.ages[at] < 0 ? "–" : count(trace.ages[at]), trace.mask[at] ? "yes" : "no"]);
  return section("Token by token", null, table(head, rows, "Token by token"));
}

function worstFirst(trace) {
  const known = trace.gap.map((value, at) => [value === null ? -1 : Math.abs(value), at]).filter(([size]) => size >= 0);
  return known.sort((a, b) => b[0] - a[0]).slice(0, 50).map(([, at]) => at);
}

function title(sample, trace, run) {
  const inLoss = trace.mask.reduce((sum, one) => sum + one, 0);
  const sampled = trace.versions.filter((version) => version >= 0);
  const first = sampled.length ? Math.min(...new Set(sampled)) : null;
  const last = sampled.length ? Math.max(...new Set(sampled)) : null;
  return el("p.note", null, `${plural(trace.texts.length, "token")}, ${count(inLoss)} in the loss, ${versions(first, last)}, reward ${number(sample.reward)}, `, link(address("group", { run }, sample.group), `group ${sample.group}`), `, attempt ${sample.episode}, step ${sample.step}.`);
}

function parts(found, query) {
  if (found.traces.length < 2) return null;
  return choice("Sample", found.traces.map((_, at) => [String(at), `part ${at + 1}`]), query.part ?? "0", (part) => adjust({ part }));
}

function describe(trace, at) {
  const rows = [
    ["token", `${count(at)} of ${count(trace.texts.length)}`],
    ["text", el("code", null, JSON.stringify(visible(trace.texts[at])))],
    ["id", String(trace.ids[at])],
    ...Object.values(MODES).map(({ label, show }) => [label.toLowerCase(), show(trace, at)]),
    ["weight", number(trace.weight[at])],
    ["in the loss", trace.mask[at] ? "yes" : "no"],
  ];
  return el("dl.sheet.wide", null, rows.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))));
}

async function chooseOne(root, { run }) {
  const { rows } = await get(`run/${run}/traced`);
  const list = rows.map((sample) => el("a.sample", { href: address("tokens", { run }, sample.row) }, el("span.fate", null, count(sample.step)), el("span.size", null, number(sample.reward)), el("span.size", null, `${count(sample.tokens)} tok`), el("span.words", null, sample.prompt, " ", el("span.answer", null, sample.answer))));
  fill(
    root,
    el("h1", null, "Tokens"),
    el("p.note", null, "Choose an answer: each of its tokens is coloured by the weights that sampled it, by its logprobs in engine and trainer, or by what the loss made of it."),
    list.length ? el("div.samples", null, list) : empty("No tokens are kept yet", "A run keeps those of some answers of every step, as observe.tokens_mb allows."),
  );
  return {};
}
