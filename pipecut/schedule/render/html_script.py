"""The script of the HTML page: draws the spans on canvases, with zoom, pan, hover and keys."""

from __future__ import annotations

SCRIPT = r"""
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const SCHEMES = {
  light: {ground: "#fff", lane: "#f0f0f0", line: "#999", ink: "#000", frame: "#222", mark: "#d0006f"},
  dark: {ground: "#16181c", lane: "#25282e", line: "#6b7079", ink: "#eee", frame: "#000", mark: "#ff8ad0"},
};
const LEFT = 64, RIGHT = 16, AXIS = 36, ALONE_FROM = 1.5, FONT = "Helvetica, Arial, sans-serif";
const BACK = 0, FRONT = 1, FOOT = 2;
const dark = matchMedia("(prefers-color-scheme: dark)");
const tip = document.getElementById("tip");
const extent = data.extent;
const view = {from: 0, to: extent};
let printing = false, waiting = false, selected = null;

// A row is a run of numbers: the gap before the span, its time, its kind, and one microbatch for each part.
function decode(numbers, kinds) {
  const row = {start: [], end: [], until: [], kind: [], numbers: []};
  let end = 0, until = 0;
  for (let at = 0; at < numbers.length;) {
    const start = end + numbers[at], kind = kinds[numbers[at + 2]];
    end = start + numbers[at + 1];
    until = Math.max(until, end);
    row.start.push(start); row.end.push(end); row.until.push(until); row.kind.push(kind);
    row.numbers.push(numbers.slice(at + 3, at + 3 + kind.parts.length));
    at += 3 + kind.parts.length;
  }
  return row;
}

const charts = data.charts.map((chart, index) => ({
  rows: chart.rows.map(row => decode(row, chart.kinds)),
  beside: chart.kinds.some(kind => kind.track !== FRONT),
  canvas: document.querySelectorAll("canvas")[index],
}));
const lanes = charts.reduce((sum, chart) => sum + chart.rows.length, 0);
const MOST_COLUMNS = 12000;  // in all lanes, so that a big plan can be moved smoothly

function laneHeight() {
  return Math.max(9, Math.min(30, Math.floor((innerHeight - 150 - 80 * charts.length) / lanes)));
}

function shown(value) { return String(Number(value.toPrecision(6))); }
function withUnit(value) { return shown(value) + (data.unit ? " " + data.unit : ""); }
function nameOf(row, at) {
  const kind = row.kind[at];
  const names = kind.parts.map((part, place) => part.stage + part.op + numberOf(row, at, place) + part.peer);
  return kind.overlap ? "(" + names.join(";") + ")" + kind.overlap : names[0];
}
function numberOf(row, at, place) {
  const number = row.numbers[at][place];
  return number < 0 ? "" : number;
}

// The first place whose value is above the bound, in a list that never falls.
function firstAbove(list, bound) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] > bound) high = middle; else low = middle + 1;
  }
  return low;
}

// Lines rather than a pattern fill, which browsers leave out in print.
function hatch(pen, lines, left, top, right, bottom) {
  const rising = lines.includes("/") ? left + top : Infinity, falling = lines.includes("\\") ? left - bottom : Infinity;
  pen.beginPath();
  for (let sum = Math.floor(rising / data.tile) * data.tile; sum < right + bottom; sum += data.tile) {
    const from = Math.max(left, sum - bottom), to = Math.min(right, sum - top);
    if (from < to) { pen.moveTo(from, sum - from); pen.lineTo(to, sum - to); }
  }
  for (let off = Math.floor(falling / data.tile) * data.tile; off < right - top; off += data.tile) {
    const from = Math.max(left, off + top), to = Math.min(right, off + bottom);
    if (from < to) { pen.moveTo(from, from - off); pen.lineTo(to, to - off); }
  }
  pen.strokeStyle = "rgba(0,0,0,.35)"; pen.lineWidth = 1; pen.stroke();
}

function draw() {
  waiting = false;
  for (const chart of charts) drawChart(chart);
}
function redraw() {
  if (!waiting) { waiting = true; requestAnimationFrame(draw); }
}

function drawChart(chart) {
  const lane = chart.lane = laneHeight(), canvas = chart.canvas;
  const width = chart.width = canvas.parentElement.clientWidth, height = lane * chart.rows.length + AXIS;
  const dots = Math.min(printing ? 2 : devicePixelRatio || 1, 16000 / height);
  canvas.width = Math.round(width * dots); canvas.height = Math.round(height * dots);
  canvas.style.height = height + "px";
  // Thousands of small fills are quick in memory, and take seconds where a graphics card is only emulated.
  const pen = canvas.getContext("2d", {willReadFrequently: true});
  const colours = SCHEMES[dark.matches && !printing ? "dark" : "light"];
  pen.scale(dots, dots);
  pen.fillStyle = colours.ground; pen.fillRect(0, 0, width, height);
  const plot = width - LEFT - RIGHT, scale = plot / (view.to - view.from);
  const column = Math.max(3, Math.ceil(plot * lanes / MOST_COLUMNS));
  const box = lane > 12 ? lane - 3 : lane - 1, main = chart.beside ? box * 0.78 : box;
  pen.font = "12px " + FONT; pen.textBaseline = "middle";
  const every = Math.ceil(12 / lane);
  chart.rows.forEach((row, rank) => {
    pen.fillStyle = colours.lane; pen.fillRect(LEFT, rank * lane, plot, box);
    pen.fillStyle = colours.ink;
    if (rank % every === 0) pen.fillText("rank " + rank, 4, Math.max(rank * lane + box / 2, 7));
  });
  drawAxis(pen, colours, plot, scale, lane * chart.rows.length);
  pen.save();
  pen.beginPath(); pen.rect(LEFT, 0, plot, height - AXIS); pen.clip();
  chart.rows.forEach((row, rank) => {
    const top = rank * lane, first = firstAbove(row.until, view.from - 1e-12), last = firstAbove(row.start, view.to);
    const place = {pen, colours, row, first, last, scale, wide: column};
    if (chart.beside) drawTrack({...place, track: BACK, top, height: box});
    drawTrack({...place, track: FRONT, top, height: main});
    if (chart.beside) drawTrack({...place, track: FOOT, top: top + main + 1, height: box - main - 1});
  });
  if (selected && selected.chart === chart) {
    const row = chart.rows[selected.rank], x = LEFT + (row.start[selected.at] - view.from) * scale;
    pen.strokeStyle = colours.mark; pen.lineWidth = 2.5;
    const wide = Math.max((row.end[selected.at] - row.start[selected.at]) * scale, 2);
    pen.strokeRect(x, selected.rank * lane, wide, box);
  }
  pen.restore();
}

function drawAxis(pen, colours, plot, scale, bottom) {
  const apart = Math.max(80 / scale, data.unit === "slots" ? 1 : 0), power = 10 ** Math.floor(Math.log10(apart));
  const step = [1, 2, 5, 10].map(times => times * power).find(each => each >= apart) || 10 * power;
  pen.strokeStyle = colours.line; pen.fillStyle = colours.ink; pen.lineWidth = 0.5;
  pen.textAlign = "center"; pen.font = "11px " + FONT;
  for (let tick = Math.ceil(view.from / step - 1e-9); tick * step <= view.to + step * 1e-9; tick++) {
    const x = LEFT + (tick * step - view.from) * scale;
    pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, bottom + 3); pen.stroke();
    pen.fillText(shown(tick * step), x, bottom + 11);
  }
  pen.textAlign = "left";
  pen.fillText(data.axis, LEFT, bottom + 27);
}

// Boxes, and where they are too narrow columns, with a band for each look as high as its share of the time.
function drawTrack(place) {
  const {row, scale, track, wide} = place, start = row.start, end = row.end, shares = new Map();
  let column = -1, lone = -1, count = 0;
  const flush = () => {
    if (count === 1) drawBox(place, lone);
    else if (count > 1) drawColumn(place, column, shares);
    shares.clear(); count = 0;
  };
  for (let at = place.first; at < place.last; at++) {
    const kind = row.kind[at];
    if (kind.track !== track) continue;
    const time = end[at] - start[at];
    if (time * scale >= ALONE_FROM) { flush(); column = -1; drawBox(place, at); continue; }
    const here = Math.floor((start[at] - view.from) * scale / wide);
    if (here !== column) { flush(); column = here; }
    count += 1; lone = at;
    for (const part of kind.parts) shares.set(part.look, (shares.get(part.look) || 0) + time / kind.parts.length);
  }
  flush();
}

function drawColumn({pen, top, height, scale, wide}, column, shares) {
  let sum = 0;
  for (const time of shares.values()) sum += time;
  const whole = Math.max(sum, wide / scale), least = Math.min(1, height / shares.size);
  for (const look of [...shares.keys()].sort((one, other) => one - other)) {
    const band = Math.max(height * shares.get(look) / whole, sum ? 0 : least);
    pen.fillStyle = data.looks[look].fill;
    pen.fillRect(LEFT + column * wide, top, wide, band);
    top += band;
  }
}

function drawBox({pen, colours, row, top, height, scale}, at) {
  const kind = row.kind[at], part = height / kind.parts.length;
  const left = LEFT + Math.max((row.start[at] - view.from) * scale, -LEFT);
  const right = LEFT + Math.min((row.end[at] - view.from) * scale, (view.to - view.from) * scale + LEFT);
  const wide = Math.max(right - left, 1);
  kind.parts.forEach((leaf, place) => {
    const look = data.looks[leaf.look], y = top + place * part;
    pen.fillStyle = look.fill; pen.fillRect(left, y, wide, part);
    if (wide >= 6 && look.hatch) hatch(pen, look.hatch, Math.max(left, LEFT), y, left + wide, y + part);
    if (wide >= 3) { pen.strokeStyle = colours.frame; pen.lineWidth = 0.5; pen.strokeRect(left, y, wide, part); }
    else if (row.start[at] === row.end[at]) { pen.fillStyle = colours.line; pen.fillRect(left, y, 1, part); }
    const label = kind.letter || String(numberOf(row, at, place)), size = Math.min(12, part * 0.75);
    if (kind.track === FOOT || size < 6 || label.length * size * 0.62 + 3 > wide) return;
    pen.font = size + "px " + FONT; pen.textAlign = "center"; pen.lineWidth = 3;
    pen.strokeStyle = look.fill; pen.strokeText(label, left + wide / 2, y + part / 2 + 0.5);
    pen.fillStyle = look.ink; pen.fillText(label, left + wide / 2, y + part / 2 + 0.5);
    pen.textAlign = "left";
  });
}

function setView(from, to) {
  const size = Math.min(Math.max(to - from, extent * 1e-6), extent);
  view.from = Math.min(Math.max(from, 0), extent - size);
  view.to = view.from + size;
  redraw();
}
function zoom(times, about = (view.from + view.to) / 2) {
  setView(about - (about - view.from) / times, about + (view.to - about) / times);
}
function pan(share) {
  const by = share * (view.to - view.from);
  setView(view.from + by, view.to + by);
}
function whole() { setView(0, extent); }
function timeAt(chart, x) {
  return view.from + (x - LEFT) / (chart.width - LEFT - RIGHT) * (view.to - view.from);
}

// The span under the pointer: a transfer at the foot of a lane, a computation above it, otherwise any other.
function spanAt(chart, x, y) {
  const rank = Math.floor(y / chart.lane);
  if (x < LEFT || rank < 0 || rank >= chart.rows.length) return null;
  const row = chart.rows[rank], time = timeAt(chart, x), near = 2 * (timeAt(chart, x + 1) - time);
  const wanted = chart.beside && (y - rank * chart.lane) / chart.lane > 0.72 ? FOOT : FRONT;
  let best = null;
  for (let at = firstAbove(row.until, time - near); at < row.start.length && row.start[at] <= time + near; at++) {
    if (row.end[at] < time - near) continue;
    const off = Math.max(row.start[at] - time, time - row.end[at], 0);
    const score = off / near + (row.kind[at].track === wanted ? 0 : row.kind[at].track === BACK ? 1 : 2);
    if (!best || score <= best.score) best = {chart, rank, at, score};
  }
  return best;
}

function showTooltip(found, x, y) {
  if (!found) { tip.hidden = true; return; }
  const row = found.chart.rows[found.rank], kind = row.kind[found.at];
  const lines = [nameOf(row, found.at) + "  (" + kind.name + ")", "rank " + found.rank];
  kind.parts.forEach((part, place) => {
    const number = numberOf(row, found.at, place);
    const numbered = number === "" ? "" : ", " + (kind.numbered || "microbatch") + " " + number;
    lines.push("stage " + part.stage + numbered + (part.to === undefined ? "" : ", peer: stage " + part.to));
  });
  const start = row.start[found.at], end = row.end[found.at];
  lines.push("start " + withUnit(start), "end " + withUnit(end), "takes " + withUnit(end - start));
  tip.textContent = lines.join("\n");
  tip.hidden = false;
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = (y + 18 + tip.offsetHeight > innerHeight ? Math.max(4, y - tip.offsetHeight - 10) : y + 18) + "px";
}

// Steps through the spans by keys, so that all that a pointer can find can be found without one.
function select(by, ranks) {
  if (!selected) selected = {chart: charts[0], rank: charts[0].rows.findIndex(row => row.start.length), at: 0};
  else if (ranks) moveToRank(ranks);
  else {
    const last = selected.chart.rows[selected.rank].start.length - 1;
    selected.at = Math.min(Math.max(selected.at + by, 0), last);
  }
  const {chart, rank, at} = selected, row = chart.rows[rank], middle = (row.start[at] + row.end[at]) / 2;
  if (middle < view.from || middle > view.to) pan((middle - (view.from + view.to) / 2) / (view.to - view.from));
  draw();
  const frame = chart.canvas.getBoundingClientRect();
  const x = LEFT + (middle - view.from) / (view.to - view.from) * (chart.width - LEFT - RIGHT);
  showTooltip(selected, frame.left + x, frame.top + (rank + 1) * chart.lane - 14);
}
function moveToRank(by) {
  const all = charts.flatMap(chart => chart.rows.map((row, rank) => ({chart, rank, row})));
  const filled = all.filter(each => each.row.start.length);
  const here = filled.findIndex(each => each.chart === selected.chart && each.rank === selected.rank);
  const time = filled[here].row.start[selected.at], next = filled[Math.min(Math.max(here + by, 0), filled.length - 1)];
  selected = {chart: next.chart, rank: next.rank, at: Math.max(firstAbove(next.row.start, time) - 1, 0)};
}

const KEYS = {
  "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), "_": () => zoom(1 / 1.5), "0": whole,
  ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15),
  ArrowUp: () => scrollBy(0, -60), ArrowDown: () => scrollBy(0, 60),
  n: () => select(1), p: () => select(-1), j: () => select(0, 1), k: () => select(0, -1),
  Escape: () => { selected = null; tip.hidden = true; redraw(); },
};
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});
document.getElementById("in").onclick = () => zoom(1.5);
document.getElementById("out").onclick = () => zoom(1 / 1.5);
document.getElementById("left").onclick = () => pan(-0.3);
document.getElementById("right").onclick = () => pan(0.3);
document.getElementById("whole").onclick = whole;

for (const chart of charts) {
  let held = null;
  chart.canvas.addEventListener("wheel", event => {
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) / 800);
    else zoom(Math.exp(-Math.sign(event.deltaY) * Math.min(Math.abs(event.deltaY), 120) / 400),
      timeAt(chart, event.offsetX));
  }, {passive: false});
  chart.canvas.addEventListener("pointerdown", event => {
    held = {x: event.offsetX, from: view.from, to: view.to};
    chart.canvas.setPointerCapture(event.pointerId);
    chart.canvas.classList.add("held");
  });
  chart.canvas.addEventListener("pointermove", event => {
    if (!held) { showTooltip(spanAt(chart, event.offsetX, event.offsetY), event.clientX, event.clientY); return; }
    tip.hidden = true;
    const by = (held.x - event.offsetX) / (chart.width - LEFT - RIGHT) * (held.to - held.from);
    setView(held.from + by, held.to + by);
  });
  const release = () => { held = null; chart.canvas.classList.remove("held"); };
  chart.canvas.addEventListener("pointerup", release);
  chart.canvas.addEventListener("pointercancel", release);
  chart.canvas.addEventListener("pointerleave", () => { if (!held) tip.hidden = true; });
}
addEventListener("resize", redraw);
dark.addEventListener("change", redraw);
addEventListener("beforeprint", () => { printing = true; tip.hidden = true; draw(); });
addEventListener("afterprint", () => { printing = false; draw(); });
draw();
"""
