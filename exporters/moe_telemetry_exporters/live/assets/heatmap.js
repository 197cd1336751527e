// Layer by expert, coloured by load over the layer's mean: even is neutral, blue is less, orange is more.

const PALETTES = {
  // of log2(load / mean) from -3 to 3; no token at all is a colour of its own
  light: { stops: ["#2b6cb0", "#6ea3d6", "#b4d0ea", "#f2f2ef", "#f5c08d", "#dc6b2a", "#8f2f05"], dead: "#0b0d10" },
  dark: { stops: ["#6cb2f5", "#4580bd", "#2e4e70", "#2a3038", "#7d4a28", "#d8722f", "#ffc491"], dead: "#ffffff" },
};
const isDark = matchMedia("(prefers-color-scheme: dark)");
// `cursor` is moved by keys and taps, `hover` by a pointer
const heat = { left: 0, top: 7, cell: 0, row: 0, cursor: null, hover: null, orders: [] };

const palette = () => PALETTES[isDark.matches ? "dark" : "light"];
const channels = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));

function colourOf(percent) {
  if (percent === 0) return channels(palette().dead);
  const place = Math.min(6, Math.max(0, Math.log2(percent / 100) + 3));
  const below = Math.min(5, Math.floor(place));
  const [from, to] = [channels(palette().stops[below]), channels(palette().stops[below + 1])];
  return from.map((value, index) => Math.round(value + (place - below) * (to[index] - value)));
}

function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "10.5px system-ui, sans-serif";
  return context;
}

function drawHeatmap(doc) {
  const loads = doc.load_percent;
  const numExperts = Math.max(1, ...loads.map((row) => (row ? row.length : 0)));
  const labels = rowLabels(doc);
  const canvas = byId("heatmap");
  const width = canvas.parentElement.clientWidth;
  heat.row = Math.max(5, Math.min(24, Math.floor(400 / Math.max(1, loads.length))));
  const context = sized(canvas, width, heat.top + heat.row * loads.length + 18);
  heat.left = Math.ceil(Math.max(...labels.map((text) => context.measureText(text).width), 10)) + 10;
  heat.cell = (width - heat.left) / numExperts;
  heat.orders = loads.map((row) => orderOf(row));
  drawCells(context, loads, numExperts);
  drawRowLabels(context, doc, labels);
  if (loads.some((row) => row)) drawExpertAxis(context, numExperts, width);
  drawScale();
  // another run may have fewer layers and experts
  if (!isThere(heat.cursor)) heat.cursor = null;
  if (heat.cursor) drawCursor(context);
  setText(byId("heat-cell"), heat.cursor ? cellText(heat.cursor) : "");
  showTip();
}

const isThere = (cell) => Boolean(cell && heat.orders[cell.row] && cell.place < Math.max(1, heat.orders[cell.row].length));

function orderOf(row) {
  const experts = row ? row.map((_, expert) => expert) : [];
  return view.order === "load" ? experts.sort((one, other) => row[other] - row[one] || one - other) : experts;
}

function drawCells(context, loads, numExperts) {
  if (!loads.length) return;
  const image = new ImageData(numExperts, loads.length);
  loads.forEach((row, index) => heat.orders[index].forEach((expert, place) => {
    image.data.set([...colourOf(row[expert]), 255], 4 * (index * numExperts + place));
  }));
  const small = make("canvas", { width: numExperts, height: loads.length });
  small.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, heat.left, heat.top, heat.cell * numExperts, heat.row * loads.length);
  drawGaps(context, loads.length, numExperts);
}

function drawGaps(context, numRows, numExperts) {
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--card");
  if (heat.row >= 8) for (let row = 1; row < numRows; row += 1) context.fillRect(heat.left, heat.top + row * heat.row - 0.5, heat.cell * numExperts, 1);
  if (heat.cell >= 8) for (let cell = 1; cell < numExperts; cell += 1) context.fillRect(heat.left + cell * heat.cell - 0.5, heat.top, 1, heat.row * numRows);
}

function rowLabels(doc) {
  const blocks = new Set(doc.layers.map((row) => row.block));
  return doc.layers.map((row) => (blocks.size > 1 ? row.key : String(row.layer)));
}

function drawRowLabels(context, doc, labels) {
  const style = getComputedStyle(document.documentElement);
  const every = Math.ceil(11 / heat.row);
  context.textAlign = "right";
  context.textBaseline = "middle";
  doc.layers.forEach((row, index) => {
    const middle = heat.top + heat.row * (index + 0.5);
    const isChosen = row.key === view.layer;
    context.fillStyle = style.getPropertyValue(isChosen ? "--own" : "--dim");
    if (isChosen) context.fillRect(heat.left - 4, heat.top + heat.row * index, 3, heat.row);
    if (index % every === 0) context.fillText(labels[index], heat.left - 7, middle);
    if (doc.load_percent[index] === null && heat.row >= 10) {
      context.textAlign = "left";
      context.fillText("no token in this window", heat.left + 6, middle);
      context.textAlign = "right";
    }
  });
}

