// Draws the cluster on one canvas as tall as the window. Only the visible part is drawn, so 16,000
// GPUs cost no more than a screenful.

import { css, glyphOf, h } from "./dom.js";
import { heatColour, hue, isDark, jobColour } from "./colours.js";
import { layout } from "./layout.js";
import { cluster, jobOf } from "./live.js";

const WELL = new Set(["ready"]);
const HALVES = new Map([["starting", true], ["waking", true], ["stopping", false], ["dozing", false]]); // whether it begins
const TONES = { lost: "--bad", quarantined: "--bad", silent: "--warn", suspect: "--warn", draining: "--warn", drained: "--warn", cordoned: "--warn", joining: "--ink-3" };

/** What runs on each GPU of a node: a list of `{job, member, milli}`. */
export function cellsOf(node) {
  const cells = Array.from({ length: node.gpus ?? 0 }, () => []);
  for (const [job, member, gpus, milli] of node.held ?? []) for (const gpu of gpus) cells[gpu]?.push({ job, member, milli, node: node.id, gpu });
  return cells;
}

export const tenantOf = (id) => jobOf(id)?.tenant ?? (id.startsWith("@") ? id.slice(1) : "others");

export class ClusterMap {
  constructor({ onHover, onChoose, onSay }) {
    this.by = "job";
    this.focus = null; // {node, gpu}
    this.hoverJob = "";
    this.chosen = "";
    this.found = "";
    this.onHover = onHover; this.onChoose = onChoose; this.onSay = onSay;
    this.canvas = h("canvas", { tabindex: "0", role: "application", "aria-label": "Map of the cluster's GPUs. Arrow keys move, Enter opens." });
    this.spacer = h("div", { class: "map" }, this.canvas);
    this.plan = null; this.width = 0; this.queued = 0; this.tenants = new Map(); this.drawn = 0;
    this.redraw = () => { if (!this.queued) this.queued = requestAnimationFrame(() => { this.queued = 0; this.draw(); }); };
    this.watcher = new ResizeObserver(() => this.arrange());
    this.watcher.observe(this.spacer);
    this.canvas.addEventListener("pointermove", (event) => this.pointed(event));
    this.canvas.addEventListener("pointerleave", () => { this.onHover(null); this.light(""); });
    this.canvas.addEventListener("click", (event) => { const hit = this.hit(event); if (hit) { this.focus = hit; this.onChoose(hit); this.redraw(); } });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => this.redraw());
    this.canvas.addEventListener("focus", () => { if (!this.focus && this.plan?.tiles[0]) this.focus = { node: this.plan.tiles[0].id, gpu: 0 }; this.redraw(); });
    window.addEventListener("scroll", this.redraw, { passive: true });
    window.addEventListener("resize", this.redraw);
    window.addEventListener("shoal-theme", this.redraw);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.scheme.addEventListener("change", this.redraw);
  }

  stop() {
    this.watcher.disconnect();
    cancelAnimationFrame(this.queued);
    window.removeEventListener("scroll", this.redraw); window.removeEventListener("resize", this.redraw); window.removeEventListener("shoal-theme", this.redraw);
    this.scheme.removeEventListener("change", this.redraw);
  }

  /** Computes the layout again after the nodes or the window have changed. */
  arrange() {
    const width = Math.floor(this.spacer.clientWidth);
    if (!width) return;
    this.width = width;
    this.plan = layout(cluster.nodes, width);
    this.where = new Map(this.plan.tiles.map((tile, index) => [tile.id, index]));
    this.spacer.style.setProperty("height", `${this.plan.height}px`);
    this.redraw();
  }

  light(job) { if (job !== this.hoverJob) { this.hoverJob = job; this.redraw(); } }

  tenantColour(name, dark) {
    if (!this.tenants.has(name)) this.tenants.set(name, this.tenants.size);
    return hue(this.tenants.get(name) * 3, dark);
  }

  colourOf(cell, dark) {
    const job = jobOf(cell.job);
    if (this.by === "tenant") return this.tenantColour(tenantOf(cell.job), dark);
    if (this.by === "heat") { const share = this.heatOf(cell, job); return share < 0 ? "" : heatColour(share, dark); }
    return jobColour(cell.job, dark);
  }

  heatInk(cell, job, look) {
    if (this.heatOf(cell, job) <= 55) return look.ink;
    return look.dark ? "#0b1116" : "#ffffff";
  }

  /** The node's measurement of the GPU, else the job's report on its member. */
  heatOf(cell, job) {
    const measured = cluster.busy.get(cell.node)?.[cell.gpu] ?? -1;
    if (measured >= 0) return measured;
    if (job?.service) {
      const service = cluster.services.get(job.service);
      const replica = service?.replicas?.find((one) => one.job === cell.job);
      return replica ? Math.min(100, (100 * (replica.in_flight ?? 0)) / (service.target || 1)) : -1;
    }
    return job?.heat?.[cell.member] ?? -1;
  }

  // The part of the map behind the canvas, which sticks below the header.
  offset() { return Math.max(0, this.canvas.getBoundingClientRect().top - this.spacer.getBoundingClientRect().top); }

  draw() {
    if (!this.plan || !this.spacer.isConnected) return;
    const began = performance.now();
    const ratio = devicePixelRatio || 1, tall = Math.min(this.plan.height, window.innerHeight - 48);
    if (this.canvas.width !== Math.round(this.width * ratio) || this.canvas.height !== Math.round(tall * ratio)) {
      this.canvas.width = Math.round(this.width * ratio); this.canvas.height = Math.round(tall * ratio);
      this.canvas.style.setProperty("width", `${this.width}px`); this.canvas.style.setProperty("height", `${tall}px`);
    }
    const pen = this.canvas.getContext("2d"), top = this.offset(), dark = isDark();
    const look = { dark, free: css("--cell-free"), ink: css("--ink"), ink2: css("--ink-2"), accent: css("--accent"), surface: css("--surface"), sans: css("--sans"), tones: Object.fromEntries(Object.entries(TONES).map(([state, name]) => [state, css(name)])) };
    pen.setTransform(ratio, 0, 0, ratio, 0, -top * ratio);
    pen.clearRect(0, top, this.width, tall);
    for (const label of this.plan.labels) {
      if (label.y < top - 20 || label.y > top + tall + 20) continue;
      pen.font = label.large ? `600 13px ${look.sans}` : `11px ${look.sans}`;
      pen.fillStyle = label.large ? look.ink : look.ink2;
      pen.fillText(label.text, label.x, label.y);
    }
    this.seen = this.plan.tiles.filter((tile) => tile.y + tile.height >= top && tile.y <= top + tall);
    for (const tile of this.seen) this.tile(pen, tile, look);
    this.drawn = performance.now() - began;
  }

  tile(pen, tile, look) {
    const node = cluster.nodes.get(tile.id);
    if (!node) return;
    const { cell, gap, named } = this.plan, well = WELL.has(node.state) && !node.standing;
    const tone = look.tones[node.standing && node.state === "ready" ? "suspect" : node.state] ?? look.ink2;
    const state = node.standing && node.state === "ready" ? node.standing : node.state;
    if (!well || this.chosen === node.id || this.found === node.id) {
      pen.strokeStyle = this.chosen === node.id || this.found === node.id ? look.accent : tone;
      pen.lineWidth = named ? 1.5 : 1.2;
      pen.setLineDash(state === "lost" ? [3, 2] : state === "silent" || state === "suspect" ? [1, 2] : []);
      pen.strokeRect(tile.x + 0.5, tile.y + 0.5, tile.width - 1, tile.height - 1);
      pen.setLineDash([]);
    }
    if (named) {
      pen.font = `${cell >= 13 ? 12 : 10}px ${look.sans}`;
      pen.fillStyle = well ? look.ink2 : tone;
      const words = well ? node.id : `${glyphOf(state)} ${node.id} ${tile.width > 110 ? state : ""}`;
      pen.fillText(words, tile.x + 4, tile.y + 13, tile.width - 8);
    } else if (!well) {
      pen.font = `bold 9px ${look.sans}`;
      pen.fillStyle = tone;
      pen.fillText(glyphOf(state), tile.x + tile.width - 8, tile.y + tile.height - 4);
    }
    const dead = state === "lost";
    cellsOf(node).forEach((inside, gpu) => {
      const x = tile.x + 4 + (gpu % 8) * (cell + gap), y = tile.y + tile.top + Math.floor(gpu / 8) * (cell + gap);
      this.cell(pen, x, y, cell, inside, look, dead);
      if (this.focus?.node === node.id && this.focus.gpu === gpu && document.activeElement === this.canvas) {
        pen.strokeStyle = look.ink; pen.lineWidth = 2;
        pen.strokeRect(x - 1, y - 1, cell + 2, cell + 2);
      }
    });
    if (!node.gpus && named) { pen.font = `11px ${look.sans}`; pen.fillStyle = look.ink2; pen.fillText("no GPU", tile.x + 4, tile.y + tile.top + 12); }
  }

  cell(pen, x, y, size, inside, look, dead) {
    pen.fillStyle = look.free;
    pen.fillRect(x, y, size, size);
    if (dead) {
      pen.strokeStyle = look.tones.lost; pen.lineWidth = 1;
      pen.beginPath(); pen.moveTo(x + 1, y + 1); pen.lineTo(x + size - 1, y + size - 1); pen.moveTo(x + size - 1, y + 1); pen.lineTo(x + 1, y + size - 1); pen.stroke();
      return;
    }
    let left = x;
    for (const one of inside) {
      const wide = Math.max(1, (size * Math.min(1000, one.milli || 1000)) / 1000), job = cluster.jobs.get(one.job);
      pen.globalAlpha = this.hoverJob && this.hoverJob !== one.job ? 0.25 : 1;
      const colour = this.colourOf(one, look.dark);
      pen.fillStyle = colour || look.free;
      // Starting or stopping, waking or falling asleep: half a cell.
      if (HALVES.has(job?.state)) { pen.beginPath(); pen.moveTo(left, y + size); pen.lineTo(left + wide, y + size); pen.lineTo(HALVES.get(job.state) ? left : left + wide, y); pen.fill(); }
      else pen.fillRect(left, y, wide, size);
      if (!colour) { pen.strokeStyle = look.ink2; pen.lineWidth = 1; pen.strokeRect(left + 0.5, y + 0.5, wide - 1, size - 1); } // held, but not measured
      if (job?.slow?.includes(one.member)) { pen.fillStyle = look.ink; pen.beginPath(); pen.arc(left + wide - Math.max(2, size / 6), y + Math.max(2, size / 6), Math.max(1.2, Math.min(3, size / 9)), 0, 7); pen.fill(); }
      if (size >= 22 && inside.length === 1) {
        pen.font = `600 10px ${look.sans}`; pen.fillStyle = this.by === "heat" ? this.heatInk(one, job, look) : "#0b1116"; pen.textAlign = "center";
        pen.fillText(one.job.replace(/^j/, ""), left + wide / 2, y + size / 2 + 4, size - 2);
        pen.textAlign = "start";
      }
      left += wide;
    }
    pen.globalAlpha = 1;
  }

  hit(event) {
    if (!this.plan) return null;
    const area = this.canvas.getBoundingClientRect();
    const x = event.clientX - area.left, y = event.clientY - area.top + this.offset();
    const tile = (this.seen ?? []).find((one) => x >= one.x && x <= one.x + one.width && y >= one.y && y <= one.y + one.height);
    if (!tile) return null;
    const step = this.plan.cell + this.plan.gap;
    const column = Math.floor((x - tile.x - 4) / step), row = Math.floor((y - tile.y - tile.top) / step);
    const gpu = row >= 0 && column >= 0 && column < 8 ? row * 8 + column : -1;
    const count = cluster.nodes.get(tile.id)?.gpus ?? 0;
    return { node: tile.id, gpu: gpu < count ? gpu : -1 };
  }

  pointed(event) {
    const hit = this.hit(event);
    this.canvas.classList.toggle("over", Boolean(hit));
    const job = hit && hit.gpu >= 0 ? cellsOf(cluster.nodes.get(hit.node))[hit.gpu]?.[0]?.job ?? "" : "";
    this.light(job);
    this.onHover(hit ? { ...hit, x: event.clientX, y: event.clientY } : null);
  }

  /** The position of a node's tile on the page, for tests and the keyboard. */
  placeOf(id) { return this.plan?.tiles[this.where.get(id)]; }

  reveal(id) {
    const tile = this.placeOf(id);
    if (!tile) return;
    const y = this.spacer.getBoundingClientRect().top + window.scrollY + tile.y;
    if (y < window.scrollY + 60 || y + tile.height > window.scrollY + window.innerHeight - 60) window.scrollTo({ top: y - window.innerHeight / 3 });
  }

  key(event) {
    const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
    if ((event.key === "Enter" || event.key === " ") && this.focus) { event.preventDefault(); this.onChoose(this.focus); return; }
    if (!moves[event.key] || !this.plan) return;
    event.preventDefault();
    const [down, right] = moves[event.key];
    let { node, gpu } = this.focus ?? { node: this.plan.tiles[0]?.id, gpu: 0 };
    let index = this.where.get(node) ?? 0;
    const count = () => Math.max(1, cluster.nodes.get(this.plan.tiles[index].id)?.gpus ?? 1);
    if (down) index = this.beside(index, down);
    else {
      gpu += right;
      if (gpu < 0) { index = Math.max(0, index - 1); gpu = count() - 1; } else if (gpu >= count()) { index = Math.min(this.plan.tiles.length - 1, index + 1); gpu = 0; }
    }
    node = this.plan.tiles[index].id;
    this.focus = { node, gpu: Math.min(gpu, count() - 1) };
    this.reveal(node);
    this.onSay(this.focus);
    this.redraw();
  }

  /** The nearest tile above or below. */
  beside(index, down) {
    const from = this.plan.tiles[index];
    let best = index, least = Infinity;
    this.plan.tiles.forEach((tile, at) => {
      const away = (tile.y - from.y) * down;
      const far = away + Math.abs(tile.x - from.x) * 2;
      if (away > 0 && far < least) { least = far; best = at; }
    });
    return best;
  }
}
