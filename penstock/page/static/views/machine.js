// The view Machine shows processors, GPUs and memory, as the run measured them.

import { get } from "../api.js";
import { Chart } from "../chart.js";
import { el, empty, fill, section } from "../dom.js";

export async function machine(root, { run }) {
  const { processes } = await get(`run/${run}/machine`);
  const charts = [];
  const block = ({ process, counters }) => {
    const names = Object.keys(counters).filter((name) => counters[name][0].length > 1);
    if (!names.length) return null;
    const nodes = names.map((name) => {
      const chart = new Chart(name, { axis: "time", height: 120 });
      charts.push([chart, counters[name]]);
      return chart.node;
    });
    return section(process, null, el("div.charts", null, nodes));
  };
  const blocks = processes.map(block).filter(Boolean);
  fill(root, el("h1", null, "Machine"), blocks.length ? blocks : empty("Nothing was measured", "A run tells of its processes and GPUs while it trains."));
  for (const [chart, [x, y]] of charts) chart.show([{ x, y }]);
  return { close: () => charts.forEach(([chart]) => chart.close()) };
}
