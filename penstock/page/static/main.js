// Starts the page: a header that always says how the run is, the views, and the keyboard.

import { follow, get, Refused, setToken, takeToken } from "./api.js";
import { add, el, empty, fill } from "./dom.js";
import { exported } from "./exported.js";
import { showTop } from "./header.js";
import { listen, showKeys } from "./keyboard.js";
import { address, go, here } from "./router.js";
import { compare } from "./views/compare.js";
import { config } from "./views/config.js";
import { drops } from "./views/drops.js";
import { findings } from "./views/findings.js";
import { group } from "./views/group.js";
import { machine } from "./views/machine.js";
import { metrics } from "./views/metrics.js";
import { now } from "./views/now.js";
import { samples } from "./views/samples.js";
import { staleness } from "./views/staleness.js";
import { time } from "./views/time.js";
import { timeline } from "./views/timeline.js";
import { tokens } from "./views/tokens.js";

/** The views, in the order of the page. */
const OF_ONE_RUN = { now, samples, tokens, time, staleness, drops, timeline };
const VIEWS = exported ? { findings, ...OF_ONE_RUN, metrics, machine, config } : { ...OF_ONE_RUN, compare, metrics, machine, config };
const HIDDEN = { group };
const TITLES = { findings: "Findings", samples: "Samples", tokens: "Tokens", now: "Now", time: "Where time went", staleness: "Staleness", drops: "Drops", timeline: "Timeline", compare: "Compare", metrics: "Metrics", machine: "Machine", config: "Config", group: "Group" };

const page = { runs: [], isThere: true, shown: null };
const view = document.getElementById("view");

function number(place) {
  return Math.min(Number(place.query.run ?? 0) || 0, Math.max(0, page.runs.length - 1));
}

function showHeader() {
  const place = here();
  const at = number(place);
  showTop(document.getElementById("top"), { ...page, at, pick: (run) => go(place.view, { run }) });
  const run = page.runs[at];
  if (run) document.title = `${run.status.step}/${run.status.steps} · ${run.name} · penstock`;
}

function showNav() {
  const place = here();
  const current = place.view === "group" ? "samples" : place.view;
  const links = Object.keys(VIEWS).map((name, at) =>
    el("a", { href: address(name, { run: place.query.run }), "aria-current": name === current ? "page" : null, title: at < 9 ? `key ${at + 1}` : null }, TITLES[name]),
  );
  fill(document.getElementById("nav"), links);
  document.querySelector("#nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

async function show() {
  const place = here();
  page.shown?.close?.();
  page.shown = null;
  showNav();
  showHeader();
  const make = VIEWS[place.view] ?? HIDDEN[place.view];
  if (!make) return fill(view, empty("There is no such view", "Choose one on the left."));
  const root = el("div.view", { "data-view": place.view });
  const context = { run: number(place), runs: page.runs, query: place.query, thing: place.thing, keys: {} };
  fill(view, root);
  try {
    const shown = await make(root, context);
    if (root.isConnected) page.shown = { ...shown, keys: context.keys, run: context.run };
    else shown?.close?.();
  } catch (error) {
    complain(root, error);
  }
  root.dataset.ready = "yes";
}

function complain(root, error) {
  if (error instanceof Refused && error.status === 401) return askForToken();
  fill(root, empty(error instanceof Refused ? "Not to be shown" : "Something failed", error.message));
}

function hear(message) {
  const begun = performance.now();
  page.runs[message.run] = message.now;
  showHeader();
  if (page.shown?.run === message.run || page.shown?.wantsAll) page.shown.live?.(message);
  // Charts draw in microtasks queued before this one, so the measure includes them.
  queueMicrotask(() => performance.measure("penstock-update", { start: begun, end: performance.now() }));
}

function tell(isThere) {
  if (page.isThere === isThere) return;
  page.isThere = isThere;
  showHeader();
}

function askForToken() {
  document.body.classList.add("closed");
  const field = el("input", { type: "password", name: "token", autocomplete: "off", "aria-label": "Token" });
  const form = el("form.token", { onsubmit: (event) => { event.preventDefault(); setToken(field.value.trim()); location.reload(); } }, field, el("button", { type: "submit" }, "Open"));
  fill(view, el("div.view", null, add(empty("This page needs its token", "Open the address that penstock printed, which ends in #token=…, or paste the token here."), form)));
  view.firstChild.dataset.ready = "yes";
}

function theme(next) {
  const root = document.documentElement;
  const chosen = next ?? localStorage.getItem("penstock-theme");
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  if (next) {
    localStorage.setItem("penstock-theme", next);
    show();
  }
}

export function toggleTheme() {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  theme(dark ? "light" : "dark");
}

async function start() {
  theme();
  if (exported) history.replaceState(null, "", location.hash || "#/findings");
  else if (!takeToken()) return askForToken();
  window.addEventListener("hashchange", show);
  listen({ names: Object.keys(VIEWS), page, toggleTheme });
  document.addEventListener("penstock-keys", () => showKeys(page.shown?.keys ?? {}, TITLES));
  document.addEventListener("penstock-theme", toggleTheme);
  try {
    page.runs = (await get("runs")).runs;
  } catch (error) {
    return complain(view, error);
  }
  show();
  if (!exported) follow(hear, tell).catch((error) => complain(view, error));
}

start();
