// Draws which job held which GPU from when to when: a lane for each GPU, time from left to right. Only visible lanes
// are drawn. Where lanes would be thinner than 3 pixels, each node has one row in which its GPUs have their share.

import { penFor } from "./canvas.js";
import { forget, give, inkOn, isDark, jobColor, tenantColor } from "./colors.js";
import { css, glyphOf, h, natural } from "./dom.js";
import { cut } from "./map.js";

export const SPAN_LEAST = 60_000,
  SPAN_MOST = 32 * 86_400_000;
const AXIS = 30;
const HEAD = 16;
const LANE_LEAST = 3;
const LANE_CHOSEN = 6;
const LANE_MOST = 28;
const ROW_LEAST = 10;
const ROW_MOST = 44;
const BETWEEN = 3;
const GRIP = 7; // pixels on each side of the scrubber that hold it
const SECOND = 1000;
const MINUTE = 60 * SECOND;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;
const STEPS = [
  SECOND,
  5 * SECOND,
  10 * SECOND,
  30 * SECOND,
  MINUTE,
  2 * MINUTE,
  5 * MINUTE,
  10 * MINUTE,
  30 * MINUTE,
  HOUR,
  2 * HOUR,
  6 * HOUR,
  12 * HOUR,
  DAY,
  2 * DAY,
  7 * DAY,
];
const BAD = new Set(["failure", "node-loss", "lost", "hang", "time-limit"]);
const TONES = { lost: "--bad", quarantined: "--bad", joining: "--ink-3" };

export class Gantt {
  /** `onView`: another part is seen. `onAt`: the scrubber was moved. `onChoose`, `onOpen`: a bar. `tall`: how high it
   * may be, alone or beside a moment. */
  constructor({ tall, onView, onAt, onHover, onChoose, onOpen, onSay }) {
    this.tall = tall;
    this.onView = onView;
    this.onAt = onAt;
    this.onHover = onHover;
    this.onChoose = onChoose;
    this.onOpen = onOpen;
    this.onSay = onSay;
    this.from = 0;
    this.to = 1;
    this.at = null;
    this.now = 0;
    this.by = "job";
    this.rows = "";
    this.words = [];
    this.nodes = [];
    this.places = [];
    this.cursor = null;
    this.chosen = null;
    this.drawn = 0;
    this.queued = 0;
    this.oldest = 0;
    this.canvas = h("canvas", {
      tabindex: "0",
      role: "application",
      "aria-label":
        "Timeline of every GPU. Left and right move in time, up and down between GPUs, plus and minus zoom, Enter " +
        "opens the job.",
    });
    this.space = h("div", {}, this.canvas);
    this.element = h("div", { class: "gantt" }, this.space);
    this.redraw = () => {
      if (!this.queued)
        this.queued = requestAnimationFrame(() => {
          this.queued = 0;
          this.draw();
        });
    };
    this.fit = () => this.arrange();
    this.watcher = new ResizeObserver(this.fit);
    this.watcher.observe(this.element);
    this.element.addEventListener("scroll", this.redraw, { passive: true });
    window.addEventListener("resize", this.fit);
    window.addEventListener("shoal-theme", this.redraw);
    this.pointers = new Map();
    const on = (name, act, options) => this.canvas.addEventListener(name, act, options);
    on("pointerdown", (event) => this.pressed(event));
    on("pointermove", (event) => this.moved(event));
    on("pointerup", (event) => this.released(event, true));
    on("pointercancel", (event) => this.released(event, false));
    on("pointerleave", () => this.onHover(null));
    on("wheel", (event) => this.wheel(event), { passive: false });
    on("dblclick", (event) => {
      const { bar } = this.hit(event);
      if (bar) this.onOpen(bar);
    });
    on("keydown", (event) => this.key(event));
    on("focus", this.redraw);
    on("blur", this.redraw);
  }

