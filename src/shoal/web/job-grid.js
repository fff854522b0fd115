// The table of jobs: a grid for the pointer and the keyboard, in which only rows near the screen exist.

import { h } from "./dom.js";
import { card, current } from "./job-cells.js";
import { replace } from "./patch.js";

const ROW = 34;
const CARD = 82; // px: all rows are alike, so that a place on the screen is a row
const AROUND = 12; // rows that exist above and below the screen
const EACH = 3; // rows of these that are made in one frame, beyond those on the screen
const REST_MS = 150; // after a jump beyond all rows: until then they are one line of text each
const narrow = matchMedia("(max-width: 760px)");

export class Grid {
  /** `on`: sort(by), open(id), chosen(), need(): the reader comes near the end. */
  constructor(on) {
    this.on = on;
    this.rows = [];
    this.columns = [];
    this.sort = "";
    this.total = 0;
    this.selected = new Set();
    this.at = 0;
    this.anchor = 0;
    this.drawn = [0, -1];
    this.rest = 0; // set while rows are lines of text
    this.lines = []; // for these, used again and again
    this.head = h("div", { role: "row", class: "jobs-row", "aria-rowindex": "1" });
    this.body = h("div", { role: "rowgroup", class: "jobs-rows" });
    this.element = h(
      "div",
      {
        class: "jobs-grid",
        role: "grid",
        "aria-label": "Jobs",
        "aria-multiselectable": "true",
        tabindex: "0",
        onkeydown: (event) => this.key(event),
      },
      h("div", { role: "rowgroup", class: "jobs-head" }, this.head),
      this.body,
    );
    this.element.csv = () => [
      this.columns.map((one) => one.head),
      ...this.rows.map((row) => this.columns.map((one) => h("span", {}, one.cell(current(row))).textContent)),
    ];
    this.body.addEventListener("click", (event) => this.click(event));
    this.body.addEventListener("mousedown", (event) => {
      if (event.shiftKey) event.preventDefault();
    }); // it would select text
    this.soon = () => {
      this.frame ||= requestAnimationFrame(() => {
        this.frame = 0;
        this.draw(false);
      });
    };
    this.whole = () => this.draw(true);
    addEventListener("scroll", this.soon, { passive: true });
    addEventListener("resize", this.whole);
    narrow.addEventListener("change", this.whole);
  }

  stop() {
    removeEventListener("scroll", this.soon);
    removeEventListener("resize", this.whole);
    narrow.removeEventListener("change", this.whole);
    cancelAnimationFrame(this.frame);
    clearTimeout(this.rest);
  }
  get size() {
    return narrow.matches ? CARD : ROW;
  }

  /** Rows that left the list leave the selection; the current row stays the same job. */
  set(rows, total) {
    const at = this.rows[this.at]?.id;
    const known = new Set(rows.map((row) => row.id));
    this.rows = rows;
    this.total = total;
    const index = at ? rows.findIndex((row) => row.id === at) : -1;
    this.at = index >= 0 ? index : Math.max(0, Math.min(this.at, rows.length - 1));
    for (const id of [...this.selected]) if (!known.has(id)) this.selected.delete(id);
    this.draw(true);
  }

  /** All of what is near the screen; with `fresh` unset only if the reader has scrolled beyond it. */
  draw(fresh) {
    const size = this.size;
    const count = this.rows.length;
    const top = this.body.getBoundingClientRect().top;
    const first = Math.max(0, Math.floor(-top / size));
    const last = Math.min(count - 1, Math.ceil((innerHeight - top) / size));
    if (last > count - 1 - 2 * AROUND) this.on.need();
    const held = this.body.contains(document.activeElement);
    if (fresh) this.all(first, last, size);
    else if (first > this.drawn[1] || last < this.drawn[0]) this.skim(first, last, size);
    else if (this.rest) {
      if (first < this.drawn[0] || last > this.drawn[1]) this.skim(first, last, size);
    } else this.shift(first, last, size);
    if (held && !this.body.contains(document.activeElement)) this.element.focus({ preventScroll: true });
  }

