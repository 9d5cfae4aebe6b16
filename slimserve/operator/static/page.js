// Asks, listens, and writes what it hears into the page.

import { Chart } from "./chart.js";
import { DASH, UNITS, clock, duration, moment, number, quantity } from "./format.js";
import * as tables from "./tables.js";

const at = (id) => document.getElementById(id);
const root = document.documentElement;

const LIFE = ["starting", "fetching", "loading", "warming", "ready"];
const MINUTES = [5, 15, 60];
const TONES = { ready: "good", failed: "bad", stopped: "idle" };
const CHARTS = [
  { title: "Throughput", unit: "tokens_per_s", series: [{ key: "generated_per_s", name: "generated" }, { key: "prompt_per_s", name: "prompt" }],
    empty: "No rate yet: it takes two readings of the engine's counters, and no engine has answered twice." },
  { title: "In flight", unit: "count", least: 2, series: [{ key: "in_flight", name: "in flight" }, { key: "waiting", name: "waiting at the door" }, { key: "cap", name: "cap" }],
    empty: "The door reports no numbers: no engine was up in this time." },
  { title: "Time to first token", unit: "seconds", series: [{ key: "ttft_p50_s", name: "p50" }, { key: "ttft_p95_s", name: "p95" }],
    empty: "No request got its first token in this time." },
  { title: "Token to token", unit: "seconds", series: [{ key: "itl_p50_s", name: "p50" }, { key: "itl_p95_s", name: "p95" }],
    empty: "No stream gave two tokens in this time." },
  { title: "Cache", unit: "share", top: 1, series: [{ key: "cache_hits", name: "prefix hits" }, { key: "kv_used", name: "KV in use" }, { key: "tier_hits", name: "second tier hits" }],
    empty: "No prompt was looked up, and no engine reported its cache, in this time." },
  { title: "Answered 429", unit: "per_minute", series: [{ key: "too_many_per_s", name: "429" }],
    empty: "No rate yet: the door has not been read twice." },
];

const page = { snapshot: null, columns: null, interval: null, points: null, minutes: 60, chosen: false, cursor: null, offset: 0, heard: null, logStale: true };
const charts = CHARTS.map((spec) => new Chart(spec, at("charts"), (time) => { page.cursor = time; draw(); }));
const now = () => Date.now() / 1000 + page.offset;

function put(id, text) {
  if (at(id).textContent !== text) at(id).textContent = text;
}

function big(id, unit, value) {
  const [figure, name] = UNITS[unit](value ?? null);
  const text = tables.make("span", figure), suffix = tables.make("span", name && figure !== DASH ? ` ${name}` : "", "unit");
  at(id).replaceChildren(text, suffix);
}

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(10_000) });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

// State

function showStatus({ status, url, reach, started }) {
  at("state").dataset.state = status.state;
  at("state").dataset.tone = TONES[status.state] ?? "busy";
  put("state-name", status.state);
  put("reason", status.reason);
  put("since", `since ${moment(status.since)}`);
  at("since").dateTime = new Date(status.since * 1000).toISOString();
  put("url", url);
  put("listens", reach.listens);
  put("asks-for-key", reach.asks_for_key ? "asked for" : "not asked for");
  put("origins", reach.origins.join(", ") || "none");
  put("restarts", number(status.restarts));
  showCrash(status.crash);
  const reached = LIFE.indexOf(status.state);
  at("life").hidden = reached < 0 || status.state === "ready";
  at("life").replaceChildren(...LIFE.map((name, index) => {
    const step = tables.make("li", name);
    step.dataset.step = index < reached ? "past" : index === reached ? "now" : "next";
    if (index === reached) step.setAttribute("aria-current", "step");
    return step;
  }));
  showAges(status, started);
}

function showCrash(crash) {
  at("last-words").hidden = crash === null;
  if (crash === null) return;
  put("crash-when", moment(crash.when));
  at("crash-when").dateTime = new Date(crash.when * 1000).toISOString();
  put("crash-what", crash.what);
  put("crash-why", crash.why);
  put("crash-log", crash.log);
  put("last-words-text", crash.last_words.join("\n"));
}

