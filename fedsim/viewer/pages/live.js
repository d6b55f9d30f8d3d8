// Keeps the pages as new as the files they show. Everything here is on the page without it, too.
"use strict";

const EVERY = 1500;
const pulse = document.getElementById("pulse");

function tell(words, lost) {
  if (!pulse) return;
  pulse.textContent = words;
  pulse.classList.toggle("lost", Boolean(lost));
}

function put(row, name, words) {
  const place = row.querySelector(`[data-field=${name}]`);
  if (place && place.textContent !== words) place.textContent = words;
  return place;
}

function bar(row, name, done, total) {
  const place = row.querySelector(`progress[data-field=${name}]`);
  place.max = total || 1;
  place.value = done;
}

function show(row, run) {
  row.className = `run ${run.state}`;
  put(row, "state", run.state).className = `state ${run.state}`;
  put(row, "ago", run.ago);
  put(row, "words", run.words);
  row.querySelector("[data-field=bars]").hidden = !["running", "stopped"].includes(run.state);
  bar(row, "rounds", run.rounds.done, run.rounds.total);
  bar(row, "jobs", run.jobs.done + run.jobs.failed, run.jobs.total);
}

// What the page was rendered with; a run that finishes, appears or goes changes more than numbers.
let known = null;

function update(runs) {
  const shape = JSON.stringify(runs.map((run) => [run.key, run.state, run.verdicts, run.problems, run.report]));
  if (known !== null && shape !== known) return location.reload();
  known = shape;
  const shown = document.querySelectorAll("[data-run]").length;
  if (shown !== runs.length) return location.reload();
  for (const run of runs) {
    const row = document.querySelector(`[data-run="${run.key}"]`);
    if (!row) return location.reload();
    show(row, run);
  }
}

async function follow(address, use) {
  try {
    const answer = await fetch(address, { credentials: "same-origin" });
    if (answer.status === 403) return tell("This visit is over: open the address of the terminal", true);
    if (!answer.ok) throw new Error(String(answer.status));
    await use(answer);
    tell("live");
  } catch (error) {
    tell("The viewer has stopped", true);
  }
}

function every(work) {
  const turn = async () => {
    if (!document.hidden) await work();
    setTimeout(turn, EVERY);
  };
  turn();
}

const list = document.querySelector("[data-live]");
if (list) {
  every(() => follow(list.dataset.live, async (answer) => update((await answer.json()).runs)));
}

const part = document.querySelector("[data-fragment]");
if (part) {
  let before = null;
  every(() => follow(part.dataset.fragment, async (answer) => {
    const text = await answer.text();
    if (text === before) return;
    before = text;
    part.innerHTML = text;
    const state = part.querySelector(".status").dataset.state;
    if (state !== part.dataset.state) location.reload();
  }));
}

const boxes = [...document.querySelectorAll("input[name=run]")];
const chosen = document.getElementById("chosen");
if (chosen) {
  const button = document.querySelector(".choose button");
  const count = () => {
    const ticked = boxes.filter((box) => box.checked).length;
    const fits = ticked >= 2 && ticked <= 4;
    button.disabled = !fits;
    if (ticked === 0) chosen.textContent = "Tick two to four runs to lay them side by side.";
    else if (ticked === 1) chosen.textContent = "One run is ticked; tick another.";
    else chosen.textContent = fits ? `${ticked} runs are ticked.` : `${ticked} runs are ticked; four fit side by side.`;
  };
  boxes.forEach((box) => box.addEventListener("change", count));
  count();
}
