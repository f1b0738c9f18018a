// Draws the charts that Python described: lines over an axis, or stacked bars. Text only ever enters as text.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const FONT = "Inter, 'Helvetica Neue', 'Liberation Sans', Arial, sans-serif";
// Point shapes around (0, 0), in the order of the house style's markers.
const SHAPES = [
  "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0", "M-3.2 -3.2h6.4v6.4h-6.4z", "M0 -4.2L4 3H-4z", "M0 -4.6L4.2 0L0 4.6L-4.2 0z",
  "M0 4.2L4 -3H-4z", "M-1.4 -4h2.8v2.6h2.6v2.8h-2.6v2.6h-2.8v-2.6h-2.6v-2.8h2.6z",
  "M-4 -2.2L-2.2 -4L0 -1.8L2.2 -4L4 -2.2L1.8 0L4 2.2L2.2 4L0 1.8L-2.2 4L-4 2.2L-1.8 0z",
  "M0 -4.8L1.3 -1.6L4.6 -1.5L2 .7L2.9 4L0 2.1L-2.9 4L-2 .7L-4.6 -1.5L-1.3 -1.6z",
];
const CROSS = "M-3.2 -3.2L3.2 3.2M-3.2 3.2L3.2 -3.2";

function make(name, attributes, parent, content) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (content !== undefined) node.textContent = content;
  if (parent) parent.append(node);
  return node;
}

const colorOf = (index, theme) => (index < 0 ? theme.muted : theme.series[index % theme.series.length]);
const shapeOf = (index) => SHAPES[(index + Math.floor(index / 8)) % SHAPES.length];

// Four significant digits, thousands set apart.
function number(value) {
  if (value === 0) return "0";
  const size = Math.floor(Math.log10(Math.abs(value)));
  if (size < -4 || size > 8) return value.toExponential(2);
  return value.toLocaleString("en-US", { minimumFractionDigits: 0, maximumFractionDigits: Math.max(0, 3 - size) });
}

function tickText(value, unit) {
  if (unit === "bytes") {
    for (const [size, name] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (value >= size) return `${number(value / size)} ${name}`;
    return `${number(value)} B`;
  }
  if (unit === "count" && value >= 1024 && value % 1024 === 0) return `${value / 1024}k`;
  return number(value);
}

function niceTicks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-12) + step * 1e-9; i++) ticks.push(i * step);
  return ticks;
}

function logTicks(low, high, base, wanted) {
  const ticks = [];
  const decades = Math.log(high / low) / Math.log(base);
  const steps = base === 10 && decades < 1.1 ? [1, 2, 3, 5, 7] : base === 10 && decades < 2.5 ? [1, 2, 5] : [1];
  for (let e = Math.floor(Math.log(low) / Math.log(base)); base ** e <= high * 1.0001; e++)
    for (const m of steps) if (m * base ** e >= low * 0.9999 && m * base ** e <= high * 1.0001) ticks.push(m * base ** e);
  const keep = Math.ceil(ticks.length / Math.max(2, wanted));
  return ticks.filter((_, i) => i % keep === 0);
}

function scale(axis, low, high, from, to) {
  if (axis.log) {
    const a = Math.log(low), b = Math.log(high);
    return (v) => from + ((Math.log(v) - a) / (b - a || 1)) * (to - from);
  }
  return (v) => from + ((v - low) / (high - low || 1)) * (to - from);
}

const drawable = (chart, point) => point.y !== null && (!chart.y.log || point.y > 0);

function domain(chart, shown, range) {
  const inside = (p) => !range || (p.x >= range[0] && p.x <= range[1]);
  const xs = [...shown.flatMap((s) => s.points.map((p) => p.x)), ...chart.marks.map((m) => m.x)].filter((x) => !range || (x >= range[0] && x <= range[1]));
  const ys = shown.flatMap((s) => s.points.filter((p) => inside(p) && drawable(chart, p)).map((p) => p.y));
  let [left, right] = range || [Math.min(...xs), Math.max(...xs)];
  if (!xs.length && !range) [left, right] = [0, 1];
  if (left === right) [left, right] = chart.x.log ? [left / 2, right * 2] : [left - 1, right + 1];
  else if (chart.x.log) { const pad = (right / left) ** 0.03; left /= pad; right *= pad; }
  else if (chart.x.categories.length) { left -= 0.4; right += 0.4; }
  let low = Math.min(...ys), high = Math.max(...ys);
  if (!ys.length) [low, high] = chart.y.log ? [1, 10] : [0, 1];
  if (chart.y.log) [low, high] = [low / 1.35, high * 1.25];
  else if (chart.y.zero) [low, high] = [0, high * 1.08 || 1];
  else { const pad = Math.max((high - low) * 0.18, Math.abs(high) * 0.03, 1e-12); low = Math.max(low > 0 ? 0 : -Infinity, low - pad); high += pad; }
  return { left, right, low, high };
}

