// Recent requests, and one of them opened: its timeline, its text, its drafts, its trace.

import { getBlob, getJSON } from "./api.js";
import { fresh, h } from "./dom.js";
import { count, percent, seconds, short, times } from "./format.js";
import { drawTimeline } from "./timeline.js";
import { legend, TokenText } from "./tokens.js";
import { drawTree } from "./tree.js";

export function requests() {
  const body = h("div", { class: "scroll" }, h("p", { class: "soft" }, "loading …"));
  const filter = h("input", { type: "search", class: "filter", placeholder: "Filter: words of the prompt, an id, a state, a drafter", "aria-label": "Filter requests", oninput: () => show(latest) });
  const element = h("div", { class: "requests" }, h("div", { class: "row" }, h("h1", { class: "grow" }, "Requests"), filter), h("section", { class: "card" }, body));
  let latest = [];
  const leaving = new AbortController();
  async function refresh() {
    while (!leaving.signal.aborted) {
      try {
        latest = (await getJSON("paceline/requests", leaving.signal)).requests;
        show(latest);
      } catch (problem) {
        if (problem.name !== "AbortError") body.replaceChildren(h("p", { class: "note", role: "alert" }, problem.message));
      }
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
  function show(all) {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const list = all.filter((one) => { const text = said(one); return words.every((word) => text.includes(word)); });
    const focused = body.contains(document.activeElement) ? document.activeElement.dataset.id : null;
    body.replaceChildren(list.length ? h("table", {},
      h("thead", {}, h("tr", {}, ["Request", "Prompt", "State", "Tokens in", "Out", "First token", "Per token", "Speculation", "Took", "Arrived"].map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", {}, list.map((one) => h("tr", {},
        h("td", {}, h("a", { href: `#/requests/${encodeURIComponent(one.id)}`, "data-id": one.id }, short(one.id))),
        h("td", { class: "piece", title: one.prompt }, one.prompt ?? ""),
        h("td", {}, chip(one)),
        h("td", { class: "num" }, count(one.metrics.prompt_tokens)),
        h("td", { class: "num" }, count(one.metrics.output_tokens)),
        h("td", { class: "num" }, seconds(one.metrics.ttft_s)),
        h("td", { class: "num" }, seconds(one.metrics.tpot_s)),
        h("td", {}, one.method ? `${one.method}${one.speculation ? ` · ${one.speculation.tokens_per_step.toFixed(2)}` : ""}` : "off"),
        h("td", { class: "num" }, seconds(one.duration_s)),
        h("td", { class: "num soft" }, `${seconds(one.age_s)} ago`)))))
      : all.length ? h("p", { class: "soft" }, "No request has that.")
      : h("p", { class: "soft" }, "No request has come yet. ", h("a", { href: "#/" }, "Ask something."), " The latest few hundred are kept here, in memory only."));
    if (focused) body.querySelector(`a[data-id="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }
  refresh();
  return { element, leave: () => leaving.abort() };
}

const REASONS = { stop: "ended", length: "max tokens" };
const stateOf = (one) => one.error ? "error" : one.state === "finished" ? REASONS[one.reason] ?? one.reason ?? "finished" : one.state;
const chip = (one) => h("span", { class: `chip ${one.error ? "error" : one.state}` }, stateOf(one));
// All of a request that the filter looks at.
const said = (one) => [one.id, one.prompt, stateOf(one), one.method ?? "off"].join(" ").toLowerCase();

export function oneRequest(id) {
  const body = h("div", { class: "story" }, h("p", { class: "soft" }, "loading …"));
  const element = h("div", { class: "requests" },
    h("p", { class: "small" }, h("a", { href: "#/requests" }, "← All requests")), h("h1", { class: "mono-title" }, id), body);
  const leaving = new AbortController();
  // A story that still goes on is drawn anew each second: what was chosen in it, and where the focus was, stays.
  let sample = 0;
  function show(story) {
    const choosing = body.querySelector(".samples")?.contains(document.activeElement);
    body.replaceChildren(...sections(story, sample, (chosen) => { sample = chosen; show(story); }));
    if (choosing) body.querySelector(".samples input:checked")?.focus({ preventScroll: true });
  }
  async function load() {
    for (;;) {
      try {
        const story = await getJSON(`paceline/request?id=${encodeURIComponent(id)}`, leaving.signal);
        if (leaving.signal.aborted) return;
        show(story);
        if (story.state === "finished") return;
      } catch (problem) {
        if (problem.name !== "AbortError") body.replaceChildren(h("p", { class: "note", role: "alert" }, problem.message));
        return;
      }
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
  load();
  return { element, leave: () => leaving.abort() };
}

function sections(story, sample, choose) {
  const events = eventsOf(story, sample);
  return [facts(story), story.samples > 1 && sampleCard(story, sample, choose), timelineCard(story, events), textCard(story, events), traceCard(story)].filter(Boolean);
}

// What happened to one sample. The prompt is computed once, by the first, for all of them; its token is not theirs.
function eventsOf(story, sample) {
  const shared = (event) => event.sample === 0 && event.kind === "prefill";
  return story.events.filter((event) => event.sample === sample || shared(event))
    .map((event) => event.sample === sample ? event : { ...event, tokens: [], pieces: [], origins: [] });
}

function sampleCard(story, sample, choose) {
  const name = fresh("sample");
  const radios = Array.from({ length: story.samples }, (_, index) => {
    const reason = story.reasons[index];
    return h("label", {},
      h("input", { type: "radio", name, value: `${index}`, checked: index === sample, onchange: () => choose(index) }),
      `${index + 1}`, reason && h("span", { class: "soft small" }, ` ${REASONS[reason] ?? reason}`));
  });
  return h("section", { class: "card" }, h("fieldset", { class: "samples" }, h("legend", {}, "Sample"), radios));
}

function facts(story) {
  const { metrics, speculation } = story;
  const entries = [
    ["State", chip(story)], ["Waited", seconds(metrics.queue_time_s)], ["First token", seconds(metrics.ttft_s)], ["Per token", seconds(metrics.tpot_s)],
    ["Prompt", `${count(metrics.prompt_tokens)} tokens, ${count(metrics.cached_tokens)} cached`], ["Output", `${count(metrics.output_tokens)} tokens in ${count(metrics.steps)} steps`],
    ["Speculation", story.method ?? "off"], speculation && ["Tokens a step", speculation.tokens_per_step.toFixed(2)],
    speculation?.drafted > 0 && ["Accepted", `${percent(speculation.accepted / speculation.drafted)} of ${count(speculation.drafted)} drafted`],
    speculation?.net_speed && ["Against plain, estimated", times(speculation.net_speed)],
    metrics.preemptions > 0 && ["Preempted", `${metrics.preemptions} times`], ["Seed", h("span", { class: "mono" }, `${story.seed}`)],
  ].filter(Boolean);
  return h("section", { class: "card" }, story.prompt && h("p", { class: "piece-whole" }, h("span", { class: "soft small" }, "Prompt: "), story.prompt), story.error && h("p", { class: "note" }, story.error),
    h("dl", { class: "facts-grid" }, entries.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", { class: "num" }, value)))),
    metrics.cache_miss && h("p", { class: "soft small" }, `The prefix cache gave no more: ${metrics.cache_miss}`));
}

// The timeline, and below it the draft of the step that is chosen there.
function timelineCard(story, events) {
  const drafted = events.filter((event) => event.draft);
  const tree = h("div", { class: "tree-view" });
  const where = h("span", { class: "grow num", role: "status" });
  let at = -1;
  const timeline = drawTimeline(events, story, (event) => choose(drafted.indexOf(event)));
  const previous = h("button", { type: "button", onclick: () => choose(at - 1), "aria-label": "The draft before" }, "←");
  const next = h("button", { type: "button", onclick: () => choose(at + 1), "aria-label": "The draft after" }, "→");
  function choose(index) {
    if (index < 0 || index >= drafted.length) return;
    at = index;
    const event = drafted[at], { draft } = event;
    previous.disabled = at === 0;
    next.disabled = at === drafted.length - 1;
    where.textContent = `Draft ${at + 1} of ${drafted.length}: ${draft.drafter || "drafter"} guessed ${draft.tokens.length}, ${draft.path.length} stood, ${event.tokens.length} ${event.tokens.length === 1 ? "token" : "tokens"} came of it`;
    timeline.select(event);
    tree.replaceChildren(drawTree(event, story.texts));
  }
  const section = h("section", { class: "card" }, h("h2", {}, "Timeline"), timeline.element,
    story.dropped > 0 && h("p", { class: "soft small" }, `The first ${count(story.dropped)} events were given up to bound memory.`));
  if (drafted.length) {
    section.append(h("h2", { class: "second" }, "Draft trees"), h("div", { class: "row" }, previous, next, where), tree,
      h("p", { class: "soft small" }, "From left to right: the guesses for one step. Filled: what stood. The last one on the path is the model's own token."));
    const best = drafted.reduce((best, event, index) => event.draft.path.length > drafted[best].draft.path.length ? index : best, 0);
    choose(best);
  }
  return section;
}

function textCard(story, events) {
  const text = new TokenText("The text, token by token");
  text.push(events.flatMap((event) => event.tokens.map((id, i) => ({
    id, text: event.pieces[i], origin: event.origins[i] ?? "plain", logprob: null, top: [],
    drafter: event.origins[i] === "accepted" && event.draft ? event.draft.sources?.[event.draft.path[i]] ?? event.draft.drafter : null,
  }))));
  text.flush();
  return h("section", { class: "card" }, h("div", { class: "row" }, h("h2", { class: "grow" }, "Text"), legend()), text.element);
}

function traceCard(story) {
  const file = `trace-${story.id.replace(/[^A-Za-z0-9_-]/g, "-")}.json`;
  const command = `paceline replay ${file}`;
  const said = h("span", { role: "status", class: "soft small" });
  async function download() {
    try {
      const link = h("a", { href: URL.createObjectURL(await getBlob(`paceline/trace?id=${encodeURIComponent(story.id)}`)), download: file });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    } catch (problem) {
      said.textContent = problem.message;
    }
  }
  return h("section", { class: "card" }, h("h2", {}, "Trace"), story.traced
    ? [h("p", { class: "soft" }, "Prompt, parameters, seed, and of every token its probability, its support and its origin. Replaying runs the request again and compares token by token."),
      h("div", { class: "row trace" }, h("button", { type: "button", class: "primary", onclick: download }, "Download the trace"),
        h("code", { class: "command" }, command),
        h("button", { type: "button", class: "quiet", onclick: async () => { await navigator.clipboard?.writeText(command); said.textContent = "copied"; } }, "Copy"), said)]
    : h("p", { class: "soft" }, story.state === "finished" ? "This request was made without a trace. Ask with " : "The trace comes when the request has ended, if it was asked for with ", h("code", {}, '"trace": true'), "."));
}
