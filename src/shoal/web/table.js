// Tables that fold into cards on a phone. A head that begins with "num:" is a column of numbers.

import { h } from "./dom.js";

export function table(heads, rows) {
  const head = heads.map((text) =>
    h("th", { scope: "col", class: text.startsWith("num:") ? "num" : "" }, text.replace("num:", "")),
  );
  return h("table", { class: "fold" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows));
}
