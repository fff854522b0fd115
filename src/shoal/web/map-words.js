// What the map says in words: a GPU's tooltip, the legend, and what a search finds.

import { heatColor, jobColor, tenantColor } from "./colors.js";
import { glyphOf, h, jobName, natural, percent, plural, span, whole } from "./dom.js";
import { now } from "./live.js";
import { cellsOf, isWell, stateOf } from "./map.js";
import { replace } from "./patch.js";

const LEGEND_MAX = 14;
const ILL_MAX = 4;

/** A job of another tenant has no id here: at most its tenant is named, as @TENANT. */
const foreign = (id) => id === "" || id.startsWith("@");
export const owner = (id) =>
  id === "" ? "Job of another tenant" : id.startsWith("@") ? `Job of tenant ${id.slice(1)}` : id;

/**
 * A node with a known end: a time limit, a spot notice, a planned drain.
 * @param {Api.NodeLine} node
 */
export function endsText(node, at = now()) {
  const left = node.ends_ms - at;
  return `${left > 0 ? `Ends in ${span(left)}` : "Ending now"}${node.ends_why ? `: ${node.ends_why}` : ""}`;
}

/** The lines of a tooltip. `gpu` is -1 for the node itself; from far away, it is a rack. */
export function describe(map, { rack = "", node: id = "", gpu = -1 }, at = now()) {
  if (rack) return ofRack(map, map.racks?.get(rack));
  const node = map.cluster.nodes.get(id);
  if (!node) return [];
  const head = h(
    "div",
    {},
    h("b", {}, gpu >= 0 ? `${id} · GPU ${gpu}` : id),
    ` ${glyphOf(node.standing || node.state)} ${node.standing || node.state}`,
    node.place ? h("span", { class: "dim" }, ` ${node.place}`) : null,
  );
  const inside = gpu >= 0 && !map.layer ? (cellsOf(node)[gpu] ?? []) : [];
  const lines = inside.map((cell) => {
    const job = map.jobOf(cell.job);
    if (!job) return h("div", {}, owner(cell.job));
    const work = job.steps
      ? `step ${whole(job.step)} of ${whole(job.steps)}`
      : job.step
        ? `step ${whole(job.step)}`
        : "";
    const since = job.running_ms ? `for ${span(at - job.running_ms)}` : "";
    return h(
      "div",
      {},
      h("i", { class: "dot", style: { background: jobColor(job.id) } }),
      ` ${jobName(job)} `,
      h(
        "span",
        { class: "dim" },
        [
          `member ${cell.member} of ${job.size || job.members || 1}`,
          job.tenant,
          `${job.state} ${since}`.trim(),
          work,
          job.slow?.includes(cell.member) ? "straggler" : "",
        ]
          .filter(Boolean)
          .join(" · "),
      ),
    );
  });
  if (gpu >= 0 && !inside.length && !map.layer)
    lines.push(h("div", { class: "dim" }, node.state === "ready" ? "Free" : node.why || node.state));
  if (map.layer) for (const text of map.layer.lines(node, gpu)) lines.push(h("div", {}, text));
  if (gpu < 0 && node.ends_ms) lines.push(h("div", {}, endsText(node, at)));
  if (gpu < 0 && node.why && !map.layer) lines.push(h("div", { class: "dim" }, node.why));
  return [head, ...lines];
}

function ofRack(map, rack) {
  if (!rack) return [];
  const { gpus, held, trouble } = map.sumOf(rack, { dark: false });
  const ill = rack.nodes.map((id) => map.cluster.nodes.get(id)).filter((node) => node && !isWell(node));
  return [
    h("div", {}, h("b", {}, rack.id), h("span", { class: "dim" }, ` ${plural(rack.nodes.length, "node")}`)),
    h("div", {}, `${whole(held)} of ${plural(gpus, "GPU")} in use (${percent(gpus ? held / gpus : 0)})`),
    ...ill.slice(0, ILL_MAX).map((node) => h("div", {}, `${glyphOf(stateOf(node))} ${node.id} ${stateOf(node)}`)),
    ...(trouble > ILL_MAX ? [h("div", { class: "dim" }, `and ${trouble - ILL_MAX} more`)] : []),
  ];
}

export const sentence = (lines) => lines.map((line) => line.textContent).join(", ");

/** Shows a tooltip beside the pointer, inside the window; without lines it is hidden. */
export function showTip(tip, lines, at) {
  tip.hidden = !lines?.length;
  if (tip.hidden) return;
  tip.replaceChildren(...lines);
  const box = tip.getBoundingClientRect();
  tip.style.setProperty("left", `${Math.max(8, Math.min(at.x + 14, window.innerWidth - box.width - 8))}px`);
  tip.style.setProperty(
    "top",
    `${at.y + 18 + box.height > window.innerHeight ? Math.max(4, at.y - box.height - 12) : at.y + 18}px`,
  );
}

