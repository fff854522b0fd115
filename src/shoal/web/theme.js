// Applies the chosen theme, if any, before the page is drawn.
try {
  const chosen = localStorage.getItem("shoal-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  /* without storage, use the system's setting */
}
