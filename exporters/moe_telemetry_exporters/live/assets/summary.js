// The head of the page, what it has to say, and the figures of the window.

const STATES = { live: "live", late: "late", finished: "finished", waiting: "waiting for the first snapshot", gone: "endpoint gone" };

function drawHead(doc, state) {
  const pill = byId("state");
  setText(pill, STATES[state]);
  pill.className = `state ${state}`;
  if (!doc || doc.state === "waiting") return;
  setText(byId("run"), doc.run);
  const labels = Object.entries(doc.labels).map(([name, value]) => `${name}=${value}`);
  if (byId("labels").textContent !== labels.join("")) byId("labels").replaceChildren(...labels.map((text) => make("bdi", { textContent: text })));
  const count = new Set(doc.alerts.map((alert) => alert.name)).size;
  document.title = `${count ? `(${count}) ` : ""}${doc.run} · step ${whole(doc.step)} · moe-telemetry`;
  const rate = doc.curves.tokens_per_second.at(-1);
  drawPairs(byId("facts"), [
    ["step", whole(doc.step)],
    ["tokens/s", rate === undefined ? null : orNone(compact)(rate)],
    ["ranks", whole(doc.world_size)],
    ["routers", `${doc.health.routers_observed} of ${doc.health.routers_expected}`],
    ["updated", state === "gone" ? null : `${duration(doc.age_seconds)} ago`],
  ]);
  drawStages(doc);
  const errors = Object.entries(doc.health.export_errors).filter(([, failures]) => failures);
  const skipped = doc.health.skipped_reductions;
  setText(byId("footer"), [
    `moe-telemetry ${doc.version}`,
    `${digits(1)(doc.health.overhead_seconds)} s spent in step()`,
    skipped ? `${skipped} reductions skipped` : "",
    errors.length ? `failed exports: ${errors.map(([name, failures]) => `${name} ${failures}`).join(", ")}` : "",
    doc.leads ? "" : "not the job's first endpoint",
  ].filter(Boolean).join("  ·  "));
}

function drawPairs(list, pairs) {
  const shown = pairs.filter(([, value]) => value !== null);
  if (list.children.length !== shown.length) {
    list.replaceChildren(...shown.map(() => make("div", {}, make("dt"), make("dd"))));
  }
  shown.forEach(([name, value], index) => {
    setText(list.children[index].firstChild, name);
    setText(list.children[index].lastChild, value);
  });
}

function drawStages(doc) {
  const group = byId("stages");
  group.hidden = doc.stages.length < 2;
  if (group.children.length !== doc.stages.length) {
    group.replaceChildren(...doc.stages.map(() => make("button", { type: "button" })));
  }
  doc.stages.forEach((stage, index) => {
    const button = group.children[index];
    setText(button, stage);
    button.title = stage;
    button.setAttribute("aria-pressed", String(stage === doc.stage));
    button.onclick = () => choose({ stage });
  });
}

function drawNotice(doc, gone) {
  const [kind, text] = noticeOf(doc, gone);
  byId("notice").hidden = !text;
  byId("notice").className = `notice ${kind}`;
  setText(byId("notice"), text);
}

function noticeOf(doc, gone) {
  if (gone) {
    const shown = doc && doc.run !== undefined ? ` What you see is of step ${whole(doc.step)}.` : "";
    return ["gone", `The endpoint has not answered since ${clock(gone)}: the run has ended, or cannot be reached.${shown}`];
  }
  if (doc.state === "waiting") return ["note", "The run has exported nothing yet; its first snapshot will appear here."];
  if (doc.state === "late") {
    const usual = doc.usual_gap_seconds === null ? "" : ` They usually come every ${duration(doc.usual_gap_seconds)}.`;
    // since when, not for how long: this is read aloud whenever it changes
    return ["late", `No new snapshot since ${clock(doc.time)}.${usual} Training is slow, evaluates, or hangs.`];
  }
  if (!doc.leads) {
    return ["note", "This is not the job's first endpoint: its /metrics has this node's share of the counters and no gauges. This page shows the whole job."];
  }
  if (!doc.layers.length) return ["note", "The model has no router."];
  return ["", ""];
}

// of all layers the one that decides, and how it reads
const FIGURES = [
  ["max_violation", "MaxVio, largest", Math.max, digits(2)],
  ["load_entropy", "load entropy, lowest", Math.min, digits(3)],
  ["score_entropy", "score entropy, lowest", Math.min, digits(3)],
  ["agreement", "agreement, lowest", Math.min, share],
  ["zero_overlap", "zero overlap, largest", Math.max, share],
  ["coverage", "coverage, lowest", Math.min, share],
];

function drawFigures(doc) {
  const bad = alarmed(doc);
  const tiles = [["tokens in window", whole(Math.max(0, ...doc.layers.map((row) => row.tokens))), `${doc.stage}, step ${whole(doc.window.step)}`, false]];
  const alive = doc.layers.filter((row) => row.dead_experts !== null);
  if (alive.length) {
    const dead = alive.reduce((sum, row) => sum + row.dead_experts, 0);
    const experts = alive.reduce((sum, row) => sum + row.experts, 0);
    tiles.push(["dead experts", whole(dead), `of ${whole(experts)}`, alive.some((row) => bad.has(`${row.key} dead_experts`))]);
  }
  for (const [name, title, pick, format] of FIGURES) {
    const rows = doc.layers.filter((row) => row[name] !== null);
    if (!rows.length) continue;
    const value = pick(...rows.map((row) => row[name]));
    const row = rows.find((each) => each[name] === value);
    tiles.push([title, format(value), row.key, bad.has(`${row.key} ${name}`)]);
  }
  const lost = doc.layers.reduce((sum, row) => sum + row.dropped, 0);
  if (lost) tiles.push(["dropped", compact(lost), "assignments", false]);
  byId("figures").replaceChildren(...tiles.map(([title, value, of, isBad]) =>
    make("div", {}, make("dt", { textContent: title }), make("dd", { textContent: value, className: isBad ? "bad" : "" }),
      make("dd", { textContent: of, className: "of", title: of }))));
}
