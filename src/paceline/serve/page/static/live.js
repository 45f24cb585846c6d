// The engine as it runs: cache, queue, rates, latencies, luck of the drafts.

import { watch } from "./api.js";
import { BlockMap } from "./blockmap.js";
import { acceptance, Spark } from "./charts.js";
import { h } from "./dom.js";
import { count, percent, rate, seconds, times } from "./format.js";

const SHOWN_SECONDS = 90;

class Tile {
  constructor(title, spark) {
    this.value = h("div", { class: "big num" }, "–");
    this.note = h("div", { class: "soft small num" });
    this.spark = spark ? new Spark(`${title}, the last ${SHOWN_SECONDS} seconds`) : null;
    this.element = h("div", { class: "tile card" }, h("h2", { class: "soft" }, title), this.value, this.note, this.spark?.element);
  }

  show(value, note) {
    this.value.textContent = value;
    this.note.textContent = note;
  }
}

export function live() {
  const tiles = { output: new Tile("Output tokens/s", true), prompt: new Tile("Prompt tokens/s", true), queue: new Tile("Requests"), ttft: new Tile("Time to first token"), tpot: new Tile("Time per token"), spec: new Tile("Drafts accepted") };
  const maps = h("div", { class: "maps" });
  const facts = h("p", { class: "soft small num" });
  const table = h("div", { class: "scroll" });
  const depths = h("div", { class: "methods" });
  const state = h("span", { class: "pulse", role: "status" }, "connecting …");
  const element = h("div", { class: "live" },
    h("div", { class: "row" }, h("h1", { class: "grow" }, "Live"), state),
    h("div", { class: "tiles" }, Object.values(tiles).map((tile) => tile.element)),
    h("div", { class: "watch" },
      h("section", { class: "card" }, h("h2", {}, "KV cache, block by block"), maps, facts),
      h("section", { class: "card" }, h("h2", {}, "Acceptance by position"), depths)),
    h("section", { class: "card" }, h("h2", {}, "Running and waiting"), table));
  const pictures = new Map();
  const history = new Map();
  const leaving = new AbortController();
  let marked = null;

  function cache(frame) {
    for (const group of frame.cache.groups) {
      let picture = pictures.get(group.name);
      if (!picture) {
        picture = new BlockMap(group.name);
        pictures.set(group.name, picture);
        maps.append(h("figure", {}, frame.cache.groups.length > 1 && h("figcaption", { class: "small" }, group.name), picture.element));
      }
      picture.show(group, frame.cache.block_size);
    }
    const { totals } = frame;
    facts.textContent = [`blocks of ${frame.cache.block_size} tokens`, totals.cache_hit_rate !== null && `${percent(totals.cache_hit_rate)} of prompt tokens found in the cache`,
      `${count(totals.cache_evictions)} evictions`, `${count(totals.preemptions)} preemptions`].filter(Boolean).join(" · ");
  }

  function rates(frame) {
    for (const [second, tokens, prompt] of frame.seconds) history.set(second, [tokens, prompt]);
    const now = Math.floor(frame.clock);
    for (const second of history.keys()) if (second < now - SHOWN_SECONDS - 2) history.delete(second);
    const past = (which) => Array.from({ length: SHOWN_SECONDS }, (_, i) => history.get(now - SHOWN_SECONDS + i)?.[which] ?? 0);
    const mean = (values) => values.slice(-3).reduce((a, b) => a + b, 0) / 3;
    const out = past(0), prompt = past(1);
    tiles.output.show(rate(mean(out)), `${count(frame.totals.output_tokens)} since the start`);
    tiles.output.spark.show(out);
    tiles.prompt.show(rate(mean(prompt)), `${count(frame.totals.prefill_tokens)} computed`);
    tiles.prompt.spark.show(prompt);
  }

  function latencies(frame) {
    for (const name of ["ttft", "tpot"]) {
      const found = frame.latency[`${name}_s`];
      tiles[name].show(found ? seconds(found[0]) : "–", found ? `p90 ${seconds(found[1])} · p99 ${seconds(found[2])}` : "nothing finished yet");
    }
    tiles.queue.show(`${frame.running_count}`, `running · ${frame.waiting_count} waiting · ${count(frame.totals.requests)} in all`);
    const { drafted, accepted } = frame.totals;
    tiles.spec.show(drafted ? percent(accepted / drafted) : "–", drafted ? `${count(accepted)} of ${count(drafted)} tokens` : "no drafts yet");
  }

  function methods(frame) {
    const drawn = frame.speculation.filter((one) => one.acceptance_by_position.length);
    depths.replaceChildren(...(drawn.length ? drawn.map((one) => h("figure", { "data-method": one.method },
      h("figcaption", { class: "row small" }, h("b", { class: "grow" }, one.method), h("span", { class: "soft num" }, `${one.tokens_per_step.toFixed(2)} tokens a step${one.net_speed ? ` · ${times(one.net_speed)} plain` : ""}`)),
      acceptance(one.method, one.acceptance_by_position)))
      : [h("p", { class: "soft" }, "Nothing has been drafted yet. Ask something in the playground.")]));
  }

  function queue(frame) {
    const rows = [...frame.running.map((one) => ["running", one]), ...frame.waiting.map((one) => ["waiting", one])];
    if (marked) for (const picture of pictures.values()) picture.mark(frame.running.find((one) => one.id === marked)?.blocks);
    const focused = table.contains(document.activeElement) ? document.activeElement.dataset.id : null;
    if (!rows.length) {
      table.replaceChildren(h("p", { class: "soft" }, "The engine is idle."));
      return;
    }
    table.replaceChildren(h("table", {},
      h("thead", {}, h("tr", {}, ["Request", "State", "Prompt", "Output", "Speculation", "Tokens a step", "Age"].map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", {}, rows.map(([status, one]) => h("tr", { "data-id": one.id, onpointerenter: () => mark(one.id), onpointerleave: () => mark(null) },
        h("td", {}, h("a", { href: `#/requests/${encodeURIComponent(one.id)}`, "data-id": one.id, onfocus: () => mark(one.id), onblur: () => mark(null) }, one.id.length > 24 ? `${one.id.slice(0, 22)}…` : one.id, one.sample ? ` /${one.sample}` : "")),
        h("td", {}, h("span", { class: `chip ${status}` }, status)),
        h("td", { class: "num" }, one.cached ? `${one.prompt} (${one.cached} cached)` : `${one.prompt}`),
        h("td", { class: "num" }, progress(one)),
        h("td", {}, one.method ?? "off"),
        h("td", { class: "num" }, one.tokens_per_step ? one.tokens_per_step.toFixed(2) : "–"),
        h("td", { class: "num" }, seconds(one.age_s)))))));
    if (focused) table.querySelector(`a[data-id="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  function mark(id) {
    marked = id;
    if (!id) for (const picture of pictures.values()) picture.mark([]);
  }

  async function follow() {
    while (!leaving.signal.aborted) {
      try {
        for await (const frame of watch("paceline/live", leaving.signal)) {
          state.textContent = "live";
          state.dataset.on = "yes";
          cache(frame);
          rates(frame);
          latencies(frame);
          methods(frame);
          queue(frame);
          element.dataset.frames = `${Number(element.dataset.frames ?? 0) + 1}`;
        }
      } catch (problem) {
        if (problem.name === "AbortError") return;
        state.textContent = problem.message ?? "lost";
      }
      delete state.dataset.on;
      await new Promise((resolve) => setTimeout(resolve, 1500));
    }
  }

  const repaint = () => { for (const picture of pictures.values()) picture.draw(); };
  addEventListener("repaint", repaint);
  follow();
  return { element, leave: () => { leaving.abort(); removeEventListener("repaint", repaint); for (const picture of pictures.values()) picture.close(); } };
}

function progress(one) {
  const bar = h("i");
  bar.style.width = `${Math.min(100, one.output / one.limit * 100)}%`;
  return [`${one.output} `, h("span", { class: "soft" }, `of ${one.limit}`), h("span", { class: "meter" }, bar)];
}
