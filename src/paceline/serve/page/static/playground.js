// The playground: a chat, a text that is continued, or a race of the same request with speculation off and on.

import { titleOf } from "./chats.js";
import { Controls } from "./controls.js";
import { h } from "./dom.js";
import { formattedSwitch } from "./look.js";
import { Race } from "./race.js";
import { Talk } from "./talk.js";
import { legend } from "./tokens.js";

const STARTERS = [
  ["Write code that repeats itself", "Write a Python class Stack with push, pop, peek and is_empty methods, each with a docstring."],
  ["Correct a paragraph", "Correct the spelling and return the whole text: A paceline is a line of riders who draft behind one anoter and take turns at the front. The rider at the front brakes the wind for the others. After a while he moves to the side and the next rider takes the front."],
  ["Explain something", "Why is the sky blue? Answer in three sentences."],
  ["Make something up", "Tell a short story about two cyclists who share one map."],
];
const BEGINNINGS = [
  ["A list", "The planets, from the sun outwards:\n1. Mercury\n2. Venus\n3."],
  ["Code", "def fibonacci(n):\n    \"\"\"The n-th Fibonacci number.\"\"\"\n"],
  ["A story", "Two cyclists shared one map. On the first evening"],
];

const MODES = {
  chat: { name: "Chat", send: "Send", asks: "Say something", title: "Each token shows where it came from",
    text: "Drafters guess ahead, the model checks their guesses in one pass, and what stands is what the model would have said alone. Point at a token, or walk with the arrow keys, for its probability, its drafter and what else might have come." },
  complete: { name: "Complete", send: "Go on", asks: "The beginning of a text", title: "The model goes on with a text",
    text: "What you write goes to the model as it stands, without a chat template: the way to talk to a base model." },
  race: { name: "Race", send: "Race", asks: "A prompt for both lanes", title: "The same text, sooner",
    text: "One prompt, one seed, two lanes: speculation off and on, one after the other, each by itself, then shown side by side. The faster lane may not change a single token, and the page checks that." },
};

// What was said stays while somebody looks at the other views.
const kept = { talks: null, mode: null, race: null, busy: null };

