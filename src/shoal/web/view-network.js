// The network between nodes: what the last tour measured, as a matrix, and in words.

import { get, isAdmin, post } from "./api.js";
import { lineChart } from "./chart-line.js";
import { confirm } from "./dialog.js";
import { ago, empty, h, plural, short, span, whole } from "./dom.js";
import { now } from "./live.js";
import { matrix } from "./matrix.js";
import { replace } from "./patch.js";

const ASK_MS = 1500;
const NAMES_MAX = 12;
const WEAK_MAX = 100;
const KIND_COLOURS = { "all-reduce": "#2171b5", "all-gather": "#d94801", "all-to-all": "#6a51a3" };

/** 940 MB/s, 12.5 GB/s. */
const rate = (mbs) => (mbs >= 1000 ? `${short(mbs / 1000)} GB/s` : `${short(mbs)} MB/s`);
const size = (bytes) => {
  let at = 0;
  for (; bytes >= 1024 && at < 3; at += 1) bytes /= 1024;
  return `${short(bytes)} ${["B", "KiB", "MiB", "GiB"][at]}`;
};
const natural = new Intl.Collator("en", { numeric: true }).compare;
const listed = (names) =>
  names.length > NAMES_MAX
    ? `${names.slice(0, NAMES_MAX).join(", ")} and ${names.length - NAMES_MAX} more`
    : names.join(", ");

/**
 * Nodes by the group that was found, and those without one last.
 * @param {Api.FabricView} view
 */
function grouped(view) {
  const found = new Map();
  for (const node of [...view.nodes].sort(natural)) {
    const place = view.places[node] ?? "";
    (found.get(place) ?? found.set(place, []).get(place)).push(node);
  }
  return [...found].sort((a, b) => Number(a[0] === "") - Number(b[0] === "") || natural(a[0], b[0]));
}

