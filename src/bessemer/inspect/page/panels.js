// The panels of words and small tables: where the run stands, the verdict, the yield, checkpoints, experts, precision.

const RUN_STATES = {
  waiting: ["not started yet", ""],
  running: ["running", "good"],
  quiet: ["no sign of life", "bad"],
  finished: ["finished", "good"],
  stopped: ["stopped on request", "warn"],
  failed: ["failed", "bad"],
};
const FACTORS = {
  generality: "fallbacks, slower paths",
  effective_compute: "rate in the kernels",
  node_efficiency: "kernels' share of a step",
  cluster_efficiency: "one-node step over step",
  stability: "steps' share of the time",
};
const CAUSES = {
  set_up: "start to first step",
  checkpoint: "stalls for checkpoints",
  evaluation: "evaluation",
  between_steps: "between steps",
  detection: "faults that were not known yet",
  epoch: "links of new epochs",
  redone: "work done again",
  donor: "copies of the state for groups that join",
  fewer: "steps with fewer groups",
  restart: "down and starting again",
  tail: "after the last step",
};

const FINDING_STEPS = 200; // after which the flight inspection tells again what still holds

function showHeader(run) {
  const { run: head } = run.told,
    [words, level] = RUN_STATES[head.state];
  setText(byId("name"), head.name);
  document.title = `${head.name}: ${words}`;
  const quiet =
    head.state === "running" || head.state === "quiet" ? `, last sign of life ${seconds(head.quiet_s)} ago` : "";
  const state = byId("state");
  setText(state, words);
  state.className = "pill " + level;
  setText(
    byId("about"),
    `${head.model}, ${head.recipe}, ${plural(head.world, "rank")} on ${head.machine}` +
      `${head.attempt > 1 ? `, attempt ${head.attempt}` : ""}${quiet}  ·  ${head.folder}`,
  );
  const bar = byId("progress");
  bar.setAttribute("aria-valuemax", head.steps);
  bar.setAttribute("aria-valuenow", head.step);
  bar.setAttribute("aria-valuetext", `step ${whole(head.step)} of ${whole(head.steps)}`);
  bar.firstElementChild.style.width = `${Math.min(100, (100 * head.step) / head.steps)}%`;
  setText(
    byId("updated"),
    `Read at ${clock(run.told.now)}.` + (head.damaged ? ` ${plural(head.damaged, "damaged line")} left out.` : ""),
  );
}

function lastOf(run, name) {
  return run.series.columns[name]?.findLast(known) ?? null;
}

function showTiles(run) {
  const { run: head, predicted, ledger, keep, ranks } = run.told;
  const speed = lastOf(run, "tokens_per_s"),
    saved = keep.saved[0],
    left = (head.steps - head.step) * (usualStep(run) ?? NaN);
  const counts = ranks?.counts ?? {},
    held = (counts.stalled ?? 0) + (counts.waiting ?? 0);
  const live = head.state === "running" || head.state === "quiet";
  const rows = [
    [
      "step",
      `${whole(head.step)}`,
      `of ${whole(head.steps)}` + (live && known(left) ? `, ${seconds(left)} left` : ""),
    ],
    [
      "loss",
      plain(lastOf(run, "loss")),
      known(lastOf(run, "val_loss")) ? `validation ${plain(lastOf(run, "val_loss"))}` : "nats a token",
    ],
    [
      "speed, tokens/s",
      prefixed(speed, ""),
      known(predicted.tokens_per_s) ? `${difference(speed, predicted.tokens_per_s)} from plan` : "no plan",
    ],
    [
      "factory yield",
      percent(ledger.yield),
      known(predicted.factors.yield)
        ? `plan ${percent(predicted.factors.yield)} without stability`
        : "useful over possible work",
    ],
    [
      "newest checkpoint",
      saved ? `step ${whole(saved.step)}` : "none",
      saved ? `${plural(head.step - saved.step, "step")} not saved` : `every ${whole(keep.every)} steps`,
    ],
    [
      "ranks",
      ranks ? whole(ranks.count) : whole(head.world),
      rankWords(counts),
      held && live ? "bad" : counts.slow || (counts.lost && live) ? "warn" : "",
    ],
  ];
  const tiles = byId("tiles");
  while (tiles.children.length < rows.length)
    tiles.append(make("div", { class: "tile" }, make("span"), make("b"), make("small")));
  rows.forEach(([name, value, about, level], i) => {
    const tile = tiles.children[i];
    [name, value, about].forEach((text, k) => setText(tile.children[k], text));
    tile.className = "tile " + (level ?? "");
  });
}

