// The cluster at a glance: its figures, the map of its GPUs, and what waits for them.

import { nodeActions } from "./actions.js";
import { chosen, choose as keep } from "./address.js";
import { get, isAdmin, maybe, me, nodePath } from "./api.js";
import { nearEnd } from "./budgets.js";
import { lineChart } from "./chart-line.js";
import { hue, jobColor } from "./colors.js";
import { offer } from "./commands.js";
import {
  bytes,
  chip,
  css,
  empty,
  eventLine,
  h,
  jobName,
  money,
  natural,
  plural,
  shape,
  short,
  span,
  throttled,
  whole,
} from "./dom.js";
import { cluster, jobOf, listen, now } from "./live.js";
import { ClusterMap, isWell } from "./map.js";
import { describe, legend as drawLegend, endsText, foundText, matches, sentence, showTip } from "./map-words.js";
import { replace } from "./patch.js";

const LATELY_MAX = 14;
const LATELY_GPUS_MAX = 640; // a larger map needs the room
const TROUBLE = ["lost", "quarantined", "silent", "draining", "drained", "cordoned", "joining"];
const TROUBLE_MAX = 4;
const COLORS = {
  job: "Job",
  tenant: "Tenant",
  heat: "Utilization",
  health: "Health",
  links: "Links",
  storage: "Storage",
};
// in place of jobs, and for whom
const LAYERS = { health: () => true, links: () => seesAll(), storage: () => isAdmin() };
const colorings = () => Object.entries(COLORS).filter(([by]) => LAYERS[by]?.() ?? true);
const LINE_MAX = 12; // waiting jobs below the map
const LINE_MS = 2000;
const HOUR = 3_600_000;
const LAYER_MS = 20_000;
/** Of those who see one tenant, the ledger is that tenant's. */
const seesAll = () => isAdmin() || me.tenant === "*";

