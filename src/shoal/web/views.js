// The views: their names in the address, and the files that draw them, loaded when first opened.

import { isAdmin, mayChange, me } from "./api.js";
import { cluster } from "./live.js";

const everywhere = () => isAdmin() || me.tenant === "*";

/** `tab`: its word in the frame's list. `under`: the tab that is current while it is open. `allowed`: who may open it.
 * `listed`: whether it has a tab now. `ahead`: fetched soon after the first view, because it is opened often.
 * `shape`: its placeholders while it loads. */
export const VIEWS = {
  cluster: { tab: "Cluster", shape: ["tiles", "map"], ahead: true, load: () => import("./view-cluster.js") },
  node: { title: "Node", under: "cluster", shape: ["tiles", "chart", "table"], load: () => import("./view-node.js") },
  jobs: { tab: "Jobs", ahead: true, load: () => import("./view-jobs.js") },
  job: {
    title: "Job",
    under: "jobs",
    shape: ["tiles", "bar", "chart", "table"],
    ahead: true,
    load: () => import("./view-job.js"),
  },
  sweep: { title: "Sweep", under: "jobs", load: () => import("./view-sweep.js") },
  compare: {
    title: "Compare",
    under: "jobs",
    shape: ["bar", "chart", "table"],
    load: () => import("./view-compare.js"),
  },
  time: { tab: "Time", shape: ["bar", "map"], load: () => import("./view-time.js") },
  new: { title: "New job", under: "jobs", shape: ["form"], load: () => import("./view-new.js"), allowed: mayChange },
  services: { tab: "Services", shape: ["chart", "chart"], load: () => import("./view-services.js") },
  ledger: { tab: "Ledger", shape: ["tiles", "chart", "table"], load: () => import("./view-ledger.js") },
  tenant: { title: "Tenant", under: "people", shape: ["tiles", "table"], load: () => import("./view-tenant.js") },
  user: { title: "User", under: "people", shape: ["tiles", "table"], load: () => import("./view-user.js") },
  network: { tab: "Network", shape: ["map"], load: () => import("./view-network.js"), allowed: everywhere },
  neighbors: {
    tab: "Neighbors",
    shape: ["bar", "table", "table"],
    load: () => import("./view-neighbors.js"),
    listed: () => Boolean(cluster.status?.neighbors),
  },
  policy: { tab: "Policy", load: () => import("./view-policy.js") },
  people: { tab: "People", load: () => import("./view-people.js") },
  plan: { tab: "Plan", shape: ["form"], load: () => import("./view-plan.js") },
  simulate: { tab: "Simulate", shape: ["form"], load: () => import("./view-simulate.js"), allowed: isAdmin },
};

/** Addresses that people have kept, and where these views are now. */
export const MOVED = {
  queue: () => "#/jobs?tab=queue",
  find: (words) => (words ? `#/jobs?q=${encodeURIComponent(words)}` : "#/jobs"),
};

export const FIRST = "cluster";
export const titleOf = (name) => VIEWS[name]?.tab ?? VIEWS[name]?.title ?? name.slice(0, 40);
export const allowed = (name) => Boolean(VIEWS[name]) && (VIEWS[name].allowed?.() ?? true);
export const listed = (name) => VIEWS[name].listed?.() ?? true;
export const tabs = () => Object.entries(VIEWS).filter(([name, view]) => view.tab && allowed(name));
