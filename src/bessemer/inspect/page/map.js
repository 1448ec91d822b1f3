// The run's topology: boxes of ranks (a stage of a copy of the model, or a host) and the links between them.

const MOST_LINKS = 4000;

class TopologyMap {
  constructor(canvas, tip, chosen) {
    this.canvas = canvas;
    this.tip = tip;
    canvas.addEventListener("pointermove", (event) => this.hover(event.offsetX, event.offsetY));
    canvas.addEventListener("pointerleave", () => {
      tip.hidden = true;
    });
    canvas.addEventListener("click", (event) => {
      const box = this.at(event.offsetX, event.offsetY);
      if (box) chosen(box.worst);
    });
  }

  // score: by index, compute time over the median of the stage. kind: of links. bad: lists of ranks of slow links.
  draw(run, score, { by, kind, bad, selected }) {
    const { place, frame } = run,
      width = this.canvas.clientWidth;
    this.run = run;
    this.by = by;
    const boxes = boxesOf(place, by),
      counts = boxes.size;
    const columns =
      by === "copies" ? this.copyColumns(place, width) : Math.ceil(Math.sqrt(counts * Math.max(1, width / 420)));
    const pitch = Math.max(7, Math.min(96, Math.floor((width - 8) / columns))),
      size = Math.floor(pitch * 0.68);
    this.layOut(place, boxes, columns, pitch, size, by);
    const rows = Math.max(...[...boxes.values()].map((box) => box.row)) + 1;
    const height = (rows - 1) * pitch + size + 8,
      { context: c } = sharp(this.canvas, height);
    this.canvas.style.height = `${height}px`;
    const links = kind === "none" ? [] : linksOf(place, boxes, kind);
    c.lineWidth = 1.2;
    c.globalAlpha = links.length > 400 ? 0.35 : 0.8;
    c.strokeStyle = colour("c1");
    for (const [a, b] of links.slice(0, MOST_LINKS)) this.link(c, a, b, size);
    c.globalAlpha = 1;
    this.marked(c, place, boxes, bad, size, "bad", 3);
    if (selected !== null) this.marked(c, place, boxes, groupsOf(place, selected), size, "accent", 2);
    for (const box of boxes.values()) this.box(c, box, score, frame, size);
    this.boxes = boxes;
    this.size = size;
    return links.length;
  }

  // Copies beside each other, in as many bands as leave a box room to be seen.
  copyColumns(place, width) {
    const copies = new Set(place.copy).size,
      most = Math.max(1, Math.floor(width / (copies * place.sizes.pp > 2000 ? 12 : 20)));
    return Math.ceil(copies / Math.ceil(copies / most));
  }

  layOut(place, boxes, columns, pitch, size, by) {
    const copies = [...new Set(place.copy)].sort((a, b) => a - b),
      order = new Map(copies.map((copy, i) => [copy, i]));
    let next = 0;
    for (const box of boxes.values()) {
      const at = by === "copies" ? order.get(place.copy[box.members[0]]) : next;
      box.column = at % columns;
      box.row =
        Math.floor(at / columns) * (by === "copies" ? place.sizes.pp : 1) +
        (by === "copies" ? place.stage[box.members[0]] : 0);
      box.x = 4 + box.column * pitch;
      box.y = 4 + box.row * pitch;
      next += 1;
    }
  }

  link(c, a, b, size) {
    const half = size / 2;
    c.beginPath();
    c.moveTo(a.x + half, a.y + half);
    c.lineTo(b.x + half, b.y + half);
    c.stroke();
  }

  marked(c, place, boxes, lists, size, name, line) {
    c.strokeStyle = colour(name);
    c.lineWidth = line;
    for (const ranks of lists) {
      const found = ranks
        .map((rank) => place.index.get(rank))
        .filter((i) => i !== undefined)
        .map((i) => boxes.get(this.key(place, i)));
      for (let i = 1; i < found.length; i += 1)
        if (found[i] !== found[i - 1]) this.link(c, found[i - 1], found[i], size);
    }
  }

  key(place, index) {
    return this.by === "hosts" ? place.host[index] : place.copy[index] * place.sizes.pp + place.stage[index];
  }