  stop() {
    forget("time");
    this.watcher.disconnect();
    cancelAnimationFrame(this.queued);
    window.removeEventListener("resize", this.fit);
    window.removeEventListener("shoal-theme", this.redraw);
  }

  /** Takes an answer of /v1/timeline. */
  take(data) {
    this.oldest = data.oldest_ms;
    this.nodes = data.nodes.map((node) => ({ ...node, bars: [], states: [] }));
    for (const [at, gpus, job, attempt, member, begin, end, cause, why, name, tenant, milli = 1000] of data.bars)
      this.nodes[at]?.bars.push({
        node: this.nodes[at].id,
        gpus,
        runs: runsOf(gpus),
        job,
        attempt,
        member,
        begin,
        end,
        cause,
        why,
        name,
        tenant,
        milli,
        top: 0,
        text: `${job} ${name} tenant:${tenant}`.toLowerCase(),
      });
    for (const [at, state, begin, end, why] of data.states) this.nodes[at]?.states.push({ state, begin, end, why });
    for (const node of this.nodes) {
      node.bars.sort((a, b) => a.begin - b.begin);
      sharing(node.bars);
    }
    this.nodes.sort((a, b) => natural(a.place, b.place) || natural(a.id, b.id));
    giveOnBars(this.nodes);
    this.arrange();
  }

  look(from, to) {
    this.from = from;
    this.to = to;
    this.redraw();
  }
  find(text) {
    this.words = text.toLowerCase().split(/\s+/).filter(Boolean);
    this.arrange();
  }
  fits(text) {
    return this.words.every((word) => text.includes(word));
  }
  /** What the words find: nodes that have them, and jobs; nodes without either have no row. */
  found() {
    if (!this.words.length) return null;
    const nodes = new Set();
    const jobs = new Set();
    for (const node of this.nodes) {
      if (this.fits(`${node.id} ${node.place}`.toLowerCase())) nodes.add(node.id);
      for (const bar of node.bars) if (bar.job && this.fits(bar.text)) jobs.add(bar.job);
    }
    return { nodes, jobs };
  }

  /** Where each row stands. */
  arrange() {
    this.width = Math.floor(this.element.clientWidth);
    if (!this.width) return;
    this.left = this.width < 600 ? 52 : 92;
    const room = this.tall(false);
    const found = this.found();
    const seen = found
      ? this.nodes.filter((node) => found.nodes.has(node.id) || node.bars.some((bar) => found.jobs.has(bar.job)))
      : this.nodes;
    const lanes = seen.reduce((sum, node) => sum + Math.max(1, node.gpus), 0);
    const heads = new Set(seen.map((node) => node.place)).size;
    const free = room - AXIS - heads * HEAD - seen.length * BETWEEN;
    const lane = Math.floor(free / Math.max(1, lanes));
    this.marked = found;
    this.whole = this.rows === "nodes" || (!this.rows && lane < LANE_LEAST);
    const tall = this.whole
      ? clamp(Math.floor(free / Math.max(1, seen.length)), ROW_LEAST, ROW_MOST)
      : clamp(lane, this.rows ? LANE_CHOSEN : LANE_LEAST, LANE_MOST);
    let y = AXIS;
    let place = "";
    this.places = [];
    for (const node of seen) {
      const count = Math.max(1, node.gpus);
      if (node.place !== place) {
        place = node.place;
        this.places.push({ head: place || "No rack", y, height: HEAD });
        y += HEAD;
      }
      const height = this.whole ? tall : count * tall;
      this.places.push({ node, y, height, lane: height / count });
      y += height + BETWEEN;
    }
    this.height = Math.max(120, Math.min(this.tall(this.at !== null), y + 4)); // lanes stay as they are beside a moment
    this.element.style.setProperty("height", `${this.height}px`);
    this.space.style.setProperty("height", `${Math.max(y, this.height)}px`);
    this.redraw();
  }

