// Where the page's data comes from: a server that is asked once a second, or what a report has inside.

const MAGIC = "BWF1";
const RUNNING_MS = 1000;
const ENDED_MS = 5000;

// A run as this page knows it so far. `told` is the last answer; curves and events are added up.
class Run {
  constructor(number) {
    this.number = number;
    this.told = null;
    this.series = { generation: -1, rows: 0, columns: {} };
    this.events = [];
    this.reading = -1;
    this.eventCount = 0;
    this.place = null;
    this.frame = null;
    this.fresh = [];
  }

  query(ranks) {
    const place = this.place ? this.place.generation : -1;
    return (
      `run=${this.number}&generation=${this.series.generation}&rows=${this.series.rows}` +
      `&events=${this.eventCount}&reading=${this.reading}&place=${place}&ranks=${ranks ? 1 : 0}`
    );
  }

  take(told, frame) {
    const first = this.told === null;
    this.told = told;
    this.takeSeries(told.series);
    const events = told.events;
    if (events.from !== this.eventCount || events.reading !== this.reading) this.events = [];
    this.events.push(...events.rows);
    this.fresh = first ? [] : events.rows;
    this.reading = events.reading;
    this.eventCount = events.count;
    if (told.place) this.place = placeOf(told.place, told.run.sizes);
    this.frame =
      told.ranks && this.place && frame.byteLength ? frameOf(frame, told.ranks, this.place.ranks.length) : null;
  }

  takeSeries(told) {
    const known = this.series,
      anew = told.generation !== known.generation || told.from === 0;
    if (anew) known.columns = {};
    const before = known.columns.step ? known.columns.step.length : 0,
      added = told.columns.step.length;
    for (const [name, values] of Object.entries(told.columns)) {
      const column = (known.columns[name] ??= new Array(before).fill(null));
      for (const value of values) column.push(value);
    }
    for (const column of Object.values(known.columns)) {
      while (column.length < before + added) column.push(null);
    }
    known.generation = told.generation;
    known.rows = told.rows;
  }
}

// Arrays by index: number, host, stage, copy and place in it of each rank.
function placeOf(told, sizes) {
  const ranks = [];
  for (const [first, step, count] of told.ranks) for (let i = 0; i < count; i += 1) ranks.push(first + step * i);
  const host = [];
  for (const [index, count] of told.host_runs) for (let i = 0; i < count; i += 1) host.push(index);
  const inner = sizes.shard * sizes.cp * sizes.tp,
    block = inner * sizes.pp;
  const index = new Map(ranks.map((rank, i) => [rank, i]));
  return {
    generation: told.generation,
    ranks,
    hosts: told.hosts,
    host,
    index,
    inner,
    block,
    sizes,
    stage: ranks.map((rank) => Math.floor((rank % block) / inner)),
    copy: ranks.map((rank) => Math.floor(rank / block)),
  };
}

// Counts by phase, scores and states of all ranks; null if the server has more ranks by now than this page knows of.
function frameOf(buffer, told, count) {
  const framed = told.framed;
  if (buffer.byteLength !== count * (2 * framed + 2)) return null;
  const counts = Array.from({ length: framed }, (_, at) => new Uint16Array(buffer, at * count * 2, count));
  const scores = Float32Array.from(new Uint8Array(buffer, framed * count * 2, count), (n) =>
    n === 255 ? NaN : 0.75 + n * 0.0025,
  );
  return { unit: told.unit_s, counts, scores, states: new Uint8Array(buffer, (framed * 2 + 1) * count, count) };
}

class Server {
  constructor() {
    this.live = true;
  }

  async names() {
    return (await this.get("runs")).json();
  }

  async poll(run, ranks) {
    const buffer = await (await this.get("poll?" + run.query(ranks))).arrayBuffer();
    const length = new DataView(buffer).getUint32(4, true),
      head = new Uint8Array(buffer, 0, 4);
    if (String.fromCharCode(...head) !== MAGIC) throw new Error("the server speaks another version: reload the page");
    const told = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
    run.take(told, buffer.slice(8 + length));
  }

  async rank(run, rank) {
    return (await this.get(`rank?run=${run.number}&rank=${rank}`)).json();
  }

  async get(path) {
    const answer = await fetch(path, { cache: "no-store" });
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    return answer;
  }
}

class Recording {
  constructor(element) {
    this.live = false;
    this.runs = JSON.parse(element.textContent);
  }

  async names() {
    return this.runs.map((run) => run.told.run.name);
  }

  async poll(run) {
    const { told, frame } = this.runs[run.number];
    run.take(told, Uint8Array.from(atob(frame), (c) => c.charCodeAt(0)).buffer);
  }

  async rank(run, rank) {
    return this.runs[run.number].details[rank] ?? null;
  }
}

function openSource() {
  const recorded = byId("recorded");
  return recorded ? new Recording(recorded) : new Server();
}
