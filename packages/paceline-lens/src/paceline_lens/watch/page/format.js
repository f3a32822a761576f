// Numbers, sizes and times as people read them. Null is what is not known, and is shown as a dash.

export const UNKNOWN = "–";

/** A number of a snapshot, which has "nan", "inf" and "-inf" for those that JSON has no word for; null where there is none. */
export function toNumber(value) {
  if (typeof value === "number") return value;
  if (value === "nan") return NaN;
  if (value === "inf") return Infinity;
  if (value === "-inf") return -Infinity;
  return null;
}

// `moreDigits` of the next functions: how many digits more than usual, for values that would read the same.

/** A logged value: about four digits, or NaN or infinity by name. */
export function number(value, moreDigits = 0) {
  const given = toNumber(value);
  if (given === null) return UNKNOWN;
  if (Number.isNaN(given)) return "NaN";
  if (!Number.isFinite(given)) return given > 0 ? "infinity" : "−infinity";
  const size = Math.abs(given);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return minus(given.toExponential(2 + moreDigits).replace(/\.?0*e\+?/, "e"));
  if (size >= 1000 || Number.isInteger(given)) return minus(given.toLocaleString("en", { maximumFractionDigits: moreDigits }));
  return minus(given.toLocaleString("en", { maximumSignificantDigits: 4 + moreDigits }));
}

function minus(text) {
  return text.replace("-", "−");
}

/** A count or a rate, shortened where it is large: 1,234 or 3.2 M. */
export function count(value, moreDigits = 0) {
  const given = toNumber(value);
  if (given === null || !Number.isFinite(given)) return number(value);
  if (Math.abs(given) < 10_000) return number(given, moreDigits);
  return given
    .toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 + moreDigits })
    .replace("K", "k")
    .replace(/([A-Za-z])$/, " $1");
}

export function percent(share, moreDigits = 0) {
  return share === null || share === undefined ? UNKNOWN : `${(100 * share).toFixed(moreDigits)} %`;
}

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(value, moreDigits = 0) {
  if (value === null || value === undefined) return UNKNOWN;
  let size = value;
  let unit = 0;
  while (Math.abs(size) >= 1024 && unit < SIZES.length - 1) {
    size /= 1024;
    unit += 1;
  }
  const usualDigits = size < 10 && unit > 0 ? 1 : 0;
  return `${size.toFixed(unit > 0 ? usualDigits + moreDigits : 0)} ${SIZES[unit]}`;
}

const MOST_MORE_DIGITS = 8;

/** The texts of the marks of an axis, with as many digits as tell them apart. */
export function axisTexts(values, format) {
  let texts = values.map((value) => format(value));
  for (let more = 1; more <= MOST_MORE_DIGITS && new Set(texts).size < texts.length; more += 1)
    texts = values.map((value) => format(value, more));
  return texts;
}

/** Seconds in words: 0.4 s, 12 s, 3 min 20 s, 5 h 12 min, 3 d 4 h. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  if (seconds < 10) return `${Math.max(0, seconds).toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86_400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86_400)} d ${Math.floor((whole % 86_400) / 3600)} h`;
}

export function milliseconds(value, moreDigits = 0) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value < 1000) return `${number(Number(value.toPrecision(3 + moreDigits)), moreDigits)} ms`;
  return moreDigits === 0 ? duration(value / 1000) : `${number(value / 1000, moreDigits)} s`;
}

/** A moment (unix seconds) by the reader's clock; with its day where it is not today. */
export function clock(moment) {
  const date = new Date(moment * 1000);
  const time = date.toLocaleTimeString("en-GB");
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday ? time : `${date.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${time}`;
}

/** 1 rank, 2 ranks. */
export function plural(amount, noun) {
  return `${number(amount)} ${noun}${amount === 1 ? "" : "s"}`;
}
