// All jobs in one table: found by words and filters, sorted, selected; every choice is in the address. The queue and
// the schedules are tabs of the same view.

import { choose, chosen } from "./address.js";
import { isAdmin, mayChange, me } from "./api.js";
import { askForMany } from "./bulk.js";
import { offer } from "./commands.js";
import { empty, h, plural, throttled, whole } from "./dom.js";
import { COLUMNS, named, usual } from "./job-cells.js";
import { Grid } from "./job-grid.js";
import { JobList } from "./job-list.js";
import { FILTERS, query } from "./job-query.js";
import { cluster, listen } from "./live.js";
import { replace } from "./patch.js";
import { watchSchedules } from "./schedules.js";
import { allowed } from "./views.js";
import { drawQueue, drawStrip, queueQuery, watchQueue } from "./waiting.js";

const TYPING_MS = 250;
const AGAIN_MS = 1500;
const KNOWN_MAX = 200;
const COMPARED_MAX = 10;
const STATES = [
  ..."live,waiting,running,asleep,away".split(","),
  ..."finished,succeeded,failed,timed-out,cancelled".split(","),
];
const TIMES = [
  ["1h", "Last hour"],
  ["1d", "Last 24 hours"],
  ["7d", "Last 7 days"],
  ["30d", "Last 30 days"],
];
const TABS = { "": "All jobs", queue: "Queue", schedules: "Schedules" };
const NEWEST = "-submitted";
const everywhere = () => isAdmin() || me.tenant === "*";

export function mount(root) {
  const tab = Object.hasOwn(TABS, chosen("tab")) ? chosen("tab") : "";
  const count = h("span", { class: "dim", role: "status", "data-name": "count" });
  const strip = h("div", { class: "reasons small", role: "group", "aria-label": "Waiting", hidden: true });
  const waiting = h("span", { class: "count", hidden: true });
  const body = h("section", { class: "card jobs", "aria-label": TABS[tab] });
  const head = h(
    "div",
    { class: "row" },
    h("h1", {}, "Jobs"),
    h(
      "nav",
      { class: "parts", "aria-label": "Jobs" },
      Object.entries(TABS).map(([key, title]) =>
        h(
          "a",
          { href: key ? `#/jobs?tab=${key}` : "#/jobs", "aria-current": key === tab ? "page" : null },
          title,
          key === "queue" ? waiting : null,
        ),
      ),
    ),
    count,
    allowed("new") ? h("a", { class: "button push", href: "#/new" }, "New job") : null,
  );
  root.append(h("div", { class: "stack jobs-view" }, head, tab === "schedules" ? null : strip, body));

  let list = { pick: (name, value) => choose(name, value), stop: () => {} };
  if (tab === "schedules") list.stop = watchSchedules(body);
  else if (!tab) list = mountList(body, count);
  const pick = (name, value) => {
    list.pick(name, value);
    drawStrip(strip, queue, pick);
    if (tab) watched.again();
  };
  /** @type {Api.QueueView} */
  let queue = null;
  const watched = watchQueue(tab === "queue" ? queueQuery : () => "limit=1", (found, problem) => {
    queue = found;
    waiting.hidden = !queue?.waiting;
    waiting.textContent = whole(queue?.waiting ?? 0);
    drawStrip(strip, queue, pick);
    if (tab === "queue") drawQueue(body, queue, problem);
  });
  return () => {
    watched.stop();
    list.stop();
  };
}

