// The map of all GPUs and what runs on them.

import { nodeActions } from "./actions.js";
import { chosen, choose as keep } from "./address.js";
import { get, maybe, nodePath } from "./api.js";
import { nearEnd } from "./budgets.js";
import { lineChart } from "./chart-line.js";
import { hue, jobColour } from "./colours.js";
import { offer } from "./commands.js";
import {
  bytes,
  chip,
  css,
  empty,
  eventLine,
  h,
  jobName,
  natural,
  percent,
  plural,
  shape,
  short,
  span,
  throttled,
  whole,
} from "./dom.js";
import { cluster, jobOf, listen, now } from "./live.js";
import { ClusterMap } from "./map.js";
import { describe, legend as drawLegend, endsText, foundText, matches, sentence, showTip } from "./map-words.js";
import { replace } from "./patch.js";

const LATELY_MAX = 14;
const LATELY_GPUS_MAX = 640; // a larger map needs the room
const TROUBLE = ["lost", "quarantined", "silent", "draining", "drained", "cordoned", "joining"];
const TROUBLE_MAX = 4;
const COLOURS = { job: "Job", tenant: "Tenant", heat: "Heat" };

export function mount(root) {
  const tip = h("div", { class: "tip", role: "presentation", hidden: true });
  const said = h("p", { class: "unseen", role: "status", "aria-live": "polite" });
  const map = new ClusterMap({
    cluster,
    onHover: (hit) => showTip(tip, hit && describe(map, hit.node, hit.gpu), hit),
    onChoose: (hit) => choose(hit.node),
    onSay: (hit) => {
      said.textContent = sentence(describe(map, hit.node, hit.gpu));
    },
  });
  window.shoalMap = map; // for tests and benchmarks
  map.by = colourBy();
  map.chosen = chosen("node");
  const summary = h("div", { class: "figures slim" });
  const money = nearEnd();
  const legend = h("div", { class: "legend row small", "aria-label": "Colours" });
  const panel = h("aside", { class: "panel", "aria-label": "Node", hidden: true });
  const nothing = h("div", {});
  const lately = h("aside", { class: "lately", "aria-label": "Latest events" });
  const trouble = h("div", { class: "row trouble" });
  const find = h("input", {
    type: "search",
    placeholder: "Find nodes and jobs",
    "aria-label": "Find nodes and jobs",
    maxlength: 100,
    value: chosen("find"),
    oninput: () => search(true),
  });
  const count = h("span", { class: "small", role: "status", "data-name": "found" });
  const choice = h(
    "fieldset",
    { class: "choice" },
    h("legend", { class: "unseen" }, "Colour by"),
    Object.entries(COLOURS).map(([value, label]) =>
      h(
        "label",
        {},
        h("input", {
          type: "radio",
          name: "colour",
          value,
          checked: map.by === value,
          onchange: () => recolour(value),
        }),
        label,
      ),
    ),
  );

  root.append(
    h(
      "div",
      { class: "stack" },
      h("h1", { class: "unseen" }, "Cluster"),
      summary,
      money.element,
      h(
        "div",
        { class: "row" },
        h("span", { class: "dim small" }, "Colour by"),
        choice,
        find,
        count,
        h("span", { class: "push" }, trouble),
      ),
      legend,
      nothing,
      h("div", { class: "map-and-panel" }, map.spacer, panel, lately),
    ),
    tip,
    said,
  );

  function recolour(value) {
    map.by = value;
    keep("by", value);
    choice.querySelector(`[value=${value}]`).checked = true;
    try {
      localStorage.setItem("shoal-colour", value);
    } catch {
      /* for this visit only */
    }
    map.redraw();
    update();
  }

  // What the words find stays highlighted until they are cleared. The legend writes the same words.
  function search(typed = false) {
    map.lit = matches(cluster, find.value);
    if (typed) {
      keep("find", find.value.trim());
      const [first] = map.lit
        ? [
            ...map.lit.nodes,
            ...[...cluster.nodes.values()]
              .filter((one) => one.held?.some(([id]) => map.lit.jobs.has(id)))
              .map((one) => one.id),
          ].sort(natural)
        : [];
      if (first) map.reveal(first);
    }
    replace(count, ...foundText(cluster, map.lit));
    map.redraw();
  }
  function pin(words) {
    find.value = words;
    search(true);
    update();
  }
  function onEscape(event) {
    if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
    if (find.value) pin("");
    else if (!panel.hidden) close();
  }

  // The recent load of the chosen node, if it is measured.
  const load = lineChart({ title: "Load", unit: "%", height: 90 });
  async function loads() {
    const id = map.chosen;
    if (!id || !cluster.nodes.has(id)) return;
    try {
      const series = await maybe(`${nodePath(id)}/series`);
      if (!series || map.chosen !== id) return;
      const points = (values) =>
        values
          .map((value, at) => [series.at_ms[at], value === null ? null : 100 * value])
          .filter(([, value]) => value !== null);
      const mean = series.at_ms.map((_, at) => {
        const all = series.gpus.map((gpu) => gpu.busy[at]).filter((value) => value !== null && value !== undefined);
        return all.length ? all.reduce((a, b) => a + b) / all.length : null;
      });
      load.set([
        { name: "CPU", colour: css("--accent"), points: points(series.cpu) },
        ...(mean.some((value) => value !== null)
          ? [{ name: "GPUs", colour: hue(4), points: points(mean), dash: "5 2" }]
          : []),
      ]);
    } catch {
      /* fetched again later */
    }
  }
  function choose(id) {
    map.chosen = id;
    keep("node", id);
    map.redraw();
    load.set([]);
    detail();
    loads();
  }
  function close() {
    map.chosen = "";
    keep("node", "");
    map.redraw();
    panel.hidden = true;
    map.canvas.focus();
  }

  function detail() {
    const node = cluster.nodes.get(map.chosen);
    panel.hidden = !node;
    if (!node) return;
    const jobs = [...new Set((node.held ?? []).map(([job]) => job))].map((id) => jobOf(id)).filter(Boolean);
    replace(
      panel,
      h(
        "div",
        { class: "row" },
        h("h2", {}, node.id),
        chip(node.state),
        node.standing && node.standing !== node.state ? chip(node.standing) : null,
        h("button", { class: "quiet push", "data-key": "close", "aria-label": "Close", onclick: close }, "✕"),
      ),
      h(
        "p",
        { class: "dim small" },
        [node.place, plural(node.gpus ?? 0, "GPU"), node.model].filter(Boolean).join(" · "),
      ),
      node.labels ? h("p", { class: "dim small" }, node.labels) : null,
      node.ends_ms ? h("p", { class: "small" }, endsText(node)) : null,
      node.why
        ? h(
            "p",
            { class: node.state === "ready" && !node.standing ? "dim small" : "small" },
            `${node.why}${node.since_ms ? `, since ${span(now() - node.since_ms)}` : ""}`,
          )
        : null,
      h(
        "ul",
        { class: "plain" },
        jobs.length
          ? jobs.map((job) =>
              h(
                "li",
                {},
                h("i", { class: "dot", style: { background: jobColour(job.id) } }),
                " ",
                h("a", { href: `#/job/${job.id}`, "data-key": job.id }, jobName(job)),
                " ",
                h("span", { class: "dim small" }, `${shape(job)} ${job.state}`),
              ),
            )
          : h("li", { class: "dim" }, "no jobs"),
      ),
      asleepPart(node),
      load.element,
      h(
        "div",
        { class: "row" },
        nodeActions(node),
        h("a", { class: "push", href: `#/node/${encodeURIComponent(node.id)}`, "data-key": "page" }, "All about it"),
      ),
    );
  }

  const update = throttled(120, () => {
    const status = cluster.status;
    if (!status) return;
    figures(summary, status);
    lately.hidden = status.gpus > LATELY_GPUS_MAX;
    drawLegend(legend, map, find.value, pin);
    if (find.value) search();
    troubles(trouble, choose);
    replace(
      nothing,
      cluster.nodes.size
        ? null
        : empty("There are no nodes yet. To start a cluster of four virtual nodes:", "shoal up --nodes 4 --gpus 8"),
    );
    detail();
    map.refit(); // what stands above it may have grown
  });

  // The latest events, fetched after a change.
  let alive = true;
  let seq = -1;
  const ask = throttled(1000, async () => {
    if (seq === cluster.status?.last_seq || document.hidden || lately.hidden) return;
    seq = cluster.status?.last_seq;
    try {
      const { events } = await get(`/v1/events?after=-${LATELY_MAX}&limit=${LATELY_MAX}&notable=true`);
      if (alive)
        replace(lately, h("h2", {}, "Latest events"), h("ol", { class: "events" }, events.reverse().map(eventLine)));
    } catch {
      /* fetched again with the next change */
    }
  });

  const stop = listen((change) => {
    if (change.tick) {
      update();
      return;
    }
    ask();
    const other =
      change.whole ||
      change.gone_nodes?.length ||
      change.nodes?.some((node) => !map.where?.has(node.id) || map.where.size !== cluster.nodes.size);
    if (other) map.arrange();
    else map.redraw();
    update();
  });
  window.addEventListener("shoal-theme", update);
  window.addEventListener("keydown", onEscape);
  const withdraw = offer(() => [
    ...Object.entries(COLOURS).map(([value, label]) => ({
      title: `Colour by ${label.toLowerCase()}`,
      hint: "map",
      run: () => recolour(value),
    })),
    ...(find.value ? [{ title: "End the highlight", hint: "map", run: () => pin("") }] : []),
  ]);
  map.arrange();
  update();
  ask();
  const timer = setInterval(() => {
    if (!document.hidden) loads();
  }, 4000);
  return () => {
    alive = false;
    clearInterval(timer);
    load.stop();
    ask.stop();
    stop();
    update.stop();
    map.stop();
    money.stop();
    withdraw();
    window.removeEventListener("shoal-theme", update);
    window.removeEventListener("keydown", onEscape);
  };
}

