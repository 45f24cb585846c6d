// How texts are shown: with the colours of their tokens or without, formatted or as they were written. Kept between visits.

import { h } from "./dom.js";

const STORE = "paceline-look";

function load() {
  try {
    return { colours: true, formatted: true, ...JSON.parse(localStorage.getItem(STORE) ?? "{}") };
  } catch {
    return { colours: true, formatted: true };
  }
}

const look = load();
export const formatted = () => look.formatted;

function apply() {
  document.documentElement.dataset.colours = look.colours ? "on" : "off";
}
apply();

function lookSwitch(name, label, title) {
  const box = h("input", { type: "checkbox", name, checked: look[name], onchange: () => {
    look[name] = box.checked;
    localStorage.setItem(STORE, JSON.stringify(look));
    apply();
    dispatchEvent(new Event("look"));
  } });
  return h("label", { class: "switch small", title }, box, label);
}

export const coloursSwitch = () => lookSwitch("colours", "Colours", "Show where each token came from");
export const formattedSwitch = () => lookSwitch("formatted", "Formatted", "Draw headings, lists, emphasis and code; off: every character as the model wrote it");
