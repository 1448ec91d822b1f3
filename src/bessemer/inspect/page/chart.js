// Curves on canvas: one figure for each quantity, a line a run, the plan dashed, events as marks on the axis.

const PAD = { left: 56, right: 10, top: 8, bottom: 30 };
const RUN_COLOURS = ["c0", "c1", "c2", "c3", "c4", "c5"];
const EVENT_MARKS = { good: "●", warn: "▲", bad: "■" };

function runColour(number) {
  return colour(RUN_COLOURS[number % RUN_COLOURS.length]);
}

// The values of ticks: 1, 2 or 5 times a power of ten apart.
function ticks(low, high, count) {
  const raw = (high - low) / count,
    size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * size).find((n) => n >= raw);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(at);
  return found;
}

// A canvas as sharp as the screen, cleared; its size in CSS pixels.
function sharp(canvas, height = canvas.clientHeight) {
  const ratio = window.devicePixelRatio || 1,
    width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

class Chart {
  // spec: title, key of the column, format of values, and where they are: plan(predicted) -> {at, low, high}; dots: a
  // column of rare values; zero: the axis begins at 0; log: it is logarithmic.
  constructor(spec) {
    this.spec = spec;
    this.now = make("b");
    this.canvas = make("canvas", { role: "img", "aria-label": spec.title });
    this.tip = make("div", { class: "tip wide", hidden: "" });
    this.figure = make(
      "figure",
      {},
      make("figcaption", {}, make("span", {}, spec.title), this.now),
      this.canvas,
      this.tip,
    );
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.pointer = null;
    this.shown = null;
  }

  // runs: what is drawn; view: {axis, span, smooth}.
  draw(runs, view) {
    this.shown = { runs, view };
    const { spec } = this,
      lines = runs.map((run) => this.line(run, view)).filter((line) => line.x.length);
    const last = lines.length ? lines[0].raw.findLast(known) : null;
    const plan = spec.plan && runs[0].told ? spec.plan(runs[0].told.predicted) : null;
    const apart = plan && known(plan.at) ? ` (${difference(last, plan.at)} from plan)` : "";
    setText(this.now, known(last) ? spec.format(last) + apart : NONE);
    this.canvas.setAttribute("aria-label", `${spec.title}: now ${this.now.textContent}`);
    const { context: c, width, height } = sharp(this.canvas, 190);
    if (!lines.length) {
      this.empty(c, width, height);
      return;
    }
    this.scale = this.scales(lines, plan, view, width, height);
    this.axes(c, width, height, view);
    if (plan && known(plan.at)) this.plan(c, plan, width);
    for (const line of lines) this.curve(c, line);
    this.events(c, runs[0], view, height);
    if (this.pointer !== null) this.cross(c, lines, height);
    this.lines = lines;
  }

  empty(c, width, height) {
    c.fillStyle = colour("soft");
    c.font = "13px system-ui, sans-serif";
    c.textAlign = "center";
    c.fillText("nothing yet", width / 2, height / 2);
  }

  line(run, view) {
    const columns = run.series.columns,
      steps = columns.step ?? [],
      values = columns[this.spec.key] ?? [];
    const start = run.told?.run.started_t ?? 0,
      from = view.span ? (steps.at(-1) ?? 0) - view.span : -Infinity;
    const x = [],
      y = [],
      raw = [],
      dots = [];
    const rare = this.spec.dots ? columns[this.spec.dots] : null;
    let mean = null;
    for (let i = 0; i < steps.length; i += 1) {
      if (steps[i] <= from) continue;
      const at = view.axis === "t" ? columns.t[i] - start : steps[i];
      if (rare && rare[i] !== null) dots.push([at, rare[i]]);
      const value = values[i];
      if (value === null || value === undefined || (this.spec.log && value <= 0)) continue;
      mean = mean === null ? value : mean + (value - mean) * 0.12;
      x.push(at);
      y.push(view.smooth ? mean : value);
      raw.push(value);
    }
    return { run, x, y, raw, dots };
  }

  scales(lines, plan, view, width, height) {
    const every = lines.flatMap((line) => [...line.y, ...line.dots.map((dot) => dot[1])]).filter(known);
    let low = Infinity,
      high = -Infinity;
    for (const value of every) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    if (plan && known(plan.at) && plan.at < 3 * high && plan.at > low / 3) {
      low = Math.min(low, plan.low ?? plan.at);
      high = Math.max(high, plan.high ?? plan.at);
    }
    const log = Boolean(this.spec.log) && high > 20 * low;
    if (this.spec.zero) low = 0;
    if (high === low) {
      high += Math.abs(high) * 0.05 || 1;
      low -= Math.abs(low) * 0.05;
    }
    const room = log ? 0 : (high - low) * 0.05;
    high += room;
    if (!this.spec.zero) low -= room;
    let left = Infinity,
      right = -Infinity;
    for (const line of lines) {
      left = Math.min(left, line.x[0]);
      right = Math.max(right, line.x.at(-1));
    }
    if (right === left) right = left + 1;
    const [a, b] = log ? [Math.log10(low), Math.log10(high)] : [low, high];
    const wide = width - PAD.left - PAD.right,
      tall = height - PAD.top - PAD.bottom;
    return {
      low,
      high,
      left,
      right,
      log,
      x: (value) => PAD.left + ((value - left) / (right - left)) * wide,
      y: (value) => PAD.top + (1 - ((log ? Math.log10(value) : value) - a) / (b - a)) * tall,
      back: (pixel) => left + ((pixel - PAD.left) / wide) * (right - left),
    };
  }

  axes(c, width, height, view) {
    const { scale } = this;
    c.font = "12px system-ui, sans-serif";
    c.fillStyle = colour("soft");
    c.strokeStyle = colour("line");
    c.lineWidth = 1;
    c.textAlign = "right";
    c.textBaseline = "middle";
    const marks = scale.log
      ? ticks(Math.ceil(Math.log10(scale.low)), Math.floor(Math.log10(scale.high)) + 0.01, 4)
          .filter(Number.isInteger)
          .map((n) => 10 ** n)
      : ticks(scale.low, scale.high, 4);
    for (const mark of marks) {
      const y = Math.round(scale.y(mark)) + 0.5;
      c.beginPath();
      c.moveTo(PAD.left, y);
      c.lineTo(width - PAD.right, y);
      c.stroke();
      c.fillText((this.spec.tick ?? compact)(mark), PAD.left - 6, y);
    }
    c.textAlign = "center";
    c.textBaseline = "alphabetic";
    const label = view.axis === "t" ? seconds : whole;
    for (const mark of ticks(scale.left, scale.right, Math.max(2, Math.floor(width / 130)))) {
      const x = Math.min(Math.max(scale.x(mark), PAD.left + 10), width - PAD.right - 14);
      c.fillText(label(mark), x, height - 4);
    }
  }

  plan(c, plan, width) {
    const { scale } = this,
      at = scale.y(plan.at),
      clip = (y) => Math.min(Math.max(y, PAD.top), 190 - PAD.bottom);
    c.fillStyle = colour("c1");
    if (known(plan.low) && known(plan.high)) {
      c.globalAlpha = 0.12;
      c.fillRect(
        PAD.left,
        clip(scale.y(plan.high)),
        width - PAD.left - PAD.right,
        clip(scale.y(plan.low)) - clip(scale.y(plan.high)),
      );
      c.globalAlpha = 1;
    }
    if (at < PAD.top || at > 190 - PAD.bottom) return;
    c.strokeStyle = colour("c1");
    c.setLineDash([6, 4]);
    c.beginPath();
    c.moveTo(PAD.left, at);
    c.lineTo(width - PAD.right, at);
    c.stroke();
    c.setLineDash([]);
  }

  // Of all points in one column of pixels the first, lowest, highest and last.
  curve(c, line) {
    const { scale } = this;
    c.strokeStyle = runColour(line.run.number);
    c.lineWidth = 1.5;
    c.lineJoin = "round";
    c.beginPath();
    let column = -1,
      low = 0,
      high = 0,
      last = 0;
    for (let i = 0; i < line.x.length; i += 1) {
      const x = scale.x(line.x[i]),
        y = Math.min(Math.max(scale.y(line.y[i]), PAD.top), 190 - PAD.bottom),
        pixel = Math.round(x);
      if (pixel !== column) {
        if (column >= 0 && low !== high) {
          c.lineTo(column, low);
          c.lineTo(column, high);
          c.lineTo(column, last);
        }
        if (i === 0) c.moveTo(x, y);
        else c.lineTo(x, y);
        column = pixel;
        low = high = y;
      }
      low = Math.min(low, y);
      high = Math.max(high, y);
      last = y;
    }
    if (low !== high) {
      c.lineTo(column, low);
      c.lineTo(column, high);
      c.lineTo(column, last);
    }
    c.stroke();
    c.fillStyle = c.strokeStyle;
    for (const [x, value] of line.dots) {
      c.beginPath();
      c.arc(scale.x(x), scale.y(value), 3, 0, 7);
      c.fill();
    }
  }

  events(c, run, view, height) {
    c.font = "9px system-ui, sans-serif";
    c.textAlign = "center";
    this.marks = [];
    for (const event of run.events) {
      if (!(event.level in EVENT_MARKS) || event.name === "eval") continue;
      const at = eventPlace(run, event, view),
        x = at === null ? null : this.scale.x(at);
      if (x === null || at < this.scale.left || at > this.scale.right) continue;
      c.fillStyle = colour(event.level);
      c.fillText(EVENT_MARKS[event.level], x, height - PAD.bottom + 12);
      if (event.level === "bad") {
        c.globalAlpha = 0.35;
        c.fillRect(x - 0.5, PAD.top, 1, height - PAD.top - PAD.bottom);
        c.globalAlpha = 1;
      }
      this.marks.push({ x, event });
    }
  }

  point(pixel) {
    this.pointer = pixel;
    if (!this.shown) return;
    this.draw(this.shown.runs, this.shown.view);
    this.tip.hidden = pixel === null || !this.lines?.length;
  }

  cross(c, lines, height) {
    const at = this.scale.back(this.pointer),
      { view } = this.shown;
    c.fillStyle = colour("soft");
    c.fillRect(Math.round(this.pointer), PAD.top, 1, height - PAD.top - PAD.bottom);
    const rows = [view.axis === "t" ? seconds(at) : "step " + whole(at)];
    for (const line of lines) {
      const near = nearest(line.x, at);
      if (near !== null)
        rows.push((lines.length > 1 ? line.run.told.run.name + ": " : "") + this.spec.format(line.raw[near]));
    }
    for (const mark of this.marks.filter((m) => Math.abs(m.x - this.pointer) < 6).slice(0, 3)) {
      rows.push(`${mark.event.name.replaceAll("_", " ")}: ${mark.event.text}`.slice(0, 160));
    }
    this.tip.replaceChildren(...rows.map((row) => make("div", {}, row)));
    this.tip.style.top = "24px";
    const right = this.pointer > this.canvas.clientWidth / 2;
    this.tip.style.left = right ? "" : `${this.pointer + 12}px`;
    this.tip.style.right = right ? `${this.canvas.clientWidth - this.pointer + 12}px` : "";
  }
}

function nearest(sorted, value) {
  if (!sorted.length) return null;
  let low = 0,
    high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - sorted[low - 1] < sorted[low] - value ? low - 1 : low;
}

// Where an event lies on the axis: by its time, among the steps' times where the axis counts steps.
function eventPlace(run, event, view) {
  if (view.axis === "t") return event.t - (run.told.run.started_t ?? 0);
  const { t, step } = run.series.columns;
  if (!t?.length || event.t < t[0] - 60) return null;
  return step[nearest(t, event.t)];
}
