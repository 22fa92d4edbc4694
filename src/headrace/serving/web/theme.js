// Before the first paint: the colours that were chosen last. "auto" follows the system.
"use strict";
try {
  const chosen = localStorage.getItem("headrace-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch { /* no storage: follow the system */ }