// One line chart as an SVG element; `places` are the x positions a pointer can snap to.
function drawLines(chart, view) {
  const { theme, width, hidden, range } = view;
  const shown = chart.series.filter((s) => !hidden.has(s.name));
  const height = view.height || Math.round(Math.min(360, Math.max(240, width * 0.65)));
  const marked = chart.marks.length ? 18 : 6;
  const box = { left: 58, right: width - 14, top: 12 + marked, bottom: height - 42 };
  const d = domain(chart, shown, range);
  const X = scale(chart.x, d.left, d.right, box.left, box.right);
  const Y = scale(chart.y, d.low, d.high, box.bottom, box.top);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "font-family": FONT, "font-size": 11.5 });
  make("title", {}, svg, chart.title);
  const yTicks = chart.y.log ? logTicks(d.low, d.high, chart.y.log, 7) : niceTicks(d.low, d.high, 5);
  for (const tick of yTicks) {
    make("line", { x1: box.left, x2: box.right, y1: Y(tick), y2: Y(tick), stroke: theme.grid }, svg);
    make("text", { x: box.left - 8, y: Y(tick) + 4, "text-anchor": "end", fill: theme.muted }, svg, tickText(tick, chart.y.unit));
  }
  make("text", { x: 2, y: 11, fill: theme.muted }, svg, chart.y.label);
  make("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, stroke: theme.line }, svg);
  const names = chart.x.categories;
  const room = Math.max(2, Math.floor((box.right - box.left) / (names.length ? 74 : 46)));
  // The measured places themselves where they fit.
  const measured = [...new Set(shown.flatMap((s) => s.points.map((p) => p.x)))].filter((x) => x >= d.left && x <= d.right);
  let xTicks;
  if (names.length) {
    const first = Math.max(0, Math.ceil(d.left)), last = Math.min(names.length - 1, Math.floor(d.right));
    const every = Math.max(1, Math.ceil((last - first + 1) / room));
    xTicks = []; for (let i = first; i <= last; i += every) xTicks.push(i);
  } else if (chart.x.log && measured.length <= room) xTicks = measured;
  else xTicks = chart.x.log ? logTicks(d.left, d.right, chart.x.log, room) : niceTicks(d.left, d.right, room);
  for (const tick of xTicks)
    make("text", { x: X(tick), y: box.bottom + 17, "text-anchor": "middle", fill: theme.muted }, svg, names.length ? names[tick] : tickText(tick, chart.x.unit));
  make("text", { x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle", fill: theme.muted }, svg, chart.x.label);

  const clip = `clip-${chart.id}-${Math.random().toString(36).slice(2)}`;
  make("rect", { x: box.left - 6, y: box.top - 6, width: box.right - box.left + 12, height: box.bottom - box.top + 12 }, make("clipPath", { id: clip }, make("defs", {}, svg)));
  let quiet = 0;  // marks that are no alarm say so inside the plot, one below another where many meet
  for (const mark of chart.marks) {
    if (mark.x < d.left || mark.x > d.right) continue;
    const color = { regression: theme.bad, possible: theme.warn }[mark.kind] || theme.muted;
    const sign = { regression: "▲ ", possible: "△ " }[mark.kind] || "";
    make("line", { x1: X(mark.x), x2: X(mark.x), y1: box.top - 6, y2: box.bottom, stroke: color, "stroke-dasharray": "3 3" }, svg);
    const end = X(mark.x) > (box.left + box.right) / 2;
    const y = sign || mark.kind === "phase" ? box.top - 6 : box.top + 5 + 13 * (quiet++ % 4);
    make("text", { x: X(mark.x) + (end ? -5 : 5), y, "text-anchor": end ? "end" : "start", fill: color, "font-weight": mark.kind === "regression" ? 600 : 400 }, svg, sign + mark.label);
  }
  const plot = make("g", { "clip-path": `url(#${clip})` }, svg);
  const places = new Map();
  for (const series of shown) {
    const color = colorOf(series.color, theme);
    const runs = [[]];
    for (const point of series.points) {
      if (drawable(chart, point)) runs[runs.length - 1].push(point);
      else if (runs[runs.length - 1].length) runs.push([]);
      if (point.note) places.set(point.x, X(point.x));
    }
    for (const run of runs) {
      if (!run.length) continue;
      const path = run.map((p, i) => `${i ? "L" : "M"}${X(p.x).toFixed(2)} ${Y(p.y).toFixed(2)}`).join("");
      if (series.fill) make("path", { d: `${path}L${X(run[run.length - 1].x)} ${box.bottom}L${X(run[0].x)} ${box.bottom}z`, fill: color, opacity: 0.22 }, plot);
      make("path", { d: path, fill: "none", stroke: color, "stroke-width": series.bound ? 1.3 : 2, "stroke-linejoin": "round", "stroke-dasharray": series.bound ? "1.5 3" : series.peer ? "5 3" : "none" }, plot);
    }
    if (!series.bound && !series.fill)
      for (const point of runs.flat())
        make("path", { d: shapeOf(series.color), transform: `translate(${X(point.x).toFixed(2)} ${Y(point.y).toFixed(2)})`, fill: series.peer ? theme.surface : color, stroke: color, "stroke-width": 1.4 }, plot);
  }
  // Points without a value but with a reason: crosses on the lower edge, beside one another where they share a place.
  const crowds = new Map();
  for (const series of shown)
    for (const { x, y, status } of series.points)
      if (y === null && status && x >= d.left && x <= d.right) crowds.set(x, [...(crowds.get(x) || []), colorOf(series.color, theme)]);
  for (const [x, crowd] of crowds)
    crowd.forEach((stroke, i) => make("path", { d: CROSS, transform: `translate(${X(x) + (i - (crowd.length - 1) / 2) * 9} ${box.bottom - 7})`, stroke, "stroke-width": 2, fill: "none" }, svg));
  return { svg, height, box, places, x: X, y: Y, invert: (pixel) => {
    const share = (pixel - box.left) / (box.right - box.left);
    return chart.x.log ? d.left * (d.right / d.left) ** share : d.left + share * (d.right - d.left);
  }, shown };
}

// The ground of horizontal charts: the measure along the bottom, each category's name above its own `each` pixels.
function ground(chart, view, most, each, margin) {
  const { theme, width } = view, rows = chart.x.categories;
  const height = rows.length * each + 40;
  const box = { left: 4, right: width - margin, top: 4, bottom: rows.length * each + 4 };
  const X = scale(chart.y, 0, most, box.left, box.right);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "font-family": FONT, "font-size": 11.5 });
  make("title", {}, svg, chart.title);
  for (const tick of niceTicks(0, most, Math.max(2, Math.floor(width / 110)))) {
    make("line", { x1: X(tick), x2: X(tick), y1: box.top, y2: box.bottom, stroke: theme.grid }, svg);
    make("text", { x: X(tick), y: box.bottom + 15, "text-anchor": tick ? "middle" : "start", fill: theme.muted }, svg, number(tick));
  }
  make("text", { x: box.left, y: height - 4, fill: theme.muted }, svg, chart.y.label);
  const room = Math.floor(width / 6.6);
  rows.forEach((name, i) => {
    make("text", { x: box.left, y: box.top + i * each + 14, fill: theme.ink, "font-size": 12 }, svg, name.length > room ? `${name.slice(0, room - 1)}…` : name);
  });
  return { svg, height, box, X };
}

