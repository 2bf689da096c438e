// Runs before the first paint, so that a dark page does not flash white. Storage may be unavailable on file: pages.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("voxtune-theme");
  } catch {}
  const dark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();
