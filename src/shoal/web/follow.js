// What this browser follows: jobs, nodes and services. When something becomes of one, a notice of the
// browser says so, once; without permission it is in the list behind the star, and in the title.
//
// What was last known of each is kept in the browser, so that nothing is told twice, also not by two
// tabs or after a pause, and nothing that was before.

import { get, jobPath, me } from "./api.js";
import { clock, h, throttled } from "./dom.js";
import { cluster, jobOf, keepHidden, listen } from "./live.js";
import { replace } from "./patch.js";

const FOLLOWED_MAX = 50;
const NOTICES_MAX = 50;
const OVER = new Set(["succeeded", "failed", "cancelled", "timed-out"]);
const place = () => `shoal-follow:${me.tenant}:${me.user}`;
const watchers = new Set();
let memory = null; // where there is no storage

function kept() {
  try {
    return { items: {}, notices: [], unseen: 0, ...JSON.parse(localStorage.getItem(place()) ?? "{}") };
  } catch {
    memory ??= { items: {}, notices: [], unseen: 0 };
    return memory;
  }
}
function keep(state) {
  memory = state;
  try {
    localStorage.setItem(place(), JSON.stringify(state));
  } catch {
    /* for this visit only */
  }
  for (const act of watchers) act();
}

const follows = (kind, id) => `${kind}:${id}` in kept().items;

/** What counts of a thing as it is now, or null if the stream does not know it. */
function looked(kind, id) {
  if (kind === "node") {
    const node = cluster.nodes.get(id);
    return node ? node.standing || node.state : null;
  }
  if (kind === "service") {
    const one = cluster.services.get(id);
    return one ? (one.ready ? "ready" : "no ready replica") : null;
  }
  return ofJob(jobOf(id));
}

function ofJob(job) {
  if (!job) return null;
  return OVER.has(job.state)
    ? job.state
    : job.state === "running"
      ? `running ${job.attempt ?? 1}`
      : (job.attempt ?? 0) && ["waiting", "starting"].includes(job.state)
        ? `again ${job.attempt}`
        : "";
}

/** As it is now: the stream may be a moment behind, and what was before is not told. */
async function fresh(kind, id) {
  if (kind !== "job") return looked(kind, id);
  try {
    return ofJob(await get(jobPath(id), { quiet: true }));
  } catch {
    return looked(kind, id);
  }
}

async function words(kind, id, is) {
  if (kind === "node") return `${id} is ${is}`;
  if (kind === "service") return is === "ready" ? `${id} has a ready replica again` : `${id} has no ready replica`;
  const name = jobOf(id)?.name ? `${id} ${jobOf(id).name}` : id;
  if (OVER.has(is)) return is === "succeeded" ? `${name} finished` : `${name} ${is}`;
  const attempt = Number(is.split(" ")[1]);
  const cause = attempt > 1 || is.startsWith("again") ? await lost(id) : "";
  if (is.startsWith("again")) return cause || `${name} is waiting again`;
  return attempt > 1 ? `${name} restarted, attempt ${attempt}${cause ? `: ${cause}` : ""}` : `${name} started`;
}

/** Why a job lost its place: the last event that says so. */
async function lost(id) {
  try {
    const { events } = await get(`/v1/events?job=${encodeURIComponent(id)}&after=-30&limit=30`, { quiet: true });
    const last = (kind) => events.findLast(({ event }) => event.event === kind);
    const gone = last("MemberLost");
    const back = last("JobRequeued");
    return gone && back?.event.cause === "node-loss" ? `${id} lost ${gone.event.node}` : (back?.text ?? "");
  } catch {
    return "";
  }
}

let busy = false;
let again = false;
/** One tab at a time looks, so that two do not tell the same. */
const alone = (act) => (navigator.locks ? navigator.locks.request("shoal-follow", act) : act());

async function look() {
  if (busy) {
    again = true;
    return;
  }
  busy = true;
  try {
    if (Object.keys(kept().items).length) await alone(compare);
  } finally {
    busy = false;
    if (again) {
      again = false;
      soon();
    }
  }
}

async function compare() {
  const state = kept();
  const told = [];
  let changed = false;
  for (const [key, was] of Object.entries(state.items)) {
    const [kind, id] = [key.slice(0, key.indexOf(":")), key.slice(key.indexOf(":") + 1)];
    let is = looked(kind, id);
    if (is === null && kind === "job") {
      // it ended while nobody looked, or is long gone
      try {
        const job = await get(jobPath(id), { quiet: true });
        is = OVER.has(job.state) ? job.state : "";
      } catch (error) {
        if (error.status === 404) {
          delete state.items[key];
          changed = true;
        }
        continue;
      }
    }
    if (!is || is === was) continue;
    state.items[key] = is;
    changed = true;
    if (was !== null)
      told.push({
        key,
        text: await words(kind, id, is),
        at: Date.now(),
        hash: kind === "service" ? "#/services" : `#/${kind}/${encodeURIComponent(id)}`,
        tag: `${key} ${is}`,
      });
    if (kind === "job" && OVER.has(is)) delete state.items[key]; // nothing more can come
  }
  if (!changed) return;
  const now_ = kept(); // somebody may have followed something else meanwhile
  for (const key of Object.keys(now_.items))
    if (!(key in state.items) && !told.some((one) => one.key === key)) state.items[key] = now_.items[key];
  const notices = told.map(({ text, at, hash }) => ({ text, at, hash }));
  keep({
    ...now_,
    items: state.items,
    notices: [...notices.reverse(), ...now_.notices].slice(0, NOTICES_MAX),
    unseen: Math.min(NOTICES_MAX, now_.unseen + notices.length),
  });
  for (const one of told) show(one);
}

