// The cells of the table of jobs, and which columns are usual. The table itself is in columns.js.

import { jobColor } from "./colors.js";
import { TABLE } from "./columns.js";
import { ago, bytes, chip, h, moment, shape, short, span, whole } from "./dom.js";
import { jobOf, now } from "./live.js";
import { progress } from "./progress.js";
import { allowed } from "./views.js";

const IDLE = ["waiting", "away"]; // they hold nothing here

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
      style: { background: row.finished_ms || IDLE.includes(row.state) ? "transparent" : jobColor(row.id) },
    }),
    " ",
    h("a", { ...quiet, href: `#/job/${row.id}` }, row.id),
    row.name ? ` ${row.name}` : "",
  );

/** @param {Row} row */
function about(row) {
  if (row.nap_ms) return `Suspended for ${span(now() - row.nap_ms)}: ${row.why}`;
  if (row.finished_ms || row.state === "waiting") return row.why;
  if (row.line?.step || row.line?.elements) return progress(row.line);
  return row.array
    ? row.why
    : row.idle_since_ms
      ? row.why
      : row.state === "running"
        ? row.service
          ? `Replica of ${row.service}`
          : ""
        : row.why;
}

/** Columns that are more than a value. @type {{ [name: string]: (row: Row) => any }} */
const CELLS = {
  id: job,
  state: (row) => chip(row.state),
  user: (row) => (row.user ? link("user", row.user) : "–"),
  tenant: (row) => link("tenant", row.tenant),
  shape,
  gpus: (row) => short(((row.size || row.members) * row.gpus * (row.gpu_milli || 1000)) / 1000),
  gpu_use: (row) => (row.gpu_busy_milli == null ? "–" : `${Math.round(row.gpu_busy_milli / 10)}%`),
  gpu_memory: (row) => (row.gpu_used_mb == null ? "–" : bytes(row.gpu_used_mb * 2 ** 20)),
  why: about,
  progress: (row) => (row.line ? progress(row.line) : row.progress ? `step ${whole(row.progress.step)}` : "–"),
  nodes: (row) => [
    row.nodes.slice(0, 3).map((node, at) => [at ? ", " : "", link("node", node)]),
    row.nodes.length > 3 ? ` +${row.nodes.length - 3}` : "",
  ],
  cluster: (row) => row.line?.cluster || row.away?.neighbor || "–",
  time: ran,
  try: (row) => String(row.attempt || "–"),
  labels: (row) =>
    Object.entries(row.labels ?? {}).map(([key, value], at) => [
      at ? " " : "",
      h("a", { ...quiet, href: `#/jobs?label=${encodeURIComponent(`${key}=${value}`)}` }, `${key}=${value}`),
    ]),
  command: (row) => h("code", {}, row.command),
};
const KINDS = { moment: ms, duration: (value) => span(value) };

export const COLUMNS = TABLE.map(([key, head, kind, field, sort, width, also]) => {
  const draw = KINDS[kind] ?? ((value) => String(value ?? "") || "–");
  return {
    key,
    head,
    sort,
    width,
    also,
    number: kind !== "text",
    cell: CELLS[key] ?? ((row) => draw(field ? row[field] : row.cells?.[key])),
  };
});
/** The names of columns in an address, which may have been written by an earlier page. */
export const named = (text) =>
  text.split(",").flatMap((name) => COLUMNS.find((one) => name && (one.key === name || one.also === name))?.key ?? []);

/** The columns that say something about these rows and fit. */
export function usual(wide, rows) {
  const users = wide && rows.some((row) => row.user);
  const measured = wide && rows.some((row) => row.gpu_busy_milli != null);
  const tenants = wide && new Set(rows.map((row) => row.tenant)).size > 1;
  return [
    "id",
    "state",
    ...(users ? ["user"] : []),
    ...(tenants ? ["tenant"] : []),
    "shape",
    ...(measured ? ["gpu_use", "gpu_memory"] : []),
    "why",
    ...(rows.some((row) => row.away) ? ["cluster"] : []),
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
