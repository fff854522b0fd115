// The cluster as it is now, kept by the stream of changes.

import { lapsed, resume } from "./api.js";

const ENDED_MAX = 300;
const AGAIN_MS = 1500;
const TICK_MS = 1000;
const SILENT_MS = 10_000; // the controller beats every two seconds

export const cluster = { nodes: new Map(), jobs: new Map(), services: new Map(), ended: new Map(), busy: new Map(), status: null, linked: false, skew: null, heard: 0 };
const listeners = new Set();
let source = null, timer = 0, ticker = 0, wanted = false, last = 0;

/** The controller's time, which is the one that all moments are told in. */
export const now = () => Date.now() + (cluster.skew ?? 0);

export function listen(act) { listeners.add(act); return () => listeners.delete(act); }
const tell = (change) => { for (const act of [...listeners]) act(change); };

export function jobOf(id) { return cluster.jobs.get(id) ?? cluster.ended.get(id); }

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

// Clocks go on where nothing happens. A controller that hangs keeps its connections: silence tells.
function tick() {
  if (document.hidden) return;
  if (source && performance.now() - last > SILENT_MS) { link(false); open(); return; }
  if (cluster.linked) tell({ tick: true });
}

// Browsers allow few connections to one host: a page that nobody sees gives its own back.
function seen() {
  if (document.hidden) close();
  else if (wanted && !source) open();
}
function close() { clearTimeout(timer); source?.close(); source = null; }

function open() {
  close();
  last = performance.now();
  source = new EventSource("/v1/stream");
  source.addEventListener("snapshot", (event) => { take(JSON.parse(event.data), true); });
  source.addEventListener("change", (event) => { take(JSON.parse(event.data), false); });
  // Only a beat is as old as its sending: what is told otherwise may have been kept for a while.
  source.addEventListener("beat", (event) => { cluster.skew = JSON.parse(event.data).now_ms - Date.now(); hear(); });
  source.addEventListener("error", () => {
    link(false);
    if (source?.readyState === EventSource.CLOSED) timer = setTimeout(again, AGAIN_MS);
  });
}

async function again() {
  if (!wanted) return;
  try {
    if (!(await resume())) { lapsed(); return; }
  } catch { /* nobody answers: the stream tries on */ }
  if (wanted && !document.hidden) open();
}

function hear() {
  last = performance.now();
  cluster.heard = now();
  link(true);
}

function link(up) {
  if (cluster.linked === up) return;
  cluster.linked = up;
  tell({ link: up });
}

export function take(told, whole) {
  cluster.taken = performance.now();
  if (whole) for (const name of ["nodes", "jobs", "services", "ended", "busy"]) cluster[name].clear();
  cluster.status = told.status;
  cluster.skew ??= told.status.now_ms - Date.now();
  for (const node of told.nodes ?? []) cluster.nodes.set(node.id, node);
  for (const job of told.jobs ?? []) { cluster.jobs.set(job.id, job); cluster.ended.delete(job.id); }
  for (const service of told.services ?? []) cluster.services.set(service.name, service);
  // Oldest first, so that the newest is the last to be forgotten.
  for (const job of (told.ended ?? []).slice().reverse()) { cluster.jobs.delete(job.id); cluster.ended.set(job.id, job); }
  for (const [id, shares] of Object.entries(told.busy ?? {})) cluster.busy.set(id, shares);
  for (const id of told.gone_nodes ?? []) { cluster.nodes.delete(id); cluster.busy.delete(id); }
  for (const id of told.gone_jobs ?? []) cluster.jobs.delete(id);
  for (const name of told.gone_services ?? []) cluster.services.delete(name);
  while (cluster.ended.size > ENDED_MAX) cluster.ended.delete(cluster.ended.keys().next().value);
  hear();
  tell({ ...told, whole });
}
