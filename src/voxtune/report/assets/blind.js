"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const count = data.pairs.length;
  const by = (id) => document.getElementById(id);
  const name = `voxtune-blind-${data.page}`;
  const blank = () => ({ judge: "", answers: data.pairs.map(() => ({ synthetic: null, certainty: null, seconds: 0 })) });
  let state = blank();
  let pair = 0;
  let shown = performance.now();

  // Answers survive a reload where the browser allows it; a page from a file may have no storage.
  const load = () => {
    try {
      const stored = JSON.parse(localStorage.getItem(name));
      if (stored && Array.isArray(stored.answers) && stored.answers.length === count) state = stored;
    } catch { /* nothing stored */ }
  };
  const store = () => {
    try { localStorage.setItem(name, JSON.stringify(state)); } catch { /* no storage */ }
  };
  const complete = (answer) => answer.synthetic !== null && answer.certainty !== null;
  const answered = () => state.answers.filter(complete).length;

  const spend = () => {
    const now = performance.now();
    state.answers[pair].seconds += (now - shown) / 1000;
    shown = now;
  };

  const show = () => {
    by("a").src = data.pairs[pair].A;
    by("b").src = data.pairs[pair].B;
    by("place").textContent = `Pair ${pair + 1} of ${count}`;
    by("progress").value = answered();
    for (const button of document.querySelectorAll("[data-synthetic]"))
      button.setAttribute("aria-pressed", String(button.dataset.synthetic === state.answers[pair].synthetic));
    for (const button of document.querySelectorAll("[data-certainty]"))
      button.setAttribute("aria-pressed", String(Number(button.dataset.certainty) === state.answers[pair].certainty));
    by("back").disabled = pair === 0;
    by("next").disabled = pair === count - 1;
    by("export").disabled = answered() === 0;
    const left = count - answered();
    by("state").textContent = left ? `${answered()} of ${count} pairs answered` : "All pairs answered: save the answers.";
  };

  const go = (to) => {
    if (to < 0 || to >= count) return;
    spend();
    pair = to;
    store();
    show();
  };

  const put = (field, value) => {
    spend();
    state.answers[pair][field] = value;
    store();
    show();
  };

  const save = () => {
    spend();
    const answers = state.answers
      .map((answer, i) => ({ pair: i + 1, ...answer, seconds: Math.round(answer.seconds * 10) / 10 }))
      .filter(complete);
    const file = { format: "voxtune-blind-answers/1", page: data.page, judge: state.judge, pairs: count, answers };
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify(file, null, 1) + "\n"], { type: "application/json" }));
    link.download = `blind-answers-${data.page}.json`;
    link.click();
    URL.revokeObjectURL(link.href);
  };

  for (const button of document.querySelectorAll("[data-synthetic]"))
    button.addEventListener("click", () => put("synthetic", button.dataset.synthetic));
  for (const button of document.querySelectorAll("[data-certainty]"))
    button.addEventListener("click", () => put("certainty", Number(button.dataset.certainty)));
  by("back").addEventListener("click", () => go(pair - 1));
  by("next").addEventListener("click", () => go(pair + 1));
  by("export").addEventListener("click", save);
  by("judge").addEventListener("input", (event) => { state.judge = event.target.value; store(); });
  by("reset").addEventListener("click", () => {
    state = blank();
    by("judge").value = "";
    pair = 0;
    shown = performance.now();
    store();
    show();
  });
  by("brightness").addEventListener("input", (event) => {
    for (const image of document.querySelectorAll("img")) image.style.filter = `brightness(${event.target.value}%)`;
  });
  document.addEventListener("keydown", (event) => {
    if (event.target.id === "judge" || event.ctrlKey || event.metaKey || event.altKey) return;
    const key = event.key.toLowerCase();
    if (key === "a" || key === "b") put("synthetic", key.toUpperCase());
    else if (["1", "2", "3"].includes(key)) put("certainty", Number(key));
    else if (key === "arrowleft" && event.target.type !== "range") go(pair - 1);
    else if (key === "arrowright" && event.target.type !== "range") go(pair + 1);
  });

  load();
  by("judge").value = state.judge;
  show();
  document.documentElement.dataset.complete = "";
})();
