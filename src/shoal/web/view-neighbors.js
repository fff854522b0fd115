// This cluster and its neighbors: what each offers, whose jobs are where, what moved lately, and who owes what.

import { call, get, isAdmin, maybe } from "./api.js";
import { confirm, toast } from "./dialog.js";
import {
  chip,
  empty,
  eventLine,
  fixed,
  h,
  jobName,
  money,
  number,
  plural,
  span,
  throttled,
  verdict,
  whole,
} from "./dom.js";
import { query } from "./ledger-table.js";
import { cluster, jobOf, listen, now } from "./live.js";
import { replace } from "./patch.js";
import { table } from "./table.js";

const ASK_MS = 5000;
const DRAW_MS = 1000;
const DAYS = "30"; // of what is owed
const HERE_MAX = 100;
const HOUR_MS = 3_600_000;

/** @typedef {{ neighbor: string, gpu_ms: number, cost: number }} Owed */

/** The job's name at home, from the label of one that another cluster has sent: CLUSTER.JOB.NUMBER.
 * @param {Api.JobRow} job */
const mark = (job) => /^(\w+)\.(j[\d.]+)\.\d+$/.exec(job.labels.home ?? "") ?? ["", "", ""];

const link = (id) => h("a", { href: `#/job/${id}` }, jobName(jobOf(id) ?? { id }));
const ran = (since) => number(since ? span(now() - since) : "–", undefined, { "data-name": "Run time" });

