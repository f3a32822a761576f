// The page: takes what the server sends, or what is embedded in a frozen page, and shows it section by section.

import { LineChart, readColours, SIZE_STEPS } from "./charts.js";
import { Connection } from "./connection.js";
import { show } from "./dom.js";
import { bytes, clock, count, duration, milliseconds, number, percent } from "./format.js";
import { NamePicker } from "./names.js";
import { checkpoints, findings, hosts, keyNumbers, memory, phases, plan, progress, reports, stateOf } from "./sections.js";

const FIRST_CHARTS = window.innerWidth < 560 ? 3 : 6; // values that are shown before anybody has chosen
const MOST_CHARTS = 64;

const HISTORY = [
  ["tokens_per_s", "Tokens a second", { format: count }],
  ["samples_per_s", "Samples a second", { format: count }],
  ["step_ms", "Time of a step", { format: milliseconds }],
  ["mfu", "Model FLOPs utilisation", { format: (share, moreDigits = 0) => percent(share, 1 + moreDigits) }],
  ["memory", "Memory of the fullest rank", { format: bytes, steps: SIZE_STEPS }],
];

const run = Object.create(null); // the snapshot, as it is now
let chosen = namesOfAddress(); // null where nobody has chosen
let connection = null;
let isFrozen = false;
let isScheduled = false;
const valueCharts = new Map();
const historyCharts = new Map();

const at = (id) => document.getElementById(id);
const picker = new NamePicker(at("search"), at("options"), choose);

// -- taking -----------------------------------------------------------------------------------------------------------

/** Takes parts of a snapshot. Names come from scripts: no object here has a prototype that one of them could name. */
function take(parts, isWhole) {
  if (isWhole) for (const name of Object.keys(run)) delete run[name];
  for (const [[name, key], value] of parts) {
    if (key !== undefined) {
      run[name] ??= Object.create(null);
      run[name][key] = value;
    } else {
      const isObject = value !== null && typeof value === "object" && !Array.isArray(value);
      run[name] = isObject ? Object.assign(Object.create(null), value) : value;
    }
  }
  run.series ??= Object.create(null);
  run.history ??= Object.create(null);
  schedule();
}

function schedule() {
  if (isScheduled) return;
  isScheduled = true;
  requestAnimationFrame(() => {
    isScheduled = false;
    if (run.version !== undefined) showAll();
  });
}

// -- choosing values --------------------------------------------------------------------------------------------------

function namesOfAddress() {
  const words = location.hash.slice(1).split("&").filter(Boolean);
  try {
    return words.length ? words.map(decodeURIComponent).slice(0, MOST_CHARTS) : null;
  } catch {
    return null;
  }
}

/** The names whose charts are shown: those that were chosen, or losses first. */
function shownNames() {
  if (chosen !== null) return chosen.filter((name) => run.names.includes(name));
  const first = run.names.filter((name) => name in run.series);
  const isLoss = (name) => /loss/i.test(name) && name !== "loss_scale";
  return [...first.filter(isLoss), ...first.filter((name) => !isLoss(name))].slice(0, FIRST_CHARTS);
}

function choose(name) {
  const names = shownNames();
  const isShown = names.includes(name);
  chosen = isShown ? names.filter((other) => other !== name) : [name, ...names].slice(0, MOST_CHARTS);
  history.replaceState(null, "", `#${chosen.map(encodeURIComponent).join("&")}`);
  if (connection !== null && !isShown && !(name in run.series)) connection.ask(chosen);
  schedule();
}

// -- showing ----------------------------------------------------------------------------------------------------------

function showAll() {
  const [word, kind] = stateOf(run);
  document.title =
    run.progress.percent === null ? `${word} · ${run.name}` : `${Math.floor(run.progress.percent)} % · ${run.name}`;
  at("name").textContent = run.name;
  at("command").textContent = run.command.join(" ");
  setText(at("state"), word);
  at("state").className = `state ${kind}`;
  // A process that has not said hello would be ended by the signal that asks for its stack.
  const allHeard = run.world.heard === run.world.procs;
  at("stacks").hidden = !(run.page?.stacks && allHeard && run.state !== "ended");
  showConnection();
  showSection("findings", findings(run), at("findings"));
  showSection("progress", progress(run), at("progress"));
  showSection("numbers", keyNumbers(run), at("numbers"));
  showSection("phases", phases(run));
  showSection("memory", memory(run));
  showSection("checkpoints", checkpoints(run));
  showSection("hosts", hosts(run));
  showSection("reports", reports(run));
  showSection("plan", plan(run));
  showValues();
  showHistory();
}

