// Tables that are filled again and again without losing the focus, and those of ranks, steps and events.

const MOST_EVENTS = 300;

// heads: a text, or [text, class]; rows: {cells, class}. Cells are texts or elements. Rows and cells stay the same
// elements, so that a focused button in one keeps the focus.
function fillTable(table, heads, rows) {
  if (!table.tHead) table.createTHead().append(make("tr"));
  const line = table.tHead.rows[0],
    named = heads.map((head) => (typeof head === "string" ? [head, ""] : head));
  if (line.cells.length !== named.length || named.some(([text], i) => line.cells[i].textContent !== text)) {
    line.replaceChildren(...named.map(([text, kind]) => make("th", { scope: "col", class: kind }, text)));
  }
  const body = table.tBodies[0] ?? table.createTBody();
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((row, i) => {
    const element = body.rows[i] ?? body.insertRow();
    if (element.className !== (row.class ?? "")) element.className = row.class ?? "";
    while (element.cells.length > row.cells.length) element.deleteCell(-1);
    row.cells.forEach((content, k) => {
      const cell = element.cells[k] ?? element.insertCell(),
        kind = named[k][1];
      if (cell.className !== kind) cell.className = kind;
      if (typeof content === "string") setText(cell, content);
      else if (content instanceof Opener) content.put(cell);
      else if (!cell.firstElementChild?.isEqualNode(content)) cell.replaceChildren(content);
    });
  });
}

// A button with a rank's number; the same one stays in its cell and only learns another number.
class Opener {
  constructor(rank, open) {
    this.rank = rank;
    this.open = open;
  }

  put(cell) {
    let button = cell.firstElementChild;
    if (!(button instanceof HTMLButtonElement)) {
      button = make("button", { type: "button" });
      button.addEventListener("click", () => this.open(Number(button.dataset.rank)));
      cell.replaceChildren(button);
    }
    if (button.dataset.rank !== String(this.rank)) {
      button.dataset.rank = this.rank;
      button.textContent = this.rank;
      button.setAttribute("aria-label", `rank ${this.rank}, open`);
    }
  }
}

function showWorst(run, rows, title, open) {
  const phases = run.told.ranks.phases.map((phase) => phase.name);
  setText(byId("worst-title"), title);
  fillTable(
    byId("worst"),
    ["rank", ["state", "w"], "score", "z", ...phases, ["host", "w"], "copy", "stage", ["now", "w"]],
    rows.map((row) => ({
      cells: [
        new Opener(row.rank, open),
        row.state,
        known(row.score) ? row.score.toFixed(3) : NONE,
        known(row.z) ? row.z.toFixed(1) : NONE,
        ...phases.map((name) => seconds(row.seconds[name])),
        row.host || NONE,
        whole(row.copy),
        whole(row.stage),
        doing(row, run.told.now),
      ],
    })),
  );
  setText(
    byId("worst-note"),
    rows.length
      ? "Score: time to compute a token over that of the stage's other ranks, " +
          "mean of 20 steps; z: how unusual that is. Seconds are of the last step."
      : "No rank to show.",
  );
}

function doing(row, now) {
  if (!row.doing) return NONE;
  const phase = row.doing.replace(/_s$/, ""),
    age = known(row.since_t) && !["lost", "ended", "stale"].includes(row.state) ? now - row.since_t : NaN;
  return (phase === "comm" ? "waiting" : phase) + (age > 1 && age < 86400 ? `, ${seconds(age)}` : "");
}

function showPhases(run) {
  fillTable(
    byId("phases"),
    [["phase", "w"], "1 %", "median", "99 %", "largest"],
    run.told.ranks.phases.map((phase) => ({
      cells: [phase.name, seconds(phase.p1), seconds(phase.p50), seconds(phase.p99), seconds(phase.max)],
    })),
  );
}

// One row a host: only while the reader has it open.
function showHosts(run, score) {
  if (!byId("as-table").open) return;
  const hosts = new Map();
  run.place.ranks.forEach((rank, index) => {
    const name = run.place.hosts[run.place.host[index]] || "unknown host",
      host = hosts.get(name) ?? { name, count: 0, bad: 0, worst: index };
    host.count += 1;
    if (["slow", "waiting", "stalled", "lost"].includes(STATES[run.frame.states[index]])) host.bad += 1;
    if (!(score[host.worst] >= score[index])) host.worst = index;
    hosts.set(name, host);
  });
  const rows = [...hosts.values()].sort((a, b) => b.bad - a.bad || score[b.worst] - score[a.worst]).slice(0, 200);
  fillTable(
    byId("hosts"),
    [["host", "w"], "ranks", "slow, held up or lost", "worst rank", "its score"],
    rows.map((host) => ({
      cells: [
        host.name,
        whole(host.count),
        whole(host.bad),
        String(run.place.ranks[host.worst]),
        known(score[host.worst]) ? score[host.worst].toFixed(3) : NONE,
      ],
    })),
  );
}

