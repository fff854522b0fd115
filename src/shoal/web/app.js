// The frame of the page: signing in, tabs and the current view.

import { isAdmin, me, onSignedOut, openid, resume, signIn, signOut } from "./api.js";
import { clock, h, throttled } from "./dom.js";
import { begin, cluster, end, listen } from "./live.js";
import * as clusterView from "./view-cluster.js";
import * as find from "./view-find.js";
import * as job from "./view-job.js";
import * as ledger from "./view-ledger.js";
import * as network from "./view-network.js";
import * as plan from "./view-plan.js";
import * as queue from "./view-queue.js";
import * as services from "./view-services.js";
import * as simulate from "./view-simulate.js";

const VIEWS = { cluster: clusterView, queue, find, job, services, network, ledger, simulate, plan };
const TABS = [["cluster", "Cluster"], ["queue", "Queue"], ["find", "Find"], ["services", "Services"], ["network", "Network"], ["ledger", "Ledger"], ["simulate", "Simulate"], ["plan", "Plan"]];
const root = document.getElementById("app");
let shown = null, main = null, frame = null;

/** Some views show the whole cluster, whatever the tenant. */
const allowed = (name) => (name === "simulate" ? isAdmin() : name !== "network" || isAdmin() || me.tenant === "*");

function route() {
  const [name, ...rest] = location.hash.split("?")[0].replace(/^#\/?/, "").split("/").map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  return { name: VIEWS[name] && allowed(name) ? name : "cluster", argument: rest.join("/") };
}

function show() {
  if (!main) return;
  const { name, argument } = route();
  shown?.();
  main.replaceChildren();
  main.dataset.view = name;
  shown = VIEWS[name].mount(main, argument) ?? null;
  document.title = `${argument || TABS.find(([key]) => key === name)?.[1] || "Job"} · Shoal`;
  for (const tab of frame.querySelectorAll(".tabs a")) {
    const here = tab.dataset.view === name || (name === "job" && tab.dataset.view === "queue");
    if (here) tab.setAttribute("aria-current", "page"); else tab.removeAttribute("aria-current");
  }
  window.scrollTo(0, 0);
}

function theme() {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const next = dark ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try { localStorage.setItem("shoal-theme", next); } catch { /* for this visit only */ }
  window.dispatchEvent(new Event("shoal-theme"));
}

/** Nothing for the operator, whose cluster it is. */
function identity() {
  if (!me.token) return null;
  const tenant = me.tenant === "*" ? "all tenants" : me.tenant;
  return h("span", { class: "me dim small", title: `Signed in as ${me.user}, ${me.role} of ${tenant}` }, `${me.user} · ${tenant} · ${me.role}`);
}

function build() {
  const waiting = h("span", { class: "count", hidden: true });
  const words = h("span", { class: "words" }, "connecting");
  const state = h("span", { class: "link-state", role: "status", "data-state": "lost" }, h("i", {}), words);
  const tabs = TABS.filter(([name]) => allowed(name)).map(([name, label]) => h("a", { href: `#/${name}`, "data-view": name }, label, name === "queue" ? waiting : null));
  main = h("main", { id: "main", tabindex: "-1" });
  frame = h("div", {},
    h("header", { class: "top" },
      h("a", { class: "brand", href: "#/cluster" }, h("img", { src: "/web/icon.svg", alt: "" }), "Shoal"),
      h("nav", { class: "tabs", "aria-label": "Views" }, tabs),
      h("span", { class: "space" }), state, identity(),
      h("button", { class: "quiet", onclick: theme, "aria-label": "Switch between light and dark", title: "Light or dark" }, "◐"),
      h("button", { class: "quiet", onclick: leave }, "Sign out")),
    main);
  const refresh = throttled(200, () => {
    const count = cluster.status?.jobs?.waiting ?? 0;
    waiting.hidden = !count;
    waiting.textContent = count > 999 ? "999+" : String(count);
    waiting.setAttribute("aria-label", `${count} waiting`);
    state.dataset.state = cluster.linked ? "live" : "lost";
    words.textContent = cluster.linked ? "live" : cluster.heard ? `not connected since ${clock(cluster.heard)}` : "not connected, retrying";
  });
  listen(refresh);
  root.replaceChildren(frame); // not patched: views keep references to its parts
}

async function leave() {
  try { await signOut(); } catch { /* the session ends either way */ }
  location.hash = "";
  ask("");
}

function ask(problem) {
  end();
  shown?.();
  shown = main = null;
  const message = h("p", { class: "problem", role: "alert", hidden: !problem }, problem);
  const input = h("input", { type: "password", name: "token", autocomplete: "current-password", required: true, "aria-label": "Token", placeholder: "Token" });
  const form = h("form", {},
    h("img", { src: "/web/icon.svg", alt: "" }), h("h1", {}, "Sign in to Shoal"),
    h("p", { class: "dim" }, "Enter your token. An admin gives you one; the operator's is in the file ", h("code", {}, "token"), " in the cluster's home directory. ", h("code", {}, "shoal page"), " prints a link that signs you in."),
    input, message, h("button", { class: "primary" }, "Sign in"),
    openid ? h("p", {}, h("a", { href: "/v1/oidc/begin" }, "Sign in through your organisation")) : null);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try { await signIn({ token: input.value.trim() }); start(); } catch (error) { message.hidden = false; message.textContent = error.message; input.select(); }
  });
  root.replaceChildren(h("div", { class: "sign-in" }, form));
  input.focus();
}

function start() {
  build();
  begin();
  show();
}

async function boot() {
  onSignedOut(() => ask("You are signed out. Sign in again."));
  window.addEventListener("hashchange", show);
  const code = /^#code=([\w-]+)$/.exec(location.hash)?.[1];
  if (code) history.replaceState(null, "", location.pathname);
  let problem = "";
  try {
    if (code) { await signIn({ code }); start(); return; }
  } catch (error) { problem = error.message; }
  try {
    if (await resume()) { start(); return; }
  } catch (error) { problem = error.message; }
  ask(problem);
}

boot();
