// What every GPU did and when, and the cluster as it was at any moment.

import { choose, chosen } from "./address.js";
import { get } from "./api.js";
import { offer } from "./commands.js";

import { chip, eventLine, h, plural, shape, span, throttled, moment as when, whole } from "./dom.js";

import { Gantt, SPAN_LEAST, SPAN_MOST } from "./gantt.js";
import { absorb, emptyCluster, listen, now } from "./live.js";
import { ClusterMap } from "./map.js";
import { describe, legend as drawLegend, foundText, matches, owner, sentence, showTip } from "./map-words.js";
import { replace } from "./patch.js";
import { table } from "./table.js";

const HOUR = 3_600_000;
// Why a bar ends.
const CAUSES = {
  succeeded: "Succeeded",
  lost: "Lost",
  asleep: "Suspended",
  cancel: "Cancelled",
  "time-limit": "Time limit reached",
  failure: "Failed",
  "node-loss": "Node lost",
  drain: "Node drained",
  preempt: "Preempted",
  resize: "Resized",
  move: "Moved",
  hang: "Hung",
};
const PRESETS = { "1h": HOUR, "6h": 6 * HOUR, "24h": 24 * HOUR, "7d": 168 * HOUR, "30d": 720 * HOUR };
const FIRST = "6h";
const YOUNG_LEAST = 600_000;
const ASK_MS = 150; // after the last movement
const AGAIN_MS = 2000; // at the live edge, if something has changed; longer if there is much
const BARS_PER_S = 1000;
const QUEUE_SHOWN = 100;
const ROWS = { "": "Auto", gpus: "GPUs", nodes: "Nodes" };