// Stacked horizontal bars; bounds are lines across them.
function drawBars(chart, view) {
  const { theme } = view, each = 44;
  const shown = chart.series.filter((s) => !view.hidden.has(s.name));
  const stacked = shown.filter((s) => !s.bound), across = shown.filter((s) => s.bound);
  const reach = (i) => Math.max(stacked.reduce((sum, s) => sum + (s.points[i].y || 0), 0), ...across.map((s) => s.points[i].y || 0));
  const { svg, height, box, X } = ground(chart, view, Math.max(...chart.x.categories.map((_, i) => reach(i)), 1e-12), each, across.length ? 104 : 64);
  const places = new Map();
  chart.x.categories.forEach((_, i) => {
    const top = box.top + i * each;
    let sum = 0;
    for (const series of stacked) {
      const value = series.points[i].y || 0;
      if (value > 0) make("rect", { x: X(sum), y: top + 20, width: Math.max(0.5, X(sum + value) - X(sum) - 1), height: 15, fill: colorOf(series.color, theme), rx: 1.5 }, svg);
      sum += value;
    }
    for (const series of across) {
      const value = series.points[i].y;
      if (value !== null) make("line", { x1: X(value), x2: X(value), y1: top + 16, y2: top + 39, stroke: theme.ink, "stroke-width": 1.6 }, svg);
    }
    // Where nothing was measured stands why, never a zero.
    const measured = stacked.some((s) => s.points[i].y !== null);
    const beside = across.filter((s) => s.points[i].y !== null).map((s) => ` | ${number(s.points[i].y)}`).join("");
    const said = measured ? number(sum) + beside : stacked.map((s) => s.points[i].status).find(Boolean) || "–";
    make("text", { x: X(reach(i)) + 6, y: top + 32, fill: theme.muted }, svg, said);
    places.set(i, top + 27);
  });
  return { svg, height, box, places, shown, bars: true };
}

