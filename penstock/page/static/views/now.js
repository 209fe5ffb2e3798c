// The view Now shows how far, how well, how stale, where the groups are, and one sentence on what limits the run.

import { get } from "../api.js";
import { ChartSet } from "../chart_set.js";
import { el, fill, section } from "../dom.js";
import { count, duration, lastSteps, number, percent, versions } from "../format.js";

const CURVES = [["reward", "Reward of each step"], ["staleness_mean", "Staleness, mean"], ["entropy", "Entropy"], ["kl", "KL to the policy that sampled"], ["answer_tokens_mean", "Answer length, tokens"], ["tokens_per_s", "Tokens a second"]];

export async function now(root, { run }) {
  const [found, known, said] = await Promise.all([get(`run/${run}/now`), get(`run/${run}/metrics`), get(`run/${run}/lines`)]);
  const charts = new ChartSet(run);
  const [top, groups] = [el("div"), el("div")];
  const shown = CURVES.filter(([name]) => known.names.includes(name));
  const [reward, ...others] = shown.map(([name, title]) => charts.add(name, title));
  fill(root, el("h1", null, "Now"), top, el("div.charts", null, reward, charts.addEvaluations("Held-out reward", found)), groups, el("div.charts", null, others), log(said.lines));
  show(found);
  return {
    live: (message) => {
      show(message.now);
      charts.live(message);
    },
    close: () => charts.close(),
  };

  function show(found) {
    const status = found.status;
    const isRunning = found.ended === "";
    fill(top, sentence(found), figures(found));
    fill(groups, isRunning && flow(status, found.trained_groups), isRunning && processes(status), last(status));
  }
}

function sentence({ status, ended, is_running }) {
  const limit = status.bottleneck;
  if (ended === "died") return el("p.limit.lost", null, el("b", null, "The run has died: "), `no controller holds its folder, and no end was written. It was at step ${status.step}; penstock resume continues from its last checkpoint.`);
  if (!is_running) return el("p.limit", null, el("b", null, "The run has ended. "), `It took ${duration(status.elapsed_s)} for ${count(status.step)} steps.`);
  if (!limit) return el("p.limit", null, el("b", null, `${status.phase}. `), status.phase === "training" ? "What limits the run is known after a few steps." : "");
  return el("p.limit", null, el("b", null, `Limited by ${limit.who}: `), `${limit.why}.`);
}

function figures(found) {
  const { status, ended } = found;
  const heldout = status.heldout;
  const change = heldout.length > 1 ? `${number(heldout[0][1])} at step ${heldout[0][0]}` : "";
  const lost = Object.values(status.drops).reduce((sum, one) => sum + one, 0);
  return el(
    "div.figures",
    null,
    figure("Step", `${count(status.step)}`, `of ${count(status.steps)}`, status.step / Math.max(1, status.steps)),
    figure(ended === "" ? "To go" : "Took", ended === "" ? duration(status.left_s) : duration(status.elapsed_s), ended === "" ? `${duration(status.elapsed_s)} so far` : ""),
    figure(`Reward, ${lastSteps(found)}`, number(status.reward), status.first_reward === null ? "" : `${number(status.first_reward)} at first`),
    figure("Held-out", heldout.length ? number(heldout[heldout.length - 1][1]) : "–", change),
    figure("Staleness", number(status.staleness_mean), status.staleness_bound === null ? "" : `bound ${status.staleness_bound}, max ${number(status.staleness_max)} so far`, status.staleness_bound ? status.staleness_mean / status.staleness_bound : null),
    figure("Dropped", count(lost), lost ? Object.entries(status.drops).map(([reason, amount]) => `${count(amount)} ${reason}`).join(", ") : "no group"),
  );
}

function figure(name, value, note, share = null) {
  return el("div.figure", null, el("span", null, name), el("b", null, value), el("small", null, note || "\u00a0"), share !== null && el("i.meter", null, el("i", { style: { width: `${100 * Math.min(1, share)}%` } })));
}

/** Draws groups on their way: open > running > scoring > ready > trained. */
function flow(status, trained) {
  const way = status.flow;
  if (!way) return null;
  const open = way.open ?? way.generating + way.scoring + way.ready;
  const stages = [["open", open, `of at most ${count(way.limit)}`], ["running", way.generating, "being generated"], ["scoring", way.scoring, "rewards under way"], ["ready", way.ready, "wait for their step"], ["trained", trained, `${count(status.samples)} samples`]];
  return section("Groups", null, el("ol.flow", null, stages.map(([name, amount, note]) => el("li", null, el("span", null, name), el("b", null, count(amount)), el("small", null, note)))));
}

function processes(status) {
  if (!status.processes.length) return null;
  const row = (one) => el("div.process", null, el("b", null, one.name), el("i.meter", null, el("i", { style: { width: `${100 * one.busy}%` } })), el("span.share", null, percent(one.busy)), el("span.muted", null, one.doing));
  return section("Processes", "How much of the last moments each one worked, and what it does.", status.processes.map(row));
}

function last(status) {
  const sample = status.last_sample;
  if (!sample) return null;
  return section("Last answer", `Reward ${number(sample.reward)}, ${versions(sample.oldest_version, sample.newest_version)}`, el("pre.last", null, sample.text));
}

function log(lines) {
  if (!lines.length) return null;
  return section("What the run said", null, el("ol.log", null, lines.slice(-60).reverse().map(({ time, line }) => el("li", null, el("time", null, duration(time)), el("span", null, line)))));
}
