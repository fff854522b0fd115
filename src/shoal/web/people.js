// What a tenant or a user ran, what it cost and what was wasted: the pages of both.

import { choose, chosen } from "./address.js";
import { get } from "./api.js";
import { budgets, gauge, toTenant } from "./budgets.js";
import { offer } from "./commands.js";
import { ago, chip, empty, h, jobName, shape, span } from "./dom.js";
import { choice, csvLink, division, figures, ledgerTable, query, SPANS } from "./ledger-table.js";
import { now } from "./live.js";
import { replace } from "./patch.js";
import { table } from "./table.js";

const ASK_MS = 10_000;
const JOBS = 12;

/** `only`: { tenant, user } as the ledger takes them. `bys`: the tables, from the whole to its parts. */
export function people(root, kind, name, only, bys) {
  let days = SPANS.some(([value]) => value === chosen("days")) ? chosen("days") : "7";
  let asked = 0;
  const away = new AbortController();
  const signal = away.signal;
  const notice = h("div", {});
  const top = h("div", { class: "stack" });
  const gauges = h("section", { class: "card stack", "aria-label": "Budget", hidden: true });
  const jobs = h("section", { class: "card", "aria-label": "Jobs" });
  const parts = bys.map((by) => h("section", { class: "card", "aria-label": `By ${by}`, hidden: true }));
  const about = h(
    "span",
    { class: "dim" },
    kind === "user" && only.tenant ? ["in tenant ", toTenant(only.tenant)] : null,
  );
  root.append(
    h(
      "div",
      { class: "stack" },
      h(
        "div",
        { class: "row" },
        h("h1", {}, `${kind === "user" ? "User" : "Tenant"} ${name}`),
        about,
        choice("span", SPANS, days, (value) => {
          days = value;
          choose("days", value === "7" ? "" : value);
          ask();
        }),
      ),
      notice,
      gauges,
      top,
      jobs,
      parts,
    ),
  );
  const words = new URLSearchParams(Object.entries(only).filter(([, value]) => value)).toString();

  async function ask() {
    const mine = ++asked;
    const to = Math.ceil(now());
    const path = (by) =>
      get(`/v1/ledger?${query(by, days, to, only)}`, { signal }).catch((error) => {
        if (error.status !== 404) throw error;
        missing = error.message;
        return null;
      });
    let missing = "";
    try {
      const [rows, own, ...views] = await Promise.all([
        get(`/v1/jobs?${words}&finished=true&limit=${JOBS}`, { signal }),
        kind === "tenant" ? budgets() : [],
        ...bys.map(path),
      ]);
      if (mine !== asked || signal.aborted) return;
      showJobs(rows);
      gauges.hidden = !own.some((one) => one.tenant === name);
      replace(gauges, h("h2", {}, "Budget"), own.filter((one) => one.tenant === name).map(gauge));
      showViews(views, to, missing);
    } catch (error) {
      if (mine === asked && !signal.aborted)
        replace(notice, h("p", { class: "problem", role: "alert" }, error.message));
    }
  }

  function showJobs(rows) {
    const line = (job) =>
      h(
        "tr",
        { "data-key": job.id, "data-job": job.id },
        h("td", { class: "long" }, h("a", { href: `#/job/${job.id}` }, jobName(job))),
        h("td", {}, chip(job.state)),
        kind === "tenant" ? h("td", {}, toUser(job.user, only)) : null,
        h("td", { class: "dim" }, shape(job)),
        h(
          "td",
          { class: "num", "data-name": "Run time" },
          job.running_ms && job.state !== "waiting" ? span((job.finished_ms ?? now()) - job.running_ms) : "–",
        ),
        h("td", { class: "num", "data-name": "Submitted" }, ago(job.submitted_ms, now())),
      );
    replace(
      jobs,
      h(
        "div",
        { class: "row" },
        h("h2", {}, "Running and recent jobs"),
        h("a", { class: "push", href: `#/jobs?${words}` }, "All jobs"),
      ),
      rows.length
        ? table(
            ["Job", "", ...(kind === "tenant" ? ["User"] : []), "Size", "num:Run time", "num:Submitted"],
            rows.slice(0, JOBS).map(line),
          )
        : h("p", { class: "dim" }, "No jobs yet."),
    );
  }

  function showViews(views, to, missing) {
    const [whole] = views;
    const bare = !whole?.rows.length;
    replace(
      notice,
      missing
        ? empty(missing)
        : bare
          ? empty("No GPU time used in this period.")
          : (whole.notes ?? []).length
            ? h(
                "ul",
                { class: "notes" },
                whole.notes.map((note) => h("li", {}, note)),
              )
            : null,
    );
    replace(top, ...(bare ? [] : [figures(whole, "Used"), division(whole, "of usage")]));
    const links = {
      user: (key) => userAddress(key, { ...only, days }),
      job: (key) => (key && key !== "older" ? `#/job/${encodeURIComponent(key)}` : null),
    };
    views.forEach((view, at) => {
      parts[at].hidden = !view?.rows.length;
      if (view)
        replace(
          parts[at],
          h(
            "div",
            { class: "row" },
            h("h2", {}, bys[at] === "account" ? "Breakdown" : `By ${bys[at]}`),
            h("span", { class: "push" }, csvLink(query(bys[at], days, to, only))),
          ),
          ledgerTable(view, links[bys[at]]),
        );
    });
  }

  const timer = setInterval(() => {
    if (!document.hidden) ask();
  }, ASK_MS);
  const over = offer(() => [
    {
      title: `Jobs of ${name}`,
      hint: kind,
      run: () => {
        location.hash = `#/jobs?${words}`;
      },
    },
  ]);
  window.addEventListener("shoal-theme", ask, { signal });
  ask();
  return () => {
    away.abort();
    clearInterval(timer);
    over();
  };
}

function userAddress(user, { tenant, days }) {
  if (!user) return null;
  const words = new URLSearchParams({ ...(tenant ? { tenant } : {}), ...(days ? { days } : {}) }).toString();
  return `#/user/${encodeURIComponent(user)}${words ? `?${words}` : ""}`;
}
const toUser = (user, only) => (user ? h("a", { href: userAddress(user, only) }, user) : "–");
