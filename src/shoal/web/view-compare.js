// Several runs side by side: their curves laid over each other, and in what they differ.

import { choose, chosen } from "./address.js";
import { get, jobPath, maybe } from "./api.js";
import { chartGroup } from "./chart-group.js";
import { look } from "./charts.js";
import { offer } from "./commands.js";
import { chip, h, jobName, moment, plural, s, shape, short, span, whole } from "./dom.js";
import { Charts, linesOf, marksOf } from "./job-curves.js";
import { gpuTime } from "./job-parts.js";
import { now } from "./live.js";
import { replace } from "./patch.js";
import { JobCurve } from "./series.js";
import { table } from "./table.js";

const RUNS_MAX = 10;
const ASK_MS = 4000;
const ID = /^j\d+(\.\d+)*$/;
const PRIVATE = /token|secret|passw|credential|api_?key|private/i; // variables whose values are not shown
const HIDDEN = "(hidden)";

/** Why these runs cannot be compared; empty if they can. */
function refusal(ids) {
  const odd = ids.find((id) => !ID.test(id));
  if (odd !== undefined) return `"${odd.slice(0, 40)}" is not a job id. Example: #/compare/j3,j7`;
  return ids.length > RUNS_MAX ? `Up to ${RUNS_MAX} runs can be compared; this address has ${ids.length}.` : "";
}

