// All ranks as one canvas, a cell each; the keyboard moves a cursor over it.

const STATES = ["unknown", "running", "slow", "waiting", "stalled", "lost", "spare", "ended", "stale"];
const UNKNOWN = 65535;
const STATE_COLOURS = { unknown: "idle", waiting: "warn", stalled: "bad", lost: "lost", spare: "spare", stale: "idle" };
const LARGEST_CELL = 44;

class Heat {
  constructor(canvas, tip, chosen) {
    this.canvas = canvas;
    this.tip = tip;
    this.chosen = chosen;
    this.cursor = null;
    this.image = document.createElement("canvas");
    canvas.addEventListener("pointermove", (event) => this.hover(this.at(event.offsetX, event.offsetY)));
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("click", (event) => {
      const cell = this.at(event.offsetX, event.offsetY);
      if (cell !== null) {
        this.cursor = cell;
        chosen(this.order[cell]);
        this.paint();
      }
    });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("focus", () => {
      this.cursor ??= 0;
      this.paint();
      this.say();
    });
    canvas.addEventListener("blur", () => {
      this.hover(null);
      this.paint();
    });
  }

  // values: what is coloured, by index; shape: {low, high, even}: the ends of the ramp, and its middle if it has one.
  draw(run, values, shape, order, matches, format) {
    Object.assign(this, { run, values, shape, order, matches, format });
    const width = this.canvas.clientWidth,
      count = order.length;
    const cell = Math.min(
      LARGEST_CELL,
      Math.max(2, Math.floor(Math.sqrt((width * Math.min(width * 0.55, 560)) / count))),
    );
    this.columns = Math.max(1, Math.floor(width / cell));
    if (count >= 64) this.columns = Math.max(8, this.columns - (this.columns % 8));
    this.cell = cell;
    this.rows = Math.ceil(count / this.columns);
    this.canvas.style.height = `${this.rows * cell}px`;
    this.pixels();
    this.paint();
  }

  pixels() {
    const { columns, rows, order, values, matches, run } = this,
      { low, high } = this.shape;
    if (this.image.width !== columns || this.image.height !== rows) {
      this.image.width = columns;
      this.image.height = rows;
    }
    const context = this.image.getContext("2d"),
      image = context.createImageData(columns, rows);
    const out = new Uint32Array(image.data.buffer),
      ramp = this.ramp(),
      fixed = stateColours(),
      faint = 0x38000000;
    for (let cell = 0; cell < order.length; cell += 1) {
      const index = order[cell],
        state = run.frame.states[index],
        value = values[index];
      let paint = fixed[state];
      if (paint === 0) {
        const part = (value - low) / (high - low);
        paint = value !== value ? fixed[0] : ramp[Math.max(0, Math.min(255, (part * 255) | 0))];
      }
      out[cell] = matches[index] ? paint : ((paint & 0xffffff) | faint) >>> 0;
    }
    context.putImageData(image, 0, 0);
  }

  ramp() {
    const name = this.shape.even ? "both" : "one",
      kept = (this.ramps ??= {});
    if (this.theme !== colour("bg")) {
      this.ramps = {};
      this.theme = colour("bg");
      return this.ramp();
    }
    return (kept[name] ??= rampOf(
      name === "both" ? [rgb("cold"), rgb("even"), rgb("hot")] : [rgb("even"), rgb("c4"), rgb("hot")],
    ));
  }

  paint() {
    if (!this.order) return;
    const { context: c, width, height } = sharp(this.canvas, this.rows * this.cell),
      { cell, columns } = this;
    c.imageSmoothingEnabled = false;
    c.drawImage(this.image, 0, 0, columns * cell, this.rows * cell);
    if (cell >= 12) {
      c.fillStyle = colour("card");
      for (let x = 1; x <= columns; x += 1) c.fillRect(x * cell - 1, 0, 1, height);
      for (let y = 1; y <= this.rows; y += 1) c.fillRect(0, y * cell - 1, width, 1);
    }
    if (cell >= 24) this.numbers(c);
    const focused = document.activeElement === this.canvas;
    if (
      this.cursor !== null &&
      this.cursor < this.order.length &&
      (focused || this.opened === this.order[this.cursor])
    ) {
      c.strokeStyle = colour("ink");
      c.lineWidth = 2;
      c.strokeRect(
        (this.cursor % columns) * cell,
        Math.floor(this.cursor / columns) * cell,
        Math.max(cell - 1, 3),
        Math.max(cell - 1, 3),
      );
    }
  }