  x(ms) {
    return this.left + ((ms - this.from) / (this.to - this.from)) * (this.width - this.left);
  }
  ms(x) {
    return Math.round(this.from + ((x - this.left) / (this.width - this.left)) * (this.to - this.from));
  }

  draw() {
    if (!this.width || !this.element.isConnected) return;
    const began = performance.now();
    const { canvas, width, height } = this;
    const pen = penFor(canvas, width, height);
    const top = this.element.scrollTop;
    const dark = isDark();
    const look = {
      dark,
      free: css("--cell-free"),
      ink: css("--ink"),
      ink2: css("--ink-2"),
      line: css("--line"),
      accent: css("--accent"),
      bad: css("--bad"),
      warn: css("--warn"),
      surface: css("--surface"),
      bg: css("--bg"),
      sans: css("--sans"),
    };
    if (this.inked !== `${dark}${look.warn}`) {
      this.inked = `${dark}${look.warn}`;
      this.hatches = new Map();
    }
    this.axis(pen, look);
    pen.save();
    pen.beginPath();
    pen.rect(0, AXIS, width, height - AXIS);
    pen.clip();
    pen.translate(0, -top);
    this.seen = this.places.filter((row) => row.y + row.height >= top + AXIS && row.y <= top + height);
    for (const row of this.seen)
      if (row.node) this.row(pen, row, look);
      else this.head(pen, row, look);
    pen.restore();
    this.upright(pen, this.now, look.ink2, "now", look, [2, 3]);
    if (this.at !== null)
      this.upright(pen, this.at, look.accent, new Date(this.at).toLocaleTimeString("en-GB"), look, []);
    this.drawn = performance.now() - began;
  }

  head(pen, row, look) {
    pen.font = `600 11px ${look.sans}`;
    pen.fillStyle = look.ink2;
    pen.fillText(row.head, 2, row.y + 12, this.width);
  }

  row(pen, row, look) {
    const { node, y, height, lane } = row;
    const { left, width } = this;
    const begin = Math.max(left, this.x(this.oldest));
    const end = Math.min(width, this.x(this.now));
    pen.fillStyle = look.free;
    if (end > begin) pen.fillRect(begin, y, end - begin, height);
    if (height >= 9) {
      pen.font = `${height >= 13 ? 11 : 9}px ${look.sans}`;
      pen.fillStyle = look.ink2;
      pen.fillText(cut(pen, node.id, left - 8), 2, y + Math.min(height - 1, Math.max(9, height / 2 + 4)));
    }
    pen.save();
    pen.beginPath();
    pen.rect(left, y, width - left, height);
    pen.clip();
    if (!this.whole && lane >= 5) {
      pen.fillStyle = look.bg;
      for (let gpu = 1; gpu < node.gpus; gpu += 1) pen.fillRect(left, y + gpu * lane - 1, width - left, 1);
    }
    this.labeled = new Set(); // members of a job that began together have one label
    for (const bar of node.bars)
      if (bar.begin < this.to && (bar.end ?? this.now) > this.from) this.bar(pen, bar, y, lane, look);
    for (const state of node.states)
      if (state.begin < this.to && (state.end ?? this.now) > this.from) this.state(pen, state, y, height, look);
    if (this.cursor?.node === node.id && document.activeElement === this.canvas) {
      pen.strokeStyle = look.ink;
      pen.lineWidth = 2;
      pen.strokeRect(left + 1, y + this.cursor.gpu * lane + 0.5, width - left - 2, Math.max(2, lane - 1));
    }
    pen.restore();
  }

