// The actions on a job, a node or a service, as far as the role allows. Each says what it would do and asks.

import { get, isAdmin, jobPath, mayChange, newKey, nodePath, post, put, servicePath } from "./api.js";
import { confirm } from "./dialog.js";
import { ago, fixed, h, jobName, plural } from "./dom.js";
import { now } from "./live.js";
import { replace } from "./patch.js";

const JOBS_SHOWN = 8;
const DEEDS = {
  moves: "Moves",
  waits: "Stops and waits",
  stays: "Keeps running",
  replaced: "Replaced",
  ends: "Ends",
  unchanged: "Unchanged",
};
/** With a capital letter, unless it begins with a name. */
const sentence = (text, names) =>
  names.some((name) => text.startsWith(name)) ? text : text.charAt(0).toUpperCase() + text.slice(1);

/** What an action would do to one or several, as the controller says it. It is asked when the dialog opens, and again
 * by the function "ask". "more" draws what else the preview has. */
export function consequences(action, names, more = null) {
  const list = h("div", { class: "consequences", "aria-live": "polite" }, h("p", { class: "dim small" }, "Checking…"));
  let asked = 0;
  const ask = async (choices = {}) => {
    const mine = ++asked;
    const words = new URLSearchParams(choices);
    for (const name of [names].flat()) words.append("names", name);
    let parts;
    try {
      const preview = await get(`/v1/preview/${action}?${words}`);
      parts = [outcome(preview), more?.(preview)];
    } catch (error) {
      parts = [h("p", { class: "dim small" }, `Could not check the consequences: ${error.message}`)];
    }
    if (mine === asked) replace(list, ...parts);
  };
  ask();
  return { element: list, ask };
}

/** @param {Api.PreviewView} preview */
function outcome(preview) {
  const said = new Set(
    preview.changes.map((one) => `${one.field}: ${one.before || "(none)"} -> ${one.after || "(none)"}`),
  );
  const jobs = preview.jobs.slice(0, JOBS_SHOWN);
  const known = [...preview.names, ...preview.jobs.map((job) => job.id)];
  const left = preview.jobs.length - jobs.length + preview.others;
  return [
    h(
      "ul",
      { class: "effects" },
      preview.lines.filter((line) => !said.has(line)).map((line) => h("li", {}, sentence(line, known))),
    ),
    jobs.length > 1 || jobs.some((job) => job.to.length)
      ? h(
          "table",
          {},
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              ["Job", "Outcome", "To"].map((text) => h("th", { scope: "col" }, text)),
              h("th", { scope: "col", class: "num" }, "GPU-hours lost"),
            ),
          ),
          h(
            "tbody",
            {},
            jobs.map((job) =>
              h(
                "tr",
                {},
                h("td", { class: "long" }, jobName(job)),
                h("td", {}, DEEDS[job.deed] ?? job.deed),
                h("td", {}, job.to.join(", ") || "–"),
                h("td", { class: "num" }, job.gpu_ms ? fixed(job.gpu_ms / 3_600_000, 2) : "0"),
              ),
            ),
          ),
        )
      : null,
    left > 0 ? h("p", { class: "dim small" }, `and ${plural(left, "more job")}`) : null,
  ];
}

/** The fields that differ between two versions, the present one struck out. */
const changes = (preview) =>
  preview.changes.length
    ? h(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": "Changes" },
        h(
          "table",
          { class: "diff" },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              ["Field", "Now", "After"].map((text) => h("th", { scope: "col" }, text)),
            ),
          ),
          h(
            "tbody",
            {},
            preview.changes.map((one) =>
              h(
                "tr",
                {},
                h("th", { scope: "row" }, one.field),
                h("td", {}, one.before ? h("del", {}, one.before) : h("span", { class: "dim" }, "not set")),
                h("td", {}, one.after ? h("ins", {}, one.after) : h("span", { class: "dim" }, "not set")),
              ),
            ),
          ),
        ),
      )
    : null;