  numbers(c) {
    c.font = "12px system-ui, sans-serif";
    c.textAlign = "center";
    c.textBaseline = "middle";
    this.order.forEach((index, cell) => {
      const state = STATES[this.run.frame.states[index]],
        x = ((cell % this.columns) + 0.5) * this.cell,
        y = (Math.floor(cell / this.columns) + 0.5) * this.cell;
      c.fillStyle = ["lost", "stalled"].includes(state) ? "#fff" : colour("ink");
      c.fillText(this.run.place.ranks[index], x - 0.5, state === "lost" ? y - 5 : y);
      if (state === "lost") c.fillText("lost", x - 0.5, y + 8);
    });
  }

  at(x, y) {
    if (!this.order) return null;
    const column = Math.floor(x / this.cell),
      cell = Math.floor(y / this.cell) * this.columns + column;
    return column < this.columns && cell < this.order.length ? cell : null;
  }

  hover(cell) {
    this.tip.hidden = cell === null;
    if (cell === null) return;
    setText(this.tip, this.words(this.order[cell]));
    const x = (cell % this.columns) * this.cell,
      right = x > this.canvas.clientWidth / 2;
    this.tip.style.left = right ? "" : `${x + this.cell + 6}px`;
    this.tip.style.right = right ? `${this.canvas.clientWidth - x + 6}px` : "";
    this.tip.style.top = `${Math.floor(cell / this.columns) * this.cell + this.cell}px`;
  }

  words(index) {
    const { place, frame } = this.run,
      value = this.values[index];
    return (
      `rank ${place.ranks[index]}, ${place.hosts[place.host[index]] || "unknown host"}, stage ${place.stage[index]}, ` +
      `${STATES[frame.states[index]]}, ${this.format(value)}`
    );
  }

  say() {
    if (this.cursor !== null && this.order?.[this.cursor] !== undefined)
      announce(this.words(this.order[this.cursor]));
  }

  key(event) {
    const moves = {
      ArrowRight: 1,
      ArrowLeft: -1,
      ArrowDown: this.columns,
      ArrowUp: -this.columns,
      PageDown: 8 * this.columns,
      PageUp: -8 * this.columns,
    };
    const last = this.order ? this.order.length - 1 : 0;
    if (event.key in moves) this.cursor = Math.max(0, Math.min(last, (this.cursor ?? 0) + moves[event.key]));
    else if (event.key === "Home") this.cursor = 0;
    else if (event.key === "End") this.cursor = last;
    else if (event.key === "Enter" || event.key === " ") {
      if (this.cursor !== null) this.chosen(this.order[this.cursor]);
    } else return;
    event.preventDefault();
    if (event.key !== "Enter" && event.key !== " ") {
      this.paint();
      this.hover(this.cursor);
      this.say();
    }
  }
}

// Seconds of a phase of a rank in the last frame; null for what isn't known or isn't in a frame.
function secondsOf(frame, phase, index) {
  const count = frame.counts[phase]?.[index] ?? UNKNOWN;
  return count === UNKNOWN ? null : count * frame.unit;
}

// Colours as the pixels of an ImageData have them (little-endian), 0 for states whose colour is the value's.
function stateColours() {
  return STATES.map((state) => (state in STATE_COLOURS ? pixel(rgb(STATE_COLOURS[state])) : 0));
}

function pixel([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

function rampOf(stops) {
  const found = new Uint32Array(256);
  for (let i = 0; i < 256; i += 1) {
    const at = (i / 255) * (stops.length - 1),
      low = Math.min(Math.floor(at), stops.length - 2);
    found[i] = pixel(stops[low].map((value, k) => Math.round(value + (stops[low + 1][k] - value) * (at - low))));
  }
  return found;
}
