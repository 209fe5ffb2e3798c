// Makes the parts of a sample that several views show.

import { el, link } from "./dom.js";
import { count, number, signed, versions } from "./format.js";
import { address } from "./router.js";

/** Shows a reward as a number and a small bar between the lowest and the highest in sight. */
export function reward(value, low = 0, high = 1) {
  const share = value === null ? 0 : (value - Math.min(0, low)) / Math.max(1e-9, Math.max(1, high) - Math.min(0, low));
  return el("span.reward", null, el("i", { style: { width: `${100 * Math.max(0, Math.min(1, share))}%` } }), el("b", null, number(value)));
}

export function fate(sample) {
  if (sample.drop) return el("span.tag.bad", { title: "dropped: never trained" }, sample.drop);
  if (sample.failure) return el("span.tag.warn", { title: sample.message }, sample.failure);
  return sample.step === null ? "–" : count(sample.step);
}

export function facts(sample) {
  const rows = [
    ["reward", number(sample.reward)],
    ...Object.entries(sample.parts).map(([name, value]) => [name, number(value), "part"]),
    ["advantage", sample.advantage === null ? "–" : signed(sample.advantage)],
    ["tokens", `${count(sample.tokens)}${sample.finish ? `, ${sample.finish}` : ""}`],
    ["age", sample.age < 0 ? "–" : count(sample.age)],
    ["weights", versions(sample.oldest, sample.newest)],
    ...(sample.turns > 1 ? [["turns", count(sample.turns)]] : []),
    ["task", sample.task],
  ];
  return el("dl.sheet", null, rows.map(([name, value, kind]) => el(kind ? `div.${kind}` : "div", null, el("dt", null, name), el("dd", null, value))));
}

export function text(label, value, kept = true, kind = "text") {
  const body = kept ? el("pre", null, value === "" ? el("em", null, "empty") : value) : el("p.note", null, "This text is no longer kept (observe.samples_mb).");
  return el(`div.${kind}`, null, el("h3", null, label), body);
}

export function texts(sample) {
  return [text("Prompt", sample.prompt, sample.text_kept), answer(sample)];
}

/** Shows what was answered, turn by turn where there are several, and the message of a failure. */
export function answer(sample) {
  const turns = sample.transcript.map((one) => text(one.label, one.text, true, one.is_read ? "text.read" : "text"));
  return [...(turns.length ? turns : [text("Answer", sample.answer, sample.text_kept)]), sample.message && text(sample.failure ?? "Message", sample.message), ...Object.entries(sample.extra).map(([name, value]) => text(name, value))];
}

export function ways(sample, run) {
  return el(
    "p.ways",
    null,
    sample.has_tokens ? link(address("tokens", { run }, sample.row), "Tokens") : el("span.muted", { title: "A run keeps the tokens of some answers of every step (observe.tokens_mb)" }, "Tokens not kept"),
    link(address("group", { run }, sample.group), "Group side by side"),
    sample.step !== null && link(address("samples", { run, step: sample.step }), `Step ${sample.step}`),
  );
}
