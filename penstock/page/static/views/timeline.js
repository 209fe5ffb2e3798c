// The view Timeline draws slots, trainer and publishes over time on one canvas; arrows lead from a rollout to its step.

import { get } from "../api.js";
import { color } from "../chart.js";
import { el, empty, fill, link } from "../dom.js";
import { count, duration, plural } from "../format.js";
import { address } from "../router.js";

const ROW = 18;
const LEFT = 132;
const TOP = 22;
const TINTS = [[/wait|blocked|idle/, "--paper-3"], [/step|forward|backward|optimizer/, "--line-1"], [/generate|episode|running/, "--line-3"], [/score/, "--line-5"], [/publish|hash|send|stage|load|update|snapshot/, "--line-2"], [/checkpoint|save|evaluate/, "--line-4"]];

export async function timeline(root, { run, query, keys }) {
  const found = await get(`run/${run}/timeline`, { time: query.time });
  fill(root, el("h1", null, "Timeline"), el("p.note", null, "One row a slot or stage. Drag to move, wheel or + and − to zoom; point at a span to see what it is, and where its group was trained."));
  if (!found.spans.length) {
    root.append(empty("No spans in this stretch", "Spans of the newest part of a run are kept (observe.spans_mb)."));
    return {};
  }
  const canvas = el("canvas.timeline", { tabindex: 0, role: "img", "aria-label": `${plural(found.spans.length, "span")} on ${plural(found.tracks.length, "track")}` });
  const detail = el("div.token-detail", { role: "status" });
  root.append(bounds(found), detail, el("div", null, canvas));
  const drawing = new Drawing(canvas, found, { start: found.start, end: found.end });
  drawing.draw();
  const sizes = new ResizeObserver(() => drawing.draw());
  sizes.observe(root);
  handle(canvas, drawing, (span) => fill(detail, span ? describe(span, found, run) : el("span.muted", null, "Point at a span.")), () => reload());
  keys["+"] = { what: "zoom in", act: () => zoom(0.5) };
  keys["-"] = { what: "zoom out", act: () => zoom(2) };
  keys.ArrowRight = { what: "later", act: () => move(0.25) };
  keys.ArrowLeft = { what: "earlier", act: () => move(-0.25) };
  fill(detail, el("span.muted", null, "Point at a span."));

  function zoom(factor) {
    drawing.zoom(factor, 0.5);
    reload();
  }

  function move(share) {
    drawing.move(share * (drawing.window.end - drawing.window.start));
    reload();
  }

  let timer = null;
  /** Requests, a moment later, what lies outside the fetched range. */
  function reload() {
    clearTimeout(timer);
    timer = setTimeout(async () => {
      const { start, end } = drawing.window;
      const next = await get(`run/${run}/timeline`, { time: `${Math.max(0, start)}..${end}` });
      if (!canvas.isConnected) return;
      drawing.take(next);
      history.replaceState(null, "", address("timeline", { run, time: `${start.toFixed(3)}..${end.toFixed(3)}` }));
    }, 150);
  }

  return { close: () => { clearTimeout(timer); sizes.disconnect(); } };
}

function bounds(found) {
  return el("p.muted", null, `${duration(found.start)} to ${duration(found.end)} of ${duration(found.now)}${found.is_cut ? `; only the first ${count(found.spans.length)} spans are drawn: zoom in` : ""}`);
}

class Drawing {
  constructor(canvas, found, window) {
    this.canvas = canvas;
    this.window = window;
    this.chosen = null;
    this.take(found);
  }

  take(found) {
    this.found = found;
    this.tracks = found.tracks.map((track, at) => ({ track, at })).sort((a, b) => rank(a.track) - rank(b.track) || a.track.join().localeCompare(b.track.join(), "en", { numeric: true }));
    this.rows = new Map(this.tracks.map(({ at }, row) => [at, row]));
    this.ends = new Map();
    for (const span of found.spans) if (span[5] !== null && /step/.test(found.names[span[3]])) this.ends.set(span[5], span);
    this.nest();
    this.tints = found.names.map((name) => TINTS.find(([fits]) => fits.test(name))?.[1] ?? "--line-6");
    if (this.canvas.isConnected) this.draw();
  }