export function mount(root) {
  let alive = true;
  let timer = 0;
  let id = null;
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const progress = h("p", { class: "note", role: "status", hidden: true });
  const go = h("button", { class: "primary", type: "button", hidden: !isAdmin(), onclick: measure }, "Measure now");
  const facts = h("p", { class: "dim" });
  const picture = matrix();
  const words = h("div", { class: "stack" });
  const chart = lineChart({
    title: "Bus bandwidth by size",
    unit: "MB/s",
    times: false,
    places: (power) => size(2 ** power),
  });
  const collectives = h(
    "section",
    { class: "card", "aria-label": "Collectives", hidden: true },
    chart.element,
    h("div", { class: "scroll" }),
  );
  const card = h("section", { class: "card stack", "aria-label": "Matrix", hidden: true }, picture.element);
  const bare = h("div", {});
  root.append(
    h(
      "div",
      { class: "stack" },
      h("div", { class: "row" }, h("h1", {}, "Network"), h("span", { class: "push" }, go)),
      problem,
      progress,
      facts,
      bare,
      card,
      words,
      collectives,
    ),
  );

  async function act(call) {
    try {
      await call();
      problem.hidden = true;
    } catch (error) {
      if (alive) {
        problem.hidden = false;
        problem.textContent = error.message;
      }
    }
  }

  function measure() {
    confirm({
      title: "Measure the network",
      text: "Nodes meet in pairs, for about 1.5 s per round. Jobs go on, but share the network meanwhile.",
      verb: "Measure",
      act: async () => {
        await post("/v1/fabric/check", {});
        ask();
        return { note: "measuring" };
      },
    });
  }

  async function ask() {
    clearTimeout(timer);
    await act(async () => {
      const view = await get("/v1/fabric");
      if (!alive) return;
      if (view.id !== id) {
        id = view.id;
        draw(view);
      }
      go.disabled = Boolean(view.running);
      progress.hidden = !view.running;
      if (!view.running) return;
      const tour = await get(`/v1/fabric/tours/${encodeURIComponent(view.running)}`);
      const rounds = tour.nodes.length - 1 + (tour.nodes.length % 2);
      progress.textContent =
        `${plural(tour.nodes.length, "node")} meet in ${plural(rounds, "round")}: ` +
        `${tour.answered} have answered after ${span(now() - tour.begun_ms)}`;
    });
    if (alive) timer = setTimeout(ask, progress.hidden ? 10 * ASK_MS : ASK_MS);
  }

  function draw(view) {
    const none = !view.id;
    card.hidden = none;
    collectives.hidden = none || !view.collectives.length;
    replace(bare, none ? empty("The network between the nodes was not measured yet.", "shoal check --network") : null);
    if (none) {
      facts.textContent = "";
      replace(words);
      return;
    }
    const groups = grouped(view);
    facts.textContent =
      `${plural(view.nodes.length, "node")}, ${plural(view.links.length, "link")}, measured ` +
      `${ago(view.ended_ms, now())} in ${span(view.ended_ms - view.begun_ms)}. Usual: ${rate(view.usual_mbs)}, ` +
      `${whole(view.usual_latency_us)} µs.`;
    picture.set(view, groups);
    const silent = view.nodes.filter((node) => !view.heard_from.includes(node));
    const bad = [...(silent.length ? [`No answer from ${listed(silent)}`] : []), ...view.outliers];
    replace(
      words,
      h(
        "section",
        { class: "card", "aria-label": "Weak links" },
        h("h2", {}, "Weak links"),
        bad.length
          ? h(
              "ul",
              { class: "weak" },
              bad
                .slice(0, WEAK_MAX)
                .map((text) => h("li", {}, h("span", { class: "chip bad", "data-glyph": "▲" }, "weak"), " ", text)),
              bad.length > WEAK_MAX ? h("li", {}, `and ${bad.length - WEAK_MAX} more`) : null,
            )
          : h("p", {}, h("span", { class: "chip ok", "data-glyph": "✓" }, "ok"), " No link is weak."),
      ),
      groups.length > 1
        ? h(
            "section",
            { class: "card", "aria-label": "Groups" },
            h("h2", {}, "Groups of nodes that are near each other"),
            h(
              "ul",
              {},
              groups.map(([place, nodes]) => h("li", {}, h("b", {}, place || "not known"), ` ${listed(nodes)}`)),
            ),
            h(
              "p",
              { class: "dim small" },
              "With ",
              h("code", {}, "place: measured"),
              " in the policy, gangs are placed by them.",
            ),
          )
        : null,
      view.busy.length || view.notes.length || view.errors.length
        ? h(
            "section",
            { class: "card", "aria-label": "Notes" },
            h("h2", {}, "Notes"),
            h(
              "ul",
              { class: "dim" },
              [
                ...(view.busy.length ? [`Jobs ran meanwhile on ${listed(view.busy)}.`] : []),
                ...view.errors,
                ...view.notes,
              ]
                .slice(0, 50)
                .map((text) => h("li", {}, text)),
            ),
          )
        : null,
    );
    const kinds = [...new Set(view.collectives.map((one) => one.name))];
    chart.set(
      kinds.map((name) => ({
        name,
        colour: KIND_COLOURS[name] ?? "#555",
        points: view.collectives
          .filter((one) => one.name === name && one.size_bytes)
          .map((one) => [Math.log2(one.size_bytes), one.bus_mbs ?? 0])
          .sort((a, b) => a[0] - b[0]),
      })),
    );
    const rows = [...view.collectives].sort((a, b) => a.name.localeCompare(b.name) || a.size_bytes - b.size_bytes);
    replace(
      collectives.lastChild,
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["Collective", "Size", "Ranks", "Time", "Algorithm", "Bus"].map((text, at) =>
              h("th", { class: at ? "num" : "" }, text),
            ),
          ),
        ),
        h(
          "tbody",
          {},
          rows.map((one) =>
            h(
              "tr",
              {},
              h("td", {}, one.name),
              [
                size(one.size_bytes),
                one.ranks,
                `${short(one.took_us / 1000)} ms`,
                rate(one.algorithm_mbs),
                rate(one.bus_mbs),
              ].map((text) => h("td", { class: "num" }, String(text))),
            ),
          ),
        ),
      ),
    );
  }

  ask();
  return () => {
    alive = false;
    clearTimeout(timer);
    picture.stop();
    chart.stop();
  };
}
