// Before the first paint, so that a dark page never flashes light. Storage may be forbidden on file: pages.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("voxtune-theme");
  } catch {}
  const dark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();
