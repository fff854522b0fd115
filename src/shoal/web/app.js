// The frame of the page: signing in, tabs and the current view.

import { me, onSignedOut, openid, resume, signIn, signOut } from "./api.js";
import { offer } from "./commands.js";
import { toast } from "./dialog.js";
import { clock, h, jobName, throttled } from "./dom.js";
import { bell } from "./follow.js";
import { searchJobs } from "./job-query.js";
import { begin, cluster, end, listen } from "./live.js";
import { show as showPalette, watchKeys } from "./palette.js";
import { allowed, FIRST, MOVED, tabs, VIEWS } from "./views.js";

const AHEAD_MS = 1500; // after the first view: then the others are fetched, so that they open without a controller
const root = document.getElementById("app");
let shown = null;
let main = null;
let frame = null;
let turn = 0;

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
  return allowed(name) ? { name, argument: rest.join("/") } : { name: FIRST, argument: "", refused: name };
}

async function show() {
  if (!main) return;
  const { name, argument, refused } = route();
  const view = VIEWS[name];
  const mine = ++turn;
  shown?.();
  shown = null;
  main.replaceChildren();
  document.title = `${argument || view.tab || view.title} · Shoal`;
  for (const tab of frame.querySelectorAll(".tabs a")) {
    if (tab.dataset.view === (view.under ?? name)) {
      tab.setAttribute("aria-current", "page");
      tab.scrollIntoView({ block: "nearest", inline: "nearest" });
    } else tab.removeAttribute("aria-current");
  }
  window.scrollTo(0, 0);
  if (refused) {
    history.replaceState(null, "", `#/${FIRST}`);
    toast(
      VIEWS[refused]
        ? `Your role may not open ${VIEWS[refused].tab ?? VIEWS[refused].title}`
        : `There is no view “${refused.slice(0, 40)}”`,
    );
  }
  let module;
  try {
    module = await view.load();
  } catch {
    if (mine === turn)
      main.replaceChildren(
        h(
          "p",
          { class: "problem", role: "alert" },
          "This view cannot be loaded: the controller does not answer. Reload the page when it is back.",
        ),
      );
    return;
  }
  if (mine !== turn || !main) return; // another view was opened meanwhile
  main.dataset.view = name;
  shown = module.mount(main, argument) ?? null;
}

/** What the palette finds whatever view is open. */
function everything() {
  const go = (hash) => () => {
    location.hash = hash;
    main?.focus({ preventScroll: true });
  };
  const views = tabs().map(([name, view]) => ({ title: view.tab, hint: "view", run: go(`#/${name}`) }));
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
    ...services,
    ...jobs,
    { title: "Light or dark", hint: "theme", run: theme },
    { title: "Sign out", hint: "", run: leave },
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

/** Nothing for the operator, whose cluster it is. */
function identity() {
  if (!me.token) return null;
  const tenant = me.tenant === "*" ? "all tenants" : me.tenant;
  return h(
    "span",
    { class: "me dim small", title: `Signed in as ${me.user}, ${me.role} of ${tenant}` },
    `${me.user} · ${tenant} · ${me.role}`,
  );
}

function build() {
  const waiting = h("span", { class: "count", hidden: true });
  const words = h("span", { class: "words" }, "connecting");
  const state = h("span", { class: "link-state", role: "status", "data-state": "lost" }, h("i", {}), words);
  const links = tabs().map(([name, view]) =>
    h("a", { href: `#/${name}`, "data-view": name }, view.tab, name === "jobs" ? waiting : null),
  );
  main = h("main", { id: "main", tabindex: "-1" });
  frame = h(
    "div",
    {},
    h(
      "header",
      { class: "top" },
      h("a", { class: "brand", href: "#/cluster" }, h("img", { src: "/web/icon.svg", alt: "" }), "Shoal"),
      h("nav", { class: "tabs", "aria-label": "Views" }, links),
      h("span", { class: "space" }),
      state,
      identity(),
      bell(),
      h(
        "button",
        { class: "quiet", onclick: showPalette, "aria-label": "Palette: go anywhere, do anything", title: "Ctrl-K" },
        "⌕",
      ),
      h(
        "button",
        { class: "quiet", onclick: theme, "aria-label": "Switch between light and dark", title: "Light or dark" },
        "◐",
      ),
      h("button", { class: "quiet", onclick: leave }, "Sign out"),
    ),
    main,
  );
  const refresh = throttled(200, () => {
    const count = cluster.status?.jobs?.waiting ?? 0;
    waiting.hidden = !count;
    waiting.textContent = count > 999 ? "999+" : String(count);
    waiting.setAttribute("aria-label", `${count} waiting`);
    state.dataset.state = cluster.linked ? "live" : "lost";
    words.textContent = cluster.linked
      ? "live"
      : cluster.heard
        ? `not connected since ${clock(cluster.heard)}`
        : "not connected, retrying";
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
  shown?.();
  shown = main = null;
  turn += 1;
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
    openid ? h("p", {}, h("a", { href: "/v1/oidc/begin" }, "Sign in through your organisation")) : null,
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
  begin();
  show().then(() =>
    setTimeout(() => {
      for (const name of Object.keys(VIEWS)) if (allowed(name)) VIEWS[name].load().catch(() => {});
    }, AHEAD_MS),
  );
}

async function boot() {
  onSignedOut(() => ask("You are signed out. Sign in again."));
  window.addEventListener("hashchange", show);
  watchKeys();
  offer(() => (main ? everything() : []));
  offer((text) => (main ? searchJobs(text) : []));
  const code = /^#code=([\w-]+)$/.exec(location.hash)?.[1];
  if (code) history.replaceState(null, "", location.pathname);
  let problem = "";
  try {
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
