// The view Time shows each process's seconds by what it did; its parts add up to the whole.

import { get } from "../api.js";
import { el, empty, fill, section, table } from "../dom.js";
import { count, duration, number, percent } from "../format.js";

export async function time(root, { run }) {
  const body = el("div");
  fill(root, el("h1", null, "Where time went"), el("p.note", null, "Of the time in which the run trained. Work is what a process is there for: forward, backward and optimizer of the trainer, forward passes of an engine. Sync is giving or taking weights. The rest of a step is packing, metrics and records. Waits are hatched, and named by their cause."), body);
  await show();

  async function show() {
    const { processes, cost } = await get(`run/${run}/time`);
    if (!processes.length) return fill(body, empty("Nothing measured yet", "Times appear when training begins."));
    fill(body, processes.map(process), section("All of it", null, sheet(processes)), section("Cost", null, costs(cost)));
  }

  let last = performance.now();
  return {
    live: () => {
      if (performance.now() - last < 2000) return;
      last = performance.now();
      show();
    },
  };
}

const KINDS = { work: "work", sync: "sync", "rest of the step": "other", "between steps": "between", "between passes": "between" };
/** Smallest share of time that is shown. */
const LEAST = 0.005;

/** Gives waits hatches in order of appearance, and everything else its own colour. */
function painted(parts) {
  let waits = 0;
  return new Map(parts.map(([part]) => [part, KINDS[part] ?? `wait-${waits++ % 5}`]));
}

function process({ process: name, total_s, parts, sums }) {
  const shown = parts.filter(([, seconds]) => seconds >= LEAST * total_s);
  const hues = painted(shown);
  const kinds = (part) => hues.get(part);
  const shares = shown.map(([part, seconds]) => el(`i.${kinds(part)}`, { style: { flexGrow: String(seconds) }, title: `${part}: ${duration(seconds)}, ${percent(seconds / total_s, 1)}` }));
  const words = shown.map(([part, seconds]) => el("span", null, el(`i.swatch.${kinds(part)}`), part, " ", el("b", null, percent(seconds / total_s))));
  return el("div.spent", null, el("h2", null, name, " ", el("small", null, [duration(total_s), ...sums.map(([sum, share]) => `${sum} ${percent(share)}`)].join(", "))), el("div.shares", { role: "img", "aria-label": shown.map(([part, seconds]) => `${part} ${percent(seconds / total_s)}`).join(", ") }, shares), el("div.legend", null, words));
}

function sheet(processes) {
  const head = [{ name: "process" }, { name: "part" }, { name: "time", kind: "number" }, { name: "share", kind: "number" }];
  const rows = processes.flatMap(({ process: name, total_s, parts }) => [
    ...parts.map(([part, seconds], at) => [at ? "" : el("b", null, name), part, duration(seconds), percent(seconds / total_s, 1)]),
    ["", "sum", duration(parts.reduce((sum, [, seconds]) => sum + seconds, 0)), percent(parts.reduce((sum, [, seconds]) => sum + seconds, 0) / total_s, 1)],
  ]);
  return table(head, rows, "Time by process and part");
}

function costs(cost) {
  const rows = [
    ["GPUs", cost.num_gpus ? count(cost.num_gpus) : "none: the run used CPUs"],
    ["GPU-hours", number(cost.gpu_hours)],
    ["tokens generated", count(cost.tokens)],
    ["of them while training", count(cost.tokens_training)],
    ["tokens per GPU-hour", cost.num_gpus ? count(cost.tokens_per_gpu_hour) : "–"],
    ["price", cost.price === null || cost.price === undefined ? "not set" : number(cost.price)],
  ];
  return el("dl.sheet", null, rows.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))));
}