function show({ text, hash, tag }) {
  if (!globalThis.Notification || Notification.permission !== "granted") return;
  try {
    const notice = new Notification("Shoal", { body: text, tag, icon: "/web/icon.svg" });
    notice.onclick = () => {
      window.focus();
      location.hash = hash;
      notice.close();
    };
  } catch {
    /* some browsers of phones have none for pages; the list has it */
  }
}

const soon = throttled(300, look);

// -- the parts of the page ---------------------------------------------------------------------

/** The star of a thing's page. Call its `stop` with the view's. */
export function followButton(kind, id) {
  const button = h("button", { type: "button", class: "quiet follow", "data-key": `follow-${kind}`, onclick: toggle });
  function draw() {
    const on = follows(kind, id);
    button.setAttribute("aria-pressed", String(on));
    button.textContent = on ? "★ Following" : "☆ Follow";
    button.title = on ? "Stop following" : "Notify me about changes";
  }
  async function toggle() {
    const key = `${kind}:${id}`;
    const asks = globalThis.Notification?.permission === "default" && !kept().asked && !follows(kind, id);
    if (asks) {
      keep({ ...kept(), asked: true });
      Notification.requestPermission();
    }
    const is = await fresh(kind, id);
    const state = kept();
    if (key in state.items) delete state.items[key];
    else {
      const names = Object.keys(state.items);
      for (const old of names.slice(0, Math.max(0, names.length - FOLLOWED_MAX + 1))) delete state.items[old];
      state.items[key] = is;
    }
    keep(state);
  }
  watchers.add(draw);
  draw();
  return Object.assign(button, { stop: () => watchers.delete(draw) });
}

/** The star in the frame: what was told, and what is followed. */
export function bell() {
  const button = h("button", { class: "quiet", type: "button", onclick: open });
  const title = document.querySelector("title");
  function draw() {
    const { items, notices, unseen } = kept();
    const count = Object.keys(items).length;
    button.hidden = !count && !notices.length;
    button.textContent = unseen ? `★ ${unseen}` : "★";
    button.setAttribute("aria-label", `Following ${count}, ${unseen} new notifications`);
    const bare = document.title.replace(/^\(\d+\) /, "");
    const wanted = unseen ? `(${unseen}) ${bare}` : bare;
    if (document.title !== wanted) document.title = wanted;
  }
  function open() {
    const box = h("dialog", {
      class: "follow-list",
      "aria-label": "Following",
      onclose: () => {
        box.remove();
        watchers.delete(fill);
      },
    });
    const close = (hash) => () => {
      box.close();
      if (hash) location.hash = hash;
    };
    function fill() {
      const { items, notices } = kept();
      const state = globalThis.Notification?.permission;
      replace(
        box,
        h("h2", {}, "Notifications"),
        notices.length
          ? h(
              "ol",
              { class: "events" },
              notices.map((one, at) =>
                h(
                  "li",
                  { "data-key": `${one.at} ${at}` },
                  h("time", {}, clock(one.at)),
                  h("button", { class: "link", onclick: close(one.hash) }, one.text),
                ),
              ),
            )
          : h("p", { class: "dim" }, "No notifications yet"),
        h("h2", {}, "Following"),
        h(
          "ul",
          { class: "plain" },
          Object.keys(items).map((key) =>
            h(
              "li",
              { class: "row", "data-key": key },
              h("span", {}, key.replace(":", " ")),
              h(
                "button",
                {
                  class: "push",
                  onclick: () => {
                    const all = kept();
                    delete all.items[key];
                    keep(all);
                  },
                },
                "Unfollow",
              ),
            ),
          ),
        ),
        state === "granted"
          ? null
          : h(
              "p",
              { class: "dim small" },
              state === "denied"
                ? "Notifications are blocked in this browser. New ones are counted in the title and listed here."
                : state
                  ? "Browser notifications are not enabled yet."
                  : "Browser notifications need HTTPS or localhost. New ones are counted in the title.",
            ),
        h(
          "div",
          { class: "row" },
          h("button", { onclick: () => keep({ ...kept(), notices: [], unseen: 0 }) }, "Clear"),
          h("button", { class: "primary", onclick: close() }, "Close"),
        ),
      );
    }
    keep({ ...kept(), unseen: 0 });
    watchers.add(fill);
    fill();
    document.body.append(box);
    box.showModal();
  }
  watchers.add(draw);
  new MutationObserver(draw).observe(title, { childList: true });
  draw();
  return button;
}

addEventListener("storage", (event) => {
  if (event.key === place()) for (const act of watchers) act();
});
listen((change) => {
  if (!change.tick && "link" in change === false) soon();
});

// Of all hidden tabs of this browser one keeps its stream, if something is followed.
let release = null;
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) {
    release?.();
    release = null;
  }
});
keepHidden(
  () =>
    new Promise((resolve) => {
      if (!navigator.locks || !Object.keys(kept().items).length) {
        resolve(false);
        return;
      }
      if (release) {
        resolve(true);
        return;
      }
      navigator.locks.request("shoal-hidden", { ifAvailable: true }, (lock) => {
        resolve(Boolean(lock));
        return lock
          ? new Promise((free) => {
              release = free;
            })
          : undefined;
      });
    }),
);