  bar(pen, bar, y, lane, look) {
    const begin = Math.max(this.left - 4, this.x(bar.begin));
    const end = Math.min(this.width + 4, this.x(bar.end ?? this.now));
    const wide = Math.max(1, end - begin - (end - begin > 4 ? 1 : 0));
    const several = !bar.job && / jobs?$/.test(bar.why);
    const line = lane >= 5 ? 1 : 0;
    const dim = this.chosen?.job
      ? this.chosen.job !== bar.job
      : this.marked && !this.marked.jobs.has(bar.job) && !this.marked.nodes.has(bar.node);
    pen.globalAlpha = dim ? 0.22 : 1;
    bar.runs.forEach(([first, count], at) => {
      const top = y + (first + bar.top) * lane;
      const tall = Math.max(1, (count - 1 + Math.min(1, bar.milli / 1000)) * lane - line);
      pen.fillStyle = several ? this.hatch(pen, look.ink2, "//") : this.color(bar, look.dark);
      pen.fillRect(begin, top, wide, tall);
      if (bar.end !== null && BAD.has(bar.cause) && wide > 5) {
        pen.fillStyle = look.bad;
        pen.fillRect(end - 4, top, 3, tall);
      }
      const group = bar.job && `${bar.job} ${Math.round(begin / 24)}`;
      if (!at && wide > 30 && tall >= 10 && !this.labeled.has(group)) {
        if (group) this.labeled.add(group);
        this.label(pen, bar, several, Math.max(begin, this.left), top, end - Math.max(begin, this.left), tall, look);
      }
    });
    pen.globalAlpha = 1;
  }

  label(pen, bar, several, x, y, wide, tall, look) {
    const bad = bar.end !== null && BAD.has(bar.cause);
    const size = tall >= 13 ? 11 : 9;
    pen.font = `${size}px ${look.sans}`;
    pen.fillStyle = several ? look.ink : inkOn(this.color(bar, look.dark));
    const text = several ? bar.why : bar.name ? `${bar.job} ${bar.name}` : bar.job || bar.why;
    if (several) {
      const room = Math.min(wide, pen.measureText(text).width + 6);
      pen.fillStyle = look.surface;
      pen.fillRect(x + 1, y + tall / 2 - 6, room, 12);
      pen.fillStyle = look.ink;
    }
    pen.fillText(cut(pen, bad ? `${text} ✕` : text, wide - 10), x + 4, y + tall / 2 + size / 2 - 1.5, wide - 8);
  }

  color(bar, dark) {
    return this.by === "tenant" ? tenantColor(bar.tenant, dark) : jobColor(bar.job, dark);
  }

  /** A node's state: hatched, with its sign and word where there is room. */
  state(pen, state, y, height, look) {
    const begin = Math.max(this.left, this.x(state.begin));
    const end = Math.min(this.width, this.x(state.end ?? this.now));
    const wide = Math.max(2, end - begin);
    const tone = TONES[state.state] ? css(TONES[state.state]) : look.warn;
    pen.fillStyle = this.hatch(pen, tone, state.state === "lost" ? "xx" : state.state === "joining" ? ".." : "\\\\");
    pen.fillRect(begin, y, wide, height);
    if (wide < 14 || height < 10) return;
    pen.font = `600 ${height >= 13 ? 11 : 9}px ${look.sans}`;
    const text = wide > 60 ? `${glyphOf(state.state)} ${state.state}` : glyphOf(state.state);
    const room = Math.min(wide, pen.measureText(text).width + 6);
    pen.fillStyle = look.surface;
    pen.fillRect(begin + 2, y + height / 2 - Math.min(8, height / 2), room, Math.min(16, height));
    pen.fillStyle = tone;
    pen.fillText(text, begin + 5, y + height / 2 + 4, wide - 6);
  }

