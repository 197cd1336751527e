// The alerts as they stand: one row a rule, with the layers that it is about.

const openRules = new Set();

function drawAlerts(doc) {
  const groups = new Map();
  for (const alert of doc.alerts) groups.set(alert.name, [...(groups.get(alert.name) || []), alert]);
  const rows = [...groups.values()].map((alerts) => alertRow(doc, alerts));
  if (!rows.length) rows.push(make("p", { className: "quiet", textContent: doc.state === "finished" ? "The run is finished." : "None stands." }));
  const { misalignment: cause, misalignment_offset: offset } = doc.health;
  if (cause && cause !== "aligned") {
    const by = offset ? `, offset ${offset}` : "";
    rows.push(make("p", { className: "quiet", textContent: `Last cause found for misaligned routes: ${cause}${by}. The trainer's log says where to look.` }));
  }
  // focus and open rows survive, and a row that says the same is left alone
  const signature = JSON.stringify([doc.alerts, cause, offset, doc.state, Math.floor(doc.now / 30)]);
  if (drawAlerts.signature === signature) return;
  drawAlerts.signature = signature;
  const focused = document.activeElement?.closest?.("details.alert")?.dataset.rule;
  byId("alerts").replaceChildren(...rows);
  if (focused) [...byId("alerts").children].find((row) => row.dataset.rule === focused)?.querySelector("summary").focus();
}

function alertRow(doc, alerts) {
  // the worst layer stands for the rule: the lowest value where the rule asks for more, else the highest
  const isLow = /Low|Collapsed/.test(alerts[0].name);
  const worst = alerts.reduce((one, other) => (other.value < one.value === isLow && other.value !== one.value ? other : one));
  const since = Math.min(...alerts.map((alert) => alert.since));
  const isFiring = alerts.some((alert) => alert.state === "firing");
  const stands = duration(Math.max(0, doc.now - since));
  const others = alerts.length > 1 ? `, and ${alerts.length - 1}\u00a0more` : "";
  const row = make("details", { className: "alert", open: openRules.has(worst.name) },
    make("summary", {},
      make("span", { className: `severity ${worst.severity} ${isFiring ? "firing" : "pending"}`, textContent: worst.severity }),
      make("b", { textContent: worst.name }),
      make("span", { className: "what", textContent: worst.summary + others }),
      make("span", { className: "since", textContent: isFiring ? `firing, for ${stands}` : `pending, ${stands} of ${duration(worst.hold_seconds)}` })),
    make("div", { className: "more" },
      make("p", { textContent: `${worst.meaning} It stands since ${clock(since)}; an alert after ${duration(worst.hold_seconds)}.` }),
      layersOf(alerts),
      make("p", {}, "What to look at first: the runbook, at ", make("code", { textContent: `runbook.md#${worst.name.toLowerCase()}` }),
        " (", make("code", { textContent: "moe-telemetry rules --out DIR" }), " writes it).")));
  row.dataset.rule = worst.name;
  row.ontoggle = () => (row.open ? openRules.add(worst.name) : openRules.delete(worst.name));
  return row;
}

function layersOf(alerts) {
  const keys = alerts.map((alert) => alert.layer).filter(Boolean);
  const shown = keys.slice(0, 12).join(", ");
  const rest = keys.length > 12 ? `, and ${keys.length - 12} more` : "";
  return keys.length ? make("p", {}, make("b", { textContent: "Layers: " }), shown + rest) : "";
}
