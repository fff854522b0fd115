// One action on many jobs: one question, one request for each, and what came of them.

import { consequences } from "./actions.js";
import { call, jobPath } from "./api.js";
import { confirm } from "./dialog.js";
import { plural, whole } from "./dom.js";

const BULK_MAX = 500;
const AT_ONCE = 6;

const ACTS = {
  cancel: {
    verb: "Cancel",
    done: "cancelled",
    danger: true,
    text: "Stops these jobs for good. Checkpoints are kept. Jobs that have already ended are not affected.",
  },
  requeue: {
    verb: "Requeue",
    done: "requeued",
    danger: false,
    text: "Live jobs stop and continue from their last checkpoint. Finished jobs are submitted again as new jobs.",
  },
};

/** Asks, then resolves to what happened, in words; "" if it was not wanted. */
export async function askForMany(name, ids, say) {
  const act = ACTS[name];
  if (ids.length > BULK_MAX) {
    say(`Select at most ${BULK_MAX} jobs; ${whole(ids.length)} are selected.`);
    return;
  }
  const named = ids.length > 6 ? `${ids.slice(0, 5).join(", ")} and ${whole(ids.length - 5)} more` : ids.join(", ");
  await confirm({
    title: `${act.verb} ${plural(ids.length, "job")}`,
    verb: `${act.verb} ${plural(ids.length, "job")}`,
    danger: act.danger,
    text: `${named}. ${act.text}`,
    body: consequences(name, ids).element,
    act: async () => {
      const told = await all(name, ids);
      say(told, true);
      return { note: told };
    },
  });
}

async function all(name, ids) {
  const left = [...ids];
  const answers = [];
  const work = async () => {
    for (let id = left.shift(); id; id = left.shift()) answers.push(await one(name, id));
  };
  await Promise.all(Array.from({ length: Math.min(AT_ONCE, ids.length) }, work));
  return told(answers, ACTS[name].done);
}

/** The key makes a requeue that is sent twice one requeue. */
async function one(name, id) {
  const key = name === "requeue" ? `?key=${crypto.randomUUID?.() ?? `${id}-${Math.random()}`}` : "";
  try {
    /** @type {Api.Done} */
    const answer = await call("POST", `${jobPath(id)}/${name}${key}`);
    if (/already ended/.test(answer.note)) return { kind: "already ended" };
    return answer.id !== id ? { kind: "submitted again", id: answer.id } : { kind: "" };
  } catch (error) {
    return { kind: "refused", id, why: error.message };
  }
}

/** "7 cancelled, 1 had ended" */
function told(answers, done) {
  const of = (kind) => answers.filter((one) => one.kind === kind);
  const parts = [];
  const again = of("submitted again");
  const refused = of("refused");
  if (of("").length) parts.push(`${whole(of("").length)} ${done}`);
  if (of("already ended").length) parts.push(`${whole(of("already ended").length)} already ended`);
  if (again.length) {
    const ids = again.slice(0, 5).map((one) => one.id);
    parts.push(`${whole(again.length)} submitted again as ${ids.join(", ")}${again.length > 5 ? " …" : ""}`);
  }
  if (refused.length) parts.push(`${whole(refused.length)} not ${done} (${refused[0].id}: ${refused[0].why})`);
  return parts.join(", ");
}
