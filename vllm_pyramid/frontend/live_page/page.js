/* SPDX-License-Identifier: Apache-2.0 */
"use strict";
const EVERY = 1000, MOST = 600, MOVE = 500;
const at = id => document.getElementById(id);
const address = name => location.pathname.replace(/\/?$/, "/") + name;
let paused = false, history = [], open = null, hits = null, agreement = null, frames = 0;
const cards = new Map();
const still = matchMedia("(prefers-reduced-motion: reduce)");

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`); }
function number(value) { return Math.round(value).toLocaleString("en"); }
function make(name, text, parent) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}
function sized(canvas, height) {
  const scale = devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = Math.max(1, width * scale);
  canvas.height = height * scale;
  const draw = canvas.getContext("2d");
  draw.scale(scale, scale);
  return [draw, width, height];
}

async function get(name) {
  const key = sessionStorage.getItem("vllm-pyramid-key");
  const headers = key ? {Authorization: `Bearer ${key}`} : {};
  const answer = await fetch(address(name), {headers, cache: "no-store"});
  at("ask").hidden = answer.status !== 401;
  if (!answer.ok) throw new Error((await answer.json()).error || answer.statusText);
  return answer.json();
}

async function ask() {
  const data = await get("data");
  if (frames++ % 5 === 0) await askMetrics();
  return data;
}

// Counters that no scheduler has: of prefixes that were found, and of answers that were compared.
async function askMetrics() {
  try {
    const text = await (await fetch(address("../metrics"))).text();
    const sum = (name, label) =>
      [...text.matchAll(new RegExp(`^${name}_total\\{.*${label}.*\\} (\\S+)$`, "gm"))]
        .reduce((total, found) => total + Number(found[1]), 0);
    const share = (some, all, label) => sum(all, label) ? sum(some, label) / sum(all, label) : null;
    hits = share("vllm:prefix_cache_hits", "vllm:prefix_cache_queries", "");
    // "whole" is the noise floor.
    agreement = share("vllm_pyramid:shadow_agreed_tokens", "vllm_pyramid:shadow_tokens", 'cache="evicted"');
  } catch { hits = agreement = null; }
}

async function tick() {
  if (!paused && !document.hidden) {
    let said = "live", bad = "";
    try {
      const data = await ask();
      if (!paused) take(data);
    } catch (error) {
      [said, bad] = [String(error.message || error), "bad"];
    }
    // An answer that comes after a pause began must not end it.
    if (!paused) {
      at("state").className = bad;
      at("state").textContent = said;
    }
  }
  setTimeout(tick, EVERY);
}

function total(data, of) { return data.engines.reduce((sum, engine) => sum + of(engine), 0); }
function added(values) { return values.reduce((a, b) => a + b, 0); }

function take(data) {
  const pool = {};
  for (const name of ["blocks", "held", "other", "cached"]) pool[name] = total(data, e => e.pool[name]);
  const now = {time: data.time, ...pool,
    evictions: total(data, e => e.stats.evictions),
    freed: total(data, e => added(e.stats.blocks_freed))};
  const before = history.at(-1);
  if (!before || now.time > before.time) history.push(now);
  if (history.length > MOST) history.shift();
  const since = history[Math.max(0, history.length - 6)];
  const rate = name => now.time > since.time ? (now[name] - since[name]) / (now.time - since.time) : 0;
  const failed = total(data, e => added(Object.values(e.stats.failed_requests || {})));
  const further = [], seen = total(data, e => e.stats.pages_visible || 0);
  if (seen) further.push(["pages read", `${(100 * total(data, e => e.stats.pages_read) / seen).toFixed(1)} %`]);
  if (agreement !== null) further.push(["shadow agreement", `${(100 * agreement).toFixed(1)} %`]);
  const host = name => total(data, e => e.stats.host_cache?.[name] || 0) / 2 ** 30;
  if (host("bytes")) further.push(["host cache", `${host("bytes_used").toFixed(2)} of ${host("bytes").toFixed(2)} GiB`]);
  const used = pool.held + pool.other;
  tiles([["pool in use", `${(100 * used / pool.blocks).toFixed(1)} %`],
    ["blocks held", `${number(used)} of ${number(pool.blocks)}`],
    ["running", number(total(data, e => e.running))], ["waiting", number(total(data, e => e.waiting))],
    ["evictions", `${number(now.evictions)} · ${rate("evictions").toFixed(1)}/s`],
    ["blocks freed", `${number(now.freed)} · ${rate("freed").toFixed(0)}/s`],
    ["prefix hits", hits === null ? "–" : `${(100 * hits).toFixed(0)} %`],
    ["failed", number(failed)], ...further]);
  at("policy").textContent = [...new Set(data.engines.map(e => e.policy.join(", budget ")))].join("; ");
  requests(data);
  drawHistory();
}

function tiles(values) {
  const list = at("tiles");
  while (list.children.length > values.length) list.lastChild.remove();
  while (list.children.length < values.length) {
    const tile = make("div", undefined, list);
    make("dt", "", tile);
    make("dd", "", tile);
  }
  values.forEach(([name, value], index) => {
    const [term, definition] = list.children[index].children;
    term.textContent = name;
    definition.textContent = value;
  });
}

function drawHistory() {
  const [draw, width, height] = sized(at("history"), 150);
  const now = history.at(-1);
  if (!now) return;
  const parts = [["held", "kept", "held by requests"], ["other", "other", "held by layers that do not evict"],
    ["cached", "cached", "kept for prefixes and sessions, free if needed"]];
  const legend = at("pool");
  legend.replaceChildren();
  const base = history.map(() => 0), span = Math.max(60, now.time - history[0].time);
  const x = moment => width - (now.time - moment.time) / span * width;
  for (const [name, shade, text] of parts) {
    const low = history.map((moment, i) => height - base[i] / moment.blocks * height);
    history.forEach((moment, i) => base[i] += moment[name]);
    const high = history.map((moment, i) => height - base[i] / moment.blocks * height);
    draw.beginPath();
    history.forEach((moment, i) => i ? draw.lineTo(x(moment), high[i]) : draw.moveTo(x(moment), high[i]));
    for (let i = history.length - 1; i >= 0; i--) draw.lineTo(x(history[i]), low[i]);
    draw.fillStyle = colour(shade);
    draw.fill();
    const item = make("span", undefined, legend);
    make("i", undefined, item).style.background = `var(--${shade})`;
    item.append(`${text}: ${number(now[name])}`);
  }
  make("span", `free: ${number(now.blocks - base.at(-1))}; the last ${Math.round(span)} seconds`, legend);
  at("history").setAttribute("aria-label", `of ${now.blocks} blocks requests hold ${now.held}`);
}

function requests(data) {
  const holder = at("requests"), seen = new Set(), moment = performance.now();
  for (const [engine, of] of data.engines.entries()) {
    for (const request of of.requests) {
      const key = `${engine} ${request.id}`;
      seen.add(key);
      let card = cards.get(key);
      if (!card) {
        const button = make("button", undefined, holder), name = make("span", undefined, button);
        name.className = "name";
        card = {button, id: make("b", request.id, name), what: make("span", "", name),
          canvas: make("canvas", undefined, button), from: request, to: request};
        button.title = request.id;
        const made = card;
        button.onclick = () => show(made);
        cards.set(key, card);
      }
      card.from = shown(card, moment);
      card.to = request;
      card.layers = of.layers;
      card.began = moment;
      const kept = request.computed ? 1 - added(request.freed) / (request.freed.length * request.computed) : 1;
      card.what.textContent = request.computed < request.prompt ?
        `prompt ${Math.floor(100 * request.computed / request.prompt)} % of ${number(request.prompt)}` :
        `${number(request.prompt)} + ${number(request.generated)}, ${(100 * kept).toFixed(0)} % held`;
    }
  }
  for (const [key, card] of cards) {
    if (seen.has(key)) continue;
    card.button.remove();
    cards.delete(key);
    card.ended = true;
  }
  const all = data.engines.flatMap(engine => engine.requests);
  at("of-host").hidden = !all.some(request => request.host[1]);
  at("of-read").hidden = !all.some(request => request.read);
  let none = holder.querySelector(".none");
  if (cards.size) none?.remove();
  else if (!none) { none = make("p", "No request runs.", holder); none.className = "none"; }
  requestAnimationFrame(animate);
}

// Between two answers a strip moves from one to the other.
function shown(card, moment) {
  if (!card.began || still.matches) return card.to;
  const part = Math.min(1, (moment - card.began) / MOVE), mix = (a, b) => a + (b - a) * part;
  return {...card.to, computed: mix(card.from.computed, card.to.computed),
    freed: card.to.freed.map((freed, layer) => mix(card.from.freed[layer], freed))};
}

function animate(moment) {
  let most = 64, moving = false;
  for (const card of cards.values()) most = Math.max(most, card.to.prompt + card.to.generated);
  for (const card of cards.values()) {
    moving ||= !still.matches && moment - card.began < MOVE;
    strip(card.canvas, shown(card, moment), most, Math.min(56, Math.max(20, 3 * card.to.freed.length)));
  }
  if (open) large(open, moment);
  if (moving) requestAnimationFrame(animate);
}

function strip(canvas, request, most, height) {
  const [draw, width] = sized(canvas, height), layers = request.freed.length, row = height / layers;
  const gap = row > 4 ? 1 : 0, x = tokens => tokens / most * width;
  request.freed.forEach((freed, layer) => {
    const y = layer * row, tall = Math.max(.5, row - gap);
    const part = (from, to, shade) => {
      if (to <= from) return;
      draw.fillStyle = shade;
      draw.fillRect(x(from), y, Math.max(.5, x(to) - x(from)), tall);
    };
    const prompt = Math.min(request.prompt, request.computed), shared = Math.min(request.shared, prompt);
    part(0, freed, colour("freed"));
    const first = Math.min(freed + shared, Math.max(freed, prompt));  // of what is its own
    part(freed, first, colour("shared"));
    part(first, prompt, colour("kept"));
    part(Math.max(freed, prompt), request.computed, colour("made"));
    // An eviction moves what it keeps: what came from the host is no range any more.
    if (!freed) part(request.host[0], Math.min(request.host[1], prompt), colour("host"));
    // How many tokens are read, not which: these change with every token and head.
    if (request.read && request.generated) {
      const from = x(request.computed - Math.min(request.read[layer], request.computed - freed));
      draw.fillStyle = colour("read");
      draw.fillRect(from, y + tall * .6, Math.max(.5, x(request.computed) - from), Math.max(.5, tall * .3));
    }
  });
}

// An opened request that has ended stays as it was last, until it is closed.
function show(card) {
  open = card;
  at("one").showModal();
  requestAnimationFrame(animate);
}

function large(card, moment) {
  const request = card.to;
  at("title").textContent = (card.ended ? "ended: " : "") + `${request.id}: ${request.policy || "no policy"}` +
    (request.budget === null ? "" : `, budget ${number(request.budget)} tokens`) +
    `; prompt ${number(request.prompt)}, generated ${number(request.generated)}, shared ${number(request.shared)}` +
    (request.host[1] ? `, from the host cache ${number(request.host[1] - request.host[0])}` : "");
  strip(at("large"), shown(card, moment), Math.max(64, request.prompt + request.generated), 240);
  const table = at("layers");
  table.replaceChildren();
  const head = make("tr", undefined, table);
  const further = request.read ? ["read at most"] : [];
  for (const name of ["layer", "tokens held", "freed", "blocks", ...further]) make("th", name, head);
  request.freed.forEach((freed, layer) => {
    const line = make("tr", undefined, table);
    const read = request.read ? [request.read[layer]] : [];
    for (const value of [card.layers[layer], request.computed - freed, freed, request.blocks[layer], ...read])
      make("td", number(value), line);
  });
}

function flip() {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  sessionStorage.setItem("vllm-pyramid-theme", root.dataset.theme);
  drawHistory();
  requestAnimationFrame(animate);
}
function pause() {
  paused = !paused;
  at("pause").textContent = paused ? "go on" : "pause";
  if (!paused) return;
  at("state").className = "";
  at("state").textContent = "paused";
}

at("theme").onclick = flip;
at("pause").onclick = pause;
at("close").onclick = () => at("one").close();
at("one").onclose = () => { if (!at("one").open) open = null; };
at("ask").onsubmit = event => {
  event.preventDefault();
  sessionStorage.setItem("vllm-pyramid-key", at("key").value);
};
document.onkeydown = event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "INPUT") return;
  const key = event.key.toLowerCase(), list = [...at("requests").querySelectorAll("button")];
  const here = list.indexOf(document.activeElement);
  if (key === "d") flip();
  else if (key === "p") pause();
  else if (open) return;  // the arrows scroll
  else if (key === "arrowdown" || key === "arrowright") list[Math.min(list.length - 1, here + 1)]?.focus();
  else if (key === "arrowup" || key === "arrowleft") list[Math.max(0, here - 1)]?.focus();
  else return;
  event.preventDefault();
};
onresize = () => { drawHistory(); requestAnimationFrame(animate); };
document.documentElement.dataset.theme = sessionStorage.getItem("vllm-pyramid-theme") ||
  (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
tick();
