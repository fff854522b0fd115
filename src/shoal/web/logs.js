// The output of a job: of one member, or of all in the order it came. What is shown is a window into
// logs of any length: pieces are fetched where the reader is, and dropped where they are not. The
// choices are in the address.

import { choose, chosen } from "./address.js";
import { get, jobPath } from "./api.js";
import { offer } from "./commands.js";
import { toast } from "./dialog.js";
import { bytes, h, plural, throttled, whole } from "./dom.js";
import { draw, highlight, Lines } from "./log-lines.js";
import { bytesOf, SAVED_BYTES_MAX, save } from "./save.js";

const ROWS_MAX = 2500;
const CHARACTERS_MAX = 1_000_000; // in the window
const HITS_MAX = 5000;
const WAIT_S = 20;
const ALL = "all";
const TOGETHER_MAX = 64; // members that are shown at once
const UP = new Set(["PageUp", "ArrowUp", "Home"]);

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const number = (text) => (/^\d+$/.test(text) ? Number(text) : null);

export class LogView {
  constructor(id) {
    this.id = id;
    this.run = 0;
    this.shape = "";
    this.top = 0;
    this.tall = 0;
    this.size = 0;
    this.hits = null;
    this.sliding = false;
    this.lines = [];
    const button = (label, title, onclick) => h("button", { type: "button", title, onclick }, label);
    const tick = (name, onchange, checked) => {
      const box = h("input", { type: "checkbox", id: name, checked, onchange: () => onchange(box.checked) });
      return box;
    };
    const labeled = (box, label = box.id) => h("label", { class: "small log-follow" }, box, label);
    this.member = h("select", { "aria-label": "Member", onchange: () => this.pick("member", this.member.value, ALL) });
    this.attempt = h("select", {
      "aria-label": "Attempt",
      onchange: () => this.pick("attempt", this.attempt.value, "0"),
    });
    this.search = h("input", {
      type: "search",
      "aria-label": "Find in log",
      placeholder: "Find in log",
      value: chosen("grep") || chosen("q"),
      maxlength: 256,
    });
    this.state = h("span", { class: "dim small", role: "status" });
    this.count = h("span", { class: "dim small", role: "status" });
    /** @type {any} its rows have a `line`, a `member` and a `size` */
    this.box = h("div", { class: "lines" });
    this.text = h("pre", { class: "log", role: "region", tabindex: "0", "aria-label": "Output" }, this.box);
    this.loader = button("Download", "Download the selected output", () => this.download());
    this.only = tick("only", () => this.look(), Boolean(chosen("grep")));
    const form = h(
      "form",
      { role: "search", class: "row" },
      this.search,
      button("↑", "Previous match (Shift-Enter)", () => this.step(-1)),
      button("↓", "Next match (Enter)", () => this.step(1)),
      this.count,
      labeled(this.only, "Matches only"),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.look();
    });
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && event.shiftKey) {
        event.preventDefault();
        this.step(-1);
      }
    });
    this.search.addEventListener("search", () => {
      if (!this.search.value) this.look();
    }); // the cross that empties it
    this.where = h("input", {
      type: "range",
      min: 0,
      max: 1000,
      "aria-label": "Position in log",
      onchange: () => this.seek(String(Number(this.where.value) / 10)),
      oninput: () => {
        this.sliding = true;
      },
    });
    this.time = h("input", {
      type: "datetime-local",
      step: 1,
      "aria-label": "Go to time",
      onchange: () => {
        const ms = new Date(this.time.value).getTime();
        if (ms > 0) this.seek(`t${ms}`);
      },
    });
    this.follow = tick(
      "follow",
      (on) => {
        if (on) this.follows();
      },
      true,
    );
    this.wrap = tick(
      "wrap",
      (on) => {
        choose("wrap", on ? "" : "off");
        this.dress();
      },
      chosen("wrap") !== "off",
    );
    this.times = tick(
      "times",
      (on) => {
        choose("times", on ? "on" : "");
        this.dress();
      },
      chosen("times") === "on",
    );
    this.element = h(
      "section",
      { class: "card", "aria-label": "Log" },
      h(
        "div",
        { class: "row" },
        h("h2", {}, "Log"),
        this.member,
        this.attempt,
        form,
        button("First error", "First line of this attempt that looks like an error, from any member", () =>
          this.firstError(),
        ),
        h("span", { class: "push row" }, this.state, this.loader),
      ),
      this.text,
      h(
        "div",
        { class: "row log-place" },
        button("⇤ Start", "", () => this.seek("0")),
        this.where,
        button("End ⇥", "", () => this.follows()),
        this.time,
        labeled(this.follow),
        labeled(this.wrap),
        labeled(this.times),
        button("Copy link", "Copy a link to the selected line, or to the first visible one", () => this.link()),
      ),
    );
    this.dress();
    const on = (name, act, more) => this.text.addEventListener(name, act, more);
    on("scroll", () => this.scrolled(), { passive: true });
    // A smooth scroll up starts near the end, so wheel and keys stop following before it moves.
    const upwards = () => {
      this.follow.checked = false;
      if (this.text.scrollTop < this.text.clientHeight) this.before();
    };
    on(
      "wheel",
      (event) => {
        if (event.deltaY < 0) upwards();
      },
      { passive: true },
    );
    // Rows that come above during a smooth scroll to the end would stop it on its way.
    on("keydown", (event) => {
      if (UP.has(event.key)) upwards();
      if (event.key !== "End" || event.shiftKey) return;
      event.preventDefault();
      this.follows();
    });
    on("click", (event) => {
      const row = event.target.closest(".line");
      if (row && getSelection().isCollapsed) {
        this.mark(row);
        choose("line", row.dataset.line);
      }
    });
    this.light = throttled(200, () => highlight(this.box, this.search.value));
    this.recolor = () => {
      for (const row of this.box.children)
        if (row.line) draw(row.line, row.member, this.part.members.length > 1, row, true);
    };
    addEventListener("shoal-theme", this.recolor);
    this.offered = offer(() =>
      [
        ["first error", () => this.firstError()],
        ["start", () => this.seek("0")],
        ["end, and follow", () => this.follows()],
        ["download", () => this.download()],
      ].map(([what, run]) => ({ title: `Log: ${what}`, hint: this.id, run })),
    );
  }

  dress() {
    this.text.classList.toggle("wide", !this.wrap.checked);
    this.text.classList.toggle("timed", this.times.checked);
  }

  pick(name, value, usual) {
    if ((chosen(name) || usual) === value) return;
    choose(name, value === usual ? "" : value);
    choose("line", "");
    choose("seek", "");
    this.again();
  }

  // -- where the reader is ---------------------------------------------------------------------

  /** Scrolling up stops following, and scrolling to the end starts it again, by any means. */
  scrolled() {
    const { scrollTop, scrollHeight } = this.text;
    if (scrollTop < this.top && scrollHeight === this.tall) this.follow.checked = false;
    else if (scrollTop > this.top && this.atEnd() && this.caughtUp()) this.follow.checked = true;
    this.top = scrollTop;
    this.tall = scrollHeight;
    if (scrollTop < this.text.clientHeight) this.before();
    this.wake?.();
    this.placed();
  }

  atEnd() {
    return this.left() < 40;
  }
  left() {
    return this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight;
  }
  caughtUp() {
    return Boolean(this.part?.ends.every((end, at) => end >= this.part.sizes[at]));
  }
  selecting() {
    const chosenText = getSelection();
    return !chosenText.isCollapsed && this.text.contains(chosenText.anchorNode);
  }
  full(most = 1) {
    return this.box.childElementCount > most * ROWS_MAX || this.size > most * CHARACTERS_MAX;
  }
  wantsMore() {
    return this.selecting()
      ? !this.full(2)
      : this.follow.checked || this.left() < 2 * this.text.clientHeight || !this.full(0.5);
  }
  firstShown() {
    const edge = this.text.getBoundingClientRect().top;
    return [...this.box.children].find((row) => row.getBoundingClientRect().bottom > edge);
  }

  /** Puts a row back where it was. To set `scrollTop` ends a smooth scroll, also where nothing moved. */
  hold(row, edge) {
    const moved = row?.isConnected ? row.getBoundingClientRect().top - edge : 0;
    if (moved) this.text.scrollTop += moved;
  }

  /** The slider: by time if members are together, otherwise by bytes. */
  placed() {
    if (this.placing || this.sliding) return;
    this.placing = requestAnimationFrame(() => {
      this.placing = 0;
      const row = this.follow.checked ? null : this.firstShown();
      const { sizes, members, first_ms: first, last_ms: last } = this.part ?? {};
      let share = 1;
      if (row && members.length > 1 && last > first && row.line.at) share = (row.line.at - first) / (last - first);
      else if (row) share = row.line.offset / Math.max(1, sizes[members.indexOf(row.member)]);
      this.where.value = String(Math.round(share * 1000));
      this.where.setAttribute("aria-valuetext", `${Math.round(share * 100)} %`);
    });
  }

  seek(where) {
    this.sliding = false;
    this.follow.checked = false;
    choose("line", "");
    choose("seek", where);
    this.again(where);
  }
  follows() {
    this.follow.checked = true;
    choose("line", "");
    choose("seek", "");
    if (this.part && this.caughtUp()) this.text.scrollTop = this.text.scrollHeight;
    else this.again();
  }

  /** Updates the members and attempts to choose from. An array has no output of its own. */
  know(job) {
    this.element.hidden = Boolean(job.array) || !job.attempt;
    if (this.element.hidden) return;
    this.job = job;
    const count = Math.max(job.spec.members, job.gang.length, 1);
    const newest = job.attempt;
    const shape = `${count}/${newest}`;
    if (shape === this.shape) return;
    const first = !this.shape;
    this.shape = shape;
    this.total = count;
    const member = chosen("member") || ALL;
    const attempt = chosen("attempt") || "0";
    const option = (value, now_, label) => h("option", { value, selected: String(value) === now_ }, label);
    this.member.replaceChildren(
      option(ALL, member, count > TOGETHER_MAX ? `Members 0 to ${TOGETHER_MAX - 1}` : "All members"),
      ...Array.from({ length: Math.min(count, 512) }, (_, at) => option(at, member, `Member ${at}`)),
    );
    this.member.hidden = count < 2;
    this.attempt.replaceChildren(
      option(0, attempt, newest ? `Latest attempt (${newest})` : "Latest attempt"),
      ...Array.from({ length: Math.max(0, newest - 1) }, (_, at) => newest - 1 - at)
        .slice(0, 50)
        .map((one) => option(one, attempt, `Attempt ${one}`)),
    );
    this.attempt.hidden = newest < 2;
    if (first) this.again(chosen("line") || chosen("seek"));
    else if (attempt === "0") this.again();
    if (first && chosen("q")) this.collect();
  }

  // -- reading ---------------------------------------------------------------------------------

  path(what, more, attempt = number(chosen("attempt")) ?? 0, member = number(chosen("member"))) {
    const asked = new URLSearchParams({
      attempt,
      ...(member === null || this.total < 2 ? (this.total < 2 ? { member: 0 } : {}) : { member }),
      ...more,
    });
    return `${jobPath(this.id)}/logs/${what}?${asked}`;
  }

  grep() {
    const grep = chosen("grep");
    return grep ? { grep } : {};
  }

  /** Begins anew at a place: "M:BYTE" is a line, "t…" a time, a number a percentage; else at the end. */
  again(where = "") {
    const run = ++this.run;
    this.stopper?.abort();
    this.stopper = new AbortController();
    this.part = null;
    this.size = 0;
    this.busy = false;
    this.lines = [];
    this.box.replaceChildren();
    this.state.textContent = "";
    this.follow.checked = !where;
    this.read(run, this.stopper.signal, where);
  }

  async read(run, signal, where) {
    let wait = 0;
    let first = true;
    while (run === this.run) {
      try {
        if (first) {
          const line = /^\d+:\d+$/.test(where);
          const place = line
            ? { line: where }
            : /^t\d+$/.test(where)
              ? { since_ms: where.slice(1) }
              : where !== "" && Number(where) >= 0 && Number(where) <= 100
                ? { share: Number(where) / 100 }
                : this.grep().grep
                  ? {}
                  : { back: true };
          const part = await get(this.path("part", { ...place, ...this.grep() }), { signal });
          if (run !== this.run) return;
          first = false;
          this.pinned = part.attempt;
          this.part = part;
          this.take(part);
          this.text.scrollTop = this.follow.checked ? this.text.scrollHeight : 0;
          if (!this.follow.checked) await this.before();
          if (line) this.mark(this.row(where), true);
        } else if (!this.wantsMore() || (this.part.ended && this.caughtUp()))
          await new Promise((resolve) => {
            this.wake = () => resolve(undefined);
            signal.addEventListener("abort", resolve, { once: true });
          });
        else {
          const part = await get(
            this.path("part", { places: this.part.ends.join(), wait_s: WAIT_S, ...this.grep() }, this.pinned),
            { signal },
          );
          if (run !== this.run) return;
          Object.assign(this.part, {
            ends: part.ends,
            sizes: part.sizes,
            ended: part.ended,
            first_ms: part.first_ms,
            last_ms: part.last_ms,
          });
          this.take(part);
        }
        wait = 0;
        this.told();
      } catch (error) {
        if (error.name === "AbortError" || run !== this.run) return;
        this.state.textContent = error.message;
        if (error.status === 422) return;
        wait = Math.min(8000, (wait || 500) * 2);
        await pause(wait);
      }
    }
  }

  told() {
    const { sizes, ended } = this.part;
    const all = sizes.reduce((sum, one) => sum + one, 0);
    const over = ended && this.caughtUp();
    if (over && !this.box.childElementCount)
      this.box.replaceChildren(h("div", { class: "dim" }, this.grep().grep ? "No matching lines" : "No output"));
    this.state.textContent = `${over ? "Ended" : this.caughtUp() ? "Live" : "More below"} · ${bytes(all)}`;
    this.placed();
  }

  /** Adds what comes after the window. */
  take(part) {
    const { members } = this.part;
    const several = members.length > 1;
    if (part.pieces.length && !this.size) this.box.replaceChildren();
    const fresh = document.createDocumentFragment();
    for (const piece of part.pieces) {
      const at = members.indexOf(piece.member);
      this.lines[at] ??= new Lines();
      this.lines[at].tell = (line, row) => {
        const had = row?.parentNode ? row : null;
        const before = had?.size ?? 0;
        const drawn = draw(line, piece.member, several, had);
        if (!had) fresh.append(drawn);
        this.size += drawn.size - before;
        return drawn;
      };
      this.lines[at].feed(piece, bytesOf(piece.data));
    }
    const anchor = this.follow.checked ? null : this.firstShown();
    const edge = anchor?.getBoundingClientRect().top;
    this.box.append(fresh);
    const keep = this.selecting(); // asked once: it makes the browser lay out what has changed
    while (!keep && this.full()) {
      const row = this.box.firstChild;
      this.part.starts[members.indexOf(row.member)] = row.line.end;
      this.drop(row);
    }
    if (this.follow.checked) this.text.scrollTop = this.text.scrollHeight;
    else this.hold(anchor, edge);
    this.top = this.text.scrollTop;
    this.tall = this.text.scrollHeight;
    if (part.pieces.length && this.search.value) this.light();
  }

  /** Adds what comes before the window, and drops what is far below. */
  async before() {
    const run = this.run;
    if (this.busy || !this.part || this.part.starts.every((start) => start <= 0)) return;
    this.busy = true;
    try {
      const part = await get(
        this.path("part", { back: true, places: this.part.starts.join(), ...this.grep() }, this.pinned),
        { signal: this.stopper.signal },
      );
      if (run !== this.run) return;
      const { members } = this.part;
      const fresh = document.createDocumentFragment();
      const lines = members.map(
        (member) =>
          new Lines((line, row) => {
            const drawn = draw(line, member, members.length > 1, row?.parentNode ? row : null);
            if (!drawn.parentNode) {
              fresh.append(drawn);
              this.size += drawn.size;
            }
            return drawn;
          }),
      );
      for (const piece of part.pieces) lines[members.indexOf(piece.member)].feed(piece, bytesOf(piece.data));
      for (const one of lines) one.flush();
      const anchor = this.firstShown();
      const edge = anchor?.getBoundingClientRect().top;
      this.box.prepend(fresh);
      this.part.starts = part.starts;
      const keep = this.follow.checked || this.selecting();
      while (!keep && this.full()) {
        const row = this.box.lastChild;
        const at = members.indexOf(row.member);
        this.part.ends[at] = row.line.offset;
        this.lines[at]?.reset();
        this.drop(row);
      }
      this.hold(anchor, edge);
      this.top = this.text.scrollTop;
      this.tall = this.text.scrollHeight;
      if (this.search.value) this.light();
      this.told();
    } catch (error) {
      if (run === this.run && error.name !== "AbortError") this.state.textContent = error.message;
    } finally {
      if (run === this.run) this.busy = false;
    }
  }

  drop(row) {
    this.size -= row.size;
    row.remove();
  }

  // -- finding ---------------------------------------------------------------------------------

  row(key) {
    return this.box.querySelector(`[data-line="${CSS.escape(key)}"]`);
  }

  mark(row, scroll = false) {
    this.box.querySelector("[aria-current]")?.removeAttribute("aria-current");
    row?.setAttribute("aria-current", "true");
    if (row && scroll) {
      this.text.scrollTop +=
        row.getBoundingClientRect().top - this.text.getBoundingClientRect().top - this.text.clientHeight / 3;
      this.top = this.text.scrollTop;
    }
  }

  /** Enter: only these lines, or the next line with this text. */
  look() {
    const text = this.search.value;
    const only = this.only.checked && text;
    const same = this.hits && this.hits.text === text && !only && !chosen("grep");
    if (same) {
      this.step(1);
      return;
    }
    const was = chosen("grep");
    choose("grep", only ? text : "");
    choose("q", only ? "" : text);
    this.hits = null;
    this.count.textContent = "";
    this.light();
    if (was !== chosen("grep")) {
      choose("line", "");
      choose("seek", "");
      this.again();
    }
    if (text && !only) this.collect().then(() => this.step(1));
  }

  /** Where all lines with the text are. */
  async collect() {
    const hits = { text: this.search.value, all: [], at: -1, done: false };
    this.hits = hits;
    try {
      await this.searched(hits.text, this.path, (found) => {
        hits.all.push(...found);
        this.counted();
        return this.hits === hits && hits.all.length < HITS_MAX;
      });
      hits.done = true;
    } catch (error) {
      if (this.hits === hits) this.count.textContent = error.message;
      return;
    }
    hits.all.sort(byTime);
    if (this.hits === hits) this.counted();
  }

  counted() {
    const { all, at, done } = this.hits ?? { all: [] };
    const many = all.length >= HITS_MAX ? `${whole(all.length)} or more lines` : plural(all.length, "line");
    this.count.textContent = at >= 0 ? `${whole(at + 1)} of ${many}` : done ? many : `Searching: ${many}`;
  }

  /** Searches from the beginning, in as many requests as it takes; `take` says whether to go on. */
  async searched(text, path, take) {
    let rest = { member: 0, offset: 0 };
    let attempt = this.pinned ?? 0;
    while (rest) {
      const found = await get(
        path.call(this, "find", { text, from_member: rest.member, from_offset: rest.offset }, attempt),
        { signal: this.ender.signal },
      );
      if (!take(found.hits)) return;
      ({ rest, attempt } = found);
    }
  }

  async step(by) {
    if (!this.search.value || chosen("grep")) return;
    if (this.hits?.text !== this.search.value) {
      this.look();
      return;
    }
    const hits = this.hits;
    const count = hits.all.length;
    if (!count) {
      if (hits.done) this.counted();
      return;
    }
    if (hits.at < 0) {
      // the first one below what is shown
      const key = this.firstShown()?.line;
      const begin =
        this.follow.checked || !key
          ? count - (by > 0 ? 1 : 0)
          : hits.all.findIndex((one) => one.at_ms > key.at || (one.at_ms === key.at && one.offset >= key.offset));
      hits.at = begin < 0 ? 0 : by > 0 ? begin : begin - 1;
    } else hits.at += by;
    hits.at = (hits.at + count) % count;
    this.counted();
    this.go(hits.all[hits.at]);
  }

  go({ member, offset }) {
    const key = `${member}:${offset}`;
    const row = this.row(key);
    this.follow.checked = false;
    choose("line", key);
    choose("seek", "");
    if (row) this.mark(row, true);
    else this.again(key);
  }

  /** Of all members, also those that are not shown. */
  async firstError() {
    const found = [];
    this.count.textContent = "Searching for errors";
    try {
      await this.searched(
        "",
        (what, more, attempt) => this.path(what, more, attempt, this.total < 2 ? 0 : null),
        (hits) => found.push(...hits),
      );
    } catch (error) {
      this.count.textContent = error.message;
      return;
    }
    const first = found.sort(byTime)[0];
    const failed = this.job?.gang.find((one) => one.code);
    this.count.textContent = first ? "" : "No errors found";
    const member = first?.member ?? (this.pinned === this.job?.attempt ? failed?.member : undefined);
    if (member === undefined) return;
    if (this.total > 1 && (chosen("grep") || !this.part?.members.includes(member))) {
      choose("member", this.part?.members.includes(member) ? chosen("member") : String(member));
      this.member.value = chosen("member") || ALL;
      this.part = null;
    }
    if (chosen("grep")) {
      choose("grep", "");
      this.only.checked = false;
      this.part = null;
    }
    if (first) {
      this.go(first);
      return;
    }
    this.count.textContent += `. Last lines of member ${member}, which exited with code ${failed.code}`;
    choose("member", this.total > 1 ? String(member) : "");
    this.member.value = chosen("member") || ALL;
    this.follows();
  }

  async link() {
    const row = this.box.querySelector("[aria-current]") ?? this.firstShown();
    if (!row?.dataset.line) return;
    choose("attempt", String(this.pinned));
    choose("line", row.dataset.line);
    choose("seek", "");
    this.mark(row);
    try {
      await navigator.clipboard.writeText(location.href);
      toast("Link copied");
    } catch {
      toast("The link is in the address bar");
    }
  }

  /** What is chosen, from its beginning, as one file. */
  async download() {
    this.loader.disabled = true;
    const written = [];
    const lines = new Map();
    let places = "";
    let size = 0;
    let attempt = this.pinned ?? 0;
    let one = true;
    let member = 0;
    try {
      for (;;) {
        const part = await get(this.path("part", { ...(places ? { places } : {}), ...this.grep() }, attempt), {
          signal: this.ender.signal,
        });
        ({ attempt } = part);
        one = part.members.length === 1;
        [member] = part.members;
        for (const piece of part.pieces) {
          const data = bytesOf(piece.data);
          size += data.length;
          if (one) written.push(data);
          else labeled(lines, piece.member, data, written);
        }
        if (size > SAVED_BYTES_MAX)
          throw new Error(`Too large for the browser: run shoal logs ${this.id} --output ${this.id}.log`);
        if (part.ends.join() === places || part.ends.every((end, at) => end >= part.sizes[at])) break;
        places = part.ends.join();
        this.state.textContent = `${bytes(size)} read`;
      }
      for (const [of, rest] of lines) if (rest.length) written.push(`[${of}] `, ...rest, "\n");
      save(`${this.id}${one && this.total > 1 ? `.${member}` : ""}.log`, written);
      this.state.textContent = "Downloaded";
    } catch (error) {
      if (error.name !== "AbortError") this.state.textContent = error.message;
    }
    this.loader.disabled = false;
  }

  ender = new AbortController();

  stop() {
    this.run += 1;
    this.stopper?.abort();
    this.ender.abort();
    this.light.stop();
    this.offered();
    this.hits = null;
    removeEventListener("shoal-theme", this.recolor);
    globalThis.Highlight && CSS.highlights.delete("log-find");
  }
}

const byTime = (a, b) => a.at_ms - b.at_ms || a.member - b.member || a.offset - b.offset;

/** Whole lines with the member's number before them; `lines` keeps what is not complete. */
function labeled(lines, member, data, written) {
  let rest = lines.get(member) ?? [];
  let from = 0;
  for (let end = data.indexOf(10); end >= 0; end = data.indexOf(10, from)) {
    written.push(`[${member}] `, ...rest, data.subarray(from, end + 1));
    rest = [];
    from = end + 1;
  }
  if (from < data.length) rest.push(data.subarray(from));
  lines.set(member, rest);
}