export function mount(root) {
  const tip = h("div", { class: "tip", role: "presentation", hidden: true });
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const about = h("p", { class: "small", role: "status", "data-name": "about" });
  const range = h("span", { class: "dim small", "data-name": "range" });
  const found = h("span", { class: "small", role: "status", "data-name": "found" });
  const past = h("section", { class: "stack past", "aria-label": "Cluster at this time", hidden: true });
  const numbers = (name) => {
    const value = Number(chosen(name));
    return Number.isFinite(value) && value > 0 ? value : null;
  };
  let live = !(numbers("from") && numbers("to") > numbers("from"));
  let length = PRESETS[chosen("last")] ?? (Number(chosen("last")) || PRESETS[FIRST]);
  let young = live && !chosen("last") && !chosen("at");
  /** @type {Api.TimelineView} */
  let answer = null;
  let asked = null;
  /** @type {AbortController} */
  let asking = null;
  let loading = 0;
  let alive = true;
  let dirty = false;
  let loaded = 0;
  length = Math.max(SPAN_LEAST, Math.min(SPAN_MOST, length));

  const gantt = new Gantt({
    tall: (beside) =>
      Math.max(
        180,
        Math.floor(
          beside
            ? window.innerHeight * 0.4
            : window.innerHeight -
                gantt.element.getBoundingClientRect().top -
                window.scrollY -
                (window.innerWidth <= 760 ? 110 : 64),
        ),
      ),
    onView: (from, to) => view(from, to),
    onAt: (at) => scrub(at),
    onHover: (hit, event) => showTip(tip, hit?.node && lines(hit), event && { x: event.clientX, y: event.clientY }),
    onChoose: (hit) => {
      gantt.chosen = hit.bar?.job ? hit.bar : null;
      tell(hit);
      gantt.redraw();
    },
    onOpen: (bar) => {
      if (known(bar.job)) location.hash = `#/job/${bar.job}`;
    },
    onSay: (hit) => tell(hit),
  });
  gantt.by = chosen("by") === "tenant" ? "tenant" : "job";
  gantt.rows = ROWS[chosen("rows")] ? chosen("rows") : "";
  gantt.at = numbers("at");
  const then = new Then(
    (text) => {
      about.textContent = text;
    },
    tip,
    (words) => {
      find.value = words;
      search();
    },
  );
  window.shoalTime = { gantt, map: then.map }; // for tests and benchmarks

  const typed = h("input", {
    type: "datetime-local",
    step: "1",
    "aria-label": "Go to time",
    onchange: () => {
      const at = new Date(typed.value).getTime();
      if (at > 0) scrub(Math.min(at, now()), true);
    },
  });
  const find = h("input", {
    type: "search",
    placeholder: "Find nodes and jobs",
    "aria-label": "Find nodes and jobs",
    maxlength: 100,
    value: chosen("q"),
    oninput: () => search(),
  });
  const presets = Object.keys(PRESETS).map((name) =>
    h("button", { "data-span": name, onclick: () => preset(name) }, name),
  );
  const small = (label, words, act) => h("button", { "aria-label": words, title: words, onclick: act }, label);
  const back = h("button", { onclick: () => scrub(null), "data-name": "now" }, "Now");
  root.append(
    h(
      "div",
      { class: "stack" },
      h("h1", { class: "unseen" }, "Time"),
      h(
        "div",
        { class: "row times" },
        h("span", { class: "row tight" }, presets),
        h(
          "span",
          { class: "row tight" },
          small("−", "Zoom out", () => gantt.zoom(2)),
          small("+", "Zoom in", () => gantt.zoom(0.5)),
          small("‹", "Earlier", () => gantt.pan((gantt.from - gantt.to) / 2)),
          small("›", "Later", () => gantt.pan((gantt.to - gantt.from) / 2)),
        ),
        typed,
        back,
        find,
        found,
        radios("rows", "Rows", ROWS, gantt.rows, (value) => {
          gantt.rows = value;
          choose("rows", value);
          gantt.arrange();
        }),
        radios("by", "Color by", { job: "Job", tenant: "Tenant" }, gantt.by, (value) => {
          gantt.by = value;
          choose("by", value === "job" ? "" : value);
          then.recolor(value);
          gantt.redraw();
        }),
        range,
      ),
      problem,
      gantt.element,
      about,
      past,
    ),
    tip,
  );

  // -- what is seen --
  const remember = throttled(300, () => {
    choose("from", live ? "" : String(Math.round(gantt.from)));
    choose("to", live ? "" : String(Math.round(gantt.to)));
    choose(
      "last",
      live && length !== PRESETS[FIRST]
        ? (Object.keys(PRESETS).find((name) => PRESETS[name] === length) ?? String(Math.round(length)))
        : "",
    );
    choose("at", gantt.at === null ? "" : String(gantt.at));
  });
  function view(from, to) {
    const latest = now();
    const wide = to - from;
    live = to >= latest - wide / 200;
    length = wide;
    follow(live ? latest : to);
  }
  function follow(to = now()) {
    gantt.now = now();
    gantt.look(to - length, to);
    for (const button of presets)
      button.setAttribute("aria-pressed", String(Math.abs(PRESETS[button.dataset.span] - length) < 1000));
    range.textContent =
      `${when(gantt.from, gantt.now)} to ${live ? "now" : when(gantt.to, gantt.now)} ` + `(${span(length)})`;
    remember();
    if (!covered()) soon();
  }
  function preset(name) {
    const at = gantt.at;
    length = PRESETS[name];
    if (at !== null && at < now() - length) {
      live = false;
      follow(at + length / 2);
    } else {
      live = true;
      follow();
    }
  }

  /** A cluster that is younger than the first window fills it. */
  function fit(oldest) {
    young = false;
    const age = 1.05 * (now() - oldest);
    if (live && oldest > 0 && age < length) {
      length = Math.max(YOUNG_LEAST, age);
      follow();
    }
  }

  // -- the bars --
  const covered = () =>
    asked &&
    asked.from <= gantt.from &&
    asked.to >= Math.min(gantt.to, gantt.now) &&
    asked.wide < length * 2 &&
    asked.wide > length / 2;
  async function load() {
    clearTimeout(loading);
    loading = 0;
    if (!alive || document.hidden || asking) return; // one at a time: the answer asks again if more is seen by then
    const mine = new AbortController();
    asking = mine;
    const began = performance.now();
    const want = {
      from: Math.max(0, Math.floor(gantt.from - length / 2)),
      to: Math.ceil(gantt.to + length / 2),
      wide: length,
    };
    dirty = false;
    try {
      const least = Math.floor(length / Math.max(200, gantt.width ?? 800)); // narrower than a pixel
      answer = await get(`/v1/timeline?from_ms=${want.from}&to_ms=${want.to}&least_ms=${least}`, {
        signal: mine.signal,
      });
      if (!alive || mine.signal.aborted) return;
      asked = want;
      loaded =
        performance.now() +
        Math.max(AGAIN_MS, 5 * (performance.now() - began), (1000 * answer.bars.length) / BARS_PER_S);
      complain("");
      gantt.take(answer);
      count();
      if (young) fit(answer.oldest_ms);
    } catch (error) {
      if (alive && error.name !== "AbortError") complain(`Could not load the timeline: ${error.message}`);
    }
    asking = null;
    if (alive && problem.dataset.kind !== "refused" && !covered()) soon();
  }
  const soon = () => {
    if (!loading) loading = setTimeout(load, ASK_MS);
  };
  function complain(text) {
    const left =
      !text && answer?.left_out ? `${plural(answer.left_out, "short bar")} hidden. Zoom in to show more.` : "";
    problem.hidden = !(text || left);
    problem.textContent = text || left;
    problem.dataset.kind = text ? "refused" : "";
  }

  // -- that moment --
  function scrub(at, show = false) {
    gantt.at = at === null ? null : Math.round(at);
    if (show && at !== null && (at < gantt.from || at > gantt.to)) {
      live = false;
      follow(Math.min(now(), at + length / 2));
    }
    back.disabled = at === null;
    if (document.activeElement !== typed || at === null) typed.value = at === null ? "" : local(at);
    if ((at === null) !== past.hidden) {
      past.hidden = at === null;
      gantt.arrange();
    }
    then.show(past, gantt.at, find.value);
    remember();
    gantt.redraw();
  }

  function search() {
    choose("q", find.value.trim());
    gantt.find(find.value);
    gantt.element.scrollTop = 0;
    count();
    then.search(find.value);
  }
  function count() {
    const both = gantt.found();
    replace(
      found,
      ...(both
        ? foundText({ nodes: new Map(), jobs: new Map([...both.jobs].map((id) => [id, { id }])) }, both, true)
        : []),
    );
  }

  function tell(hit) {
    replace(
      about,
      ...(hit.node
        ? [
            sentence(lines(hit)),
            ...(known(hit.bar?.job)
              ? [" · ", h("a", { href: `#/job/${hit.bar.job}`, "data-key": "job" }, `Open ${hit.bar.job}`)]
              : []),
            " · ",
            h("a", { href: `#/node/${encodeURIComponent(hit.node.id)}`, "data-key": "node" }, hit.node.id),
          ]
        : []),
    );
  }

  function onEscape(event) {
    if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
    if (gantt.chosen) {
      gantt.chosen = null;
      about.textContent = "";
      gantt.redraw();
    } else if (find.value) {
      find.value = "";
      search();
    } else if (gantt.at !== null) scrub(null);
  }
  const stop = listen((change) => {
    if (live && !gantt.drag) follow();
    else {
      gantt.now = now();
      gantt.redraw();
    }
    dirty ||= Boolean(change.whole || change.jobs?.length || change.nodes?.length || change.ended?.length);
    if (live && dirty && performance.now() > loaded) soon();
  });
  const redraw = () => {
    then.redraw();
  };
  window.addEventListener("keydown", onEscape);
  window.addEventListener("shoal-theme", redraw);
  const withdraw = offer(() => [
    ...Object.keys(PRESETS).map((name) => ({
      title: `Last ${name}`,
      hint: "time",
      run: () => {
        scrub(null);
        preset(name);
      },
    })),
    { title: "Go to now", hint: "time", run: () => scrub(null) },
  ]);
  gantt.find(find.value);
  gantt.now = now();
  if (live) follow();
  else {
    length = numbers("to") - numbers("from");
    follow(numbers("to"));
  }
  scrub(gantt.at);
  load();
  return () => {
    alive = false;
    asking?.abort();
    clearTimeout(loading);
    remember.stop();
    stop();
    withdraw();
    then.stop();
    gantt.stop();
    window.removeEventListener("keydown", onEscape);
    window.removeEventListener("shoal-theme", redraw);
  };
}