function rankWords(counts) {
  const told = ["slow", "waiting", "stalled", "lost", "spare", "stale"]
    .filter((name) => counts[name])
    .map((name) => `${whole(counts[name])} ${name}`);
  return told.join(", ") || (counts.running || counts.ended ? "none is slow" : "no black boxes yet");
}

function usualStep(run) {
  const values = (run.series.columns.step_s ?? [])
    .slice(-50)
    .filter(known)
    .sort((a, b) => a - b);
  return values.length ? values[values.length >> 1] : null;
}

function showVerdict(run) {
  const { run: head, verdict } = run.told,
    words = byId("verdict-words"),
    found = latestFindings(run);
  let text = verdict ? `${verdict.words}, confidence ${verdict.confidence.toFixed(2)}.` : "";
  let level = verdict && verdict.class !== "no fault" ? "bad" : "good";
  if (head.state === "running" && (!verdict || verdict.class === "no fault")) text = "No fault: the run goes on.";
  else if (head.state === "quiet")
    text = `No sign of life for ${seconds(head.quiet_s)}. ${text || "The verdict is being made."}`;
  else if (head.state === "waiting") {
    text = "Nothing has started yet.";
    level = "";
  } else if (!verdict) {
    text = "The verdict is being made.";
    level = "";
  }
  const bad = found.some((event) => event.level === "bad");
  setText(
    words,
    text + (found.length ? ` The flight inspection found at step ${whole(found[0].step)}: ${found[0].text}.` : ""),
  );
  words.className = "words " + (bad ? "bad" : found.length && level === "good" ? "warn" : level);
  const lines = [
    ...(verdict?.evidence ?? []),
    ...found.slice(1).map((event) => `step ${whole(event.step)}: ${event.text}`),
    ...(verdict?.losses ?? []).map(
      (loss) => `outlived at step ${loss.step ?? NONE}: rank ${loss.rank}, ${loss.class} (${loss.evidence[0] ?? ""})`,
    ),
  ];
  fillList(byId("verdict-evidence"), lines);
  setText(byId("verdict-next"), verdict?.next ? `→ ${verdict.next}` : "");
}

function findingsOf(run) {
  return run.events.filter((event) => event.name === "finding");
}

// Those of the last steps, the gravest first and of these the newest.
function latestFindings(run) {
  const found = findingsOf(run).filter((event) => event.step > run.told.run.step - FINDING_STEPS),
    weight = (event) => LEVELS.indexOf(event.level);
  return found.sort((a, b) => weight(b) - weight(a) || b.t - a.t).slice(0, 4);
}

function fillList(list, lines) {
  while (list.children.length > lines.length) list.lastElementChild.remove();
  lines.forEach((line, i) => {
    if (i >= list.children.length) list.append(make("li"));
    setText(list.children[i], line);
  });
}

function showFactors(run) {
  const { ledger, predicted } = run.told,
    kinds = ledger.kinds ?? {};
  const row = (name, about, total) => {
    const value = ledger[name],
      plan = predicted.factors[name],
      noPlan = name === "stability";
    const meter = make(
      "span",
      { class: "meter", "aria-hidden": "true" },
      make("i", { style: `width:${100 * Math.min(1, Math.max(0, value ?? 0))}%` }),
    );
    if (known(plan) && !noPlan) meter.append(make("u", { style: `left:${100 * Math.min(1, plan)}%` }));
    return {
      class: total ? "total" : "",
      cells: [
        name.replaceAll("_", " "),
        plain(value),
        meter,
        noPlan ? NONE : plain(plan),
        noPlan ? NONE : difference(value, plan),
        seconds(ledger.lost_s?.[name]),
        kinds[name] ?? NONE,
        ledger.reasons?.[name] ?? about,
      ],
    };
  };
  const rows = Object.entries(FACTORS).map(([name, about]) => row(name, about, false));
  rows.push(row("yield", "useful FLOPs over time × peak", true));
  fillTable(
    byId("factor-table"),
    [["factor", "w"], "measured", ["", "w"], "plan", "difference", "lost", ["kind", "w"], ["what", "wrap"]],
    rows,
  );
  const lost = Object.entries(ledger.stability_lost_s ?? {})
    .filter(([, s]) => s >= 0.0005)
    .sort((a, b) => b[1] - a[1])
    .slice(0, 5)
    .map(([cause, s]) => `${CAUSES[cause] ?? cause} ${seconds(s)}`);
  const parts = [
    ledger.why && `No ledger yet: ${ledger.why}.`,
    lost.length && `Stability lost most to: ${lost.join(", ")}.`,
    predicted.why ? `No plan: ${predicted.why}.` : "The plan is modelled, for a run without faults.",
    ...(ledger.notes ?? []),
  ];
  setText(byId("factor-note"), parts.filter(Boolean).join(" "));
}