  hatch(pen, tone, kind) {
    const key = tone + kind;
    if (this.hatches.has(key)) return this.hatches.get(key);
    const tile = document.createElement("canvas");
    const size = 8;
    tile.width = tile.height = size;
    const brush = tile.getContext("2d");
    brush.strokeStyle = brush.fillStyle = tone;
    brush.lineWidth = 1.4;
    const stroke = (x, y, tox, toy) => {
      brush.beginPath();
      brush.moveTo(x, y);
      brush.lineTo(tox, toy);
      brush.stroke();
    };
    if (kind === "..") brush.fillRect(3, 3, 2, 2);
    if (kind === "//" || kind === "xx") {
      stroke(-2, 2, 2, -2);
      stroke(-1, size + 1, size + 1, -1);
      stroke(size - 2, size + 2, size + 2, size - 2);
    }
    if (kind === "\\\\" || kind === "xx") {
      stroke(-2, size - 2, 2, size + 2);
      stroke(-1, -1, size + 1, size + 1);
      stroke(size - 2, -2, size + 2, 2);
    }
    const made = pen.createPattern(tile, "repeat");
    this.hatches.set(key, made);
    return made;
  }

  axis(pen, look) {
    const { left, width, height } = this;
    const zone = new Date(this.from).getTimezoneOffset() * MINUTE;
    const step = STEPS.find((one) => (one / (this.to - this.from)) * (width - left) >= 74) ?? STEPS.at(-1);
    pen.strokeStyle = look.line;
    pen.lineWidth = 1;
    pen.font = `11px ${look.sans}`;
    for (let ms = Math.ceil((this.from - zone) / step) * step + zone; ms < this.to; ms += step) {
      const x = Math.round(this.x(ms)) + 0.5;
      const date = new Date(ms);
      const midnight = !date.getHours() && !date.getMinutes() && !date.getSeconds();
      pen.beginPath();
      pen.moveTo(x, AXIS - 6);
      pen.lineTo(x, height);
      pen.globalAlpha = 0.7;
      pen.stroke();
      pen.globalAlpha = 1;
      pen.fillStyle = midnight ? look.ink : look.ink2;
      pen.fillText(
        midnight
          ? date.toLocaleDateString("en-GB", { day: "numeric", month: "short" })
          : date.toLocaleTimeString("en-GB", step < MINUTE ? {} : { hour: "2-digit", minute: "2-digit" }),
        x + 3,
        20,
      );
    }
  }

  upright(pen, ms, tone, text, look, dash) {
    const x = this.x(ms);
    if (x < this.left - 1 || x > this.width + 1) return;
    pen.strokeStyle = tone;
    pen.lineWidth = dash.length ? 1 : 2;
    pen.setLineDash(dash);
    pen.beginPath();
    pen.moveTo(x, dash.length ? AXIS - 8 : 14);
    pen.lineTo(x, this.height);
    pen.stroke();
    pen.setLineDash([]);
    if (dash.length) return;
    pen.font = `600 11px ${look.sans}`;
    const wide = pen.measureText(text).width + 10;
    const left = clamp(x - wide / 2, this.left, this.width - wide);
    pen.fillStyle = tone;
    pen.fillRect(left, 0, wide, 17);
    pen.fillStyle = look.surface;
    pen.fillText(text, left + 5, 12);
  }

  /** What is under a pointer: the row, the GPU, the bar and the state. */
  /** @returns {{ x: number, y: number, node?: any, gpu?: number, ms?: number, bar?: any, state?: any }} */
  hit(event) {
    const area = this.canvas.getBoundingClientRect();
    const x = event.clientX - area.left;
    const y = event.clientY - area.top;
    if (y < AXIS || x < this.left) return { x, y };
    const row = (this.seen ?? []).find(
      (one) => one.node && y + this.element.scrollTop >= one.y && y + this.element.scrollTop < one.y + one.height,
    );
    return row
      ? {
          x,
          y,
          ...this.under(
            row,
            Math.floor((y + this.element.scrollTop - row.y) / row.lane),
            this.ms(x),
            (this.to - this.from) / this.width,
          ),
        }
      : { x, y };
  }
  under(row, gpu, ms, near = 0) {
    const at = (one) => one.begin <= ms + near && (one.end ?? this.now) >= ms - near;
    return {
      node: row.node,
      gpu,
      ms,
      bar: row.node.bars.findLast((bar) => bar.gpus.includes(gpu) && at(bar)),
      state: row.node.states.findLast(at),
    };
  }

