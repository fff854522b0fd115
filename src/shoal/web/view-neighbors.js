// This cluster and its neighbors: what each offers, whose jobs are where, what moved lately, and who owes what.

import { call, get, isAdmin, maybe } from "./api.js";
import { confirm, toast } from "./dialog.js";
import { chip, empty, eventLine, h, jobName, money, number, plural, short, span, verdict, whole } from "./dom.js";
import { query } from "./ledger-table.js";
import { cluster, jobOf, listen, now } from "./live.js";
import { replace } from "./patch.js";
import { table } from "./table.js";

const ASK_MS = 5000;
const DAYS = "30"; // of what is owed
const HERE_MAX = 100;
const HOUR_MS = 3_600_000;

/** From the label of a job that another cluster has sent: that cluster, and the job's id there.
 * @param {Api.JobRow} job */
const mark = (job) => /^([0-9a-f]{8})\.(j[\d.]+)\.\d+$/.exec(job.labels.home ?? "")?.slice(1) ?? ["", ""];
const sum = (all, of) => all.reduce((total, one) => total + of(one), 0);
const link = (id) => h("a", { href: `#/job/${id}` }, jobName(jobOf(id) ?? { id }));
const since = (ms) => (ms ? span(now() - ms) : "–");
const labels = (one) => Object.entries(one?.labels ?? {}).map(([key, value]) => `${key}=${value} `);
const words = (first, small) => [first, small?.length ? h("div", { class: "dim small" }, small) : null];

/** A table of columns: a head, and what makes a row's cell. */
const grid = (columns, rows, key) =>
  table(
    columns.map(([head]) => head),
    rows.map((row) =>
      h(
        "tr",
        { "data-key": key(row) },
        columns.map(([head, cell], at) =>
          head.startsWith("num:")
            ? number(cell(row) || "–", undefined, { "data-name": head.slice(4) })
            : h("td", { class: "long", "data-name": at > 1 && head ? head : null }, cell(row)),
        ),
      ),
    ),
  );

