"use strict";
// A header's button sorts its table up, then down, then as it was. Missing values stay last.
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const body = table.tBodies[0];
  const original = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const key = (row, column) => {
    const value = row.cells[column].dataset.value;
    return value === undefined || value === "" || isNaN(value) ? value : Number(value);
  };
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    head.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const next = { none: "ascending", ascending: "descending", descending: "none" }[head.getAttribute("aria-sort")];
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", next);
      const direction = next === "descending" ? -1 : 1;
      const rows = next === "none" ? original : [...original].sort((one, other) => {
        const a = key(one, column), b = key(other, column);
        if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
        return direction * compare(a, b);
      });
      body.append(...rows);
    });
  });
}
