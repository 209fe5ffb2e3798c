// The view Config shows the settings of the run, by section, with secrets hidden.

import { get } from "../api.js";
import { el, empty, fill, section } from "../dom.js";

export async function config(root, { run, keys, query }) {
  const found = (await get(`run/${run}/config`)).config;
  const field = el("input", { type: "search", placeholder: "Find a setting", "aria-label": "Find a setting", value: query.find ?? "", oninput: () => show() });
  const body = el("div.settings");
  fill(root, el("h1", null, "Config"), el("div.tools", null, field), body);
  keys["/"] = { what: "find a setting", act: () => field.focus() };
  show();

  function show() {
    const word = field.value.trim().toLowerCase();
    const parts = Object.entries(found).map(([name, values]) => {
      const rows = flatten(values).filter(([key, value]) => `${name}.${key} ${value}`.toLowerCase().includes(word));
      return rows.length ? section(name, null, el("dl.sheet", null, rows.map(([key, value]) => el("div", null, el("dt", null, key), el("dd", null, value))))) : null;
    });
    fill(body, parts.some(Boolean) ? parts : empty("No setting fits"));
  }

  return {};
}

function flatten(value, prefix = "") {
  if (value === null || typeof value !== "object") return [[prefix || "value", String(value)]];
  if (Array.isArray(value)) return [[prefix, JSON.stringify(value)]];
  return Object.entries(value).flatMap(([key, one]) => flatten(one, prefix ? `${prefix}.${key}` : key));
}
