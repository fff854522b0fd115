// The map of all GPUs and what runs on them.

import { nodeActions } from "./actions.js";
import { get, maybe } from "./api.js";
import { lineChart } from "./charts.js";
import { heatColour, hue, jobColour } from "./colours.js";
import { bytes, chip, clock, css, empty, glyphOf, h, jobName, natural, percent, plural, replace, shape, short, span, throttled, whole } from "./dom.js";
import { cluster, jobOf, listen, now } from "./live.js";
import { ClusterMap, cellsOf, tenantOf } from "./map.js";
import { describe as describeEvent } from "./words.js";

const LEGEND_MAX = 14;
const LATELY_MAX = 14;
const TROUBLE = ["lost", "quarantined", "silent", "draining", "drained", "cordoned", "joining"];

export function mount(root) {
  let by = "job";
  try { by = localStorage.getItem("shoal-colour") ?? "job"; } catch { /* use the default */ }
  const tip = h("div", { class: "tip", role: "presentation", hidden: true });
  const said = h("p", { class: "unseen", role: "status", "aria-live": "polite" });
  const map = new ClusterMap({
    onHover: (hit) => { tip.hidden = !hit; if (hit) { tip.replaceChildren(...describe(hit.node, hit.gpu)); place(tip, hit); } },
    onChoose: (hit) => choose(hit.node),
    onSay: (hit) => { said.textContent = sentence(hit.node, hit.gpu); },
  });
  window.shoalMap = map; // for tests and benchmarks
  map.cluster = cluster;
  map.by = ["job", "tenant", "heat"].includes(by) ? by : "job";
  const summary = h("div", { class: "figures" });
  const legend = h("div", { class: "legend row small", "aria-label": "Colours" });
  const panel = h("aside", { class: "panel", "aria-label": "Node", hidden: true });
  const nothing = h("div", {});
  const lately = h("aside", { class: "lately", "aria-label": "Latest events" });
  const trouble = h("div", { class: "row trouble" });
  const find = h("input", { type: "search", placeholder: "Find a node or job", "aria-label": "Find a node or job", oninput: () => search() });
  const choice = h("fieldset", { class: "choice" }, h("legend", { class: "unseen" }, "Colour by"),
    [["job", "Job"], ["tenant", "Tenant"], ["heat", "Heat"]].map(([value, label]) => h("label", {}, h("input", { type: "radio", name: "colour", value, checked: map.by === value, onchange: () => recolour(value) }), label)));

  root.append(h("div", { class: "stack" }, h("h1", { class: "unseen" }, "Cluster"), summary,
    h("div", { class: "row" }, h("span", { class: "dim small" }, "Colour by"), choice, find, h("span", { class: "push" }, trouble)),
    legend, nothing, h("div", { class: "map-and-panel" }, map.spacer, panel, lately)), tip, said);

  function recolour(value) {
    map.by = value;
    try { localStorage.setItem("shoal-colour", value); } catch { /* for this visit only */ }
    map.redraw();
    update();
  }

  function search() {
    const word = find.value.trim().toLowerCase();
    map.found = "";
    const job = word && [...cluster.jobs.values()].find((one) => one.id === word || one.name === word);
    if (job) map.light(job.id);
    else {
      map.light("");
      if (word) map.found = cluster.nodes.has(word) ? word : [...cluster.nodes.keys()].sort(natural).find((id) => id.startsWith(word)) ?? "";
    }
    const node = map.found || (job && [...cluster.nodes.values()].find((one) => one.held?.some(([id]) => id === job.id))?.id);
    if (node) map.reveal(node);
    map.redraw();
  }

  // The recent load of the chosen node, if it is measured.
  const load = lineChart({ title: "Load", unit: "%", height: 90 });
  async function loads() {
    const id = map.chosen;
    if (!id || !cluster.nodes.has(id)) return;
    try {
      const series = await maybe(`/v1/nodes/${encodeURIComponent(id)}/series`);
      if (!series || map.chosen !== id) return;
      const points = (values) => values.map((value, at) => [series.at_ms[at], value === null ? null : 100 * value]).filter(([, value]) => value !== null);
      const mean = series.at_ms.map((_, at) => { const all = series.gpus.map((gpu) => gpu.busy[at]).filter((value) => value !== null && value !== undefined); return all.length ? all.reduce((a, b) => a + b) / all.length : null; });
      load.set([{ name: "CPU", colour: css("--accent"), points: points(series.cpu) }, ...(mean.some((value) => value !== null) ? [{ name: "GPUs", colour: hue(4), points: points(mean), dash: "5 2" }] : [])]);
    } catch { /* fetched again later */ }
  }
  function choose(id) { map.chosen = id; map.redraw(); load.set([]); detail(); loads(); }

  function detail() {
    const node = cluster.nodes.get(map.chosen);
    panel.hidden = !node;
    if (!node) return;
    const jobs = [...new Set((node.held ?? []).map(([job]) => job))].map((id) => jobOf(id)).filter(Boolean);
    replace(panel, h("div", { class: "row" }, h("h2", {}, node.id), chip(node.state), node.standing && node.standing !== node.state ? chip(node.standing) : null,
      h("button", { class: "quiet push", "data-key": "close", "aria-label": "Close", onclick: () => { map.chosen = ""; map.redraw(); panel.hidden = true; map.canvas.focus(); } }, "✕")),
    h("p", { class: "dim small" }, [node.place, plural(node.gpus ?? 0, "GPU"), node.model].filter(Boolean).join(" · ")),
    node.labels ? h("p", { class: "dim small" }, node.labels) : null,
    node.ends_ms ? h("p", { class: "small" }, endsText(node)) : null,
    node.why ? h("p", { class: node.state === "ready" && !node.standing ? "dim small" : "small" }, `${node.why}${node.since_ms ? `, since ${span(now() - node.since_ms)}` : ""}`) : null,
    h("ul", { class: "plain" }, jobs.length ? jobs.map((job) => h("li", {}, h("i", { class: "dot", style: { background: jobColour(job.id) } }), " ", h("a", { href: `#/job/${job.id}`, "data-key": job.id }, jobName(job)), " ", h("span", { class: "dim small" }, `${shape(job)} ${job.state}`))) : h("li", { class: "dim" }, "no jobs")),
    asleepPart(node), load.element, h("div", { class: "row" }, nodeActions(node)));
  }

  const update = throttled(120, () => {
    const status = cluster.status;
    if (!status) return;
    figures(summary, status);
    lately.hidden = Boolean(map.plan && !map.plan.named); // a large map needs the room
    colours(legend, map);
    troubles(trouble, choose);
    replace(nothing, cluster.nodes.size ? null : empty("There are no nodes yet. To start a cluster of four virtual nodes:", "shoal up --nodes 4 --gpus 8"));
    detail();
  });

  // The latest events, fetched after a change.
  let alive = true, seq = -1;
  const ask = throttled(1000, async () => {
    if (seq === cluster.status?.last_seq || document.hidden || lately.hidden) return;
    seq = cluster.status?.last_seq;
    try {
      const { events } = await get(`/v1/events?after=-${LATELY_MAX}&limit=${LATELY_MAX}&notable=true`);
      if (alive) replace(lately, h("h2", {}, "Latest events"), h("ol", { class: "events" }, events.reverse().map(line)));
    } catch { /* fetched again with the next change */ }
  });

  const stop = listen((change) => {
    if (change.tick) { update(); return; }
    ask();
    const other = change.whole || change.gone_nodes?.length || change.nodes?.some((node) => !map.where?.has(node.id) || map.where.size !== cluster.nodes.size);
    if (other) map.arrange(); else map.redraw();
    update();
  });
  window.addEventListener("shoal-theme", update);
  map.arrange();
  update();
  ask();
  const timer = setInterval(() => { if (!document.hidden) loads(); }, 4000);
  return () => { alive = false; clearInterval(timer); load.stop(); ask.stop(); stop(); update.stop(); map.stop(); window.removeEventListener("shoal-theme", update); };
}

