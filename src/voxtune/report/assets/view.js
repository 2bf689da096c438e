// The viewer: one NiiVue instance per panel, linked; a case is decoded when it is selected. Names are inserted as text nodes
// only. The root has `data-ready` once the first case is drawn, and `data-case` with the number of the case on display.
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
  // NIfTI's intent code of label maps: NiiVue draws outlines for these only.
  const LABEL_INTENT = 1002;
  let current = null, selection = 0;

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
    pane.nv.onLocationChange = (location) => showLocation(pane, location);
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

  async function fill(pane, item, ticket) {
    const key = item[pane.kind];
    pane.host.hidden = !key;
    if (!key) return;
    await start(pane);
    const image = await decode(key, pane.kind);
    const mask = item.mask ? await decode(item.mask, "mask") : null;
    if (ticket !== selection) return;
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
    pane.host.querySelector(".kind").textContent = item[pane.kind === "reference" ? "reference_caption" : "caption"];
    pane.host.querySelector(".name").textContent = name;
    pane.host.querySelector(".name").title = name;
    pane.canvas.setAttribute("aria-label", `${pane.host.querySelector("figcaption").textContent}: arrow keys and Page Up and Down move the crosshair`);
  }

  async function select(index) {
    const item = data.cases[index], ticket = ++selection;
    document.querySelectorAll("[data-case]").forEach((b) => (b.dataset.case === String(index) ? b.setAttribute("aria-current", "true") : b.removeAttribute("aria-current")));
    delete root.dataset.case;
    showDetails(item);
    try {
      for (const pane of panes) await fill(pane, item, ticket);
    } catch (error) {
      problem(`This case cannot be displayed: ${error.message ?? error}`);
      return;
    }
    if (ticket !== selection) return;
    current = item;
    document.querySelectorAll(".of-mask input").forEach((input) => (input.disabled = !item.mask));
    resetWindow();
    layout();
    centre();
    root.dataset.case = String(index);
    root.dataset.ready ??= String(Math.round(performance.now()));
  }

  function showDetails(item) {
    const grid = data.volumes[item.volume].grid;
    const rows = [...item.measured, ...item.details, ["grid", grid]];
    if (item.reference && data.volumes[item.reference].grid !== grid) rows.push(["reference grid", data.volumes[item.reference].grid]);
    rows.push(["mask", item.mask ? data.volumes[item.mask].name : "none"]);
    at("details").querySelector("dl").replaceChildren(...rows.flatMap(([k, v]) => [element("dt", {}, k), element("dd", {}, v)]));
  }

  const number = (value) => (Number.isInteger(value) ? value.toLocaleString("en-US") : String(Number(value.toPrecision(4))));

  function showLocation(pane, location) {
    const [image, mask] = location.values;
    const parts = ["intensity ", element("b", {}, Number.isFinite(image?.value) ? number(image.value) : "outside")];
    if (mask) {
      const label = byNumber.get(Math.round(mask.value));
      parts.push(" · ", label ? element("i", { style: `background:${label.colour}` }) : "", label ? `${label.name} (${label.value})` : "background");
    }
    pane.host.querySelector(".readout").replaceChildren(...parts);
    const coordinates = ["LR", "PA", "IS"].map((pair, i) => `${pair[location.mm[i] < 0 ? 0 : 1]} ${Math.abs(location.mm[i]).toFixed(1)}`);
    at("position").textContent = `${coordinates.join("  ")} mm`;
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
      place(pane, current.focus ?? [middle[0], middle[1], middle[2]]);
    }
  }

  function layout() {
    const kind = niivue.SLICE_TYPE[LAYOUTS[at("layout").value]];
    shown().forEach(({ nv }) => nv.setSliceType(kind));
  }

  // Level moves the centre, window changes the width; both relative to the initial width.
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
  // In a single plane, the keys move in the directions of the screen.
  const PLANES = { coronal: { ArrowUp: [0, 0, 1], ArrowDown: [0, 0, -1], PageUp: [0, 1, 0], PageDown: [0, -1, 0] },
                   sagittal: { ArrowLeft: [0, -1, 0], ArrowRight: [0, 1, 0], ArrowUp: [0, 0, 1], ArrowDown: [0, 0, -1], PageUp: [1, 0, 0], PageDown: [-1, 0, 0] } };

  function keys(pane, event) {
    // NiiVue's own letter keys would change settings without updating the controls.
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
    document.querySelectorAll("[data-case]").forEach((b) => b.addEventListener("click", () => select(Number(b.dataset.case))));
  }

  function filter() {
    at("filter").hidden = data.cases.length < 10;
    at("filter").addEventListener("input", (e) => {
      const text = e.target.value.trim().toLowerCase();
      document.querySelectorAll("[data-case]").forEach((b) => (b.parentElement.hidden = !b.textContent.toLowerCase().includes(text)));
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
    problem("This browser has no WebGL2, which is required to display volumes. Open the page in a current Firefox, Chrome, Edge or Safari with hardware acceleration or software WebGL enabled.");
    document.querySelector(".panes").hidden = at("controls").hidden = true;
    showDetails(data.cases[0]);
    root.dataset.ready = String(Math.round(performance.now()));
    return;
  }
  controls();
  select(0);
})();
