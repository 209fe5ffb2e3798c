// Draws curves with uPlot: a mean and the band between the lowest and the highest value, as far as they are in sight.

import { el } from "./dom.js";
import { count, duration, number } from "./format.js";

const HUES = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6"];

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function lineColor(at) {
  return color(HUES[at % HUES.length]);
}

function faint(line) {
  return `color-mix(in srgb, ${line} 16%, transparent)`;
}

/** Distances between ticks at whole numbers. */
const WHOLE = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((one) => one * 10 ** power)).flat();
const SHOW_X = { step: count, time: duration, tokens: (value) => count(value) };

/** Holds one curve for each run or each name. `data`: [[x], [y], …] as uPlot takes it. */
export class Chart {
  constructor(title, { height = 150, axis = "step", marks = null } = {}) {
    this.title = title;
    this.height = height;
    this.axis = axis;
    this.marks = marks;
    this.readout = el("output");
    this.name = el("figcaption", null, el("span", { title }, title), this.readout);
    this.box = el("div.plot");
    this.node = el("figure.chart", { tabindex: 0, "aria-label": title }, this.name, this.box);
    this.plot = null;
    this.lines = [];
  }

  /** Draws lines, [{label, x, y, low, high}], over one axis. */
  show(lines) {
    this.lines = lines;
    const same = this.plot && this.plot.series.length === 1 + this.shape().series.length;
    if (!this.box.isConnected || this.box.clientWidth === 0) return;
    if (same) this.plot.setData(this.shape().data);
    else this.make();
    this.tell();
  }

  shape() {
    const xs = this.lines.length === 1 ? this.lines[0].x : merged(this.lines.map((line) => line.x));
    const data = [xs];
    const series = [];
    const bands = [];
    this.lines.forEach((line, at) => {
      const tint = lineColor(line.hue ?? at);
      const placed = this.lines.length === 1 ? (values) => values : placer(line.x, xs);
      if (line.low) {
        data.push(placed(line.high), placed(line.low));
        bands.push({ series: [data.length - 2, data.length - 1], fill: faint(tint) });
        series.push(plain("transparent"), plain("transparent"));
      }
      data.push(placed(line.y));
      series.push({ ...plain(tint), width: 1.5, points: { show: Boolean(line.dots), size: 6, fill: tint } });
    });
    return { data, series, bands };
  }

  make() {
    this.plot?.destroy();
    const { data, series, bands } = this.shape();
    const ink = color("--ink-2");
    const grid = { stroke: color("--rule"), width: 1 };
    const axis = { stroke: ink, grid, ticks: { show: false }, font: `11px ${color("--sans")}`, size: 26 };
    this.plot = new window.uPlot(
      {
        width: this.box.clientWidth,
        height: this.height,
        legend: { show: false },
        cursor: { y: false, points: { size: 5 }, drag: { x: false, y: false } },
        scales: { x: { time: false } },
        axes: [
          { ...axis, ...(this.axis === "time" ? {} : { incrs: WHOLE }), values: (_, ticks) => ticks.map(SHOW_X[this.axis]) },
          { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => number(tick)) },
        ],
        series: [{}, ...series],
        bands,
        hooks: { setCursor: [() => this.tell()], draw: [(plot) => this.marks?.(plot)] },
      },
      data,
      this.box,
    );
  }

  /** Shows the value under the cursor, or the last one. */
  tell() {
    const at = this.plot?.cursor.idx;
    const words = this.lines.map((line, index) => {
      const x = at === null || at === undefined ? null : this.plot.data[0][at];
      const place = x === null ? line.x.length - 1 : nearest(line.x, x);
      const label = (line.label ? `${line.label} ` : "") + (x === null && index === 0 ? "last " : "");
      return el("span", null, el("i.swatch", { style: { background: lineColor(line.hue ?? index) } }), label, el("b", null, number(line.y[place])), x === null ? "" : ` at ${SHOW_X[this.axis](line.x[place])}`);
    });
    this.readout.replaceChildren(...words);
  }

  resize() {
    if (this.box.clientWidth === 0) return;
    if (this.plot) this.plot.setSize({ width: this.box.clientWidth, height: this.height });
    else if (this.lines.length) this.show(this.lines);
  }

  close() {
    this.plot?.destroy();
    this.plot = null;
  }
}

function plain(stroke) {
  return { stroke, width: 0, points: { show: false }, spanGaps: true };
}

function merged(lists) {
  return [...new Set(lists.flat())].sort((a, b) => a - b);
}

function placer(from, to) {
  const places = new Map(from.map((x, at) => [x, at]));
  return (values) => to.map((x) => (places.has(x) ? values[places.get(x)] : null));
}

export function nearest(xs, x) {
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle;
    else high = middle;
  }
  return Math.abs((xs[low] ?? Infinity) - x) <= Math.abs((xs[high] ?? Infinity) - x) ? low : high;
}

/** Makes a line from the server's columns. */
export function asLine([x, low, high, mean], label, hue) {
  const varies = low.some((value, at) => value !== high[at]);
  return { label, hue, x, y: mean, low: varies ? low : null, high: varies ? high : null };
}

/** Makes a line of few points, [[x, y], …], each of which shows; the last of several at one place counts. */
export function asDots(points) {
  const placed = [...new Map(points)].sort(([a], [b]) => a - b);
  return { x: placed.map(([x]) => x), y: placed.map(([, y]) => y), dots: true };
}
