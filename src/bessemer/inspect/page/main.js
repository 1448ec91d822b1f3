// Puts the page together: asks for what is new, draws it, and follows what the reader chooses.

const CHARTS = [
  { title: "Loss, nats a token (dots: validation)", key: "loss", dots: "val_loss", format: (v) => v.toFixed(4) },
  {
    title: "Speed, tokens/s",
    key: "tokens_per_s",
    zero: true,
    format: (v) => prefixed(v, "tokens/s"),
    tick: (v) => prefixed(v, ""),
    plan: (p) => ({
      at: p.tokens_per_s,
      low: (p.tokens_per_s * p.step_s) / p.high_s,
      high: (p.tokens_per_s * p.step_s) / p.low_s,
    }),
  },
  {
    title: "Time of a step",
    key: "step_s",
    zero: true,
    format: seconds,
    tick: seconds,
    plan: (p) => ({ at: p.step_s, low: p.low_s, high: p.high_s }),
  },
  { title: "Norm of the gradient", key: "grad_norm", log: true, format: (v) => v.toFixed(4) },
  {
    title: "Expert load, largest over mean (worst layer)",
    key: "imbalance",
    rare: true,
    format: (v) => v.toFixed(2),
  },
  { title: "Clipped elements (worst tensor)", key: "saturated", rare: true, zero: true, format: share, tick: share },
];

const page = {
  source: openSource(),
  runs: [],
  chosen: 0,
  rank: null,
  detail: null,
  charts: [],
  heat: null,
  map: null,
  wait: 0,
  timer: 0,
};

function view() {
  return { axis: byId("axis").value, span: Number(byId("span").value), smooth: byId("smooth").checked };
}

function current() {
  return page.runs[page.chosen];
}

function framed(told) {
  return told.phases.slice(0, told.framed);
}

function phaseValues(run, phase) {
  const counts = run.frame.counts[phase],
    found = new Float32Array(counts.length);
  for (let i = 0; i < found.length; i += 1) found[i] = counts[i] === UNKNOWN ? NaN : counts[i] * run.frame.unit;
  return found;
}

// A function of (index) from the text of the filter: ranks as "0-127, 512", or a part of a host's name.
function finder(run, text) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return () => true;
  const parts = wanted.split(/[\s,]+/).filter(Boolean),
    ranges = parts.map((part) => part.match(/^(\d+)(?:-(\d+))?$/));
  if (ranges.every(Boolean)) {
    const pairs = ranges.map((found) => [Number(found[1]), Number(found[2] ?? found[1])]);
    return (index) => pairs.some(([low, high]) => run.place.ranks[index] >= low && run.place.ranks[index] <= high);
  }
  const hosts = run.place.hosts.map((name) => name.toLowerCase().includes(wanted));
  return (index) => hosts[run.place.host[index]];
}

function showRanks(run) {
  const { place, frame } = run,
    none = !frame;
  byId("ranks").querySelector(".heat").hidden = none;
  byId("topology").hidden = none;
  if (none) {
    setText(byId("matches"), "No black box has been written yet.");
    return;
  }
  options(run);
  const metric = byId("metric").value,
    score = frame.scores,
    phase = metric === "score" ? null : Number(metric);
  const values = phase === null ? score : phaseValues(run, phase),
    told = run.told.ranks;
  const high = phase === null ? 1.2 : told.phases[phase].p99 || told.phases[phase].max || 1e-9;
  const shape = phase === null ? { low: 0.8, high, even: true } : { low: 0, high, even: false };
  const stage = byId("stage").value,
    status = byId("status").value,
    finds = finder(run, byId("find").value);
  const matches = new Uint8Array(place.ranks.length);
  let count = 0;
  for (let i = 0; i < matches.length; i += 1) {
    matches[i] = Number(
      (stage === "" || place.stage[i] === Number(stage)) &&
        (status === "" || STATES[frame.states[i]] === status) &&
        finds(i),
    );
    count += matches[i];
  }
  setText(
    byId("matches"),
    `${whole(count)} of ${plural(matches.length, "rank")}${told.step ? `, step ${whole(told.step)}` : ""}`,
  );
  const words =
    phase === null
      ? (v) => `score ${known(v) ? v.toFixed(3) : NONE}`
      : (v) => `${told.phases[phase].name} ${seconds(v)}`;
  page.heat.draw(run, values, shape, ordered(run, values), matches, words);
  showKey(told, shape, phase === null ? (v) => v.toFixed(1) + " ×" : seconds);
  const all = count === matches.length && phase === null;
  const rows = all ? told.worst : topOf(run, values, matches, score);
  showWorst(
    run,
    rows,
    all ? "Worst ranks" : `Highest ${phase === null ? "score" : told.phases[phase].name} of the filtered ranks`,
    open,
  );
  showPhases(run);
  showHosts(run, score);
  showMap(run, score);
}

