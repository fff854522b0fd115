// The frame of the page: signing in, tabs and the current view.

import { choose, chosen } from "./address.js";
import { me, onSignedOut, openid, resume, signIn, signOut } from "./api.js";
import { offer } from "./commands.js";
import { h, jobName, throttled } from "./dom.js";
import { bell } from "./follow.js";
import { searchJobs } from "./job-query.js";
import { begin, cluster, end, known, listen } from "./live.js";
import { show as showPalette, watchKeys } from "./palette.js";
import { bar, Opening, watchLink } from "./states.js";
import { allowed, FIRST, listed, MOVED, tabs, titleOf, VIEWS } from "./views.js";

const AHEAD_MS = 1500; // after the first view: then those that are opened most are fetched
const root = document.getElementById("app");
let shown = null;
let main = null;
let frame = null;
let opening = null;
let unwatch = () => {};

function route() {
  const [name, ...rest] = location.hash
    .split("?")[0]
    .replace(/^#\/?/, "")
    .split("/")
    .map((part) => {
      try {
        return decodeURIComponent(part);
      } catch {
        return part;
      }
    });
  if (MOVED[name]) {
    history.replaceState(null, "", MOVED[name](rest.join("/")));
    return route();
  }
  if (chosen("find")) {
    choose("q", chosen("find")); // what the search was called in addresses that people have kept
    choose("find", "");
  }
  return { name: name || FIRST, argument: rest.join("/") };
}

async function show() {
  if (!main) return;
  const { name, argument } = route();
  const view = VIEWS[name] ?? {};
  const title = titleOf(name);
  leaveView();
  const mine = new Opening(main, {
    title: argument ? `${title} ${argument}` : title,
    shape: view.shape,
    retry: show,
  });
  opening = mine;
  document.title = `${argument || title} · Shoal`;
  for (const tab of frame.querySelectorAll(".tabs a")) {
    const current = tab.dataset.view === (view.under ?? name);
    tab.tabIndex = current ? 0 : -1;
    tab.hidden = !current && !listed(tab.dataset.view);
    if (current) {
      tab.setAttribute("aria-current", "page");
      tab.scrollIntoView({ block: "nearest", inline: "nearest" });
    } else tab.removeAttribute("aria-current");
  }
  window.scrollTo(0, 0);
  if (!allowed(name)) main.dataset.view = name;
  if (!VIEWS[name]) {
    mine.fail("There is no such view.", () => {
      location.hash = `#/${FIRST}`;
    });
    return;
  }
  if (!allowed(name)) {
    mine.deny(`${title} is not open to your role: ${me.role}.`);
    return;
  }
  let module;
  try {
    // A view that is mounted knows the cluster, so it never takes "not heard yet" for "nothing there".
    [module] = await Promise.all([view.load(), known()]);
  } catch {
    // a browser may remember that a file could not be loaded
    if (mine === opening) mine.fail("The controller does not answer.", () => location.reload());
    return;
  }
  if (mine !== opening) return; // another view was opened meanwhile
  main.dataset.view = name;
  shown = mine.mount((root) => module.mount(root, argument)) ?? null;
}

function leaveView() {
  shown?.();
  opening?.close();
  shown = opening = null;
}

/** What the palette finds whatever view is open. */
function everything() {
  const go = (hash) => () => {
    location.hash = hash;
    main?.focus({ preventScroll: true });
  };
  const listing = tabs().filter(([name]) => listed(name));
  const views = listing.map(([name, view]) => ({ title: view.tab, hint: "view", run: go(`#/${name}`) }));
  const nodes = [...cluster.nodes.values()].map((node) => ({
    title: node.id,
    hint: `node · ${node.state}`,
    run: go(`#/node/${encodeURIComponent(node.id)}`),
  }));
  const people = (kind) =>
    [...new Set([...cluster.jobs.values(), ...cluster.ended.values()].map((job) => job[kind]))]
      .filter(Boolean)
      .map((name) => ({ title: name, hint: kind, run: go(`#/${kind}/${encodeURIComponent(name)}`) }));
  const jobs = [...cluster.jobs.values(), ...cluster.ended.values()].map((job) => ({
    title: jobName(job),
    hint: `job · ${job.state}`,
    run: go(`#/job/${job.id}`),
  }));
  const services = [...cluster.services.values()].map((one) => ({
    title: one.name,
    hint: "service",
    run: go("#/services"),
  }));
  return [
    ...views,
    ...(allowed("new") ? [{ title: "New job", hint: "action", run: go("#/new") }] : []),
    { title: "Switch theme", hint: "action · light or dark", run: theme },
    { title: "Sign out", hint: "action", run: leave },
    ...services,
    ...nodes,
    ...people("user"),
    ...people("tenant"),
    ...jobs,
  ];
}

const ACTED = 50; // things that an action without a name is offered for

/** The buttons of a thing that is named, or of the first ones if only an action is: "drain n6", "cancel". */
async function actions(text) {
  const words = text.trim().split(/\s+/).filter(Boolean);
  if (!words.length || !cluster.linked) return [];
  const { jobActions, nodeActions, serviceActions } = await import("./actions.js");
  const of = (things, kind, make) => {
    const named = words.map((word) => things.get(word)).filter(Boolean);
    return (named.length ? named : [...things.values()].slice(0, ACTED)).flatMap((thing) =>
      make(thing)
        .flat()
        .filter(Boolean)
        .map((button) => ({
          title: `${button.textContent} ${thing.id ?? thing.name}`,
          hint: `action · ${kind}${thing.id && thing.name ? ` ${thing.name}` : ""}`,
          run: () => {
            if (button instanceof HTMLAnchorElement) location.hash = button.getAttribute("href");
            else button.click();
          },
        })),
    );
  };
  return [
    ...of(cluster.nodes, "node", nodeActions),
    ...of(cluster.services, "service", serviceActions),
    ...of(cluster.jobs, "job", (job) => jobActions({ service: "", finished_ms: 0, ...job })),
  ];
}

function theme() {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  const next = dark ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("shoal-theme", next);
  } catch {
    /* for this visit only */
  }
  window.dispatchEvent(new Event("shoal-theme"));
}