/** The cluster as it was: the map, the queue and the events. One request at a time; the newest wish is the next. */
class Then {
  constructor(say, tip, pin) {
    this.pin = pin;
    this.cluster = emptyCluster();
    this.answer = null;
    this.wanted = null;
    this.busy = false;
    this.timer = 0;
    this.alive = true;
    this.words = "";
    this.map = new ClusterMap({
      cluster: this.cluster,
      tall: () => Math.max(200, Math.floor(window.innerHeight * 0.42)),
      onHover: (hit) => showTip(tip, hit && describe(this.map, hit, this.answer?.at_ms), hit),
      onChoose: (hit) => say(sentence(describe(this.map, hit, this.answer?.at_ms))),
      onSay: (hit) => say(sentence(describe(this.map, hit, this.answer?.at_ms))),
    });
    this.title = h("h2", {});
    this.problem = h("p", { class: "problem", role: "alert", hidden: true });
    this.legend = h("div", { class: "legend row small", "aria-label": "Colors" });
    this.queue = h("section", { class: "card", "aria-label": "Queue at this time" });
    this.events = h("section", { class: "card", "aria-label": "Events before this time" });
  }

  stop() {
    this.alive = false;
    clearTimeout(this.timer);
    this.asking?.abort();
    this.map.stop();
  }