function line({ seq, event }) {
  const text = describeEvent(event), words = event.job && event.job === text.split(" ")[0] ? [h("a", { href: `#/job/${event.job}`, "data-key": event.job }, event.job), text.slice(event.job.length)] : text;
  return h("li", { "data-key": seq }, h("time", { datetime: new Date(event.at_ms).toISOString() }, clock(event.at_ms)), h("span", { title: event.why ?? "" }, words));
}

function figures(element, status) {
  const jobs = status.jobs ?? {}, asleep = (jobs.dozing ?? 0) + (jobs.asleep ?? 0) + (jobs.waking ?? 0), share = status.gpus ? status.gpus_held / status.gpus : 0;
  const nodes = Object.entries(status.nodes ?? {});
  const all = nodes.reduce((sum, [, count]) => sum + count, 0), ready = status.nodes?.ready ?? 0;
  const rps = [...cluster.services.values()].reduce((sum, one) => sum + (one.rps ?? 0), 0);
  const figure = (name, value, more, extra) => h("div", { class: "figure" }, h("span", { class: "dim small" }, name), h("strong", {}, value), h("span", { class: "dim small" }, more), extra);
  replace(element,
    figure("GPUs in use", `${whole(status.gpus_held)} / ${whole(status.gpus)}`, status.gpus ? percent(share) : "none yet", h("div", { class: "bar", role: "img", "aria-label": `${percent(share)} of the GPUs are in use` }, h("i", { style: { width: `${100 * share}%` } }))),
    figure("Nodes ready", `${whole(ready)} / ${whole(all)}`, nodes.filter(([state]) => state !== "ready").map(([state, count]) => `${count} ${state}`).join(", ") || "no problems"),
    figure("Jobs", whole((jobs.running ?? 0) + (jobs.starting ?? 0)), `running, ${whole(jobs.waiting ?? 0)} waiting${asleep ? `, ${whole(asleep)} asleep` : ""}`),
    status.submitted === null ? null : figure("Finished", whole(status.finished), `of ${whole(status.submitted)} submitted`),
    cluster.services.size ? figure("Requests", short(Number(rps.toFixed(1))), `per second, ${plural(cluster.services.size, "service")}`) : null);
}

