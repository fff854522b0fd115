// The choices of a view, in its address after "?", so that a link shows the same view.

const split = () => (location.hash || "#/").split("?", 2);

export const chosen = (name) => new URLSearchParams(split()[1] ?? "").get(name) ?? "";

/** Replaces the address without a new entry in the history; an empty value removes the choice. */
export function choose(name, value) {
  const [path, query] = split();
  const choices = new URLSearchParams(query ?? "");
  if (value) choices.set(name, value);
  else choices.delete(name);
  history.replaceState(null, "", choices.size ? `${path}?${choices}` : path);
}
