// The volumes: one NiiVue a panel, linked; a case is decoded when it is chosen. Names enter as text nodes only. `data-ready`
// on the root says that the first case is drawn, `data-case` which case is.
"use strict";
(() => {
  const { element, data } = Voxtune;
  const root = document.documentElement;
  const at = (id) => document.getElementById(id);
  const canvases = [...document.querySelectorAll("[data-pane]")];
  const panes = canvases.map((host) => ({ host, kind: host.dataset.pane, canvas: host.querySelector("canvas"), nv: null }));
  const hidden = new Set();
  const byNumber = new Map(data.labels.map((l) => [l.number, l]));
  const LAYOUTS = { axial: "AXIAL", coronal: "CORONAL", sagittal: "SAGITTAL", render: "RENDER", all: "MULTIPLANAR" };
  // NIfTI's code of label maps: the library draws outlines of these alone.
  const LABEL_INTENT = 1002;
  let chosen = null, turn = 0;

  function problem(text) {
    at("problem").textContent = text;
    at("problem").hidden = false;
  }

  function hasWebGL() {
    const canvas = document.createElement("canvas");
    const context = canvas.getContext("webgl2");
    context?.getExtension("WEBGL_lose_context")?.loseContext();
    return Boolean(context);
  }

  async function start(pane) {
    if (pane.nv) return;
    pane.nv = new niivue.Niivue({
      backColor: [0, 0, 0, 1], crosshairColor: [0.35, 0.95, 0.6, 0.9], crosshairWidth: 1, crosshairWidthUnit: "mm",
      fontColor: [0.85, 0.87, 0.9, 1], show3Dcrosshair: true, showLegend: false, isColorbar: false, isSliceMM: true,
      showAllOrientationMarkers: true, multiplanarShowRender: niivue.SHOW_RENDER.ALWAYS, multiplanarLayout: niivue.MULTIPLANAR_TYPE.GRID,
      multiplanarPadPixels: 8, atlasOutline: at("outline").checked ? 1 : 0,
      scrollRequiresFocus: true, dragAndDropEnabled: false, loadingText: "", logLevel: "error",
      isRadiologicalConvention: at("radiological").checked,
    });
    pane.nv.onLocationChange = (location) => read(pane, location);
    await pane.nv.attachToCanvas(pane.canvas);
    const running = panes.filter((p) => p.nv);
    running.forEach((p) => p.nv.broadcastTo(running.filter((o) => o !== p).map((o) => o.nv), { "2d": true, "3d": true }));
  }

  const shown = () => panes.filter((p) => p.nv && !p.host.hidden && p.nv.volumes.length);

  const decode = (key, name) => niivue.NVImage.loadFromBase64({ base64: at(key).textContent, name: `${name}.nii.gz` });

  function colours() {
    const list = [{ number: 0, name: "", colour: "#000000" }, ...data.labels].sort((a, b) => a.number - b.number);
    const channel = (i) => list.map((l) => parseInt(l.colour.slice(i, i + 2), 16));
    const seen = list.map((l) => (l.number === 0 || hidden.has(l.number) ? 0 : 255));
    return { R: channel(1), G: channel(3), B: channel(5), A: seen, I: list.map((l) => l.number), labels: list.map((l) => l.name) };
  }

  const maskOpacity = () => (at("overlay").checked ? at("opacity").value / 100 : 0);

  async function fill(pane, item, mine) {
    const key = item[pane.kind];
    pane.host.hidden = !key;
    if (!key) return;
    await start(pane);
    const image = await decode(key, pane.kind);
    const mask = item.mask ? await decode(item.mask, "mask") : null;
    if (mine !== turn) return;
    while (pane.nv.volumes.length) pane.nv.removeVolume(pane.nv.volumes[0]);
    pane.nv.addVolume(image);
    pane.robust = [image.robust_min, image.robust_max];
    if (mask) {
      mask.hdr.intent_code = LABEL_INTENT;
      mask.setColormapLabel(colours());
      mask.opacity = maskOpacity();
      pane.nv.addVolume(mask);
    }
    const { name } = data.volumes[key];
    pane.host.querySelector(".name").textContent = name;
    pane.host.querySelector(".name").title = name;
    pane.canvas.setAttribute("aria-label", `${pane.host.querySelector("figcaption").textContent}: arrow keys and Page Up and Down move the crosshair`);
  }

  async function choose(place) {
    const item = data.cases[place], mine = ++turn;
    document.querySelectorAll("[data-case]").forEach((b) => (b.dataset.case === String(place) ? b.setAttribute("aria-current", "true") : b.removeAttribute("aria-current")));
    delete root.dataset.case;
    tell(item);
    try {
      for (const pane of panes) await fill(pane, item, mine);
    } catch (error) {
      problem(`This case cannot be drawn: ${error.message ?? error}`);
      return;
    }
    if (mine !== turn) return;
    chosen = item;
    document.querySelectorAll(".of-mask input").forEach((input) => (input.disabled = !item.mask));
    resetWindow();
    layout();
    centre();
    root.dataset.case = String(place);
    root.dataset.ready ??= String(Math.round(performance.now()));
  }

  function tell(item) {
    const grid = data.volumes[item.volume].grid;
    const rows = [...item.measured, ...item.told, ["grid", grid]];
    if (item.real && data.volumes[item.real].grid !== grid) rows.push(["real's grid", data.volumes[item.real].grid]);
    rows.push(["mask", item.mask ? data.volumes[item.mask].name : "none"]);
    at("told").querySelector("dl").replaceChildren(...rows.flatMap(([k, v]) => [element("dt", {}, k), element("dd", {}, v)]));
  }

  const figure = (value) => (Number.isInteger(value) ? value.toLocaleString("en-US") : String(Number(value.toPrecision(4))));

  function read(pane, location) {
    const [image, mask] = location.values;
    const parts = ["intensity ", element("b", {}, Number.isFinite(image?.value) ? figure(image.value) : "outside")];
    if (mask) {
      const label = byNumber.get(Math.round(mask.value));
      parts.push(" · ", label ? element("i", { style: `background:${label.colour}` }) : "", label ? `${label.name} (${label.value})` : "background");
    }
    pane.host.querySelector(".readout").replaceChildren(...parts);
    const sides = ["LR", "PA", "IS"].map((pair, i) => `${pair[location.mm[i] < 0 ? 0 : 1]} ${Math.abs(location.mm[i]).toFixed(1)}`);
    at("position").textContent = `${sides.join("  ")} mm`;
  }

  function place(pane, mm) {
    pane.nv.scene.crosshairPos = pane.nv.mm2frac(mm);
    pane.nv.drawScene();
    pane.nv.createOnLocationChange();
  }

  function centre() {
    for (const { nv } of shown()) nv.setPan2Dxyzmm([0, 0, 0, 1]);
    for (const pane of shown()) {
      const middle = pane.nv.frac2mm([0.5, 0.5, 0.5]);
      place(pane, chosen.focus ?? [middle[0], middle[1], middle[2]]);
    }
  }

  function layout() {
    const kind = niivue.SLICE_TYPE[LAYOUTS[at("layout").value]];
    shown().forEach(({ nv }) => nv.setSliceType(kind));
  }

  // Level moves the middle, window the width; both in shares of the width that the volume opened with.
  function setWindow() {
    for (const { nv, robust: [low, high] } of shown()) {
      const width = high - low, half = (width / 2) * 2 ** (at("window").value / 50);
      const middle = (low + high) / 2 + (width * at("level").value) / 100;
      nv.volumes[0].cal_min = middle - half;
      nv.volumes[0].cal_max = middle + half;
      nv.updateGLVolume();
    }
  }

  function resetWindow() {
    at("level").value = at("window").value = 0;
    setWindow();
  }

  function setMask() {
    for (const { nv } of shown()) if (nv.volumes.length > 1) nv.setOpacity(1, maskOpacity());
  }

  function legend() {
    const buttons = data.labels.map((label) => {
      const swatch = element("i", { style: `background:${label.colour}` });
      const button = element("button", { type: "button", "aria-pressed": "true" }, swatch, `${label.value} ${label.name}`);
      button.addEventListener("click", () => {
        if (!hidden.delete(label.number)) hidden.add(label.number);
        button.setAttribute("aria-pressed", String(!hidden.has(label.number)));
        for (const { nv } of shown()) {
          nv.volumes[1]?.setColormapLabel(colours());
          nv.updateGLVolume();
        }
      });
      return button;
    });
    at("labels").replaceChildren(...buttons);
  }

  const STEPS = { ArrowLeft: [-1, 0, 0], ArrowRight: [1, 0, 0], ArrowUp: [0, 1, 0], ArrowDown: [0, -1, 0], PageUp: [0, 0, 1], PageDown: [0, 0, -1] };
  // Left, right, up and down of a single plane are what the reader sees there.
  const PLANES = { coronal: { ArrowUp: [0, 0, 1], ArrowDown: [0, 0, -1], PageUp: [0, 1, 0], PageDown: [0, -1, 0] },
                   sagittal: { ArrowLeft: [0, -1, 0], ArrowRight: [0, 1, 0], ArrowUp: [0, 0, 1], ArrowDown: [0, 0, -1], PageUp: [1, 0, 0], PageDown: [-1, 0, 0] } };

  function keys(pane, event) {
    // The library's own keys are letters that change what the controls above say.
    event.stopPropagation();
    const { nv } = pane, view = at("layout").value;
    const step = PLANES[view]?.[event.key] ?? STEPS[event.key];
    if (!step || !nv?.volumes.length || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    if (view === "render") {
      nv.setRenderAzimuthElevation(nv.scene.renderAzimuth + 5 * step[0], nv.scene.renderElevation + 5 * step[1]);
      return;
    }
    const mirrored = at("radiological").checked && view !== "sagittal" ? -1 : 1;
    nv.moveCrosshairInVox(step[0] * mirrored, step[1], step[2]);
    nv.drawScene();
  }

  function controls() {
    at("controls").addEventListener("submit", (e) => e.preventDefault());
    at("layout").addEventListener("change", layout);
    at("overlay").addEventListener("change", setMask);
    at("opacity").addEventListener("input", setMask);
    at("outline").addEventListener("change", (e) => panes.forEach(({ nv }) => nv?.setAtlasOutline(e.target.checked ? 1 : 0)));
    at("level").addEventListener("input", setWindow);
    at("window").addEventListener("input", setWindow);
    at("reset-window").addEventListener("click", resetWindow);
    at("centre").addEventListener("click", centre);
    at("radiological").addEventListener("change", (e) => shown().forEach(({ nv }) => nv.setRadiologicalConvention(e.target.checked)));
    for (const pane of panes) {
      pane.canvas.addEventListener("keydown", (e) => keys(pane, e), { capture: true });
      pane.canvas.addEventListener("keyup", (e) => e.stopPropagation(), { capture: true });
    }
    document.querySelectorAll("[data-case]").forEach((b) => b.addEventListener("click", () => choose(Number(b.dataset.case))));
  }

  function filter() {
    at("filter").hidden = data.cases.length < 10;
    at("filter").addEventListener("input", (e) => {
      const wanted = e.target.value.trim().toLowerCase();
      document.querySelectorAll("[data-case]").forEach((b) => (b.parentElement.hidden = !b.textContent.toLowerCase().includes(wanted)));
    });
  }

  function theme() {
    const button = at("theme");
    const set = (name) => {
      root.dataset.theme = name;
      button.textContent = name === "dark" ? "Light" : "Dark";
    };
    set(root.dataset.theme);
    button.addEventListener("click", () => {
      set(root.dataset.theme === "dark" ? "light" : "dark");
      try {
        localStorage.setItem("voxtune-theme", root.dataset.theme);
      } catch {}
    });
  }

  theme();
  filter();
  legend();
  Voxtune.panes = panes;
  if (!hasWebGL()) {
    problem("This browser offers no WebGL2, which drawing volumes needs. Open the page in a current Firefox, Chrome, Edge or Safari, and allow hardware acceleration or software WebGL.");
    document.querySelector(".panes").hidden = at("controls").hidden = true;
    tell(data.cases[0]);
    root.dataset.ready = String(Math.round(performance.now()));
    return;
  }
  controls();
  choose(0);
})();
