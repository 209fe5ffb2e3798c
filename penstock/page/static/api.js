// Requests data from the server. The token comes from the address's fragment, which browsers never send.

import { exported, keptAnswer } from "./exported.js";

const KEY = "penstock-token";
const BASE = new URL(".", document.baseURI);
const RETRY_MS = 2000;
/** A server that is silent for this long is gone: it sends an empty line every 10 s. */
const SILENCE_MS = 30000;

export function takeToken() {
  const found = /^#token=([\w-]+)$/.exec(location.hash);
  if (found) {
    sessionStorage.setItem(KEY, found[1]);
    history.replaceState(null, "", `${location.pathname}#/now`);
  }
  return sessionStorage.getItem(KEY);
}

export function setToken(token) {
  sessionStorage.setItem(KEY, token);
}

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function ask(path, signal) {
  const headers = { "X-Penstock-Token": sessionStorage.getItem(KEY) ?? "" };
  return fetch(new URL(path, BASE), { headers, signal, cache: "no-store", credentials: "omit" });
}

/** Requests data, as in get("run/0/samples", {step: 3}). */
export async function get(path, query = {}, signal) {
  if (exported) return kept(path, query);
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") words.set(name, value);
  }
  const response = await ask(`api/${path}?${words}`, signal);
  const body = await response.json();
  if (!response.ok) throw new Refused(body.error ?? response.statusText, response.status);
  return body;
}

function kept(path, query) {
  const found = keptAnswer(path, query);
  if (found === undefined) throw new Refused("This report does not have it; penstock view shows the whole run.", 404);
  return found;
}

/** Calls `hear` with every message of the stream, and `tell` with whether the server is reachable. Never returns. */
export async function follow(hear, tell) {
  for (;;) {
    const stop = new AbortController();
    try {
      await listen(hear, tell, stop);
    } catch (error) {
      if (error.status === 401) throw error;
    }
    stop.abort();
    tell(false);
    await new Promise((wake) => setTimeout(wake, RETRY_MS));
  }
}

async function listen(hear, tell, stop) {
  const response = await ask("api/live", stop.signal);
  if (!response.ok) throw new Refused(response.statusText, response.status);
  tell(true);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const timer = setTimeout(() => stop.abort(), SILENCE_MS);
    const { value, done } = await reader.read();
    clearTimeout(timer);
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line) hear(JSON.parse(line));
  }
}
