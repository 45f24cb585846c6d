// The card beside a token: what it is, how likely it was, who proposed it, what else might have come.

import { h } from "./dom.js";
import { probability, visible } from "./format.js";

export const ORIGINS = {
  accepted: ["Accepted draft", "guessed by a drafter, and what the model would have said"],
  corrected: ["Correction", "the model's own token, where the draft was wrong"],
  bonus: ["Bonus", "the model's own token after a draft that was right to its end"],
  plain: ["Plain", "one token, one step of the model"],
};

const card = document.getElementById("peek");
let shownFor = null;

export function peek(element, token) {
  const [name, meaning] = ORIGINS[token.origin] ?? ORIGINS.plain;
  const others = token.top ?? [];
  const listed = others.some((other) => other.id === token.id) || token.logprob === null || token.logprob === undefined
    ? others : [...others, { id: token.id, text: token.text, logprob: token.logprob }];
  card.className = `of-${token.origin ?? "plain"}`;
  card.replaceChildren(
    h("div", { class: "what" }, h("code", {}, visible(token.text)), h("span", { class: "soft small" }, `id ${token.id}`)),
    h("div", {}, h("span", { class: "origin-name" }, name), token.drafter ? ` by ${token.drafter}` : ""),
    h("div", { class: "soft small" }, meaning),
    listed.length > 0 && h("ol", { "aria-label": "Likeliest tokens here" }, listed.map((other) => {
      const bar = h("i");
      bar.style.width = `${Math.exp(other.logprob) * 100}%`;
      return h("li", { class: other.id === token.id ? "chosen" : "" },
        h("code", {}, visible(other.text)), h("span", { class: "meter" }, bar), h("span", { class: "num end" }, probability(other.logprob)));
    })));
  card.hidden = false;
  shownFor?.removeAttribute("aria-describedby");
  element.setAttribute("aria-describedby", "peek");
  shownFor = element;
  place(element);
}

// Beside the text, at the height of the token; without room there, above the token, else below. On a phone the style sheet
// has it at the bottom. Never outside the window.
function place(element) {
  const rects = element.getClientRects();
  const text = element.closest(".tokens, .card")?.getBoundingClientRect();
  const box = rects[0] ?? element.getBoundingClientRect();
  const width = card.offsetWidth, height = card.offsetHeight;
  if (text && text.right + width + 20 <= innerWidth) {
    card.style.left = `${text.right + 12}px`;
    card.style.top = `${Math.max(8, Math.min(box.top - 8, innerHeight - height - 8))}px`;
    return;
  }
  const left = Math.min(Math.max(8, box.left + box.width / 2 - width / 2), innerWidth - width - 8);
  const above = box.top - height - 8;
  card.style.left = `${left}px`;
  card.style.top = `${above > 60 ? above : Math.min(rects[rects.length - 1]?.bottom ?? box.bottom, innerHeight - height) + 8}px`;
}

export function forget() {
  card.hidden = true;
  shownFor?.removeAttribute("aria-describedby");
  shownFor = null;
}

document.addEventListener("keydown", (event) => { if (event.key === "Escape") forget(); });
addEventListener("scroll", forget, { passive: true, capture: true });
