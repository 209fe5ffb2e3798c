// Looks up answers that came with the page: a report is one file and asks no server.

import { range } from "./bars.js";

const data = document.getElementById("answers");
export const exported = data && JSON.parse(data.textContent);

const SHOWN_PROMPT = 200;
const SHOWN_ANSWER = 320;
const ORDERS = { new: ["row", -1], old: ["row", 1], best: ["reward", -1], worst: ["reward", 1], long: ["tokens", -1], short: ["tokens", 1], stale: ["age", -1] };

/** Returns what the server would have answered, or undefined. */
export function keptAnswer(path, query) {
  const [name, thing] = path.replace(/^run\/0\//, "").split("/");
  const number = Number(thing);
  const rows = exported.samples.rows;
  if (name === "sample") return rows.find((sample) => sample.row === number);
  if (name === "tokens") return exported.tokens[thing];
  if (name === "group") return group(rows.filter((sample) => sample.group === number), number);
  if (name === "traced") return { rows: rows.filter((sample) => sample.row in exported.tokens).reverse().map(short) };
  if (name === "samples") return samples(query);
  if (name === "curves") return { x: query.x, last: exported.last, curves: exported.curves[query.x] };
  if (name === "drops" && query.reason) return drops(query.reason);
  return exported[name];
}

function short(sample) {
  return { ...sample, prompt: sample.prompt.slice(-SHOWN_PROMPT), answer: sample.answer.slice(0, SHOWN_ANSWER) };
}

function group(samples, number) {
  return samples.length ? { group: number, samples, count: samples.length } : undefined;
}

function samples(query) {
  const spans = ["step", "reward", "tokens", "age"].map((name) => [name, range(query[name])]).filter(([, span]) => span);
  const words = ["drop", "group", "task"].filter((name) => query[name]);
  const found = exported.samples.rows.filter((sample) => spans.every(([name, [low, high]]) => sample[name] !== null && sample[name] >= low && sample[name] <= high) && words.every((name) => String(sample[name] || "none") === query[name]));
  const [column, sign] = ORDERS[query.sort ?? "new"];
  found.sort((a, b) => sign * ((a[column] ?? 0) - (b[column] ?? 0)) || b.row - a.row);
  return { ...exported.samples, matched: found.length, offset: 0, rows: found.map(short) };
}

function drops(reason) {
  const rows = exported.drops.rows.filter((row) => row.reason === reason);
  return { ...exported.drops, rows, matched: rows.length };
}
