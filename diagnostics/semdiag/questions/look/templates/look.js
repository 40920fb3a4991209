"use strict";
(() => {
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
const Numbers = data.bytes === 8 ? Float64Array : Float32Array;
const NAMES = ["δ", "entropy", "weight on the first key"];
const UNITS = [" nats", " nats", ""];
const FEW = 12; // dropped keys that are listed at first
const state = { layer: 0, head: 0, query: null, k: data.k, metric: 0, all: false };

// Numbers: three digits, as in the static table.
const digits = (x) => x === null || Number.isNaN(x) ? "–" : !Number.isFinite(x) ? (x > 0 ? "∞" : "−∞")
  : (Math.abs(x) >= 1000 ? x.toFixed(0) : x !== 0 && Math.abs(x) < 0.001 ? x.toExponential(2) : String(+x.toPrecision(3))).replace(/^-/, "−");
const percent = (x) => Number.isNaN(x) ? "–" : x > 0 && x < 0.0005 ? "< 0.1%" : `${x >= 0.9995 ? 100 : (100 * x).toFixed(1)}%`;
const trimmed = (word) => word.trim() || word;
const quoted = (word) => `“\u2068${trimmed(word)}\u2069”`; // apart from the direction in which a token is written
const decoded = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const element = (name, text, kind) => { const made = document.createElement(name); if (text !== undefined) made.textContent = text; if (kind) made.className = kind; return made; };

// A mask of queries by keys: a bit each, and where the scores of each query begin.
const masks = [];
function mask(index, rows, keys) {
  if (masks[index]) return masks[index];
  const bits = decoded(data.masks[index]), starts = [0];
  const has = (i, j) => (bits[(i * keys + j) >> 3] >> ((i * keys + j) & 7)) & 1;
  for (let i = 0; i < rows; i++) { let n = starts[i]; for (let j = 0; j < keys; j++) n += has(i, j); starts.push(n); }
  return masks[index] = { has, starts };
}
const queriesOf = (layer) => data.labels[layer.queries], keysOf = (layer) => data.labels[layer.keys];
function rowOf(layer, head, i) {
  const rows = queriesOf(layer).length, keys = keysOf(layer).length, seen = mask(head.allowed, rows, keys);
  const own = head.selected === null ? null : mask(head.selected, rows, keys);
  head.z ??= new Numbers(decoded(head.scores).buffer);
  const row = [];
  for (let j = 0, at = seen.starts[i]; j < keys; j++) if (seen.has(i, j)) row.push({ j, z: head.z[at++], own: !own || own.has(i, j) === 1 });
  return row;
}
function logSumExp(scores) {
  const most = Math.max(...scores);
  return Number.isFinite(most) ? most + Math.log(scores.reduce((sum, z) => sum + Math.exp(z - most), 0)) : most;
}
// What a query keeps and drops: its own selection, else the k largest scores, of equal ones the first keys'.
function selectionOf(layer, head, i, k) {
  const row = rowOf(layer, head, i), selects = head.selected !== null, sink = head.sink === null ? [] : [+head.sink];
  const order = [...row].sort((a, b) => b.z - a.z || a.j - b.j);
  const kept = selects ? order.filter((key) => key.own) : order.slice(0, k), dropped = selects ? order.filter((key) => !key.own) : order.slice(k);
  const whole = logSumExp([...row.map((key) => key.z), ...sink]), alone = logSumExp([...kept.map((key) => key.z), ...sink]);
  for (const key of row) { key.weight = Math.exp(key.z - whole); key.alone = 0; }
  for (const key of kept) { key.alone = Math.exp(key.z - alone); key.kept = true; }
  const used = selects ? kept : row, share = (key) => selects ? key.alone : key.weight;
  const terms = [...used.map(share), ...sink.map((z) => Math.exp(z - (selects ? alone : whole)))];
  const range = (keys) => keys.length ? Math.max(...keys.map((key) => key.z)) - Math.min(...keys.map((key) => key.z)) : NaN;
  return { row, order, kept, dropped, selects, sink: sink.length ? terms[terms.length - 1] : null,
    mass: kept.reduce((sum, key) => sum + key.weight, 0), lost: dropped.reduce((sum, key) => sum + key.weight, 0),
    delta: range(used), deltaKept: range(kept), entropy: -terms.reduce((sum, p) => sum + (p === 0 ? 0 : p * Math.log(p)), 0),
    gap: !kept.length ? NaN : !dropped.length ? Infinity : Math.min(...kept.map((key) => key.z)) - Math.max(...dropped.map((key) => key.z)) };
}

// The mean weight that each key receives from some of the head's queries, as the model weighs them.
function receivedOf(layer, head, queries) {
  const sums = keysOf(layer).map(() => 0);
  let some = 0;
  for (const i of queries) {
    const { row, kept, selects } = selectionOf(layer, head, i, 1), used = selects ? kept : row;
    for (const key of used) sums[key.j] += selects ? key.alone : key.weight;
    some += used.length > 0;
  }
  return sums.map((sum) => sum / some);
}
// What groups of tokens give one another, where the keys are the queries' tokens.
function groups(layer, head) {
  const names = Object.keys(data.groups), fit = layer.one && queriesOf(layer).length === data.tokens;
  byId("between").hidden = !names.length || !fit;
  if (byId("between").hidden) return;
  const line = (name, cells) => { const row = element("tr"); row.append(element("th", name, "text"), ...cells); return row; };
  byId("groups").replaceChildren(line("", names.map((name) => element("th", name))), ...names.map((name) => {
    const received = receivedOf(layer, head, data.groups[name]);
    return line(name, names.map((to) => element("td", percent(data.groups[to].reduce((sum, j) => sum + received[j], 0)))));
  }));
}

// The map of the heads.
const cells = [...document.querySelectorAll(".heads button")];
const cellAt = (layer, head) => cells.find((cell) => +cell.dataset.layer === layer && +cell.dataset.head === head);
function colour() {
  const value = (cell) => data.layers[cell.dataset.layer].heads[cell.dataset.head].numbers[state.metric];
  const known = cells.map(value).filter((x) => x !== null), most = state.metric === 2 ? 1 : Math.max(0, ...known);
  for (const cell of cells) {
    const x = value(cell), said = state.metric === 2 ? percent(x ?? NaN) : digits(x) + UNITS[state.metric];
    cell.style.setProperty("--p", `${most && x !== null ? 100 * (state.metric === 0 ? Math.sqrt(Math.max(x, 0) / most) : x / most) : 0}%`);
    cell.classList.toggle("unknown", x === null);
    cell.title = `layer ${cell.dataset.layer}, head ${cell.dataset.head}: ${NAMES[state.metric]} ${said}`;
    cell.setAttribute("aria-label", cell.title);
  }
  const place = state.metric === 0 ? most / 4 : most / 2;
  byId("middle").textContent = state.metric === 2 ? "50%" : digits(place);
  byId("largest").textContent = state.metric === 2 ? "100%" : digits(most) + UNITS[state.metric];
  byId("said").textContent = ["Rows are layers, columns heads. A cell is the median δ of a head's queries: how far apart the scores lie that it mixes. The colour goes by the root of δ.",
    "Rows are layers, columns heads. A cell is the mean entropy of a head's weights: near 0 it picks single keys.",
    "Rows are layers, columns heads. A cell is the mean weight on the first key that is not padding."][state.metric] + ` ${data.trained[state.metric]}`;
}

// The chosen head and query.
function show() {
  const layer = data.layers[state.layer], head = layer.heads[state.head];
  const queries = queriesOf(layer), keys = keysOf(layer), selection = selectionOf(layer, head, state.query, state.k);
  for (const cell of cells) cell.removeAttribute("aria-current");
  const current = cellAt(state.layer, state.head);
  current.setAttribute("aria-current", "true");
  cells.forEach((cell) => { cell.tabIndex = cell === current ? 0 : -1; });
  byId("head-title").textContent = `Layer ${state.layer}, head ${state.head}`;
  const [delta, entropy, first] = head.numbers;
  byId("head-facts").textContent = `${layer.module || "the model"} · median δ ${digits(delta)} nats · mean entropy ${digits(entropy)} nats · weight on the first key ${percent(first ?? NaN)}`;
  byId("own").hidden = !selection.selects;
  for (const id of ["k", "slider"]) Object.assign(byId(id), { max: keys.length, value: state.k, disabled: selection.selects });
  text(layer.one, queries, keys, selection);
  numbers(selection);
  scores(queries, keys, selection, head.received ??= receivedOf(layer, head, [...queries.keys()]));
  groups(layer, head);
  matrix(layer, head);
  try { history.replaceState(null, "", `#${state.layer}.${state.head}.${state.query}`); } catch { /* a viewer that forbids it */ }
}
// Queries and keys of one sequence are shown as one text, of two as two.
function text(one, queries, keys, selection) {
  const seen = new Map(selection.row.map((key) => [key.j, key])), most = Math.max(...selection.row.map((key) => key.weight), 1e-9);
  const box = byId("tokens");
  const chip = (word, j, asQuery, asKey) => {
    const made = element("button", word), key = asKey ? seen.get(j) : undefined;
    made.type = "button";
    made.tabIndex = asQuery && j === state.query ? 0 : -1;
    if (asKey) made.classList.add(key ? (key.kept ? "kept" : "dropped") : "later");
    if (key) made.style.setProperty("--w", `${(75 * Math.sqrt(key.weight / most)).toFixed(1)}%`);
    made.title = key ? `${j}: score ${digits(key.z)}, weight ${percent(key.weight)}, ${key.kept ? "kept" : "dropped"}` : `${j}`;
    if (asQuery && j === state.query) made.setAttribute("aria-current", "true");
    if (asQuery) { made.dataset.query = j; made.onclick = () => choose({ query: j }); }
    return made;
  };
  const line = one ? queries.map((word, j) => chip(word, j, true, true))
    : [...queries.map((word, j) => chip(word, j, true, false)), element("br"), element("small", "keys: "), ...keys.map((word, j) => chip(word, j, false, true))];
  const focused = box.contains(document.activeElement);
  box.classList.toggle("apart", !keys.some((word) => /^\s/.test(word))); // ids, positions, pieces of words
  box.replaceChildren(...line);
  if (focused) box.querySelector("[aria-current]")?.focus();
}
function numbers(selection) {
  const entries = selection.row.length === 0 ? [["this query has no key", "–"]] : [
    ["keys seen", String(selection.row.length)],
    [selection.selects ? "δ of its keys" : "δ of all keys", digits(selection.delta), "delta"],
    ...(selection.selects ? [] : [[`δ of the k kept`, digits(selection.deltaKept), "delta-kept"]]),
    ["Δ", selection.dropped.length ? digits(selection.gap) : "none dropped", "gap"],
    ["weight kept", percent(selection.mass), "weight_kept"],
    ["weight dropped", percent(selection.lost), "lost"],
    ["entropy", digits(selection.entropy), "entropy"],
    ...(selection.sink === null ? [] : [["weight on the learnt sink", percent(selection.sink), "sink"]])];
  byId("numbers").replaceChildren(...entries.map(([name, value, id]) => {
    const box = element("div"), said = element("dd", value);
    if (id) said.dataset.number = id;
    box.append(element("dt", name), said);
    return box;
  }));
}
function scores(queries, keys, selection, received) {
  const z = selection.row.map((key) => key.z).filter(Number.isFinite), low = Math.min(...z), wide = Math.max(...z) - low || 1;
  const left = (score) => Number.isFinite(score) ? 2 + 96 * (score - low) / wide : 0;
  byId("scores-title").textContent = `Scores of query ${state.query} ${quoted(queries[state.query])} before the softmax, nats`;
  const strip = [], both = selection.kept.length && selection.dropped.length;
  if (both && selection.gap > 0) {
    const from = left(Math.max(...selection.dropped.map((key) => key.z))), to = left(Math.min(...selection.kept.map((key) => key.z)));
    const band = element("b"), name = element("span", `Δ ${digits(selection.gap)}`);
    Object.assign(band.style, { left: `${from}%`, width: `${to - from}%` });
    name.style.left = `clamp(2rem, ${(from + to) / 2}%, calc(100% - 2rem))`;
    strip.push(band, name);
  }
  for (const key of selection.row) { const tick = element("i", undefined, key.kept ? "kept" : ""); tick.style.left = `${left(key.z)}%`; strip.push(tick); }
  byId("strip").replaceChildren(...strip);
  const line = (key) => {
    const row = element("tr", undefined, key.kept ? "kept" : "dropped"), name = element("td", undefined, "text"), dot = element("div", undefined, "dot"), bar = element("i");
    row.dataset.key = key.j;
    name.append(element("small", String(key.j)), element("bdi", trimmed(keys[key.j])));
    name.title = keys[key.j];
    bar.style.width = `${left(key.z)}%`;
    dot.append(bar);
    const plot = element("td");
    plot.append(dot);
    row.append(name, plot, element("td", digits(key.z)), element("td", percent(key.weight)), element("td", key.kept ? percent(key.alone) : ""), element("td", percent(received[key.j])));
    return row;
  };
  const shown = state.all ? selection.dropped : selection.dropped.slice(0, FEW), hidden = selection.dropped.length - shown.length;
  const gap = element("tr", undefined, "gap"), said = element("td", selection.gap > 0 ? `Δ ${digits(selection.gap)} nats, below it ${percent(selection.lost)} of the weight is dropped` : `Δ ${digits(selection.gap)} nats: a dropped key scores as high or higher`);
  said.colSpan = 6;
  gap.append(said);
  const order = [...selection.kept, ...(both ? [gap] : []), ...shown];
  byId("scores").replaceChildren(...order.map((entry) => entry instanceof Element ? entry : line(entry)));
  byId("more").hidden = hidden <= 0 && !state.all;
  byId("more").textContent = hidden > 0 ? `show ${hidden} more dropped keys` : "show fewer";
}
// All queries by all keys, a pixel each, enlarged by the style sheet.
function matrix(layer, head) {
  const canvas = byId("matrix"), rows = queriesOf(layer).length, keys = keysOf(layer).length, style = getComputedStyle(document.documentElement);
  const rgb = (name) => { const hex = style.getPropertyValue(name).trim(); return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)); };
  const paper = rgb("--paper"), kept = rgb("--kept"), dropped = rgb("--dropped"), line = rgb("--line"), ink = rgb("--ink");
  const context = canvas.getContext("2d"), size = Math.max(1, Math.floor(720 / Math.max(rows, keys))), between = size > 3 ? Math.ceil(size / 14) : 0;
  Object.assign(canvas, { width: keys * size, height: rows * size });
  canvas.style.maxWidth = `${36 * keys}px`;
  const mix = (from, to, share) => `rgb(${from.map((x, c) => Math.round(x + (to[c] - x) * share)).join()})`;
  context.fillStyle = mix(paper, line, 0.35);
  context.fillRect(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < rows; i++) {
    const selection = selectionOf(layer, head, i, state.k), most = Math.max(...selection.row.map((key) => key.weight), 1e-9);
    for (const key of selection.row) {
      const strength = Math.sqrt(key.weight / most);
      context.fillStyle = key.kept ? mix(paper, kept, 0.25 + 0.75 * strength) : mix(paper, dropped, 0.08 + 0.6 * strength);
      context.fillRect(key.j * size, i * size, size - between, size - between);
    }
  }
  context.strokeStyle = `rgb(${ink.join()})`;
  context.lineWidth = Math.max(2, between);
  context.strokeRect(context.lineWidth / 2, state.query * size - between / 2, canvas.width - context.lineWidth, size);
}

