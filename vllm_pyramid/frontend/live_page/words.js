"use strict";
/* SPDX-License-Identifier: Apache-2.0 */
// The words of an opened request, once its prompt has been evicted from.
async function askWords(card) {
  if (!last.prompts || card.words || card.asking || card.ended) return;
  card.asking = true;
  let why = "";
  try { card.words = decoded(await get(`prompt?request=${encodeURIComponent(card.to.id)}`)); }
  catch (error) { why = String(error.message || error); }
  card.asking = false;
  if (open !== card) return;
  at("words").hidden = false;
  if (card.words) { spell(card); return; }
  at("layers-of-words").hidden = true;
  at("text").replaceChildren();
  at("about").textContent = `No words: ${why}`;
}

function decoded(words) {
  const raw = atob(words.counts), bytes = Uint8Array.from(raw, letter => letter.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  words.counts = Uint16Array.from({length: raw.length / 2}, (_, i) => view.getUint16(2 * i, true));
  words.all = added(words.heads);
  return words;
}

// How many heads kept a token, and of how many: in one layer, or in all of them (-1).
function kept(words, token, layer) {
  const tokens = words.pieces.length;
  if (layer >= 0) return [words.counts[layer * tokens + token], words.heads[layer]];
  let heads = 0;
  for (let i = token; i < words.counts.length; i += tokens) heads += words.counts[i];
  return [heads, words.all];
}

function spell(card) {
  at("text").replaceChildren(...card.words.pieces.map((piece, token) => {
    const span = make("span", piece);
    span.dataset.token = token;
    return span;
  }));
  at("layer").max = card.words.layers.length - 1;
  at("layer").value = -1;
  at("about").textContent = "Point at a word, or go from word to word with J and K.";
  at("words").hidden = at("layers-of-words").hidden = false;
  shade();
}

function shade() {
  const words = open?.words, layer = Number(at("layer").value);
  if (!words) return;
  at("which").textContent = layer < 0 ? "all layers" : `layer ${words.layers[layer]}`;
  for (const span of at("text").children) {
    const [heads, of] = kept(words, Number(span.dataset.token), layer);
    span.style.setProperty("--s", `${heads ? 10 + 50 * heads / of : 0}%`);
    span.classList.toggle("gone", !heads);
  }
}

// At a word, or `step` words on from the one that was pointed at last.
function point(word, step = 0) {
  const words = open?.words, spans = at("text").children, before = at("text").querySelector(".at");
  if (!words) return;
  const number = word ? Number(word.dataset.token) : Number(before?.dataset.token ?? -1) + step;
  const token = Math.max(0, Math.min(spans.length - 1, number));
  before?.classList.remove("at");
  spans[token].classList.add("at");
  if (!word) spans[token].scrollIntoView({block: "nearest"});
  const [heads, of] = kept(words, token, -1);
  const some = words.layers.filter((_, layer) => kept(words, token, layer)[0]).length;
  at("about").textContent = `token ${token} ${JSON.stringify(words.pieces[token])} is kept by ` +
    `${heads} of ${of} heads, in ${some} of ${words.layers.length} layers`;
}
