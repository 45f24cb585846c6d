// The frame around the views: which one is shown, in which colours.

import { getJSON } from "./api.js";
import { h } from "./dom.js";
import { forget } from "./peek.js";
import { live } from "./live.js";
import { playground } from "./playground.js";
import { oneRequest, requests } from "./requests.js";

const main = document.getElementById("main");
const views = { playground, live, requests };
let leave = () => {};

// A hash may have been typed by hand: what cannot be decoded names nothing.
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return "";
  }
}

function route() {
  const [name, id] = location.hash.replace(/^#\/?/, "").split("/").map(decoded);
  const view = Object.hasOwn(views, name) ? name : "playground";
  leave();
  forget();
  document.title = `${{ playground: "Playground", live: "Live", requests: "Requests" }[view]} · Paceline`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const opened = view === "requests" && id ? oneRequest(id, about) : views[view](about);
  main.dataset.view = view;
  main.replaceChildren(opened.element);
  leave = opened.leave ?? (() => {});
}

// Colours: the system's, until somebody chooses.
const themes = ["system", "light", "dark"];
const button = document.getElementById("theme");
function paint(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  button.setAttribute("aria-label", theme === "system" ? "Colours: as the system has them" : `Colours: ${theme}`);
  button.title = button.getAttribute("aria-label");
  window.dispatchEvent(new Event("repaint"));
}
let theme = localStorage.getItem("paceline-theme") ?? "system";
paint(theme);
button.addEventListener("click", () => {
  theme = themes[(themes.indexOf(theme) + 1) % themes.length];
  localStorage.setItem("paceline-theme", theme);
  paint(theme);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.dispatchEvent(new Event("repaint")));

// One model is shown by its name; of several one is chosen, and loaded then. Views hold `about`, so it changes in place.
function modelChoice() {
  const chosen = h("select", { class: "model", "aria-label": "The model to talk to" }, about.models.map((name) => h("option", { value: name }, name)));
  chosen.value = about.model;
  chosen.addEventListener("change", async () => {
    chosen.disabled = true;
    try {
      Object.assign(about, await getJSON(`paceline/about?model=${encodeURIComponent(chosen.value)}`));
      localStorage.setItem(MODEL, about.model);
      route();
    } catch (problem) {
      chosen.value = about.model;
      main.prepend(h("p", { class: "note", role: "alert" }, problem.message));
    }
    chosen.disabled = false;
  });
  return chosen;
}

// The one that was chosen last is asked for first: where none is named, another one might be loaded.
async function firstAbout() {
  const last = localStorage.getItem(MODEL);
  const found = last && await getJSON(`paceline/about?model=${encodeURIComponent(last)}`).catch(() => null);
  return found || getJSON("paceline/about");
}

const MODEL = "paceline-model";
let about = null;
try {
  about = await firstAbout();
  document.getElementById("model").textContent = about.model;
  if (about.models.length > 1) document.getElementById("model").replaceChildren(modelChoice());
  window.addEventListener("hashchange", () => { route(); main.focus({ preventScroll: true }); scrollTo(0, 0); });
  route();
} catch (problem) {
  main.replaceChildren(h("p", { class: "note", role: "alert" }, problem.message));
}
document.documentElement.dataset.ready = "yes";
