// Numbers and times in words. A value that is not known is a dash, never a zero.

export const DASH = "–";

const plain = new Map();
export function number(value, digits = 0) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  if (!plain.has(digits)) {
    plain.set(digits, new Intl.NumberFormat("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  }
  return plain.get(digits).format(value);
}

// Three figures are what such a measurement carries.
const figures = (value) => number(value, value >= 100 || value === 0 ? 0 : value >= 10 ? 1 : 2);

// Each answers [figure, unit]; a chart asks for the unit of its largest value, so that an axis has one unit.
export const UNITS = {
  tokens_per_s: (value) => [value !== null && value >= 10 ? number(value) : value === 0 ? "0" : number(value, 1), "tok/s"],
  count: (value) => [number(value), ""],
  per_minute: (value) => [value === null ? DASH : value === 0 ? "0" : number(value * 60, value * 60 < 10 ? 1 : 0), "/min"],
  share: (value) => [value === null ? DASH : number(value * 100, value > 0 && value < 0.1 ? 1 : 0), "%"],
  seconds: (value, largest = value) => {
    if (value === null) return [DASH, ""];
    return largest < 1 ? [value === 0 ? "0" : figures(value * 1000), "ms"] : [value === 0 ? "0" : figures(value), "s"];
  },
};

export function quantity(unit, value, largest) {
  const [figure, name] = UNITS[unit](value ?? null, largest ?? undefined);
  return name && figure !== DASH ? `${figure} ${name}` : figure;
}

// A round number at an axis, in the unit of its upper end and without the figures that it does not need.
export function tick(unit, value, top) {
  const scale = { per_minute: 60, share: 100, seconds: top < 1 ? 1000 : 1 }[unit] ?? 1;
  const name = UNITS[unit](top, top)[1];
  const figure = Number((value * scale).toPrecision(3));
  return `${figure.toLocaleString("en-US", figure >= 10_000 ? { notation: "compact" } : {})}${name && ` ${name}`}`;
}

export function duration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  if (minutes) return `${minutes} min ${whole % 60} s`;
  return `${whole} s`;
}

const two = (value) => String(value).padStart(2, "0");
export function clock(seconds, withSeconds = true) {
  const date = new Date(seconds * 1000);
  return `${two(date.getHours())}:${two(date.getMinutes())}${withSeconds ? `:${two(date.getSeconds())}` : ""}`;
}

export function moment(seconds) {
  const date = new Date(seconds * 1000);
  const today = date.toDateString() === new Date().toDateString();
  return today ? clock(seconds) : `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${clock(seconds)}`;
}
