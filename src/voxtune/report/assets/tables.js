// Sortable, filterable tables; long ones are expanded on demand. Names enter the page as text nodes only.
"use strict";
const Voxtune = { data: JSON.parse(document.getElementById("data").textContent) };

Voxtune.element = (tag, properties = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes("-") || key === "role") node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
};

// Same rules as report/numbers.py.
Voxtune.number = (value, digits = 2, kind = "float") => {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "string") return value;
  if (kind === "int") return Math.trunc(value).toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1e7) return value.toExponential(2).replace("e+", "e");
  if (size > 0 && size < 0.5 * 10 ** -digits) {
    return size >= 1e-4 ? String(Number(value.toPrecision(2))) : value.toExponential(1);
  }
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
};

Voxtune.tables = (() => {
  const { element, number } = Voxtune;
  // Rows shown at first; a table with a few more is shown whole.
  const FEW = 40, SLACK = 5;
  const NUMERIC = new Set(["int", "float", "percent"]);
  const isName = (name) => /kernel|^name$|^op$|module|^rule$|command/.test(name);

  function compare(a, b, direction) {
    // Missing values sort last in both directions.
    if (a === null || b === null) return (a === null) - (b === null);
    const order = typeof a === "string" ? a.localeCompare(String(b), "en", { numeric: true }) : a - b;
    return direction * order;
  }

  // A text that may be broken after _ and + within names such as tf32+channels_last.
  const breakable = (text) => text.split(/(?<=[_+])/).flatMap((part, i) => (i ? [element("wbr"), part] : [part]));

  function head(column, state, redraw) {
    const better = { low: "lower is better", high: "higher is better" }[column.better];
    const title = [column.doc, better].filter(Boolean).join("; ");
    const button = element("button", { type: "button", title }, ...breakable(column.head));
    if (column.aside) button.append(element("small", {}, column.aside));
    const cell = element("th", { scope: "col", className: NUMERIC.has(column.kind) ? "n" : "" }, button);
    button.addEventListener("click", () => {
      const first = NUMERIC.has(column.kind) ? -1 : 1;
      state.direction = state.sort === column.name ? -state.direction : first;
      state.sort = column.name;
      redraw();
    });
    return cell;
  }

  function body(column, value) {
    const text = number(value, column.digits, column.kind);
    const cell = element("td");
    if (NUMERIC.has(column.kind)) cell.classList.add("n");
    if (value === null) cell.classList.add("null");
    if (typeof value === "boolean") cell.classList.add(value ? "yes" : "no");
    if (column.kind === "percent" && value !== null && value >= 0 && value <= 100) {
      cell.classList.add("bar");
      cell.style.setProperty("--w", `${value}%`);
    }
    if (column.kind === "text" && text.length > 24) {
      // Kernel names can be very long and are clipped; sentences are not.
      const named = isName(column.name);
      cell.classList.add(named ? "name" : "long");
      cell.append(...(named ? [element("span", { className: "clip", title: text }, text)] : breakable(text)));
    } else {
      if (column.kind === "text" && isName(column.name)) cell.classList.add("name");
      cell.append(...(column.kind === "text" ? breakable(text) : [text]));
    }
    return cell;
  }

  function select(table, state) {
    const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const match = (row) => {
      const text = row.map((v, i) => number(v, table.columns[i].digits, table.columns[i].kind)).join("\u0000").toLowerCase();
      return words.every((w) => text.includes(w));
    };
    const rows = words.length ? table.rows.filter(match) : [...table.rows];
    if (state.sort !== null) {
      const at = table.columns.findIndex((c) => c.name === state.sort);
      rows.sort((a, b) => compare(a[at], b[at], state.direction));
    }
    return rows;
  }

  function tools(table, id, state, redraw) {
    const count = element("span", { role: "status" });
    const more = element("button", { type: "button" });
    more.addEventListener("click", () => {
      state.all = !state.all;
      redraw();
    });
    const bar = element("div", { className: "tools" });
    if (table.columns.some((c) => c.detail)) {
      const toggle = element("button", { type: "button", className: "columns", "aria-expanded": "false" });
      toggle.addEventListener("click", () => {
        state.detail = !state.detail;
        redraw();
      });
      bar.append(toggle);
    }
    if (table.rows.length > 5) {
      const input = element("input", { type: "search", placeholder: "filter rows", "aria-label": `Filter: ${table.title}` });
      input.addEventListener("input", () => {
        state.filter = input.value;
        redraw();
      });
      bar.prepend(input, count, more);
    }
    return { bar, count, more, toggle: bar.querySelector(".columns") };
  }

  function build(host) {
    const table = Voxtune.data.tables[host.dataset.table];
    const state = { sort: null, direction: 1, filter: "", all: false, detail: false };
    const details = table.columns.filter((c) => c.detail).length;
    const tbody = element("tbody");
    const redraw = () => {
      const rows = select(table, state);
      const long = rows.length > FEW + SLACK;
      const shown = state.all || !long ? rows : rows.slice(0, FEW);
      const places = table.columns.map((_, i) => i).filter((i) => state.detail || !table.columns[i].detail);
      headRow.replaceChildren(...places.map((i) => heads[i]));
      tbody.replaceChildren(
        ...shown.map((row) => element("tr", {}, ...places.map((i) => body(table.columns[i], row[i])))),
      );
      if (controls.toggle) {
        controls.toggle.textContent = state.detail ? "Fewer columns" : `${details} more column${details > 1 ? "s" : ""}`;
        controls.toggle.setAttribute("aria-expanded", String(state.detail));
      }
      controls.count.textContent = `${shown.length} of ${table.rows.length} rows`;
      controls.more.hidden = !long;
      controls.more.textContent = state.all ? "Show fewer" : `Show all ${rows.length}`;
      heads.forEach((cell, i) => {
        const sorted = table.columns[i].name === state.sort;
        cell.setAttribute("aria-sort", sorted ? (state.direction > 0 ? "ascending" : "descending") : "none");
      });
    };
    const controls = tools(table, host.dataset.table, state, redraw);
    const heads = table.columns.map((c) => head(c, state, redraw));
    const headRow = element("tr");
    const grid = element("table", { className: "grid", "aria-label": table.title });
    grid.append(element("thead", {}, headRow), tbody);
    host.append(controls.bar, element("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": table.title }, grid));
    redraw();
  }

  return { build };
})();