  all(first, last, size) {
    this.drawn = [Math.max(0, first - AROUND), Math.min(this.rows.length - 1, last + AROUND)];
    this.heads();
    clearTimeout(this.rest);
    this.rest = 0;
    const rows = [];
    for (let at = this.drawn[0]; at <= this.drawn[1]; at += 1) rows.push(this.row(at, size));
    replace(this.body, ...rows);
    this.point();
  }

  /** Rows that somebody scrolls past faster than they can be read: a frame costs a text for each, and no element. */
  skim(first, last, size) {
    clearTimeout(this.rest);
    if (!this.rest) this.body.replaceChildren();
    this.rest = setTimeout(this.whole, REST_MS);
    this.drawn = [first, last];
    for (let at = first; at <= last; at += 1) {
      const place = at - first;
      this.lines[place] ??= h("div", { role: "row", class: "jobs-row skim" }, h("span", { role: "gridcell" }, " "));
      const line = this.lines[place];
      const row = this.rows[at];
      line.dataset.job = row.id;
      line.style.top = `${at * size}px`;
      line.firstChild.firstChild.nodeValue = `${row.id}  ${row.name}  ${row.state}`;
      if (!line.isConnected) this.body.append(line);
    }
    for (let at = last - first + 1; at < this.lines.length; at += 1) this.lines[at].remove();
  }

  /** The window of rows moves: those that are far go, those that come near are made a few in a frame. */
  shift(first, last, size) {
    let [from, to] = this.drawn;
    if (this.body.childElementCount !== to - from + 1) {
      this.all(first, last, size); // an update waits until the mouse button is up
      return;
    }
    for (; from < first - 2 * AROUND; from += 1) this.body.firstElementChild.remove();
    for (; to > last + 2 * AROUND; to -= 1) this.body.lastElementChild.remove();
    const low = Math.max(0, Math.min(first, Math.max(first - AROUND, from - EACH)));
    const high = Math.min(this.rows.length - 1, Math.max(last, Math.min(last + AROUND, to + EACH)));
    while (from > low) this.body.prepend(this.row(--from, size));
    while (to < high) this.body.append(this.row(++to, size));
    this.drawn = [from, to];
  }

  drawnRows() {
    return /** @type {HTMLElement[]} */ ([...this.body.children]);
  }

  /** What all rows share. Scrolling changes none of it, and must not make the browser look at all rows again. */
  heads() {
    const least = narrow.matches
      ? 0
      : this.columns.reduce((sum, one) => sum + 12 + Number(one.width.match(/\d+/)[0]), 28);
    this.element.style.setProperty("--columns", `28px ${this.columns.map((one) => one.width).join(" ")}`);
    this.element.style.setProperty("--least", `${least}px`);
    this.element.classList.toggle("wide", least > this.element.clientWidth);
    this.element.setAttribute("aria-rowcount", String((this.total || this.rows.length) + 1));
    this.body.style.height = `${this.rows.length * this.size}px`;
    const all = this.rows.length > 0 && this.selected.size === this.rows.length;
    const box = h("input", {
      type: "checkbox",
      "aria-label": "Select all loaded rows",
      checked: all,
      onchange: () => this.pick(all ? [] : this.rows.map((row) => row.id)),
    });
    replace(
      this.head,
      h("span", { role: "columnheader", "data-key": "pick" }, box),
      this.columns.map((one) => {
        const down = this.sort === `-${one.sort}`;
        const on = one.sort && (down || this.sort === one.sort);
        return h(
          "span",
          {
            role: "columnheader",
            "data-key": one.key,
            class: one.number ? "num" : "",
            "aria-sort": on ? (down ? "descending" : "ascending") : one.sort ? "none" : null,
          },
          one.sort
            ? h(
                "button",
                { class: "sorts", onclick: () => this.on.sort(on && down ? one.sort : `-${one.sort}`) },
                one.head,
                on ? h("i", { "aria-hidden": "true" }, down ? "↓" : "↑") : null,
              )
            : one.head,
        );
      }),
    );
    this.head.querySelector("input").checked = all;
  }

