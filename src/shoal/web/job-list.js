// The jobs that were asked for so far: page by page, and kept current while they are few.

import { get } from "./api.js";

const PAGE = 100;
const LATER = 1000;
const FRESH_MAX = 300; // rows that are asked for again when jobs change; longer lists show what the stream tells
const EMPTY_PAGES = 20; // that are asked for in a row while a search finds nothing

export class JobList {
  constructor(changed) {
    this.changed = changed;
    this.rows = [];
    this.known = new Set();
    this.query = "";
    this.next = "";
    this.count = "";
    this.leftOut = false;
    this.problem = "";
    this.busy = false;
    this.asked = false;
    this.missed = 0;
    this.turn = 0;
  }

  stop() {
    this.stopped = true;
    this.turn += 1;
    this.call?.abort();
  }

  /** Begins anew; what is shown stays until the answer is there. */
  async begin(query) {
    this.query = query;
    this.count = "";
    if ((await this.ask("", PAGE, false)) && this.next) this.total();
  }

  more() {
    if (this.next && !this.busy) this.ask(this.next, LATER, true);
  }
  refresh() {
    if (!this.busy && this.rows.length <= FRESH_MAX) this.ask("", Math.max(PAGE, this.rows.length), false);
  }
  get fixed() {
    return this.rows.length > FRESH_MAX;
  }

  /** What the stream tells: jobs that a long list lacks are counted until it is asked for again. */
  hear(jobs) {
    for (const job of jobs)
      if (!job.array && !this.known.has(job.id)) {
        this.known.add(job.id);
        this.missed += 1;
      }
  }

  async ask(cursor, limit, add) {
    this.call?.abort();
    const call = new AbortController();
    this.call = call;
    const turn = ++this.turn;
    this.busy = true;
    if (add) this.changed();
    let found = [];
    let next = cursor;
    let leftOut = false;
    let problem = "";
    try {
      for (let tries = 0; tries < EMPTY_PAGES && !found.length && (next || !tries); tries += 1) {
        const from = next ? `&cursor=${encodeURIComponent(next)}` : "";
        found = await get(`/v1/jobs?${this.query}&limit=${limit}${from}`, {
          signal: call.signal,
          heard: (headers) => {
            next = headers.get("shoal-next") ?? "";
            leftOut = headers.has("shoal-left-out");
          },
        });
      }
    } catch (error) {
      problem = error.message;
    }
    if (turn !== this.turn) return false;
    this.busy = false;
    this.asked = true;
    this.problem = problem;
    if (!problem) {
      // A job that has moved meanwhile, in an order that changes, is shown once.
      const before = add ? this.rows : [];
      const known = new Set(before.map((row) => row.id));
      this.rows = [...before, ...found.filter((row) => !known.has(row.id))];
      this.known = new Set(this.rows.map((row) => row.id));
      this.next = next;
      this.leftOut = leftOut;
      if (!add) this.missed = 0;
    }
    this.changed();
    return !problem;
  }

  async total() {
    const query = this.query;
    let count = "";
    try {
      await get(`/v1/jobs?${query}&limit=1&count=true`, {
        heard: (headers) => {
          count = headers.get("shoal-count") ?? "";
        },
      });
    } catch {
      /* it is only a number */
    }
    if (query === this.query && count && !this.stopped) {
      this.count = count;
      this.changed();
    }
  }
}
