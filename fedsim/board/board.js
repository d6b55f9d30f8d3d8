// Sorts, filters and opens rows. Without it the page holds the same, and stands still.
"use strict";

const all = (place, words) => [...place.querySelectorAll(words)];
const sections = all(document, ".federation");
const find = document.getElementById("find");
const threat = document.getElementById("threat");
const federation = document.getElementById("federation");

const entries = (table) => all(table, "tr.entry").map((row) => ({ row, more: row.nextElementSibling }));

function compare(one, other) {
  const numbers = [Number(one), Number(other)];
  if (numbers.every(Number.isFinite)) return numbers[0] - numbers[1];
  return one.localeCompare(other, "en", { numeric: true });
}

// What has no value comes last, whichever way it is sorted.
function sort(head) {
  const table = head.closest("table"), body = table.tBodies[0];
  const column = Number(head.dataset.column);
  const before = head.getAttribute("aria-sort");
  const first = head.classList.contains("n") ? "descending" : "ascending";
  const second = first === "descending" ? "ascending" : "descending";
  const way = before === first ? second : first;
  all(table, "th[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", way);
  const value = ({ row }) => row.cells[column].dataset.value;
  const sorted = entries(table).sort((one, other) => {
    const pair = [value(one), value(other)];
    if (pair.includes("")) return (pair[0] === "") - (pair[1] === "");
    return compare(...pair) * (way === "descending" ? -1 : 1);
  });
  body.append(...sorted.flatMap(({ row, more }) => [row, more]));
}

function open(button, shown) {
  button.setAttribute("aria-expanded", String(shown));
  document.getElementById(button.getAttribute("aria-controls")).hidden = !shown;
}

function filter() {
  const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0, total = 0;
  for (const section of sections) {
    const here = (!threat.value || section.dataset.threat === threat.value)
      && (!federation.value || section.dataset.federation === federation.value);
    let some = false;
    for (const { row, more } of entries(section)) {
      const text = row.textContent.toLowerCase();
      const fits = here && words.every((word) => text.includes(word));
      total += 1;
      shown += fits;
      some = some || fits;
      row.hidden = !fits;
      if (!fits) open(row.querySelector(".toggle"), false);
    }
    section.hidden = !some;
  }
  const none = "No row fits.";
  document.getElementById("count").textContent = shown ? `${shown} of ${total} rows` : none;
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.classList.contains("sort")) sort(button.closest("th"));
  if (button.classList.contains("toggle")) open(button, button.getAttribute("aria-expanded") !== "true");
});
[find, threat, federation].forEach((field) => field.addEventListener("input", filter));
filter();
