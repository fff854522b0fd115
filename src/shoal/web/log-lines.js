// Lines out of pieces of output, and the elements that show them.

import { clock, h } from "./dom.js";
import { colors, parts } from "./terminal.js";

const LINE_BYTES = 64 * 1024; // a longer line is shown in parts
const SHOWN_CHARACTERS = 16_000; // of one line
const decoder = new TextDecoder("utf-8");

/** The lines of one member: `tell` gets each with its place, and again while it is not complete. */
export class Lines {
  constructor(tell = null) {
    this.tell = tell;
    this.carry = {};
    this.reset();
  }

  reset() {
    this.bytes = null;
    this.row = null;
  }

  feed(piece, data) {
    if (piece.next_offset - piece.offset !== data.length) {
      // a gap
      this.flush();
      this.tell(this.line(piece, piece.offset, piece.next_offset, data, true), null);
      return;
    }
    let from = 0;
    for (let end = data.indexOf(10); end >= 0; end = data.indexOf(10, from)) {
      this.add(piece, data.subarray(from, end), piece.offset + from);
      this.end += 1;
      this.flush();
      from = end + 1;
    }
    if (from < data.length) {
      this.add(piece, data.subarray(from), piece.offset + from);
      this.show(false);
    }
  }

  add(piece, data, offset) {
    if (!this.bytes) {
      this.bytes = data;
      this.begin = offset;
      this.at = piece.at_ms;
    } else {
      const both = new Uint8Array(this.bytes.length + data.length);
      both.set(this.bytes);
      both.set(data, this.bytes.length);
      this.bytes = both;
    }
    this.end = offset + data.length;
    if (this.bytes.length <= LINE_BYTES) return;
    // A bar that writes over itself for hours: only its last state counts.
    const over = this.bytes.lastIndexOf(13, this.bytes.length - 2);
    if (over > 0) this.bytes = this.bytes.slice(over);
    else this.flush();
  }

  flush() {
    if (this.bytes) this.show(true);
    this.reset();
  }

  show(done) {
    this.row = this.tell(this.line({}, this.begin, this.end, this.bytes, done), this.row);
  }

  /** Colors go on from line to line, so what a line leaves counts only when it is complete. */
  /** @param {{ at_ms?: number }} piece */
  line({ at_ms: at = this.at }, offset, end, bytes, done) {
    const carry = { ...this.carry };
    const found = parts(decoder.decode(bytes), carry);
    if (done) this.carry = carry;
    return { offset, end, at, done, parts: found };
  }
}

const CLASSES = ["bold", "italic", "under", "strike"];

function span({ text, style }) {
  const names = CLASSES.filter((name) => style[name]);
  const { ink, paper } =
    style.ink !== undefined || style.paper !== undefined || style.swap || style.dim ? colors(style) : {};
  if (!names.length && !ink) return text;
  return h(
    "span",
    {
      class: names.join(" ") || null,
      style: { ...(ink ? { color: ink } : {}), ...(paper ? { background: paper } : {}) },
    },
    text,
  );
}

/** The element of a line, a new one or the one that it had before it was complete. */
export function draw(line, member, several, row, anew = false) {
  const key = `${member}:${line.offset}`;
  const text = line.parts.reduce((sum, one) => sum + one.text.length, 0);
  if (
    !anew &&
    row &&
    row.line.parts.length === 1 &&
    line.parts.length === 1 &&
    row.lastChild.nodeType === Node.TEXT_NODE &&
    line.parts[0].text.startsWith(row.line.parts[0].text) &&
    text < SHOWN_CHARACTERS
  ) {
    row.lastChild.appendData(line.parts[0].text.slice(row.line.parts[0].text.length)); // selected text stays
  } else {
    let left = SHOWN_CHARACTERS;
    const shown = [];
    for (const one of line.parts) {
      if (left > 0) shown.push(span({ ...one, text: one.text.slice(0, left) }));
      left -= one.text.length;
    }
    if (left < 0) shown.push(h("span", { class: "dim" }, ` … ${-left} more characters (use Download)`));
    if (several) shown.unshift(h("span", { class: "dim" }, `[${member}] `));
    row ??= h("div", { class: "line", "data-line": key, "data-time": line.at ? clock(line.at) : "" });
    row.replaceChildren(...shown, ...(shown.length ? [] : [h("br", {})]));
  }
  row.line = line;
  row.member = member;
  row.size = Math.min(text, SHOWN_CHARACTERS) + 40;
  return row;
}

// -- what was looked for -----------------------------------------------------------------------

const low = (text) => text.replace(/[A-Z]+/g, (letters) => letters.toLowerCase());
const RANGES_MAX = 2000;

/** Highlights a text in all lines, without touching them. */
export function highlight(box, text) {
  if (!globalThis.Highlight) return;
  CSS.highlights.delete("log-find");
  const word = low(text);
  const ranges = [];
  if (!word) return;
  for (const row of box.children) {
    const whole = low(row.textContent);
    for (
      let at = whole.indexOf(word);
      at >= 0 && ranges.length < RANGES_MAX;
      at = whole.indexOf(word, at + word.length)
    )
      ranges.push(rangeOf(row, at, at + word.length));
  }
  CSS.highlights.set("log-find", new Highlight(...ranges));
}

function rangeOf(row, from, to) {
  const range = new Range();
  const walker = document.createTreeWalker(row, NodeFilter.SHOW_TEXT);
  const next = () => /** @type {Text | null} */ (walker.nextNode());
  for (let seen = 0, node = next(); node; node = next()) {
    if (from >= seen && from <= seen + node.length) range.setStart(node, from - seen);
    if (to <= seen + node.length) {
      range.setEnd(node, to - seen);
      break;
    }
    seen += node.length;
  }
  return range;
}
