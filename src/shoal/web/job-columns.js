// The columns of the table of jobs: a head, how it sorts, its width, and what is in a cell.

import { jobColour } from "./colours.js";
import { ago, chip, h, moment, shape, span } from "./dom.js";
import { jobOf, now } from "./live.js";
import { progress } from "./progress.js";
import { allowed } from "./views.js";

/** @typedef {Api.JobRow & { nap_ms?: number, line?: Api.JobLine }} Row */

const quiet = { tabindex: "-1" }; // in a grid, the arrow keys move; Tab leaves it
const link = (view, name, text = name) =>
  allowed(view) ? h("a", { ...quiet, href: `#/${view}/${encodeURIComponent(name)}` }, text) : text;
const ms = (at) => (at ? h("span", { title: moment(at, now()) }, ago(at, now())) : "–");

/**
 * The row with what the stream has told since it was asked for.
 * @param {Api.JobRow} row
 * @returns {Row}
 */
export function current(row) {
  const line = jobOf(row.id);
  if (!line || (row.finished_ms && !line.finished_ms)) return row;
  const why = line.state === row.state || line.state === "waiting" ? line.why || row.why : (line.why ?? "");
  return {
    ...row,
    state: line.state,
    attempt: line.attempt ?? row.attempt,
    size: line.size ?? 0,
    running_ms: line.running_ms || row.running_ms,
    finished_ms: line.finished_ms || null,
    why,
    nap_ms: line.nap_ms,
    line,
  };
}

/** @param {Row} row */
const ran = (row) =>
  row.running_ms && row.state !== "waiting" ? span((row.finished_ms || row.nap_ms || now()) - row.running_ms) : "–";
/** @param {Row} row */
const job = (row) =>
  h(
    "span",
    {},
    h("i", {
      class: "dot",
      style: { background: row.finished_ms || row.state === "waiting" ? "transparent" : jobColour(row.id) },
    }),
    " ",
    h("a", { ...quiet, href: `#/job/${row.id}` }, row.id),
    row.name ? ` ${row.name}` : "",
  );

/** @param {Row} row */
function about(row) {
  if (row.nap_ms) return `${row.state} for ${span(now() - row.nap_ms)}: ${row.why}`;
  if (row.finished_ms || row.state === "waiting") return row.why;
  if (row.line?.step || row.line?.elements) return progress(row.line);
  return row.array
    ? row.why
    : row.idle_since_ms
      ? row.why
      : row.state === "running"
        ? row.service
          ? `replica of ${row.service}`
          : ""
        : row.why;
}

/** [key, head, what the server sorts by, width, cell]; a head with "#" is a column of numbers. */
export const COLUMNS = /** @type {[string, string, string, string, (row: Row) => any][]} */ ([
  ["job", "Job", "name", "minmax(150px, 1.6fr)", job],
  ["state", "State", "state", "104px", (row) => chip(row.state)],
  ["user", "User", "user", "minmax(60px, .6fr)", (row) => (row.user ? link("user", row.user) : "–")],
  ["tenant", "Tenant", "tenant", "minmax(60px, .6fr)", (row) => link("tenant", row.tenant)],
  ["size", "Size", "gpus", "84px", (row) => shape(row)],
  ["why", "What it does or waits for", "", "minmax(140px, 3fr)", about],
  [
    "nodes",
    "Nodes",
    "",
    "minmax(70px, .8fr)",
    (row) => [
      row.nodes.slice(0, 3).map((node, at) => [at ? ", " : "", link("node", node)]),
      row.nodes.length > 3 ? ` +${row.nodes.length - 3}` : "",
    ],
  ],
  ["time", "#Ran", "time", "76px", ran],
  ["submitted", "#Submitted", "submitted", "92px", (row) => ms(row.submitted_ms)],
  ["started", "#Started", "started", "92px", (row) => ms(row.running_ms)],
  ["ended", "#Ended", "ended", "92px", (row) => ms(row.finished_ms)],
  ["attempts", "#Tries", "attempts", "64px", (row) => String(row.attempt || "–")],
  ["priority", "#Priority", "priority", "72px", (row) => String(row.priority)],
  ["service", "Service", "", "minmax(70px, .7fr)", (row) => row.service || "–"],
  [
    "labels",
    "Labels",
    "",
    "minmax(90px, 1fr)",
    (row) =>
      Object.entries(row.labels ?? {}).map(([key, value], at) => [
        at ? " " : "",
        h("a", { ...quiet, href: `#/jobs?label=${encodeURIComponent(`${key}=${value}`)}` }, `${key}=${value}`),
      ]),
  ],
  ["command", "Command", "", "minmax(120px, 2fr)", (row) => h("code", {}, row.command)],
]).map(([key, head, sort, width, cell]) => ({
  key,
  head: head.replace("#", ""),
  number: head.startsWith("#"),
  sort,
  width,
  cell,
}));

/** The columns that say something about these rows and fit. */
export function usual(wide, rows) {
  const users = wide && rows.some((row) => row.user);
  const tenants = wide && new Set(rows.map((row) => row.tenant)).size > 1;
  return [
    "job",
    "state",
    ...(users ? ["user"] : []),
    ...(tenants ? ["tenant"] : []),
    "size",
    "why",
    ...(wide ? ["nodes"] : []),
    "time",
    "submitted",
  ];
}

/**
 * One card for the phone: three lines of what matters.
 * @param {Row} row
 */
export function card(row) {
  return [
    h("div", { class: "row" }, job(row), h("span", { class: "push" }, chip(row.state))),
    h(
      "div",
      { class: "dim small" },
      [
        shape(row),
        row.user || row.tenant,
        row.running_ms && row.state !== "waiting" ? `ran ${ran(row)}` : `submitted ${ago(row.submitted_ms, now())}`,
      ].join(" · "),
    ),
    h("div", { class: "small what" }, about(row)),
  ];
}
