// The view Findings begins a report: what was trained, warnings with their reasons, and answers worth a look.

import { get } from "../api.js";
import { el, empty, fill, link, section } from "../dom.js";
import { exported } from "../exported.js";
import { count, number, percent, plural } from "../format.js";
import { address } from "../router.js";
import { facts, texts, ways } from "../sample_parts.js";

export async function findings(root, { run, runs }) {
  const found = await get(`run/${run}/findings`);
  const samples = new Map(exported.samples.rows.map((sample) => [sample.row, sample]));
  fill(
    root,
    el("h1", null, runs[run].name),
    el("p.note", null, `${found.made} · report by ${exported.written}`),
    el("p.limit", null, found.lead),
    el("div.figures", null, found.facts.map(([name, value]) => el("div.figure", null, el("span", null, name), el("b", null, value)))),
    section("Warnings", null, found.warnings.length ? found.warnings.map(warning) : empty("None of the rules that a report knows applies")),
    section("Where the time went", found.limit, exported.time.processes.length ? el("dl.sheet", null, exported.time.processes.map(shares)) : empty("The run has not trained yet")),
    found.trained.length ? section("What was trained", null, el("dl.sheet", null, found.trained.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))))) : null,
    found.answers.map(([title, chosen]) => section(`${title} answers`, null, chosen.length ? chosen.map((one) => answer(samples.get(one.row), one.why, run)) : empty("None yet"))),
    section("Engine and trainer", null, widest(found.widest, run)),
    el("p.note", null, `This file has ${count(samples.size)} of ${plural(exported.samples.kept, "answer")} that the run kept, and the tokens of ${count(Object.keys(exported.tokens).length)}. penstock view shows all.`),
  );
  return {};
}

function warning({ what, why, fix }) {
  return el("div.warning", null, el("b", null, what), `: ${why}.`, el("p.note", null, fix));
}

function shares({ process, total_s, parts, sums }) {
  const sorted = [...parts].sort((a, b) => b[1] - a[1]).filter(([, seconds]) => seconds > 0.005 * total_s);
  return el("div", null, el("dt", null, process), el("dd", null, `${sums.map(([sum, share]) => `${sum} ${percent(share)}`).join(", ")}: `, sorted.map(([part, seconds]) => `${part} ${percent(seconds / total_s)}`).join(", ")));
}

function answer(sample, why, run) {
  if (!sample) return el("p.note", null, `${why}: this answer is not in the file.`);
  return el("div.item", null, el("p", null, el("b", null, why), `, ${sample.drop ? `dropped as ${sample.drop}` : `step ${sample.step}`}`), el("div.opened", null, el("div.texts", null, texts(sample)), el("aside", null, facts(sample), ways(sample, run))));
}

function widest(found, run) {
  if (!found) return el("p.note", null, "No tokens were kept.");
  const words = `Of the last answers whose tokens are kept, the one on which engine and trainer differ most is of step ${count(found.step)}, group ${found.group}: ${number(found.gap)} nats.`;
  const isHere = found.row !== null && found.row in exported.tokens;
  return el("p", null, words, " ", isHere && link(address("tokens", { run, by: "gap", at: "worst" }, found.row), "Its tokens"));
}