export function playground(about) {
  const offered = about.chat ? ["chat", "complete", "race"] : ["complete", "race"];
  kept.mode ??= offered[0];
  kept.talks ??= { chat: new Talk(about, "paceline-chats", false), complete: new Talk(about, "paceline-completions", true) };
  const controls = new Controls(about);
  let editing = null;
  const log = h("div", { class: "log" });
  const status = h("p", { class: "visually-hidden", role: "status" });
  const field = h("textarea", { id: "prompt", rows: "1", "aria-label": "Your message", enterkeyhint: "send" });
  const send = h("button", { class: "primary", type: "submit" }, "Send");
  const modes = h("div", { class: "segments", role: "group", "aria-label": "Mode" },
    offered.map((mode) => h("button", { type: "button", "data-mode": mode, onclick: () => show(mode) }, MODES[mode].name)));
  const past = h("select", { class: "past", "aria-label": "Earlier chats", onchange: () => { kept.busy?.stop(); talk().chats.open(Number(past.value)); talk().show(); show(kept.mode); } });
  const fresh = h("button", { type: "button", class: "quiet small", onclick: () => { kept.busy?.stop(); talk()?.chats.fresh(); talk()?.show(); show(kept.mode); field.focus(); } }, "New");
  const clear = h("button", { type: "button", class: "quiet small", title: "Forget all that this browser keeps of this mode", onclick: () => {
    kept.busy?.stop();
    kept.race = null;
    talk()?.chats.clear();
    talk()?.show();
    show(kept.mode);
    field.focus();
  } }, "Clear");
  const plainly = formattedSwitch();
  const form = h("form", { class: "composer card", onsubmit: submit }, field, send);
  const hint = h("p", { class: "soft small hint", role: "status" });
  const element = h("div", { class: "playground" },
    h("section", { class: "talk", "aria-label": "Playground" },
      h("div", { class: "talk-head" }, h("div", { class: "row" }, modes, h("span", { class: "grow" }), past, fresh, clear),
        h("div", { class: "row looks" }, legend(), plainly)),
      log, hint, form, status),
    controls.element);
  const talk = () => kept.talks[kept.mode];

  field.addEventListener("input", grow);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
  });
  for (const one of Object.values(kept.talks)) {
    one.onedit = (index, said) => { edit(index); write(said); };
    one.onagain = (index, said) => { if (!kept.busy) { edit(null); one.cut(index); converse(said); } };
  }

  function grow() {
    field.style.height = "auto";
    field.style.height = `${Math.min(field.scrollHeight + 2, 220)}px`;
  }

  function write(text) {
    field.value = text;
    grow();
    field.focus();
  }

  // From which turn on the conversation is said anew; null: it goes on at its end.
  function edit(index) {
    editing = index;
    hint.textContent = index === null ? "" : "Sending replaces this turn and all after it. Escape leaves it as it is.";
  }

  function show(mode) {
    kept.mode = mode;
    edit(null);
    for (const button of modes.children) button.setAttribute("aria-pressed", `${button.dataset.mode === mode}`);
    send.textContent = kept.busy ? "Stop" : MODES[mode].send;
    field.placeholder = MODES[mode].asks;
    list();
    const shown = mode === "race" ? kept.race?.element : talk().empty ? null : talk().element;
    log.replaceChildren(shown ?? welcome(mode));
  }

  // Earlier chats, the newest first; the one that is open is chosen.
  function list() {
    const chats = talk()?.chats;
    past.hidden = !chats || chats.list.length < 1 || (chats.list.length === 1 && chats.list[0] === chats.current);
    fresh.hidden = !chats;
    if (past.hidden) return;
    past.replaceChildren(...(chats.list.includes(chats.current) ? [] : [h("option", { value: "-1", selected: true }, "New")]),
      ...chats.list.map((chat, index) => h("option", { value: `${index}`, selected: chat === chats.current }, titleOf(chat))).reverse());
  }

  function welcome(mode) {
    return h("div", { class: "welcome" }, h("h1", {}, MODES[mode].title), h("p", { class: "soft" }, MODES[mode].text),
      h("div", { class: "starters" }, (mode === "complete" ? BEGINNINGS : STARTERS).map(([name, text]) =>
        h("button", { type: "button", onclick: () => { field.value = text; grow(); form.requestSubmit(); } }, h("b", {}, name), h("span", {}, text)))));
  }

  // Also while another view is open: what runs goes on, and is here when somebody comes back.
  function working(on) {
    kept.busy = on;
    const button = document.querySelector(".composer button") ?? send;
    button.textContent = on ? "Stop" : MODES[kept.mode].send;
    (document.querySelector(".playground") ?? element).classList.toggle("busy", Boolean(on));
  }

  async function submit(event) {
    event.preventDefault();
    if (kept.busy) { kept.busy.stop(); return; }
    const text = kept.mode === "complete" ? field.value : field.value.trim();
    if (!text.trim()) { field.focus(); return; }
    field.value = "";
    grow();
    if (kept.mode === "race") { await race(text); return; }
    if (editing !== null) talk().cut(editing);
    edit(null);
    await converse(text);
  }

  async function converse(text) {
    log.replaceChildren(talk().element);
    const answer = await talk().ask(text, controls.values.system.trim(), controls.body(), working);
    working(null);
    list();
    status.textContent = answer.error ?? `The answer has ${answer.text.length} tokens.`;
  }

  async function race(text) {
    const system = controls.values.system.trim();
    kept.race = new Race(about, controls, text);
    log.replaceChildren(kept.race.element);
    working(kept.race);
    await kept.race.run([...(system ? [{ role: "system", content: system }] : []), { role: "user", content: text }]);
    working(null);
    kept.race?.element.scrollIntoView({ block: "nearest" });
  }

  // Escape stops what runs, or leaves the turn that is being edited.
  function escape(event) {
    if (event.key !== "Escape" || event.isComposing) return;
    if (kept.busy) kept.busy.stop();
    else if (editing !== null) { edit(null); write(""); }
  }

  document.addEventListener("keydown", escape);
  show(kept.mode);
  element.classList.toggle("busy", Boolean(kept.busy));
  requestAnimationFrame(() => { if (matchMedia("(pointer: fine)").matches) field.focus({ preventScroll: true }); });
  return { element, leave: () => document.removeEventListener("keydown", escape) };
}
