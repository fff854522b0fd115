// The views: their names in the address, and the files that draw them, loaded when first opened.

import { isAdmin, mayChange, me } from "./api.js";

const everywhere = () => isAdmin() || me.tenant === "*";

/** `tab`: its word in the frame's list. `under`: the tab that is current while it is open. `allowed`: who may open it.
 * */
export const VIEWS = {
  cluster: { tab: "Cluster", load: () => import("./view-cluster.js") },
  node: { title: "Node", under: "cluster", load: () => import("./view-node.js") },
  jobs: { tab: "Jobs", load: () => import("./view-jobs.js") },
  job: { title: "Job", under: "jobs", load: () => import("./view-job.js") },
  compare: { title: "Compare", under: "jobs", load: () => import("./view-compare.js") },
  time: { tab: "Time", load: () => import("./view-time.js") },
  new: { title: "New job", under: "jobs", load: () => import("./view-new.js"), allowed: mayChange },
  services: { tab: "Services", load: () => import("./view-services.js") },
  ledger: { tab: "Ledger", load: () => import("./view-ledger.js") },
  tenant: { title: "Tenant", under: "ledger", load: () => import("./view-tenant.js") },
  user: { title: "User", under: "ledger", load: () => import("./view-user.js") },
  network: { tab: "Network", load: () => import("./view-network.js"), allowed: everywhere },
  policy: { tab: "Policy", load: () => import("./view-policy.js") },
  plan: { tab: "Plan", load: () => import("./view-plan.js") },
  simulate: { tab: "Simulate", load: () => import("./view-simulate.js"), allowed: isAdmin },
};

/** Addresses that people have kept, and where these views are now. */
export const MOVED = {
  queue: () => "#/jobs",
  find: (words) => (words ? `#/jobs?q=${encodeURIComponent(words)}` : "#/jobs"),
};

export const FIRST = "cluster";
export const allowed = (name) => Boolean(VIEWS[name]) && (VIEWS[name].allowed?.() ?? true);
export const tabs = () => Object.entries(VIEWS).filter(([name, view]) => view.tab && allowed(name));
