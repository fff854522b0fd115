// The network between nodes: what was last measured, as a matrix and in words.

import { get, isAdmin, post } from "./api.js";
import { lineChart } from "./chart-line.js";
import { confirm } from "./dialog.js";
import { ago, empty, fixed, h, natural, number, plural, short, span, verdict, whole } from "./dom.js";
import { now } from "./live.js";
import { matrix } from "./matrix.js";
import { replace } from "./patch.js";
import { table } from "./table.js";

const ASK_MS = 1500;
const NAMES_MAX = 12;
const WEAK_MAX = 100;
const KIND_COLORS = { "all-reduce": "#2171b5", "all-gather": "#d94801", "all-to-all": "#6a51a3" };

/** 940 MB/s, 12.5 GB/s. */
const rate = (mbs) => (mbs >= 1000 ? `${short(mbs / 1000)} GB/s` : `${short(mbs)} MB/s`);
const size = (bytes) => {
  let at = 0;
  for (; bytes >= 1024 && at < 3; at += 1) bytes /= 1024;
  return `${short(bytes)} ${["B", "KiB", "MiB", "GiB"][at]}`;
};
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
  const facts = h("div", { class: "stack" });
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
      text: "Every pair of nodes is measured for about 1.5 s. Jobs keep running and share the network meanwhile.",
      verb: "Measure",
      act: async () => {
        await post("/v1/fabric/check", {});
        ask();
        return { note: "Measuring the network" };
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
        `Measuring ${plural(tour.nodes.length, "node")} in ${plural(rounds, "round")}: ` +
        `${tour.answered} of ${tour.nodes.length} answered after ${span(now() - tour.begun_ms)}`;
    });
    if (alive) timer = setTimeout(ask, progress.hidden ? 10 * ASK_MS : ASK_MS);
  }

  function draw(view) {
    const none = !view.id;
    card.hidden = none;
    collectives.hidden = none || !view.collectives.length;
    replace(bare, none ? empty("The network has not been measured yet.", "shoal check --network") : null);
    if (none) {
      replace(facts);
      replace(words);
      return;
    }
    const groups = grouped(view);
    replace(
      facts,
      verdict(view.verdict, view.outliers.length || view.heard_from.length < view.nodes.length ? "bad" : "ok"),
      h(
        "p",
        { class: "dim" },
        `${plural(view.nodes.length, "node")}, ${plural(view.links.length, "link")}, measured ` +
          `${ago(view.ended_ms, now())} in ${span(view.ended_ms - view.begun_ms)}. Median ${rate(view.usual_mbs)}, ` +
          `${whole(view.usual_latency_us)} µs.`,
      ),
    );
    picture.set(view, groups);
    const silent = view.nodes.filter((node) => !view.heard_from.includes(node));
    const bad = [...(silent.length ? [`No answer from ${listed(silent)}`] : []), ...view.outliers];
    replace(
      words,
      bad.length
        ? h(
            "section",
            { class: "card", "aria-label": "Weak links" },
            h("h2", {}, "Weak links"),
            h(
              "ul",
              { class: "weak" },
              bad
                .slice(0, WEAK_MAX)
                .map((text) => h("li", {}, h("span", { class: "chip bad", "data-glyph": "▲" }, "Weak"), " ", text)),
              bad.length > WEAK_MAX ? h("li", {}, `and ${bad.length - WEAK_MAX} more`) : null,
            ),
          )
        : null,
      groups.length > 1
        ? h(
            "section",
            { class: "card", "aria-label": "Groups" },
            h("h2", {}, "Groups of nearby nodes"),
            h(
              "ul",
              {},
              groups.map(([place, nodes]) => h("li", {}, h("b", {}, place || "Unknown"), ` ${listed(nodes)}`)),
            ),
            h(
              "p",
              { class: "dim small" },
              "Set ",
              h("code", {}, "place: measured"),
              " in the policy to place gangs by these groups.",
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
                ...(view.busy.length ? [`Jobs were running on ${listed(view.busy)}.`] : []),
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
        color: KIND_COLORS[name] ?? "#555",
        points: view.collectives
          .filter((one) => one.name === name && one.size_bytes)
          .map((one) => [Math.log2(one.size_bytes), one.bus_mbs ?? 0])
          .sort((a, b) => a[0] - b[0]),
      })),
    );
    const rows = [...view.collectives].sort((a, b) => a.name.localeCompare(b.name) || a.size_bytes - b.size_bytes);
    replace(
      collectives.lastChild,
      table(
        ["Collective", "num:Size", "num:Ranks", "num:Time (ms)", "num:Algorithm (MB/s)", "num:Bus (MB/s)"],
        rows.map((one) =>
          h(
            "tr",
            {},
            h("td", {}, one.name),
            number(size(one.size_bytes), one.size_bytes, { "data-name": "Size" }),
            number(whole(one.ranks), undefined, { "data-name": "Ranks" }),
            number(fixed(one.took_us / 1000, 2), `${one.took_us} µs`, { "data-name": "Time (ms)" }),
            number(whole(one.algorithm_mbs), undefined, { "data-name": "Algorithm (MB/s)" }),
            number(whole(one.bus_mbs), undefined, { "data-name": "Bus (MB/s)" }),
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