  /** Shows `factor` times as much time; what is at `center` stays where it is. */
  zoom(factor, center = this.at ?? (this.from + this.to) / 2) {
    const span = clamp((this.to - this.from) * factor, SPAN_LEAST, SPAN_MOST);
    const share = (center - this.from) / (this.to - this.from);
    this.onView(center - share * span, center + (1 - share) * span);
  }
  pan(ms) {
    this.onView(this.from + ms, this.to + ms);
  }

  wheel(event) {
    const scale = event.deltaMode === 1 ? 16 : 1;
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.zoom(Math.exp(clamp(event.deltaY * scale, -200, 200) / 250), this.ms(Math.max(this.left, x)));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.pan(
        ((event.shiftKey ? event.deltaY || event.deltaX : event.deltaX) * scale * (this.to - this.from)) / this.width,
      );
    }
  }

  pressed(event) {
    if (event.button) return;
    const { x, y } = this.hit(event);
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, { x, y });
    const grip = this.at !== null && Math.abs(x - this.x(this.at)) <= GRIP;
    this.drag = {
      x,
      y,
      from: this.from,
      to: this.to,
      top: this.element.scrollTop,
      scrubs: y < AXIS || grip,
      far: false,
    };
    if (this.drag.scrubs && y < AXIS) this.onAt(this.ms(x));
  }
  moved(event) {
    const hit = this.hit(event);
    const before = this.pointers.get(event.pointerId);
    const drag = this.drag;
    if (!before || !drag) {
      this.canvas.classList.toggle("over", Boolean(hit.bar));
      this.canvas.classList.toggle(
        "grip",
        hit.y < AXIS || (this.at !== null && Math.abs(hit.x - this.x(this.at)) <= GRIP),
      );
      this.onHover(hit, event);
      return;
    }
    if (this.pointers.size === 2) {
      // two fingers: zoom
      const other = [...this.pointers].find(([id]) => id !== event.pointerId)[1];
      const was = Math.abs(before.x - other.x);
      const is = Math.abs(hit.x - other.x);
      if (was > 10 && is > 10) this.zoom(was / is, this.ms((hit.x + other.x) / 2));
      this.pointers.set(event.pointerId, hit);
      drag.far = true;
      return;
    }
    drag.far ||= Math.abs(hit.x - drag.x) + Math.abs(hit.y - drag.y) > 4;
    if (!drag.far) return;
    this.onHover(null);
    if (drag.scrubs) {
      this.onAt(clamp(this.ms(clamp(hit.x, this.left, this.width)), 0, this.now));
      return;
    }
    const ms = ((drag.x - hit.x) / (this.width - this.left)) * (drag.to - drag.from);
    if (event.pointerType !== "touch") this.element.scrollTop = drag.top + drag.y - hit.y;
    this.onView(drag.from + ms, drag.to + ms);
  }
  released(event, inside) {
    const drag = this.drag;
    this.pointers.delete(event.pointerId);
    if (this.pointers.size) return;
    this.drag = null;
    if (inside && drag && !drag.far && !drag.scrubs) this.onChoose(this.hit(event));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const span = this.to - this.from;
    const steps = { ArrowLeft: -1, ArrowRight: 1 };
    const rows = { ArrowUp: -1, ArrowDown: 1 };
    const act = () => {
      if (event.key === "+" || event.key === "=") return this.zoom(0.5);
      if (event.key === "-") return this.zoom(2);
      if (steps[event.key])
        return this.onAt(
          clamp(
            (this.at ?? Math.min(this.to, this.now)) + (steps[event.key] * span) / (event.shiftKey ? 10 : 100),
            0,
            this.now,
          ),
        );
      if (rows[event.key]) return this.step(rows[event.key]);
      if (event.key === "PageUp") return this.pan(-span / 2);
      if (event.key === "PageDown") return this.pan(span / 2);
      if (event.key === "Home") return this.onAt(this.from);
      if (event.key === "End") return this.onAt(null);
      if (event.key === "Enter" && this.here()?.bar) return this.onOpen(this.here().bar);
      return false;
    };
    if (act() === false) return;
    event.preventDefault();
    const here = this.here();
    if (here) this.onSay(here);
    this.redraw();
  }
  /** What the cursor is on, at the scrubber's time. */
  here() {
    const row = this.places.find((one) => one.node && one.node.id === this.cursor?.node);
    return row && this.under(row, this.cursor.gpu, this.at ?? Math.min(this.to, this.now) - 1);
  }
  step(by) {
    const rows = this.places.filter((row) => row.node);
    const at = rows.findIndex((row) => row.node.id === this.cursor?.node);
    if (!rows.length) return;
    let next = Math.max(0, at);
    let gpu = at < 0 ? 0 : this.cursor.gpu + by;
    if (gpu < 0) {
      next = Math.max(0, next - 1);
      gpu = at ? Math.max(1, rows[next].node.gpus) - 1 : 0;
    }
    if (gpu >= Math.max(1, rows[next].node.gpus)) {
      if (next + 1 < rows.length) {
        next += 1;
        gpu = 0;
      } else gpu -= 1;
    }
    this.cursor = { node: rows[next].node.id, gpu };
    const y = rows[next].y + gpu * rows[next].lane;
    const top = this.element.scrollTop;
    if (y < top + AXIS + HEAD || y > top + this.height - 20) this.element.scrollTop = y - this.height / 2;
  }
}

