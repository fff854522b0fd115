// What a terminal would show of a stream of text: of a line that is written over, its last state.

const ESCAPE = /\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z\\^-~])/g; // eslint-disable-line no-control-regex
const UNFINISHED = /(?:\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]{0,4096}\x1b?|[ -/]*)?|\r)$/; // eslint-disable-line no-control-regex
const LINE_MAX = 64 * 1024;

/** `feed` returns the lines that are complete; `line` is the one that is still written. */
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
