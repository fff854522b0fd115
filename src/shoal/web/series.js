// Curves of jobs and nodes, fetched in pieces: first all, then what is new.

import { jobPath, maybe, nodePath } from "./api.js";

const POINTS_MAX = 1500; // then all is fetched again, in which old points are further apart

/** One request at a time, so that no point is added twice. What does not exist is not asked for again. */
class Pieces {
  held = null;
  busy = null;
  gone = false;
  /**
   * @param {import("./api.js").Options} [_options]
   * @returns {Promise<any>}
   */
  ask(_options) {
    throw new Error("each kind of curve asks for its own");
  }
  more(options) {
    if (this.gone) return Promise.resolve(null);
    this.busy ??= this.ask(options)
      .then((found) => {
        this.gone = !found;
        return found;
      })
      .finally(() => {
        this.busy = null;
      });
    return this.busy;
  }
}

const grow = (have, more) => {
  for (const [name, values] of Object.entries(more)) if (Array.isArray(values)) have[name] = [...have[name], ...values];
};

/** `more()` returns what `/v1/jobs/ID/series` has, or null if there is no such job. `members`: also of each member. */
export class JobCurve extends Pieces {
  constructor(id, members = true) {
    super();
    this.path = `${jobPath(id)}/series?members=${members}`;
  }

  async ask(options) {
    const last = this.held?.points.at(-1)?.at_ms ?? 0;
    const whole = !last || this.held.points.length > POINTS_MAX;
    const fresh = await maybe(whole ? this.path : `${this.path}&since_ms=${last}`, options);
    if (!fresh || whole) {
      this.held = fresh;
      return fresh;
    }
    // Points that were merged meanwhile are fetched again, so that no gap is left between old and new ones.
    if (fresh.width_ms !== this.held.width_ms) {
      this.held = await maybe(this.path, options);
      return this.held;
    }
    this.held.points.push(...fresh.points);
    for (const one of fresh.metrics) this.add("metrics", one, (other) => other.name === one.name);
    for (const one of fresh.members)
      this.add("members", one, (other) => other.attempt === one.attempt && other.member === one.member);
    return this.held;
  }

  add(part, one, same) {
    const have = this.held[part].find(same);
    if (have) grow(have, one);
    else this.held[part].push(one);
  }
}

/** The same of a node; `since`: nothing before it. */
export class NodeCurve extends Pieces {
  constructor(id, since) {
    super();
    this.path = `${nodePath(id)}/series`;
    this.since = since;
  }

  async ask(options) {
    const last = this.held?.at_ms.at(-1) ?? 0;
    const whole = !last || this.held.at_ms.length > POINTS_MAX;
    const fresh = await maybe(`${this.path}?since_ms=${whole ? this.since : last}`, options);
    if (!fresh || whole || fresh.gpus.length !== this.held.gpus.length) {
      this.held = fresh;
      return fresh;
    }
    const gpus = this.held.gpus;
    for (const [at, one] of fresh.gpus.entries()) grow(gpus[at], one);
    grow(this.held, { ...fresh, gpus: null });
    return this.held;
  }
}
