// How far a job is, and a warning if it has been quiet for unusually long.

import { chip, h, short, span, whole } from "./dom.js";
import { now } from "./live.js";

const QUIET_MS = 60_000;
const QUIET_STEPS = 10; // times the usual duration of a step

/** @param {Api.JobLine} job */
export function progress(job) {
  if (job.elements)
    return h(
      "div",
      {},
      h("span", {}, job.counts),
      h("div", { class: "bar" }, h("i", { style: { width: `${(100 * (job.done ?? 0)) / job.elements}%` } })),
    );
  if (!job.step) return h("span", { class: "dim" }, "");
  const share = job.steps ? job.step / job.steps : 0;
  const left = job.steps && job.step_us ? `, ${span(((job.steps - job.step) * job.step_us) / 1000)} left` : "";
  const words = job.steps ? `step ${whole(job.step)} of ${whole(job.steps)}${left}` : `step ${whole(job.step)}`;
  return h(
    "div",
    {},
    h("span", {}, words, job.loss === undefined || job.loss === null ? "" : ` · loss ${short(job.loss)}`),
    job.slow?.length ? [" ", chip("suspect", "Slow member")] : null,
    quiet(job),
    job.steps ? h("div", { class: "bar" }, h("i", { style: { width: `${100 * share}%` } })) : null,
  );
}

/**
 * A warning for a job that has reported steps but none for an unusually long time.
 * @param {Api.JobLine} job
 */
function quiet(job) {
  const ms = job.state === "running" && job.moved_ms ? now() - job.moved_ms : 0;
  return ms > Math.max(QUIET_MS, (QUIET_STEPS * (job.step_us ?? 0)) / 1000)
    ? [" ", chip("suspect", `No step for ${span(ms)}`)]
    : null;
}
