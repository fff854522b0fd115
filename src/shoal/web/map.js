// Draws a cluster, the live one or that of a moment, on one canvas as tall as the window: its GPUs, or from far away
// its racks. Only the visible part is drawn. Color is never the only sign: cells of one job are joined and labeled,
// states have a frame, a glyph and a word.

import { penFor } from "./canvas.js";
import { forget, giveOnNodes, heatColor, inkOn, isDark, jobColor, tenantColor } from "./colors.js";
import { css, glyphOf, h, percent } from "./dom.js";
import { blocks, layout, racks } from "./layout.js";

const FAR = 500; // nodes: from here on, racks are shown first
const HALVES = new Map([
  ["starting", true],
  ["waking", true],
  ["stopping", false],
  ["dozing", false],
]); // whether it begins
const BELOW = 24; // pixels that stay free below the map, where it fits
const ROOM_LEAST = 0.45; // of the window's height, however much stands above the map
const DIMMED = 0.16;
const LABEL_LEAST = 26; // pixels of width for a label
const ZOOM_AFTER = 1.4; // fingers that are so many times as far apart as before
const TONES = {
  lost: "--bad",
  quarantined: "--bad",
  silent: "--warn",
  suspect: "--warn",
  draining: "--warn",
  drained: "--warn",
  cordoned: "--warn",
  joining: "--ink-3",
};

const RANKS = Object.keys(TONES); // the worst first

const known = new WeakMap(); // a node that changes is another object
/**
 * What runs on each GPU of a node: a list of `{job, member, milli}`.
 * @param {Api.NodeLine} node
 */
export function cellsOf(node) {
  let cells = known.get(node);
  if (cells) return cells;
  cells = Array.from({ length: node.gpus ?? 0 }, () => []);
  for (const [job, member, gpus, milli] of node.held ?? [])
    for (const gpu of gpus) cells[gpu]?.push({ job, member, milli, node: node.id, gpu });
  known.set(node, cells);
  return cells;
}

/** A node that works and takes jobs. */
export const isWell = (node) => node.state === "ready" && !node.standing;
/** The most important word about a node. */
export const stateOf = (node) => (node.standing && node.state === "ready" ? node.standing : node.state);

