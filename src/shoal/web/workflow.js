// The jobs of a workflow as a graph: each row of boxes waits for rows to its left.

import { get } from "./api.js";
import { css, h, s } from "./dom.js";
import { replace } from "./patch.js";

const BOX = { width: 150, height: 40, across: 60, down: 16 };
const WHEN = { ok: "", any: "any end", fail: "failed" };
const COLORS = {
  succeeded: "--ok",
  running: "--accent",
  starting: "--accent",
  failed: "--bad",
  "timed-out": "--bad",
  cancelled: "--ink-3",
  waiting: "--line-2",
  stopping: "--warn",
};

/**
 * Draws into the card, or hides it for a job without a workflow.
 * @param {HTMLElement} card
 * @param {Api.JobView} job
 */
export async function drawWorkflow(card, job) {
  const id = job.spec?.workflow;
  card.hidden = !id;
  if (!id) return;
  const flow = await get(`/v1/workflows/${encodeURIComponent(id)}`);
  replace(card, h("h2", {}, `Workflow ${flow.id}`), h("div", { class: "timeline flow" }, graph(flow, job.id)));
}

/**
 * How many jobs come before each one, along the longest way.
 * @param {Api.WorkflowView} flow
 */
function columns(flow) {
  const known = new Set(flow.nodes.map((node) => node.id));
  const depth = new Map();
  const before = (id) =>
    flow.edges.filter((edge) => edge.after === id && known.has(edge.before)).map((edge) => edge.before);
  let left = flow.nodes.map((node) => node.id);
  while (left.length) {
    const ready = left.filter((id) => before(id).every((one) => depth.has(one)));
    for (const id of ready.length ? ready : left)
      depth.set(id, Math.max(-1, ...before(id).map((one) => depth.get(one) ?? 0)) + 1);
    left = left.filter((id) => !depth.has(id));
  }
  return depth;
}

/**
 * @param {Api.WorkflowView} flow
 * @param {string} here
 */
function graph(flow, here) {
  const depth = columns(flow);
  const place = new Map();
  const filled = [];
  for (const node of flow.nodes) {
    const column = depth.get(node.id);
    const row = filled[column] ?? 0;
    filled[column] = row + 1;
    place.set(node.id, { x: column * (BOX.width + BOX.across) + 2, y: row * (BOX.height + BOX.down) + 2 });
  }
  const width = filled.length * (BOX.width + BOX.across);
  const height = Math.max(...filled.map((rows) => rows ?? 0)) * (BOX.height + BOX.down) + 4;
  const lines = flow.edges
    .filter((edge) => place.has(edge.before) && place.has(edge.after))
    .map((edge) => {
      const from = place.get(edge.before);
      const to = place.get(edge.after);
      const x1 = from.x + BOX.width;
      const y1 = from.y + BOX.height / 2;
      const x2 = to.x;
      const y2 = to.y + BOX.height / 2;
      const mid = (x1 + x2) / 2;
      return s(
        "g",
        { class: "edge" },
        s("path", {
          d: `M${x1} ${y1} C${mid} ${y1} ${mid} ${y2} ${x2} ${y2}`,
          fill: "none",
          stroke: css("--ink-3"),
          "stroke-dasharray": edge.when === "ok" ? null : "4 3",
        }),
        WHEN[edge.when]
          ? s("text", { class: "when", x: mid, y: (y1 + y2) / 2 + 4, "text-anchor": "middle" }, WHEN[edge.when])
          : null,
      );
    });
  const boxes = flow.nodes.map((node) => {
    const at = place.get(node.id);
    return s(
      "a",
      {
        href: `#/job/${node.id}`,
        "data-key": node.id,
        "data-state": node.state,
        "aria-label": `${node.name}, ${node.id}, ${node.state}`,
      },
      s("title", {}, `${node.id} ${node.state}: ${node.why}`),
      s("rect", {
        x: at.x,
        y: at.y,
        width: BOX.width,
        height: BOX.height,
        rx: 6,
        fill: css("--surface"),
        stroke: css(COLORS[node.state] ?? "--line-2"),
        "stroke-width": node.id === here ? 3 : 1.5,
      }),
      s("rect", {
        x: at.x,
        y: at.y,
        width: 6,
        height: BOX.height,
        rx: 3,
        fill: css(COLORS[node.state] ?? "--line-2"),
      }),
      s("text", { x: at.x + 14, y: at.y + 17 }, node.name.length > 20 ? `${node.name.slice(0, 19)}…` : node.name),
      s("text", { x: at.x + 14, y: at.y + 32, class: "dim" }, `${node.id} ${node.state}`),
    );
  });
  return s(
    "svg",
    { width, height, role: "group", "aria-label": `Workflow of ${flow.nodes.length} jobs, ${flow.state}` },
    lines,
    boxes,
  );
}
