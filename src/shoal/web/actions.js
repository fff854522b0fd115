// The actions on a job, a node or a service, as far as the role allows. Each asks for confirmation.

import { get, isAdmin, jobPath, mayChange, newKey, nodePath, post, put, servicePath } from "./api.js";
import { confirm } from "./dialog.js";
import { h, jobName } from "./dom.js";

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
        verb: "Cancel the job",
        danger: true,
        text: "Its members are stopped and it does not run again. Its checkpoints are kept.",
        act: () => post(`${path}/cancel`),
      }),
    "danger",
  );
  const again = (key) =>
    confirm({
      title: over ? `Run ${jobName(job)} again` : `Requeue ${jobName(job)}`,
      verb: over ? "Submit it again" : "Stop and requeue",
      text: over
        ? "The same request is submitted as a new job."
        : "It is stopped, waits in the queue and continues from its last checkpoint. This does not use up a retry.",
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
      title: "Run it again with changes",
    },
    fresh ? "Change" : "Run with changes",
  );
  const sleep = button("Sleep", () =>
    confirm({
      title: `Put ${jobName(job)} to sleep`,
      verb: "Put it to sleep",
      text:
        "It gives up its GPUs and keeps its place in memory. It goes on at the same instruction when somebody " +
        "uses it or wakes it.",
      act: () => post(`${path}/sleep`),
    }),
  );
  const wake = button("Wake", () =>
    confirm({
      title: `Wake ${jobName(job)}`,
      verb: "Wake the job",
      text: "It goes on where it was as soon as its nodes have room.",
      act: () => post(`${path}/wake`),
    }),
  );
  const nap = job.state === "running" && !job.array ? [sleep] : job.state === "asleep" && !job.nap?.wants ? [wake] : [];
  if (over && job.array?.elements > job.array?.succeeded) return [requeue, change, retry(job, path)];
  if (job.service) return over ? [] : [...nap, cancel];
  return over ? [requeue, change] : job.state === "waiting" ? [change, cancel] : [...nap, requeue, change, cancel];
}

const retry = (job, path) =>
  button("Retry", () =>
    confirm({
      title: `Retry elements of ${jobName(job)}`,
      verb: "Retry the elements",
      text: "Elements that ended without success run again. The others keep their results.",
      act: () => post(`${path}/retry`),
    }),
  );

/** @param {Api.NodeLine | Api.NodeView} node */
export function nodeActions(node) {
  if (!isAdmin()) return [];
  const path = nodePath(node.id);
  const closed = ["draining", "drained", "cordoned", "quarantined"].includes(node.state) || node.standing;
  const why = [{ name: "why", label: "Why (for its history)", type: "text", value: "", optional: true }];
  const said = (values) => (values.why ? `?why=${encodeURIComponent(values.why)}` : "");
  const cordon = button("Cordon", () =>
    confirm({
      title: `Cordon ${node.id}`,
      verb: "Cordon the node",
      text: "Nothing new starts on it. What runs there goes on.",
      fields: why,
      act: (values) => post(`${path}/cordon${said(values)}`),
    }),
  );
  const open = button("Uncordon", () =>
    confirm({
      title: `Uncordon ${node.id}`,
      verb: "Uncordon the node",
      text: "New jobs may start on it again.",
      act: () => post(`${path}/uncordon`),
    }),
  );
  const drain = button(
    "Drain",
    () =>
      confirm({
        title: `Drain ${node.id}`,
        verb: "Drain the node",
        danger: true,
        text: "Its jobs are stopped and continue elsewhere from their last checkpoints. No new jobs start on it.",
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
  const scale = button("Scale", () =>
    confirm({
      title: `Scale ${service.name}`,
      verb: "Scale the service",
      text: "Shoal runs as many replicas as the load needs, between these two numbers.",
      fields: [
        { name: "least", label: "At least", min: 0, max: 10000, value: service.least ?? 0 },
        { name: "most", label: "At most", min: 1, max: 10000, value: service.most ?? 1 },
      ],
      act: async (values) => {
        const whole = await get(path);
        const size = { ...whole.spec.scale, least: Number(values.least), most: Number(values.most) };
        await put(path, { ...whole.spec, scale: size });
        return { note: `${service.name} now has ${values.least} to ${values.most} replicas` };
      },
    }),
  );
  const stop = button(
    "Stop",
    () =>
      confirm({
        title: `Stop ${service.name}`,
        verb: "Stop the service",
        danger: true,
        text: "Its replicas finish their requests and stop. Its URL no longer answers.",
        act: () => post(`${path}/stop`),
      }),
    "danger",
  );
  const back = service.before
    ? button("Roll back", () =>
        confirm({
          title: `Roll ${service.name} back`,
          verb: `Go back to version ${service.before}`,
          danger: true,
          text:
            `What ran as version ${service.before} is rolled out again as a new version, without a failed ` +
            `request. The number of replicas stays.`,
          act: async () => ({ note: (await post(`${path}/rollback?version=${service.before}`)).why }),
        }),
      )
    : null;
  return service.state === "stopping" ? [] : [scale, back, stop];
}
