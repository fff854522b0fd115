// Updates elements in place and leaves unchanged ones alone: a button under the pointer stays that
// button, and selected text stays selected.

const held = new Map(); // updates that wait until the mouse button is up
let pressed = null;

addEventListener(
  "pointerdown",
  (event) => {
    pressed = event.target;
  },
  true,
);
for (const name of ["pointerup", "pointercancel", "blur"]) addEventListener(name, () => setTimeout(release), true);
addEventListener(
  "pointermove",
  (event) => {
    if (pressed && !event.buttons) release();
  },
  true,
);

function release() {
  pressed = null;
  const parts = [...held];
  held.clear();
  for (const [element, children] of parts) patch(element, children);
}

/** Replaces the children of an element. While a mouse button is down on it, the update waits. */
export function replace(element, ...children) {
  const wanted = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  if (pressed && element.contains(pressed)) held.set(element, wanted);
  else {
    held.delete(element);
    patch(element, wanted);
  }
}

/** Handlers are looked up at each event, so that an element can take over those of its successor. */
export function handle(element, acts) {
  element.acts = acts;
  for (const type of Object.keys(acts)) element.addEventListener(type, heard);
}
function heard(event) {
  event.currentTarget.acts?.[event.type]?.(event);
}

const keyOf = (node) => (node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("data-key") : null);

function patch(parent, wanted) {
  const nodes = wanted.map((one) => (one instanceof Node ? one : document.createTextNode(String(one))));
  const kept = successors(parent, nodes);
  const staying = new Set(kept);
  for (const child of [...parent.childNodes]) if (!staying.has(child)) child.remove();
  let at = parent.firstChild;
  kept.forEach((have, index) => {
    const node = have ?? nodes[index];
    if (have) morph(have, nodes[index]);
    if (node === at) at = at.nextSibling;
    else if (have && pinned(have)) {
      // Moving it would lose the focus or the selection, so the others move instead.
      while (at !== have) {
        const next = at.nextSibling;
        parent.append(at);
        at = next;
      }
      at = have.nextSibling;
    } else parent.insertBefore(node, at);
  });
}

/** For each wanted node the existing node to reuse, or null: by `data-key`, else by its kind. */
function successors(parent, nodes) {
  const same = new Set(nodes);
  const keyed = new Map();
  const free = [];
  for (const child of parent.childNodes) {
    if (same.has(child)) continue;
    const key = keyOf(child);
    if (key === null) free.push(child);
    else keyed.set(key, child);
  }
  return nodes.map((node) => {
    if (node.parentNode === parent) return node;
    const key = keyOf(node);
    if (key !== null) {
      const have = keyed.get(key);
      keyed.delete(key);
      return have?.nodeName === node.nodeName ? have : null;
    }
    const at = free.findIndex((child) => child.nodeName === node.nodeName);
    return at < 0 ? null : free.splice(at, 1)[0];
  });
}

function pinned(node) {
  if (node.contains(document.activeElement)) return true;
  const chosen = getSelection();
  return Boolean(chosen && !chosen.isCollapsed && node.contains(chosen.anchorNode));
}

function morph(have, want) {
  if (have === want) return;
  if (have.nodeType !== Node.ELEMENT_NODE) {
    if (have.nodeValue !== want.nodeValue) have.nodeValue = want.nodeValue;
    return;
  }
  // what the reader opened stays open
  const own = (name) => name === "style" || (name === "open" && have.nodeName === "DETAILS");
  for (const { name } of [...have.attributes]) if (!own(name) && !want.hasAttribute(name)) have.removeAttribute(name);
  for (const { name, value } of want.attributes)
    if (!own(name) && have.getAttribute(name) !== value) have.setAttribute(name, value);
  // Not as an attribute: the page's security policy forbids inline styles.
  if (have.style.cssText !== want.style.cssText) have.style.cssText = want.style.cssText;
  handle(have, want.acts ?? {});
  if (have instanceof HTMLInputElement && have !== document.activeElement) {
    have.value = want.value;
    have.checked = want.checked;
  }
  patch(have, [...want.childNodes]);
}
