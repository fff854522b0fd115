// Requests to the controller. The browser sends the cookie; requests that change something also carry
// a secret that only this page has.

let csrf = "";
let signedOut = () => {};
/** @type {(path: string) => (error?: Error) => void} */
let asked = () => () => {};
let seen = 0; // the newest event that an answer showed: a head that does not know it yet waits

export class Refused extends Error {
  constructor(status, message, field = "") {
    super(field ? `${field}: ${message}` : message);
    this.status = status;
    this.field = field;
    this.plain = message;
  }
}

export const onSignedOut = (act) => {
  signedOut = act;
};
export const lapsed = () => signedOut();
/** `act` gets the path of each question, and returns what is called when it is answered or has failed. */
export const observe = (act) => {
  asked = act;
};

/**
 * `quiet`: a lapsed session is no reason to sign out. `aside`: the view does not wait for it, and stands without it.
 * `heard` gets the answer's headers, `line` each line of a stream.
 * @typedef {{
 *   signal?: AbortSignal, quiet?: boolean, aside?: boolean, heard?: (headers: Headers) => void,
 *   line?: (value: any) => void
 * }} Options
 */

/**
 * @param {string} method
 * @param {string} path
 * @param {unknown} [body]
 * @param {Options} [options]
 * @returns {Promise<any>}
 */
export async function call(method, path, body, options = {}) {
  // a question that waits for something to happen is no part of what a view shows at first
  const follow = method === "GET" && !options.quiet && !options.aside && !path.includes("wait_s=");
  const done = follow ? asked(path) : () => {};
  try {
    const answer = await once(method, path, body, options);
    done();
    return answer;
  } catch (error) {
    done(error.name === "AbortError" ? undefined : error);
    // Another tab signed in again, so this tab's secret belongs to the previous session.
    if (!(error instanceof Refused) || error.status !== 403 || method === "GET") throw error;
    const before = csrf;
    if (!(await resume()) || csrf === before) throw error;
    return once(method, path, body, options);
  }
}

/**
 * @param {string} method
 * @param {string} path
 * @param {unknown} body
 * @param {Options} options
 */
async function once(method, path, body, { signal, quiet, heard, line }) {
  /** @type {Record<string, string>} */
  const headers = { accept: "application/json" };
  if (method !== "GET") headers["x-shoal-csrf"] = csrf;
  if (body !== undefined) headers["content-type"] = "application/json";
  if (seen) headers["shoal-seq"] = String(seen);
  let response;
  try {
    response = await fetch(path, {
      method,
      headers,
      signal,
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin",
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the controller does not answer");
  }
  seen = Math.max(seen, Number(response.headers.get("shoal-seq")) || 0);
  if (response.ok) heard?.(response.headers);
  if (response.ok && line) return each(response.body, line);
  const text = await response.text();
  let answer = null;
  try {
    answer = text ? JSON.parse(text) : null;
  } catch {
    /* handled below */
  }
  if (!response.ok) {
    if (response.status === 401 && !quiet) signedOut();
    throw new Refused(response.status, answer?.message ?? `the controller answered ${response.status}`, answer?.field);
  }
  return answer;
}

/** An answer of lines of JSON: each as it comes. */
async function each(body, act) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
    const lines = (rest + piece.value).split("\n");
    rest = lines.pop();
    for (const one of lines) act(JSON.parse(one));
  }
}

/**
 * @template {string} P
 * @param {P} path
 * @param {Options} [options]
 * @returns {Promise<Answer<"GET", P>>}
 */
export const get = (path, options) => call("GET", path, undefined, options);
/**
 * @template {string} P
 * @param {P} path
 * @param {unknown} [body]
 * @param {Options} [options]
 * @returns {Promise<Answer<"POST", P>>}
 */
export const post = (path, body, options) => call("POST", path, body, options);
/**
 * @template {string} P
 * @param {P} path
 * @param {unknown} body
 * @returns {Promise<Answer<"PUT", P>>}
 */
export const put = (path, body) => call("PUT", path, body);

/** @param {string} id */
export const jobPath = (id) => /** @type {const} */ (`/v1/jobs/${encodeURIComponent(id)}`);
/** @param {string} id */
export const nodePath = (id) => /** @type {const} */ (`/v1/nodes/${encodeURIComponent(id)}`);
/** @param {string} name */
export const servicePath = (name) => /** @type {const} */ (`/v1/services/${encodeURIComponent(name)}`);

/** Names a submission, so that sending it again is safe. */
export const newKey = () =>
  [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

/**
 * Returns null instead of an error for what may not exist yet.
 * @template {string} P
 * @param {P} path
 * @param {Options} [options]
 * @returns {Promise<Answer<"GET", P> | null>}
 */
export async function maybe(path, options) {
  try {
    return await get(path, options);
  } catch (error) {
    if (error instanceof Refused && (error.status === 404 || error.status === 405)) return null;
    throw error;
  }
}

/** Whether people can sign in at an OpenID provider. */
export let openid = false;
/** Who is signed in: user, tenant ("*": all), role, and the id of the token ("": the operator's own). */
export let me = { user: "", tenant: "", role: "viewer", token: "" };
export const mayChange = () => me.role !== "viewer";
export const isAdmin = () => me.role === "admin";
function take(session) {
  csrf = session.csrf;
  me = { user: session.user, tenant: session.tenant, role: session.role, token: session.token };
}
export async function resume() {
  const session = await get("/v1/session", { aside: true });
  take(session);
  openid = session.openid;
  return csrf !== "";
}
export async function signIn(secret) {
  take(await call("POST", "/v1/session", secret, { quiet: true }));
}
export const signOut = () => post("/v1/session/end");
