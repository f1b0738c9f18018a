// The page itself: theme, machines, tables, and the figures' wiring.
"use strict";

const read = (id) => JSON.parse(document.getElementById(id).textContent);
const THEMES = read("themes");
const CHARTS = new Map(read("charts").map((chart) => [chart.id, chart]));
const TABLES = read("tables");
const figures = [];

// Storage may be refused on file://; the page then forgets the choice.
function remembered(key, value) {
  try {
    if (value === undefined) return localStorage.getItem(key);
    localStorage.setItem(key, value);
  } catch { /* nothing to remember with */ }
  return null;
}

const dark = matchMedia("(prefers-color-scheme: dark)");
let choice = remembered("theme");
const themeName = () => choice || (dark.matches ? "dark" : "light");
const themeNow = () => THEMES[themeName()];

function applyTheme() {
  document.documentElement.dataset.theme = themeName();
  document.querySelector(".theme").textContent = themeName() === "dark" ? "Light theme" : "Dark theme";
  for (const one of figures) one.render();
}

function showMachine(id) {
  for (const block of document.querySelectorAll(".machine")) block.classList.toggle("shown", block.id === id);
  for (const nav of document.querySelectorAll(".side nav")) nav.hidden = nav.dataset.machine !== id;
  const select = document.getElementById("machine");
  if (select) select.value = id;
}

function follow() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const block = target && target.closest(".machine");
  if (!block || block.classList.contains("shown")) return;
  showMachine(block.id);
  target.scrollIntoView();
}

function sortBy(table, column, header) {
  const ascending = header.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const key = (row) => row.cells[column].textContent.replace(/[,×]/g, "");
  const rows = [...table.tBodies[0].rows].map((row) => ({ row, text: key(row), absent: row.cells[column].matches(".absent, .number:has(.status)") }));
  rows.sort((a, b) => {
    if (a.absent || b.absent) return a.absent - b.absent; // absent last, whichever way
    const order = !header.classList.contains("number") ? a.text.localeCompare(b.text, "en", { numeric: true }) : Number(a.text) - Number(b.text);
    return ascending ? order : -order;
  });
  table.tBodies[0].append(...rows.map((one) => one.row));
}

// Text that Python packed: base64 of gzip of JSON.
async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

function wireTable(sheet) {
  const table = sheet.querySelector("table");
  [...table.tHead.rows[0].cells].forEach((header, column) => {
    const button = header.querySelector("button");
    if (button) button.onclick = () => sortBy(table, column, header);
  });
  const filter = sheet.querySelector(".filter"), count = sheet.querySelector(".shown-rows");
  const rows = [...table.tBodies[0].rows];
  filter.oninput = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let left = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      left += !row.hidden;
    }
    count.textContent = left === rows.length ? `${rows.length} rows` : `${left} of ${rows.length} rows`;
  };
  for (const button of sheet.querySelectorAll("[data-copy]"))
    button.onclick = async () => {
      const texts = await unpack(TABLES[sheet.id]);
      const done = await copyText(texts[button.dataset.copy]);
      const label = button.textContent;
      button.textContent = done ? "Copied" : "Refused";
      setTimeout(() => { button.textContent = label; }, 1200);
    };
  for (const row of sheet.querySelectorAll("tr[data-open]")) {
    const open = () => openTrend(sheet.closest(".machine"), row.dataset.open);
    row.tabIndex = 0;
    row.onclick = open;
    row.onkeydown = (event) => { if (event.key === "Enter") open(); };
  }
}

function openTrend(machine, id) {
  const figure = machine.querySelector("figure.viewer"), one = figures.find((f) => f.figure === figure), chart = CHARTS.get(id);
  figure.querySelector("h3").textContent = chart.title;
  figure.querySelector(".where").textContent = chart.context.join("\n");
  one.show(chart);
  figure.scrollIntoView({ block: "nearest" });
}

function wireNavigation() {
  const links = new Map([...document.querySelectorAll(".side nav a")].map((link) => [link.getAttribute("href").slice(1), link]));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries)
      if (entry.isIntersecting) {
        for (const link of links.values()) link.classList.remove("here");
        links.get(entry.target.id)?.classList.add("here");
      }
  }, { rootMargin: "-10% 0px -75% 0px" });
  for (const section of document.querySelectorAll("main [id]")) if (links.has(section.id)) seen.observe(section);
}

document.documentElement.classList.add("script");
const select = document.getElementById("machine");
if (select) select.onchange = () => { showMachine(select.value); scrollTo(0, 0); history.replaceState(null, "", `#${select.value}`); };
const first = document.querySelector(".machine");
if (first) showMachine(first.id);
for (const figure of document.querySelectorAll("figure[data-chart]"))
  figures.push(new ChartFigure(figure, CHARTS.get(figure.dataset.chart), themeNow));
document.querySelectorAll(".sheet").forEach(wireTable);
document.querySelector(".theme").onclick = () => { choice = themeName() === "dark" ? "light" : "dark"; remembered("theme", choice); applyTheme(); };
dark.addEventListener("change", applyTheme);
addEventListener("hashchange", follow);
applyTheme();
wireNavigation();
follow();
document.documentElement.dataset.ready = String(figures.length);
