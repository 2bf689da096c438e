// Draws figures and tables when they come near the viewport; tabs, theme, contents. On the root element, `data-ready` means
// that the first screen is interactive, `data-complete` that everything not collapsed is drawn.
"use strict";
(() => {
  const { element, data, charts, tables } = Voxtune;
  const root = document.documentElement;
  const drawn = new Map();

  function legend(host, state) {
    const items = state.made.legend;
    if (!items.length) return;
    const t = charts.theme();
    const buttons = items.map(([name, colour]) => {
      const on = !state.hidden.has(name);
      const swatch = element("i", { style: `background:${t.tone(colour)}` });
      const button = element("button", { type: "button", "aria-pressed": String(on) }, swatch, name);
      button.addEventListener("click", () => {
        if (!state.hidden.delete(name)) state.hidden.add(name);
        button.setAttribute("aria-pressed", String(!state.hidden.has(name)));
        show(state);
      });
      return button;
    });
    host.querySelector(".legend").replaceChildren(...buttons);
  }

  function zoomBy(state, factor) {
    const zooms = state.chart.getOption().dataZoom ?? [];
    zooms.forEach((z, index) => {
      const middle = (z.start + z.end) / 2, half = Math.min(50, ((z.end - z.start) / 2) * factor);
      const reset = factor === 0;
      const start = reset ? 0 : Math.max(0, Math.min(100 - 2 * half, middle - half));
      state.chart.dispatchAction({ type: "dataZoom", dataZoomIndex: index, start, end: reset ? 100 : start + 2 * half });
    });
  }

  function zoomBar(host, state) {
    if (!state.made.zoom) return;
    const button = (text, label, factor) => {
      const b = element("button", { type: "button", "aria-label": label }, text);
      b.addEventListener("click", () => zoomBy(state, factor));
      return b;
    };
    const hint = element("span", {}, "Ctrl + wheel to zoom, drag to pan");
    host.querySelector(".zoom").replaceChildren(button("+", "Zoom in", 0.5), button("−", "Zoom out", 2), button("Reset", "Reset zoom", 0), hint);
  }

  function show(state, fresh = false) {
    const { figure, plot, hidden } = state;
    state.made = charts.build[figure.kind](figure, charts.theme(), plot.clientWidth, hidden);
    plot.style.height = `${state.made.height}px`;
    const { option } = state.made;
    option.legend.data = state.made.legend.map(([name]) => name);
    option.legend.selected = Object.fromEntries(state.made.legend.map(([name]) => [name, !hidden.has(name)]));
    state.chart ??= echarts.init(plot, null, { renderer: "canvas" });
    if (!fresh) {
      state.chart.resize();
      // Keep the zoom when the theme or the legend changes.
      const zooms = state.chart.getOption()?.dataZoom ?? [];
      option.dataZoom?.forEach((z, i) => zooms[i] && Object.assign(z, { start: zooms[i].start, end: zooms[i].end }));
    }
    state.chart.setOption(option, { notMerge: true });
  }

  // Figures that draw thousands of items as one path have their own tooltips.
  function hover(state) {
    const box = element("div", { className: "float", hidden: true });
    state.plot.after(box);
    const pixels = state.chart.getZr();
    pixels.on("mousemove", (e) => {
      const content = state.made.hover(state.chart, e.offsetX, e.offsetY);
      box.hidden = !content;
      if (!content) return;
      box.replaceChildren(content);
      const x = Math.min(e.offsetX + 14, state.plot.clientWidth - box.offsetWidth);
      box.style.transform = `translate(${Math.max(0, x)}px, ${e.offsetY + 18 - state.plot.clientHeight}px)`;
    });
    pixels.on("globalout", () => (box.hidden = true));
  }

  function draw(host) {
    if (drawn.has(host)) return;
    const state = { figure: data.figures[host.dataset.figure], plot: host.querySelector(".plot"), hidden: new Set() };
    drawn.set(host, state);
    show(state, true);
    state.chart.resize();
    legend(host, state);
    zoomBar(host, state);
    if (state.made.hover) hover(state);
    host.dataset.drawn = "1";
  }

  const built = new Set();
  function make(host) {
    if (host.dataset.figure) return draw(host);
    if (built.has(host)) return undefined;
    built.add(host);
    return tables.build(host);
  }

  const hosts = [...document.querySelectorAll("[data-figure], [data-table]")];
  const visible = (host) => host.offsetParent !== null;

  function near(entries) {
    entries.filter((e) => e.isIntersecting).forEach((e) => make(e.target));
  }

  function redrawAll() {
    for (const [host, state] of drawn) {
      if (!visible(host)) {
        state.stale = true;
        continue;
      }
      show(state);
      legend(host, state);
      state.stale = false;
    }
  }

  function setTheme(theme) {
    root.dataset.theme = theme;
    document.getElementById("theme").textContent = theme === "dark" ? "Light" : "Dark";
    redrawAll();
  }

  function themeButton() {
    const button = document.getElementById("theme");
    button.textContent = root.dataset.theme === "dark" ? "Light" : "Dark";
    button.addEventListener("click", () => {
      const theme = root.dataset.theme === "dark" ? "light" : "dark";
      setTheme(theme);
      try {
        localStorage.setItem("voxtune-theme", theme);
      } catch {}
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (e) => setTheme(e.matches ? "dark" : "light"));
    addEventListener("beforeprint", () => {
      root.dataset.printing = root.dataset.theme;
      hosts.filter(visible).forEach(make);
      setTheme("light");
    });
    addEventListener("afterprint", () => setTheme(root.dataset.printing));
  }

  function tabs(list) {
    const buttons = [...list.querySelectorAll("[role=tab]")];
    const choose = (chosen) => {
      for (const b of buttons) {
        const on = b === chosen;
        b.setAttribute("aria-selected", String(on));
        b.tabIndex = on ? 0 : -1;
        const panel = document.getElementById(b.getAttribute("aria-controls"));
        panel.hidden = !on;
        if (on) panel.querySelectorAll("[data-figure], [data-table]").forEach((h) => visible(h) && make(h));
      }
      for (const [host, state] of drawn) if (state.stale && visible(host)) (show(state), legend(host, state), (state.stale = false));
    };
    buttons.forEach((b, i) => {
      b.addEventListener("click", () => choose(b));
      b.addEventListener("keydown", (e) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
        if (!step) return;
        const next = buttons[(i + step + buttons.length) % buttons.length];
        next.focus();
        choose(next);
      });
    });
  }

  function contents() {
    const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
    const watch = new IntersectionObserver((entries) => {
      for (const e of entries.filter((x) => x.isIntersecting)) {
        links.forEach((a) => a.removeAttribute("aria-current"));
        links.get(e.target.id)?.setAttribute("aria-current", "true");
      }
    }, { rootMargin: "-10% 0px -75% 0px" });
    document.querySelectorAll("section[id]").forEach((s) => watch.observe(s));
  }

  function rest(queue) {
    if (!queue.length) {
      root.dataset.complete = String(Math.round(performance.now()));
      return;
    }
    setTimeout(() => {
      const end = performance.now() + 30;
      while (queue.length && performance.now() < end) make(queue.shift());
      rest(queue);
    });
  }

  themeButton();
  document.querySelectorAll("[role=tablist]").forEach(tabs);
  document.querySelectorAll("details.fold").forEach((d) =>
    d.addEventListener("toggle", () => d.querySelectorAll("[data-figure], [data-table]").forEach((h) => visible(h) && make(h))));
  hosts.filter((h) => visible(h) && h.getBoundingClientRect().top < innerHeight).forEach(make);
  const watch = new IntersectionObserver(near, { rootMargin: "400px" });
  hosts.forEach((h) => watch.observe(h));
  contents();
  let wait = 0;
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(wait);
    wait = setTimeout(redrawAll, 150);
  });
  root.dataset.ready = String(Math.round(performance.now()));
  rest(hosts.filter(visible));
})();