function colours(element, map) {
  if (map.by === "heat") {
    replace(element, h("span", { class: "dim" }, "utilization"), [0, 25, 50, 75, 100].map((share) => h("span", { class: "key" }, h("i", { class: "dot", style: { background: heatColour(share) } }), `${share} %`)), h("span", { class: "key" }, h("i", { class: "dot hollow" }), "held, not measured"));
    return;
  }
  const sums = new Map();
  for (const node of cluster.nodes.values()) for (const [id, , gpus] of node.held ?? []) {
    const key = map.by === "tenant" ? tenantOf(id) : id;
    sums.set(key, (sums.get(key) ?? 0) + gpus.length);
  }
  const top = [...sums].sort((a, b) => b[1] - a[1] || natural(a[0], b[0])).slice(0, LEGEND_MAX);
  const entry = ([key, count]) => (map.by === "tenant" || foreign(key)
    ? h("span", { class: "key" }, h("i", { class: "dot", style: { background: map.by === "tenant" ? map.tenantColour(key) : jobColour(key) } }), map.by === "tenant" ? key : owner(key), h("span", { class: "dim" }, ` ${count}`))
    : h("a", { class: "key", href: `#/job/${key}`, "data-key": key, onpointerenter: () => map.light(key), onpointerleave: () => map.light("") }, h("i", { class: "dot", style: { background: jobColour(key) } }), jobOf(key)?.name || key, h("span", { class: "dim" }, ` ${count}`)));
  replace(element, top.map(entry), sums.size > top.length ? h("span", { class: "dim" }, `and ${sums.size - top.length} more`) : null, top.length ? null : h("span", { class: "dim" }, "all GPUs are free; try: ", h("code", {}, "shoal run -g 1 -- sleep 60")));
}