// What moves without news: ages and what is left of a deadline.
function showAges(status, started) {
  const age = now() - status.since;
  put("age", `· ${duration(age)}`);
  put("uptime", duration(now() - started));
  at("deadline").hidden = status.deadline_seconds === null;
  if (status.deadline_seconds !== null) {
    const left = status.deadline_seconds - age;
    put("deadline", `at most ${duration(status.deadline_seconds)}, ${left > 0 ? `${duration(left)} left` : "which is over"}`);
  }
}

// Numbers

function showPoint(point) {
  const { in_flight: used = null, cap = null } = point ?? {};
  put("in-flight", number(used));
  put("cap", number(cap));
  const part = cap ? Math.min(1, (used ?? 0) / cap) : 0;
  const meter = at("in-flight-meter");
  meter.firstElementChild.style.width = `${part * 100}%`;
  meter.classList.toggle("full", part >= 1);
  meter.setAttribute("aria-valuenow", used ?? 0);
  meter.setAttribute("aria-valuemax", cap ?? 1);
  put("in-flight-note", point?.running == null ? "the engine gives no numbers" : `the engine runs ${number(point.running)}, queues ${number(point.queued)}`);
  put("waiting", number(point?.waiting));
  put("waiting-note", point?.waiting == null ? "not known" : point.waiting ? "wait for a slot" : "nobody waits there");
  big("too-many", "per_minute", point?.too_many_per_s);
  put("too-many-note", point?.too_many_per_s == null ? "not known" : "beyond the cap");
  big("generated", "tokens_per_s", point?.generated_per_s);
  put("prompt", `prompt ${quantity("tokens_per_s", point?.prompt_per_s)}`);
  for (const [id, key] of [["ttft", "ttft"], ["itl", "itl"]]) {
    const recent = lastKnown(`${key}_p50_s`);
    big(id, "seconds", recent?.value);
    const p95 = recent === null ? null : page.columns[`${key}_p95_s`][recent.index];
    const old = recent !== null && now() - recent.time > 3 * page.interval;
    put(`${id}-note`, recent === null ? "nothing measured yet" : `p50; p95 ${quantity("seconds", p95)}${old ? `, at ${clock(recent.time)}` : ""}`);
  }
  big("kv", "share", point?.kv_used);
  const hits = lastKnown("cache_hits");
  put("hits", hits === null ? "no prompt looked up yet" : `prefix hits ${quantity("share", hits.value)}`);
}

function lastKnown(key) {
  const index = page.columns ? page.columns[key].findLastIndex((value) => value !== null) : -1;
  return index < 0 ? null : { index, value: page.columns[key][index], time: page.columns.time[index] };
}

// How far back the charts reach: until somebody chooses, the least that holds the whole life of the appliance.
function show(minutes) {
  page.minutes = minutes;
  for (const button of document.querySelectorAll("[data-minutes]")) button.setAttribute("aria-pressed", String(Number(button.dataset.minutes) === minutes));
}

function draw() {
  if (!page.columns) return;
  const to = now();
  for (const chart of charts) chart.draw(page.columns, to - page.minutes * 60, to, page.cursor, page.interval);
}

async function loadHistory() {
  const history = await ask("/history.json");
  page.columns = history.columns;
  page.interval = history.interval_seconds;
  page.points = history.points;
  put("interval", number(page.interval, page.interval < 1 ? 1 : 0));
}

// A new point is put behind the others; when some were missed, all are asked for again.
async function addPoint(point) {
  const last = page.columns.time.at(-1) ?? null;
  if (point === null || point.time === last) return;
  if (last === null || point.time - last > 2 * page.interval) return loadHistory();
  for (const [key, column] of Object.entries(page.columns)) {
    column.push(point[key]);
    if (column.length > page.points) column.shift();
  }
}

async function take(snapshot) {
  page.snapshot = snapshot;
  page.offset = snapshot.now - Date.now() / 1000;
  page.heard = now();
  if (page.columns) await addPoint(snapshot.point); else await loadHistory();
  if (!page.chosen) show(MINUTES.find((minutes) => page.heard - snapshot.started < minutes * 60) ?? MINUTES.at(-1));
  showStatus(snapshot);
  showPoint(snapshot.point);
  draw();
  document.title = `${snapshot.status.state} · ${at("profile").textContent.trim()} · slimserve`;
  await showLog();
}

