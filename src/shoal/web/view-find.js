// Finding jobs: the words in the box are in the address, so a link shows the same list.

import { get } from "./api.js";
import { ago, chip, h, replace, shape, span, throttled } from "./dom.js";
import { listen, now } from "./live.js";
import { table } from "./table.js";

const WORDS = { user: "user", tenant: "tenant", state: "state", label: "label", node: "on_node", name: "name" };
const UNITS = { s: 1000, m: 60_000, h: 3_600_000, d: 86_400_000 };
const LIMIT = 100;

/** "state:failed label:run=a since:2h train-*" as the API wants it. */
export function query(text, at) {
  const found = new URLSearchParams({ finished: "true", limit: String(LIMIT) });
  for (const word of text.trim().split(/\s+/).filter(Boolean)) {
    const [key, ...rest] = word.split(":"), value = rest.join(":");
    if (!rest.length) { found.set("name", /[*?[]/.test(word) ? word : `*${word}*`); continue; }
    const time = key === "since" && value.match(/^(\d+)([smhd])$/);
    if (time) found.set("since_ms", String(Math.max(0, at - Number(time[1]) * UNITS[time[2]])));
    else if (WORDS[key]) found.append(WORDS[key], value);
    else throw new Error(`"${word}" cannot be read; write e.g. state:failed label:run=a since:2h user:ada node:n1 or a name`);
  }
  return found;
}

export function mount(root, argument) {
  const box = h("input", { type: "search", value: argument ?? "", placeholder: "state:failed label:run=a since:2h train-*", "aria-label": "Find jobs", size: 60, maxlength: 500 });
  const form = h("form", { class: "row", role: "search" }, box, h("button", {}, "Find"));
  const list = h("section", { class: "card", "aria-label": "Jobs found" });
  root.append(h("div", { class: "stack" }, h("h1", {}, "Find jobs"), form, list));
  form.addEventListener("submit", (event) => { event.preventDefault(); location.hash = `#/find/${encodeURIComponent(box.value.trim())}`; });
  let alive = true, asking = false;

  async function ask() {
    if (asking || !alive) return;
    asking = true;
    let parts;
    try { parts = drawn(await get(`/v1/jobs?${query(argument ?? "", now())}`)); } catch (error) { parts = [h("p", { class: "problem" }, error.message)]; }
    asking = false;
    if (alive) replace(list, ...parts);
  }
  const soon = throttled(1000, ask);
  const stop = listen((change) => { if (change.jobs?.length || change.ended?.length || change.whole) soon(); });
  ask();
  return () => { alive = false; stop(); soon.stop(); };
}

function drawn(rows) {
  if (!rows.length) return [h("p", { class: "dim" }, "No jobs match.")];
  const lines = rows.map((row) => h("tr", { "data-key": row.id, "data-job": row.id },
    h("td", {}, h("a", { href: `#/job/${row.id}` }, row.name ? `${row.id} ${row.name}` : row.id), h("div", { class: "dim small" }, `${shape(row)} · ${row.tenant}${row.user ? ` · ${row.user}` : ""}`)),
    h("td", {}, chip(row.state)),
    h("td", { class: "small" }, Object.entries(row.labels ?? {}).map(([key, value]) => h("a", { class: "label", href: `#/find/${encodeURIComponent(`label:${key}=${value}`)}` }, `${key}=${value} `))),
    h("td", { class: "dim small" }, row.nodes.slice(0, 4).join(", ")),
    h("td", { class: "num" }, span((row.finished_ms ?? now()) - (row.running_ms ?? row.submitted_ms))),
    h("td", { class: "num dim small" }, ago(row.finished_ms ?? row.submitted_ms, now()))));
  const more = rows.length === LIMIT ? h("p", { class: "dim small" }, `The first ${LIMIT} jobs; add words to find fewer.`) : null;
  return [table(["Job", "State", "Labels", "Nodes", "num:Time", "num:Last"], lines), more];
}