// Two lanes of intervals below each category's name.
function drawLanes(chart, view) {
  const { theme } = view, each = 58;
  const shown = chart.series.filter((s) => !view.hidden.has(s.name));
  const most = Math.max(...chart.series.flatMap((s) => s.points.map((p) => p.until)), 1e-12);
  const { svg, height, box, X } = ground(chart, view, most, each, 14);
  for (const series of shown)
    for (const { x, y, until } of series.points) {
      const row = Math.floor(x);
      make("rect", { x: X(y), y: box.top + row * each + 20 + (x - row) * 32, width: Math.max(0.4, X(until) - X(y)), height: 14, fill: colorOf(series.color, theme) }, svg);
    }
  const places = new Map(chart.x.categories.map((_, i) => [i, box.top + i * each + 35]));
  return { svg, height, box, places, shown, bars: true };
}

const draw = (chart, view) => ({ bars: drawBars, lanes: drawLanes, line: drawLines })[chart.kind](chart, view);

// The chart alone, on a ground of its own, with title, legend and provenance: what a download holds.
function standalone(chart, theme, width = 900) {
  const { svg, height } = draw(chart, { theme, width: width - 40, hidden: new Set() });
  const outer = make("svg", { xmlns: SVG, width, "font-family": FONT, "font-size": 11.5 });
  const ground = make("rect", { width, fill: theme.surface }, outer);
  make("text", { x: 20, y: 34, "font-size": 17, "font-weight": 700, fill: theme.ink }, outer, chart.title);
  let x = 20, y = 58;
  for (const series of chart.series) {
    const size = 30 + series.name.length * 6.6;
    if (x + size > width - 20 && x > 20) { x = 20; y += 20; }
    swatch(series, chart, theme, make("g", { transform: `translate(${x} ${y - 8})` }, outer));
    make("text", { x: x + 24, y, fill: theme.ink }, outer, series.name);
    x += size + 8;
  }
  const body = make("g", { transform: `translate(20 ${y + 14})` }, outer);
  body.append(...svg.childNodes);
  y += height + 30;
  for (const line of chart.context) make("text", { x: 20, y: (y += 15), "font-size": 10, fill: theme.muted }, outer, line);
  ground.setAttribute("height", y + 16);
  outer.setAttribute("height", y + 16);
  outer.setAttribute("viewBox", `0 0 ${width} ${y + 16}`);
  return { text: new XMLSerializer().serializeToString(outer), width, height: y + 16 };
}

function swatch(series, chart, theme, parent) {
  const color = colorOf(series.color, theme);
  if (chart.kind !== "line" && series.bound) return make("line", { x1: 9, x2: 9, y1: -1, y2: 12, stroke: theme.ink, "stroke-width": 1.6 }, parent);
  if (chart.kind !== "line" || series.fill) return make("rect", { x: 3, y: 0, width: 12, height: 10, rx: 2, fill: color }, parent);
  make("line", { x1: 0, x2: 19, y1: 5, y2: 5, stroke: color, "stroke-width": 2, "stroke-dasharray": series.bound ? "1.5 3" : series.peer ? "5 3" : "none" }, parent);
  if (!series.bound) make("path", { d: shapeOf(series.color), transform: "translate(9.5 5)", fill: series.peer ? theme.surface : color, stroke: color, "stroke-width": 1.2 }, parent);
}