  row(at, size) {
    const row = current(this.rows[at]);
    const picked = this.selected.has(row.id);
    const box = h("input", { type: "checkbox", tabindex: "-1", checked: picked, "aria-label": `Select ${row.id}` });
    const cells = narrow.matches
      ? [h("div", { role: "gridcell", class: "jobs-card" }, card(row))]
      : this.columns.map((one) => {
          const inside = one.cell(row);
          return h(
            "span",
            {
              role: "gridcell",
              "data-name": one.key,
              class: one.number ? "num" : "",
              title: typeof inside === "string" && inside.length > 12 ? inside : null,
            },
            inside,
          );
        });
    return h(
      "div",
      {
        role: "row",
        id: `row-${row.id}`,
        class: `jobs-row${at === this.at ? " at" : ""}`,
        "data-key": row.id,
        "data-job": row.id,
        "aria-rowindex": String(at + 2),
        "aria-selected": String(picked),
        style: { top: `${at * size}px` },
      },
      h("span", { role: "gridcell" }, box),
      cells,
    );
  }

  /** Marks the current row, for eyes and for screen readers. */
  point() {
    const row = this.rows[this.at];
    if (row) this.element.setAttribute("aria-activedescendant", `row-${row.id}`);
    else this.element.removeAttribute("aria-activedescendant");
    for (const one of this.drawnRows()) one.classList.toggle("at", one.dataset.job === row?.id);
  }

  pick(ids) {
    this.selected = new Set(ids);
    this.draw(true);
    this.on.chosen();
  }
  range(to) {
    const [from, until] = [Math.min(this.anchor, to), Math.max(this.anchor, to)];
    this.pick([...this.selected, ...this.rows.slice(from, until + 1).map((row) => row.id)]);
  }
  toggle(at) {
    const ids = new Set(this.selected);
    const id = this.rows[at].id;
    if (!ids.delete(id)) ids.add(id);
    this.anchor = at;
    this.pick(ids);
  }

  move(to, extend) {
    if (!this.rows.length) return;
    if (extend && !this.selected.size) this.anchor = this.at;
    this.at = Math.max(0, Math.min(this.rows.length - 1, to));
    const size = this.size;
    const y = this.body.getBoundingClientRect().top + this.at * size;
    const least = 48 + 40 + (narrow.matches ? 0 : ROW);
    const most = innerHeight - size - 64;
    if (y < least) scrollBy(0, y - least);
    else if (y > most) scrollBy(0, y - most);
    if (extend) this.range(this.at);
    else {
      this.draw(false);
      this.point();
    }
  }

  key(event) {
    if (event.target !== this.element && event.key !== "Escape") return; // a control inside has its own keys
    const page = Math.max(1, Math.floor(innerHeight / this.size) - 4);
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[
      event.key
    ];
    if (step && !event.ctrlKey && !event.metaKey && !event.altKey) this.move(this.at + step, event.shiftKey);
    else if (event.key === "Enter" && this.rows[this.at]) this.on.open(this.rows[this.at].id);
    else if (event.key === " " && this.rows[this.at]) {
      if (event.shiftKey) this.range(this.at);
      else this.toggle(this.at);
    } else if (event.key === "a" && (event.ctrlKey || event.metaKey)) this.pick(this.rows.map((row) => row.id));
    else if (event.key === "Escape" && this.selected.size) this.pick([]);
    else return;
    event.preventDefault();
  }

  click(event) {
    const id = event.target.closest("[data-job]")?.dataset.job;
    const at = this.rows.findIndex((row) => row.id === id);
    if (at < 0 || event.target.closest("a, button")) return;
    this.at = at;
    this.element.focus({ preventScroll: true }); // so that a redraw may set the box
    // all of the box's cell counts
    const first = event.target.closest("[role=gridcell]")?.previousElementSibling === null;
    if (event.shiftKey) this.range(at);
    else if (first || event.ctrlKey || event.metaKey) this.toggle(at);
    else {
      this.anchor = at;
      this.point();
    }
  }
}
