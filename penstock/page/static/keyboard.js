// Handles keys: digits open views, letters belong to the open view, ? lists them.

import { el } from "./dom.js";
import { go, here } from "./router.js";

const GENERAL = [["1 – 9", "views, in their order"], ["t", "light or dark"], ["?", "this list"], ["Esc", "close"]];

export function listen({ names, page, toggleTheme }) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const own = page.shown?.keys?.[event.key];
    const digit = "123456789".indexOf(event.key);
    if (own) own.act();
    else if (digit >= 0 && names[digit]) go(names[digit], { run: here().query.run });
    else if (event.key === "t") toggleTheme();
    else if (event.key === "?") document.dispatchEvent(new Event("penstock-keys"));
    else return;
    event.preventDefault();
  });
}

export function showKeys(own, titles) {
  document.querySelector("dialog")?.remove();
  const view = here().view;
  const rows = [...Object.entries(own).map(([key, { what }]) => [key, what]), ...GENERAL];
  const list = el("dl.keys", null, rows.map(([key, what]) => el("div", null, el("dt", null, el("kbd", null, names[key] ?? key)), el("dd", null, what))));
  const close = el("button", { type: "button", onclick: () => dialog.close() }, "Close");
  const dialog = el("dialog", { "aria-label": "Keys" }, el("h2", null, `Keys of ${titles[view] ?? view}`), list, close);
  document.body.append(dialog);
  dialog.showModal();
}

const names = { ArrowRight: "→", ArrowLeft: "←", ArrowDown: "↓", ArrowUp: "↑" };
