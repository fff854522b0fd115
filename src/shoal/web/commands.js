// What the palette can do. The frame offers views and things; an open view offers its own actions.

const sources = new Set();

/** `source` gets the words typed so far and returns commands: { title, hint, run }, and `keep`, which
 * lists it whatever was typed. It may return a promise. Returns how to take the offer back. */
export function offer(source) {
  sources.add(source);
  return () => sources.delete(source);
}

/** Calls `show` with all commands that match, again when slow sources answer. */
export function find(text, show) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = new Map();
  const fits = (one) =>
    one.keep || words.every((word) => `${one.title} ${one.hint ?? ""}`.toLowerCase().includes(word));
  const told = () =>
    show([...sources].flatMap((source) => found.get(source) ?? []).sort((a, b) => rank(a, words) - rank(b, words)));
  for (const source of sources) {
    const answer = source(text);
    const take = (all) => found.set(source, all.filter(fits));
    if (answer instanceof Promise)
      answer.then(
        (all) => {
          take(all);
          told();
        },
        () => {},
      );
    else take(answer);
  }
  told();
}

/** The thing itself before what begins like it, and that before what has the words somewhere. */
function rank(one, words) {
  if (!words.length) return 0;
  const title = one.title.toLowerCase();
  const text = words.join(" ");
  if (title === text || title.startsWith(`${text} `)) return 0;
  return title.startsWith(words[0]) ? 1 : 2;
}
