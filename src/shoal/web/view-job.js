// One job: its history, curves, output, files and cost.

import { about, notes } from "./about.js";
import { jobActions } from "./actions.js";
import { get, jobPath, maybe } from "./api.js";
import { jobColor } from "./colors.js";
import { offer } from "./commands.js";
import { copyable } from "./copy.js";
import { chip, empty, h, jobName, moment, plural, shape, span, throttled, whole } from "./dom.js";
import { Elements } from "./elements.js";
import { followButton } from "./follow.js";
import { JobCurves } from "./job-curves.js";
import { awayFact, commandOf, drawCost, drawEvents, fact, members, napFact, toTime } from "./job-parts.js";
import { failedAttempt, failure, wait } from "./job-state.js";
import { drawTimeline, runTime } from "./job-timeline.js";
import { KeptFiles } from "./kept.js";
import { jobOf, listen, now } from "./live.js";
import { LogView } from "./logs.js";
import { replace } from "./patch.js";
import { progress } from "./progress.js";
import { JobCurve } from "./series.js";
import { drawWorkflow } from "./workflow.js";

const ASK_MS = 2000;
const RUNS_MAX = 20; // of the same name, to be compared with

export function mount(root, id) {
  const star = followButton("job", id);
  const path = jobPath(id);
  const ending = new AbortController();
  const { signal } = ending;
  const head = h("div", { class: "stack" });
  const line = h("section", { class: "card", "aria-label": "Timeline" });
  const flow = h("section", { class: "card", "aria-label": "Workflow", hidden: true });
  const cost = h("section", { class: "card", "aria-label": "Cost", hidden: true });
  const gang = h("section", { class: "card", "aria-label": "Members" });
  const events = h("section", { class: "card", "aria-label": "Events" });
  const left = h("div", { class: "stack" }, gang, cost);
  const curves = new JobCurves();
  const curve = new JobCurve(id);
  const logs = new LogView(id);
  const elements = new Elements(id);
  const files = new KeptFiles(id);
  root.append(
    h(
      "div",
      { class: "stack" },
      head,
      flow,
      elements.element,
      line,
      curves.element,
      logs.element,
      curves.more,
      files.element,
      h("div", { class: "grid2" }, left, events),
    ),
  );
  /** @type {Api.JobView} */
  let job = null;
  /** @type {Api.WhyView} */
  let history = null;
  let busy = false;
  let again = false;
  let over = false;
  /** @type {Api.JobRow[]} */
  let runs = null;
  /** @type {Api.AttemptRecord} */
  let failed = null;
  /** @type {Answer<"GET", "/v1/form">} */
  let form = null;

  async function ask() {
    if (busy) {
      again = true;
      return;
    }
    busy = true;
    try {
      [job, history] = await Promise.all([get(path, { signal }), get(`${path}/why`, { signal })]);
      if (signal.aborted) return;
      drawHead();
      drawTimeline(line, history, job);
      drawEvents(events, history);
      line.hidden = Boolean(job.array) || !history.attempts.length;
      gang.hidden = Boolean(job.array) || !job.gang.length;
      replace(gang, ...members(job));
      logs.know(job);
      await Promise.all([
        drawWorkflow(flow, job),
        elements.draw(job),
        files.draw(job),
        drawCurves(),
        drawSpent(),
        others(),
        explain(),
        reproduce(),
      ]);
      over = Boolean(job.finished_ms);
    } catch (error) {
      if (!signal.aborted && !job) logs.element.hidden = error.status === 404;
      if (!signal.aborted && !job)
        replace(
          head,
          h("h1", {}, id),
          error.status === 404
            ? empty(`There is no job ${id}.`, "shoal ps -a")
            : h("p", { class: "problem" }, error.message),
        );
    } finally {
      busy = false;
      if (again && !signal.aborted) {
        again = false;
        soon();
      }
    }
  }

  async function drawCurves() {
    if (job.array || !history.attempts.length) return;
    const series = await curve.more({ signal });
    if (signal.aborted) return;
    curves.draw(job, history, series, jobOf(id)?.slow ?? job.progress?.slow ?? []);
    await curves.drawLoad(job, history, { signal });
  }

  async function drawSpent() {
    const spent = job.gpus ? await maybe(`${path}/cost`, { signal }) : null;
    if (signal.aborted) return;
    drawCost(cost, spent);
    left.hidden = Boolean(gang.hidden && cost.hidden);
  }

  /** What the member that failed first wrote last: asked for once for each attempt. */
  async function explain() {
    const attempt = failedAttempt(job, history)?.attempt;
    if (!attempt || failed?.attempt === attempt) return;
    const told = await maybe(`${path}/explanation`, { signal });
    failed = told?.attempts.find((one) => one.attempt === attempt) ?? null;
    drawHead();
  }
  /** The command that submits it again. */
  async function reproduce() {
    if (form || job.spec.service) return;
    form = await maybe(`/v1/form?like=${encodeURIComponent(id)}`, { signal });
    drawHead();
  }

  /** Runs of the same name, newest first: the one before this is offered for a comparison. */
  async function others() {
    if (runs || !job.name || job.array || job.spec.service) return;
    runs = [];
    const found = await maybe(`/v1/jobs?name=${encodeURIComponent(job.name)}&finished=true&limit=${RUNS_MAX}`, {
      signal,
    });
    runs = (found ?? []).filter((one) => one.id !== id && !one.array).sort((a, b) => b.submitted_ms - a.submitted_ms);
    drawHead();
  }
  const previous = () => runs?.find((one) => one.submitted_ms <= job.submitted_ms) ?? runs?.[0];
  const compare = () => {
    const other = previous();
    return h(
      "a",
      {
        class: "button",
        "data-key": "compare",
        href: `#/compare/${other ? `${other.id},` : ""}${id}`,
        title: other ? `Previous run: ${jobName(other)}, ${other.state}` : "Choose another run",
      },
      other ? `Compare with ${other.id}` : "Compare",
    );
  };

  function drawHead() {
    const last = failedAttempt(job, history);
    const waits = job.state === "waiting" && !job.array;
    const trials = () => h("a", { class: "button", "data-key": "sweep", href: `#/sweep/${id}` }, "Compare trials");
    const own = job.array ? trials() : job.spec.service ? null : compare();
    replace(
      head,
      h("p", { class: "small" }, h("a", { href: "#/jobs", "data-key": "back" }, "← Jobs")),
      h(
        "div",
        { class: "row" },
        h("i", { class: "dot", style: { background: jobColor(id) } }),
        h("h1", {}, jobName(job)),
        chip(job.state),
        star,
        h("span", { class: "push row" }, own, jobActions(jobForActions())),
      ),
      last ? failure(job, failed?.attempt === last.attempt ? failed : last, () => logs.firstError()) : null,
      waits ? wait(job, history) : null,
      last || waits ? null : h("p", { class: "why" }, history.why || job.why || ""),
      jobOf(id)?.step || jobOf(id)?.elements ? progress(jobOf(id)) : null,
      h(
        "dl",
        { class: "facts" },
        fact("Resources", shape(job)),
        fact("Tenant", h("a", { href: `#/tenant/${encodeURIComponent(job.tenant)}` }, job.tenant)),
        job.spec.user
          ? fact("User", h("a", { href: `#/user/${encodeURIComponent(job.spec.user)}` }, job.spec.user))
          : null,
        job.array || !job.attempt ? null : fact("Attempt", String(job.attempt)),
        fact("Submitted", toTime(job.submitted_ms, moment(job.submitted_ms, now()))),
        job.attempt ? fact("Run time", span(runTime(history.attempts, job.finished_ms ?? now()))) : null,
        job.finished_ms ? fact("Ended", toTime(job.finished_ms, moment(job.finished_ms, now()))) : null,
        napFact(job),
        awayFact(job),
        job.losses || job.failures || job.hangs
          ? fact(
              "Interruptions",
              [
                job.losses && plural(job.losses, "lost node"),
                job.failures && plural(job.failures, "failure"),
                job.hangs && plural(job.hangs, "hang"),
              ]
                .filter(Boolean)
                .join(", "),
            )
          : null,
        about(job),
        job.progress?.saved_step ? fact("Last checkpoint", `step ${whole(job.progress.saved_step)}`) : null,
        h("div", { class: "wide" }, h("dt", {}, "Command"), h("dd", { class: "mono" }, commandOf(job))),
        form?.command_line
          ? h(
              "div",
              { class: "wide" },
              h("dt", {}, "Reproduce"),
              h("dd", {}, copyable(form.command_line, "Command to run it again")),
              form.notes.map((text) => h("dd", { class: "dim small" }, text)),
            )
          : null,
      ),
      notes(job),
    );
  }
  const jobForActions = () => ({ ...job, service: job.spec?.service ?? "", finished_ms: job.finished_ms ?? 0 });

  const soon = throttled(400, ask);
  const stop = listen((change) => {
    if (!change.jobs?.some((one) => one.id === id) && !change.ended?.some((one) => one.id === id)) return;
    over = false;
    soon();
  });
  const unoffer = offer(() =>
    !job || job.array
      ? []
      : [
          {
            title: `Compare ${id} with another run`,
            hint: "job",
            run: () => {
              location.hash = compare().getAttribute("href");
            },
          },
          {
            title: `Run ${id} with changes`,
            hint: "job",
            run: () => {
              location.hash = `#/new?like=${id}`;
            },
          },
        ],
  );
  // Predicting the start of a waiting job is costly in a large cluster, so it is fetched less often.
  let turn = 0;
  const timer = setInterval(() => {
    turn += 1;
    if (!over && !document.hidden && (job?.state !== "waiting" || turn % 4 === 0)) ask();
  }, ASK_MS);
  ask();
  return () => {
    ending.abort();
    stop();
    unoffer();
    soon.stop();
    clearInterval(timer);
    logs.stop();
    curves.stop();
    star.stop();
  };
}