  show(element, at, words) {
    this.wanted = at;
    this.words = words;
    if (at === null) {
      clearTimeout(this.timer);
      this.asking?.abort();
      this.answer = null;
      return;
    }
    if (!element.firstChild)
      element.append(
        this.title,
        this.problem,
        this.legend,
        this.map.spacer,
        h("div", { class: "grid2" }, this.queue, this.events),
      );
    if (this.answer?.at_ms !== at) this.title.textContent = `Cluster at ${when(at, now())}: loading`;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), ASK_MS);
  }

  async ask() {
    if (this.busy || !this.alive || this.wanted === null) return;
    const at = this.wanted;
    this.busy = true;
    this.asking = new AbortController();
    try {
      const answer = await get(`/v1/moment?at_ms=${at}`, { signal: this.asking.signal });
      if (this.alive && this.wanted !== null) this.take(answer);
    } catch (error) {
      if (this.alive && error.name !== "AbortError") {
        this.problem.hidden = false;
        this.problem.textContent = `Could not load this time: ${error.message}`;
      }
    }
    this.busy = false;
    if (this.alive && this.wanted !== null && this.wanted !== at) this.ask();
  }

  take(answer) {
    this.answer = answer;
    this.problem.hidden = true;
    absorb(this.cluster, answer.snapshot, true);
    const { gpus_held: held, gpus, jobs } = answer.snapshot.status;
    this.title.textContent =
      `Cluster at ${when(answer.at_ms, now())}: ${whole(held)} of ${plural(gpus, "GPU")} in use, ` +
      `${plural(jobs?.running ?? 0, "job")} running, ${whole(jobs?.waiting ?? 0)} waiting`;
    this.map.show(this.cluster);
    this.search(this.words);
    replace(this.queue, ...queuePart(answer));
    replace(
      this.events,
      h("h2", {}, "Events before this time"),
      answer.events.length
        ? h("ol", { class: "events" }, answer.events.toReversed().map(eventLine))
        : h("p", { class: "dim" }, "No earlier events"),
    );
  }

  recolor(by) {
    this.map.by = by;
    this.redraw();
  }
  search(words) {
    this.words = words;
    this.map.lit = this.answer ? matches(this.cluster, words) : null;
    this.redraw();
  }
  redraw() {
    if (this.answer) {
      drawLegend(this.legend, this.map, this.words, this.pin);
      this.map.redraw();
    }
  }
}

