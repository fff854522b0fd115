// What would let a waiting job start sooner, each with a button that does it.

import { get, isAdmin, mayChange, newKey, nodePath, post } from "./api.js";
import { confirm } from "./dialog.js";
import { h, jobName } from "./dom.js";

/**
 * A list of the remedies of a row of the queue, or of a job with its `remedies`; null if there are none.
 * @param {Pick<Api.QueueRow, "id" | "name" | "service" | "remedies">} row
 */
export function remedyButtons(row) {
  const found = row.remedies ?? [];
  return found.length
    ? h(
        "ul",
        { class: "help" },
        found.map((one) => h("li", { "data-key": one.text }, one.text, act(row, one))),
      )
    : null;
}

/** @param {Api.Remedy} one */
function act(row, one) {
  if (one.node) return isAdmin() ? button(`Uncordon ${one.node}`, () => uncordon(one.node)) : null;
  if (one.tenant)
    return isAdmin() ? h("a", { href: `#/policy?tenant=${encodeURIComponent(one.tenant)}` }, "Open the policy") : null;
  const apart = row.service || row.id.includes("."); // replicas and elements belong to something larger
  if (!mayChange() || apart || !Object.keys(one.fields ?? {}).length) return null;
  return [button("Submit it so", () => instead(row, one)), h("a", { href: formOf(row.id, one.fields) }, "change more")];
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

/** The form of the job with these changes filled in, to be submitted in its place. */
function formOf(id, fields) {
  const query = new URLSearchParams({ like: id, instead: "1" });
  for (const [name, value] of Object.entries(fields))
    query.set(name, Array.isArray(value) ? value.join("\n") : value === true ? "1" : value || "");
  return `#/new?${query}`;
}

const uncordon = (node) =>
  confirm({
    title: `Uncordon ${node}`,
    verb: "Uncordon the node",
    text: "New jobs may start on it again.",
    act: () => post(`${nodePath(node)}/uncordon`),
  });

/** @param {Api.Remedy} one */
function instead(row, one) {
  const key = newKey();
  return confirm({
    title: `Change ${jobName(row)}`,
    verb: "Submit it so",
    text:
      `${one.text[0].toUpperCase()}${one.text.slice(1)}. ${row.id} is cancelled and the changed request takes ` +
      `its place, with a new id; nothing runs twice. If it has started by then, nothing happens.`,
    act: async () => {
      const form = await get(`/v1/form?like=${encodeURIComponent(row.id)}&instead=true`);
      if (!form.fields) {
        location.hash = formOf(row.id, one.fields);
        return { note: "Change it in the job file" };
      }
      const job = await post("/v1/form/submit", {
        fields: { ...form.fields, ...one.fields },
        like: row.id,
        instead: true,
        key,
      });
      location.hash = `#/job/${job.id}`;
      return { note: `${job.id} is in the place of ${row.id}` };
    },
  });
}