export function mount(root, argument) {
  const ids = [
    ...new Set(
      argument
        .split(",")
        .map((one) => one.trim())
        .filter(Boolean),
    ),
  ];
  const ending = new AbortController();
  const { signal } = ending;
  const to = (all) => {
    const query = location.hash.split("?")[1];
    location.hash = `#/compare/${all.join(",")}${query ? `?${query}` : ""}`;
  };
  const box = h("input", {
    type: "search",
    name: "run",
    "aria-label": "Job id",
    placeholder: "j12",
    size: 8,
    maxlength: 32,
    required: true,
  });
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const tell = (text) => {
    problem.hidden = !text;
    problem.textContent = text;
  };
  const add = h(
    "form",
    {
      class: "row",
      onsubmit: (event) => {
        event.preventDefault();
        const all = [...ids, box.value.trim()];
        const wrong = refusal(all);
        if (wrong) tell(wrong);
        else to(all);
      },
    },
    box,
    h("button", {}, "Add"),
  );
  const title = h("div", { class: "row" }, h("h1", {}, "Compare runs"), h("span", { class: "push" }, add));
  const wrong = refusal(ids);
  root.append(h("div", { class: "stack" }, title, problem));
  tell(wrong);
  if (wrong) return () => {};

  const group = chartGroup({ axes: ["step", "time"] });
  const charts = new Charts(group, "since");
  const legend = h("ul", { class: "plain runs" });
  const hint = h("p", { class: "dim" });
  const similar = h("p", { class: "dim" });
  const curves = h(
    "section",
    { class: "card stack", "aria-label": "Curves", hidden: true },
    group.element,
    charts.element,
  );
  const differences = h("section", { class: "card stack", "aria-label": "Differences", hidden: true });
  root.lastChild.append(legend, hint, similar, curves, differences);
  const runs = ids.map((id, at) => ({
    id,
    at,
    curve: new JobCurve(id, false),
    job: null,
    lines: [],
    gone: false,
    over: false,
  }));
  const hidden = () => new Set(chosen("hide").split(",").filter(Boolean));

  async function ask(run) {
    if (run.over || run.gone) return;
    const path = jobPath(run.id);
    const job = await maybe(path, { signal });
    if (!job) {
      run.gone = true;
      return;
    }
    const [history, series, cost] = await Promise.all([
      get(`${path}/why`, { signal }),
      job.array ? null : run.curve.more({ signal }),
      job.gpus ? maybe(`${path}/cost`, { signal }) : null,
    ]);
    const began = history.attempts[0]?.running_ms ?? job.running_ms ?? job.submitted_ms;
    Object.assign(run, { job, history, cost, began, lines: linesOf(series), over: Boolean(job.finished_ms) });
  }

  let busy = false;
  async function all() {
    if (busy || signal.aborted || document.hidden) return;
    busy = true;
    try {
      await Promise.all(runs.map(ask));
      tell("");
    } catch (error) {
      if (!signal.aborted) tell(error.message);
    }
    busy = false;
    if (!signal.aborted) draw();
  }

  function draw() {
    const off = hidden();
    const known = runs.filter((run) => run.job);
    const shown = known.filter((run) => !off.has(run.id));
    replace(
      legend,
      runs.map((run) => entry(run, !off.has(run.id))),
    );
    const keys = new Map(known.flatMap((run) => run.lines.map((line) => [line.key, line])));
    charts.set(
      [...keys.values()].map((line) => ({
        ...line,
        points: undefined,
        lines: shown.map((run) => laid(run, line.key)).filter(Boolean),
      })),
    );
    curves.hidden = !keys.size;
    hint.textContent =
      ids.length < 2 ? "Add another run by its job id." : known.length && !keys.size ? "No steps reported yet." : "";
    if (ids.length === 1 && known.length) alike(known[0].job);
    differ(known);
  }

  /** One run's line of a chart, from its own start. */
  function laid(run, key) {
    const line = run.lines.find((one) => one.key === key);
    if (!line) return null;
    const marks = marksOf(run.history.attempts).map((mark) => ({
      ...mark,
      at: mark.at - run.began,
      text: `${run.id} ${mark.text}`,
    }));
    return {
      name: run.id,
      ...look(run.at),
      marks,
      points: line.points.map(([at, value, step]) => [at - run.began, value, step]),
    };
  }

  function entry(run, on) {
    const toggle = () => {
      const off = hidden();
      if (on) off.add(run.id);
      else off.delete(run.id);
      choose("hide", ids.filter((id) => off.has(id)).join(","));
      draw();
    };
    const sample = s(
      "svg",
      { width: 30, height: 10, "aria-hidden": "true" },
      s("line", {
        x1: 1,
        x2: 29,
        y1: 5,
        y2: 5,
        stroke: look(run.at).color,
        "stroke-width": 3,
        "stroke-dasharray": look(run.at).dash,
      }),
    );
    const words = run.gone
      ? h("span", { class: "dim" }, "Not found, or no access")
      : !run.job
        ? h("span", { class: "dim" }, "…")
        : [
            chip(run.job.state),
            run.lines.length
              ? null
              : h(
                  "span",
                  { class: "dim small" },
                  run.job.array
                    ? "Array: compare its trials instead"
                    : "No curves: no steps reported, or no longer kept",
                ),
          ];
    return h(
      "li",
      { class: "row", "data-key": run.id, "data-run": run.id },
      h(
        "button",
        {
          class: "filter",
          "aria-pressed": String(on),
          "aria-label": `Draw ${run.id}`,
          disabled: !run.job,
          onclick: toggle,
        },
        sample,
      ),
      run.job ? h("a", { href: `#/job/${run.id}` }, jobName(run.job)) : h("span", {}, run.id),
      words,
      h(
        "button",
        { class: "quiet", "aria-label": `Remove ${run.id}`, onclick: () => to(ids.filter((id) => id !== run.id)) },
        "✕",
      ),
    );
  }

  let asked = false;
  async function alike(job) {
    if (asked || !job.name) return;
    asked = true;
    try {
      const found = await get(`/v1/jobs?name=${encodeURIComponent(job.name)}&finished=true&limit=20`, { signal });
      const others = found.filter((one) => one.id !== job.id && !one.array);
      replace(
        similar,
        others.length
          ? [
              `Other runs named ${job.name}: `,
              others.map((one, at) => [
                at ? ", " : "",
                h("a", { href: `#/compare/${one.id},${job.id}` }, `${one.id} (${moment(one.submitted_ms, now())})`),
              ]),
            ]
          : "",
      );
    } catch {
      /* ids can still be typed */
    }
  }

  function differ(known) {
    differences.hidden = known.length < 2;
    if (known.length < 2) return;
    const every = chosen("rows") === "all";
    const rows = rowsOf(known);
    const mine = every ? rows : rows.filter((row) => new Set(row.values).size > 1);
    const line = (row) =>
      h(
        "tr",
        { "data-key": row.name, "data-row": row.name },
        h("th", { scope: "row" }, row.name),
        row.shown.map((value, at) => h("td", { class: row.mono ? "mono" : "", "data-name": known[at].id }, value)),
      );
    replace(
      differences,
      h(
        "div",
        { class: "row" },
        h("h2", {}, every ? "All fields" : "Differences"),
        h(
          "span",
          { class: "dim small" },
          every ? plural(rows.length, "row") : `${mine.length} of ${plural(rows.length, "row")} differ`,
        ),
        h(
          "label",
          { class: "log-follow push" },
          h("input", {
            type: "checkbox",
            checked: every,
            onchange: () => {
              choose("rows", every ? "" : "all");
              differ(known);
            },
          }),
          "Show identical rows",
        ),
      ),
      h(
        "div",
        { class: "scroll differences", tabindex: "0", role: "region", "aria-label": "Table of differences" },
        table(["", ...known.map((run) => run.id)], mine.map(line)),
      ),
    );
  }

  const timer = setInterval(() => {
    if (runs.some((run) => !run.over && !run.gone)) all();
  }, ASK_MS);
  const unoffer = offer(() =>
    runs
      .filter((run) => run.job)
      .map((run) => ({
        title: `${hidden().has(run.id) ? "Draw" : "Hide"} ${jobName(run.job)}`,
        hint: "curve",
        run: () => {
          const off = hidden();
          if (!off.delete(run.id)) off.add(run.id);
          choose("hide", [...off].join(","));
          draw();
        },
      })),
  );
  window.addEventListener("shoal-theme", draw, { signal });
  draw();
  all();
  return () => {
    ending.abort();
    clearInterval(timer);
    unoffer();
    charts.stop();
    group.stop();
  };
}

