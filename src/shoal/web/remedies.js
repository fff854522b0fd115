// What would let a waiting job start sooner, each with a button that does it.

import { uncordon } from "./actions.js";
import { get, isAdmin, mayChange, newKey, post } from "./api.js";
import { confirm } from "./dialog.js";
import { h, jobName } from "./dom.js";

/**
 * A list of the remedies of a row of the queue, or of a job with its `remedies`; null if there are none.
 * @param {Pick<Api.QueueRow, "id" | "name" | "service" | "attempt" | "remedies">} row
 */
export function remedyButtons(row) {
  const found = row.remedies ?? [];
  return found.length
    ? h(
        "ul",
        { class: "help" },
        found.map((one) =>
          h(
            "li",
            { "data-key": one.text },
            one.text,
            one.cost ? h("div", { class: "dim" }, one.cost) : null,
            act(row, one),
          ),
        ),
      )
    : null;
}

/** @param {Api.Remedy} one */
function act(row, one) {
  if (one.node) return isAdmin() ? button(`Uncordon ${one.node}`, () => uncordon(one.node)) : null;
  if (one.tenant)
    return isAdmin() ? h("a", { href: `#/policy?tenant=${encodeURIComponent(one.tenant)}` }, "Open policy") : null;
  const apart = row.service || row.id.includes("."); // replicas and elements belong to something larger
  if (!mayChange() || apart || !Object.keys(one.fields ?? {}).length) return null;
  // one that has run keeps its place and its checkpoints; a changed one is another job
  if (one.how === "resubmit")
    return h("a", { class: "button", href: formOf(row.id, one.fields, false), "data-key": "run" }, "Run with changes");
  return [
    button("Apply and resubmit", () => instead(row, one)),
    h("a", { href: formOf(row.id, one.fields, true), "data-key": "edit" }, "Edit first"),
  ];
}

const button = (label, run) =>
  h(
    "button",
    {
      "data-key": label,
      onclick: (event) => {
        event.stopPropagation();
        run();
      },
    },
    label,
  );

/** The form of the job with these changes filled in, to be submitted beside it or in its place. */
function formOf(id, fields, inPlace) {
  const query = new URLSearchParams({ like: id, ...(inPlace ? { instead: "1" } : {}) });
  for (const [name, value] of Object.entries(fields))
    query.set(name, Array.isArray(value) ? value.join("\n") : value === true ? "1" : value || "");
  return `#/new?${query}`;
}

/** @param {Api.Remedy} one */
function instead(row, one) {
  const key = newKey();
  return confirm({
    title: `Change ${jobName(row)}`,
    verb: "Apply and resubmit",
    text:
      `${one.text[0].toUpperCase()}${one.text.slice(1)}. ${row.id} is cancelled and resubmitted with this ` +
      `change, under a new ID. If it has started by then, nothing changes.`,
    act: async () => {
      const form = await get(`/v1/form?like=${encodeURIComponent(row.id)}&instead=true`);
      if (!form.fields) {
        location.hash = formOf(row.id, one.fields, true);
        return { note: "Edit the job file to apply this change" };
      }
      const job = await post("/v1/form/submit", {
        fields: { ...form.fields, ...one.fields },
        like: row.id,
        instead: true,
        key,
      });
      location.hash = `#/job/${job.id}`;
      return { note: `${job.id} replaces ${row.id}` };
    },
  });
}
