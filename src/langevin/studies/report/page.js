"use strict";
// A header's button sorts its table up, then down, then as it was. Missing values stay last.
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const body = table.tBodies[0], original = [...body.rows], heads = [...table.tHead.rows[0].cells];
  const key = (row, column) => {
    const { value } = row.cells[column].dataset;
    return value === undefined || value === "" || isNaN(value) ? value : Number(value);
  };
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
        return direction * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
      });
      body.append(...rows);
    });
  });
}
// One button opens and closes all sections; paper shows them open; a page that reloads keeps them as they were.
const sections = [...document.querySelectorAll("details")];
const remembered = new Set(JSON.parse(sessionStorage.getItem("open") ?? "[]"));
const all = document.createElement("button");
all.type = "button";
all.className = "all";
const tell = () => { all.textContent = sections.every((section) => section.open) ? "Fold all" : "Expand all"; };
for (const section of sections) {
  section.open = remembered.has(section.id);
  section.addEventListener("toggle", () => {
    sessionStorage.setItem("open", JSON.stringify(sections.filter((one) => one.open).map((one) => one.id)));
    tell();
  });
}
all.addEventListener("click", () => {
  const open = !sections.every((section) => section.open);
  sections.forEach((section) => { section.open = open; });
});
if (sections.length) document.querySelector(".sections").prepend(all);
tell();
addEventListener("beforeprint", () => sections.forEach((section) => { section.open = true; }));