function showKeep(run) {
  const { keep, run: head, now } = run.told,
    saved = keep.saved[0],
    live = head.state === "running";
  const age = saved && live ? ` ${seconds(now - saved.t)} ago` : "";
  const lost = saved && plural(head.step - saved.step, "step");
  const parts = [
    saved ? `Step ${whole(saved.step)} is saved${age}; ${lost} since then can be lost.` : "Nothing is saved yet.",
  ];
  if (keep.saving !== null) parts.push(`Step ${whole(keep.saving)} is being written.`);
  if (keep.failed) parts.push(`${plural(keep.failed, "save")} failed.`);
  parts.push(`Saves every ${whole(keep.every)} steps held the ranks up for ${seconds(keep.stall_s)} so far.`);
  const spare = keep.groups.filter((group) => group.state === "spare").length;
  if (keep.groups.length)
    parts.push(
      `${plural(spare, "spare group")} ready of ${keep.spares} wanted, ${plural(keep.losses, "rank")} lost.`,
    );
  setText(byId("keep-words"), parts.join(" "));
  fillTable(
    byId("saved"),
    ["step", "size", "written in", ["at", "w"]],
    keep.saved.map((one) => ({
      cells: [whole(one.step), bytes(one.bytes), seconds(one.seconds), clock(one.t)],
    })),
  );
  byId("groups").hidden = keep.groups.length === 0;
  fillTable(
    byId("groups"),
    ["group", ["state", "w"], "since step", ["ranks", "w"]],
    keep.groups.map((group) => ({
      cells: [
        whole(group.group),
        group.state,
        known(group.step) ? whole(group.step) : NONE,
        (group.ranks ?? []).slice(0, 12).join(", "),
      ],
    })),
  );
}

function showExperts(run) {
  const { experts } = run.told;
  byId("experts").hidden = !experts;
  if (!experts) return;
  const worst = Math.max(...experts.imbalance);
  setText(
    byId("expert-words"),
    `At step ${whole(experts.step)} the busiest expert of the worst layer had ${worst.toFixed(2)} × ` +
      `the mean load; ${plural(experts.dropped ?? 0, "choice")} dropped.`,
  );
  const largest = Math.max(2, worst);
  fillTable(
    byId("expert-table"),
    ["MoE layer", "largest over mean", ["", "w"]],
    experts.imbalance.map((value, layer) => ({
      cells: [
        whole(layer),
        value.toFixed(2),
        make(
          "span",
          { class: "meter", "aria-hidden": "true" },
          make("i", { style: `width:${(100 * value) / largest}%` }),
        ),
      ],
    })),
  );
}

function showPrecision(run) {
  const { precision } = run.told;
  byId("precision").hidden = !precision;
  if (!precision) return;
  const fallen = Object.keys(precision.fallen).length,
    clipped = precision.worst.filter((row) => row.saturated > 0).length;
  setText(
    byId("precision-words"),
    `${precision.recipe}, sampled at step ${whole(precision.step)}: of ${plural(precision.tensors, "tensor")} ` +
      `${clipped ? `${clipped === precision.worst.length ? "many" : clipped} are clipped` : "none is clipped"}; ` +
      `${fallen ? `${fallen} fell back to high precision` : "none fell back"}.`,
  );
  fillTable(
    byId("precision-table"),
    [["tensor", "w"], ["role", "w"], "clipped", "lost to 0", "error", "amax", ["", "w"]],
    precision.worst.map((row) => ({
      cells: [
        row.name,
        { x: "input", weight: "weight", grad: "gradient" }[row.role],
        share(row.saturated),
        share(row.flushed),
        percent(row.error, 2),
        compact(row.amax),
        row.name in precision.fallen ? `fell back at step ${precision.fallen[row.name]}` : "",
      ],
    })),
  );
}
