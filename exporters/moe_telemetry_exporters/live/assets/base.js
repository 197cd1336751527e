"use strict";
// What the parts of the page share: what is shown, elements, numbers as text. Text of the user reaches the page
// by textContent alone.

const view = { doc: null, stage: null, layer: null, order: "id", sort: { name: "order", falling: false }, signature: "" };
const byId = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("aria-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const whole = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 0 });
const digits = (count) => (value) => value.toFixed(count);
const share = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 2 : 1)} %`;
const compact = (value) =>
  value < 10000 ? whole(value) : value.toLocaleString("en-US", { notation: "compact", maximumSignificantDigits: 4 });
const orNone = (format) => (value) => (value === null || value === undefined ? "–" : format(value));

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function clock(seconds, withSeconds = true) {
  const format = { hour: "2-digit", minute: "2-digit", hour12: false };
  return new Date(1000 * seconds).toLocaleTimeString("en-GB", withSeconds ? { ...format, second: "2-digit" } : format);
}

// the choice of stage and layer is kept in the address, so that a link shows the same
function readAddress() {
  const chosen = new URLSearchParams(location.hash.slice(1));
  view.stage = chosen.get("stage");
  view.layer = chosen.get("layer");
}

function choose(change) {
  Object.assign(view, change);
  const chosen = new URLSearchParams();
  if (view.stage) chosen.set("stage", view.stage);
  if (view.layer) chosen.set("layer", view.layer);
  history.replaceState(null, "", `#${chosen}`);
  refreshNow();
}

const chooseLayer = (key) => choose({ layer: view.layer === key ? null : key });

// the columns and figures that a standing alert is about; those of the load are about training
const COLUMN_OF_ALERT = {
  MoeLoadImbalanced: "max_violation",
  MoeExpertsDead: "dead_experts",
  MoeRouterEntropyCollapsed: "score_entropy",
  MoeReplayAgreementLow: "agreement",
  MoeReplayZeroOverlapHigh: "zero_overlap",
  MoeReplayCoverageLow: "coverage",
};

function alarmed(doc) {
  const isShown = (alert) => doc.stage === "train" || alert.name.startsWith("MoeReplay");
  return new Set(doc.alerts.filter(isShown).map((alert) => `${alert.layer} ${COLUMN_OF_ALERT[alert.name]}`));
}
