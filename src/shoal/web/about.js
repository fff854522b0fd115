// What a job belongs to and what people wrote about it: facts for the top of its view.

import { h, moment } from "./dom.js";
import { now } from "./live.js";

const WHEN = { ok: "succeeds", any: "ends", fail: "fails" };

const fact = (name, ...value) => h("div", { "data-fact": name.toLowerCase() }, h("dt", {}, name), h("dd", {}, value));
const toJob = (id) => h("a", { href: `#/job/${id}`, "data-key": id }, id);

/** @param {Api.JobView} job */
export function about(job) {
  const spec = job.spec;
  const labels = Object.entries(job.labels ?? {});
  const after = (spec.after ?? []).map((text, at) => {
    const [id, when] = text.split(":");
    return [at ? ", " : "", toJob(id), ` ${WHEN[when || "ok"]}`];
  });
  return [
    spec.array ? fact("Array", "element ", String(spec.index ?? 0), " of ", toJob(spec.array)) : null,
    spec.workflow ? fact("Workflow", toJob(spec.workflow)) : null,
    spec.schedule
      ? fact(
          "Schedule",
          h("a", { href: "#/jobs?tab=schedules" }, spec.schedule),
          spec.scheduled_ms ? `, due ${moment(spec.scheduled_ms, now())}` : "",
        )
      : null,
    after.length ? fact("Runs after", after) : null,
    spec.begin_ms ? fact("Not before", moment(spec.begin_ms, now())) : null,
    labels.length
      ? fact(
          "Labels",
          labels.map(([key, value], at) => [
            at ? ", " : "",
            h(
              "a",
              { href: `#/jobs?label=${encodeURIComponent(value ? `${key}=${value}` : key)}`, "data-key": key },
              value ? `${key}=${value}` : key,
            ),
          ]),
        )
      : null,
  ];
}

/** @param {Api.JobView} job */
export function notes(job) {
  return (job.notes ?? [])
    .toReversed()
    .map((note) =>
      h(
        "p",
        { class: "note", "data-note": "" },
        note.text,
        h("span", { class: "dim small" }, ` ${note.who ? `${note.who}, ` : ""}${moment(note.at_ms, now())}`),
      ),
    );
}