/** Who is signed in, and the way out. */
function identity() {
  const user = me.user || "operator";
  const tenant = me.tenant === "*" ? "all tenants" : me.tenant;
  const rest = `${me.role} · ${tenant}`;
  return h(
    "details",
    { class: "me" },
    h(
      "summary",
      { "aria-label": `Signed in as ${user}, ${rest}` },
      h("b", { "aria-hidden": "true" }, user.slice(0, 1).toUpperCase()),
      h("span", {}, user, h("small", {}, rest)),
    ),
    h(
      "div",
      { class: "menu" },
      h("p", {}, h("b", {}, user), h("br"), h("span", { class: "dim" }, rest)),
      me.token ? h("a", { class: "button", href: `#/user/${encodeURIComponent(user)}` }, "My usage") : null,
      h("button", { onclick: leave }, "Sign out"),
    ),
  );
}

/** The tabs are one stop of the Tab key; the arrow keys move between them. */
function rove(event) {
  const all = [...frame.querySelectorAll(".tabs a:not([hidden])")];
  const at = all.indexOf(document.activeElement);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
  if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  all[(to + all.length) % all.length].focus();
}

/** To what the view is about, past the frame and the view's filters. */
function skip(event) {
  event.preventDefault(); // the address is the view's
  const target = main?.querySelector(".view :is([role=grid], canvas[tabindex], table, form)") ?? main;
  if (target && !target.hasAttribute("tabindex")) target.tabIndex = -1;
  target?.focus();
}

