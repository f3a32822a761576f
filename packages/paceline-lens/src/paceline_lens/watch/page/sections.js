// The sections of the page: each function takes a snapshot (see `watch/view.py`) and gives the elements that show it.

import { bytes, clock, count, duration, milliseconds, number, percent, plural } from "./format.js";
import { element, sentence } from "./dom.js";

// What a reader calls the phases whose own name says too little.
const PHASES = { reduce: "communication", clip: "clipping", step: "optimizer", rest: "other work" };
const HIDDEN_SHARE = 0.005; // a phase of which every rank has less is not shown
const OVER_OTHERS = 0.1; // a rank that has so much more of a phase than the median of all stands out
const LONG_WAIT = 0.25; // and so does one that waits for its data, or for a checkpoint, for so much of its time
const MARGIN = 512 * 2 ** 20; // what a process may load after it has prepared a model
const DENSE_RANKS = 48; // from so many on, a rank is a thin line
const FIRST_ROWS = 8;

function phaseName(phase) {
  return PHASES[phase] ?? phase;
}

/** What the state is called, and how it is coloured. */
export function stateOf(run) {
  const failed = run.state === "ended" && run.exit_code !== 0;
  if (failed) return [run.exit_code === null ? "ended without a word" : `failed, exit code ${run.exit_code}`, "bad"];
  const kind = { running: "good", stuck: "bad", ended: "good", starting: "" }[run.state] ?? "";
  return [run.state === "ended" ? "ended" : run.state === "starting" ? "starting" : run.state, kind];
}

export function findings(run) {
  const rows = run.findings.map((finding) =>
    element(
      "div",
      { class: `finding ${finding.level}` },
      element("p", {}, element("span", { class: "unseen" }, `${finding.level}: `), sentence(finding.text)),
      finding.fix ? element("p", { class: "fix" }, "What to do: ", sentence(finding.fix)) : null,
    ),
  );
  if (run.state === "ended" && run.why)
    rows.unshift(
      element(
        "div",
        { class: `finding ${run.exit_code === 0 ? "" : "error"}` },
        element("p", {}, sentence(`The run has ended: ${run.why}`)),
      ),
    );
  return rows;
}

export function progress(run) {
  const { step, total, percent: done, seconds_left: left } = run.progress;
  const steps = total === null ? `Step ${number(step)}` : `Step ${number(step)} of ${number(total)}`;
  let time = `${duration(run.elapsed_s)} so far`;
  if (run.state === "ended") time = `${duration(run.elapsed_s)} in all`;
  else if (left !== null) time = `${duration(left)} left · ${time}`;
  const bar = element(
    "div",
    {
      class: "bar",
      role: "progressbar",
      "aria-label": "Steps done",
      "aria-valuemin": 0,
      "aria-valuemax": 100,
      "aria-valuenow": Math.round(done ?? 0),
    },
    element("i", { style: { width: `${done ?? 0}%` } }),
  );
  const line = element(
    "div",
    { class: "progress-line" },
    element("b", {}, steps),
    element("b", {}, done === null ? "" : `${done.toFixed(1)} %`),
    element("span", { class: "quiet" }, time),
  );
  return done === null ? [line] : [line, bar];
}

