// What a job's state calls for at the top of its page: why it failed, or why it waits and what would help.

import { h, moment, span } from "./dom.js";
import { now } from "./live.js";
import { remedyButtons } from "./remedies.js";
import { outlook } from "./waiting.js";

const SIGNALS = {
  1: "SIGHUP",
  2: "SIGINT",
  4: "SIGILL",
  6: "SIGABRT",
  7: "SIGBUS",
  8: "SIGFPE",
  9: "SIGKILL",
  11: "SIGSEGV",
  13: "SIGPIPE",
  15: "SIGTERM",
};
const CAUSES = {
  "exited with an error": "Exited with an error",
  "out of memory": "Out of memory",
  hardware: "Hardware failure",
  "node lost": "Node lost",
  hang: "Hung: no progress",
  "time limit": "Time limit reached",
};
export const causeOf = (cause) => CAUSES[cause] ?? `${cause.charAt(0).toUpperCase()}${cause.slice(1)}`;

/**
 * The attempt that failed last, if the job has not run since; null if there is none.
 * @param {Api.JobView} job
 * @param {Api.WhyView} history
 */
export function failedAttempt(job, history) {
  const last = history.attempts.at(-1);
  if (!last?.ended_ms || !CAUSES[last.cause]) return null;
  return ["failed", "timed-out", "waiting"].includes(job.state) ? last : null;
}

/** "Exited with code 1", "Killed by SIGKILL (code 137)" */
function exit(code) {
  if (code === null || code === undefined || code === 0) return "";
  const signal = code > 128 ? code - 128 : 0;
  return SIGNALS[signal] ? `Killed by ${SIGNALS[signal]} (code ${code})` : `Exited with code ${code}`;
}

/**
 * @param {Api.JobView} job
 * @param {Api.AttemptRecord} attempt with the last lines of the member that failed first
 * @param {() => void} open goes to the first error in the log
 */
export function failure(job, attempt, open) {
  const first = attempt.first;
  const ended = exit(first?.code ?? job.code);
  const own = attempt.cause === "exited with an error";
  const title = own && ended ? ended : causeOf(attempt.cause);
  const where = first ? `member ${first.member} on ${first.node}${first.step ? ` at step ${first.step}` : ""}` : "";
  const facts = [
    own ? "" : ended,
    where,
    `attempt ${attempt.attempt}`,
    moment(attempt.ended_ms, now()),
    job.state === "waiting" ? "will be retried" : "",
  ];
  return h(
    "section",
    { class: "alert", role: "alert", "aria-label": "Failure" },
    h(
      "div",
      { class: "row" },
      h("h2", {}, `✕ ${title}`),
      h("span", { class: "small" }, facts.filter(Boolean).join(" · ")),
      h("button", { class: "push", "data-key": "error", onclick: open }, "First error in log"),
    ),
    h("p", {}, attempt.why || job.why),
    attempt.evidence ? h("p", { class: "small" }, `Likely cause: ${attempt.evidence}`) : null,
    first?.lines.length
      ? h("pre", { class: "code", tabindex: "0", "aria-label": "Last lines of output" }, first.lines.join("\n"))
      : null,
  );
}

/**
 * @param {Api.JobView} job
 * @param {Api.WhyView} history
 */
export function wait(job, history) {
  const since = history.since_ms ?? job.submitted_ms;
  const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
  return h(
    "section",
    { class: "card stack waits", "aria-label": "Waiting" },
    h(
      "p",
      { class: "why" },
      job.attempt && job.not_before_ms > now()
        ? `Retries in ${span(job.not_before_ms - now())} at the earliest`
        : history.why || job.why,
    ),
    h(
      "dl",
      { class: "facts" },
      fact("Position", history.position ? `#${history.position} in queue` : "Not among the first 500"),
      fact("Waiting for", span(now() - since)),
      fact("Predicted start", outlook(history, since, now())),
    ),
    remedyButtons({ ...job, service: job.spec.service, remedies: history.remedies }),
  );
}
