// Holds the charts of one view: loaded when they come into sight, and lengthened as steps arrive.

import { get } from "./api.js";
import { asDots, asLine, Chart } from "./chart.js";

const REFRESH_POINTS = 1500;
/** Above this number of points, the server is asked for a thinned curve again. */

export class ChartSet {
  constructor(run, axis = "step") {
    this.run = run;
    this.axis = axis;
    this.charts = new Map();
    this.waiting = new Set();
    this.seen = new IntersectionObserver((entries) => this.look(entries), { rootMargin: "200px" });
    this.sizes = new ResizeObserver((entries) => entries.forEach((entry) => entry.target.chart?.resize()));
  }

  /** Adds a chart of one metric, empty until it is in sight. */
  add(name, title = name, options = {}) {
    const chart = new Chart(title, { axis: this.axis, ...options });
    chart.metric = name;
    chart.columns = null;
    chart.inSight = false;
    chart.node.chart = chart;
    this.charts.set(chart.node, chart);
    this.seen.observe(chart.node);
    this.sizes.observe(chart.node);
    return chart.node;
  }

  /** Adds a chart of the evaluations that every message brings; it is hidden until there is one. */
  addEvaluations(title, now) {
    const node = this.add(null, title);
    this.place(node.chart, now);
    return node;
  }

  place(chart, { evaluations }) {
    chart.points = asDots(evaluations);
    chart.node.hidden = !evaluations.length;
  }

  look(entries) {
    for (const entry of entries) {
      const chart = this.charts.get(entry.target);
      if (!chart) continue;
      chart.inSight = entry.isIntersecting;
      if (chart.inSight && !chart.columns && !chart.points) this.waiting.add(chart);
      else if (chart.inSight) this.draw(chart);
    }
    if (this.waiting.size) this.load();
  }

  /** Sends one request for all charts that came into sight together. */
  async load() {
    const charts = [...this.waiting];
    this.waiting.clear();
    const names = [...new Set(charts.map((chart) => chart.metric))];
    const found = await get(`run/${this.run}/curves`, { names: names.join(","), x: this.axis, buckets: 500 });
    for (const chart of charts) {
      chart.columns = found.curves[chart.metric] ?? [[], [], [], []];
      chart.last = found.last;
      this.draw(chart);
    }
    performance.mark("penstock-charts-drawn");
  }

  draw(chart) {
    chart.show([chart.points ?? asLine(chart.columns)]);
  }

  /** Adds new steps of the stream. A message without rows makes it request the curves again. */
  live({ rows, now }) {
    for (const chart of this.charts.values()) {
      if (chart.points) {
        this.place(chart, now);
        if (chart.inSight) this.draw(chart);
        continue;
      }
      if (!chart.columns) continue;
      if (!rows || this.axis === "tokens" || chart.columns[0].length > REFRESH_POINTS) {
        if (now.last === chart.last) continue;
        chart.columns = null;
        if (chart.inSight) this.waiting.add(chart);
        continue;
      }
      append(chart, rows, this.axis);
      if (chart.inSight) this.draw(chart);
    }
    if (this.waiting.size) this.load();
  }

  close() {
    this.seen.disconnect();
    this.sizes.disconnect();
    for (const chart of this.charts.values()) chart.close();
    this.charts.clear();
  }
}

function append(chart, rows, axis) {
  const values = rows.values[chart.metric];
  if (!values) return;
  rows.steps.forEach((step, at) => {
    if (step <= chart.last) return;
    const x = axis === "step" ? step : rows.times[at];
    const value = values[at];
    chart.columns[0].push(x);
    for (const column of chart.columns.slice(1)) column.push(value);
    chart.last = step;
  });
}
