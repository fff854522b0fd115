// The current cluster, updated by the stream of changes.

import { lapsed, resume } from "./api.js";

const ENDED_MAX = 300;
const AGAIN_MS = 1500;
const TICK_MS = 1000;
const SILENT_MS = 8000; // the controller beats every two seconds

/**
 * @typedef {{
 *   nodes: Map<string, Api.NodeLine>, jobs: Map<string, Api.JobLine>, services: Map<string, Api.ServiceLine>,
 *   ended: Map<string, Api.JobLine>, busy: Map<string, number[]>, status: Api.StatusView | null
 * }} Cluster
 */
/** @returns {Cluster} */
export const emptyCluster = () => ({
  nodes: new Map(),
  jobs: new Map(),
  services: new Map(),
  ended: new Map(),
  busy: new Map(),
  status: null,
});
export const cluster = { ...emptyCluster(), linked: false, skew: null, heard: 0, taken: 0 };
const listeners = new Set();
let source = null;
let timer = 0;
let ticker = 0;
let wanted = false;
let last = 0;
let hidden = false;
let ask = async () => false;

/** `may` says whether this page keeps its stream while it is hidden. */
export const keepHidden = (may) => {
  ask = may;
};

/** The controller's time, which all timestamps use. */
export const now = () => Date.now() + (cluster.skew ?? 0);

export function listen(act) {
  listeners.add(act);
  return () => listeners.delete(act);
}
const notify = (change) => {
  for (const act of [...listeners]) act(change);
};

/** Resolves when the cluster is known. */
export async function known() {
  if (cluster.status) return;
  await new Promise((resolve) => {
    const stop = listen(() => {
      if (!cluster.status) return;
      stop();
      resolve(true);
    });
  });
}

export function jobOf(id) {
  return cluster.jobs.get(id) ?? cluster.ended.get(id);
}

export function begin() {
  wanted = true;
  document.addEventListener("visibilitychange", seen);
  ticker = setInterval(tick, TICK_MS);
  seen();
}
export function end() {
  wanted = false;
  document.removeEventListener("visibilitychange", seen);
  clearInterval(ticker);
  close();
}

// Clocks keep running between events. A hung controller keeps its connections open, so silence counts.
function tick() {
  if (document.hidden && !hidden) return;
  if (source && performance.now() - last > SILENT_MS) {
    link(false);
    open();
    return;
  }
  if (cluster.linked && !document.hidden) notify({ tick: true });
}

// Browsers allow few connections to one host, so a hidden page closes its own, unless it follows
// something: then one of all hidden pages keeps it.
async function seen() {
  hidden = document.hidden && (await ask());
  if (document.hidden && !hidden) close();
  else if (wanted && !source) open();
}
function close() {
  clearTimeout(timer);
  source?.close();
  source = null;
}

function open() {
  close();
  last = performance.now();
  source = new EventSource("/v1/stream");
  source.addEventListener("snapshot", (event) => {
    take(JSON.parse(event.data), true);
  });
  source.addEventListener("change", (event) => {
    take(JSON.parse(event.data), false);
  });
  // Only a beat is sent at once; other messages may have waited, so their time is not used.
  source.addEventListener("beat", (event) => {
    cluster.skew = JSON.parse(event.data).now_ms - Date.now();
    hear();
  });
  source.addEventListener("error", () => {
    link(false);
    if (source?.readyState === EventSource.CLOSED) timer = setTimeout(again, AGAIN_MS);
  });
}

async function again() {
  if (!wanted) return;
  try {
    if (!(await resume())) {
      lapsed();
      return;
    }
  } catch {
    /* no answer: the stream keeps trying */
  }
  if (wanted && (!document.hidden || hidden)) open();
}

function hear() {
  last = performance.now();
  cluster.heard = now();
  link(true);
}

function link(up) {
  if (cluster.linked === up) return;
  cluster.linked = up;
  notify({ link: up });
}

/** Brings a cluster up to a change, or makes it the one of a whole snapshot: the live one, or that of a moment.
 * @param {Cluster} into
 * @param {Api.Change} change
 * @param {boolean} whole
 */
export function absorb(into, change, whole) {
  if (whole) for (const name of ["nodes", "jobs", "services", "ended", "busy"]) into[name].clear();
  into.status = change.status;
  for (const node of change.nodes ?? []) into.nodes.set(node.id, node);
  for (const job of change.jobs ?? []) {
    into.jobs.set(job.id, job);
    into.ended.delete(job.id);
  }
  for (const service of change.services ?? []) into.services.set(service.name, service);
  // Oldest first, so that the newest is dropped last.
  for (const job of (change.ended ?? []).slice().reverse()) {
    into.jobs.delete(job.id);
    into.ended.set(job.id, job);
  }
  for (const [id, shares] of Object.entries(change.busy ?? {})) into.busy.set(id, shares);
  for (const id of change.gone_nodes ?? []) {
    into.nodes.delete(id);
    into.busy.delete(id);
  }
  for (const id of change.gone_jobs ?? []) into.jobs.delete(id);
  for (const name of change.gone_services ?? []) into.services.delete(name);
  while (into.ended.size > ENDED_MAX) into.ended.delete(into.ended.keys().next().value);
  return into;
}

/**
 * @param {Api.Change} change
 * @param {boolean} whole
 */
export function take(change, whole) {
  cluster.taken = performance.now();
  absorb(cluster, change, whole);
  cluster.skew ??= change.status.now_ms - Date.now();
  hear();
  notify({ ...change, whole });
}