const button = (label, act, tone = "") =>
  h(
    "button",
    {
      class: tone,
      "data-key": label,
      onclick: (event) => {
        event.stopPropagation();
        act();
      },
    },
    label,
  );

/** @param {Api.JobView | Api.QueueRow} job */
export function jobActions(job) {
  if (!mayChange()) return [];
  const over = job.finished_ms > 0;
  const path = jobPath(job.id);
  const cancel = button(
    "Cancel",
    () =>
      confirm({
        title: `Cancel ${jobName(job)}`,
        verb: "Cancel job",
        danger: true,
        text: "Stops the job for good. Its checkpoints are kept.",
        body: consequences("cancel", job.id).element,
        act: () => post(`${path}/cancel`),
      }),
    "danger",
  );
  const again = (key) =>
    confirm({
      title: over ? `Run ${jobName(job)} again` : `Requeue ${jobName(job)}`,
      verb: over ? "Submit again" : "Stop and requeue",
      text: over
        ? "Submits the same request as a new job."
        : "Stops the job and puts it back in the queue. It continues from its last checkpoint; no retry is used.",
      body: over ? null : consequences("requeue", job.id).element,
      act: async () => {
        const answer = await post(`${path}/requeue?key=${key}`);
        if (over) location.hash = `#/job/${answer.id}`;
        return answer;
      },
    });
  const requeue = button(over ? "Run again" : "Requeue", () => again(newKey()));
  const fresh = job.state === "waiting" && !job.attempt && !job.array;
  const change = h(
    "a",
    {
      class: "button",
      "data-key": "change",
      href: `#/new?like=${encodeURIComponent(job.id)}${fresh ? "&instead=1" : ""}`,
      title: "Run again with changes",
    },
    fresh ? "Change" : "Run with changes",
  );
  const sleep = button("Sleep", () =>
    confirm({
      title: `Put to sleep: ${jobName(job)}`,
      verb: "Put to sleep",
      text: "Releases its GPUs and keeps its state in memory. It resumes where it stopped when it is used or woken.",
      act: () => post(`${path}/sleep`),
    }),
  );
  const wake = button("Wake", () =>
    confirm({
      title: `Wake ${jobName(job)}`,
      verb: "Wake job",
      text: "Continues where it stopped as soon as its nodes have room.",
      act: () => post(`${path}/wake`),
    }),
  );
  const nap = job.state === "running" && !job.array ? [sleep] : job.state === "asleep" && !job.nap?.wants ? [wake] : [];
  if (over && job.array?.elements > job.array?.succeeded) return [requeue, change, retry(job, path)];
  if (job.service) return over ? [] : [...nap, cancel];
  if (["waiting", "away"].includes(job.state)) return [change, cancel];
  return over ? [requeue, change] : [...nap, requeue, change, cancel];
}

const retry = (job, path) =>
  button("Retry", () =>
    confirm({
      title: `Retry ${jobName(job)}`,
      verb: "Retry failed elements",
      text: "Runs the elements that did not succeed again. The others keep their results.",
      act: () => post(`${path}/retry`),
    }),
  );

/** The dialog says who closed the node, and why. */
export const uncordon = (node) =>
  confirm({
    title: `Uncordon ${node}`,
    verb: "Uncordon node",
    text: "New jobs can start on it again.",
    body: consequences("uncordon", node).element,
    act: () => post(`${nodePath(node)}/uncordon`),
  });