export function mount(root) {
  const tip = h("div", { class: "tip", role: "presentation", hidden: true });
  const said = h("p", { class: "unseen", role: "status", "aria-live": "polite" });
  const map = new ClusterMap({
    cluster,
    below: () => (line.hidden ? 0 : line.offsetHeight + 14),
    onHover: (hit) => showTip(tip, hit && describe(map, hit), hit),
    onChoose: (hit) => choose(hit.node),
    onSay: (hit) => {
      said.textContent = sentence(describe(map, hit));
    },
    onZoom: (place) => {
      keep("zoom", place);
      update();
    },
  });
  window.shoalMap = map; // for tests and benchmarks
  const shownBy = colorBy();
  map.by = LAYERS[shownBy] ? "job" : shownBy;
  map.chosen = chosen("node");
  map.zoom = chosen("zoom");
  const summary = h("div", { class: "figures slim" });
  const near = nearEnd();
  const legend = h("div", { class: "legend row small", "aria-label": "Colors" });
  const panel = h("aside", { class: "panel", "aria-label": "Node", hidden: true });
  const nothing = h("div", {});
  const lately = h("aside", { class: "lately", "aria-label": "Latest events" });
  const crumbs = h("nav", { class: "row small", "aria-label": "Part of the cluster", hidden: true });
  const line = h("section", { class: "line", "aria-label": "Queue", hidden: true });
  const trouble = h("div", { class: "row trouble" });
  const find = h("input", {
    type: "search",
    placeholder: "Find nodes and jobs",
    "aria-label": "Find nodes and jobs",
    maxlength: 100,
    value: chosen("q"),
    oninput: () => search(true),
  });
  const count = h("span", { class: "small", role: "status", "data-name": "found" });
  const choice = h(
    "fieldset",
    { class: "choice" },
    h("legend", { class: "unseen" }, "Color by"),
    colorings().map(([value, label]) =>
      h(
        "label",
        {},
        h("input", {
          type: "radio",
          name: "color",
          value,
          checked: shownBy === value,
          onchange: () => recolor(value),
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
      near.element,
      h("div", { class: "row" }, choice, find, count, h("span", { class: "push" }, trouble)),
      legend,
      crumbs,
      nothing,
      h("div", { class: "map-and-panel" }, map.spacer, panel, lately),
      line,
    ),
    tip,
    said,
  );

  function recolor(value) {
    keep("by", value);
    choice.querySelector(`[value=${value}]`).checked = true;
    try {
      localStorage.setItem("shoal-color", value);
    } catch {
      /* for this visit only */
    }
    show(value);
  }
  let wanted = "";
  async function show(value) {
    wanted = value;
    const layer = LAYERS[value] ? await (await import("./layers.js")).openLayer(value, map) : null;
    if (wanted !== value || !alive) return;
    map.layer = layer;
    if (!layer) map.by = value;
    map.redraw();
    update();
  }

  // What the words find stays highlighted until they are cleared. The legend writes the same words.
  function search(typed = false) {
    map.lit = matches(cluster, find.value);
    if (typed) {
      keep("q", find.value.trim());
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
    else map.zoomTo("");
  }

  // The recent load of the chosen node, if it is measured.
  const load = lineChart({ title: "Load", unit: "%", height: 90 });
  async function loads() {
    const id = map.chosen;
    if (!id || !cluster.nodes.has(id)) return;
    try {
      const series = await maybe(`${nodePath(id)}/series`, { aside: true });
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
        { name: "CPU", color: css("--accent"), points: points(series.cpu) },
        ...(mean.some((value) => value !== null)
          ? [{ name: "GPUs", color: hue(4), points: points(mean), dash: "5 2" }]
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
      node.why && !isWell(node)
        ? h("p", { class: "small" }, `${node.why}${node.since_ms ? `, for ${span(now() - node.since_ms)}` : ""}`)
        : null,
      h(
        "ul",
        { class: "plain" },
        jobs.length
          ? jobs.map((job) =>
              h(
                "li",
                {},
                h("i", { class: "dot", style: { background: jobColor(job.id) } }),
                " ",
                h("a", { href: `#/job/${job.id}`, "data-key": job.id }, jobName(job)),
                " ",
                h("span", { class: "dim small" }, `${shape(job)} ${job.state}`),
              ),
            )
          : h("li", { class: "dim" }, "No jobs"),
      ),
      asleepPart(node),
      load.element,
      h(
        "div",
        { class: "row" },
        nodeActions(node),
        h("a", { class: "push", href: `#/node/${encodeURIComponent(node.id)}`, "data-key": "page" }, "Open node"),
      ),
    );
  }

  // What a GPU-hour has cost lately, by the ledger.
  let price = { perHour: 0, currency: "" };
  const pricing = async () => {
    if (document.hidden || !seesAll()) return;
    const ledger = await maybe(`/v1/ledger?from_ms=${Math.max(0, now() - 2 * HOUR)}`, { aside: true });
    if (!alive || !ledger?.cost) return;
    price = { perHour: (ledger.cost * 1000 * HOUR) / ledger.capacity_gpu_us, currency: ledger.currency };
    update();
  };

  const update = throttled(120, () => {
    const status = cluster.status;
    if (!status) return;
    figures(summary, status, price);
    path(crumbs, map);
    lately.hidden = status.gpus > LATELY_GPUS_MAX;
    drawLegend(legend, map, find.value, pin);
    if (find.value) search();
    troubles(trouble, choose);
    replace(
      nothing,
      cluster.nodes.size
        ? null
        : empty("No nodes yet. Start a cluster of four virtual nodes:", "shoal up --nodes 4 --gpus 8"),
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
      const { events } = await get(`/v1/events?after=-${LATELY_MAX}&limit=${LATELY_MAX}&notable=true`, {
        aside: true,
      });
      if (alive)
        replace(
          lately,
          h("div", {}, h("h2", {}, "Latest events"), h("ol", { class: "events" }, events.reverse().map(eventLine))),
        );
    } catch {
      /* fetched again with the next change */
    }
  });

  // What waits, first in line first.
  const queue = throttled(LINE_MS, async () => {
    if (document.hidden || !alive) return;
    try {
      const waits = cluster.status?.jobs?.waiting ? await get(`/v1/queue?limit=${LINE_MAX}`, { aside: true }) : null;
      if (!alive) return;
      inLine(line, waits);
      map.refit();
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
    queue();
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
    ...colorings().map(([value, label]) => ({
      title: `Color by ${label.toLowerCase()}`,
      hint: "map",
      run: () => recolor(value),
    })),
    ...(find.value ? [{ title: "Clear highlight", hint: "map", run: () => pin("") }] : []),
  ]);
  map.arrange();
  update();
  ask();
  queue();
  pricing().catch(() => {}); // a cluster without a ledger has no prices
  if (LAYERS[shownBy]) show(shownBy);
  const timers = [
    setInterval(() => {
      if (!document.hidden) loads();
    }, 4000),
    setInterval(() => {
      queue(); // predictions change without an event
      if (!document.hidden) pricing().catch(() => {});
    }, 60_000),
    setInterval(() => {
      if (map.layer && !document.hidden) map.layer.load().then(update, () => {});
    }, LAYER_MS),
  ];
  return () => {
    alive = false;
    timers.map(clearInterval);
    load.stop();
    ask.stop();
    queue.stop();
    stop();
    update.stop();
    map.stop();
    near.stop();
    withdraw();
    window.removeEventListener("shoal-theme", update);
    window.removeEventListener("keydown", onEscape);
  };
}

/** As the address says, else as it was last. */
function colorBy() {
  let by = chosen("by");
  try {
    by ||= localStorage.getItem("shoal-color") ?? "job";
  } catch {
    /* use the default */
  }
  return colorings().some(([one]) => one === by) ? by : "job";
}

/** What a visitor asks first: how full it is, what waits, what is broken, what it costs. */
function figures(element, status, price) {
  const jobs = status.jobs ?? {};
  const asleep = (jobs.dozing ?? 0) + (jobs.asleep ?? 0) + (jobs.waking ?? 0);
  const nodes = Object.entries(status.nodes ?? {});
  const all = nodes.reduce((sum, [, count]) => sum + count, 0);
  const rps = [...cluster.services.values()].reduce((sum, one) => sum + (one.rps ?? 0), 0);
  const wanted = [...cluster.jobs.values()]
    .filter((job) => job.state === "waiting")
    .reduce((sum, job) => sum + (job.gpus ?? 0) * (job.members ?? 1), 0);
  const figure = (name, value, more, extra) =>
    h(
      "div",
      { class: "figure" },
      h("span", { class: "dim small" }, name),
      h("span", { class: "dim small more", title: more }, more),
      h("strong", {}, value),
      extra,
    );
  const held = status.gpus_held;
  const closed = status.gpus_unusable;
  const total = Math.max(1, held + status.gpus_free + closed);
  replace(
    element,
    figure(
      "GPUs in use",
      `${whole(held)} / ${whole(status.gpus)}`,
      `${whole(status.gpus_free)} free${closed ? `, ${whole(closed)} unavailable` : ""}`,
      h(
        "div",
        {
          class: "bar parts",
          role: "img",
          "aria-label": `${whole(held)} in use, ${whole(status.gpus_free)} free, ${whole(closed)} unavailable`,
        },
        h("i", { style: { width: `${(100 * held) / total}%` } }),
        h("i", { class: "closed", style: { width: `${(100 * closed) / total}%` } }),
      ),
    ),
    figure("Waiting", plural(jobs.waiting ?? 0, "job"), wanted ? `${plural(wanted, "GPU")} requested` : ""),
    figure(
      "Running",
      plural((jobs.running ?? 0) + (jobs.starting ?? 0) + (jobs.stopping ?? 0), "job"),
      [asleep ? `${whole(asleep)} asleep` : "", jobs.away ? `${whole(jobs.away)} at neighbors` : ""]
        .filter(Boolean)
        .join(", "),
    ),
    figure(
      "Nodes ready",
      `${whole(status.nodes?.ready ?? 0)} / ${whole(all)}`,
      nodes
        .filter(([state]) => state !== "ready")
        .map(([state, count]) => `${count} ${state}`)
        .join(", "),
    ),
    price.perHour
      ? figure(
          "Cost per hour",
          money(price.perHour * status.gpus, price.currency),
          held < status.gpus ? `${money(price.perHour * (status.gpus - held), price.currency)} unallocated` : "",
        )
      : null,
    cluster.services.size
      ? figure("Requests", `${short(Number(rps.toFixed(1)))} / s`, plural(cluster.services.size, "service"))
      : null,
  );
}

/** The way back from a part of a large cluster. */
function path(element, map) {
  element.hidden = !map.zooms;
  const block = map.zoom.includes("/") ? map.zoom.slice(0, map.zoom.indexOf("/")) : "";
  const step = (place, label) =>
    place === map.zoom
      ? h("b", { "aria-current": "page" }, label)
      : h("button", { class: "link", "data-key": place || "all", onclick: () => map.zoomTo(place) }, label);
  replace(
    element,
    step("", map.zoom ? "All racks" : `${plural(map.racks?.size ?? 0, "rack")}`),
    block ? ["›", step(block, block)] : null,
    map.zoom ? ["›", step(map.zoom, block ? map.zoom.slice(block.length + 1) : map.zoom)] : null,
    h("span", { class: "dim" }, map.zoom ? "Esc to zoom out" : "Select a rack to zoom in"),
  );
}

/**
 * The first in line, below the map.
 * @param {HTMLElement} element
 * @param {Api.QueueView | null} queue
 */
function inLine(element, queue) {
  element.hidden = !queue?.rows.length;
  if (element.hidden) return;
  const starts = (row) => {
    if (!row.foreseen || row.early_ms === null) return row.foreseen ? row.start : "";
    const early = Math.max(0, row.early_ms - queue.now_ms);
    const late = Math.max(early, row.late_ms - queue.now_ms);
    return early === late ? `starts in ${span(late)}` : `starts in ${span(early)} to ${span(late)}`;
  };
  const more = queue.waiting - queue.rows.length;
  replace(
    element,
    h("h2", {}, "Queue"),
    h(
      "ol",
      {},
      queue.rows.map((row) =>
        h(
          "li",
          { "data-key": row.id, "data-job": row.id },
          h(
            "a",
            { href: `#/job/${row.id}`, "data-key": row.id, title: row.why },
            h("span", { class: "row" }, h("b", {}, jobName(row)), h("span", { class: "dim small push" }, shape(row))),
            h("span", { class: "small reason" }, row.why),
            h("span", { class: "dim small" }, starts(row)),
          ),
        ),
      ),
      more > 0
        ? h("li", { "data-key": "more" }, h("a", { href: "#/jobs?state=waiting" }, `${whole(more)} more`))
        : null,
    ),
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
    ill.length > TROUBLE_MAX ? h("span", { class: "dim small" }, `${whole(ill.length - TROUBLE_MAX)} more`) : null,
  );
}

/**
 * Suspended jobs hold no cell of the map.
 * @param {Api.NodeLine} node
 */
function asleepPart(node) {
  const jobs = (node.asleep ?? []).map((id) => jobOf(id)).filter(Boolean);
  if (!jobs.length)
    return node.no_sleep ? h("p", { class: "dim small" }, `Jobs cannot be suspended here: ${node.no_sleep}`) : null;
  const memory = node.sleepers_mb
    ? h("p", { class: "dim small" }, `${bytes(node.sleepers_mb * 2 ** 20)} of host memory holds their GPU state`)
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
