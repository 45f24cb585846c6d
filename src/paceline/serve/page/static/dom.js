// Elements in one expression: h("div", { class: "card", onclick }, children...), and the same for SVG.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && typeof value !== "string" && !(node instanceof SVGElement)) node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const h = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
export const s = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

// Browsers give the clipboard to pages of this machine and to those of https alone; the old way works for all.
async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.body.appendChild(h("textarea", { class: "visually-hidden" }));
  area.value = text;
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error("the browser refused");
}

// A button that copies what `text` gives when it is pressed, and says so.
export function copyButton(text, label = "Copy") {
  const button = h("button", { type: "button", class: "quiet small", "aria-label": label, onclick: async () => {
    try {
      await copyText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not copied";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  } }, "Copy");
  return button;
}

let ids = 0;
export const fresh = (prefix) => `${prefix}-${++ids}`;

// At most one call per frame, with whatever is newest then.
export function everyFrame(draw) {
  let asked = 0;
  return () => { asked ||= requestAnimationFrame(() => { asked = 0; draw(); }); };
}

// What a colour of the style sheet is right now, in the form canvases take.
let probe = null;
export function colour(name) {
  probe ??= document.body.appendChild(h("i", { hidden: true }));
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}
