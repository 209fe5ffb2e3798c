// Reads and writes the address: #/samples?run=0&step=3. Everything that can be shown has one.

export function here() {
  const [path, words] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/");
  return { view: parts[0] || "now", thing: parts[1] ?? null, query: Object.fromEntries(new URLSearchParams(words ?? "")) };
}

export function address(view, query = {}, thing = null) {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "" && !(name === "run" && Number(value) === 0)) words.set(name, value);
  }
  const rest = String(words);
  return `#/${view}${thing === null ? "" : `/${thing}`}${rest ? `?${rest}` : ""}`;
}

export function go(view, query = {}, thing = null) {
  location.hash = address(view, query, thing);
}

/** Changes part of the view's query, without a new entry in the history. */
export function adjust(changes) {
  const now = here();
  history.replaceState(null, "", address(now.view, { ...now.query, ...changes }, now.thing));
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}
