// Draws the line charts of a report with uPlot: each `.plot` holds its lines as JSON, [[xs, ys], ...], null for a gap.

const style = () => getComputedStyle(document.documentElement);
const colour = (name) => () => style().getPropertyValue(`--${name}`).trim();

/** A value in one of Python's formats: ".3f", ".3g" or ".1%". */
function formatted(value, form) {
  const [, digits, kind] = /\.(\d+)([fg%])/.exec(form) ?? [null, "3", "g"];
  if (kind === "%") return `${(100 * value).toFixed(digits)}%`;
  return kind === "f" ? value.toFixed(digits) : String(Number(value.toPrecision(digits)));
}

for (const holder of document.querySelectorAll(".plot")) {
  const { names, tables, form, label } = JSON.parse(holder.querySelector("script").textContent);
  const text = (value) => (value === null || value === undefined ? "–" : formatted(value, form));
  const axis = {
    stroke: colour("quiet"),
    grid: { stroke: colour("edge"), width: 1 },
    ticks: { show: false },
    font: "12px system-ui",
  };
  const points = tables[0][0].length <= 40;
  const readouts = [...holder.previousElementSibling.querySelectorAll("b")];
  const last = tables.map(([, ys]) => ys.findLast((value) => value !== null));
  const options = {
    width: holder.clientWidth,
    height: 260,
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false } },
    scales: { x: { time: false } },
    axes: [
      {
        ...axis,
        grid: { show: false },
        size: 32,
        incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000, 100_000, 1_000_000],
      },
      { ...axis, size: 54 },
    ],
    series: [
      {},
      ...names.map((_, at) => ({ stroke: colour(`series-${at % 4}`), width: 2, points: { show: points, size: 6 } })),
    ],
    hooks: {
      // Under the pointer the legend has the values there, and else the last ones.
      setCursor: [
        ({ cursor, data }) => {
          const isThere = cursor.idx !== null && cursor.idx !== undefined;
          readouts.forEach((readout, at) => (readout.textContent = text(isThere ? data[at + 1][cursor.idx] : last[at])));
          const where = holder.previousElementSibling.querySelector("em");
          where.textContent = isThere ? `${label} ${data[0][cursor.idx]}` : label;
        },
      ],
    },
  };
  const plot = new window.uPlot(options, window.uPlot.join(tables), holder);
  new ResizeObserver(() => plot.setSize({ width: holder.clientWidth, height: 260 })).observe(holder);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw(false, false));
}
