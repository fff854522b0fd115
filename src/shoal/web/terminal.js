// Shows a stream of text as a terminal would: only the last state of a line that is overwritten.

const ESCAPE = /\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z\\^-~])/g; // eslint-disable-line no-control-regex
const UNFINISHED = /(?:\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]{0,4096}\x1b?|[ -/]*)?|\r)$/; // eslint-disable-line no-control-regex
const LINE_MAX = 64 * 1024;

/** `feed` returns the complete lines; `line` is the unfinished one. */
export class Terminal {
  constructor() { this.held = ""; this.line = ""; }

  feed(text) {
    let fresh = this.held + text;
    this.held = UNFINISHED.exec(fresh)?.[0] ?? "";
    fresh = fresh.slice(0, fresh.length - this.held.length).replace(ESCAPE, "").replace(/\r+\n/g, "\n");
    const lines = (this.line + fresh).split("\n").map((line) => line.slice(line.lastIndexOf("\r") + 1));
    this.line = lines.pop();
    if (this.line.length > LINE_MAX) { lines.push(this.line); this.line = ""; }
    return lines.length ? `${lines.join("\n")}\n` : "";
  }
}
