// Numbers for people, always with their unit; and small helpers of the page.

const NONE = "–";

function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function three(value) {
  const size = Math.abs(value);
  return size < 10 ? value.toFixed(2) : size < 100 ? value.toFixed(1) : value.toFixed(0);
}

function seconds(value) {
  if (!known(value)) return NONE;
  if (value < 0) return "-" + seconds(-value);
  if (value === 0) return "0 s";
  if (value < 1e-3) return three(value * 1e6) + " µs";
  if (value < 1) return three(value * 1e3) + " ms";
  if (value < 60) return three(value) + " s";
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  if (whole < 172800)
    return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

function whole(value) {
  return known(value) ? Math.round(value).toLocaleString("en-US") : NONE;
}

function prefixed(value, unit) {
  if (!known(value)) return NONE;
  if (value === 0) return `0 ${unit}`.trim();
  for (const [size, name] of [
    [1e15, "P"],
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ]) {
    if (Math.abs(value) >= size) return `${three(value / size)} ${name} ${unit}`.trim();
  }
  return `${three(value)} ${unit}`.trim();
}

function bytes(value) {
  if (!known(value)) return NONE;
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < names.length - 1) {
    value /= 1024;
    at += 1;
  }
  return at ? `${three(value)} ${names[at]}` : `${Math.round(value)} B`;
}

function percent(value, digits = 1) {
  return known(value) ? (value * 100).toFixed(digits) + " %" : NONE;
}

// A share that may be tiny: three significant digits.
function share(value) {
  if (!known(value)) return NONE;
  if (value === 0) return "0 %";
  return value < 1e-4 ? value.toExponential(1) : Number((value * 100).toPrecision(3)) + " %";
}

function difference(value, against) {
  if (!known(value) || !known(against) || against === 0) return NONE;
  const part = value / against - 1;
  return (part >= 0 ? "+" : "−") + Math.abs(part * 100).toFixed(1) + " %";
}

function plain(value, digits = 4) {
  return known(value) ? value.toFixed(digits) : NONE;
}

function compact(value) {
  if (!known(value)) return NONE;
  return value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)
    ? value.toExponential(2)
    : String(Number(value.toPrecision(4)));
}

function clock(t) {
  if (!known(t)) return NONE;
  const at = new Date(t * 1000),
    two = (n) => String(n).padStart(2, "0");
  const time = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${time}`;
}

function plural(count, noun) {
  return `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
}

const byId = (id) => document.getElementById(id);

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name === "style")
      element.style.cssText = value; // as an attribute the page's policy would refuse it
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function announce(text) {
  byId("announce").textContent = text;
}

let paints = {};

// The value of a colour of the style sheet; kept until the theme changes.
function colour(name) {
  return (paints[name] ??= getComputedStyle(document.documentElement)
    .getPropertyValue("--" + name)
    .trim());
}

// [red, green, blue] of a colour of the style sheet, which has them as #rgb or #rrggbb.
function rgb(name) {
  const text = colour(name).slice(1),
    long = text.length === 3 ? [...text].map((c) => c + c).join("") : text;
  return [0, 2, 4].map((at) => parseInt(long.slice(at, at + 2), 16));
}
