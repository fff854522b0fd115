// The arithmetic of charts: round numbers on axes, smoothing, and as many points as can be seen.

import { clock, short, span } from "./dom.js";

const TICKS_MAX = 100;

/** About `count` round numbers. */
export function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((one) => one >= raw * (1 - 1e-9));
  return spaced(low, high, step, 0);
}

/** Round numbers for a logarithmic axis: powers of ten, and 2 and 5 times these where there is room. */
export function decades(low, high) {
  const wide = Math.log10(high / low);
  const factors = wide < 1 ? [1, 1.5, 2, 3, 4, 5, 7] : wide < 2.5 ? [1, 2, 5] : [1];
  const found = [];
  const every = Math.max(1, Math.ceil(wide / 6));
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high) + 1e-9; power += every)
    found.push(...factors.map((factor) => Number((factor * 10 ** power).toPrecision(3))));
  const inside = found.filter((one) => one >= low * (1 - 1e-9) && one <= high * (1 + 1e-9));
  return inside.length > 1 ? inside : ticks(low, high, 3).filter((one) => one > 0);
}

/** A number beside an axis, where there is room for six characters. */
export function label(number) {
  const text = short(number);
  return text.length > 6
    ? number
        .toExponential(2)
        .replace(/\.?0*e/, "e")
        .replace("e+", "e")
    : text;
}

const SECOND = 1000;
const MINUTE = 60 * SECOND;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;
const SPANS = [1, 2, 5, 10, 15, 30]
  .flatMap((n) => [n * SECOND, n * MINUTE])
  .concat(
    [1, 2, 3, 6, 12].map((n) => n * HOUR),
    [1, 2, 7, 14, 28, 91, 364].map((n) => n * DAY),
  )
  .sort((a, b) => a - b);

/** Round moments: { at, text }. `since`: x counts from a start instead of being a moment. */
export function timeTicks(low, high, count, since) {
  if (!(high - low > SECOND)) return [{ at: low, text: since ? span(low) : clock(low) }];
  const step = SPANS.find((one) => one >= (high - low) / count) ?? SPANS.at(-1);
  const zone = since ? 0 : new Date(low).getTimezoneOffset() * MINUTE;
  return spaced(low, high, step, zone).map((at) => ({ at, text: since ? spanExact(at, step) : dated(at, step) }));
}
function dated(ms, step) {
  const date = new Date(ms);
  /** @type {Intl.DateTimeFormatOptions} */
  const day = { day: "numeric", month: "short" };
  if (step >= DAY) return date.toLocaleDateString("en-GB", day);
  return step >= 6 * HOUR
    ? date.toLocaleString("en-GB", { ...day, hour: "2-digit", minute: "2-digit" })
    : clock(ms).slice(0, step < MINUTE ? 8 : 5);
}
/** A tick is a round number of its unit, so nothing is lost by rounding to it. */
function spanExact(ms, step) {
  if (!ms) return "0";
  const [unit, name] =
    step < MINUTE && ms < 10 * MINUTE
      ? [SECOND, "s"]
      : step < HOUR && ms < 10 * HOUR
        ? [MINUTE, "min"]
        : ms < 4 * DAY
          ? [HOUR, "h"]
          : [DAY, "d"];
  return `${Number((ms / unit).toFixed(1))} ${name}`;
}
function spaced(low, high, step, zone) {
  const first = Math.ceil((low - zone) / step - 1e-9);
  const count = Math.min(TICKS_MAX, Math.floor((high - zone) / step + 1e-6) - first + 1);
  return count > 0
    ? Array.from({ length: count }, (_, at) => Number(((first + at) * step + zone).toPrecision(15)))
    : [low];
}

/** The lowest and the highest point of each pixel, in order, because more cannot be seen. `of`: which value of a
 * point; `positive`: without those that a logarithmic scale cannot show. */
export function thin(points, of, X, positive) {
  const found = [];
  let pixel = NaN;
  let low = null;
  let high = null;
  const put = () => {
    if (!low) return;
    found.push(low[0] <= high[0] ? low : high);
    if (low !== high) found.push(low[0] <= high[0] ? high : low);
  };
  for (const point of points) {
    if (positive && !(point[of] > 0)) continue;
    const mine = Math.floor(X(point[0]));
    if (mine !== pixel) {
      put();
      pixel = mine;
      low = high = point;
    }
    if (point[of] < low[of]) low = point;
    if (point[of] > high[of]) high = point;
  }
  put();
  return found;
}

/** An exponential mean that begins at the first value, as TensorBoard draws it. */
export function smooth(values, weight) {
  let sum = 0;
  let whole = 0;
  return values.map((value) => {
    sum = sum * weight + (1 - weight) * value;
    whole = whole * weight + (1 - weight);
    return sum / whole;
  });
}

/** After a failure steps are repeated. The newest value of a step replaces the earlier ones. */
export function rising(points) {
  const found = [];
  for (const point of points) {
    while (found.length && found.at(-1)[0] >= point[0]) found.pop();
    found.push(point);
  }
  return found;
}

/** The index of the first point at or after x; the length if there is none. */
export function from(points, x, of = 0) {
  let low = 0;
  let high = points.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][of] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

export function nearest(points, x, of = 0) {
  const at = Math.min(points.length - 1, from(points, x, of));
  return at && Math.abs(points[at - 1][of] - x) < Math.abs(points[at][of] - x) ? at - 1 : at;
}
