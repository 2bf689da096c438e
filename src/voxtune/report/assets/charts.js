// One function per kind of figure: from the data of report/figure.py to ECharts options. Only positions are computed here.
// Tooltips are built from text nodes, so that a name cannot become markup.
"use strict";
Voxtune.charts = (() => {
  const { element, number, data } = Voxtune;

  function theme() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    const dark = document.documentElement.dataset.theme === "dark";
    const tone = (colour) => (dark ? (data.dark[colour] ?? colour) : colour);
    const ink = (colour) => data.ink[tone(colour)] ?? read("--ink");
    return { ink: read("--ink"), muted: read("--muted"), line: read("--line"), hair: read("--hair"),
             paper: read("--paper"), tip: read("--tip"), bad: read("--bad"), tone, on: ink };
  }

  function tip(title, rows) {
    const lines = rows.map(([colour, name, value]) => {
      const swatch = colour ? element("i", { style: `background:${colour}` }) : "";
      return element("tr", {}, element("td", {}, swatch), element("td", {}, name), element("td", {}, value));
    });
    return element("div", { className: "tip" }, element("b", {}, title), element("table", {}, ...lines));
  }

  function base(t) {
    return {
      animation: false,
      textStyle: { fontFamily: getComputedStyle(document.body).fontFamily, color: t.ink },
      tooltip: { confine: true, backgroundColor: t.tip, borderColor: t.line, padding: 8, textStyle: { color: t.ink },
                 transitionDuration: 0 },
      legend: { show: false },
    };
  }

  const axisLook = (t) => ({
    axisLabel: { color: t.muted, fontSize: 12, hideOverlap: true },
    axisLine: { show: false, lineStyle: { color: t.line } },
    axisTick: { show: false },
    splitLine: { lineStyle: { color: t.hair } },
    nameTextStyle: { color: t.muted, fontSize: 12 },
  });

  const labelRoom = (labels, width) => {
    const longest = labels.reduce((m, l) => Math.max(m, l.length), 0);
    return Math.min(width < 560 ? width * 0.34 : 280, longest * 7 + 4);
  };

  const short = (value, f) => number(value, Math.abs(value) >= 100 ? 0 : Math.min(f.digits, Math.abs(value) >= 10 ? 1 : 2));

  function whiskers(f, t) {
    const [s] = f.series;
    if (f.series.length !== 1 || !s.low) return [];
    const rows = s.values.map((v, i) => [s.low[i] ?? v, s.high[i] ?? v, i]).filter((r) => r[0] !== null);
    const renderItem = (_, api) => {
      const i = api.value(2);
      const [a, y] = api.coord([api.value(0), i]);
      const [b] = api.coord([api.value(1), i]);
      const line = (x1, y1, x2, y2) => ({ type: "line", shape: { x1, y1, x2, y2 }, style: { stroke: t.ink, lineWidth: 1.5 } });
      const text = { type: "text", style: { text: short(s.values[i], f), x: b + 7, y, fill: t.muted, fontSize: 11, verticalAlign: "middle" } };
      return { type: "group", children: [...(b > a ? [line(a, y, b, y), line(a, y - 5, a, y + 5), line(b, y - 5, b, y + 5)] : []), text] };
    };
    return [{ type: "custom", name: "spread", data: rows, encode: { x: [0, 1], y: 2 }, renderItem, silent: true, z: 5 }];
  }

  function markLine(f, t) {
    if (f.mark === null || f.mark === undefined) return [];
    const renderItem = (params, api) => {
      const [x] = api.coord([f.mark, 0]);
      const { y, height } = params.coordSys;
      const style = { stroke: t.ink, lineWidth: 1, lineDash: [4, 3] };
      return { type: "line", shape: { x1: x, x2: x, y1: y, y2: y + height }, style };
    };
    return [{ type: "custom", name: "mark", data: [[f.mark, 0]], renderItem, silent: true, z: 4 }];
  }

  function barSeries(f, t, span, pixels) {
    return f.series.map((s) => {
      const colour = t.tone(s.colour);
      const label = f.stacked
        ? { show: true, position: "inside", color: t.on(s.colour), fontSize: 11,
            formatter: (p) => ((p.value / span) * pixels > 7 * short(p.value, f).length + 4 ? short(p.value, f) : "") }
        : { show: f.series.length < 7 && !s.low, position: "right", color: t.muted, fontSize: 11,
            formatter: (p) => (p.value === null ? "" : short(p.value, f)) };
      return { type: "bar", name: s.name, data: s.values, stack: f.stacked ? "all" : undefined, label, barMaxWidth: 24,
               barMinHeight: f.stacked ? 0 : 1, barGap: "8%", barCategoryGap: "28%",
               itemStyle: { color: colour, borderColor: t.paper, borderWidth: f.stacked ? 1 : 0, borderRadius: f.stacked ? 0 : 2 },
               emphasis: { focus: f.series.length > 1 ? "series" : "none" } };
    });
  }

  function bars(f, t, width) {
    const room = labelRoom(f.labels, width);
    const totals = f.labels.map((_, i) => f.series.reduce((sum, s) => sum + (s.values[i] ?? 0), 0));
    // Long labels are wrapped on narrow screens, where their ends tell rows apart.
    const narrow = width < 560;
    const lines = (label) => (narrow ? Math.ceil((label.length * 6.6) / room) : 1);
    const least = 14 * Math.max(...f.labels.map(lines)) + 6;
    const each = Math.max(least, f.stacked ? 36 : f.series.length * (f.series.length > 2 ? 14 : 17) + 12);
    const rows = f.labels.length * each;
    const formatter = (params) => {
      const i = params[0].dataIndex;
      const lines = f.series.map((s) => {
        const spread = s.low && s.low[i] !== null ? ` (${number(s.low[i], f.digits)} to ${number(s.high[i], f.digits)})` : "";
        const value = s.values[i] === null ? "not measured" : `${number(s.values[i], f.digits)} ${f.unit}${spread}`;
        return [t.tone(s.colour), s.name, value];
      });
      if (f.stacked) lines.push(["", "total", `${number(totals[i], f.digits)} ${f.unit}`]);
      return tip(f.labels[i], lines);
    };
    const option = {
      ...base(t),
      grid: { left: room + 12, right: f.stacked ? 16 : 58, top: 4, bottom: 42 },
      xAxis: { type: f.log ? "log" : "value", min: f.log ? 10 ** Math.floor(Math.log10(Math.min(...totals.filter((v) => v > 0)))) : undefined,
               ...axisLook(t), name: f.unit, nameLocation: "middle", nameGap: 26, splitNumber: width < 560 ? 3 : 6,
               max: f.stacked && f.unit === "%" ? 100 : undefined },
      yAxis: { type: "category", inverse: true, data: f.labels.map((_, i) => i), ...axisLook(t),
               axisLabel: { color: t.ink, width: room, overflow: narrow ? "breakAll" : "truncate", fontSize: narrow ? 11 : 12,
                            lineHeight: 13, interval: 0,
                            formatter: (i) => f.labels[i] } },
      series: [...barSeries(f, t, Math.max(...totals) * 1.05, width - room - 28), ...whiskers(f, t), ...markLine(f, t)],
    };
    option.tooltip = { ...option.tooltip, trigger: "axis", axisPointer: { type: "shadow", shadowStyle: { opacity: 0.06 } }, formatter };
    return { option, height: rows + 52, legend: f.series.length > 1 ? f.series.map((s) => [s.name, s.colour]) : [] };
  }

  function roofs(f, t) {
    const xs = f.points.map((p) => p.x), ys = f.points.map((p) => p.y);
    const slopes = f.roofs.filter((r) => r.per_x), flats = f.roofs.filter((r) => r.flat);
    const top = Math.max(...flats.map((r) => r.flat), ...ys), steepest = Math.max(...slopes.map((r) => r.per_x), 0);
    const decade = (v) => 10 ** Math.floor(Math.log10(v));
    const left = decade(Math.min(...xs) / 2), right = Math.max(...xs, steepest ? top / steepest : 0) * 4;
    const bottom = decade(Math.min(...ys) / 2);
    const lines = f.roofs.map((r) => {
      const low = r.flat ? left : Math.max(left, bottom / r.per_x);
      const ends = r.flat ? [[steepest ? Math.max(left, r.flat / steepest) : left, r.flat], [right, r.flat]] : [[low, r.per_x * low], [top / r.per_x, top]];
      return { type: "line", name: r.name, data: ends, symbol: "none", silent: true, lineStyle: { color: t.muted, width: 1.2 },
               endLabel: { show: Boolean(r.flat), formatter: r.name, color: t.muted, fontSize: 11, offset: [-8, -8], align: "right" } };
    });
    return { lines, left, right, top: top * 2, bottom };
  }

  function scatter(f, t, width) {
    const roof = roofs(f, t);
    const power = (v) => (v >= 0.01 && v < 10000 ? String(Number(v.toPrecision(3))) : Number(v).toExponential(0).replace("e+", "e"));
    const axis = (name, min, max) => ({ type: "log", name, min: 10 ** Math.floor(Math.log10(min)), max: 10 ** Math.ceil(Math.log10(max)),
                                        nameLocation: "middle", ...axisLook(t), axisLabel: { ...axisLook(t).axisLabel, formatter: power } });
    const groups = f.groups.map(([name, colour]) => ({
      type: "scatter", name,
      data: f.points.filter((p) => p.group === name).map((p) => ({ value: [p.x, p.y], point: p })),
      symbolSize: (_, params) => 5 + Math.sqrt(Math.max(0, params.data.point.size)) * 5,
      itemStyle: { color: t.tone(colour), opacity: 0.82, borderColor: t.paper, borderWidth: 1 },
    }));
    const formatter = (params) => {
      const p = params.data.point;
      const rows = [["", f.x_title, number(p.x, 2)], ["", f.y_title, number(p.y, 2)], ["", f.size_title, number(p.size, 2)], [params.color, p.group, ""]];
      if (p.detail) rows.push(["", p.detail, ""]);
      return tip(p.name, rows);
    };
    const option = {
      ...base(t),
      grid: { left: 62, right: 20, top: 14, bottom: 48 },
      xAxis: { ...axis(f.x_title, roof.left, roof.right), nameGap: 28 },
      yAxis: { ...axis(f.y_title, roof.bottom, roof.top), nameGap: 44 },
      dataZoom: [{ type: "inside", xAxisIndex: 0, zoomOnMouseWheel: "ctrl", filterMode: "none" },
                 { type: "inside", yAxisIndex: 0, zoomOnMouseWheel: "ctrl", filterMode: "none" }],
      series: [...roof.lines, ...groups],
    };
    option.tooltip = { ...option.tooltip, trigger: "item", formatter };
    return { option, height: width < 560 ? 320 : 440, legend: f.groups, zoom: true };
  }

  // All launches of one group as a single path: thousands of elements of their own would take a second to build.
  function blocks(f, t, group, rows, fill) {
    const renderItem = (params, api) => {
      const area = params.coordSys, origin = api.coord([0, 0])[0], scale = api.coord([1, 0])[0] - origin;
      const height = Math.min(54, api.size([0, 1])[1] * 0.72);
      const path = [];
      const tops = new Map();
      const flush = (run) => {
        if (!tops.has(run.row)) tops.set(run.row, (api.coord([0, run.row])[1] - height / 2).toFixed(1));
        // A thin gap between neighbours that are wide enough.
        const width = (run.to - run.from - (run.to - run.from > 4 ? 0.6 : 0)).toFixed(2);
        path.push(`M${run.from.toFixed(2)} ${tops.get(run.row)}h${width}v${height}h-${width}z`);
      };
      let run = null;
      for (const [start, length, row] of rows) {
        const from = Math.max(area.x, origin + start * scale);
        const to = Math.min(area.x + area.width, origin + start * scale + Math.max(length * scale, 0.6));
        if (to <= from) continue;
        // Launches closer than a quarter of a pixel are drawn as one until zoomed in.
        if (run && run.row === row && from - run.to < 0.25 && to - from < 1) {
          run.to = Math.max(run.to, to);
          continue;
        }
        if (run) flush(run);
        run = { from, to, row };
      }
      if (run) flush(run);
      return path.length ? { type: "path", shape: { pathData: path.join("") }, style: { fill }, silent: true } : null;
    };
    return { type: "custom", name: group, data: [[0, 0]], renderItem, itemStyle: { color: fill }, silent: true };
  }

  // The launch under the pointer, among the visible groups.
  function launchAt(f, hidden, ms, lane, slack) {
    const from = (ms - slack) * 1000, to = (ms + slack) * 1000;
    if (lane === f.rows.length) {
      const gap = f.gaps.find(([start, length]) => start <= to && start + length >= from);
      return gap ? { gap } : null;
    }
    let best = null;
    for (const it of f.items) {
      if (it[5] !== lane || it[0] > to || it[0] + it[1] < from || hidden.has(f.groups[it[2]])) continue;
      if (best === null || it[1] > best[1]) best = it;
    }
    return best ? { item: best } : null;
  }

  function timelineTip(f, t, hit) {
    const [start, length] = hit.gap ?? hit.item;
    const when = [["", "start", `${number(start / 1000, 3)} ms`], ["", "duration", `${number(length, 1)} µs`]];
    if (hit.gap) return tip("GPU idle", when);
    const [, , group, name, note] = hit.item;
    const rows = [[t.tone(f.colours[group]), f.groups[group], ""], ...when];
    return tip(f.names[name], f.notes[note] ? [...rows, ["", f.notes[note], ""]] : rows);
  }

  function timelineHover(f, t, hidden, lanes) {
    return (chart, x, y) => {
      if (!chart.containPixel("grid", [x, y])) return null;
      const [ms, lane] = chart.convertFromPixel("grid", [x, y]);
      const slack = Math.abs(chart.convertFromPixel("grid", [x + 1, y])[0] - ms);
      const hit = lane >= 0 && lane < lanes.length ? launchAt(f, hidden, ms, lane, slack) : null;
      return hit ? timelineTip(f, t, hit) : null;
    };
  }

  function timeline(f, t, width, hidden = new Set()) {
    const lanes = [...f.rows, ...(f.gaps.length ? ["idle"] : [])];
    const rows = f.groups.map(() => []);
    f.items.forEach((it) => rows[it[2]].push([it[0] / 1000, it[1] / 1000, it[5]]));
    const series = f.groups.map((name, g) => blocks(f, t, name, rows[g], t.tone(f.colours[g])));
    if (f.gaps.length) series.push(blocks(f, t, "idle", f.gaps.map(([a, b]) => [a / 1000, b / 1000, f.rows.length]), t.bad));
    const room = labelRoom(lanes, width);
    const option = {
      ...base(t),
      grid: { left: room + 12, right: 18, top: 4, bottom: 76 },
      xAxis: { type: "value", min: 0, max: f.length_us / 1000, name: "time in step, ms", nameLocation: "middle", nameGap: 26, ...axisLook(t),
               splitNumber: width < 560 ? 3 : 8,
               axisLabel: { ...axisLook(t).axisLabel, showMaxLabel: false, formatter: (v) => String(Number(v.toPrecision(6))) } },
      yAxis: { type: "category", inverse: true, data: lanes, ...axisLook(t), axisLabel: { color: t.ink, width: room, overflow: "truncate" } },
      dataZoom: [{ type: "inside", zoomOnMouseWheel: "ctrl", filterMode: "none" },
                 { type: "slider", height: 18, bottom: 8, filterMode: "none", showDetail: false, brushSelect: false, borderColor: t.line,
                   fillerColor: "rgb(120 140 170 / 18%)", showDataShadow: false }],
      series,
    };
    option.tooltip = { show: false };
    return { option, height: lanes.length * 62 + 92, legend: f.groups.map((g, i) => [g, f.colours[i]]), zoom: true,
             hover: timelineHover(f, t, hidden, lanes) };
  }

  function area(f, t, width) {
    const series = f.series.map((s) => ({
      type: "line", name: s.name, stack: "all", step: "end", symbol: "none", data: s.values.map((v, i) => [f.x[i], v]),
      lineStyle: { width: 0 }, areaStyle: { color: t.tone(s.colour), opacity: 0.92 }, itemStyle: { color: t.tone(s.colour) },
    }));
    const formatter = (params) => {
      const i = params[0].dataIndex;
      const lines = f.series.map((s) => [t.tone(s.colour), s.name, s.values[i] === null ? "not measured" : `${number(s.values[i], f.digits)} ${f.unit}`]);
      const total = f.series.reduce((sum, s) => sum + (s.values[i] ?? 0), 0);
      return tip(`${number(f.x[i], 2)} ms`, [...lines.reverse(), ["", "total", `${number(total, f.digits)} ${f.unit}`]]);
    };
    const option = {
      ...base(t),
      grid: { left: 50, right: 18, top: 26, bottom: 46 },
      xAxis: { type: "value", name: f.x_title, nameLocation: "middle", nameGap: 26, min: f.x[0], max: f.x.at(-1), ...axisLook(t), splitLine: { show: false },
               splitNumber: width < 560 ? 3 : 8, axisLabel: { ...axisLook(t).axisLabel, formatter: (v) => String(Number(v.toPrecision(4))) } },
      yAxis: { type: "value", name: f.unit, ...axisLook(t) },
      dataZoom: [{ type: "inside", zoomOnMouseWheel: "ctrl", filterMode: "none" }],
      series,
    };
    option.tooltip = { ...option.tooltip, trigger: "axis", axisPointer: { type: "line", lineStyle: { color: t.muted } }, formatter };
    return { option, height: 300, legend: f.series.map((s) => [s.name, s.colour]), zoom: true };
  }

  function branches(f, hidden, t) {
    const root = { children: [], index: new Map() };
    f.paths.forEach((path, i) => {
      if (hidden.has(f.groups[i])) return;
      let node = root;
      for (const part of path.split(".")) {
        if (!node.index.has(part)) {
          const child = { name: part, children: [], index: new Map(), itemStyle: { color: t.hair } };
          node.index.set(part, child);
          node.children.push(child);
        }
        node = node.index.get(part);
      }
      node.children.push({ name: f.groups[i], value: f.values[i], item: i,
                           itemStyle: { color: t.tone(f.palette[f.groups[i]]) }, label: { color: t.on(f.palette[f.groups[i]]) } });
    });
    const tidy = (node) => {
      // A chain of single children becomes one dotted name.
      while (node.children?.length === 1 && node.children[0].children?.length) {
        const [only] = node.children;
        node.name = node.name ? `${node.name}.${only.name}` : only.name;
        node.children = only.children;
      }
      node.children?.forEach(tidy);
      delete node.index;
      return node;
    };
    return tidy(root).children;
  }

  function tree(f, t, width, hidden = new Set()) {
    const formatter = (p) => {
      const path = p.treePathInfo.slice(1).map((n) => n.name).join(".");
      return tip(path || "all", [["", "time", `${number(p.value, f.digits)} ${f.unit}`]]);
    };
    const option = {
      ...base(t),
      series: [{
        // With a leaf depth the path below starts at the root, and not at whatever is in the middle of the chart.
        type: "treemap", name: "all modules", data: branches(f, hidden, t), left: 0, right: 0, top: 2, bottom: 30, roam: false, leafDepth: 99,
        visibleMin: 40, breadcrumb: { bottom: 2, height: 20, itemStyle: { color: t.hair, textStyle: { color: t.ink } }, emphasis: { itemStyle: { color: t.line } } },
        itemStyle: { borderColor: t.paper, borderWidth: 1, gapWidth: 1 },
        label: { fontSize: 11, overflow: "truncate", formatter: (p) => p.name },
        upperLabel: { show: true, height: 18, color: t.ink, fontSize: 11, overflow: "truncate" },
        levels: [{ upperLabel: { show: false } }, { itemStyle: { borderColor: t.line, borderWidth: 2, gapWidth: 2 } },
                 { itemStyle: { borderColor: t.hair, borderWidth: 1 } }],
      }],
    };
    option.tooltip = { ...option.tooltip, formatter };
    return { option, height: width < 560 ? 360 : 460, legend: Object.entries(f.palette) };
  }

  return { theme, build: { bars, scatter, timeline, area, tree } };
})();