function showSteps(run) {
  const columns = run.series.columns,
    count = columns.step?.length ?? 0,
    rows = [];
  const at = (name, i) => columns[name]?.[i] ?? null;
  for (let i = count - 1; i >= Math.max(0, count - 20); i -= 1) {
    rows.push({
      cells: [
        whole(columns.step[i]),
        clock(columns.t[i]),
        plain(at("loss", i)),
        plain(at("val_loss", i)),
        prefixed(at("tokens_per_s", i), "tokens/s"),
        seconds(at("step_s", i)),
        seconds(at("waiting_s", i)),
        plain(at("grad_norm", i)),
        compact(at("lr", i)),
      ],
    });
  }
  fillTable(
    byId("steps"),
    ["step", ["at", "w"], "loss", "validation", "speed", "step time", "waiting", "gradient norm", "learning rate"],
    rows,
  );
}

const LEVELS = ["detail", "info", "good", "warn", "bad"];

function showEvents(run) {
  const least = { info: 1, warn: 3, detail: 0 }[byId("level").value],
    words = byId("words").value.trim().toLowerCase();
  const found = run.events.filter(
    (event) =>
      LEVELS.indexOf(event.level) >= least && (!words || `${event.name} ${event.text}`.toLowerCase().includes(words)),
  );
  const rows = found
    .slice(-MOST_EVENTS)
    .reverse()
    .map((event) => ({
      cells: [
        clock(event.t),
        known(event.step) ? whole(event.step) : NONE,
        make(
          "span",
          { class: event.level },
          [EVENT_MARKS[event.level] ?? "", (event.kind ?? event.name).replaceAll("_", " ")].join(" ").trim(),
        ),
        event.text,
      ],
    }));
  fillTable(byId("event-table"), [["at", "w"], "step", ["event", "w"], ["what", "wrap"]], rows);
  setText(
    byId("event-count"),
    found.length > rows.length ? `newest ${rows.length} of ${whole(found.length)}` : plural(found.length, "event"),
  );
}

function showDetail(run, rank, found, index) {
  setText(byId("detail-title"), `Rank ${rank}`);
  const body = byId("detail-body"),
    { place, frame } = run,
    phases = run.told.ranks.phases.map((phase) => phase.name);
  const last = phases.map(
    (name, i) => `${name} ${seconds(found ? found.seconds[name] : secondsOf(frame, i, index))}`,
  );
  const facts = [
    ["State", STATES[frame.states[index]]],
    ["Host", place.hosts[place.host[index]] || "unknown"],
    [
      "Place",
      `copy ${place.copy[index]}, pipeline stage ${place.stage[index]}, number ${rank % place.inner} inside of it`,
    ],
    ["Last whole step", last.join(", ")],
  ];
  if (found) {
    facts.push([
      "Score",
      `${plain(found.score, 3)} × the other ranks of its stage, mean of 20 steps; z ${plain(found.z, 1)}`,
    ]);
    const age = (one) => (known(one.for_s) && one.for_s < 86400 ? ` for ${seconds(one.for_s)}` : "");
    if (found.open.length)
      facts.push(["Open phases", found.open.map((one) => one.name.replace(/_s$/, "") + age(one)).join(" › ")]);
    if (found.unfinished.length)
      facts.push([
        "Unfinished",
        found.unfinished.map((one) => `${one.name}, ${bytes(one.bytes)}${age(one)}`).join("; "),
      ]);
    for (const event of found.events)
      facts.push([(event.kind ?? event.name).replaceAll("_", " "), `${clock(event.t)}: ${event.text}`]);
  }
  const parts = [make("dl", {}, ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]))];
  if (found?.history.length) parts.push(...history(found));
  if (found?.log.length)
    parts.push(make("p", { class: "note" }, "End of its log"), make("pre", { tabindex: "0" }, found.log.join("\n")));
  if (!found)
    parts.push(make("p", { class: "note" }, "This report keeps the history and log of the worst ranks only."));
  body.replaceChildren(...parts);
}

// The last steps of a rank as stacked bars, which the text below repeats in numbers.
function history(found) {
  const totals = found.history.map(([, parts]) => parts.reduce((a, b) => a + (b ?? 0), 0)),
    largest = Math.max(...totals) || 1;
  const bars = found.history.map(([step, parts], i) =>
    make(
      "span",
      { title: `${step ? `step ${step}: ` : ""}${seconds(totals[i])}` },
      ...parts.map((value, k) =>
        make("i", { style: `height:${(86 * (value ?? 0)) / largest}px;background:var(--c${k + 1})` }),
      ),
    ),
  );
  const key = found.phases.map((name, k) =>
    make("span", {}, make("i", { style: `background:var(--c${k + 1})` }), name),
  );
  const steps = plural(found.history.length, "step");
  const words = `Its last ${steps}: ${seconds(Math.min(...totals))} to ${seconds(largest)}`;
  return [
    make("p", { class: "note" }, words),
    make("div", { class: "stack", role: "img", "aria-label": words }, ...bars),
    make("div", { class: "key" }, ...key),
  ];
}
