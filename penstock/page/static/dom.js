// Makes elements without markup: foreign text only ever becomes a text node.

const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/gu;

/** Shows control and direction characters instead of obeying them. Tabs and newlines stay. */
export function visible(text) {
  return String(text ?? "").replace(CONTROL, (one) => {
    const code = one.codePointAt(0).toString(16);
    return code.length > 2 ? `\\u${code.padStart(4, "0")}` : `\\x${code.padStart(2, "0")}`;
  });
}

/** Makes an element: el("div.name", {attribute: value, onclick: f}, ...children). Children are nodes or texts. */
export function el(tag, attributes, ...children) {
  const [name, ...classes] = tag.split(".");
  const made = document.createElement(name);
  if (classes.length) made.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(made.style, value);
    else if (key in PROPERTIES) made[key] = value;
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  return add(made, ...children);
}

const PROPERTIES = { value: 1, checked: 1, disabled: 1, selected: 1 };

export function add(parent, ...children) {
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return parent;
}

export function fill(parent, ...children) {
  parent.replaceChildren();
  return add(parent, ...children);
}

/** Makes a section of a title, a sentence under it, and its content. */
export function section(title, note, ...children) {
  return el("section", null, el("h2", null, title), note && el("p.note", null, note), ...children);
}

/** Makes a sentence for where there is nothing to show. */
export function empty(title, note) {
  return el("div.empty", null, el("strong", null, title), note && el("p", null, note));
}

/** Makes a table. head: [{name, kind: "number" | "text", title}]; rows: arrays of cells, or {cells, onclick, title}. */
export function table(head, rows, name) {
  const cells = (row) =>
    (row.cells ?? row).map((cell, at) => el(head[at].kind === "number" ? "td.number" : "td", null, cell));
  return el(
    "div.scroll",
    null,
    el(
      "table",
      { "aria-label": name },
      el("thead", null, el("tr", null, head.map((one) => el(one.kind === "number" ? "th.number" : "th", { scope: "col", title: one.title }, one.name)))),
      el("tbody", null, rows.map((row) => el("tr", null, cells(row)))),
    ),
  );
}

export function link(href, ...children) {
  return el("a", { href }, ...children);
}

/** Makes a row of buttons of which one is chosen. */
export function choice(name, options, chosen, pick) {
  return el(
    "div.choice",
    { role: "group", "aria-label": name },
    options.map(([value, label, title]) =>
      el("button", { type: "button", title, "aria-pressed": String(value === chosen), onclick: () => pick(value) }, label),
    ),
  );
}