/** Name, value and a note of each key number that is known. */
export function keyNumbers(run) {
  const { recent, mean, forecast } = run.speed;
  const known = [];
  const add = (name, value, note = "") => value !== null && value !== undefined && known.push([name, value, note]);
  const { loss, grad_norm: norm, loss_scale: scale, skipped_steps: skipped } = run.latest;
  add("Loss", loss === null ? null : number(loss));
  if (recent.tokens_per_s) add("Tokens a second", count(recent.tokens_per_s), `on average ${count(mean.tokens_per_s)}`);
  if (recent.samples_per_s) add("Samples a second", count(recent.samples_per_s), `on average ${count(mean.samples_per_s)}`);
  if (recent.step_ms)
    add(
      "Time of a step",
      milliseconds(recent.step_ms),
      forecast.step_ms ? `forecast ${milliseconds(forecast.step_ms)}` : `on average ${milliseconds(mean.step_ms)}`,
    );
  if (recent.mfu !== null)
    add(
      "Model FLOPs utilisation",
      percent(recent.mfu, 1),
      forecast.mfu
        ? `forecast ${percent(forecast.mfu, 1)} of ${count(run.flops.peak / 1e12)} TFLOP/s`
        : `of ${count(run.flops.peak / 1e12)} TFLOP/s`,
    );
  if (run.memory.peak)
    add(
      "Largest memory",
      bytes(run.memory.peak),
      run.memory.forecast && run.memory.has_activations
        ? `rank ${run.memory.peak_rank} · forecast ${bytes(run.memory.forecast + run.memory.base)}`
        : `rank ${run.memory.peak_rank}`,
    );
  add("Gradient norm", norm === null ? null : number(norm));
  add("Loss scale", scale === null ? null : number(scale));
  add("Skipped steps", skipped === null ? null : number(skipped));
  const { procs, hosts, heard } = run.world;
  add(
    "Processes",
    number(procs),
    [hosts.length > 1 ? `on ${plural(hosts.length, "host")}` : hosts[0], heard < procs ? `${number(heard)} have started` : ""]
      .filter(Boolean)
      .join(" · "),
  );
  const tiles = known.map(([name, value, note]) =>
    element(
      "div",
      {},
      element("dt", {}, name),
      element("dd", { class: "value" }, value),
      note ? element("dd", { class: "note" }, note) : null,
    ),
  );
  return [element("dl", {}, tiles)];
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** The heat map: a row for each rank, a column for each phase, coloured by the share of the rank's recent time. */
export function phases(run) {
  const { phases: names, ranks, share, ms_per_step: times } = run.heat;
  const hasTime = share.some((row) => row.some((value) => value > 0));
  if (!hasTime) return [element("p", { class: "quiet" }, "No step has ended yet.")];
  const columns = names.map((_, index) => share.map((row) => row[index]));
  const shown = names.map((_, index) => index).filter((index) => Math.max(...columns[index]) >= HIDDEN_SHARE);
  const medians = columns.map(median);
  const isDense = ranks.length > DENSE_RANKS;
  const rows = run.ranks.map((rank, row) => {
    const cells = shown.map((column) =>
      phaseCell(rank, names[column], share[row][column], medians[column], times[row]?.[column], ranks.length),
    );
    const isWarm = cells.some((cell) => cell.classList.contains("warm"));
    const rowClass = [isWarm ? "warm" : "", row % 10 === 0 ? "tenth" : ""].join(" ").trim();
    return element(
      "tr",
      { class: rowClass || null },
      element("th", { scope: "row", title: `rank ${rank.rank}, ${rank.host}, ${rank.device}` }, ...rankName(rank, run)),
      cells,
    );
  });
  const head = element(
    "tr",
    {},
    element("th", { scope: "col" }, "rank"),
    // The words stand upright, so that they fit however many columns there are and however narrow the window is.
    shown.map((column) => element("th", { scope: "col" }, element("span", {}, phaseName(names[column])))),
  );
  const caption = element(
    "caption",
    { class: "unseen" },
    "Share of each rank's recent time in each phase of a step, in percent",
  );
  const table = element(
    "table",
    { class: isDense ? "heat dense" : "heat" },
    caption,
    element("thead", {}, head),
    element("tbody", {}, rows),
  );
  const key = element(
    "div",
    { class: "key" },
    element("span", {}, element("i"), "percent of the recent time of a rank"),
    element("span", {}, element("i", { class: "warm" }), "a long wait, or far more than other ranks"),
  );
  return [
    element("div", { class: ranks.length > 24 ? "long" : "", tabindex: ranks.length > 24 ? 0 : null }, table),
    key,
    ...standing(run),
  ];
}

function phaseCell(rank, phase, share, median, ms, ranks) {
  // Who waits for another rank spends the time in communication: that rank is not the one to look at.
  const isOdd = ranks > 1 && share - median > OVER_OTHERS && phase !== "reduce" && phase !== "pipeline";
  const isWait = (phase === "data" || phase === "checkpoint") && share > LONG_WAIT;
  const kind = isOdd || isWait ? "warm" : share < HIDDEN_SHARE ? "idle" : null;
  const time = ms === undefined || ms === null ? "" : `, ${milliseconds(ms)} a step`;
  return element(
    "td",
    { class: kind, style: { "--share": share }, title: `rank ${rank.rank}, ${phaseName(phase)}: ${percent(share)}${time}` },
    share < HIDDEN_SHARE ? "" : String(Math.round(100 * share)),
  );
}

function rankName(rank, run) {
  const host = run.world.hosts.length > 1 ? element("span", { class: "long-word quiet" }, ` ${rank.host}`) : null;
  return [String(rank.rank), host];
}

/** Ranks that have been in one phase for long, with the line where they are. */
function standing(run) {
  if (run.state === "ended") return [];
  const waiting = run.ranks.filter((rank) => rank.at).slice(0, FIRST_ROWS);
  if (waiting.length === 0) return [];
  const rows = waiting.map((rank) =>
    element(
      "li",
      {},
      element("time", {}, duration(rank.phase_s)),
      `rank ${rank.rank} in ${phaseName(rank.phase)} at ${rank.at}`,
    ),
  );
  return [element("h3", {}, "Waiting now"), element("ul", { class: "events" }, rows)];
}

/** A bar for each rank: its peak as a part of its device, or of the largest where the device's size is not known. */
export function memory(run) {
  const ranks = run.ranks.filter((rank) => rank.memory_peak !== null || rank.memory !== null);
  if (ranks.length === 0) return [element("p", { class: "quiet" }, "No rank has said yet how much it uses.")];
  // On a CPU all of the process is measured: Python and its libraries come on top of what the plan counts.
  const forecast = run.memory.forecast ? run.memory.forecast + run.memory.base : null;
  const largest = Math.max(forecast ?? 0, ...ranks.map((rank) => rank.memory_peak ?? rank.memory));
  // Beside a device that is far larger, bars would be too short to compare.
  const byDevice = (rank) => rank.memory_bytes && largest > 0.05 * rank.memory_bytes;
  const rows = ranks.map((rank) => {
    const peak = rank.memory_peak ?? rank.memory;
    const whole = byDevice(rank) ? Math.max(rank.memory_bytes, peak) : largest * 1.05;
    // A forecast without activations is exceeded by every run.
    const isAboveForecast = forecast && run.memory.has_activations && peak > 1.25 * forecast + MARGIN;
    const isOver = isAboveForecast || (rank.memory_bytes && peak > 0.92 * rank.memory_bytes);
    const words = `${bytes(peak)}${rank.memory_bytes ? ` of ${bytes(rank.memory_bytes)}` : ""}`;
    return element(
      "div",
      {
        class: "memory-row",
        title: `rank ${rank.rank}, ${rank.host}, ${rank.device}: ${bytes(rank.memory)} now, at most ${words}`,
      },
      element("span", { class: "who" }, ...rankName(rank, run)),
      element(
        "div",
        { class: "bar", "aria-hidden": true },
        element("i", { class: isOver ? "warm" : null, style: { width: `${(100 * peak) / whole}%` } }),
        forecast && forecast <= whole ? element("em", { style: { left: `${(100 * forecast) / whole}%` } }) : null,
      ),
      element("span", { class: "amount" }, words),
    );
  });
  const key = element(
    "div",
    { class: "key" },
    element("span", {}, element("i"), "most so far"),
    forecast ? element("span", {}, element("i", { class: "mark" }), sentence(markName(run.memory))) : null,
  );
  return [element("div", { class: ranks.length > 24 ? "long" : "", tabindex: ranks.length > 24 ? 0 : null }, rows), key];
}

/** What the mark in the bars stands for. */
function markName({ forecast, has_activations: hasActivations, base }) {
  const besides = base ? ` and ${bytes(base)} that the process had before it prepared the model` : "";
  if (hasActivations) return `the plan's forecast, ${bytes(forecast)}${besides}`;
  return `needed without activations: ${bytes(forecast)}${besides}; \`paceline plan\` forecasts activations too`;
}

function tableOf(heads, rows) {
  const cells = heads.map(([name, kind]) => element("th", { scope: "col", class: kind }, name));
  return element(
    "div",
    { class: "scroll" },
    element("table", {}, element("thead", {}, element("tr", {}, cells)), element("tbody", {}, rows)),
  );
}

/** Rows with the newest first; those after the first few unfold. */
function folded(rows, make) {
  if (rows.length <= FIRST_ROWS) return [make(rows)];
  return [
    make(rows.slice(0, FIRST_ROWS)),
    element("details", {}, element("summary", {}, `${number(rows.length - FIRST_ROWS)} more`), make(rows.slice(FIRST_ROWS))),
  ];
}

export function checkpoints(run) {
  const { count: saved, failed, last } = run.checkpoints;
  if (last.length === 0) return [];
  const heads = [["step"], ["age"], ["size"], ["loop waited"], ["took"]];
  const rows = last.toReversed().map((entry) => {
    if (!entry.ok)
      return element(
        "tr",
        {},
        element("td", {}, number(entry.step)),
        element("td", {}, duration(entry.age_s)),
        element("td", { class: "words bad", colspan: 3 }, sentence(entry.reason || "it failed")),
      );
    return element(
      "tr",
      { title: entry.path },
      element("td", {}, number(entry.step)),
      element("td", {}, duration(entry.age_s)),
      element("td", {}, bytes(entry.bytes)),
      element("td", {}, duration(entry.stall_s)),
      element("td", {}, duration(entry.save_s)),
    );
  });
  const newest = last.findLast((entry) => entry.ok);
  const words = [`${number(saved)} saved`, failed ? `${number(failed)} failed` : "", newest ? `the last is ${newest.path}` : ""]
    .filter(Boolean)
    .join(", ");
  return [element("p", { class: failed ? "bad quiet" : "quiet" }, words), ...folded(rows, (part) => tableOf(heads, part))];
}

export function hosts(run) {
  const rows = run.rounds.toReversed().map((round) => {
    const size = `${number(round.procs)} ${round.procs === 1 ? "process" : "processes"} on ${plural(round.nodes, "host")}`;
    const words = [round.number === 0 ? `Started: ${size}` : `Started again: ${size}`];
    if (round.lost.length) words.push(`lost ${round.lost.join(", ")}`);
    if (round.joined.length) words.push(`joined by ${round.joined.join(", ")}`);
    const text = words.join("; ") + (round.why ? `. ${round.why}` : "");
    return element("li", {}, element("time", { title: clock(round.t) }, clock(round.t)), element("span", {}, sentence(text)));
  });
  if (rows.length === 0) return [];
  const restarts = run.restarts ? `${plural(run.restarts, "restart")} after a failure` : "no restart so far";
  const names = run.world.hosts.length
    ? `Now on ${run.world.hosts.slice(0, 20).join(", ")}${run.world.hosts.length > 20 ? " …" : ""}; `
    : "";
  return [
    element("p", { class: "quiet" }, `${names}${restarts}.`),
    ...folded(rows, (part) => element("ul", { class: "events" }, part)),
  ];
}

export function reports(run) {
  const blocks = [];
  const errors = run.errors.toReversed();
  for (const error of errors.slice(0, FIRST_ROWS)) {
    const who = [error.rank === null ? "" : `rank ${error.rank}`, error.host ? `on ${error.host}` : "", clock(error.t)]
      .filter(Boolean)
      .join(" ");
    blocks.push(
      element("h3", { class: "bad" }, `Error${error.code ? ` [${error.code}]` : ""}, ${who}`),
      element("pre", { tabindex: 0 }, error.text),
    );
  }
  for (const stuck of run.stuck.toReversed()) {
    blocks.push(
      element("h3", {}, `Stacks of all ranks, ${clock(stuck.t)}`),
      element("pre", { tabindex: 0 }, stuck.text),
      stuck.file ? element("p", { class: "quiet" }, `All of it: ${stuck.file}`) : null,
    );
  }
  const { count: odd, last } = run.anomalies;
  if (odd) {
    const rows = last
      .toReversed()
      .map((entry) =>
        element(
          "li",
          {},
          element("time", {}, `step ${number(entry.step)}`),
          element(
            "span",
            {},
            sentence(anomalyText(entry)),
          ),
        ),
      );
    blocks.push(
      element("h3", {}, `Anomalies: ${number(odd)}`),
      ...folded(rows, (part) => element("ul", { class: "events" }, part)),
    );
  }
  return blocks;
}

const ANOMALY_ACTIONS = {
  log: "written down",
  skip: "the step was skipped",
  stop: "the run was stopped",
  rollback: "the run went back to the last checkpoint",
};

function anomalyText(entry) {
  const words = [entry.text || entry.what];
  const limit = entry.limit === null ? "" : `, limit ${number(entry.limit)}`;
  if (entry.value !== null) words.push(`(${number(entry.value)}${limit})`);
  words.push(`– ${ANOMALY_ACTIONS[entry.action] ?? entry.action}`);
  return words.join(" ");
}

export function plan(run) {
  if (run.plan === null) return [];
  const isDefault = ([, , source, reason]) => source === "default" && reason === "";
  const defaults = run.plan.reasons.filter(isDefault);
  const decided = run.plan.reasons.filter((row) => !isDefault(row));
  const { recent, forecast } = run.speed;
  const compare = [];
  if (forecast.step_ms) compare.push(["Time of a step", milliseconds(forecast.step_ms), milliseconds(recent.step_ms)]);
  const { forecast: planned, has_activations: hasActivations, base, peak } = run.memory;
  if (planned && hasActivations) compare.push(["Largest memory", bytes(planned + base), bytes(peak)]);
  if (forecast.mfu) compare.push(["Model FLOPs utilisation", percent(forecast.mfu, 1), percent(recent.mfu, 1)]);
  const parts = [];
  if (compare.length)
    parts.push(
      tableOf(
        [[""], ["forecast"], ["measured"]],
        compare.map(([name, before, now]) =>
          element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, before), element("td", {}, now)),
        ),
      ),
      element("h3", {}, "Decisions"),
    );
  if (decided.length) parts.push(decisions(decided));
  if (defaults.length)
    parts.push(
      element(
        "details",
        {},
        element("summary", {}, `${plural(defaults.length, "setting")} as by default`),
        decisions(defaults),
      ),
    );
  if (run.plan.text)
    parts.push(
      element(
        "details",
        {},
        element("summary", {}, sentence("The plan as `paceline explain` prints it")),
        element("pre", { tabindex: 0 }, run.plan.text),
      ),
    );
  return parts;
}

function decisions(reasons) {
  const rows = reasons.map(([field, value, source, reason]) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, field),
      element("td", { class: "words" }, value),
      element("td", { class: "words" }, source),
      element("td", { class: "words" }, sentence(reason)),
    ),
  );
  return tableOf([["field"], ["value", "words"], ["source", "words"], ["reason", "words"]], rows);
}
