// The live output of a member.

import { get } from "./api.js";
import { h, plural } from "./dom.js";
import { Terminal } from "./terminal.js";

const BEGIN_BYTES = 64 * 1024;
const KEPT_CHARACTERS = 400_000;
const WAIT_S = 20;
const UP = new Set(["PageUp", "ArrowUp", "Home"]);

export class LogView {
  constructor(id) {
    this.id = id;
    this.member = h("select", { "aria-label": "Member", onchange: () => this.again() });
    this.attempt = h("select", { "aria-label": "Attempt", onchange: () => this.again() });
    this.state = h("span", { class: "dim small", role: "status" });
    this.text = h("pre", { class: "log", tabindex: "0", "aria-label": "Output" });
    this.follow = h("input", { type: "checkbox", checked: true, id: "follow" });
    this.element = h("section", { class: "card", "aria-label": "Log" }, h("div", { class: "row" }, h("h2", {}, "Log"), this.member, this.attempt, h("label", { class: "small dim log-follow" }, this.follow, "follow"), h("span", { class: "push" }, this.state)), this.text);
    this.run = 0;
    this.shape = "";
    this.top = 0; this.tall = 0;
    this.text.addEventListener("scroll", () => this.scrolled(), { passive: true });
    // A smooth scroll up starts near the end, so wheel and keys stop following before it moves.
    this.text.addEventListener("wheel", (event) => { if (event.deltaY < 0) this.follow.checked = false; }, { passive: true });
    this.text.addEventListener("keydown", (event) => { if (UP.has(event.key)) this.follow.checked = false; });
  }

  /** Scrolling up stops following, and scrolling to the end starts it again, by any means. */
  scrolled() {
    const { scrollTop, scrollHeight } = this.text;
    if (scrollTop < this.top && scrollHeight === this.tall) this.follow.checked = false;
    else if (scrollTop > this.top && this.atEnd()) this.follow.checked = true;
    this.top = scrollTop; this.tall = scrollHeight;
  }

  atEnd() { return this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 40; }

  /** Updates the members and attempts to choose from. */
  know(job) {
    const count = Math.max(job.spec.members, job.gang.length, 1), newest = job.attempt;
    const shape = `${count}/${newest}`;
    if (shape === this.shape) return;
    const first = !this.shape, following = this.attempt.value === "" || this.attempt.value === "0";
    this.shape = shape;
    const member = this.member.value || "0";
    this.member.replaceChildren(...Array.from({ length: Math.min(count, 512) }, (_, at) => h("option", { value: at, selected: String(at) === member }, `member ${at}`)));
    this.member.hidden = count < 2;
    const attempt = this.attempt.value || "0";
    this.attempt.replaceChildren(h("option", { value: 0, selected: attempt === "0" }, newest ? `newest attempt (${newest})` : "newest attempt"), ...Array.from({ length: Math.max(0, newest - 1) }, (_, at) => newest - 1 - at).slice(0, 50).map((number) => h("option", { value: number, selected: String(number) === attempt }, `attempt ${number}`)));
    this.attempt.hidden = newest < 2;
    if (first || following) this.again();
  }

  again() {
    const run = ++this.run;
    this.stopper?.abort();
    this.stopper = new AbortController();
    this.terminal = new Terminal();
    this.last = document.createTextNode(""); // the unfinished line
    this.text.replaceChildren(this.last);
    this.read(run, this.stopper.signal);
  }

  async read(run, signal) {
    const decoder = new TextDecoder("utf-8");
    const base = `/v1/jobs/${encodeURIComponent(this.id)}/logs?member=${this.member.value || 0}&attempt=${this.attempt.value || 0}`;
    let offset = -BEGIN_BYTES, pause = 0;
    while (run === this.run) {
      try {
        const piece = await get(`${base}&offset=${offset}${offset < 0 ? "" : `&wait_s=${WAIT_S}`}`, { signal });
        if (run !== this.run) return;
        const bytes = Uint8Array.from(atob(piece.data), (letter) => letter.charCodeAt(0));
        this.add(decoder.decode(bytes, { stream: true }));
        if (offset < 0 && piece.offset > 0) this.text.prepend(`[${plural(piece.offset, "byte")} before this: run shoal logs ${this.id}]\n`);
        offset = piece.next_offset;
        this.state.textContent = piece.ended ? "ended" : "live";
        pause = 0;
        if (piece.ended) { if (!this.text.textContent) this.last.nodeValue = "(no output)"; return; }
      } catch (error) {
        if (error.name === "AbortError" || run !== this.run) return;
        this.state.textContent = error.message;
        pause = Math.min(8000, (pause || 500) * 2);
        await new Promise((resolve) => setTimeout(resolve, pause));
      }
    }
  }

  add(text) {
    if (!text) return;
    const done = this.terminal.feed(text);
    if (done) this.last.before(done);
    if (this.last.nodeValue !== this.terminal.line) this.last.nodeValue = this.terminal.line;
    const all = this.text.textContent;
    if (all.length > KEPT_CHARACTERS) this.text.replaceChildren(all.slice(-KEPT_CHARACTERS / 2, all.length - this.last.length), this.last);
    if (this.follow.checked) this.text.scrollTop = this.text.scrollHeight;
    this.top = this.text.scrollTop; this.tall = this.text.scrollHeight;
  }

  stop() { this.run += 1; this.stopper?.abort(); }
}