/** As the address says, else as it was last. */
function colourBy() {
  let by = chosen("by");
  try {
    by ||= localStorage.getItem("shoal-colour") ?? "job";
  } catch {
    /* use the default */
  }
  return COLOURS[by] ? by : "job";
}

function figures(element, status) {
  const jobs = status.jobs ?? {};
  const asleep = (jobs.dozing ?? 0) + (jobs.asleep ?? 0) + (jobs.waking ?? 0);
  const share = status.gpus ? status.gpus_held / status.gpus : 0;
  const nodes = Object.entries(status.nodes ?? {});
  const all = nodes.reduce((sum, [, count]) => sum + count, 0);
  const ready = status.nodes?.ready ?? 0;
  const rps = [...cluster.services.values()].reduce((sum, one) => sum + (one.rps ?? 0), 0);
  const figure = (name, value, more, extra) =>
    h(
      "div",
      { class: "figure" },
      h("span", { class: "dim small" }, name),
      h("span", { class: "dim small more", title: more }, more),
      h("strong", {}, value),
      extra,
    );
  replace(
    element,
    figure(
      "GPUs in use",
      `${whole(status.gpus_held)} / ${whole(status.gpus)}`,
      status.gpus ? percent(share) : "none yet",
      h(
        "div",
        { class: "bar", role: "img", "aria-label": `${percent(share)} of the GPUs are in use` },
        h("i", { style: { width: `${100 * share}%` } }),
      ),
    ),
    figure(
      "Nodes ready",
      `${whole(ready)} / ${whole(all)}`,
      nodes
        .filter(([state]) => state !== "ready")
        .map(([state, count]) => `${count} ${state}`)
        .join(", ") || "no problems",
    ),
    figure(
      "Jobs",
      whole((jobs.running ?? 0) + (jobs.starting ?? 0)),
      `running, ${whole(jobs.waiting ?? 0)} waiting${asleep ? `, ${whole(asleep)} asleep` : ""}`,
    ),
    status.submitted === null
      ? null
      : figure("Finished", whole(status.finished), `of ${whole(status.submitted)} submitted`),
    cluster.services.size
      ? figure("Requests", short(Number(rps.toFixed(1))), `per second, ${plural(cluster.services.size, "service")}`)
      : null,
  );
}