/** @param {Api.NodeLine | Api.NodeView} node */
export function nodeActions(node) {
  if (!isAdmin()) return [];
  const path = nodePath(node.id);
  const closed = ["draining", "drained", "cordoned", "quarantined"].includes(node.state) || node.standing;
  const why = [{ name: "why", label: "Reason", type: "text", value: "", optional: true }];
  const said = (values) => (values.why ? `?why=${encodeURIComponent(values.why)}` : "");
  const cordon = button("Cordon", () =>
    confirm({
      title: `Cordon ${node.id}`,
      verb: "Cordon node",
      text: "No new jobs start on it. Running jobs continue.",
      body: consequences("cordon", node.id).element,
      fields: why,
      act: (values) => post(`${path}/cordon${said(values)}`),
    }),
  );
  const open = button("Uncordon", () => uncordon(node.id));
  const drain = button(
    "Drain",
    () =>
      confirm({
        title: `Drain ${node.id}`,
        verb: "Drain node",
        danger: true,
        text: "Moves its jobs elsewhere, from their last checkpoints. No new jobs start on it.",
        body: consequences("drain", node.id).element,
        fields: why,
        act: (values) => post(`${path}/drain${said(values)}`),
      }),
    "danger",
  );
  return [
    closed ? open : null,
    ["draining", "drained", "cordoned"].includes(node.state) ? null : cordon,
    ["draining", "drained"].includes(node.state) ? null : drain,
  ];
}

/** @param {Api.ServiceLine} service */
export function serviceActions(service) {
  if (!mayChange()) return [];
  const path = servicePath(service.name);
  const scale = button("Scale", () => {
    const effect = consequences("scale", service.name);
    const limits = { least: service.least ?? 0, most: service.most ?? 1 };
    effect.ask(limits);
    confirm({
      title: `Scale ${service.name}`,
      verb: "Scale service",
      text: "Replicas follow the load between these limits.",
      body: effect.element,
      fields: [
        { name: "least", label: "Minimum replicas", min: 0, max: 10000, value: limits.least },
        { name: "most", label: "Maximum replicas", min: 1, max: 10000, value: limits.most },
      ],
      changed: (values) => effect.ask(values),
      act: async (values) => {
        const whole = await get(path);
        const size = { ...whole.spec.scale, least: Number(values.least), most: Number(values.most) };
        await put(path, { ...whole.spec, scale: size });
        return { note: `${service.name} now runs ${values.least} to ${values.most} replicas` };
      },
    });
  });
  const stop = button(
    "Stop",
    () =>
      confirm({
        title: `Stop ${service.name}`,
        verb: "Stop service",
        danger: true,
        text: "Replicas finish their open requests and stop. The URL stops answering.",
        body: consequences("stop", service.name).element,
        act: () => post(`${path}/stop`),
      }),
    "danger",
  );
  const back = service.before ? button("Roll back", () => rollBack(service, path)) : null;
  return service.state === "stopping" ? [] : [scale, back, stop];
}

/** Which of the last versions to go back to, and what would differ from the present one. */
function rollBack(service, path) {
  let version = service.before;
  const effect = consequences("rollback", service.name, (preview) => [versions(preview), changes(preview)]);
  const pick = (chosen) => {
    version = chosen;
    effect.ask({ version: String(version) });
  };
  /** @param {Api.PreviewView} preview */
  const versions = (preview) =>
    preview.versions.length > 1
      ? h(
          "label",
          { class: "field" },
          "Version",
          h(
            "select",
            { name: "version", "data-key": "version", onchange: (event) => pick(Number(event.target.value)) },
            preview.versions.map((one) =>
              h(
                "option",
                { value: String(one.version), selected: one.version === version },
                [`Version ${one.version}`, one.at_ms ? ago(one.at_ms, now()) : "", one.why.replace(/^version \d+ /, "")]
                  .filter(Boolean)
                  .join(", "),
              ),
            ),
          ),
        )
      : null;
  confirm({
    title: `Roll back ${service.name}`,
    verb: "Roll back service",
    danger: true,
    text: "Rolls out the earlier version as a new one, without failed requests. The number of replicas stays.",
    body: effect.element,
    act: async () => ({ note: (await post(`${path}/rollback?version=${version}`)).why }),
  });
}