  // Coloured by its worst rank; a bar at the foot where a rank is lost, so that colour alone doesn't say it.
  box(c, box, score, frame, size) {
    let worst = box.members[0],
      severe = 0;
    for (const index of box.members) {
      const state = STATES[frame.states[index]],
        weight = { lost: 4, stalled: 3, waiting: 2, slow: 1 }[state] ?? 0;
      if (weight > severe || (weight === severe && score[index] > score[worst])) {
        worst = index;
        severe = Math.max(severe, weight);
      }
    }
    const state = STATES[frame.states[worst]];
    box.worst = worst;
    box.state = state;
    const every = (name) => box.members.every((index) => STATES[frame.states[index]] === name);
    c.fillStyle =
      severe === 1
        ? colour("hot")
        : every("spare")
          ? colour("spare")
          : state in STATE_COLOURS
            ? colour(STATE_COLOURS[state])
            : colour("even");
    c.fillRect(box.x, box.y, size, size);
    c.strokeStyle = colour("soft");
    c.lineWidth = 1;
    c.strokeRect(box.x + 0.5, box.y + 0.5, size - 1, size - 1);
    if (size >= 26) {
      c.font = "12px system-ui, sans-serif";
      c.textAlign = "center";
      c.textBaseline = "middle";
      c.fillStyle = ["lost", "stalled"].includes(state) ? "#fff" : colour("ink");
      c.fillText(box.label, box.x + size / 2, box.y + size / 2, size - 4);
    } else if (severe >= 2) {
      c.fillStyle = colour("ink");
      c.fillRect(box.x + 1, box.y + size - 3, size - 2, 2);
    }
  }

  at(x, y) {
    for (const box of this.boxes?.values() ?? []) {
      if (x >= box.x && x <= box.x + this.size && y >= box.y && y <= box.y + this.size) return box;
    }
    return null;
  }

  hover(x, y) {
    const box = this.at(x, y);
    this.tip.hidden = box === null;
    if (box === null) return;
    const worst = `worst is rank ${this.run.place.ranks[box.worst]} (${box.state})`;
    setText(this.tip, `${box.name}: ${plural(box.members.length, "rank")}, ${worst}`);
    const right = box.x > this.canvas.clientWidth / 2;
    this.tip.style.left = right ? "" : `${box.x}px`;
    this.tip.style.right = right ? `${this.canvas.clientWidth - box.x - this.size}px` : "";
    this.tip.style.top = `${box.y + this.size + 4}px`;
  }
}

function boxesOf(place, by) {
  const boxes = new Map();
  place.ranks.forEach((rank, index) => {
    const key = by === "hosts" ? place.host[index] : place.copy[index] * place.sizes.pp + place.stage[index];
    let box = boxes.get(key);
    if (!box) {
      const host = place.hosts[place.host[index]] || "unknown host";
      const name = by === "hosts" ? host : `copy ${place.copy[index]}, stage ${place.stage[index]}`;
      const label =
        by === "hosts"
          ? host
          : place.sizes.pp > 1
            ? `${place.copy[index]}.${place.stage[index]}`
            : `${place.copy[index]}`;
      boxes.set(key, (box = { key, name, label, members: [] }));
    }
    box.members.push(index);
  });
  return boxes;
}

// The groups of a rank: along its pipeline, across copies, and inside of its stage.
function groupsOf(place, index) {
  const rank = place.ranks[index],
    { inner, block } = place,
    within = rank % block;
  const pipeline = Array.from({ length: place.sizes.pp }, (_, s) => rank - within + s * inner + (within % inner));
  const copies = [...new Set(place.copy)].map((copy) => copy * block + within);
  return [pipeline, copies];
}

function kindsOf(sizes, copies) {
  const kinds = [];
  if (sizes.pp > 1) kinds.push(["pipeline", "pipeline"]);
  if (copies > 1) kinds.push(["copies", "gradient sums across copies"]);
  if (sizes.shard * sizes.cp * sizes.tp > 1) kinds.push(["inner", "inside a stage (tensor, context, shard)"]);
  return [...kinds, ["none", "none"]];
}

// Pairs of boxes between which neighbours of groups of a kind lie; each pair once.
function linksOf(place, boxes, kind) {
  const home = new Map();
  for (const box of boxes.values()) for (const index of box.members) home.set(index, box);
  const pairs = new Map(),
    { inner, block, sizes } = place,
    copies = [...new Set(place.copy)].sort((a, b) => a - b);
  const follows = new Map(copies.map((copy, i) => [copy, copies[i + 1]]));
  place.ranks.forEach((rank, index) => {
    const within = rank % block;
    let other = null;
    if (kind === "pipeline" && within + inner < sizes.pp * inner) other = rank + inner;
    if (kind === "copies" && follows.get(place.copy[index]) !== undefined)
      other = follows.get(place.copy[index]) * block + within;
    if (kind === "inner" && (within % inner) + 1 < inner) other = rank + 1;
    const at = other === null ? undefined : place.index.get(other);
    if (at === undefined) return;
    const a = home.get(index),
      b = home.get(at);
    if (a !== b) pairs.set(`${a.key}:${b.key}`, [a, b]);
  });
  return [...pairs.values()];
}