  /** Finds spans that lie within another one of their track, and those that contain others. */
  nest() {
    const open = new Map();
    this.inner = new Set();
    this.outer = new Set();
    for (const span of this.found.spans) {
      const around = open.get(span[0]);
      if (around && span[2] <= around[2]) {
        this.inner.add(span);
        this.outer.add(around);
      } else open.set(span[0], span);
    }
  }

  draw() {
    const ratio = devicePixelRatio;
    const width = this.canvas.parentElement.clientWidth;
    const height = TOP + ROW * this.tracks.length + 6;
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    this.left = width < 600 ? 84 : LEFT;
    this.width = width - this.left;
    const paper = this.canvas.getContext("2d");
    paper.scale(ratio, ratio);
    paper.font = `11px ${color("--sans")}`;
    this.drawFrame(paper, width);
    paper.save();
    paper.beginPath();
    paper.rect(this.left, 0, this.width, height);
    paper.clip();
    this.drawSpans(paper);
    this.drawArrows(paper);
    paper.restore();
  }

  x(time) {
    const { start, end } = this.window;
    return this.left + (this.width * (time - start)) / (end - start);
  }

  y(track) {
    return TOP + ROW * this.rows.get(track);
  }

  drawFrame(paper, width) {
    const { start, end } = this.window;
    paper.fillStyle = color("--ink-2");
    this.tracks.forEach(({ track: [process, name] }, row) => paper.fillText((process === "controller" ? name : `${process} ${name}`).slice(0, this.left < 100 ? 13 : 21), 0, TOP + ROW * row + 13));
    const step = 10 ** Math.floor(Math.log10((end - start) / 4));
    const every = [1, 2, 5, 10].map((one) => one * step).find((one) => (end - start) / one <= 8) ?? step;
    paper.strokeStyle = color("--rule");
    for (let at = Math.ceil(start / every) * every; at < end; at += every) {
      paper.beginPath();
      paper.moveTo(this.x(at), 14);
      paper.lineTo(this.x(at), TOP + ROW * this.tracks.length);
      paper.stroke();
      paper.fillText(every < 1 ? `${at.toFixed(2)} s` : duration(at), this.x(at) + 3, 11);
    }
    paper.strokeStyle = color("--line-2");
    for (const [time] of this.found.updates) {
      const x = this.x(time);
      if (x < this.left || x > width) continue;
      paper.beginPath();
      paper.moveTo(x, 14);
      paper.lineTo(x, TOP);
      paper.stroke();
    }
  }

  drawSpans(paper) {
    const tints = this.tints.map(color);
    const ink = color("--paper");
    for (const span of this.found.spans) {
      const [track, start, end, name] = span;
      const x = this.x(start);
      const wide = Math.max(1, this.x(end) - x);
      if (x > this.left + this.width || x + wide < this.left) continue;
      paper.globalAlpha = this.chosen && span !== this.chosen && span[4] !== this.chosen[4] ? 0.55 : 1;
      paper.fillStyle = tints[name];
      const inset = this.inner.has(span) ? 5 : 2;
      if (this.outer.has(span)) paper.globalAlpha *= 0.4;
      paper.fillRect(x, this.y(track) + inset, wide - (wide > 3 ? 1 : 0), ROW - 2 * inset);
      if (wide > 44 && inset === 2 && !this.outer.has(span)) {
        paper.fillStyle = this.tints[name] === "--paper-3" ? color("--ink-2") : ink;
        paper.fillText(this.found.names[name].slice(0, Math.floor(wide / 6)), Math.max(x, this.left) + 4, this.y(track) + 13);
      }
    }
    paper.globalAlpha = 1;
  }

