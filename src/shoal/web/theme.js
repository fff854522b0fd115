// Before anything is drawn: the choice of light or dark, if one was made.
try {
  const chosen = localStorage.getItem("shoal-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch { /* without storage the system's choice holds */ }