function troubles(element, choose) {
  const ill = [...cluster.nodes.values()].filter((node) => node.state !== "ready" || node.standing);
  ill.sort((a, b) => TROUBLE.indexOf(a.state) - TROUBLE.indexOf(b.state) || natural(a.id, b.id));
  replace(element, ill.slice(0, 6).map((node) => h("button", { class: "chip-button", "data-key": node.id, onclick: () => choose(node.id) }, chip(node.standing || node.state, `${node.id} ${node.standing || node.state}`))), ill.length > 6 ? h("span", { class: "dim small" }, `and ${ill.length - 6} more`) : null);
}

/** A job of another tenant has no id here: at most its tenant is named, as @TENANT. */
const foreign = (id) => id === "" || id.startsWith("@");
const owner = (id) => (id === "" ? "another tenant's job" : id.startsWith("@") ? `a job of tenant ${id.slice(1)}` : id);

/** A node that will not be there for ever: a time limit, a spot notice, a planned drain. */
function endsText(node) {
  const left = node.ends_ms - now();
  return `${left > 0 ? `ends in ${span(left)}` : "its end has come"}${node.ends_why ? `: ${node.ends_why}` : ""}`;
}

/** Jobs that sleep on a node hold no cell of the map. */
function asleepPart(node) {
  const jobs = (node.asleep ?? []).map((id) => jobOf(id)).filter(Boolean);
  if (!jobs.length) return node.no_sleep ? h("p", { class: "dim small" }, `Jobs cannot sleep here: ${node.no_sleep}`) : null;
  const memory = node.sleepers_mb ? h("p", { class: "dim small" }, `${bytes(node.sleepers_mb * 2 ** 20)} of memory for what they had on GPUs`) : null;
  return h("div", { class: "asleep" }, h("ul", { class: "plain" }, jobs.map((job) => h("li", {}, chip("asleep"), " ", h("a", { href: `#/job/${job.id}`, "data-key": job.id }, jobName(job)), " ", h("span", { class: "dim small" }, `for ${span(now() - job.nap_ms)}`)))), memory);
}

function describe(id, gpu) {
  const node = cluster.nodes.get(id);
  if (!node) return [];
  const head = h("div", {}, h("b", {}, gpu >= 0 ? `${id} · GPU ${gpu}` : id), ` ${glyphOf(node.state)} ${node.standing || node.state}`);
  const inside = gpu >= 0 ? cellsOf(node)[gpu] ?? [] : [];
  const lines = inside.map((cell) => {
    const job = jobOf(cell.job);
    if (!job) return h("div", {}, owner(cell.job));
    const work = job.steps ? `step ${whole(job.step)} of ${whole(job.steps)}` : job.step ? `step ${whole(job.step)}` : "";
    const since = job.running_ms ? `for ${span(now() - job.running_ms)}` : "";
    return h("div", {}, h("i", { class: "dot", style: { background: jobColour(job.id) } }), ` ${jobName(job)} `, h("span", { class: "dim" }, [`member ${cell.member} of ${job.size || job.members || 1}`, job.tenant, `${job.state} ${since}`.trim(), work, job.slow?.includes(cell.member) ? "slows down its gang" : ""].filter(Boolean).join(" · ")));
  });
  if (gpu >= 0 && !inside.length) lines.push(h("div", { class: "dim" }, node.state === "ready" ? "free" : node.why || node.state));
  if (gpu < 0 && node.ends_ms) lines.push(h("div", {}, endsText(node)));
  if (gpu < 0 && node.why) lines.push(h("div", { class: "dim" }, node.why));
  return [head, ...lines];
}

const sentence = (id, gpu) => describe(id, gpu).map((line) => line.textContent).join(", ");

function place(tip, { x, y }) {
  const box = tip.getBoundingClientRect();
  tip.style.setProperty("left", `${Math.max(8, Math.min(x + 14, window.innerWidth - box.width - 8))}px`);
  tip.style.setProperty("top", `${y + 18 + box.height > window.innerHeight ? y - box.height - 12 : y + 18}px`);
}