function ordered(run, values) {
  const by = byId("order").value,
    order = run.place.ranks.map((_, index) => index),
    { stage } = run.place;
  if (by === "stage") order.sort((a, b) => stage[a] - stage[b] || a - b);
  if (by === "worst")
    order.sort((a, b) => (Number.isNaN(values[b]) ? -1 : values[b]) - (Number.isNaN(values[a]) ? -1 : values[a]));
  return order;
}

function topOf(run, values, matches, score) {
  const found = [];
  for (let i = 0; i < matches.length; i += 1) if (matches[i]) found.push(i);
  found.sort((a, b) => (Number.isNaN(values[b]) ? -1 : values[b]) - (Number.isNaN(values[a]) ? -1 : values[a]));
  const { place, frame, told } = run;
  return found.slice(0, 20).map((i) => ({
    rank: place.ranks[i],
    host: place.hosts[place.host[i]],
    copy: place.copy[i],
    stage: place.stage[i],
    state: STATES[frame.states[i]],
    score: score[i],
    z: null,
    doing: "",
    seconds: Object.fromEntries(framed(told.ranks).map((phase, k) => [phase.name, secondsOf(frame, k, i)])),
  }));
}

function choices(select, wanted) {
  const text = JSON.stringify(wanted);
  if (select.dataset.choices === text) return;
  const value = select.value;
  select.replaceChildren(...wanted.map(([key, name]) => make("option", { value: key }, name)));
  if (wanted.some(([key]) => key === value)) select.value = value;
  select.dataset.choices = text;
}

function options(run) {
  const { ranks } = run.told,
    stages = [...new Set(run.place.stage)].sort((a, b) => a - b),
    copies = new Set(run.place.copy).size;
  choices(byId("metric"), [
    ["score", "score: compute against the stage"],
    ...framed(ranks).map((phase, i) => [String(i), phase.name]),
  ]);
  choices(byId("stage"), [["", "all"], ...stages.map((stage) => [String(stage), String(stage)])]);
  choices(byId("status"), [["", "all"], ...STATES.map((state) => [state, state])]);
  choices(byId("links"), kindsOf(run.place.sizes, copies));
}

function showKey(told, shape, format) {
  const ramp = shape.even
    ? `${colour("cold")}, ${colour("even")}, ${colour("hot")}`
    : `${colour("even")}, ${colour("c4")}, ${colour("hot")}`;
  const parts = [
    format(shape.low),
    make("span", { class: "ramp", style: `background:linear-gradient(90deg, ${ramp})` }),
    `${format(shape.high)} or more`,
  ];
  for (const [state, paint] of Object.entries(STATE_COLOURS)) {
    if (told.counts[state])
      parts.push(
        make("span", {}, make("i", { style: `background:var(--${paint})` }), `${whole(told.counts[state])} ${state}`),
      );
  }
  const text = parts.map((part) => (typeof part === "string" ? part : part.outerHTML)).join("");
  if (byId("heat-key").dataset.text === text) return;
  byId("heat-key").dataset.text = text;
  byId("heat-key").replaceChildren(...parts);
}

function showMap(run, score) {
  const bad = findingsOf(run)
    .filter((event) => event.kind === "slow_link")
    .map((event) => event.ranks);
  const kind = byId("links").value,
    selected = page.rank === null ? null : (run.place.index.get(page.rank) ?? null);
  const count = page.map.draw(run, score, { by: byId("boxes").value, kind, bad, selected });
  const words =
    `${plural(page.map.boxes.size, "box")}`.replace("boxs", "boxes") +
    `, ${plural(count, "link")}` +
    (bad.length ? `; ${plural(bad.length, "slow link")} marked by the flight inspection` : "") +
    ". A box has the colour of its worst rank; click opens that one. " +
    (page.rank === null ? "Open a rank to see its groups." : `The groups of rank ${page.rank} are drawn on top.`);
  setText(byId("map-note"), words);
  byId("map").setAttribute("aria-label", `Topology: ${words} The table by host above has the same.`);
}