export function mount(root) {
  const stopper = new AbortController();
  const { signal } = stopper;
  /** @type {Api.NeighborView[]} */
  let neighbors = [];
  /** @type {Api.JobRow[]} */
  let theirs = [];
  /** @type {Api.SharedView} */
  let shared = null;
  /** @type {Api.LedgerView & { owed?: { neighbor: string, gpu_ms: number, cost: number }[] }} */
  let book = null;
  let seq = -1;
  const facts = h("div", {});
  const cards = ["Clusters", "Our jobs there", "Their jobs here", "Moved lately"].map((label) =>
    h("section", { class: "card", "aria-label": label, hidden: true }),
  );
  root.append(h("div", { class: "stack" }, h("h1", {}, "Neighbors"), facts, cards));

  async function ask() {
    try {
      const [known, sent] = await Promise.all([
        get("/v1/neighbors", { signal }),
        get(`/v1/jobs?label=home&limit=${HERE_MAX}`, { signal }),
      ]);
      [neighbors, theirs] = [known, sent.filter((job) => mark(job)[0])];
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

  function draw() {
    if (!shared || signal.aborted) return;
    const guests = shared.guests.filter((name) => !neighbors.some((one) => one.name === name));
    const bare = !neighbors.length && !guests.length;
    for (const card of cards) card.hidden = bare;
    if (bare) {
      const text = "This cluster has no neighbors. Another cluster invites it with:";
      return replace(facts, empty(text, "shoal neighbor invite NAME"));
    }
    const cut = neighbors.filter((one) => one.problem).map((one) => one.name);
    const text = `${plural(count(), "job")} of ours there; ${plural(theirs.length, "job")} of theirs here`;
    const sentence = cut.length ? `No contact with ${cut.join(", ")}; ${text}` : text;
    replace(facts, verdict(sentence, cut.length ? "bad" : "ok"));
    const filled = [clusters(guests), ourJobs(), theirJobs(), moves()];
    for (const [at, parts] of filled.entries()) replace(cards[at], h("h2", {}, cards[at].ariaLabel), parts);
  }

  const count = () => sum(neighbors, (one) => one.count);

  // -- the clusters --------------------------------------------------------------------------

  function clusters(guests) {
    const offers = { ...cluster.status, ...shared, waiting: cluster.status.jobs.waiting ?? 0 };
    const rows = [
      { name: "", offers, looks: ["ready", "Here"] },
      ...neighbors.map(rowOf),
      ...guests.map((name) => ({ name, looks: ["idle", "Only sends jobs"] })),
    ];
    const owed = (one) => amount(book.owed, (row) => row.neighbor === one.name, one.currency);
    const used = (name) =>
      amount(book?.rows, (row) => row.key === name && shared.guests.includes(name), book?.currency);
    const button = (one) => h("button", { class: "danger", onclick: () => remove(one) }, "Remove");
    const columns = [
      ["Cluster", (row) => words(h("b", {}, row.name || "This cluster"), labels(row.one))],
      ["State", (row) => words(chip(...row.looks), row.bad)],
      ["num:GPUs free", ({ offers }) => offers && `${whole(offers.gpus_free)} of ${whole(offers.gpus)}`],
      ["num:Waiting", ({ offers }) => offers && whole(offers.waiting)],
      ["num:GPU-hour", ({ offers }) => offers && money(offers.price, offers.currency)],
      ["num:Round trip", ({ one }) => (one?.round_trip_ms ? `${whole(one.round_trip_ms)} ms` : null)],
      ["Version", ({ offers }) => offers?.version || "–"],
      ["num:Our jobs", ({ one }) => one && whole(one.count)],
      ["num:Their jobs", ({ name }) => name && whole(theirs.filter((job) => sender(job) === name).length)],
      ...(book?.owed?.length ? [["num:We owe", ({ one }) => one && owed(one)]] : []),
      ...(shared.guests.length ? [["num:They used", ({ name }) => used(name)]] : []),
      ...(isAdmin() && neighbors.length ? [["", ({ one }) => one && button(one)]] : []),
    ];
    const note = `GPU-hour: the lowest price. Owed and used: in the last ${DAYS} days.`;
    return [grid(columns, rows, (row) => row.name || "here"), h("p", { class: "dim small" }, note)];
  }

  /** @param {Api.NeighborView} one */
  function rowOf(one) {
    const unheard = one.heard_ms_ago < 0;
    const last = unheard ? "" : ` (last heard ${span(one.heard_ms_ago)} ago)`;
    const row = { name: one.name, one, offers: unheard ? null : one };
    if (one.problem) return { ...row, looks: ["down", "No contact"], bad: one.problem + last };
    return { ...row, looks: unheard ? ["joining", "Not heard yet"] : ["ready", "Reachable"] };
  }

  /** In money if there is a price for all of it. */
  function amount(all, counts, currency) {
    const rows = (all ?? []).filter(counts);
    const cost = rows.every((one) => one.cost !== null) && sum(rows, (one) => one.cost);
    const hours = sum(rows, (one) => one.gpu_ms) / HOUR_MS;
    return cost && currency ? money(cost, currency) : hours ? `${short(hours)} GPU-h` : null;
  }

  /** @param {Api.NeighborView} one */
  async function remove(one) {
    const path = /** @type {const} */ (`/v1/neighbors/${encodeURIComponent(one.name)}`);
    try {
      const { lines, jobs } = await get(`${path}/gone`, { signal, aside: true });
      const gone = jobs.length > 0;
      const items = lines.map((line) => h("li", {}, line));
      confirm({
        title: gone ? `Declare ${one.name} gone` : `Remove ${one.name}`,
        text: gone
          ? "You say that it will never answer again. If this is only a cut, wait: its jobs run on."
          : "No more jobs go there. It can be added again.",
        verb: gone ? "Declare gone" : "Remove neighbor",
        danger: true,
        body: h("ul", { class: "effects" }, items),
        act: async () => {
          const done = await call("DELETE", gone ? `${path}?gone=true` : path);
          ask();
          return { note: done.note || `${one.name} is not a neighbor any more` };
        },
      });
    } catch (error) {
      if (!signal.aborted) toast(error.message);
    }
  }

  // -- the jobs ------------------------------------------------------------------------------

  function ourJobs() {
    const rows = neighbors.flatMap((one) => one.jobs.map((job) => ({ ...job, one })));
    const left = count() - rows.length;
    const hours = (row) => (row.running_ms ? (row.gpus * Math.max(0, now() - row.running_ms)) / HOUR_MS : 0);
    const columns = [
      ["Job", (row) => link(row.job)],
      ["Neighbor", (row) => row.one.name],
      ["Id there", (row) => row.id || "–"],
      ["State", (row) => words(chip(row.state || "joining", row.state || "Not taken yet"), taken(row.withdrawn))],
      ["num:GPUs", (row) => whole(row.gpus)],
      ["num:There for", (row) => since(row.since_ms)],
      ["num:Run time", (row) => since(row.running_ms)],
      ["num:Cost so far", (row) => (row.price === null ? null : money(hours(row) * row.price, row.one.currency))],
    ];
    return [
      rows.length ? grid(columns, rows, (row) => row.job) : h("p", { class: "dim" }, "No jobs to show."),
      left > 0 ? h("p", { class: "dim small" }, `and ${plural(left, "more job")}`) : null,
    ];
  }
  const taken = (why) => why && `Being taken back: ${why}`;

  /** The neighbor that has sent the job; or its tenant, if ours do not go there. */
  const sender = (job) =>
    neighbors.find((one) => one.cluster === mark(job)[0] && shared.guests.includes(job.tenant))?.name ?? job.tenant;

  function theirJobs() {
    const columns = [
      ["Job", (job) => link(job.id)],
      ["Neighbor", sender],
      ["Id there", (job) => mark(job)[1] || "–"],
      ["State", (job) => chip(job.state)],
      ["num:GPUs", (job) => whole(job.gpus * job.members)],
      ["num:Here for", (job) => since(job.submitted_ms)],
      ["num:Run time", (job) => since(job.running_ms)],
    ];
    return [
      theirs.length ? grid(columns, theirs, (job) => job.id) : h("p", { class: "dim" }, "No jobs to show."),
      theirs.length < HERE_MAX ? null : h("a", { href: "#/jobs?label=home" }, "All of them"),
    ];
  }

  const moves = () =>
    shared.moved.length
      ? h("ol", { class: "events" }, [...shared.moved].reverse().map(eventLine))
      : h("p", { class: "dim" }, "No job has moved lately.");

  const timer = setInterval(() => {
    if (!document.hidden) ask();
  }, ASK_MS);
  const quiet = listen((change) => change.tick && draw()); // clocks run on
  ask();
  return () => {
    stopper.abort();
    clearInterval(timer);
    quiet();
  };
}
