// `LineChart`: one line over steps or time, drawn by uPlot, with the cursor's value as text above it.

import { axisTexts, count, duration, number, toNumber } from "./format.js";
import { element } from "./dom.js";

const HEIGHT = 180;
const MOST_MARKS = 200; // of values that are not finite; each is a line as high as the chart

// Distances between the marks of an axis: whole steps, times that are read easily (in seconds), and powers of two for sizes.
const WHOLE_STEPS = Array.from({ length: 36 }, (_, index) => [1, 2, 5][index % 3] * 10 ** Math.floor(index / 3));
const TIME_STEPS = [
  1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000,
];
export const SIZE_STEPS = Array.from({ length: 50 }, (_, index) => 2 ** index);

let colours = {};

/** Reads the colours of the page again: after a change from light to dark. */
export function readColours() {
  const style = getComputedStyle(document.documentElement);
  colours = {};
  for (const name of ["line", "quiet", "edge", "bad", "ink"]) colours[name] = style.getPropertyValue(`--${name}`).trim();
}

export class LineChart {
  /**
   * @param name     what the line shows
   * @param format   makes a value's text; a second argument asks for so many digits more
   * @param steps    distances that the marks of the value's axis may have; null for round numbers
   * @param isTime   whether x is seconds since the start, and not a step
   * @param cursors  charts with the same word share their cursor
   * @param remove   called by the button that removes the chart; null for no such button
   */
  constructor(name, { format = number, steps = null, isTime = false, cursors = "", remove = null } = {}) {
    this.name = name;
    this.format = format;
    this.steps = steps;
    this.isTime = isTime;
    this.xName = "step";
    this.forecast = null;
    this.points = [];
    this.columns = [[], []];
    this.readout = element("span", { class: "readout" });
    const head = element(
      "figcaption",
      { class: "chart-head" },
      element("span", { class: "name", title: name }, name),
      this.readout,
    );
    if (remove !== null) {
      const button = element("button", { type: "button", "aria-label": `Remove ${name}`, title: "Remove" }, "×");
      button.addEventListener("click", remove);
      head.append(button);
    }
    this.plot = element("div", { class: "plot", tabindex: "0", role: "img" });
    this.foot = element("div", { class: "foot" });
    this.root = element("figure", { class: "chart" }, head, this.plot, this.foot);
    this.plot.addEventListener("keydown", (event) => this.moveCursor(event));
    this.plot.addEventListener("blur", () => this.uplot.setCursor({ left: -10, top: -10 }));
    this.uplot = new window.uPlot(this.options(cursors), this.columns, this.plot);
    // The chart is as wide as its column, whatever changes that.
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(this.plot);
  }

  /** Shows other points, [[x, value], ...]; `forecast` is a value to compare with, drawn as a dashed line. */
  update(points, { xName = "step", forecast = null } = {}) {
    this.points = points;
    this.xName = xName;
    this.forecast = forecast;
    const values = points.map((point) => toNumber(point[1]));
    const finite = values.map((value) => (Number.isFinite(value) ? value : null));
    this.columns = [points.map((point) => point[0]), finite];
    this.uplot.setData(this.columns);
    this.describe(values);
    this.showReadout(this.uplot.cursor.idx);
  }

  /** Draws again, for other colours. */
  redraw() {
    this.uplot.redraw(false, false);
  }

  destroy() {
    this.observer.disconnect();
    this.uplot.destroy();
    this.root.remove();
  }

  fit() {
    const width = this.plot.clientWidth;
    if (width > 0 && width !== this.uplot.width) this.uplot.setSize({ width, height: HEIGHT });
  }

  /** The chart in words, for those who do not see it, and what is not finite in it, for all. */
  describe(values) {
    const finite = values.filter((value) => Number.isFinite(value));
    const odd = values.findIndex((value) => !Number.isFinite(value));
    let words = `${this.name}: no values yet`;
    if (values.length > 0) words = `${this.name}: now ${this.format(values.at(-1))}`;
    if (finite.length > 1) {
      const low = finite.reduce((least, value) => Math.min(least, value));
      const high = finite.reduce((most, value) => Math.max(most, value));
      words += `, lowest ${this.format(low)}, highest ${this.format(high)}, ${this.xText(this.points[0][0])} to ${this.xText(this.points.at(-1)[0])}`;
    }
    this.foot.textContent = odd < 0 ? "" : `${this.format(values[odd])} first at ${this.xText(this.points[odd][0])}`;
    this.foot.className = odd < 0 ? "foot" : "foot bad";
    this.plot.setAttribute("aria-label", `${words}. Arrow keys read single values.`);
  }

  xText(x) {
    return this.isTime ? duration(x) : `${this.xName} ${number(x)}`;
  }