function queuePart({ queue, at_ms: at, snapshot }) {
  const waiting = snapshot.status.jobs?.waiting ?? queue.length;
  const head = h(
    "div",
    { class: "row" },
    h("h2", {}, "Queue"),
    h("span", { class: "dim" }, waiting ? plural(waiting, "job") : ""),
  );
  if (!queue.length) return [head, h("p", { class: "dim" }, "No jobs waiting")];
  const rows = queue
    .slice(0, QUEUE_SHOWN)
    .map((job) =>
      h(
        "tr",
        { "data-key": job.id, "data-job": job.id },
        h(
          "td",
          {},
          h("a", { href: `#/job/${job.id}`, "data-key": "go" }, job.id),
          job.name ? ` ${job.name}` : "",
          h("div", { class: "dim small" }, `${shape(job)} · ${job.tenant}`),
        ),
        h("td", {}, job.why),
        h("td", { class: "num", "data-name": "waited" }, span(at - job.submitted_ms)),
      ),
    );
  return [
    head,
    table(["Job", "Reason", "num:Waiting for"], rows),
    queue.length > QUEUE_SHOWN ? h("p", { class: "dim small" }, `${whole(queue.length - QUEUE_SHOWN)} more`) : null,
  ];
}

const known = (job) => Boolean(job) && !job.startsWith("@");

/** What is to be said of a place on the time line: job, member, from, to, why it ended. */
function lines({ node, gpu, ms, bar, state }) {
  const head = h("div", {}, h("b", {}, `${node.id} · GPU ${gpu}`), ` at ${when(ms, now())}`);
  const till = (one) =>
    `${when(one.begin, now())} to ${one.end === null ? "now" : when(one.end, now())} ` +
    `(${span((one.end ?? now()) - one.begin)})`;
  const out = [head];
  if (bar) {
    const what = known(bar.job)
      ? `${bar.job}${bar.name ? ` ${bar.name}` : ""}`
      : / jobs?$/.test(bar.why)
        ? `${bar.why}, too short to show`
        : owner(bar.job);
    out.push(
      h(
        "div",
        {},
        h("b", {}, what),
        known(bar.job) ? ` attempt ${bar.attempt}, member ${bar.member}${bar.tenant ? `, ${bar.tenant}` : ""}` : "",
      ),
      h("div", {}, till(bar)),
    );
    if (known(bar.job))
      out.push(
        h(
          "div",
          { class: "dim" },
          bar.end === null
            ? "Running"
            : `Ended: ${[...new Set([CAUSES[bar.cause] ?? bar.cause, bar.why])].filter(Boolean).join(", ")}`,
        ),
      );
  }
  if (state) out.push(h("div", {}, chip(state.state), ` ${till(state)}${state.why ? `: ${state.why}` : ""}`));
  if (!bar && !state) out.push(h("div", { class: "dim" }, "Unallocated"));
  return out;
}

function radios(name, title, choices, value, act) {
  return h(
    "fieldset",
    { class: "choice" },
    h("legend", { class: "unseen" }, title),
    Object.entries(choices).map(([key, label]) =>
      h(
        "label",
        {},
        h("input", { type: "radio", name, value: key, checked: key === value, onchange: () => act(key) }),
        label,
      ),
    ),
  );
}

/** As an input of a time wants it: local, without a zone. */
const local = (ms) => new Date(ms - new Date(ms).getTimezoneOffset() * 60_000).toISOString().slice(0, 19);
