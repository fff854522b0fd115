// The audit log: who did what, when, from where, and how it ended.

import { choose, chosen } from "./address.js";
import { get } from "./api.js";
import { chip, h, moment, plural } from "./dom.js";
import { now } from "./live.js";
import { replace } from "./patch.js";
import { table } from "./table.js";

const PAGE = 100;
const LIMIT_MAX = 10_000;
const FILTERS = [
  ["who", "user", "User"],
  ["in", "tenant", "Tenant"],
  ["action", "verb", "Action, e.g. jobs.cancel"],
];

/** @param {AbortSignal} signal */
export function auditLog(signal) {
  let limit = PAGE;
  let asked = 0;
  const list = h("div", {});
  const filters = FILTERS.map(([name, , label]) =>
    h("input", {
      name,
      type: "search",
      placeholder: label,
      "aria-label": label,
      value: chosen(name),
      onchange: (event) => {
        choose(name, event.currentTarget.value.trim());
        limit = PAGE;
        ask();
      },
    }),
  );
  const element = h("div", { class: "stack", "data-key": "log" }, h("div", { class: "row" }, filters), list);

  async function ask() {
    const mine = ++asked;
    const words = new URLSearchParams({ limit: String(limit) });
    for (const [name, word] of FILTERS) if (chosen(name)) words.set(word, chosen(name));
    try {
      const view = await get(`/v1/audit?${words}`, { signal });
      if (mine === asked && !signal.aborted) show(view.entries);
    } catch (error) {
      if (mine === asked && !signal.aborted) replace(list, h("p", { class: "problem", role: "alert" }, error.message));
    }
  }

  /** @param {Api.AuditEntry[]} entries */
  function show(entries) {
    const outcome = ({ status = 0 }) =>
      status < 400
        ? chip("succeeded", "done")
        : chip(status < 500 ? "suspect" : "failed", `${status < 500 ? "refused" : "failed"} (${status})`);
    const rows = entries.map((entry) =>
      h(
        "tr",
        { "data-key": entry.seq },
        h("td", {}, moment(entry.at_ms, now())),
        h("td", {}, h("b", {}, entry.who || "unknown")),
        h("td", {}, entry.tenant === "*" ? "all tenants" : entry.tenant || "–"),
        h("td", { class: "mono" }, entry.verb),
        h("td", { class: "long" }, entry.on || "–"),
        h("td", {}, outcome(entry), entry.skipped ? ` and ${plural(entry.skipped, "more")}` : null),
        h("td", { class: "dim", "data-name": "From" }, entry.source || "–"),
      ),
    );
    replace(
      list,
      rows.length
        ? table(["Time", "User", "Tenant", "Action", "Target", "Result", "From"], rows)
        : h("p", { class: "dim" }, "No entries match."),
      entries.length === limit && limit < LIMIT_MAX
        ? h(
            "button",
            {
              class: "more",
              onclick: () => {
                limit = Math.min(LIMIT_MAX, limit * 3);
                ask();
              },
            },
            "Show more",
          )
        : null,
    );
  }
  return { element, ask };
}
