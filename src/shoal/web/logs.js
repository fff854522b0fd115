// What a member writes, as it writes it.

import { get } from "./api.js";
import { h, plural } from "./dom.js";

const BEGIN_BYTES = 64 * 1024;
const KEPT_CHARACTERS = 400_000;
const WAIT_S = 20;

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
    this.text.addEventListener("wheel", () => { this.follow.checked = this.atEnd(); }, { passive: true });
  }

  atEnd() { return this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 40; }

  /** The job is so far: which members and attempts there are to choose from. */
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
    this.text.replaceChildren();
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
        if (offset < 0 && piece.offset > 0) this.text.prepend(`[${plural(piece.offset, "byte")} before this are in: shoal logs ${this.id}]\n`);
        offset = piece.next_offset;
        this.state.textContent = piece.ended ? "ended" : "live";
        pause = 0;
        if (piece.ended) { if (!this.text.textContent) this.text.textContent = "(it wrote nothing)"; return; }
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
    // Colours and cursor moves of terminals are not for a page; of a line written over, the last counts.
    // eslint-disable-next-line no-control-regex
    const clean = text.replace(/\x1b\[[0-9;?]*[A-Za-z]/g, "").replace(/\r\n/g, "\n").replace(/[^\n]*\r(?!\n)/g, "");
    this.text.append(clean);
    if (this.text.textContent.length > KEPT_CHARACTERS) this.text.textContent = this.text.textContent.slice(-KEPT_CHARACTERS / 2);
    if (this.follow.checked) this.text.scrollTop = this.text.scrollHeight;
  }

  stop() { this.run += 1; this.stopper?.abort(); }
}