function drawExpertAxis(context, numExperts, width) {
  const base = byId("heatmap").clientHeight - 8;
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--dim");
  if (view.order === "load") {
    context.textAlign = "left";
    context.fillText("most loaded expert", heat.left, base);
    context.textAlign = "right";
    context.fillText("least loaded", width, base);
    return;
  }
  context.textAlign = "center";
  const every = [1, 2, 4, 8, 16, 32, 64, 128].find((step) => step * heat.cell >= 26) || 256;
  for (let expert = 0; expert < numExperts; expert += every) {
    context.fillText(String(expert), heat.left + heat.cell * (expert + 0.5), base);
  }
}

function drawCursor(context) {
  context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--text");
  context.lineWidth = 1.5;
  const { row, place } = heat.cursor;
  context.strokeRect(heat.left + place * heat.cell - 1, heat.top + row * heat.row - 1, heat.cell + 2, heat.row + 2);
}

function drawScale() {
  const canvas = byId("scale");
  const width = canvas.clientWidth;
  const context = sized(canvas, width, 25);
  for (let x = 0; x < width - 20; x += 1) {
    context.fillStyle = `rgb(${colourOf(100 * 2 ** ((6 * x) / (width - 20) - 3))})`;
    context.fillRect(10 + x, 0, 1.5, 11);
  }
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--dim");
  context.textAlign = "center";
  ["⅛", "¼", "½", "mean", "2×", "4×", "8×"].forEach((text, index) => context.fillText(text, 10 + (index * (width - 20)) / 6, 22));
  byId("scale-dead").style.background = palette().dead;
}

function cellText({ row, place }) {
  const loads = view.doc.load_percent[row];
  const { key } = view.doc.layers[row];
  if (!loads) return `${key}: no token in this window`;
  const expert = heat.orders[row][place];
  return `${key}, expert ${expert}: ${loads[expert] === 0 ? "no token" : `${(loads[expert] / 100).toFixed(2)} × the mean load`}`;
}

function cellAt(event) {
  const box = byId("heatmap").getBoundingClientRect();
  const place = Math.floor((event.clientX - box.left - heat.left) / heat.cell);
  const row = Math.floor((event.clientY - box.top - heat.top) / heat.row);
  // a layer without a token says so all along its row
  const cell = { row, place: heat.orders[row]?.length ? place : Math.min(0, place) };
  return view.doc?.layers && place >= 0 && isThere(cell) ? cell : null;
}

function showTip() {
  const tip = byId("tip");
  const cell = isThere(heat.hover) ? heat.hover : null;
  tip.hidden = !cell;
  if (!cell) return;
  setText(tip, cellText(cell));
  const x = heat.left + (cell.place + 0.5) * heat.cell;
  const isRight = x > byId("heatmap").clientWidth / 2;
  tip.style.left = `${isRight ? x - tip.offsetWidth - 10 : x + 10}px`;
  tip.style.top = `${heat.top + cell.row * heat.row + heat.row + 6}px`;
}

function moveCursor(event) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  const { layers, load_percent: loads } = view.doc || {};
  if (!layers?.length) return;
  const at = heat.cursor || { row: 0, place: 0 };
  if (event.key === "Enter") chooseLayer(layers[at.row].key);
  if (event.key === "Escape") heat.cursor = null;
  if (!step && event.key !== "Escape") return;
  event.preventDefault();
  if (step) {
    const row = Math.max(0, Math.min(layers.length - 1, at.row + (heat.cursor ? step[0] : 0)));
    const last = (loads[row]?.length || 1) - 1;
    heat.cursor = { row, place: Math.max(0, Math.min(last, at.place + (heat.cursor ? step[1] : 0))) };
  }
  drawHeatmap(view.doc);
}

function clickCell(event) {
  const cell = cellAt(event);
  if (!cell) return;
  // a finger leaves no tip behind, so what it chose is written below
  heat.cursor = cell;
  chooseLayer(view.doc.layers[cell.row].key);
}

function setOrder(order) {
  view.order = order;
  for (const name of ["id", "load"]) byId(`by-${name}`).setAttribute("aria-pressed", String(name === order));
  if (view.doc?.layers) drawHeatmap(view.doc);
}

function startHeatmap() {
  const canvas = byId("heatmap");
  const hover = (cell) => { heat.hover = cell; showTip(); };
  canvas.onpointermove = (event) => hover(cellAt(event));
  canvas.onpointerleave = () => hover(null);
  canvas.onclick = clickCell;
  canvas.onkeydown = moveCursor;
  byId("by-id").onclick = () => setOrder("id");
  byId("by-load").onclick = () => setOrder("load");
}
