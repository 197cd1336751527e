// Asking for the data, every two seconds while somebody looks, and drawing what has changed.

const SECONDS = 2;
const PATIENCE_SECONDS = 8;
// not a relative address: that of a page opened as https://user:password@host/ has both, and fetch refuses it
const DATA = `${location.origin}${location.pathname.replace(/[^/]*$/, "")}live.json`;
let timer = null;
let goneSince = null;
let asking = null;

async function refresh() {
  clearTimeout(timer);
  asking?.abort();
  const mine = (asking = new AbortController());
  const patience = setTimeout(() => mine.abort(), 1000 * PATIENCE_SECONDS);
  try {
    const chosen = new URLSearchParams();
    if (view.stage) chosen.set("stage", view.stage);
    if (view.layer) chosen.set("layer", view.layer);
    const response = await fetch(`${DATA}?${chosen}`, { cache: "no-store", signal: mine.signal });
    if (!response.ok) throw new Error(`HTTP ${response.status}`);
    const doc = await response.json();
    if (mine !== asking) return;
    goneSince = null;
    show(doc);
  } catch {
    if (mine !== asking) return;
    goneSince = goneSince || Date.now() / 1000;
    show(view.doc);
  } finally {
    clearTimeout(patience);
    if (mine === asking && !document.hidden) timer = setTimeout(refresh, 1000 * SECONDS);
  }
}

function refreshNow() {
  if (view.doc?.layers) drawPanels(view.doc);
  refresh();
}

function show(doc) {
  view.doc = doc;
  const state = goneSince ? "gone" : doc.state;
  drawHead(doc, state);
  drawNotice(doc, goneSince);
  const main = byId("main");
  main.hidden = !doc?.layers?.length;
  main.className = state === "gone" || state === "late" ? "old" : "";
  if (main.hidden) return;
  drawAlerts(doc);
  // a window that was drawn already is not drawn again, so that nothing moves under a pointer
  const signature = JSON.stringify([doc.run, doc.step, doc.time, doc.stage, doc.window.step, doc.curves.layer, doc.alerts.map((alert) => [alert.name, alert.layer])]);
  if (signature === view.signature) return;
  view.signature = signature;
  drawPanels(doc);
}

function drawPanels(doc) {
  drawFigures(doc);
  drawHeatmap(doc);
  drawCurves(doc);
  drawTable(doc);
}

function redraw() {
  if (view.doc?.layers) drawPanels(view.doc);
}

readAddress();
startHeatmap();
document.addEventListener("visibilitychange", () => { if (document.hidden) clearTimeout(timer); else refresh(); });
window.addEventListener("hashchange", () => { readAddress(); refreshNow(); });
window.addEventListener("resize", redraw);
isDark.addEventListener("change", redraw);
refresh();