/** The table of all jobs. Returns how to choose a filter, and how to stop it. */
function mountList(root, count) {
  const narrowScreen = matchMedia("(max-width: 1100px)");
  const box = h("input", {
    type: "search",
    value: chosen("q"),
    placeholder: "Search names, ids, users, commands, labels",
    "aria-label": "Search jobs",
    maxlength: 200,
    autocomplete: "off",
    spellcheck: "false",
  });
  const filters = h("div", { class: "row" });
  const active = h("div", { class: "row small" });
  const bar = h("div", { class: "jobs-bar row", role: "region", "aria-label": "Selected jobs", hidden: true });
  const foot = h("div", { class: "row jobs-foot" });
  const told = h("p", { class: "note", role: "status", hidden: true });
  const list = new JobList(() => drawList());
  const grid = new Grid({
    sort: (by) => pick("sort", by === NEWEST ? "" : by),
    open: (id) => {
      location.hash = `#/job/${id}`;
    },
    chosen: () => drawBar(),
    need: () => list.more(),
  });
  root.append(h("div", { class: "row", role: "search" }, box, filters), active, told, bar, grid.element, foot);

  const choices = () => Object.fromEntries(FILTERS.map((name) => [name, chosen(name)]));
  const given = () => FILTERS.filter((name) => chosen(name));
  const shownFilters = () => given().filter((name) => name !== "group"); // which the strip shows
  function ask() {
    const asked = query(box.value, choices());
    asked.set("sort", chosen("sort") || NEWEST);
    list.begin(String(asked));
  }
  function pick(name, value) {
    choose(name, value);
    draw();
    ask();
  }
  function clear() {
    box.value = "";
    for (const name of ["q", ...FILTERS]) choose(name, "");
    draw();
    ask();
  }

  function drawFilters() {
    const mine = me.token && chosen("user") === me.user;
    const known = (id, names) =>
      h(
        "datalist",
        { id },
        [...names].slice(0, KNOWN_MAX).map((name) => h("option", { value: name })),
      );
    const field = (name, label, ids) =>
      h(
        "label",
        { class: "field", "data-key": name },
        label,
        h("input", {
          name,
          value: chosen(name),
          list: ids,
          maxlength: 128,
          autocomplete: "off",
          onchange: (event) => pick(name, event.target.value.trim()),
        }),
      );
    const option = (value, label) => h("option", { value }, label);
    const since = chosen("since");
    const open = (key) => Boolean(filters.querySelector(`[data-key=${key}]`)?.open);
    replace(
      filters,
      h(
        "select",
        { "data-key": "state", "aria-label": "State", onchange: (event) => pick("state", event.target.value) },
        option("", "Any state"),
        STATES.map((state) => option(state, state)),
        !chosen("state") || STATES.includes(chosen("state")) ? null : option(chosen("state"), chosen("state")),
      ),
      h(
        "select",
        { "data-key": "since", "aria-label": "Time", onchange: (event) => pick("since", event.target.value) },
        option("", "Any time"),
        TIMES.map(([value, label]) => option(value, label)),
        !since || TIMES.some(([value]) => value === since) ? null : option(since, "Since a set time"),
      ),
      me.token
        ? h(
            "button",
            {
              "data-key": "mine",
              "aria-pressed": String(Boolean(mine)),
              class: "toggle",
              onclick: () => pick("user", mine ? "" : me.user),
            },
            "Mine",
          )
        : null,
      h(
        "details",
        { class: "drop", "data-key": "more", open: open("more") },
        h("summary", { class: "button" }, "Filters"),
        h(
          "div",
          { class: "drop-box" },
          field("user", "User"),
          everywhere() ? field("tenant", "Tenant") : null,
          field("node", "Node", "known-nodes"),
          field("service", "Service", "known-services"),
          field("array", "Array"),
          field("label", "Label, e.g. run=a"),
          h(
            "label",
            { class: "field", "data-key": "until" },
            "Submitted before",
            h("input", {
              type: "datetime-local",
              name: "until",
              value: local(chosen("until")),
              onchange: (event) =>
                pick("until", event.target.value ? String(new Date(event.target.value).getTime()) : ""),
            }),
          ),
          known("known-nodes", cluster.nodes.keys()),
          known("known-services", cluster.services.keys()),
        ),
      ),
      h(
        "details",
        { class: "drop", "data-key": "columns", open: open("columns") },
        h("summary", { class: "button" }, "Columns"),
        h(
          "div",
          { class: "drop-box" },
          COLUMNS.slice(1).map((one) =>
            h(
              "label",
              { "data-key": one.key },
              h("input", {
                type: "checkbox",
                name: one.key,
                checked: shown().includes(one.key),
                onchange: (event) => columns(one.key, event.target.checked),
              }),
              ` ${one.head}`,
            ),
          ),
          h("button", { class: "quiet", onclick: () => pick("cols", "") }, "Reset"),
        ),
      ),
    );
    for (const select of filters.querySelectorAll("select")) select.value = chosen(select.dataset.key);
    replace(
      active,
      shownFilters().map((name) =>
        h(
          "button",
          {
            class: "chip",
            "data-key": name,
            "data-filter": name,
            "aria-label": `Remove filter: ${name} ${chosen(name)}`,
            onclick: () => pick(name, ""),
          },
          `${name}: ${name === "until" ? local(chosen(name)).replace("T", " ") : chosen(name)} ×`,
        ),
      ),
      shownFilters().length ? h("button", { class: "quiet", onclick: clear }, "Clear all") : null,
    );
    active.hidden = !shownFilters().length;
  }

  const shown = () => {
    const wanted = named(chosen("cols"));
    return wanted.length ? ["id", ...wanted] : usual(!narrowScreen.matches, list.rows);
  };
  function columns(key, on) {
    const keys = shown().filter((one) => one !== key);
    pick(
      "cols",
      COLUMNS.map((one) => one.key)
        .filter((one) => keys.includes(one) || (on && one === key))
        .join(","),
    );
  }

  function drawList() {
    const total = Number(list.count.replace("about ", "")) || 0;
    count.textContent = list.asked
      ? list.next
        ? list.count
          ? `${list.count.startsWith("about") ? "about " : ""}${plural(Math.max(total, list.rows.length), "job")}`
          : `more than ${plural(list.rows.length, "job")}`
        : plural(list.rows.length, "job")
      : "Loading";
    grid.sort = chosen("sort") || NEWEST;
    grid.columns = COLUMNS.filter((one) => shown().includes(one.key));
    grid.element.hidden = !list.rows.length;
    grid.set(list.rows, list.next ? total : list.rows.length);
    drawBar();
    drawFoot();
  }

  function drawFoot() {
    const wanted = given().length || box.value.trim();
    replace(
      foot,
      list.problem ? h("p", { class: "problem" }, list.problem) : null,
      list.asked && !list.rows.length && !list.problem && !list.next
        ? wanted
          ? h("div", { class: "empty" }, h("p", {}, "No jobs match."), h("button", { onclick: clear }, "Show all jobs"))
          : empty("No jobs yet. To submit one:", "shoal run -g 1 -- python train.py")
        : null,
      list.next
        ? h(
            "button",
            { onclick: () => list.more(), disabled: list.busy },
            list.busy ? "Loading" : `Load more (${whole(list.rows.length)} loaded)`,
          )
        : null,
      list.leftOut
        ? h(
            "p",
            { class: "dim small" },
            "Only the last 5,000 finished jobs are sorted by this column. Sort by Submitted or Ended to include all.",
          )
        : null,
      list.fixed && list.missed
        ? h("button", { class: "jobs-newer", onclick: ask }, `Show ${plural(list.missed, "new job")}`)
        : null,
    );
  }

  function drawBar() {
    const ids = [...grid.selected];
    const some = ids.length;
    bar.hidden = !some;
    replace(
      bar,
      h("b", {}, `${whole(some)} selected`),
      mayChange()
        ? [
            h(
              "button",
              { class: "danger", "data-key": "cancel", onclick: () => askForMany("cancel", ids, say) },
              "Cancel",
            ),
            h("button", { "data-key": "requeue", onclick: () => askForMany("requeue", ids, say) }, "Requeue"),
          ]
        : null,
      some >= 2 && some <= COMPARED_MAX && allowed("compare")
        ? h("a", { class: "button", "data-key": "compare", href: `#/compare/${ids.join(",")}` }, "Compare")
        : null,
      some === 1 && mayChange() && allowed("new")
        ? h("a", { class: "button", "data-key": "like", href: `#/new?like=${ids[0]}` }, "Run with changes")
        : null,
      h("button", { class: "quiet", "data-key": "none", onclick: () => grid.pick([]) }, "Clear"),
    );
  }
  function say(text, done) {
    told.hidden = false;
    told.textContent = text;
    if (done) {
      grid.pick([]);
      list.refresh();
    }
  }
  function draw() {
    drawFilters();
    drawList();
  }

  let typing = 0;
  box.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => {
      choose("q", box.value.trim());
      told.hidden = true;
      ask();
    }, TYPING_MS);
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" && list.rows.length) {
      event.preventDefault();
      grid.element.focus();
    }
  });
  const outside = (event) => {
    for (const one of filters.querySelectorAll("details[open]"))
      if (event.key === "Escape" || (event.type === "pointerdown" && !one.contains(event.target))) {
        one.open = false;
        if (event.key) one.querySelector("summary").focus();
      }
  };
  addEventListener("pointerdown", outside);
  filters.addEventListener("keydown", outside);
  bar.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      grid.pick([]);
      grid.element.focus();
    }
  });
  narrowScreen.addEventListener("change", draw);

  const again = throttled(AGAIN_MS, () => {
    if (!document.hidden) list.refresh();
  });
  const redraw = throttled(300, () => {
    grid.draw(true);
    drawFoot();
  });
  const leave = listen((change) => {
    if (change.jobs?.length || change.ended?.length || change.gone_jobs?.length || change.whole) {
      if (list.fixed) list.hear(change.jobs ?? []);
      else again();
    }
    redraw();
  });
  const without = offer(() => [
    { title: "Failed jobs", hint: "filter", run: () => pick("state", "failed") },
    ...(me.token ? [{ title: "My jobs", hint: "filter", run: () => pick("user", me.user) }] : []),
    { title: "Clear filters", hint: "jobs", run: clear },
    ...(grid.selected.size && mayChange()
      ? ["cancel", "requeue"].map((name) => ({
          title: `${name === "cancel" ? "Cancel" : "Requeue"} ${plural(grid.selected.size, "selected job")}`,
          hint: "jobs",
          run: () => askForMany(name, [...grid.selected], say),
        }))
      : []),
  ]);
  const stops = [
    leave,
    without,
    () => list.stop(),
    () => grid.stop(),
    again.stop,
    redraw.stop,
    () => clearTimeout(typing),
    () => removeEventListener("pointerdown", outside),
    () => narrowScreen.removeEventListener("change", draw),
  ];
  draw();
  ask();
  return {
    pick,
    stop: () => {
      for (const stop of stops) stop();
    },
  };
}

/** A time in ms as an input for local times has it. */
function local(ms) {
  if (!/^\d+$/.test(ms)) return "";
  const at = new Date(Number(ms));
  return new Date(at.getTime() - at.getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
}