function troubles(element, choose) {
  const ill = [...cluster.nodes.values()].filter((node) => node.state !== "ready" || node.standing);
  ill.sort((a, b) => TROUBLE.indexOf(a.state) - TROUBLE.indexOf(b.state) || natural(a.id, b.id));
  replace(
    element,
    ill
      .slice(0, TROUBLE_MAX)
      .map((node) =>
        h(
          "button",
          { class: "chip-button", "data-key": node.id, onclick: () => choose(node.id) },
          chip(node.standing || node.state, `${node.id} ${node.standing || node.state}`),
        ),
      ),
    ill.length > TROUBLE_MAX ? h("span", { class: "dim small" }, `and ${ill.length - TROUBLE_MAX} more`) : null,
  );
}

/**
 * Jobs that sleep on a node hold no cell of the map.
 * @param {Api.NodeLine} node
 */
function asleepPart(node) {
  const jobs = (node.asleep ?? []).map((id) => jobOf(id)).filter(Boolean);
  if (!jobs.length)
    return node.no_sleep ? h("p", { class: "dim small" }, `Jobs cannot sleep here: ${node.no_sleep}`) : null;
  const memory = node.sleepers_mb
    ? h("p", { class: "dim small" }, `${bytes(node.sleepers_mb * 2 ** 20)} of memory for what they had on GPUs`)
    : null;
  return h(
    "div",
    { class: "asleep" },
    h(
      "ul",
      { class: "plain" },
      jobs.map((job) =>
        h(
          "li",
          {},
          chip("asleep"),
          " ",
          h("a", { href: `#/job/${job.id}`, "data-key": job.id }, jobName(job)),
          " ",
          h("span", { class: "dim small" }, `for ${span(now() - job.nap_ms)}`),
        ),
      ),
    ),
    memory,
  );
}
