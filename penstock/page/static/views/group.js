// The view Group shows the answers of one group side by side: their advantages come from comparing them.

import { get } from "../api.js";
import { el, fill } from "../dom.js";
import { plural } from "../format.js";
import { answer, facts, reward, text, ways } from "../sample_parts.js";

export async function group(root, { run, thing, keys }) {
  const found = await get(`run/${run}/group/${Number(thing)}`);
  const first = found.samples[0];
  const best = Math.max(...found.samples.map((sample) => sample.reward ?? -Infinity));
  const columns = found.samples.map((sample) =>
    el(
      "article.attempt",
      { tabindex: 0, "aria-label": `Attempt ${sample.episode}` },
      el("header", null, el("h3", null, `Attempt ${sample.episode}`), reward(sample.reward, 0, best)),
      answer(sample),
      facts(sample),
      ways(sample, run),
    ),
  );
  const row = el("div.attempts", null, columns);
  fill(
    root,
    el("h1", null, `Group ${found.group}`),
    el("p.note", null, `Task ${first.task}: ${plural(found.count, "attempt")}, ${first.drop ? `dropped (${first.drop})` : `trained in step ${first.step}`}.`),
    text("Prompt", first.prompt, first.text_kept),
    row,
  );
  keys.ArrowRight = { what: "next attempt", act: () => move(row, 1) };
  keys.ArrowLeft = { what: "previous attempt", act: () => move(row, -1) };
  return {};
}

function move(row, by) {
  const all = [...row.children];
  const next = all[Math.max(0, Math.min(all.length - 1, all.indexOf(document.activeElement) + by))];
  next.focus();
  next.scrollIntoView({ block: "nearest", inline: "nearest" });
}
