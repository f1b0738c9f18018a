// Figures that answer: values on pointing, lines switched by the legend, a range zoomed by dragging, downloads.
"use strict";

class ChartFigure {
  constructor(figure, chart, themeNow) {
    Object.assign(this, { figure, themeNow, hidden: new Set(), range: null });
    this.canvas = figure.querySelector(".canvas");
    this.canvas.tabIndex = 0;
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.legend = document.createElement("div");
    this.legend.className = "legend";
    this.canvas.before(this.legend);
    this.tools();
    this.listen();
    this.show(chart);
    new ResizeObserver(() => { if (Math.abs(this.canvas.clientWidth - this.width) > 2) this.render(); }).observe(this.canvas);
  }

  show(chart) {
    Object.assign(this, { chart, range: null });
    this.hidden.clear();
    this.render();
  }

  tools() {
    const bar = document.createElement("div");
    bar.className = "tools";
    this.reset = this.button(bar, "Whole range", "Show the whole range again", () => { this.range = null; this.render(); });
    this.button(bar, "PNG", "Download this figure as PNG", () => this.download("png"));
    this.button(bar, "SVG", "Download this figure as SVG", () => this.download("svg"));
    this.figure.querySelector("header").append(bar);
  }

  button(parent, label, title, action) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", textContent: label, title, onclick: action });
    parent.append(button);
    return button;
  }

  render() {
    this.width = Math.max(280, this.canvas.clientWidth || 640);
    const theme = this.themeNow();
    this.drawn = draw(this.chart, { theme, width: this.width, hidden: this.hidden, range: this.range });
    this.canvas.replaceChildren(this.drawn.svg, this.tip);
    this.cross = this.drawn.bars ? null : make("line", { y1: this.drawn.box.top, y2: this.drawn.box.bottom, stroke: theme.muted, opacity: 0 }, this.drawn.svg);
    this.brush = make("rect", { fill: theme.accent, opacity: 0, y: this.drawn.box.top, height: this.drawn.box.bottom - this.drawn.box.top }, this.drawn.svg);
    this.reset.hidden = !this.range;
    this.legend.replaceChildren();
    if (this.chart.series.length < 2) return;
    for (const series of this.chart.series) {
      const button = this.button(this.legend, series.name, "Show or hide", () => {
        if (!this.hidden.delete(series.name)) this.hidden.add(series.name);
        this.render();
      });
      button.setAttribute("aria-pressed", String(!this.hidden.has(series.name)));
      const sign = make("svg", { width: 20, height: 11, viewBox: "0 -0.5 20 11" });
      swatch(series, this.chart, theme, sign);
      button.prepend(sign);
    }
  }

  // Pixels of the drawing under the pointer.
  at(event) {
    const bounds = this.drawn.svg.getBoundingClientRect();
    const zoom = this.width / bounds.width;
    return { x: (event.clientX - bounds.left) * zoom, y: (event.clientY - bounds.top) * zoom };
  }

  nearest(pixel) {
    let best = null;
    for (const [key, place] of this.drawn.places)
      if (best === null || Math.abs(place - pixel) < Math.abs(this.drawn.places.get(best) - pixel)) best = key;
    return best;
  }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("pointermove", (event) => {
      const { x, y } = this.at(event);
      if (this.from !== undefined) return this.drag(x);
      this.point(this.nearest(this.drawn.bars ? y : x));
    });
    canvas.addEventListener("pointerleave", () => { this.from = undefined; this.point(null); this.brush.setAttribute("opacity", 0); });
    canvas.addEventListener("pointerdown", (event) => {
      if (!this.drawn.bars && event.pointerType === "mouse" && event.button === 0) this.from = this.at(event).x;
    });
    canvas.addEventListener("pointerup", (event) => {
      const start = this.from, end = this.at(event).x;
      this.from = undefined;
      this.brush.setAttribute("opacity", 0);
      if (start === undefined || Math.abs(end - start) < 12) return;
      const range = [this.drawn.invert(Math.min(start, end)), this.drawn.invert(Math.max(start, end))];
      const inside = [...this.drawn.places.keys()].filter((x) => x >= range[0] && x <= range[1]);
      if (inside.length > 1) { this.range = range; this.render(); }
    });
    canvas.addEventListener("dblclick", () => { this.range = null; this.render(); });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") { this.range = null; this.render(); }
      if (!step) return;
      event.preventDefault();
      const keys = [...this.drawn.places.keys()].sort((a, b) => a - b);
      const here = keys.indexOf(this.current);
      this.point(keys[Math.min(keys.length - 1, Math.max(0, here + step))]);
    });
    canvas.addEventListener("blur", () => this.point(null));
  }

  drag(x) {
    this.point(null);
    this.brush.setAttribute("x", Math.min(this.from, x));
    this.brush.setAttribute("width", Math.abs(x - this.from));
    this.brush.setAttribute("opacity", 0.14);
  }

  point(place) {
    this.current = place;
    this.tip.style.display = "none";
    if (this.cross) this.cross.setAttribute("opacity", 0);
    if (place === null || place === undefined) return;
    const { chart } = this, theme = this.themeNow(), pixel = this.drawn.places.get(place);
    const found = [];
    for (const series of this.drawn.shown) {
      const here = (p) => (this.drawn.bars ? Math.floor(p.x) : p.x) === place && p.note;
      const point = series.points.find(here);
      if (point) found.push({ series, point });
    }
    if (!found.length) return;
    const named = chart.x.categories.length;
    if (named && !this.drawn.bars) this.say(found[0].point.note, found, theme, false);
    else {
      if (!this.drawn.bars) found.sort((a, b) => (b.point.y ?? -Infinity) - (a.point.y ?? -Infinity));
      this.say(named ? chart.x.categories[place] : `${chart.x.label} ${tickText(place, chart.x.unit)}`, found, theme, true);
    }
    this.tip.style.display = "block";
    const right = !this.drawn.bars && pixel > this.width / 2, zoom = this.canvas.clientWidth / this.width;
    if (this.cross) {
      for (const end of ["x1", "x2"]) this.cross.setAttribute(end, pixel);
      this.cross.setAttribute("opacity", 0.5);
    }
    this.tip.style.left = this.drawn.bars ? "auto" : right ? "auto" : `${pixel * zoom + 12}px`;
    this.tip.style.right = this.drawn.bars ? "0" : right ? `${this.canvas.clientWidth - pixel * zoom + 12}px` : "auto";
    this.tip.style.top = this.drawn.bars ? `${pixel * zoom + 12}px` : "8px";
  }

  say(title, found, theme, lines) {
    const head = document.createElement("b");
    const [first, ...rest] = title.split("\n");
    head.textContent = first;
    this.tip.replaceChildren(head);
    const add = (color, name, note) => {
      const line = document.createElement("div");
      if (color) line.append(Object.assign(document.createElement("i"), { style: `background:${color}` }));
      if (name) line.append(Object.assign(document.createElement("span"), { textContent: name }));
      line.append(Object.assign(document.createElement("em"), { textContent: note }));
      this.tip.append(line);
    };
    if (!lines) return rest.forEach((line) => add(null, "", line));
    for (const { series, point } of found) {
      const bars = this.drawn.bars;
      const value = point.y === null || bars ? "" : `${number(point.y)} ${this.chart.y.label.split(", ").pop()}`;
      add(colorOf(series.color, theme), bars ? "" : series.name, [value, point.note].filter(Boolean).join(" · "));
    }
  }

  // Always on the light ground: pictures end up in documents.
  async download(kind) {
    const { text, width, height } = standalone(this.chart, THEMES.light);
    const svg = new Blob([text], { type: "image/svg+xml" });
    if (kind === "svg") return saveBlob(svg, `${this.chart.id}.svg`);
    const image = new Image();
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
    await image.decode();
    const canvas = Object.assign(document.createElement("canvas"), { width: width * 2, height: height * 2 });
    canvas.getContext("2d").drawImage(image, 0, 0, width * 2, height * 2);
    canvas.toBlob((blob) => saveBlob(blob, `${this.chart.id}.png`), "image/png");
  }
}

function saveBlob(blob, name) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 5000);
}
