// The viewer: one NiiVue instance per panel, linked; an image is decoded when it is selected. Names are inserted as text nodes
// only. The root has `data-ready` once the first image is drawn, and `data-case` and `data-kind` of the image on display.
"use strict";
(() => {
  const { element, data } = Voxtune;
  const root = document.documentElement;
  const at = (id) => document.getElementById(id);
  const panes = [...document.querySelectorAll("[data-pane]")].map((host) => ({ host, kind: host.dataset.pane, canvas: host.querySelector("canvas"), nv: null }));
  const choices = [...document.querySelectorAll("[data-case]")];
  const hidden = new Set();
  const byNumber = new Map(data.labels.map((l) => [l.number, l]));
  const LAYOUTS = { all: "MULTIPLANAR", axial: "AXIAL", coronal: "CORONAL", sagittal: "SAGITTAL", render: "RENDER" };
  // NIfTI's intent code of label maps: NiiVue draws outlines for these only.
  const LABEL_INTENT = 1002;
  const surfaces = new Map();
  // The case on display, and the kind that was chosen last: other cases open on it, too.
  let current = null, wanted = null, selection = 0;

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
      // In 3D, labels are surfaces that shine through the volume; the mask itself would hide it.
      renderOverlayBlend: 0, meshThicknessOn2D: 0, meshXRay: 0.65,
      scrollRequiresFocus: true, dragAndDropEnabled: false, loadingText: "", logLevel: "error",
      isRadiologicalConvention: at("radiological").checked,
    });
    pane.nv.onLocationChange = (location) => showLocation(pane, location);
    await pane.nv.attachToCanvas(pane.canvas);
    const running = panes.filter((p) => p.nv);
    running.forEach((p) => p.nv.broadcastTo(running.filter((o) => o !== p).map((o) => o.nv), { "2d": true, "3d": true }));
  }

  const shown = () => panes.filter((p) => p.nv && !p.host.hidden && p.nv.volumes.length);
  // The panel that the keys address.
  const lead = () => shown().find((p) => p.canvas === document.activeElement) ?? shown()[0];

  const decode = (key, name) => niivue.NVImage.loadFromBase64({ base64: at(key).textContent, name: `${name}.nii.gz` });

  function colours() {
    const list = [{ number: 0, name: "", colour: "#000000" }, ...data.labels].sort((a, b) => a.number - b.number);
    const channel = (i) => list.map((l) => parseInt(l.colour.slice(i, i + 2), 16));
    // With outlines, an organ is not filled: its colour would lie over the whole image.
    const seen = list.map((l) => (l.number === 0 || (l.kind === "organ" && at("outline").checked) ? 0 : 255));
    return { R: channel(1), G: channel(3), B: channel(5), A: seen, I: list.map((l) => l.number), labels: list.map((l) => l.name) };
  }

  // The surfaces of the labels to look at first, the largest first: a smaller one is drawn over it.
  function meshes(pane, key, mask) {
    const made = data.volumes[key].solid.map((number) => {
      const id = `${key} ${number}`;
      if (!surfaces.has(id)) surfaces.set(id, Voxtune.surface(mask.img, mask.hdr.dims.slice(1, 4), mask.hdr.affine, number));
      return { number, ...surfaces.get(id) };
    });
    return made.filter((m) => m.points).sort((a, b) => b.triangles.length - a.triangles.length).map(({ number, points, triangles }) => {
      const colour = byNumber.get(number).colour, rgba = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
      const mesh = new niivue.NVMesh(points, triangles, String(number), new Uint8Array([...rgba, 255]), 1, true, pane.nv.gl);
      mesh.label = number;
      // Lit from the viewer's side, so that the colour is that of the legend.
      mesh.meshShaderIndex = pane.nv.meshShaderNameToNumber("Diffuse");
      return mesh;
    });
  }

  async function fill(pane, item, chosen, ticket) {
    const key = chosen[pane.kind];
    pane.host.hidden = !key || (pane.kind === "reference" && !at("compare").checked);
    if (pane.host.hidden) return;
    await start(pane);
    const volume = await decode(key, pane.kind);
    const mask = item.mask ? await decode(item.mask, "mask") : null;
    if (ticket !== selection) return;
    // Until everything is in place: without a GPU, each drawing in 3D takes a while.
    pane.nv.drawScene = () => {};
    while (pane.nv.volumes.length) pane.nv.removeVolume(pane.nv.volumes[0]);
    for (const mesh of pane.nv.meshes) mesh.unloadMesh(pane.nv.gl);
    pane.nv.meshes = [];
    pane.nv.addVolume(volume);
    pane.robust = [volume.robust_min, volume.robust_max];
    if (mask) {
      mask.hdr.intent_code = LABEL_INTENT;
      mask.setColormapLabel(colours());
      pane.labels = mask.img;
      pane.nv.addVolume(mask);
      pane.nv.meshes = meshes(pane, item.mask, mask);
    }
    const { name } = data.volumes[key];
    pane.host.querySelector(".kind").textContent = item[pane.kind === "reference" ? "reference_caption" : "caption"];
    pane.host.querySelector(".name").textContent = name;
    pane.host.querySelector(".name").title = name;
    pane.canvas.setAttribute("aria-label", `${pane.host.querySelector("figcaption").textContent}: arrow keys and Page Up and Down move the crosshair`);
  }

  // Shows a case; crosshair and zoom stay where they are if it is on display already.
  async function show(index) {
    const item = data.cases[index], chosen = item.images.find((i) => i.kind === wanted) ?? item.images[0], ticket = ++selection;
    const stay = item === current ? lead() : null;
    const mm = stay && position(stay), pan = stay && [...stay.nv.scene.pan2Dxyzmm];
    delete root.dataset.case;
    showChoice(index, item, chosen);
    try {
      for (const pane of panes) await fill(pane, item, chosen, ticket);
    } catch (error) {
      problem(`This case cannot be displayed: ${error.message ?? error}`);
      draw();
      return;
    }
    // Another case was chosen meanwhile.
    if (ticket !== selection) return;
    current = item;
    document.querySelectorAll(".of-mask input").forEach((input) => (input.disabled = !item.mask));
    at("compare").disabled = !chosen.reference;
    resetWindow();
    setMask();
    layout();
    if (stay) {
      for (const pane of shown()) {
        pane.nv.setPan2Dxyzmm([...pan]);
        place(pane, mm);
      }
    } else centre();
    draw();
    root.dataset.kind = chosen.kind;
    root.dataset.case = String(index);
    root.dataset.ready ??= String(Math.round(performance.now()));
  }

  function draw() {
    for (const { nv } of panes) {
      if (!nv || !Object.hasOwn(nv, "drawScene")) continue;
      delete nv.drawScene;
      nv.drawScene();
    }
  }

  // The case that was chosen last, which may still be loading.
  const chosenCase = () => choices.findIndex((b) => b.hasAttribute("aria-current"));
  const again = () => show(chosenCase());

  function showChoice(index, item, chosen) {
    choices.forEach((b) => (b.dataset.case === String(index) ? b.setAttribute("aria-current", "true") : b.removeAttribute("aria-current")));
    const list = choices[index].closest("ol"), box = choices[index].getBoundingClientRect(), frame = list.getBoundingClientRect();
    // Not scrollIntoView, which would scroll the page as well.
    if (box.top < frame.top || box.bottom > frame.bottom) list.scrollTop += (box.top + box.bottom - frame.top - frame.bottom) / 2;
    if (box.left < frame.left || box.right > frame.right) list.scrollLeft += (box.left + box.right - frame.left - frame.right) / 2;
    at("place").textContent = `${index + 1} / ${data.cases.length}`;
    at("kinds").hidden = item.images.length < 2;
    at("kinds").replaceChildren(...item.images.map((i) => {
      const button = element("button", { type: "button", "aria-pressed": String(i === chosen) }, i.kind);
      button.addEventListener("click", () => choose(i.kind));
      return button;
    }));
    showDetails(item, chosen);
  }

  function choose(kind) {
    const focused = at("kinds").contains(document.activeElement);
    wanted = kind;
    again();
    if (focused) at("kinds").querySelector('[aria-pressed="true"]')?.focus();
  }

  function showDetails(item, chosen) {
    const grid = data.volumes[chosen.volume].grid;
    const rows = [...chosen.measured, ...item.details, ["grid", grid]];
    if (chosen.reference && data.volumes[chosen.reference].grid !== grid) rows.push(["reference grid", data.volumes[chosen.reference].grid]);
    rows.push(["mask", item.mask ? data.volumes[item.mask].name : "none"]);
    at("details").querySelector("dl").replaceChildren(...rows.flatMap(([k, v]) => [element("dt", {}, k), element("dd", {}, v)]));
  }

  const number = (value) => (Number.isInteger(value) ? value.toLocaleString("en-US") : String(Number(value.toPrecision(4))));

  function showLocation(pane, location) {
    const [volume, mask] = location.values;
    const parts = ["intensity ", element("b", {}, Number.isFinite(volume?.value) ? number(volume.value) : "outside")];
    if (mask) {
      const label = byNumber.get(Math.round(mask.value));
      parts.push(" · ", label ? element("i", { style: `background:${label.colour}` }) : "", label ? `${label.name} (${label.value})` : "background");
    }
    pane.host.querySelector(".readout").replaceChildren(...parts);
    const coordinates = ["LR", "PA", "IS"].map((pair, i) => `${pair[location.mm[i] < 0 ? 0 : 1]} ${Math.abs(location.mm[i]).toFixed(1)}`);
    at("position").textContent = `${coordinates.join("  ")} mm`;
  }

  const position = ({ nv }) => Array.from(nv.frac2mm(nv.scene.crosshairPos)).slice(0, 3);

  function place(pane, mm) {
    pane.nv.scene.crosshairPos = pane.nv.mm2frac(mm);
    pane.nv.drawScene();
    pane.nv.createOnLocationChange();
  }

  function centre() {
    setZoom(1);
    for (const { nv } of shown()) nv.setPan2Dxyzmm([0, 0, 0, 1]);
    const focus = current.mask && data.volumes[current.mask].focus;
    for (const pane of shown()) {
      const middle = Array.from(pane.nv.frac2mm([0.5, 0.5, 0.5])).slice(0, 3);
      place(pane, focus ?? middle);
      // From the side that is nearer to the crosshair.
      pane.nv.setRenderAzimuthElevation(focus && focus[0] > middle[0] ? 250 : 110, 10);
    }
  }

  // Slices are magnified around the crosshair.
  function setZoom(zoom) {
    for (const pane of shown()) {
      const mm = position(pane), [x, y, z, last] = pane.nv.scene.pan2Dxyzmm;
      pane.nv.setPan2Dxyzmm([...[x, y, z].map((pan, axis) => pan + (last - zoom) * mm[axis]), zoom]);
      pane.nv.setScale(zoom);
    }
  }

  const zoomBy = (factor) => setZoom(Math.min(10, Math.max(0.5, lead().nv.scene.pan2Dxyzmm[3] * factor)));

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
    for (const { nv, labels } of shown()) {
      for (const mesh of nv.meshes) mesh.visible = at("overlay").checked && !hidden.has(mesh.label);
      const mask = nv.volumes[1];
      if (mask) {
        // Hidden labels become background: without a colour, they would keep their outline.
        mask.img = hidden.size ? labels.map((n) => (hidden.has(n) ? 0 : n)) : labels;
        mask.setColormapLabel(colours());
        mask.opacity = at("overlay").checked ? at("opacity").value / 100 : 0;
        nv.opts.atlasOutline = at("outline").checked ? 1 : 0;
      }
      nv.updateGLVolume();
    }
  }

  function legend() {
    const buttons = data.labels.map((label) => {
      const swatch = element("i", { style: `background:${label.colour}` });
      const button = element("button", { type: "button", "aria-pressed": "true", title: `Hide or show ${label.name}` }, swatch, `${label.value} ${label.name}`);
      button.addEventListener("click", () => {
        if (!hidden.delete(label.number)) hidden.add(label.number);
        button.setAttribute("aria-pressed", String(!hidden.has(label.number)));
        setMask();
      });
      return button;
    });
    at("labels").replaceChildren(...buttons);
  }

  const STEPS = { ArrowLeft: [-1, 0, 0], ArrowRight: [1, 0, 0], ArrowUp: [0, 1, 0], ArrowDown: [0, -1, 0], PageUp: [0, 0, 1], PageDown: [0, 0, -1] };
  // In a single plane, the keys move in the directions of the screen.
  const PLANES = { coronal: { ArrowUp: [0, 0, 1], ArrowDown: [0, 0, -1], PageUp: [0, 1, 0], PageDown: [0, -1, 0] },
                   sagittal: { ArrowLeft: [0, -1, 0], ArrowRight: [0, 1, 0], ArrowUp: [0, 0, 1], ArrowDown: [0, 0, -1], PageUp: [1, 0, 0], PageDown: [-1, 0, 0] } };

  function move(key) {
    const pane = lead(), view = at("layout").value, step = PLANES[view]?.[key] ?? STEPS[key];
    if (view === "render") {
      const { renderAzimuth, renderElevation } = pane.nv.scene;
      for (const { nv } of shown()) nv.setRenderAzimuthElevation(renderAzimuth + 5 * step[0], renderElevation + 5 * step[1]);
      return;
    }
    const mirrored = at("radiological").checked && view !== "sagittal" ? -1 : 1;
    pane.nv.moveCrosshairInVox(step[0] * mirrored, step[1], step[2]);
    const mm = position(pane);
    for (const each of shown()) place(each, mm);
  }

  function step(by) {
    const open = choices.filter((b) => !b.parentElement.hidden), last = chosenCase();
    const next = open.map((b) => Number(b.dataset.case)).filter((i) => (by > 0 ? i > last : i < last)).at(by > 0 ? 0 : -1);
    if (next !== undefined) show(next);
  }

  function cycle(by) {
    const { images } = data.cases[chosenCase()];
    const last = Math.max(0, images.findIndex((i) => i.kind === wanted));
    if (images.length > 1) choose(images[(last + by + images.length) % images.length].kind);
  }

  function pick(view) {
    at("layout").value = view;
    layout();
  }

  const click = (id) => () => at(id).click();
  const WORDS = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", PageUp: "Page Up", PageDown: "Page Down" };
  // Every key of the page: the list of the help and the keyboard both read this table. `shown` replaces the names of the keys.
  const KEYS = [
    { group: "Case", keys: ["n"], text: "Next case", run: () => step(1) },
    { group: "Case", keys: ["p"], text: "Previous case", run: () => step(-1) },
    { group: "Case", keys: ["/"], text: "Find a case", run: () => at("filter").focus() },
    { group: "Case", keys: ["i"], text: "Next image kind (T1w, T2w, ...)", run: () => cycle(1) },
    { group: "Case", keys: ["I"], shown: ["Shift", "i"], text: "Previous image kind", run: () => cycle(-1) },
    { group: "Case", keys: ["c"], text: "Compare with the reference, or not", run: click("compare") },
    { group: "View", keys: ["1"], text: "Slices and 3D", run: () => pick("all") },
    { group: "View", keys: ["2"], text: "Axial", run: () => pick("axial") },
    { group: "View", keys: ["3"], text: "Coronal", run: () => pick("coronal") },
    { group: "View", keys: ["4"], text: "Sagittal", run: () => pick("sagittal") },
    { group: "View", keys: ["5", "v"], text: "3D", run: () => pick("render") },
    { group: "View", keys: ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"], text: "Move the crosshair by one voxel; in 3D, turn the volume", run: move },
    { group: "View", keys: ["PageUp", "PageDown"], text: "Next and previous slice", run: move },
    { group: "View", keys: ["+", "="], shown: ["+"], text: "Zoom in", run: () => zoomBy(1.25) },
    { group: "View", keys: ["-"], text: "Zoom out", run: () => zoomBy(0.8) },
    { group: "View", keys: ["0"], text: "Centre on the first label, without zoom", run: centre },
    { group: "Display", keys: ["m"], text: "Mask on or off", run: click("overlay") },
    { group: "Display", keys: ["o"], text: "Outline on or off", run: click("outline") },
    { group: "Display", keys: ["w"], text: "Reset the window", run: resetWindow },
    { group: "Display", keys: ["r"], text: "Radiological convention on or off", run: click("radiological") },
    { group: "Display", keys: ["d"], text: "Dark or light page", run: click("theme") },
    { group: "Display", keys: ["?"], text: "Show or close this list", run: () => help() },
  ];
  // Without WebGL2 nothing is drawn.
  let drawing = true;

  function onKey(event) {
    const { target, key } = event;
    // NiiVue's own letter keys would change settings without updating the controls.
    if (panes.some((p) => p.canvas === target)) event.stopPropagation();
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (target.id === "filter") {
      if (key === "Escape") target.blur();
      return;
    }
    // These use the arrow keys, and a list of choices the letters.
    if (target.matches("select") || (target.matches('input[type="range"]') && key in STEPS)) return;
    // Without regard to Caps Lock, except where both cases have a meaning.
    const entry = KEYS.find(({ keys }) => keys.includes(key)) ?? KEYS.find(({ keys }) => keys.includes(key.toLowerCase()));
    if (!entry || (at("help").open && key !== "?") || (!drawing && key !== "?" && key !== "d")) return;
    event.preventDefault();
    if (key in STEPS && !shown().length) return;
    entry.run(key);
  }

  function help() {
    if (at("help").open) at("help").close();
    else at("help").showModal();
  }

  function listKeys() {
    const groups = [...new Set(KEYS.map((k) => k.group))].map((group) => {
      const rows = KEYS.filter((k) => k.group === group).flatMap(({ keys, shown: names = keys, text }) => [
        element("dt", {}, ...names.flatMap((name, i) => [i ? " " : "", element("kbd", {}, WORDS[name] ?? name.toUpperCase())])),
        element("dd", {}, text),
      ]);
      return element("section", {}, element("h3", {}, group), element("dl", {}, ...rows));
    });
    at("key-list").replaceChildren(...groups);
    at("keys").addEventListener("click", help);
    at("close-help").addEventListener("click", help);
    document.addEventListener("keydown", onKey, { capture: true });
  }

  function controls() {
    document.querySelector(".of-reference").hidden = !data.cases.some((c) => c.images.some((i) => i.reference));
    at("controls").addEventListener("submit", (e) => e.preventDefault());
    at("layout").addEventListener("change", layout);
    at("compare").addEventListener("change", again);
    at("overlay").addEventListener("change", setMask);
    at("opacity").addEventListener("input", setMask);
    at("outline").addEventListener("change", setMask);
    at("level").addEventListener("input", setWindow);
    at("window").addEventListener("input", setWindow);
    at("reset-window").addEventListener("click", resetWindow);
    at("centre").addEventListener("click", centre);
    at("radiological").addEventListener("change", (e) => panes.forEach(({ nv }) => nv?.setRadiologicalConvention(e.target.checked)));
    at("previous").addEventListener("click", () => step(-1));
    at("next").addEventListener("click", () => step(1));
    for (const { canvas } of panes) canvas.addEventListener("keyup", (e) => e.stopPropagation(), { capture: true });
    choices.forEach((b) => b.addEventListener("click", () => show(Number(b.dataset.case))));
  }

  function filter() {
    at("filter").hidden = data.cases.length < 10;
    at("filter").addEventListener("input", (e) => {
      const text = e.target.value.trim().toLowerCase();
      choices.forEach((b) => (b.parentElement.hidden = !b.textContent.toLowerCase().includes(text)));
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
  listKeys();
  Voxtune.panes = panes;
  if (!hasWebGL()) {
    problem("This browser has no WebGL2, which is required to display volumes. Open the page in a current Firefox, Chrome, Edge or Safari with hardware acceleration or software WebGL enabled.");
    document.querySelector(".panes").hidden = at("controls").hidden = true;
    drawing = false;
    showChoice(0, data.cases[0], data.cases[0].images[0]);
    root.dataset.ready = String(Math.round(performance.now()));
    return;
  }
  controls();
  show(0);
})();