  showReadout(index) {
    const isLast = index === null || index === undefined || index >= this.points.length;
    const point = isLast ? this.points.at(-1) : this.points[index];
    this.readout.replaceChildren();
    if (point === undefined) return;
    if (!isLast) this.readout.append(`${this.xText(point[0])}  `);
    this.readout.append(element("b", {}, this.format(point[1])));
  }

  moveCursor(event) {
    const last = this.points.length - 1;
    const now = this.uplot.cursor.idx ?? last;
    const index = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last, PageUp: now - 20, PageDown: now + 20 }[
      event.key
    ];
    if (index === undefined || last < 0) return;
    event.preventDefault();
    this.readout.setAttribute("aria-live", "polite");
    const kept = Math.min(last, Math.max(0, index));
    this.uplot.setCursor({ left: this.uplot.valToPos(this.points[kept][0], "x"), top: HEIGHT / 2 });
    this.showReadout(kept);
  }

  options(cursors) {
    const font = "12px system-ui, sans-serif";
    const axis = { stroke: () => colours.quiet, grid: { stroke: () => colours.edge, width: 1 }, ticks: { show: false }, font };
    const xValues = (_, ticks) => axisTexts(ticks, this.isTime ? shortDuration : number);
    const yFormat = this.format === number ? count : this.format;
    const yValues = (_, ticks) => axisTexts(ticks, yFormat);
    return {
      width: 360,
      height: HEIGHT,
      legend: { show: false },
      padding: [10, 12, 0, 0],
      cursor: {
        y: false,
        drag: { x: false, y: false },
        points: { size: 7 },
        sync: cursors === "" ? undefined : { key: cursors },
      },
      scales: { x: { time: false }, y: { range: (_, low, high) => this.range(low, high) } },
      axes: [
        { ...axis, values: xValues, incrs: this.isTime ? TIME_STEPS : WHOLE_STEPS, space: 70, size: 30, grid: { show: false } },
        {
          ...axis,
          values: yValues,
          ...(this.steps === null ? {} : { incrs: this.steps }),
          space: 36,
          size: (_, texts) => 14 + 7 * Math.max(3, ...(texts ?? []).map((text) => text.length)),
        },
      ],
      series: [{}, { stroke: () => colours.line, width: 1.75, points: { show: () => this.points.length < 3 } }],
      hooks: {
        draw: [(uplot) => this.drawMarks(uplot)],
        setCursor: [(uplot) => this.showReadout(uplot.cursor.idx)],
      },
    };
  }

  range(low, high) {
    if (low === null || low === undefined) return [0, 1];
    const least = this.forecast === null ? low : Math.min(low, this.forecast);
    const most = this.forecast === null ? high : Math.max(high, this.forecast);
    const margin = (most - least) * 0.06 || Math.abs(most) * 0.1 || 0.5;
    // Speeds and sizes begin at 0 where that is near, so that a small dip looks small.
    const bottom = least >= 0 && least - margin < most * 0.3 ? 0 : least - margin;
    return [bottom, most + margin];
  }

  /** The forecast, and a line at each value that is not finite, which has no height to be drawn at. */
  drawMarks(uplot) {
    const { ctx, bbox } = uplot;
    const ratio = window.devicePixelRatio || 1;
    ctx.save();
    ctx.lineWidth = ratio;
    if (this.forecast !== null) {
      const y = uplot.valToPos(this.forecast, "y", true);
      ctx.strokeStyle = colours.ink;
      ctx.setLineDash([5 * ratio, 4 * ratio]);
      drawLine(ctx, bbox.left, y, bbox.left + bbox.width, y);
    }
    ctx.strokeStyle = colours.bad;
    ctx.setLineDash([]);
    ctx.globalAlpha = 0.6;
    const odd = this.points.filter((point) => !Number.isFinite(toNumber(point[1]))).slice(0, MOST_MARKS);
    for (const [position] of odd) {
      const x = uplot.valToPos(position, "x", true);
      drawLine(ctx, x, bbox.top, x, bbox.top + bbox.height);
    }
    ctx.restore();
  }
}

function drawLine(ctx, fromX, fromY, toX, toY) {
  ctx.beginPath();
  ctx.moveTo(fromX, fromY);
  ctx.lineTo(toX, toY);
  ctx.stroke();
}

function shortDuration(seconds, moreDigits = 0) {
  if (seconds === 0) return "0";
  if (seconds % 86_400 === 0) return `${seconds / 86_400} d`;
  if (seconds >= 3600) return `${number(seconds / 3600, moreDigits)} h`;
  if (seconds >= 60) return `${number(seconds / 60, moreDigits)} min`;
  return `${number(seconds, moreDigits)} s`;
}
