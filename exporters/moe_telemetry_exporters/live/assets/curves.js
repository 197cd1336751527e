// The last hour: the worst and the median layer of each measure, and the layer that is selected.

const CURVES = [
  ["tokens_per_second", "tokens a second", compact],
  ["max_violation", "MaxVio", digits(2)],
  ["dead", "dead experts of a layer", digits(0)],
  ["load_entropy", "entropy of the load", digits(3)],
  ["score_entropy", "entropy of the scores", digits(3)],
  ["agreement", "replay agreement", share],
  ["zero_overlap", "replay zero overlap", share],
];
const BELOW_ONE = new Set(["load_entropy", "score_entropy", "agreement", "zero_overlap"]);
const BOX = { width: 300, height: 96, left: 46, right: 5, top: 5, bottom: 16 };

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function seriesOf(doc, name) {
  if (name === "tokens_per_second") return [["only", doc.curves.tokens_per_second]];
  const measure = doc.curves.measures[name];
  if (!measure) return [];
  return [["median", measure.median], ["worst", measure.worst], ["own", measure.layer]].filter(([, values]) => values);
}

function drawCurves(doc) {
  setText(byId("legend-layer"), doc.curves.layer || "select a layer in the table");
  const figures = CURVES.filter(([name]) => seriesOf(doc, name).some(([, values]) => values.some((value) => value !== null)));
  const container = byId("curves");
  if (!figures.length) {
    container.replaceChildren(make("p", { className: "quiet", textContent: "No token has been counted yet." }));
    return;
  }
  container.dataset.count = figures.length;
  // drawn in the pixels that a column has, so that text is not stretched
  BOX.width = parseFloat(getComputedStyle(container).gridTemplateColumns) || 300;
  container.replaceChildren(...figures.map(([name, title, format]) => curve(doc, name, title, format)));
}

function rangeOf(name, series, limit) {
  const values = series.flatMap(([, each]) => each.filter((value) => value !== null));
  let [low, high] = [Math.min(...values), Math.max(...values)];
  const margin = high > low ? 0.06 * (high - low) : Math.max(Math.abs(high) * 0.05, 1e-3);
  // the limit is shown where the curve comes near it; far away it would flatten the curve
  if (limit > low - (high - low) - margin && limit < high + (high - low) + margin) {
    [low, high] = [Math.min(low, limit), Math.max(high, limit)];
  }
  if (name === "dead") return [0, Math.max(1, high)];
  const most = BELOW_ONE.has(name) ? 1 : Infinity;
  return [low >= 0 ? Math.max(0, low - margin) : low - margin, Math.min(most, high + margin)];
}

// as many digits as tell the two ends of an axis apart
function axisText(format, value, range) {
  const places = (scale) => Math.max(0, Math.min(4, Math.ceil(-Math.log10(range * scale)) + 1));
  if (format === share) return `${(100 * value).toFixed(places(100))} %`;
  if (format === compact && value >= 10000) return compact(value);
  const shown = Number.isInteger(value) ? 0 : places(1);
  return value.toLocaleString("en-US", { minimumFractionDigits: shown, maximumFractionDigits: shown });
}

function curve(doc, name, title, format) {
  const series = seriesOf(doc, name);
  const times = doc.curves.time;
  const limit = doc.limits[name];
  const [low, high] = rangeOf(name, series, limit);
  const span = times.at(-1) - times[0];
  // a single point is the newest: at the right
  const x = (time) => BOX.left + (span ? (time - times[0]) / span : 1) * (BOX.width - BOX.left - BOX.right);
  const y = (value) => BOX.top + (1 - (value - low) / (high - low)) * (BOX.height - BOX.top - BOX.bottom);
  const floor = BOX.height - BOX.bottom;
  const picture = svg("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, preserveAspectRatio: "none", role: "img" });
  picture.append(rule("", floor), rule("", BOX.top));
  if (limit >= low && limit <= high) picture.append(rule("limit", y(limit)));
  for (const [kind, values] of series) {
    picture.append(svg("path", { class: kind, d: pathOf(times, values, x, y) }));
    const last = values.findLastIndex((value) => value !== null);
    if (last >= 0) picture.append(svg("circle", { class: kind, cx: x(times[last]), cy: y(values[last]), r: 2.2 }));
  }
  picture.append(
    label(BOX.left - 6, BOX.top + 8, axisText(format, high, high - low), "end"),
    label(BOX.left - 6, floor, axisText(format, low, high - low), "end"),
    label(BOX.width, BOX.height - 3, clock(times.at(-1), span < 600), "end"));
  if (span) picture.append(label(BOX.left, BOX.height - 3, clock(times[0], span < 600), "start"));
  const main = series.find(([kind]) => kind === "own") || series.find(([kind]) => kind === "worst") || series[0];
  const newest = orNone(format)(main[1].at(-1));
  const value = make("span", { textContent: newest });
  const described = series.map(([kind, values]) => `${NAMES[kind]} ${orNone(format)(values.at(-1))}`).join(", ");
  picture.setAttribute("aria-label", `${title}: ${described}`);
  const figure = make("div", { className: "curve" }, make("h3", {}, make("span", { textContent: title }), value), picture);
  figure.dataset.measure = name;
  followPointer(name, picture, times, x, (index) => setText(value, index === null ? newest :
    `${clock(times[index])}  ${series.map(([kind, values]) => `${NAMES[kind]} ${orNone(format)(values[index])}`).join("  ")}`));
  return figure;
}

const NAMES = { only: "job", worst: "worst", median: "median", own: "selected" };

const rule = (kind, y) => svg("line", { class: kind, x1: BOX.left, x2: BOX.width, y1: y, y2: y });

const label = (x, y, text, anchor) => svg("text", { x, y, "text-anchor": anchor }, text);

function pathOf(times, values, x, y) {
  let path = "";
  let isDrawing = false;
  values.forEach((value, index) => {
    if (value !== null) path += `${isDrawing ? "L" : "M"}${x(times[index]).toFixed(1)},${y(value).toFixed(1)}`;
    isDrawing = value !== null;
  });
  return path;
}

// where the pointer is, for the curve that is drawn anew under it
let pointed = null;

function followPointer(name, picture, times, x, say) {
  const hair = svg("line", { class: "hair", y1: BOX.top, y2: BOX.height - BOX.bottom, visibility: "hidden" });
  picture.append(hair);
  const showAt = (at) => {
    const index = times.reduce((best, time, each) => (Math.abs(x(time) - at) < Math.abs(x(times[best]) - at) ? each : best), 0);
    hair.setAttribute("x1", x(times[index]));
    hair.setAttribute("x2", x(times[index]));
    hair.setAttribute("visibility", "visible");
    say(index);
  };
  picture.onpointermove = (event) => {
    const box = picture.getBoundingClientRect();
    pointed = { name, at: ((event.clientX - box.left) / box.width) * BOX.width };
    showAt(pointed.at);
  };
  picture.onpointerleave = () => {
    pointed = null;
    hair.setAttribute("visibility", "hidden");
    say(null);
  };
  if (pointed?.name === name) showAt(pointed.at);
}