function build() {
  const waiting = h("span", { class: "count", hidden: true });
  const words = h("span", { class: "words" }, "Connecting");
  const state = h("span", { class: "link-state", role: "status", "data-state": "lost" }, h("i", {}), words);
  const links = tabs().map(([name, view]) =>
    h("a", { href: `#/${name}`, "data-view": name }, view.tab, name === "jobs" ? waiting : null),
  );
  main = h("main", { id: "main", tabindex: "-1" });
  frame = h(
    "div",
    { class: "frame" },
    h(
      "header",
      { class: "top" },
      h("a", { class: "brand", href: "#/cluster" }, h("img", { src: "/web/icon.svg", alt: "" }), "Shoal"),
      h("nav", { class: "tabs", "aria-label": "Views", onkeydown: rove }, links),
      h("span", { class: "space" }),
      state,
      bell(),
      h(
        "button",
        { class: "quiet", onclick: showPalette, "aria-label": "Search or run a command", title: "Search (Ctrl-K)" },
        "⌕",
      ),
      h("button", { class: "quiet", onclick: theme, "aria-label": "Switch theme", title: "Switch theme" }, "◐"),
      identity(),
    ),
    bar,
    main,
  );
  const share = () => import("./share.js").then(({ watch }) => watch(main));
  main.addEventListener("pointerover", () => share().catch(() => {}), { once: true });
  const refresh = throttled(200, () => {
    const count = cluster.status?.jobs?.waiting ?? 0;
    waiting.hidden = !count;
    waiting.textContent = count > 999 ? "999+" : String(count);
    waiting.setAttribute("aria-label", `${count} waiting`);
    for (const link of links) link.hidden = !listed(link.dataset.view) && !link.hasAttribute("aria-current");
    state.dataset.state = cluster.linked ? "live" : "lost";
    words.textContent = cluster.linked ? "Live" : cluster.heard ? "Disconnected" : "Connecting";
  });
  listen(refresh);
  root.replaceChildren(frame); // not patched: views keep references to its parts
}

async function leave() {
  try {
    await signOut();
  } catch {
    /* the session ends either way */
  }
  location.hash = "";
  ask("");
}

function ask(problem) {
  end();
  unwatch();
  leaveView();
  main = null;
  const message = h("p", { class: "problem", role: "alert", hidden: !problem }, problem);
  const input = h("input", {
    type: "password",
    name: "token",
    autocomplete: "current-password",
    required: true,
    "aria-label": "Token",
    placeholder: "Token",
  });
  const form = h(
    "form",
    {},
    h("img", { src: "/web/icon.svg", alt: "" }),
    h("h1", {}, "Sign in to Shoal"),
    h(
      "p",
      { class: "dim" },
      "Enter your token. An admin gives you one; the operator's is in the file ",
      h("code", {}, "token"),
      " in the cluster's home directory. ",
      h("code", {}, "shoal page"),
      " prints a link that signs you in.",
    ),
    input,
    message,
    h("button", { class: "primary" }, "Sign in"),
    openid ? h("p", {}, h("a", { href: "/v1/oidc/begin" }, "Sign in through your organization")) : null,
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await signIn({ token: input.value.trim() });
      start();
    } catch (error) {
      message.hidden = false;
      message.textContent = error.message;
      input.select();
    }
  });
  root.replaceChildren(h("div", { class: "sign-in" }, form));
  input.focus();
}

function start() {
  build();
  unwatch = watchLink(() => opening);
  begin();
  show().then(() =>
    setTimeout(() => {
      for (const view of Object.values(VIEWS)) if (view.ahead) view.load().catch(() => {});
    }, AHEAD_MS),
  );
}

async function boot() {
  onSignedOut(() => ask("Your session has ended, or your token was revoked. Sign in again."));
  window.addEventListener("hashchange", show);
  document.querySelector(".skip").addEventListener("click", skip);
  watchKeys();
  offer(() => (main ? everything() : []));
  offer((text) => (main ? actions(text) : []));
  offer((text) => (main ? searchJobs(text) : []));
  offer(async (text) => (main && text ? (await import("./share.js")).commands(main) : []));
  const code = /^#code=([\w-]+)$/.exec(location.hash)?.[1];
  const invite = /^#invite=([\w-]+)$/.exec(location.hash)?.[1];
  if (code || invite) history.replaceState(null, "", location.pathname);
  let problem = "";
  try {
    if (invite) {
      const { accepted } = await import("./invite.js");
      await accepted(root, invite);
      start();
      return;
    }
    if (code) {
      await signIn({ code });
      start();
      return;
    }
  } catch (error) {
    problem = error.message;
  }
  try {
    if (await resume()) {
      start();
      return;
    }
  } catch (error) {
    problem = error.message;
  }
  ask(problem);
}

boot();