// -- the table of differences --------------------------------------------------------------------

const written = (value) =>
  value === null || value === undefined || value === ""
    ? "–"
    : Array.isArray(value)
      ? value.join(" ") || "–"
      : typeof value === "object"
        ? Object.entries(value)
            .map((pair) => pair.join("="))
            .join(" ") || "–"
        : String(value);
const LEFT_OUT = new Set([
  "command",
  "name",
  "env",
  "labels",
  "notify",
  "user",
  "tenant",
  "members",
  "gpus",
  "gpu_milli",
  "gpu_memory_mb",
  "package",
  "sweep",
  "array",
  "index",
  "workflow",
  "schedule",
  "scheduled_ms",
]);

/** `values` are compared, `shown` are read: of a secret nothing is shown. */
function rowsOf(runs) {
  const rows = [];
  const row = (name, of, mono = false) => {
    const values = runs.map((run) => written(of(run)));
    rows.push({ name, values, shown: values, mono });
  };
  row("name", (run) => run.job.name);
  row("result", (run) => `${run.job.state}${run.job.code ? `, code ${run.job.code}` : ""}`);
  row("reason", (run) => run.history.why || run.job.why);
  row(
    "command",
    (run) => run.job.spec.command.map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word}'`)).join(" "),
    true,
  );
  const union = (of) => [...new Set(runs.flatMap((run) => Object.keys(of(run) ?? {})))].sort();
  for (const name of union((run) => run.job.spec.env)) {
    row(`$${name}`, (run) => run.job.spec.env[name], true);
    if (PRIVATE.test(name)) rows.at(-1).shown = rows.at(-1).values.map((value) => (value === "–" ? value : HIDDEN));
  }
  row("size", (run) => shape({ ...run.job, size: 0 }));
  row("code package", (run) => run.job.spec.package, true);
  row("labels", (run) => run.job.labels);
  row("user", (run) => run.job.spec.user);
  row("tenant", (run) => run.job.tenant);
  for (const name of union((run) => run.job.spec))
    if (!LEFT_OUT.has(name))
      row(name.replaceAll("_", " "), (run) => run.job.spec[name], name === "workdir" || name === "image");
  row("nodes", (run) => run.job.nodes);
  row("submitted", (run) => moment(run.job.submitted_ms, now()));
  row("ran for", (run) => (run.job.running_ms ? span((run.job.finished_ms ?? now()) - run.began) : ""));
  row("attempts", (run) => run.job.attempt);
  row("slept", (run) => (run.job.slept_ms ? span(run.job.slept_ms) : ""));
  row("GPU time", (run) => (run.cost ? gpuTime(run.cost.gpu_ms) : ""));
  if (runs.some((run) => typeof run.cost?.cost === "number"))
    row("cost", (run) =>
      typeof run.cost?.cost === "number" ? `${run.cost.cost.toFixed(2)} ${run.cost.currency}` : "",
    );
  row("last step", (run) => {
    const steps = run.lines.find((line) => line.key === "pace" || line.key === "loss")?.points.at(-1)?.[2];
    return steps === undefined ? "" : whole(steps);
  });
  const lines = new Map(runs.flatMap((run) => run.lines.map((line) => [line.key, line])));
  for (const { key, title, unit } of lines.values()) {
    const of = (run) => run.lines.find((line) => line.key === key)?.points;
    row(`last ${title}`, (run) => {
      const found = of(run);
      return found ? `${short(found.at(-1)[1])}${unit ? ` ${unit}` : ""}` : "";
    });
    if (key === "loss")
      row("lowest loss", (run) => {
        const found = of(run);
        return found ? short(Math.min(...found.map((point) => point[1]))) : "";
      });
  }
  return rows;
}