// The connection: events; when they fail, asking every few seconds; when that fails too, the page says since when.

function link(kind, text) {
  if (at("link").dataset.link === kind && kind !== "stale") return;
  at("link").dataset.link = kind;
  put("link-text", text);
  root.classList.toggle("stale", kind === "stale");
}

let queue = Promise.resolve();
function listen() {
  const events = new EventSource("/events");
  events.onmessage = (event) => {
    link("live", "live");
    const snapshot = JSON.parse(event.data);
    queue = queue.then(() => take(snapshot)).catch(lost);
  };
  events.onerror = () => {
    // A refusal for good (a proxy without streams, too many pages) closes it; then it is tried anew, seldom.
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 30_000);
    poll();
  };
}

let polling = false;
async function poll() {
  if (polling || at("link").dataset.link === "live" && page.heard !== null && now() - page.heard < page.interval) return;
  polling = true;
  try {
    await take(await ask("/status.json"));
    link("polling", `asking every ${Math.round(page.interval)} s`);
    if (!page.plan) await loadPlan();
  } catch (error) {
    lost(error);
  }
  polling = false;
}

function lost(error) {
  console.warn(error);
  link("stale", page.heard === null ? "no connection" : `stale since ${clock(page.heard)}`);
}

setInterval(() => {
  if (page.snapshot) showAges(page.snapshot.status, page.snapshot.started);
  if (page.heard === null || now() - page.heard > 2.5 * Math.max(page.interval, 1)) poll();
}, 1000);

// What changes seldom

async function loadPlan() {
  page.plan = await ask("/profile.json");
  put("profile", page.plan.title ? `${page.plan.profile}: ${page.plan.title}` : `${page.plan.profile} (${page.plan.status})`);
  tables.settings(page.plan, at("settings-rows"), at("notes"));
  tables.filter(at("settings-rows"), at("filter").value, at("settings-count"));
}

async function loadSlow() {
  tables.doctor(await ask("/doctor.json"), at("findings"), at("doctor-time"));
  tables.receipts(await ask("/receipts.json"), at("receipts-list"));
}

let logInView = false;
async function showLog() {
  if (!logInView || document.hidden) return;
  const text = await (await fetch("/log", { cache: "no-store", signal: AbortSignal.timeout(10_000) })).text(); // of a refusal too
  put("log-text", text || "Empty: no engine has written anything yet.");
  if (at("follow").checked) at("log-text").scrollTop = at("log-text").scrollHeight;
}
new IntersectionObserver(([entry]) => {
  logInView = entry.isIntersecting;
  showLog().catch(lost);
}).observe(at("log"));

// Controls

const THEMES = ["system", "light", "dark"];
function setTheme(name) {
  if (name === "system") delete root.dataset.theme; else root.dataset.theme = name;
  put("theme", `theme: ${name}`);
  try { localStorage.setItem("theme", name); } catch { /* private windows may forbid it: then it lasts until the page is closed */ }
}
at("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(root.dataset.theme ?? "system") + 1) % 3]));
try { setTheme(THEMES.find((name) => name === localStorage.getItem("theme")) ?? "system"); } catch { setTheme("system"); }

for (const button of document.querySelectorAll("[data-minutes]")) {
  button.addEventListener("click", () => {
    page.chosen = true;
    show(Number(button.dataset.minutes));
    draw();
  });
}
at("filter").addEventListener("input", () => tables.filter(at("settings-rows"), at("filter").value, at("settings-count")));
at("wrap").addEventListener("change", () => at("log-text").classList.toggle("wrap", at("wrap").checked));
let width = 0;
new ResizeObserver(([entry]) => {
  if (entry.contentRect.width === width) return; // the height follows from what is drawn
  width = entry.contentRect.width;
  draw();
}).observe(at("charts"));

await loadPlan().catch(lost);
await loadHistory().catch(lost);
listen();
await loadSlow().catch(lost);
setInterval(() => { if (!document.hidden) loadSlow().catch(lost); }, 60_000);
