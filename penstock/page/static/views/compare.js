// The view Compare shows what differs in configs, curves over one axis, and answers to the same prompt.

import { get } from "../api.js";
import { asLine, Chart, lineColor } from "../chart.js";
import { choice, el, empty, fill, section, table } from "../dom.js";
import { number, versions } from "../format.js";
import { address, adjust } from "../router.js";
import { answer, reward, text } from "../sample_parts.js";

export async function compare(root, { runs, query }) {
  fill(root, el("h1", null, "Compare"));
  if (runs.length < 2) {
    root.append(empty("One run is shown", "Name several to compare them: penstock view RUN RUN2"));
    return {};
  }
  const names = (query.names ?? "reward,kl,staleness_mean").split(",");
  const ask = () => get("compare", { x: query.x, names: names.join(",") });
  const found = await ask();
  const charts = new Map();
  const head = el("div");
  root.append(head, curves(found, names, charts), differences(found), answers(query));
  show(found);
  const pace = paced(async () => show(await ask()));
  return { wantsAll: true, live: pace.ask, close: () => { pace.stop(); charts.forEach((chart) => chart.close()); } };

  function show(what) {
    fill(head, legend(what));
    for (const [name, chart] of charts) chart.show(what.curves[name].map((columns, at) => columns && { ...asLine(columns, "", at), low: null, high: null }).filter(Boolean));
  }
}

/** Does the work at most once every `pause` milliseconds, and once more if it was asked for meanwhile. */
function paced(work, pause = 1000) {
  let isBusy = false;
  let isWanted = false;
  let timer = null;
  return { ask, stop: () => { isBusy = true; clearTimeout(timer); } };

  async function ask() {
    isWanted = true;
    if (isBusy) return;
    [isBusy, isWanted] = [true, false];
    timer = setTimeout(() => { isBusy = false; if (isWanted) ask(); }, pause);
    await work().catch(() => {}); // the header shows that the server does not answer, and the next message tries again
  }
}

function legend({ runs, heldout }) {
  const last = (points) => (points.length ? `, held-out ${number(points[0][1])} → ${number(points[points.length - 1][1])}` : "");
  return el("p.legend", null, runs.map((name, at) => el("span", null, el("i.swatch", { style: { background: lineColor(at) } }), el("b", null, name), last(heldout[at]))));
}

function curves(found, names, charts) {
  const shown = names.filter((name) => found.curves[name]?.some(Boolean));
  const nodes = shown.map((name) => {
    const chart = new Chart(name, { axis: found.x, height: 200 });
    chart.node.chart = chart;
    charts.set(name, chart);
    return chart.node;
  });
  const more = el("select", { "aria-label": "Add a metric", onchange: (event) => adjust({ names: [...names, event.target.value].join(",") }) }, el("option", { value: "" }, "Add a metric …"), found.names.filter((name) => !names.includes(name)).map((name) => el("option", { value: name }, name)));
  const axis = choice("Over", [["step", "steps"], ["time", "time"], ["tokens", "tokens"]], found.x, (x) => adjust({ x }));
  return section("Curves", null, el("div.tools", null, axis, more), el("div.charts", null, nodes));
}

function differences({ runs, differences: list }) {
  if (!list.length) return section("Config", "The runs have the same settings.");
  const head = [{ name: "setting" }, ...runs.map((name) => ({ name }))];
  const cell = (value) => el("code", null, value === null || value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));
  return section("Config", "Settings that differ.", table(head, list.map(([key, values]) => [key, ...values.map(cell)]), "Settings that differ"));
}

function answers(query) {
  const body = el("div");
  const options = el("datalist", { id: "tasks" });
  const field = el("input", { type: "search", list: "tasks", placeholder: "Task that all runs answered", "aria-label": "Task", value: query.task ?? "", oninput: () => find(), onchange: () => adjust({ task: field.value }) });
  find();
  if (query.task) show();
  return section("The same prompt", "The newest answers of each run to one task.", el("div.tools", null, field, options), body);

  async function find() {
    const { tasks, total } = await get("tasks", { find: field.value });
    fill(options, tasks.map((task) => el("option", { value: task })));
    if (!query.task) fill(body, total ? el("p.ways", null, tasks.slice(0, 12).map((task) => el("a", { href: address("compare", { ...query, task }) }, task))) : empty("No task was answered by all of them"));
  }

  async function show() {
    const { runs } = await get("answers", { task: query.task });
    const column = ({ name, samples }) => el("article.attempt", null, el("header", null, el("h3", null, name)), samples.length ? samples.map((sample) => [el("p", null, reward(sample.reward), ` step ${sample.step ?? "–"}, ${versions(sample.oldest, sample.newest)}`), answer(sample)]) : el("p.muted", null, "no answer is kept"));
    const prompt = runs.flatMap(({ samples }) => samples)[0]?.prompt ?? "";
    fill(body, text("Prompt", prompt), el("div.attempts", null, runs.map(column)));
  }
}
