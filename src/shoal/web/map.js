// Draws a cluster, the live one or that of a moment, on one canvas as tall as the window. Only the visible part is
// drawn. Colour is never the only sign: cells of one job are joined, states have a frame, a glyph and a word.

import { penFor } from "./canvas.js";
import { heatColour, hue, inkOn, isDark, jobColour, numberOf } from "./colours.js";
import { css, glyphOf, h } from "./dom.js";
import { layout } from "./layout.js";

const WELL = new Set(["ready"]);
const HALVES = new Map([
  ["starting", true],
  ["waking", true],
  ["stopping", false],
  ["dozing", false],
]); // whether it begins
const BELOW = 24; // pixels that stay free below the map, where it fits
const ROOM_LEAST = 0.45; // of the window's height, however much stands above the map
const DIMMED = 0.16;
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

export class ClusterMap {
  /** `cluster`: as in live.js. `tall`: how high it may be; without it, what the window leaves. */
  constructor({ cluster, tall = undefined, onHover, onChoose, onSay }) {
    this.cluster = cluster;
    this.tall = tall;
    this.by = "job";
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
      "aria-label": "Map of the cluster's GPUs. Arrow keys move, Enter opens.",
    });
    this.spacer = h("div", { class: "map" }, this.canvas);
    this.plan = null;
    this.width = 0;
    this.height = 0;
    this.queued = 0;
    this.tenants = new Map();
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
        this.onChoose(hit);
        this.redraw();
      }
    });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => this.redraw());
    this.canvas.addEventListener("focus", () => {
      if (!this.focus && this.plan?.tiles[0]) this.focus = { node: this.plan.tiles[0].id, gpu: 0 };
      this.redraw();
    });
    window.addEventListener("scroll", this.redraw, { passive: true });
    window.addEventListener("resize", this.refit);
    window.addEventListener("shoal-theme", this.redraw);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.scheme.addEventListener("change", this.redraw);
  }

  stop() {
    this.watcher.disconnect();
    cancelAnimationFrame(this.queued);
    window.removeEventListener("scroll", this.redraw);
    window.removeEventListener("resize", this.refit);
    window.removeEventListener("shoal-theme", this.redraw);
    this.scheme.removeEventListener("change", this.redraw);
  }

  /** Shows another cluster, or the same after its nodes have changed. */
  show(cluster) {
    this.cluster = cluster;
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
    return Math.floor(Math.max(window.innerHeight - top - BELOW - bar, window.innerHeight * ROOM_LEAST));
  }

  /** Computes the layout again after the nodes or the window have changed. */
  arrange() {
    const width = Math.floor(this.spacer.clientWidth);
    if (!width) return;
    this.width = width;
    this.height = this.room();
    this.plan = layout(this.cluster.nodes, width, this.height);
    this.where = new Map(this.plan.tiles.map((tile, index) => [tile.id, index]));
    this.spacer.style.setProperty("height", `${this.plan.height}px`);
    this.redraw();
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

  tenantColour(name, dark) {
    return hue(this.tenantNumber(name), dark);
  }
  tenantNumber(name) {
    if (!this.tenants.has(name)) this.tenants.set(name, this.tenants.size);
    return this.tenants.get(name);
  }

  colourOf(cell, dark) {
    if (this.by === "tenant") return this.tenantColour(this.tenantOf(cell.job), dark);
    if (this.by === "heat") {
      const share = this.heatOf(cell);
      return share < 0 ? "" : heatColour(share, dark);
    }
    return jobColour(cell.job, dark);
  }

  inkOf(cell, look) {
    if (this.by === "tenant") return inkOn(this.tenantNumber(this.tenantOf(cell.job)), look.dark);
    if (this.by === "job") return inkOn(numberOf(cell.job), look.dark);
    if (this.heatOf(cell) <= 55) return look.ink;
    return look.dark ? "#000000" : "#ffffff";
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
    for (const tile of this.seen) this.tile(pen, tile, look);
    this.drawn = performance.now() - began;
  }

  tile(pen, tile, look) {
    const node = this.cluster.nodes.get(tile.id);
    if (!node) return;
    const { named, wide, tall, gap, across } = this.plan;
    const well = WELL.has(node.state) && !node.standing;
    const state = node.standing && node.state === "ready" ? node.standing : node.state;
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
    // Cells of one member are joined, so that its edges are seen whatever the colours are.
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
        node.id,
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

  cell(pen, x, y, right, down, inside, look, dead, node) {
    const { wide, tall } = this.plan;
    const [first] = inside;
    const covered =
      inside.length === 1 &&
      (first.milli || 1000) >= 1000 &&
      !HALVES.has(this.jobOf(first.job)?.state) &&
      !this.dim(node, first.job);
    if (!covered || dead) {
      pen.globalAlpha = this.lit && !first && this.dim(node, "") ? 0.5 : 1;
      pen.fillStyle = look.free;
      pen.fillRect(x, y, wide, tall);
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
      const colour = this.colourOf(one, look.dark);
      pen.globalAlpha = this.dim(node, one.job) ? DIMMED : 1;
      pen.fillStyle = colour || look.free;
      // Starting or stopping, waking or falling asleep: half a cell.
      if (HALVES.has(job?.state)) {
        pen.beginPath();
        pen.moveTo(left, y + tall);
        pen.lineTo(left + part, y + tall);
        pen.lineTo(HALVES.get(job.state) ? left : left + part, y);
        pen.fill();
      } else pen.fillRect(left, y, part + (colour ? right : 0), tall + (colour ? down : 0));
      if (!colour) {
        pen.strokeStyle = look.ink2;
        pen.lineWidth = 1;
        pen.strokeRect(left + 0.5, y + 0.5, part - 1, tall - 1);
      } // held, but not measured
      if (job?.slow?.includes(one.member)) this.slow(pen, left + part, y, Math.min(part, tall), look);
      if (inside.length === 1) this.words(pen, one, job, left, y, part, tall, look);
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

  /** In a cell as much as it has room for: the job's number, its name, how busy the GPU is. */
  words(pen, one, job, x, y, wide, tall, look) {
    if (Math.min(wide, tall) < 18) return;
    const busy = this.heatOf(one);
    const name = job?.name && Math.min(wide, tall) >= 44 ? job.name : "";
    const lines = name
      ? [name, one.job, ...(busy >= 0 && tall >= 60 ? [`${Math.round(busy)} %`] : [])]
      : [one.job.replace(/^j/, "")];
    const half = HALVES.has(job?.state); // words on two grounds get an edge
    pen.fillStyle = half ? look.ink : this.inkOf(one, look);
    pen.textAlign = "center";
    if (half) {
      pen.strokeStyle = look.free;
      pen.lineWidth = 4;
      pen.lineJoin = "round";
    }
    lines.forEach((text, at) => {
      pen.font = `${at || !name ? (name ? 400 : 600) : 600} ${name ? 12 : 10}px ${look.sans}`;
      const put = [
        cut(pen, text, wide - 6),
        x + wide / 2,
        y + tall / 2 + 4 + (at - (lines.length - 1) / 2) * 15,
        wide - 2,
      ];
      if (half) pen.strokeText(...put);
      pen.fillText(...put);
    });
    pen.textAlign = "start";
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
    const column = Math.floor((x - tile.x - pad) / (wide + gap));
    const row = Math.floor((y - tile.y - tile.top) / (tall + gap));
    const gpu = row >= 0 && column >= 0 && column < across ? row * across + column : -1;
    const count = this.cluster.nodes.get(tile.id)?.gpus ?? 0;
    return { node: tile.id, gpu: gpu < count ? gpu : -1 };
  }

  pointed(event) {
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

  reveal(id) {
    const tile = this.placeOf(id);
    if (!tile) return;
    const y = this.spacer.getBoundingClientRect().top + window.scrollY + tile.y;
    if (y < window.scrollY + 60 || y + tile.height > window.scrollY + window.innerHeight - 60)
      window.scrollTo({ top: y - window.innerHeight / 3 });
  }

  key(event) {
    const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
    if ((event.key === "Enter" || event.key === " ") && this.focus) {
      event.preventDefault();
      this.onChoose(this.focus);
      return;
    }
    if (!moves[event.key] || !this.plan) return;
    event.preventDefault();
    const [down, right] = moves[event.key];
    let { node, gpu } = this.focus ?? { node: this.plan.tiles[0]?.id, gpu: 0 };
    let index = this.where.get(node) ?? 0;
    const count = () => Math.max(1, this.cluster.nodes.get(this.plan.tiles[index].id)?.gpus ?? 1);
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
    node = this.plan.tiles[index].id;
    this.focus = { node, gpu: Math.max(0, Math.min(gpu, count() - 1)) };
    this.reveal(node);
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
