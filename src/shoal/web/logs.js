// The live output of a job: of one member, or of all with their numbers before each line. The choices
// are in the address.

import { choose, chosen } from "./address.js";
import { get } from "./api.js";
import { bytes, h, plural } from "./dom.js";
import { bytesOf, outputOf, save } from "./save.js";
import { Terminal } from "./terminal.js";

const BEGIN_BYTES = 64 * 1024;
const KEPT_CHARACTERS = 400_000;
const WAIT_S = 20;
const ALL = "all";
const TOGETHER_MAX = 32; // members that are shown at once
const EACH_MS = 100; // the pause between looks at several members, for each of them
const UP = new Set(["PageUp", "ArrowUp", "Home"]);

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export class LogView {
  constructor(id) {
    this.id = id;
    this.member = h("select", { "aria-label": "Member", onchange: () => this.pick("member", this.member.value, ALL) });
    this.attempt = h("select", { "aria-label": "Attempt", onchange: () => this.pick("attempt", this.attempt.value, "0") });
    this.search = h("input", { type: "search", "aria-label": "Only lines that contain", placeholder: "Only lines with …", value: chosen("grep"), maxlength: 256 });
    this.state = h("span", { class: "dim small", role: "status" });
    this.text = h("pre", { class: "log", role: "region", tabindex: "0", "aria-label": "Output" });
    this.follow = h("input", { type: "checkbox", checked: true, id: "follow" });
    this.loader = h("button", { onclick: () => this.download() }, "Download");
    const form = h("form", { role: "search" }, this.search);
    const find = (event) => { event.preventDefault(); this.pick("grep", this.search.value, ""); };
    form.addEventListener("submit", find);
    this.search.addEventListener("search", find); // the cross that empties it
    this.element = h("section", { class: "card", "aria-label": "Log" }, h("div", { class: "row" }, h("h2", {}, "Log"), this.member, this.attempt, form, h("label", { class: "small dim log-follow" }, this.follow, "follow"), h("span", { class: "push row" }, this.state, this.loader)), this.text);
    this.run = 0;
    this.shape = "";
    this.top = 0; this.tall = 0;
    this.text.addEventListener("scroll", () => this.scrolled(), { passive: true });
    // A smooth scroll up starts near the end, so wheel and keys stop following before it moves.
    this.text.addEventListener("wheel", (event) => { if (event.deltaY < 0) this.follow.checked = false; }, { passive: true });
    this.text.addEventListener("keydown", (event) => { if (UP.has(event.key)) this.follow.checked = false; });
  }

  pick(name, value, usual) {
    if ((chosen(name) || usual) === value) return;
    choose(name, value === usual ? "" : value);
    this.again();
  }

  /** Scrolling up stops following, and scrolling to the end starts it again, by any means. */
  scrolled() {
    const { scrollTop, scrollHeight } = this.text;
    if (scrollTop < this.top && scrollHeight === this.tall) this.follow.checked = false;
    else if (scrollTop > this.top && this.atEnd()) this.follow.checked = true;
    this.top = scrollTop; this.tall = scrollHeight;
  }

  atEnd() { return this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 40; }

  /** Updates the members and attempts to choose from. An array has no output of its own. */
  know(job) {
    this.element.hidden = Boolean(job.array);
    if (job.array) return;
    const count = Math.max(job.spec.members, job.gang.length, 1), newest = job.attempt;
    const shape = `${count}/${newest}`;
    if (shape === this.shape) return;
    const first = !this.shape;
    this.shape = shape;
    this.count = count;
    const member = chosen("member") || ALL, attempt = chosen("attempt") || "0";
    const whole = count > TOGETHER_MAX ? `members 0 to ${TOGETHER_MAX - 1}` : "all members";
    this.member.replaceChildren(h("option", { value: ALL, selected: member === ALL }, whole), ...Array.from({ length: Math.min(count, 512) }, (_, at) => h("option", { value: at, selected: String(at) === member }, `member ${at}`)));
    this.member.hidden = count < 2;
    this.attempt.replaceChildren(h("option", { value: 0, selected: attempt === "0" }, newest ? `newest attempt (${newest})` : "newest attempt"), ...Array.from({ length: Math.max(0, newest - 1) }, (_, at) => newest - 1 - at).slice(0, 50).map((number) => h("option", { value: number, selected: String(number) === attempt }, `attempt ${number}`)));
    this.attempt.hidden = newest < 2;
    if (first || attempt === "0") this.again();
  }

  /** The numbers of the members that are shown. */
  members() {
    const member = chosen("member");
    if (/^\d+$/.test(member)) return [Number(member)];
    return Array.from({ length: Math.min(this.count ?? 1, TOGETHER_MAX) }, (_, at) => at);
  }

  pinned() { return /^\d+$/.test(chosen("attempt")) ? Number(chosen("attempt")) : 0; }

  path(member) {
    const grep = chosen("grep");
    return `/v1/jobs/${encodeURIComponent(this.id)}/logs?member=${member}${grep ? `&grep=${encodeURIComponent(grep)}` : ""}`;
  }

  again() {
    const run = ++this.run;
    this.stopper?.abort();
    this.stopper = new AbortController();
    this.last = document.createTextNode(""); // the unfinished line
    this.text.replaceChildren(this.last);
    this.state.textContent = "";
    this.read(run, this.stopper.signal);
  }

  async read(run, signal) {
    const numbers = this.members(), several = numbers.length > 1, grep = chosen("grep");
    const attempt = this.pinned();
    // A search starts at the beginning, because its lines may be anywhere.
    const begin = grep ? 0 : -Math.ceil(BEGIN_BYTES / numbers.length);
    const sources = numbers.map((number) => ({ number, prefix: several ? `[${number}] ` : "", base: `${this.path(number)}&attempt=${attempt}`, offset: begin, ended: false, decoder: new TextDecoder("utf-8"), terminal: new Terminal() }));
    let wait = 0;
    while (run === this.run) {
      try {
        const open = sources.filter((one) => !one.ended);
        let fresh = false;
        for (const one of open) {
          fresh = (await this.piece(run, signal, one, several)) || fresh;
          if (run !== this.run) return;
        }
        wait = 0;
        const ended = sources.every((one) => one.ended);
        this.state.textContent = ended ? "ended" : "live";
        if (ended) { if (!this.text.textContent) this.last.nodeValue = grep ? "(no line contains this)" : "(no output)"; return; }
        if (several && !fresh) await pause(Math.max(500, EACH_MS * open.length));
      } catch (error) {
        if (error.name === "AbortError" || run !== this.run) return;
        this.state.textContent = error.message;
        if (error.status === 422) return;
        wait = Math.min(8000, (wait || 500) * 2);
        await pause(wait);
      }
    }
  }

  /** Reads on in the output of one member; returns whether more may be there already. */
  async piece(run, signal, one, several) {
    const asked = one.offset;
    const piece = await get(`${one.base}&offset=${asked}${asked < 0 || several ? "" : `&wait_s=${WAIT_S}`}`, { signal });
    if (run !== this.run) return false;
    if (asked < 0 && piece.offset > 0) this.text.prepend(`${one.prefix}[${plural(piece.offset, "byte")} before this: use Download]\n`);
    let done = one.terminal.feed(one.decoder.decode(bytesOf(piece.data), { stream: true }));
    if (piece.ended && several && one.terminal.line) done += one.terminal.feed("\n");
    if (one.prefix && done) done = done.slice(0, -1).split("\n").map((line) => `${one.prefix}${line}\n`).join("");
    this.add(done, several ? "" : one.terminal.line);
    one.ended = piece.ended;
    one.offset = piece.next_offset;
    return piece.next_offset > Math.max(0, asked);
  }

  add(done, line) {
    if (!done && this.last.nodeValue === line) return;
    if (done) this.last.before(done);
    if (this.last.nodeValue !== line) this.last.nodeValue = line;
    const all = this.text.textContent;
    if (all.length > KEPT_CHARACTERS) this.text.replaceChildren(all.slice(-KEPT_CHARACTERS / 2, all.length - this.last.length), this.last);
    if (this.follow.checked) this.text.scrollTop = this.text.scrollHeight;
    this.top = this.text.scrollTop; this.tall = this.text.scrollHeight;
  }

  /** What is chosen, from its beginning, as one file. */
  async download() {
    const numbers = this.members();
    this.loader.disabled = true;
    try {
      const parts = [];
      for (const number of numbers) {
        const found = await outputOf(this.path(number), this.pinned(), `shoal logs ${this.id} --output ${this.id}.log`, (size) => { this.state.textContent = `${bytes(size)} read`; });
        if (numbers.length === 1) { parts.push(...found); continue; }
        const lines = (await new Blob(found).text()).replace(/\n$/, "").split("\n");
        if (found.some((part) => part.length)) parts.push(lines.map((line) => `[${number}] ${line}\n`).join(""));
      }
      save(`${this.id}${numbers.length === 1 && this.count > 1 ? `.${numbers[0]}` : ""}.log`, parts);
      this.state.textContent = "downloaded";
    } catch (error) { this.state.textContent = error.message; }
    this.loader.disabled = false;
  }

  stop() { this.run += 1; this.stopper?.abort(); }
}