const clamp = (value, least, most) => Math.max(least, Math.min(most, value));

/** [first, count] of GPUs that are next to each other. */
function runsOf(gpus) {
  const runs = [];
  for (const gpu of gpus) {
    const last = runs.at(-1);
    if (last && gpu === last[0] + last[1]) last[1] += 1;
    else runs.push([gpu, 1]);
  }
  return runs.length ? runs : [[0, 1]];
}

/** Bars that share a GPU at the same time stand in parts of its lane. */
function sharing(bars) {
  const open = new Map();
  for (const bar of bars) {
    if (bar.milli >= 1000 || bar.milli <= 0) continue;
    const others = (open.get(bar.gpus[0]) ?? [])
      .filter((one) => one.end === null || one.end > bar.begin)
      .sort((a, b) => a.top - b.top);
    for (const one of others)
      if (one.top < bar.top + bar.milli / 1000 && one.top + one.milli / 1000 > bar.top + 0.001)
        bar.top = one.top + one.milli / 1000;
    bar.top = Math.min(bar.top, 1 - bar.milli / 1000);
    open.set(bar.gpus[0], [...others, bar]);
  }
}

const NEAR = 4; // bars before and after one that count as neighbors

/** Colors of the jobs on the time line. Neighbors follow each other on a node, or are on the next node by then. */
function giveOnBars(nodes) {
  const places = new Map();
  for (const [row, node] of nodes.entries())
    for (const [at, bar] of node.bars.entries())
      if (bar.job && !bar.job.startsWith("@"))
        (places.get(bar.job) ?? places.set(bar.job, []).get(bar.job)).push([row, at]);
  give("time", new Set(places.keys()), (job, add) => {
    for (const [row, at] of places.get(job))
      for (const side of [-1, 0, 1]) {
        const bars = nodes[row + side]?.bars ?? [];
        const middle = side ? bars.findIndex((bar) => bar.begin >= nodes[row].bars[at].begin) : at;
        const here = middle < 0 ? bars.length : middle;
        for (const bar of bars.slice(Math.max(0, here - NEAR), here + NEAR)) add(bar.job, side ? 1 : 3);
      }
  });
}
