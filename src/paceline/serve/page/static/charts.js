// Small charts: a line over the last seconds, bars by position.

import { h, s } from "./dom.js";
import { percent } from "./format.js";

// Values (oldest first) as a filled line, 0 at the bottom.
export class Spark {
  constructor(label) {
    this.line = s("path", { class: "spark-line" });
    this.area = s("path", { class: "spark-area" });
    this.element = s("svg", { class: "spark", viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img", "aria-label": label }, this.area, this.line);
  }

  show(values) {
    if (values.length < 2) return;
    const top = Math.max(...values, 1e-9);
    const points = values.map((value, i) => `${(i / (values.length - 1) * 100).toFixed(2)},${(28.5 - value / top * 26).toFixed(2)}`);
    this.line.setAttribute("d", `M${points.join("L")}`);
    this.area.setAttribute("d", `M0,30L${points.join("L")}L100,30Z`);
  }
}

// How often a draft stood at depth 1, 2, ...: one bar each.
export function acceptance(method, shares) {
  return h("ol", { class: "depths", "aria-label": `Acceptance by position, ${method}` }, shares.slice(0, 16).map((share, i) => {
    const bar = h("i");
    bar.style.height = `${share * 100}%`;
    return h("li", { title: `position ${i + 1}: ${percent(share, 1)}` },
      h("span", { class: "depth-bar" }, bar), h("span", { class: "num" }, `${Math.round(share * 100)}`), h("span", { class: "soft num" }, `${i + 1}`));
  }));
}