  /** Draws arrows: faintly of all groups where few are in sight, and always of the chosen one. */
  drawArrows(paper) {
    const ofGroups = new Set(this.found.tracks.flatMap(([process], at) => (process === "controller" ? [at] : [])));
    const shown = this.found.spans.filter((span) => span[4] !== null && ofGroups.has(span[0]) && /generate/.test(this.found.names[span[3]]));
    const some = shown.length <= 400 ? shown : shown.filter((span) => span[4] === this.chosen?.[4]);
    for (const span of some) {
      const target = this.ends.get(this.found.steps[span[4]]);
      if (!target) continue;
      const own = this.chosen && span[4] === this.chosen[4];
      paper.strokeStyle = color(own ? "--ink" : "--ink-3");
      paper.globalAlpha = own ? 1 : 0.25;
      const [x1, y1, x2, y2] = [this.x(span[2]), this.y(span[0]) + ROW / 2, this.x(target[1]), this.y(target[0]) + ROW / 2];
      paper.beginPath();
      paper.moveTo(x1, y1);
      paper.bezierCurveTo(x1 + 20, y1, x2 - 20, y2, x2, y2);
      paper.moveTo(x2 - 4, y2 - 3);
      paper.lineTo(x2, y2);
      paper.lineTo(x2 - 4, y2 + 3);
      paper.stroke();
    }
    paper.globalAlpha = 1;
  }

  under(x, y) {
    const row = this.tracks[Math.floor((y - TOP) / ROW)];
    if (!row || x < this.left) return null;
    const { start, end } = this.window;
    const time = start + ((x - this.left) / this.width) * (end - start);
    const slack = (2 / this.width) * (end - start);
    const hits = this.found.spans.filter((span) => span[0] === row.at && span[1] - slack <= time && span[2] + slack >= time);
    return hits.sort((a, b) => a[2] - a[1] - (b[2] - b[1]))[0] ?? null;
  }

  zoom(factor, share) {
    const { start, end } = this.window;
    const middle = start + share * (end - start);
    this.window = { start: Math.max(0, middle - (middle - start) * factor), end: middle + (end - middle) * factor };
    this.draw();
  }

  move(by) {
    const { start, end } = this.window;
    const shift = Math.max(-start, by);
    this.window = { start: start + shift, end: end + shift };
    this.draw();
  }

  choose(span) {
    if (span === this.chosen) return false;
    this.chosen = span;
    this.draw();
    return true;
  }
}

const ORDER = [/ train$/, /^trainer step/, /^trainer/, /^controller slot /, / episode /, / ready /, / reward /, /^engine\d* (?!update)/, /^engine/, / evaluation/];

/** Sorts the trainer first, then engines, then groups on their way. */
function rank([process, track]) {
  const place = ORDER.findIndex((fits) => fits.test(`${process} ${track}`));
  return place < 0 ? ORDER.length : place;
}

function handle(canvas, drawing, choose, moved) {
  let grip = null;
  canvas.addEventListener("pointerdown", (event) => { grip = event.offsetX; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { grip = null; moved(); });
  canvas.addEventListener("pointermove", (event) => {
    if (grip === null) {
      const span = drawing.under(event.offsetX, event.offsetY);
      if (drawing.choose(span)) choose(span);
      return;
    }
    drawing.move(((grip - event.offsetX) / drawing.width) * (drawing.window.end - drawing.window.start));
    grip = event.offsetX;
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY) && !event.shiftKey && document.activeElement !== canvas) return;
    event.preventDefault();
    drawing.zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, Math.max(0, (event.offsetX - drawing.left) / drawing.width));
    moved();
  }, { passive: false });
}

function describe([track, start, end, name, group, step], found, run) {
  const trained = found.steps[group];
  const [process, row] = found.tracks[track];
  const rows = [["what", found.names[name]], ["where", `${process}, ${row}`], ["from", duration(start)], ["took", duration(end - start)]];
  if (group !== null) rows.push(["group", link(address("group", { run }, group), String(group))]);
  if (trained !== undefined || step !== null) rows.push([step === null ? "trained in step" : "step", link(address("samples", { run, step: step ?? trained }), String(step ?? trained))]);
  return el("dl.sheet.wide", null, rows.map(([label, value]) => el("div", null, el("dt", null, label), el("dd", null, value))));
}