/** The nodes and jobs that contain all the words; a whole id means only that one. */
export function matches(cluster, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const nodes = new Set();
  const jobs = new Set();
  if (!words.length) return null;
  const fits = (...parts) => {
    const all = parts.filter(Boolean).map((part) => part.toLowerCase());
    const text = all.join(" ");
    return words.every((word) => (word.startsWith("tenant:") ? all.includes(word) : text.includes(word)));
  };
  const only = text.trim();
  if (cluster.nodes.has(only)) return { nodes: nodes.add(only), jobs };
  if (cluster.jobs.has(only)) return { nodes, jobs: jobs.add(only) };
  for (const node of cluster.nodes.values())
    if (fits(node.id, node.place, node.model, node.labels, node.standing, node.state)) nodes.add(node.id);
  for (const job of cluster.jobs.values())
    if (fits(job.id, job.name, `tenant:${job.tenant}`, job.service, job.array, job.state)) jobs.add(job.id);
  for (const id of heldIds(cluster)) if (foreign(id) && fits(`tenant:${id.slice(1) || "others"}`)) jobs.add(id);
  return { nodes, jobs };
}

function heldIds(cluster) {
  const held = new Map();
  for (const node of cluster.nodes.values())
    for (const [id, , gpus] of node.held ?? []) held.set(id, (held.get(id) ?? 0) + gpus.length);
  return held.keys();
}

/** "12 nodes, 3 jobs", with a link if it is one thing. `anywhere`: whether a job holds a GPU does not matter. */
export function foundText(cluster, found, anywhere = false) {
  if (!found) return [];
  const { nodes, jobs } = found;
  const counts = [nodes.size && plural(nodes.size, "node"), jobs.size && plural(jobs.size, "job")].filter(Boolean);
  if (!counts.length) return ["No matches"];
  const held = new Set(heldIds(cluster));
  const off = anywhere ? 0 : [...jobs].filter((id) => !held.has(id)).length;
  const [id] = nodes.size + jobs.size === 1 ? [...nodes, ...jobs] : [];
  return [
    counts.join(", "),
    off ? `, ${off === jobs.size ? "" : `${whole(off)} `}without a GPU` : "",
    id && !foreign(id)
      ? [
          ": ",
          h(
            "a",
            { href: nodes.size ? `#/node/${id}` : `#/job/${id}`, "data-key": "go" },
            nodes.size ? id : jobName(cluster.jobs.get(id)),
          ),
        ]
      : null,
  ];
}

/** The colors in use. A click pins one: `pin` gets the words of the search that finds it. */
export function legend(element, map, pinned, pin) {
  if (map.layer) {
    map.layer.legend(element);
    return;
  }
  if (map.by === "heat") {
    replace(
      element,
      h("span", { class: "dim" }, "Utilization"),
      [0, 25, 50, 75, 100].map((share) =>
        h("span", { class: "key" }, h("i", { class: "dot", style: { background: heatColor(share) } }), `${share} %`),
      ),
      h("span", { class: "key" }, h("i", { class: "dot hollow" }), "No data"),
    );
    return;
  }
  const sums = new Map();
  const tenants = map.by === "tenant";
  for (const node of map.cluster.nodes.values())
    for (const [id, , gpus] of node.held ?? []) {
      const key = tenants ? map.tenantOf(id) : id;
      sums.set(key, (sums.get(key) ?? 0) + gpus.length);
    }
  const top = [...sums].sort((a, b) => b[1] - a[1] || natural(a[0], b[0])).slice(0, LEGEND_MAX);
  const entry = ([key, count]) => {
    const words = tenants ? `tenant:${key}` : foreign(key) ? `tenant:${key.slice(1) || "others"}` : key;
    return h(
      "button",
      {
        class: "key",
        "data-key": key || "others",
        "aria-pressed": String(pinned === words),
        title: "Highlight",
        onclick: () => pin(pinned === words ? "" : words),
        onpointerenter: () => {
          if (!tenants) map.light(key);
        },
        onpointerleave: () => map.light(""),
      },
      h("i", { class: "dot", style: { background: tenants ? tenantColor(key) : jobColor(key) } }),
      tenants ? key : map.jobOf(key)?.name || owner(key),
      h("span", { class: "dim" }, whole(count)),
    );
  };
  replace(
    element,
    top.map(entry),
    sums.size > top.length ? h("span", { class: "dim" }, `${whole(sums.size - top.length)} more`) : null,
    top.length ? unused(map.cluster.status) : null,
    top.length
      ? null
      : h("span", { class: "dim" }, "No GPUs in use. Try ", h("code", {}, "shoal run -g 1 -- sleep 60")),
  );
}

/** @param {Api.StatusView} status */
const unused = ({ gpus_free: free, gpus_unusable: closed }) =>
  [
    ["Free", free, ""],
    ["Unavailable", closed, "closed"],
  ].map(([label, count, kind]) =>
    count
      ? h(
          "span",
          { class: "key" },
          h("i", { class: `dot free ${kind}` }),
          label,
          h("span", { class: "dim" }, whole(count)),
        )
      : null,
  );
