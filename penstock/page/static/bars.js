// Draws histograms as rows of buttons: a bar opens what it counts.

import { el } from "./dom.js";
import { count, number } from "./format.js";

/** Draws bars: [{label, value, title, chosen, pick, parts: [[value, class]]}]. */
export function bars(name, list, { height = 72 } = {}) {
  const top = Math.max(1e-12, ...list.map((bar) => bar.value));
  const column = (bar) => {
    const parts = bar.parts ?? [[bar.value, "main"]];
    const stack = parts.map(([value, kind]) => el(`i.${kind}`, { style: { height: `${(value / top) * height}px` } }));
    const attributes = { title: bar.title, "aria-label": bar.title, "aria-pressed": bar.pick ? String(Boolean(bar.chosen)) : null };
    return bar.pick
      ? el("button.bar", { type: "button", ...attributes, onclick: bar.pick }, stack)
      : el("span.bar", { role: "img", ...attributes }, stack);
  };
  return el("div.bars", { role: "group", "aria-label": name, style: { height: `${height}px` } }, list.map(column));
}

/** Draws numpy's edges and counts; a chosen bar calls `pick([low, high])`. A bar of `whole` numbers ends before its edge. */
export function histogram(name, { edges, counts }, range, pick, whole = false) {
  const last = counts.length - 1;
  const end = (at) => (whole ? edges[at + 1] - 1 : edges[at + 1]);
  const list = counts.map((value, at) => {
    const low = edges[at];
    const high = whole || at === last ? end(at) : edges[at + 1] - 1e-9 * Math.max(1, Math.abs(edges[at + 1]));
    const chosen = range && low >= range[0] - 1e-9 && high <= range[1] + 1e-9;
    const label = low === end(at) ? number(low) : `${number(low)} to ${number(end(at))}`;
    return { value, chosen, title: `${label}: ${count(value)}`, pick: () => (chosen ? pick(null) : pick([low, high])) };
  });
  return el(
    "figure.histogram",
    null,
    el("figcaption", null, name),
    bars(name, list, { height: 48 }),
    el("div.axis", null, el("span", null, number(edges[0] ?? 0)), el("span", null, number(counts.length ? end(last) : 0))),
  );
}

export function range(text) {
  if (!text) return null;
  const [low, high] = text.includes("..") ? text.split("..") : [text, text];
  return [low === "" ? -Infinity : Number(low), high === "" ? Infinity : Number(high)];
}

export function rangeText(pair) {
  return pair === null ? null : `${Number(pair[0].toPrecision(12))}..${Number(pair[1].toPrecision(12))}`;
}
