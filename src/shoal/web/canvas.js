// Drawing areas: as sharp as the screen, and as wide as their box.

/**
 * A pen for an empty canvas of this size, in pixels of the page.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number} height
 */
export function penFor(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  const across = Math.max(1, Math.round(width * ratio));
  const down = Math.max(1, Math.round(height * ratio));
  if (canvas.width !== across || canvas.height !== down) {
    canvas.width = across;
    canvas.height = down;
    canvas.style.setProperty("width", `${width}px`);
    canvas.style.setProperty("height", `${height}px`);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

/**
 * Calls `act` with the width of a box, now and when it has another one.
 * @param {HTMLElement} box
 * @param {(width: number) => void} act
 */
export function watchWidth(box, act) {
  let width = 0;
  const watcher = new ResizeObserver(() => {
    const next = Math.floor(box.clientWidth);
    if (!next || next === width) return;
    width = next;
    act(width);
  });
  watcher.observe(box);
  return watcher;
}
