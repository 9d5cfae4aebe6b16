// A time chart in SVG: lines with gaps, a few grid lines, one cursor that all charts share.

import { DASH, clock, quantity, tick } from "./format.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
const HEIGHT = 168, LEFT = 76, RIGHT = 8, TOP = 12, BOTTOM = 22;

function svg(name, attributes, parent, text) {
  const node = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent?.append(node);
  return node;
}

// The next round number, such that its half is one too.
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 4, 5, 6, 8, 10].map((factor) => factor * power).find((bound) => bound >= value * 0.9999);
}

export class Chart {
  // spec: {title, unit, series: [{key, name}], top or least: fixed or lowest upper end of the axis, empty: why it may be}
  constructor(spec, parent, moved) {
    this.spec = spec;
    this.moved = moved;
    this.figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const title = document.createElement("strong");
    title.textContent = spec.title;
    caption.append(title);
    this.keys = spec.series.map(({ name }, n) => {
      const key = document.createElement("span");
      key.className = "key num";
      key.dataset.n = n;
      caption.append(key);
      return key;
    });
    this.graph = svg("svg", { class: "chart", role: "img", tabindex: "0" });
    this.empty = document.createElement("p");
    this.empty.className = "empty";
    this.empty.textContent = spec.empty;
    this.figure.append(caption, this.graph, this.empty);
    parent.append(this.figure);
    this.graph.addEventListener("pointermove", (event) => this.point(event));
    this.graph.addEventListener("pointerleave", () => this.moved(null));
    this.graph.addEventListener("blur", () => this.moved(null));
    this.graph.addEventListener("keydown", (event) => this.step(event));
  }

  point(event) {
    const box = this.graph.getBoundingClientRect();
    if (!this.times?.length) return;
    const time = this.from + ((event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT)) * (this.to - this.from);
    let nearest = 0;
    this.times.forEach((one, index) => { if (Math.abs(one - time) < Math.abs(this.times[nearest] - time)) nearest = index; });
    this.moved(this.times[nearest]);
  }

  step(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined || !this.times?.length) return;
    event.preventDefault();
    const last = this.times.length - 1;
    const at = this.cursor === null ? last : this.times.indexOf(this.cursor);
    this.moved(this.times[Math.min(last, Math.max(0, at + move))]);
  }

  // columns: the history; from, to: seconds since the epoch; cursor: a time or null
  draw(columns, from, to, cursor, interval) {
    Object.assign(this, { from, to, cursor });
    const shown = columns.time.map((time, index) => index).filter((index) => columns.time[index] >= from);
    this.times = shown.map((index) => columns.time[index]);
    const lines = this.spec.series.map(({ key }) => shown.map((index) => columns[key][index]));
    const known = lines.flat().filter((value) => value !== null);
    this.empty.hidden = known.length > 0;
    this.graph.toggleAttribute("hidden", known.length === 0);
    const largest = Math.max(0, ...known);
    // The door's cap is known whenever the engine answers; when it does not, an old value is nobody's.
    this.say(lines, largest, known.length > 0, (columns.cap.at(-1) ?? null) !== null);
    if (!known.length) return;
    const width = Math.max(240, this.graph.clientWidth || 480);
    const top = this.spec.top ?? roundUp(Math.max(largest, this.spec.least ?? 0));
    const x = (time) => LEFT + ((time - from) / (to - from)) * (width - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - (Math.min(value, top) / top) * (HEIGHT - TOP - BOTTOM);
    const fresh = svg("g", {});
    this.graph.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.away(fresh, columns, shown, x, interval);
    for (const part of [0, 0.5, 1]) {
      svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(top * part), y2: y(top * part) }, fresh);
      svg("text", { x: LEFT - 7, y: y(top * part) + 4, "text-anchor": "end" }, fresh, tick(this.spec.unit, top * part, top));
    }
    for (const part of [0, 0.5, 1]) {
      const anchor = ["start", "middle", "end"][part * 2];
      svg("text", { x: x(from + (to - from) * part), y: HEIGHT - 5, "text-anchor": anchor }, fresh, clock(from + (to - from) * part, to - from < 1000));
    }
    lines.forEach((values, n) => this.line(fresh, values, n, x, y, interval));
    if (cursor !== null) svg("line", { class: "cursor", x1: x(cursor), x2: x(cursor), y1: TOP, y2: HEIGHT - BOTTOM }, fresh);
    this.graph.replaceChildren(fresh);
  }

  line(parent, values, n, x, y, interval) {
    let path = "", run = 0, last = null;
    values.forEach((value, index) => {
      const time = this.times[index];
      if (value === null) { run = 0; return; }
      if (last !== null && time - last > interval * 2.5) run = 0;
      const next = values[index + 1] ?? null;
      if (run === 0 && next === null) svg("circle", { class: "lone", "data-n": n, cx: x(time), cy: y(value), r: 1.9 }, parent);
      path += `${run ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
      run += 1;
      last = time;
    });
    svg("path", { class: "line", "data-n": n, d: path || "M0 0" }, parent);
  }

  // Where the endpoint was not ready.
  away(parent, columns, shown, x, interval) {
    let begun = null;
    const close = (until) => {
      svg("rect", { class: "away", x: x(Math.max(begun, this.from)), y: TOP, width: Math.max(1, x(until) - x(Math.max(begun, this.from))), height: HEIGHT - TOP - BOTTOM }, parent);
      begun = null;
    };
    shown.forEach((index) => {
      const ready = columns.state[index] === "ready";
      if (!ready && begun === null) begun = columns.time[index] - interval;
      if (ready && begun !== null) close(columns.time[index]);
    });
    if (begun !== null) close(this.to);
  }

  // The same in words: beside each colour the value at the cursor, or the newest; for a screen reader a summary.
  say(lines, largest, known, answers) {
    const at = this.cursor === null ? -1 : this.times.indexOf(this.cursor);
    const values = lines.map((line) => (this.cursor !== null ? line[at] : answers ? line.findLast((value) => value !== null) : null) ?? null);
    this.spec.series.forEach(({ name }, n) => {
      this.keys[n].hidden = known && lines[n].every((value) => value === null); // such as tier hits without a tier
      const text = `${name} ${quantity(this.spec.unit, values[n], largest || undefined)}`;
      if (this.keys[n].textContent !== text) this.keys[n].textContent = text;
    });
    const words = this.spec.series.map(({ name }, n) => `${name} ${values[n] === null ? DASH : quantity(this.spec.unit, values[n], largest)}`);
    const when = this.cursor === null ? "latest" : clock(this.cursor);
    this.graph.setAttribute("aria-label", `${this.spec.title}, ${when}: ${words.join(", ")}; highest ${quantity(this.spec.unit, largest, largest)}`);
  }
}
