// The layers as a table: any column sorts, the order of the model is the first.

const COLUMNS = [
  ["order", "layer", null],
  ["tokens", "tokens", whole],
  ["max_violation", "MaxVio", digits(2), "largest expert load over the mean, minus 1"],
  ["min_violation", "MinVio", digits(2), "smallest expert load over the mean, minus 1"],
  ["cv", "CV", digits(3), "coefficient of variation of the load"],
  ["load_entropy", "load entropy", digits(3), "entropy of the load over log E"],
  ["gini", "Gini", digits(3), "Gini coefficient of the load"],
  ["dead_experts", "dead", whole, "experts without a token"],
  ["hottest_share", "hottest expert", null, "its share of the layer's assignments"],
  ["score_entropy", "score entropy", digits(3), "mean entropy of a token's scores over log E"],
  ["boundary_margin", "margin", digits(3), "how far the k-th choice is ahead of the next"],
  ["agreement", "agreement", share, "replayed experts that the router chose itself"],
  ["zero_overlap", "zero overlap", share, "replayed tokens without a common expert, worst rank"],
  ["coverage", "coverage", share, "replayed tokens that could be checked"],
];
const OPTIONAL = new Set(["score_entropy", "boundary_margin", "agreement", "zero_overlap", "coverage"]);
const tableRows = new Map();

function drawTable(doc) {
  const columns = COLUMNS.filter(([name]) => !OPTIONAL.has(name) || doc.layers.some((row) => row[name] !== null));
  drawColumns(columns);
  const bad = alarmed(doc);
  const rows = sorted(doc.layers.map((row, order) => ({ ...row, order })));
  const elements = rows.map((row) => tableRow(row, columns, bad));
  const body = byId("rows");
  // moving a row takes the focus from its button, so rows are moved only where their order has changed
  if (elements.length !== body.children.length || elements.some((element, index) => element !== body.children[index])) {
    const focused = document.activeElement?.closest?.("#rows tr");
    body.replaceChildren(...elements);
    focused?.querySelector("button").focus();
  }
  const age = doc.window.age_seconds > doc.age_seconds + 1 ? `, ${duration(doc.window.age_seconds)} ago` : "";
  setText(byId("window"), `${doc.stage}: window that ended at step ${whole(doc.window.step)}${age}`);
}

function drawColumns(columns) {
  const head = byId("columns");
  if (head.children.length !== columns.length) {
    head.replaceChildren(...columns.map(([name, title, , meaning]) => {
      const button = make("button", { type: "button", textContent: title, title: meaning || "order of the model" });
      button.onclick = () => sortBy(name);
      const cell = make("th", { scope: "col" }, button);
      cell.dataset.name = name;
      return cell;
    }));
  }
  for (const cell of head.children) {
    const isSorted = cell.dataset.name === view.sort.name;
    if (isSorted) cell.setAttribute("aria-sort", view.sort.falling ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
    const title = COLUMNS.find(([name]) => name === cell.dataset.name)[1];
    setText(cell.firstChild, isSorted && cell.dataset.name !== "order" ? `${title} ${view.sort.falling ? "▾" : "▴"}` : title);
  }
}

function sortBy(name) {
  const isSame = view.sort.name === name;
  // a first click on a number shows the largest first
  view.sort = { name, falling: isSame ? !view.sort.falling : name !== "order" };
  drawTable(view.doc);
}

function sorted(rows) {
  const { name, falling } = view.sort;
  const sign = falling ? -1 : 1;
  // a layer without a value is last in either direction
  const rank = (row) => (row[name] === null ? 1 : 0);
  return rows.sort((one, other) => rank(one) - rank(other) || (rank(one) ? 0 : sign * (one[name] - other[name])) || one.order - other.order);
}

function tableRow(row, columns, bad) {
  let element = tableRows.get(row.key);
  if (!element) {
    const button = make("button", { type: "button", textContent: row.key });
    button.onclick = (event) => { event.stopPropagation(); chooseLayer(row.key); };
    element = make("tr", {}, make("td", {}, button));
    element.dataset.layer = row.key;
    element.onclick = () => chooseLayer(row.key);
    tableRows.set(row.key, element);
  }
  while (element.children.length > columns.length) element.lastChild.remove();
  while (element.children.length < columns.length) element.append(make("td"));
  const isSelected = row.key === view.layer;
  element.className = isSelected ? "selected" : "";
  element.firstChild.firstChild.setAttribute("aria-pressed", String(isSelected));
  columns.slice(1).forEach(([name, , format], index) => {
    const cell = element.children[index + 1];
    const value = row[name];
    setText(cell, name === "hottest_share" && value !== null ? `${row.hottest_expert} · ${share(value)}` : orNone(format)(value));
    cell.className = value === null ? "none" : bad.has(`${row.key} ${name}`) ? "bad" : "";
  });
  return element;
}