export class ClusterMap {
  /** `cluster`: as in live.js. `tall`: how high it may be; without it, what the window leaves. `below`: how many pixels
   * stand below it. `onZoom`: a part of the cluster is shown, or all of it. */
  constructor({ cluster, tall = undefined, below = () => 0, onHover, onChoose, onSay, onZoom = (_) => {} }) {
    this.cluster = cluster;
    this.tall = tall;
    this.below = below;
    this.onZoom = onZoom;
    this.by = "job";
    this.layer = null; // of layers.js: what is shown in place of jobs
    this.zoom = ""; // the place that is shown; empty: all
    this.racks = null; // from far away, by id
    this.pointers = new Map();
    this.focus = null; // {node, gpu}
    this.hoverJob = "";
    this.chosen = "";
    this.lit = null; // {jobs, nodes}: the rest is dim
    this.onHover = onHover;
    this.onChoose = onChoose;
    this.onSay = onSay;
    this.canvas = h("canvas", {
      tabindex: "0",
      role: "application",
      "aria-label": "Map of the cluster's GPUs. Arrow keys move, Enter opens, plus and minus zoom.",
    });
    this.spacer = h("div", { class: "map" }, this.canvas);
    this.plan = null;
    this.width = 0;
    this.height = 0;
    this.queued = 0;
    this.drawn = 0;
    this.redraw = () => {
      if (!this.queued)
        this.queued = requestAnimationFrame(() => {
          this.queued = 0;
          this.draw();
        });
    };
    this.refit = () => {
      if (this.room() !== this.height || Math.floor(this.spacer.clientWidth) !== this.width) this.arrange();
    };
    this.watcher = new ResizeObserver(this.refit);
    this.watcher.observe(this.spacer);
    this.canvas.addEventListener("pointermove", (event) => this.pointed(event));
    this.canvas.addEventListener("pointerleave", () => {
      this.onHover(null);
      this.light("");
    });
    this.canvas.addEventListener("click", (event) => {
      const hit = this.hit(event);
      if (hit) {
        this.focus = hit;
        this.open(hit);
        this.redraw();
      }
    });
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    for (const name of ["pointerdown", "pointerup", "pointercancel"])
      this.canvas.addEventListener(name, (event) => this.finger(event));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => this.redraw());
    this.canvas.addEventListener("focus", () => {
      this.focus ??= this.first();
      this.redraw();
    });
    window.addEventListener("scroll", this.redraw, { passive: true });
    window.addEventListener("resize", this.refit);
    window.addEventListener("shoal-theme", this.redraw);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.scheme.addEventListener("change", this.redraw);
  }

  stop() {
    forget("moment");
    this.watcher.disconnect();
    cancelAnimationFrame(this.queued);
    window.removeEventListener("scroll", this.redraw);
    window.removeEventListener("resize", this.refit);
    window.removeEventListener("shoal-theme", this.redraw);
    this.scheme.removeEventListener("change", this.redraw);
  }

  /** Shows the cluster of a moment. */
  show(cluster) {
    this.cluster = cluster;
    giveOnNodes("moment", cluster.nodes);
    this.arrange();
  }

  jobOf(id) {
    return this.cluster.jobs.get(id) ?? this.cluster.ended.get(id);
  }
  tenantOf(id) {
    return this.jobOf(id)?.tenant ?? (id.startsWith("@") ? id.slice(1) : "others");
  }

  /** The height that the map may have: what the window leaves below its top. */
  room() {
    if (this.tall) return this.tall();
    const top = this.spacer.getBoundingClientRect().top + window.scrollY;
    const bar = window.innerWidth <= 760 ? 52 : 0;
    return Math.floor(Math.max(window.innerHeight - top - BELOW - bar - this.below(), window.innerHeight * ROOM_LEAST));
  }

  /** Computes the layout again after the nodes or the window have changed. */
  arrange() {
    const width = Math.floor(this.spacer.clientWidth);
    if (!width) return;
    this.width = width;
    this.height = this.room();
    const nodes = this.inside();
    this.racks = nodes.size >= FAR ? racks(nodes.values()) : null;
    this.plan = layout(this.racks ?? nodes, width, this.height);
    this.where = new Map(this.plan.tiles.map((tile, index) => [tile.id, index]));
    this.spacer.style.setProperty("height", `${this.plan.height}px`);
    this.redraw();
  }

  /** The nodes of the place that is shown. A place that is gone shows all. */
  inside() {
    const { nodes } = this.cluster;
    if (!this.zoom) return nodes;
    const ids = new Set(
      racks(nodes.values()).get(this.zoom)?.nodes ??
        [...nodes.values()]
          .filter(({ place = "" }) => place === this.zoom || place.startsWith(`${this.zoom}/`))
          .map((node) => node.id),
    );
    if (!ids.size) return nodes;
    return new Map([...nodes].filter(([id]) => ids.has(id)));
  }

  /** Whether there is anything to zoom into, or out of. */
  get zooms() {
    return Boolean(this.racks || this.zoom);
  }
  zoomTo(place) {
    if (place === this.zoom) return;
    this.zoom = place;
    this.onHover(null);
    this.arrange();
    this.focus = this.first();
    this.onZoom(place);
  }
  first() {
    const id = this.plan?.tiles[0]?.id;
    return id ? (this.racks ? { rack: id } : { node: id, gpu: 0 }) : null;
  }
  /** One step nearer to what is under the pointer or the cursor: first its block, then its rack. */
  zoomIn(hit) {
    if (!hit || !this.zooms) return;
    const rack =
      hit.rack ?? [...racks(this.cluster.nodes.values()).values()].find((one) => one.nodes.includes(hit.node))?.id;
    const block = rack?.includes("/") ? rack.slice(0, rack.indexOf("/")) : "";
    const blocked = block && !this.zoom && this.plan.labels.filter((label) => label.large).length > 1;
    if (rack) this.zoomTo(blocked ? block : rack);
  }
  zoomOut() {
    this.zoomTo(this.zoom.includes("/") ? this.zoom.slice(0, this.zoom.indexOf("/")) : "");
  }
  open(hit) {
    if (hit.rack) this.zoomTo(hit.rack);
    else this.onChoose(hit);
  }

  wheel(event) {
    if (!(event.ctrlKey || event.metaKey) || !this.zooms) return;
    event.preventDefault();
    if (performance.now() - (this.zoomed ?? 0) < 400) return; // a gesture is many events and one step
    this.zoomed = performance.now();
    if (event.deltaY < 0) this.zoomIn(this.hit(event));
    else this.zoomOut();
  }
  /** Two fingers zoom. */
  finger(event) {
    if (event.pointerType !== "touch" || !this.zooms) return;
    if (event.type === "pointerdown") this.pointers.set(event.pointerId, event);
    else this.pointers.delete(event.pointerId);
    if (this.pointers.size === 2) this.apart = distance(...this.pointers.values());
  }
  pinched(event) {
    if (this.pointers.size !== 2 || !this.pointers.has(event.pointerId)) return false;
    this.pointers.set(event.pointerId, event);
    const ratio = distance(...this.pointers.values()) / this.apart;
    if (ratio < ZOOM_AFTER && ratio > 1 / ZOOM_AFTER) return true;
    this.pointers.clear();
    if (ratio > 1) this.zoomIn(this.hit(event));
    else this.zoomOut();
    return true;
  }

  light(job) {
    if (job !== this.hoverJob) {
      this.hoverJob = job;
      if (!this.lit) this.redraw();
    }
  }

  /** Whether something is highlighted and this is no part of it. A highlight that stays is stronger than the pointer.
   * */
  dim(node, job) {
    if (this.lit) return !this.lit.nodes.has(node) && !this.lit.jobs.has(job);
    return Boolean(this.hoverJob) && this.hoverJob !== job;
  }

  /** Empty if the GPU is held, but not measured. */
  colorOf(cell, dark) {
    if (this.by === "tenant") return tenantColor(this.tenantOf(cell.job), dark);
    if (this.by === "heat") {
      const share = this.heatOf(cell);
      return share < 0 ? "" : heatColor(share, dark);
    }
    return jobColor(cell.job, dark);
  }

  /** The node's measurement of the GPU, else the job's report on its member. */
  heatOf(cell) {
    const job = this.jobOf(cell.job);
    const { busy, services } = this.cluster;
    const measured = busy.get(cell.node)?.[cell.gpu] ?? -1;
    if (measured >= 0) return measured;
    if (job?.service) {
      const service = services.get(job.service);
      const replica = service?.replicas?.find((one) => one.job === cell.job);
      return replica ? Math.min(100, (100 * (replica.in_flight ?? 0)) / (service.target || 1)) : -1;
    }
    return job?.heat?.[cell.member] ?? -1;
  }

  // The part of the map behind the canvas, which sticks below the header.
  offset() {
    return Math.max(0, this.canvas.getBoundingClientRect().top - this.spacer.getBoundingClientRect().top);
  }

  draw() {
    if (!this.plan || !this.spacer.isConnected) return;
    const began = performance.now();
    const tall = Math.min(this.plan.height, window.innerHeight - 48);
    const pen = penFor(this.canvas, this.width, tall);
    const top = this.offset();
    const dark = isDark();
    const look = {
      dark,
      free: css("--cell-free"),
      ink: css("--ink"),
      ink2: css("--ink-2"),
      ink3: css("--ink-3"),
      accent: css("--accent"),
      surface: css("--surface"),
      sans: css("--sans"),
      tones: Object.fromEntries(Object.entries(TONES).map(([state, name]) => [state, css(name)])),
    };
    pen.translate(0, -top);
    for (const label of this.plan.labels) {
      if (label.y < top - 20 || label.y > top + tall + 20) continue;
      pen.font = label.large
        ? `600 ${this.plan.named ? 13 : 11}px ${look.sans}`
        : `${this.plan.named ? 11 : 10}px ${look.sans}`;
      pen.fillStyle = label.large ? look.ink : look.ink2;
      pen.fillText(label.text, label.x, label.y, label.width);
    }
    this.seen = this.plan.tiles.filter((tile) => tile.y + tile.height >= top && tile.y <= top + tall);
    if (this.inked !== look.ink3) {
      this.inked = look.ink3;
      this.hatch = hatched(pen, look.ink3);
    }
    for (const tile of this.seen)
      if (this.racks) this.rack(pen, tile, look);
      else this.tile(pen, tile, look);
    if (!this.racks && !this.layer) this.names(pen, look);
    this.drawn = performance.now() - began;
  }

  tile(pen, tile, look) {
    const node = this.cluster.nodes.get(tile.id);
    if (!node) return;
    const { named, wide, tall, gap, across } = this.plan;
    const well = isWell(node);
    const state = stateOf(node);
    const tone = look.tones[state] ?? look.ink2;
    const marked = this.chosen === node.id || this.lit?.nodes.has(node.id);
    const faint = this.lit && !marked && !(node.held ?? []).some(([job]) => this.lit.jobs.has(job));
    if (!well || marked) {
      pen.globalAlpha = faint ? 0.4 : 1;
      pen.strokeStyle = marked ? look.accent : tone;
      pen.lineWidth = marked ? 2 : named ? 1.5 : 1.2;
      pen.setLineDash(state === "lost" ? [3, 2] : state === "silent" || state === "suspect" ? [1, 2] : []);
      pen.strokeRect(tile.x + 0.5, tile.y + 0.5, tile.width - 1, tile.height - 1);
      pen.setLineDash([]);
    }
    if (named) {
      pen.globalAlpha = faint ? 0.4 : 1;
      pen.font = `${wide >= 16 ? 12 : 10}px ${look.sans}`;
      pen.fillStyle = well ? look.ink2 : tone;
      pen.fillText(
        well ? node.id : `${glyphOf(state)} ${node.id} ${tile.width > 110 ? state : ""}`,
        tile.x + 4,
        tile.y + 13,
        tile.width - 8,
      );
    }
    const cells = cellsOf(node);
    const dead = state === "lost";
    // Cells of one member are joined, so that its edges are seen whatever the colors are.
    const same = (gpu, other) => {
      const [one] = cells[gpu];
      const [two] = cells[other] ?? [];
      return (
        one &&
        two &&
        cells[gpu].length === 1 &&
        cells[other].length === 1 &&
        one.job === two.job &&
        one.member === two.member
      );
    };
    cells.forEach((inside, gpu) => {
      const { x, y } = this.cellAt(tile, gpu);
      this.cell(
        pen,
        x,
        y,
        (gpu + 1) % across && same(gpu, gpu + 1) ? gap : 0,
        same(gpu, gpu + across) ? gap : 0,
        inside,
        look,
        dead,
        node,
        gpu,
      );
      if (this.focus?.node === node.id && this.focus.gpu === gpu && document.activeElement === this.canvas) {
        pen.globalAlpha = 1;
        pen.strokeStyle = look.ink;
        pen.lineWidth = 2;
        pen.strokeRect(x - 1, y - 1, wide + 2, tall + 2);
      }
    });
    pen.globalAlpha = faint ? 0.4 : 1;
    if (!named && !well) this.sign(pen, tile, glyphOf(state), tone, look);
    if (!node.gpus && named) {
      pen.font = `11px ${look.sans}`;
      pen.fillStyle = look.ink2;
      pen.fillText("no GPU", tile.x + 4, tile.y + tile.top + 11);
    }
    pen.globalAlpha = 1;
  }

  /** Where a map has no room for names, a state's glyph stands on the node itself. */
  sign(pen, tile, glyph, tone, look) {
    const size = Math.max(8, Math.min(12, tile.height));
    const x = tile.x + tile.width / 2;
    const y = tile.y + tile.height / 2;
    pen.fillStyle = look.surface;
    pen.fillRect(x - size / 2, y - size / 2, size, size);
    pen.font = `bold ${size - 1}px ${look.sans}`;
    pen.fillStyle = tone;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillText(glyph, x, y + 0.5, size);
    pen.textAlign = "start";
    pen.textBaseline = "alphabetic";
  }

  cell(pen, x, y, right, down, inside, look, dead, { id: node, ...line }, gpu) {
    const { wide, tall } = this.plan;
    const [first] = inside;
    if (this.layer) {
      pen.globalAlpha = this.lit && this.dim(node, "") ? DIMMED : 1;
      pen.fillStyle = this.layer.color({ id: node, ...line }, gpu, look.dark);
      pen.fillRect(x, y, wide, tall);
      pen.globalAlpha = 1;
      return;
    }
    const covered =
      inside.length === 1 &&
      (first.milli || 1000) >= 1000 &&
      !HALVES.has(this.jobOf(first.job)?.state) &&
      !this.dim(node, first.job);
    if (!covered || dead) {
      pen.globalAlpha = this.lit && !first && this.dim(node, "") ? 0.5 : 1;
      pen.fillStyle = look.free;
      pen.fillRect(x, y, wide, tall);
      if (!first && !dead && line.state !== "ready") {
        pen.fillStyle = this.hatch; // nothing can start there
        pen.fillRect(x, y, wide, tall);
      }
    }
    if (dead) {
      pen.strokeStyle = look.tones.lost;
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(x + 1, y + 1);
      pen.lineTo(x + wide - 1, y + tall - 1);
      pen.moveTo(x + wide - 1, y + 1);
      pen.lineTo(x + 1, y + tall - 1);
      pen.stroke();
      return;
    }
    let left = x;
    for (const one of inside) {
      const part = Math.max(1, (wide * Math.min(1000, one.milli || 1000)) / 1000);
      const job = this.jobOf(one.job);
      const color = this.colorOf(one, look.dark);
      pen.globalAlpha = this.dim(node, one.job) ? DIMMED : 1;
      pen.fillStyle = color || look.free;
      // Starting or stopping, waking or falling asleep: half a cell.
      if (HALVES.has(job?.state)) {
        pen.beginPath();
        pen.moveTo(left, y + tall);
        pen.lineTo(left + part, y + tall);
        pen.lineTo(HALVES.get(job.state) ? left : left + part, y);
        pen.fill();
      } else pen.fillRect(left, y, part + (color ? right : 0), tall + (color ? down : 0));
      if (!color) {
        pen.strokeStyle = look.ink2;
        pen.lineWidth = 1;
        pen.strokeRect(left + 0.5, y + 0.5, part - 1, tall - 1);
      } // held, but not measured
      if (job?.slow?.includes(one.member)) this.slow(pen, left + part, y, Math.min(part, tall), look);
      left += part;
    }
    pen.globalAlpha = 1;
  }

  slow(pen, right, y, size, look) {
    const edge = Math.max(2, size / 6);
    const radius = Math.max(1.2, Math.min(4, size / 9));
    pen.beginPath();
    pen.arc(right - edge, y + edge, radius, 0, 7);
    pen.fillStyle = look.ink;
    pen.fill();
    if (size >= 12) {
      pen.strokeStyle = look.surface;
      pen.lineWidth = 1;
      pen.stroke();
    }
  }

  /** One label for each joined block of a job: its name, then its id and how busy its GPUs are, as far as they fit. */
  names(pen, look) {
    if (this.plan.tall < 13) return;
    const sole = (tile, gpu) => {
      const inside = cellsOf(this.cluster.nodes.get(tile.id))[gpu];
      return inside?.length === 1 && this.cluster.nodes.get(tile.id).state !== "lost" ? inside[0] : null;
    };
    for (const block of blocks(this.plan, this.seen, (tile, gpu) => sole(tile, gpu)?.job ?? "")) {
      const cell = sole(block.tile, block.gpu);
      const part = Math.min(1000, cell.milli || 1000) / 1000;
      const width = part < 1 ? this.plan.wide * part : block.width;
      const job = this.jobOf(block.key);
      const room = width - 10;
      if (room + 10 < LABEL_LEAST || this.dim(block.tile.id, block.key)) continue;
      pen.font = `600 12px ${look.sans}`;
      const name = job?.name || block.key.replace("@", "");
      const fits = pen.measureText(name).width <= room || room >= 48;
      const busy = this.heatOf(cell);
      const more = [job?.name && fits ? block.key : "", busy >= 0 ? percent(busy / 100) : ""]
        .filter(Boolean)
        .join(" · ");
      const half = HALVES.has(job?.state); // words on two grounds get an edge
      const color = this.colorOf(cell, look.dark);
      pen.fillStyle = half || !color ? look.ink : inkOn(color);
      const middle = block.height < 34;
      const put = (text, y) => {
        if (half) {
          pen.strokeStyle = look.free;
          pen.lineWidth = 4;
          pen.lineJoin = "round";
          pen.strokeText(text, block.x + 6, y);
        }
        pen.fillText(text, block.x + 6, y);
      };
      const text = fits ? cut(pen, name, room) : block.key;
      if (pen.measureText(text).width > room) continue;
      put(text, middle ? block.y + block.height / 2 + 4 : block.y + 17);
      pen.font = `11px ${look.sans}`;
      if (!middle && more && pen.measureText(more).width <= room) put(more, block.y + 32);
    }
  }

  /** From far away: the share of each job among the GPUs of a rack, and a mark if some of its nodes are in trouble. */
  rack(pen, tile, look) {
    const { named, wide, tall } = this.plan;
    const rack = this.racks.get(tile.id);
    const sum = this.sumOf(rack, look);
    const { x, y } = this.cellAt(tile, 0);
    const lit = !this.lit || rack.nodes.some((id) => this.lit.nodes.has(id));
    const share = sum.gpus ? sum.held / sum.gpus : 0;
    pen.fillStyle = look.free;
    pen.fillRect(x, y, wide, tall);
    let left = x;
    for (const [color, { count, dim }] of sum.parts) {
      const part = (wide * count) / Math.max(1, sum.gpus);
      pen.globalAlpha = dim && !(this.lit && lit) ? DIMMED : 1;
      pen.fillStyle = color || look.ink3;
      pen.fillRect(left, y, part, tall);
      left += part;
    }
    pen.globalAlpha = lit ? 1 : 0.4;
    if (sum.closed && !this.layer) {
      const part = (wide * sum.closed) / sum.gpus;
      pen.fillStyle = this.hatch;
      pen.fillRect(x + wide - part, y, part, tall);
    }
    const tone = sum.worst && (look.tones[sum.worst] ?? look.ink2);
    if (named) {
      pen.font = `11px ${look.sans}`;
      pen.fillStyle = look.ink2;
      const words = this.layer ? "" : percent(share);
      const room = pen.measureText(words).width;
      if (tile.width - room - 14 > 20) {
        pen.fillText(words, tile.x + tile.width - room - 4, tile.y + 13);
        pen.fillText(cut(pen, rack.name, tile.width - room - 14), tile.x + 4, tile.y + 13);
      } else pen.fillText(cut(pen, rack.name, tile.width - 6), tile.x + 4, tile.y + 13);
    }
    if (tone) {
      pen.strokeStyle = tone;
      pen.lineWidth = 1.5;
      pen.strokeRect(x + 0.75, y + 0.75, wide - 1.5, tall - 1.5);
      const text = `${glyphOf(sum.worst)} ${sum.trouble}`;
      pen.font = `600 11px ${look.sans}`;
      const room = pen.measureText(text).width + 8;
      if (room <= wide && tall >= 14) {
        pen.fillStyle = look.surface;
        pen.fillRect(x + wide - room - 1, y + tall - 16, room, 15);
        pen.fillStyle = tone;
        pen.fillText(text, x + wide - room + 3, y + tall - 4);
      } else this.sign(pen, { x, y, width: wide, height: tall }, glyphOf(sum.worst), tone, look);
    }
    pen.globalAlpha = 1;
    if (this.focus?.rack === tile.id && document.activeElement === this.canvas) {
      pen.strokeStyle = look.ink;
      pen.lineWidth = 2;
      pen.strokeRect(x - 1, y - 1, wide + 2, tall + 2);
    }
  }

  /** A rack in figures: GPUs, those held and those that are free but closed, nodes in trouble, and GPUs by color. */
  sumOf(rack, look) {
    // A node that changes is another object; loads and highlights change without that.
    const key = this.layer || this.lit || this.by === "heat" ? "" : `${this.by} ${look.dark} ${this.hoverJob}`;
    const lines = rack.nodes.map((id) => this.cluster.nodes.get(id));
    if (key && rack.sum?.key === key && lines.every((node, at) => node === rack.sum.lines[at])) return rack.sum;
    const sum = { key, lines, gpus: 0, held: 0, closed: 0, trouble: 0, worst: "", parts: new Map() };
    const jobs = new Map();
    const dark = look.dark;
    const add = (color, count, dim) => {
      const part = sum.parts.get(color) ?? sum.parts.set(color, { count: 0, dim: true }).get(color);
      part.count += count;
      part.dim &&= dim;
    };
    for (const node of lines) {
      if (!node) continue;
      const { id } = node;
      const gpus = node.gpus ?? 0;
      const state = stateOf(node);
      let held = 0;
      sum.gpus += gpus;
      if (!isWell(node)) {
        sum.trouble += 1;
        if (!sum.worst || RANKS.indexOf(state) < RANKS.indexOf(sum.worst)) sum.worst = state;
      }
      for (const [job, member, on, milli] of node.held ?? []) {
        const count = (on.length * Math.min(1000, milli || 1000)) / 1000;
        held += count;
        if (this.by === "heat" && !this.layer)
          for (const gpu of on)
            add(this.colorOf({ job, member, node: id, gpu }, dark), count / on.length, this.dim(id, job));
        else jobs.set(job, (jobs.get(job) ?? 0) + count);
      }
      if (this.layer)
        for (let gpu = 0; gpu < gpus; gpu += 1) add(this.layer.color(node, gpu, dark), 1, this.dim(id, ""));
      sum.held += held;
      if (node.state !== "ready") sum.closed += gpus - held;
    }
    if (!this.layer && this.by !== "heat")
      for (const [job, count] of [...jobs].sort((a, b) => b[1] - a[1]))
        add(this.colorOf({ job }, dark), count, this.dim("", job));
    rack.sum = sum;
    return sum;
  }

  cellAt(tile, gpu) {
    const { across, wide, tall, gap, pad } = this.plan;
    return {
      x: tile.x + pad + (gpu % across) * (wide + gap),
      y: tile.y + tile.top + Math.floor(gpu / across) * (tall + gap),
    };
  }

  hit(event) {
    if (!this.plan) return null;
    const area = this.canvas.getBoundingClientRect();
    const { across, wide, tall, gap, pad } = this.plan;
    const x = event.clientX - area.left;
    const y = event.clientY - area.top + this.offset();
    const tile = (this.seen ?? []).find(
      (one) => x >= one.x && x <= one.x + one.width && y >= one.y && y <= one.y + one.height,
    );
    if (!tile) return null;
    if (this.racks) return { rack: tile.id };
    const column = Math.floor((x - tile.x - pad) / (wide + gap));
    const row = Math.floor((y - tile.y - tile.top) / (tall + gap));
    const gpu = row >= 0 && column >= 0 && column < across ? row * across + column : -1;
    const count = this.cluster.nodes.get(tile.id)?.gpus ?? 0;
    return { node: tile.id, gpu: gpu < count ? gpu : -1 };
  }

  pointed(event) {
    if (this.pinched(event)) return;
    const hit = this.hit(event);
    this.canvas.classList.toggle("over", Boolean(hit));
    const job = hit && hit.gpu >= 0 ? (cellsOf(this.cluster.nodes.get(hit.node))[hit.gpu]?.[0]?.job ?? "") : "";
    this.light(job);
    this.onHover(hit ? { ...hit, x: event.clientX, y: event.clientY } : null);
  }

  /** The position of a node's tile on the page, for tests and the keyboard. */
  placeOf(id) {
    return this.plan?.tiles[this.where.get(id)];
  }

  /** Scrolls to a node, or shows all again if it is outside of what is shown. */
  reveal(id) {
    if (this.zoom && !this.where.has(id) && this.cluster.nodes.has(id)) this.zoomTo("");
    const tile = this.placeOf(id);
    if (!tile) return;
    const y = this.spacer.getBoundingClientRect().top + window.scrollY + tile.y;
    if (y < window.scrollY + 60 || y + tile.height > window.scrollY + window.innerHeight - 60)
      window.scrollTo({ top: y - window.innerHeight / 3 });
  }

  key(event) {
    const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
    const acts = {
      Enter: () => this.focus && this.open(this.focus),
      "+": () => this.zoomIn(this.focus),
      "-": () => this.zoomOut(),
    };
    acts[" "] = acts.Enter;
    acts["="] = acts["+"];
    if (acts[event.key]) {
      event.preventDefault();
      acts[event.key]();
      return;
    }
    if (!moves[event.key] || !this.plan) return;
    event.preventDefault();
    const [down, right] = moves[event.key];
    let gpu = this.focus?.gpu ?? 0;
    let index = this.where.get(this.focus?.rack ?? this.focus?.node) ?? 0;
    const count = () => Math.max(1, this.plan.tiles[index].cells);
    const { across } = this.plan;
    if (down && gpu + down * across >= 0 && gpu + down * across < count()) gpu += down * across;
    else if (down) {
      const before = index;
      const column = gpu % across;
      index = this.beside(index, down);
      if (index !== before) gpu = down > 0 ? column : Math.floor((count() - 1 - column) / across) * across + column;
    } else {
      gpu += right;
      if (gpu < 0) {
        index = Math.max(0, index - 1);
        gpu = count() - 1;
      } else if (gpu >= count()) {
        index = Math.min(this.plan.tiles.length - 1, index + 1);
        gpu = 0;
      }
    }
    const { id } = this.plan.tiles[index];
    this.focus = this.racks ? { rack: id } : { node: id, gpu: Math.max(0, Math.min(gpu, count() - 1)) };
    this.reveal(id);
    this.onSay(this.focus);
    this.redraw();
  }

  /** The nearest tile above or below. */
  beside(index, down) {
    const from = this.plan.tiles[index];
    let best = index;
    let least = Infinity;
    this.plan.tiles.forEach((tile, at) => {
      const away = (tile.y - from.y) * down;
      const far = away + Math.abs(tile.x - from.x) * 2;
      if (away > 0 && far < least) {
        least = far;
        best = at;
      }
    });
    return best;
  }
}

/** Text that is too long ends with an ellipsis instead of being squeezed. */
export function cut(pen, text, wide) {
  if (pen.measureText(text).width <= wide) return text;
  let length = text.length - 1;
  while (length > 1 && pen.measureText(`${text.slice(0, length)}…`).width > wide) length -= 1;
  return `${text.slice(0, length)}…`;
}

const distance = (one, other) => Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY);

/** A pattern of thin diagonal lines. */
function hatched(pen, tone) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const brush = tile.getContext("2d");
  brush.strokeStyle = tone;
  brush.globalAlpha = 0.45;
  brush.beginPath();
  for (const at of [-8, 0, 8]) {
    brush.moveTo(at, 8);
    brush.lineTo(at + 8, 0);
  }
  brush.stroke();
  return pen.createPattern(tile, "repeat");
}