export function mount(root) {
  const stopper = new AbortController();
  const { signal } = stopper;
  /** @type {Api.NeighborView[]} */
  let neighbors = null;
  /** @type {Api.JobRow[]} */
  let theirs = [];
  /** @type {Api.SharedView} */
  let shared = null;
  /** @type {Api.LedgerView} */
  let book = null;
  let seq = -1;
  const card = (label) => h("section", { class: "card", "aria-label": label, hidden: true });
  const facts = h("div", {});
  const all = card("Clusters");
  const there = card("Our jobs there");
  const here = card("Their jobs here");
  const lately = card("Moved lately");
  root.append(h("div", { class: "stack" }, h("h1", {}, "Neighbors"), facts, all, there, here, lately));

  async function ask() {
    try {
      [neighbors, theirs] = await Promise.all([
        get("/v1/neighbors", { signal }),
        get(`/v1/jobs?label=home&limit=${HERE_MAX}`, { signal }),
      ]);
      if (seq !== cluster.status?.last_seq) {
        seq = cluster.status?.last_seq;
        const path = /** @type {const} */ (`/v1/ledger?${query("tenant", DAYS, Math.ceil(now()))}`);
        [shared, book] = await Promise.all([get("/v1/neighbors/shared", { signal }), maybe(path, { signal })]);
      }
      draw();
    } catch (error) {
      if (!signal.aborted) throw error; // the frame says it
    }
  }

  /** The neighbor that has sent the job; or its tenant, if jobs of ours do not go there.
   * @param {Api.JobRow} job */
  const sender = (job) => neighbors.find((one) => one.cluster === mark(job)[1])?.name ?? job.tenant;

  function draw() {
    if (!shared || signal.aborted) return;
    const guests = shared.guests.filter((name) => !neighbors.some((one) => one.name === name));
    const cut = neighbors.filter((one) => one.problem);
    const bare = !neighbors.length && !guests.length;
    replace(
      facts,
      bare
        ? empty("This cluster has no neighbors. Another one invites it with:", "shoal neighbor invite NAME")
        : verdict(summary(cut), cut.length ? "bad" : "ok"),
    );
    for (const one of [all, there, here, lately]) one.hidden = bare;
    if (bare) return;
    drawClusters(guests);
    drawThere();
    drawHere();
    replace(
      lately,
      h("h2", {}, "Moved lately"),
      shared.moved.length
        ? h("ol", { class: "events" }, [...shared.moved].reverse().map(eventLine))
        : h("p", { class: "dim" }, "No job has moved lately."),
    );
  }

  function summary(cut) {
    const sum = (name) => neighbors.reduce((total, one) => total + (one.problem ? 0 : one[name]), 0);
    const away = neighbors.reduce((total, one) => total + one.count, 0);
    return [
      cut.length ? `${cut.map((one) => one.name).join(", ")} cannot be reached` : "",
      neighbors.length ? `${whole(sum("gpus_free"))} of ${plural(sum("gpus"), "GPU")} are free at neighbors` : "",
      `${plural(away, "job")} of ours there`,
      `${plural(theirs.length, "job")} of theirs here`,
    ]
      .filter(Boolean)
      .join("; ");
  }

  // -- the clusters --------------------------------------------------------------------------

  function drawClusters(guests) {
    /** @type {Owed[]} */
    const debts = /** @type {any} */ (book)?.owed ?? [];
    const owed = debts.length > 0;
    const heads = ["Cluster", "State", "num:GPUs free", "num:Waiting", "num:GPU-hour", "num:Round trip", "Version"];
    const row = (name, cells, one) =>
      h(
        "tr",
        { "data-key": name || "here", "data-cluster": name },
        cells,
        number(one ? whole(one.count) : "–", undefined, { "data-name": "Ours there" }),
        number(name ? whole(theirs.filter((job) => sender(job) === name).length) : "–", undefined, {
          "data-name": "Theirs here",
        }),
        owed ? number(name ? owe(debts, name, one) : "–", undefined, { "data-name": "We owe" }) : null,
        number(name ? used(name) : "–", undefined, { "data-name": "Used here" }),
        isAdmin()
          ? h("td", {}, one ? h("button", { class: "danger", onclick: () => remove(one) }, "Remove") : null)
          : null,
      );
    const { status } = cluster;
    const ours = [
      h("td", {}, h("b", {}, "This cluster")),
      h("td", {}, chip(cluster.linked ? "ready" : "silent")),
      ...figures({ ...status, waiting: status.jobs.waiting ?? 0, price: shared.price, currency: shared.currency }),
    ];
    replace(
      all,
      table(
        [...heads, "num:Ours there", "num:Theirs here", ...(owed ? ["num:We owe"] : []), "num:Used here"].concat(
          isAdmin() ? "" : [],
        ),
        [
          row("", ours, null),
          neighbors.map((one) =>
            row(one.name, [named(one), stateOf(one), ...figures(one.heard_ms_ago < 0 ? null : one)], one),
          ),
          guests.map((name) =>
            row(
              name,
              [h("td", { class: "long" }, h("b", {}, name)), h("td", {}, "Sends jobs"), ...figures(null)],
              null,
            ),
          ),
        ],
      ),
      h("p", { class: "dim small" }, `Prices are the lowest for a GPU and an hour. Sums are of the last ${DAYS} days.`),
    );
  }

  const figures = (one) => [
    number(one ? `${whole(one.gpus_free)} of ${whole(one.gpus)}` : "–", undefined, { "data-name": "GPUs free" }),
    number(one ? whole(one.waiting) : "–", undefined, { "data-name": "Waiting" }),
    number(one ? money(one.price, one.currency) : "–", undefined, { "data-name": "GPU-hour" }),
    number(one?.round_trip_ms ? `${whole(one.round_trip_ms)} ms` : "–", undefined, { "data-name": "Round trip" }),
    h("td", { "data-name": "Version" }, one?.version || "–"),
  ];

  /** @param {Api.NeighborView} one */
  const named = (one) =>
    h(
      "td",
      { class: "long" },
      h("b", { title: one.url }, one.name),
      h(
        "div",
        { class: "dim small" },
        Object.entries(one.labels)
          .map(([key, value]) => `${key}=${value}`)
          .join(", "),
      ),
    );

  /** @param {Api.NeighborView} one */
  function stateOf(one) {
    const unheard = one.heard_ms_ago < 0;
    const last = unheard ? "" : ` (last heard ${span(one.heard_ms_ago)} ago)`;
    return h(
      "td",
      { class: "long" },
      one.problem
        ? chip("down", "Not reachable")
        : unheard
          ? chip("joining", "Not heard yet")
          : chip("ready", "Reachable"),
      one.problem ? h("div", { class: "dim small" }, one.problem, last) : null,
    );
  }

  /** What the neighbor has counted for jobs of ours: in money, if it has named a price. */
  function owe(debts, name, one) {
    const mine = debts.filter((debt) => debt.neighbor === name);
    const cost = mine.reduce((sum, debt) => sum + debt.cost, 0);
    return amount(
      mine.reduce((sum, debt) => sum + debt.gpu_ms, 0),
      cost,
      one?.currency,
    );
  }
  function used(name) {
    const rows = book?.rows.filter((one) => shared.guests.includes(name) && one.key === name) ?? [];
    const cost = rows.reduce((sum, one) => sum + (one.cost ?? 0), 0);
    return amount(
      rows.reduce((sum, one) => sum + one.gpu_ms, 0),
      cost,
      book?.currency,
    );
  }
  const amount = (gpuMs, cost, currency) =>
    cost && currency ? money(cost, currency) : gpuMs ? `${fixed(gpuMs / HOUR_MS, 2)} GPU-h` : "–";

  /** @param {Api.NeighborView} one */
  async function remove(one) {
    try {
      const { lines, jobs } = await get(`/v1/neighbors/${encodeURIComponent(one.name)}/gone`, { signal, aside: true });
      const gone = jobs.length > 0;
      confirm({
        title: gone ? `Declare ${one.name} gone` : `Remove ${one.name}`,
        text: gone
          ? "You say that it will never answer again. If it only does not answer now, keep it: its jobs run on."
          : "No more jobs go there. It can be added again.",
        verb: gone ? "Declare gone" : "Remove neighbor",
        danger: true,
        body: h(
          "ul",
          { class: "effects" },
          lines.map((line) => h("li", {}, line)),
        ),
        act: async () => {
          const done = await call("DELETE", `/v1/neighbors/${encodeURIComponent(one.name)}${gone ? "?gone=true" : ""}`);
          seq = -1;
          ask();
          return { note: done.note || `${one.name} is not a neighbor any more` };
        },
      });
    } catch (error) {
      if (!signal.aborted) toast(error.message);
    }
  }

  // -- the jobs ------------------------------------------------------------------------------

  function drawThere() {
    const rows = neighbors.flatMap((one) => one.jobs.map((job) => ourJob(one, job)));
    const left = neighbors.reduce((sum, one) => sum + one.count, 0) - rows.length;
    const heads = [
      "Job",
      "Neighbor",
      "Its id there",
      "State",
      "num:GPUs",
      "num:There for",
      "num:Run time",
      "num:Cost so far",
    ];
    replace(
      there,
      h("h2", {}, "Our jobs there"),
      rows.length ? table(heads, rows) : h("p", { class: "dim" }, "None that you can see."),
      left > 0 ? h("p", { class: "dim small" }, `and ${plural(left, "more job")}`) : null,
    );
  }

  /**
   * @param {Api.NeighborView} one
   * @param {Api.ThereView} job
   */
  function ourJob(one, job) {
    const hours = job.running_ms ? (job.gpus * Math.max(0, now() - job.running_ms)) / HOUR_MS : 0;
    return h(
      "tr",
      { "data-key": job.job },
      h("td", { class: "long" }, link(job.job)),
      h("td", {}, one.name),
      h("td", { "data-name": "There" }, job.id || "–"),
      h(
        "td",
        { class: "long" },
        job.withdrawn
          ? chip("stopping", "Being taken back")
          : chip(job.state || "joining", job.state || "not taken yet"),
        job.withdrawn ? h("div", { class: "dim small" }, job.withdrawn) : null,
      ),
      number(whole(job.gpus), undefined, { "data-name": "GPUs" }),
      number(span(now() - job.since_ms), undefined, { "data-name": "There for" }),
      ran(job.running_ms),
      number(job.price === null ? "–" : money(hours * job.price, one.currency), undefined, {
        "data-name": "Cost so far",
      }),
    );
  }

  function drawHere() {
    const line = (job) =>
      h(
        "tr",
        { "data-key": job.id },
        h("td", { class: "long" }, link(job.id)),
        h("td", {}, sender(job)),
        h("td", { "data-name": "At home" }, mark(job)[2] || "–"),
        h("td", {}, chip(job.state)),
        number(whole(job.gpus * job.members), undefined, { "data-name": "GPUs" }),
        number(span(now() - job.submitted_ms), undefined, { "data-name": "Here for" }),
        ran(job.running_ms),
      );
    const heads = ["Job", "Neighbor", "Its id at home", "State", "num:GPUs", "num:Here for", "num:Run time"];
    replace(
      here,
      h("h2", {}, "Their jobs here"),
      theirs.length ? table(heads, theirs.map(line)) : h("p", { class: "dim" }, "None that you can see."),
      theirs.length === HERE_MAX ? h("a", { href: "#/jobs?label=home" }, "All of them") : null,
    );
  }

  const timer = setInterval(() => {
    if (!document.hidden) ask();
  }, ASK_MS);
  const again = throttled(DRAW_MS, draw);
  const quiet = listen(again);
  ask();
  return () => {
    stopper.abort();
    clearInterval(timer);
    again.stop();
    quiet();
  };
}
