// Colours tokens: each mode gives every token the name of a highlight, or none.
// Names are those of tokens.css: s1–s9 from little to much, n1–n5 and p1–p5 below and above zero, c0–c7 in turn.

import { number, signed } from "./format.js";

const SPAN = 5;

function much(value, full) {
  const level = Math.round((9 * Math.min(1, Math.max(0, value))) / full);
  return level > 0 ? `s${Math.min(9, level)}` : null;
}

function around(value, full) {
  const level = Math.min(SPAN, Math.round((SPAN * Math.abs(value)) / full));
  return level === 0 ? null : `${value < 0 ? "n" : "p"}${level}`;
}

/** Returns the largest size among loss tokens, without the top per cent. */
function fullScale(values, least) {
  const sizes = values.filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
  return Math.max(least, sizes[Math.floor(0.99 * (sizes.length - 1))] ?? 0);
}

function signedMode(name, least) {
  return (trace) => {
    const full = fullScale(trace[name], least);
    return {
      of: (at) => (trace[name][at] === null ? null : around(trace[name][at], full)),
      scale: [[`−${number(full)}`, "n5"], ["", "n3"], ["0", null], ["", "p3"], [`+${number(full)}`, "p5"]],
    };
  };
}

/** Colours surprise: from likely to a chance of one in e⁵. */
function logprobMode(name) {
  return (trace) => ({
    of: (at) => (trace[name][at] === null ? null : much(-trace[name][at] / SPAN, 1)),
    scale: [["0", null], ["", "s3"], ["", "s6"], [`−${SPAN} nats`, "s9"]],
  });
}

function versionMode(trace) {
  const order = [...new Set(trace.versions.filter((version) => version >= 0))].sort((a, b) => a - b);
  const places = new Map(order.map((version, at) => [version, `c${at % 8}`]));
  const shown = order.length <= 8 ? order : [...order.slice(0, 4), ...order.slice(-4)];
  return { of: (at) => places.get(trace.versions[at]) ?? null, scale: shown.map((version) => [`v${version}`, places.get(version)]) };
}

/** Colours ratios above one and below one, and clipped tokens. */
function ratioMode(trace) {
  const logs = trace.ratio.map((value) => (value === null || value <= 0 ? null : Math.log(value)));
  const full = fullScale(logs, 0.05);
  return {
    of: (at) => (trace.clipped[at] ? "clip" : logs[at] === null ? null : around(logs[at], full)),
    scale: [[`÷${number(Math.exp(full))}`, "n5"], ["1", null], [`×${number(Math.exp(full))}`, "p5"], ["clipped", "clip"]],
  };
}

export const MODES = {
  version: { label: "Version", key: "v", make: versionMode, show: (trace, at) => (trace.versions[at] < 0 ? "not sampled" : `v${trace.versions[at]}`) },
  engine: { label: "Engine logprob", key: "e", make: logprobMode("engine"), show: (trace, at) => number(trace.engine[at], 4) },
  trainer: { label: "Trainer logprob", key: "r", make: logprobMode("trainer"), show: (trace, at) => number(trace.trainer[at], 4) },
  gap: { label: "Gap", key: "d", make: signedMode("gap", 0.01), show: (trace, at) => signed(trace.gap[at], 4) },
  ratio: { label: "Ratio, clip", key: "i", make: ratioMode, show: (trace, at) => `${number(trace.ratio[at], 4)}${trace.clipped[at] ? ", clipped" : ""}` },
  advantage: { label: "Advantage", key: "a", make: signedMode("advantage", 0.1), show: (trace, at) => signed(trace.advantage[at]) },
};