/** A section without anything to show is hidden. */
function showSection(id, content, body = at(`${id}-body`)) {
  at(id).hidden = content.length === 0;
  show(body, content);
}

function showValues() {
  const names = shownNames();
  const left = run.names.length - names.length;
  let note = "";
  if (run.names.length === 0) note = 'Nothing has been logged yet: accelerator.log({"loss": loss}) shows a value here.';
  else if (left > 0) note = `${number(left)} more can be chosen.`;
  if (run.names_left_out) note += ` ${number(run.names_left_out)} values of further names were left out.`;
  setText(at("values-note"), note);
  at("values-note").hidden = note === "";
  at("search").disabled = run.names.length === 0;
  picker.update(run.names, names);
  const wanted = names.map((name) => [name, run.series[name]]).filter(([, series]) => series !== undefined);
  keepCharts(
    valueCharts,
    wanted.map(([name]) => name),
    at("value-charts"),
    (name) => new LineChart(name, { cursors: "step", remove: () => choose(name) }),
  );
  for (const [name, series] of wanted) {
    valueCharts.get(name).update(series.points, { xName: series.by === "step" ? "step" : "value number" });
  }
}

function showHistory() {
  const known = HISTORY.filter(([name]) => run.history[name]?.length > 1);
  const forecasts = { step_ms: run.speed.forecast.step_ms, mfu: run.speed.forecast.mfu, memory: run.memory.has_activations ? run.memory.forecast + run.memory.base : null };
  at("speed").hidden = known.length === 0;
  keepCharts(
    historyCharts,
    known.map(([name]) => name),
    at("speed-charts"),
    (name) => {
      const [, title, options] = HISTORY.find((row) => row[0] === name);
      return new LineChart(title, { ...options, isTime: true, cursors: "time" });
    },
  );
  for (const [name] of known) {
    const now = run.history[name].at(-1)[1];
    // A forecast that is far off would flatten the line; the plan's section has it in numbers.
    const isNear = forecasts[name] && forecasts[name] < 3 * now && now < 3 * forecasts[name];
    historyCharts.get(name).update(run.history[name], { forecast: isNear ? forecasts[name] : null });
  }
}

/** Makes charts that are missing, removes those that are not wanted, and puts all in their order. */
function keepCharts(charts, names, holder, make) {
  for (const [name, chart] of charts) {
    if (names.includes(name)) continue;
    chart.destroy();
    charts.delete(name);
  }
  names.forEach((name, index) => {
    if (!charts.has(name)) charts.set(name, make(name));
    const { root } = charts.get(name);
    if (holder.children[index] !== root) holder.insertBefore(root, holder.children[index] ?? null);
    charts.get(name).fit();
  });
}

function showConnection() {
  setText(at("connection"), connectionText());
}

function connectionText() {
  if (isFrozen) return `As it was at ${clock(run.now)}`;
  if (run.fault) return `Not up to date: ${run.fault}`;
  if (connection.lostAt === null) return run.version === undefined ? "Connecting …" : `Live · ${clock(run.now)}`;
  if (run.state === "ended") return "This is how the run ended; its page is not served any more.";
  const since = duration((Date.now() - connection.lostAt) / 1000);
  return `No connection for ${since}. What is shown may be old; the page tries again by itself.`;
}

function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

// -- the only thing that the page can ask for -------------------------------------------------------------------------

async function askForStacks() {
  const button = at("stacks");
  button.disabled = true;
  const words = button.textContent;
  try {
    const answer = await fetch("stacks", { method: "POST" });
    button.textContent = answer.ok ? "Asked for; they appear below" : "They were asked for a moment ago";
  } catch {
    button.textContent = "The run does not answer";
  }
  setTimeout(() => {
    button.textContent = words;
    button.disabled = false;
  }, 5000);
}

// -- starting ---------------------------------------------------------------------------------------------------------

function start() {
  readColours();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readColours();
    for (const chart of [...valueCharts.values(), ...historyCharts.values()]) chart.redraw();
  });
  at("stacks").addEventListener("click", askForStacks);
  const frozen = at("frozen");
  isFrozen = frozen !== null;
  if (isFrozen) {
    const snapshot = JSON.parse(frozen.textContent);
    take(
      Object.entries(snapshot).map(([name, value]) => [[name], value]),
      true,
    );
    return;
  }
  connection = new Connection(take, showConnection);
  connection.ask(chosen);
  setInterval(() => connection.lostAt !== null && showConnection(), 1000);
}

start();