async function open(rank) {
  const run = current(),
    index = run.place.index.get(rank);
  if (index === undefined) return;
  page.rank = rank;
  page.heat.opened = index;
  let found = null;
  try {
    found = await page.source.rank(run, rank);
  } catch (error) {
    trouble(error);
  }
  if (page.rank !== rank || run !== current()) return;
  showDetail(run, rank, found, index);
  const panel = byId("detail");
  panel.hidden = false;
  panel.focus();
  showRanks(run);
}

function close() {
  byId("detail").hidden = true;
  page.rank = page.heat.opened = null;
  byId("heat").focus({ preventScroll: true });
  showRanks(current());
}

function showCurves() {
  const told = page.runs.filter((run) => run.told),
    first = [current(), ...told.filter((run) => run !== current())];
  for (const chart of page.charts) {
    chart.figure.hidden = Boolean(chart.spec.rare) && !first.some((run) => run.series.columns[chart.spec.key]);
    if (!chart.figure.hidden) chart.draw(first, view());
  }
  showSteps(current());
  if (told.length > 1 && byId("legend").children.length !== told.length) {
    byId("legend").replaceChildren(
      ...told.map((run) =>
        make("span", {}, make("i", { style: `background:${runColour(run.number)}` }), run.told.run.name),
      ),
    );
  }
}

function showAll() {
  paints = {};
  const run = current();
  if (!run?.told) return;
  for (const show of [
    showHeader,
    showTiles,
    showVerdict,
    showFactors,
    showKeep,
    showExperts,
    showPrecision,
    showEvents,
    showRanks,
  ])
    show(run);
  showCurves();
}

function tellNews(run) {
  const news = run.fresh.filter(
    (event) =>
      event.level === "warn" || event.level === "bad" || event.name === "finished" || event.name === "joined",
  );
  if (news.length)
    announce(
      news
        .slice(-3)
        .map((event) => `${event.name.replaceAll("_", " ")}: ${event.text}`)
        .join(". "),
    );
}

function trouble(error) {
  const told = byId("trouble");
  told.hidden = error === null;
  if (error !== null) setText(told, `The page can't be brought up to date (${error.message}). It tries again.`);
}

async function round() {
  const begin = performance.now();
  try {
    for (const run of page.runs) await page.source.poll(run, run === current());
    trouble(null);
    page.wait = page.runs.every((run) => ["finished", "stopped", "failed"].includes(run.told.run.state))
      ? ENDED_MS
      : RUNNING_MS;
    showAll();
    tellNews(current());
  } catch (error) {
    page.wait = Math.min(ENDED_MS, page.wait * 2 || RUNNING_MS);
    trouble(error);
  }
  clearTimeout(page.timer);
  if (page.source.live) page.timer = setTimeout(next, Math.max(100, page.wait - (performance.now() - begin)));
}

function next() {
  if (document.hidden) document.addEventListener("visibilitychange", next, { once: true });
  else round();
}

function listen() {
  for (const id of ["axis", "span", "smooth"]) byId(id).addEventListener("change", showCurves);
  for (const id of ["metric", "order", "stage", "status", "boxes", "links"])
    byId(id).addEventListener("change", () => showRanks(current()));
  byId("find").addEventListener("input", () => showRanks(current()));
  byId("level").addEventListener("change", () => showEvents(current()));
  byId("words").addEventListener("input", () => showEvents(current()));
  byId("as-table").addEventListener("toggle", () => showRanks(current()));
  byId("clear").addEventListener("click", () => {
    for (const id of ["find", "stage", "status"]) byId(id).value = "";
    showRanks(current());
  });
  byId("detail-close").addEventListener("click", close);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("detail").hidden) close();
  });
  byId("theme").addEventListener("click", () => {
    const root = document.documentElement,
      dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    showAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showAll);
  let resized = 0;
  window.addEventListener("resize", () => {
    clearTimeout(resized);
    resized = setTimeout(showAll, 150);
  });
}

async function start() {
  const pick = (index) => open(current().place.ranks[index]);
  page.heat = new Heat(byId("heat"), byId("heat-tip"), pick);
  page.map = new TopologyMap(byId("map"), byId("map-tip"), pick);
  page.charts = CHARTS.map((spec) => new Chart(spec));
  byId("charts").append(...page.charts.map((chart) => chart.figure));
  const names = await page.source.names();
  page.runs = names.map((_, number) => new Run(number));
  byId("choose").hidden = names.length < 2;
  choices(
    byId("run"),
    names.map((name, number) => [String(number), name]),
  );
  byId("run").addEventListener("change", () => {
    if (!byId("detail").hidden) close();
    page.chosen = Number(byId("run").value);
    round();
  });
  listen();
  await round();
}

start().catch(trouble);
