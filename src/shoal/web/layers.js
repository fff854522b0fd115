// Layers of the map: how well GPUs, links and storage work, in place of jobs. Loaded when one is chosen.

import { get } from "./api.js";
import { isDark, rateColor, rateName, rateOf, rates } from "./colors.js";
import { ago, h, plural, short, whole } from "./dom.js";
import { now } from "./live.js";
import { cellsOf, stateOf } from "./map.js";
import { replace } from "./patch.js";

const HOT_C = 85; // most GPUs run slower from about here on
const LAST = /** @type {string} */ ("last");
const NONE = ["#ccd4da", "#323e47"];

// Classes with their colors on a light and on a dark page, the worst first.
const HEALTH = {
  lost: ["Lost", "#3f1029", "#e9a6c8"],
  quarantined: ["Quarantined", "#96005a", "#c2186f"],
  suspect: ["Suspect", "#d94801", "#e2622a"],
  hot: [`Above ${HOT_C} °C`, "#f16913", "#f08a4b"],
  straggler: ["Straggler", "#fdae6b", "#fdc28f"],
  silent: ["Not reporting", "#8c6ebd", "#a88cd6"],
  closed: ["Drained or cordoned", "#8a96a0", "#6b7985"],
  healthy: ["Healthy", "#6baed6", "#3f83ad"],
};
const STATES = {
  lost: "lost",
  quarantined: "quarantined",
  suspect: "suspect",
  silent: "silent",
  joining: "silent",
  draining: "closed",
  drained: "closed",
  cordoned: "closed",
};

/** `of`: the class of a GPU. `words`: more about it. `load`: asks for what the stream does not have. */
const LAYERS = {
  health: (map) => {
    let samples = {};
    const heat = (node, gpu) => samples[node.id]?.gpus?.[gpu]?.temperature_c ?? null;
    return {
      unit: "GPU",
      classes: HEALTH,
      of: (node, gpu) => {
        const state = STATES[stateOf(node)];
        if (state) return state;
        if (heat(node, gpu) >= HOT_C) return "hot";
        const [cell] = cellsOf(node)[gpu] ?? [];
        return cell && map.jobOf(cell.job)?.slow?.includes(cell.member) ? "straggler" : "healthy";
      },
      words: (node, gpu) => [heat(node, gpu) === null ? "" : `${heat(node, gpu)} °C`, node.why],
      load: async () => {
        samples = await get("/v1/samples", { aside: true });
      },
    };
  },
  links: () => {
    /** @type {Api.FabricView} */
    let fabric = null;
    const nodes = new Map(); // the median rate of a node's links, and how many failed
    const weak = new Map();
    return rated({
      found: (node) => nodes.get(node.id),
      usual: () => fabric.usual_mbs,
      words: (node, seen) =>
        seen
          ? [
              `Median link: ${short(seen.mbs)} MB/s, usual: ${short(fabric.usual_mbs)} MB/s`,
              ...(weak.get(node.id) ?? []),
            ]
          : ["Not measured"],
      head: () => (fabric?.id ? `Measured ${ago(fabric.ended_ms ?? fabric.begun_ms, now())}` : "Not measured yet"),
      how: "shoal check --network",
      load: async () => {
        fabric = await get("/v1/fabric", { aside: true });
        const speeds = new Map();
        for (const [a, b, , there, back, fault] of /** @type {any[]} */ (fabric.links))
          for (const id of [a, b])
            (speeds.get(id) ?? speeds.set(id, []).get(id)).push(fault ? 0 : Math.min(there, back));
        for (const [id, list] of speeds)
          nodes.set(id, { mbs: list.sort((x, y) => x - y)[Math.floor(list.length / 2)] });
        weak.clear();
        for (const [at, one] of fabric.weak.entries())
          for (const id of [one.node, one.peer].filter(Boolean))
            (weak.get(id) ?? weak.set(id, []).get(id)).push(fabric.outliers[at]);
      },
    });
  },
  storage: () => {
    /** @type {Api.StorageView} */
    let check = null;
    let usual = 0;
    const nodes = new Map();
    return rated({
      found: (node) => nodes.get(node.id),
      usual: () => usual,
      words: (_, seen) =>
        !seen
          ? ["Not measured"]
          : seen.problem
            ? [seen.problem]
            : [
                `Write ${short(seen.write_mbs)} MB/s, read ${short(seen.read_mbs)} MB/s`,
                `${whole(seen.small_per_s)} small files/s`,
                ...seen.notes,
              ],
      head: () =>
        check?.id ? `${check.target}, measured ${ago(check.ended_ms ?? check.begun_ms, now())}` : "Not measured yet",
      how: "shoal check --storage PATH",
      load: async () => {
        check = await get(`/v1/storage/checks/${LAST}`, { aside: true });
        nodes.clear();
        for (const one of [...check.alone, ...check.together])
          nodes.set(one.node, { ...one, mbs: one.problem ? 0 : Math.min(one.write_mbs, one.read_mbs) });
        const speeds = [...nodes.values()].map((one) => one.mbs).sort((a, b) => a - b);
        usual = speeds[Math.floor(speeds.length / 2)] ?? 0;
      },
    });
  },
};

/** A layer of rates beside the usual one, by node. */
function rated({ found, usual, words, head, how, load }) {
  const classes = Object.fromEntries(rates.map((key) => [key, [rateName(key), rateColor(key), rateColor(key)]]));
  return {
    unit: "node",
    classes: { ...classes, none: ["Not measured", ...NONE] },
    of: (node) => {
      const seen = found(node);
      if (!seen) return "none";
      return seen.mbs ? rateOf(usual() ? (1000 * seen.mbs) / usual() : 1000) : "failed";
    },
    words: (node) => words(node, found(node)),
    head,
    how,
    load,
  };
}

/**
 * A layer by its name in the address, loaded; `load` brings it up to date.
 * @param {string} by
 * @param {any} map
 */
export async function openLayer(by, map) {
  const layer = { head: () => "", how: "", ...LAYERS[by](map) };
  await layer.load();
  return {
    ...layer,
    color: (node, gpu, dark = isDark()) => layer.classes[layer.of(node, gpu)][dark ? 2 : 1],
    lines: (node, gpu) =>
      [layer.classes[layer.of(node, Math.max(0, gpu))][0], ...layer.words(node, Math.max(0, gpu))].filter(Boolean),
    legend: (element) => legend(element, layer, map.cluster.nodes),
  };
}

function legend(element, layer, nodes) {
  const counts = new Map();
  for (const node of nodes.values())
    for (let at = 0; at < (layer.unit === "GPU" ? (node.gpus ?? 0) : 1); at += 1) {
      const key = layer.of(node, at);
      counts.set(key, (counts.get(key) ?? 0) + 1);
    }
  const dark = isDark();
  const bare = layer.how && [...counts.keys()].every((key) => key === "none");
  replace(
    element,
    Object.entries(layer.classes)
      .filter(([key]) => counts.has(key))
      .map(([key, [label, light, night]]) =>
        h(
          "span",
          { class: "key", "data-key": key, "data-class": key },
          h("i", { class: "dot", style: { background: dark ? night : light } }),
          label,
          h("span", { class: "dim" }, plural(counts.get(key), layer.unit)),
        ),
      ),
    h("span", { class: "dim" }, layer.head()),
    bare ? h("code", {}, layer.how) : null,
  );
}