// What the reader does.
function choose(change) {
  Object.assign(state, change);
  const layer = data.layers[state.layer];
  state.query ??= lastQueryOf(layer, layer.heads[state.head]);
  state.query = Math.min(state.query, queriesOf(layer).length - 1);
  state.k = Math.min(Math.max(Math.round(state.k) || 1, 1), keysOf(layer).length);
  show();
}
function lastQueryOf(layer, head) {
  let query = queriesOf(layer).length - 1;
  while (query > 0 && !rowOf(layer, head, query).length) query--; // padding behind the text
  return query;
}
// An address is #LAYER.HEAD, #LAYER.HEAD.QUERY, or #LAYER.HEAD.METRIC, which colours the map.
function fromAddress() {
  const parts = location.hash.slice(1).split("."), [layer, head, query] = parts.map((part) => /^\d+$/.test(part) ? +part : NaN);
  if (!data.layers[layer]?.heads[head]) return false;
  const radio = [...document.querySelectorAll("#metrics input")].find((one) => one.dataset.metric === parts[2]);
  if (radio) { radio.checked = true; state.metric = +radio.value; colour(); }
  choose({ layer, head, ...(Number.isNaN(query ?? NaN) ? {} : { query }) });
  return true;
}
const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
for (const cell of cells) {
  cell.onclick = () => { choose({ layer: +cell.dataset.layer, head: +cell.dataset.head }); if (innerWidth < 960) byId("head").scrollIntoView({ behavior: "smooth" }); };
  cell.onkeydown = (event) => {
    const [down, right] = ARROWS[event.key] ?? [0, 0], next = cellAt(+cell.dataset.layer + down, +cell.dataset.head + right);
    if (!(down || right) || !next) return;
    event.preventDefault();
    choose({ layer: +next.dataset.layer, head: +next.dataset.head });
    next.focus();
  };
}
byId("tokens").onkeydown = (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], last = queriesOf(data.layers[state.layer]).length - 1;
  if (!step) return;
  event.preventDefault();
  choose({ query: Math.min(Math.max(state.query + step, 0), last) });
};
for (const id of ["k", "slider"]) byId(id).oninput = (event) => { if (event.target.value) choose({ k: +event.target.value }); };
for (const radio of document.querySelectorAll("#metrics input")) radio.onchange = () => { state.metric = +radio.value; colour(); };
byId("more").onclick = () => { state.all = !state.all; show(); };
const pointed = (event) => {
  const box = byId("matrix").getBoundingClientRect(), layer = data.layers[state.layer], rows = queriesOf(layer).length, keys = keysOf(layer).length;
  const within = (x, n) => Math.min(Math.max(Math.floor(x * n), 0), n - 1);
  return { i: within((event.clientY - box.top) / box.height, rows), j: within((event.clientX - box.left) / box.width, keys) };
};
byId("matrix").onclick = (event) => choose({ query: pointed(event).i });
byId("matrix").onmousemove = (event) => {
  const { i, j } = pointed(event), layer = data.layers[state.layer], key = rowOf(layer, layer.heads[state.head], i).find((one) => one.j === j);
  byId("pointed").textContent = `query ${i} ${quoted(queriesOf(layer)[i])}, key ${j} ${quoted(keysOf(layer)[j])}: ${key ? `score ${digits(key.z)} nats` : "not seen"}`;
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
addEventListener("hashchange", () => { if (fromAddress()) byId("head").scrollIntoView(); });

byId("metrics").hidden = byId("head").hidden = false;
colour();
if (!fromAddress()) {
  const furthest = cells.reduce((a, b) => {
    const value = (cell) => data.layers[cell.dataset.layer].heads[cell.dataset.head].numbers[0] ?? -1;
    return value(b) > value(a) ? b : a;
  });
  choose({ layer: +furthest.dataset.layer, head: +furthest.dataset.head });
}
})();
