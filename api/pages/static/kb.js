// Enhancements of pages that work without scripts: search as you type, keys, copy buttons, drag and drop of logs.
"use strict";

document.documentElement.classList.add("js");

const byId = (id) => document.getElementById(id);
const announcement = byId("announcement");
const texts = JSON.parse(document.body.dataset.texts); // in the language of the page

// Fetch a page and replace the results with those in it. Throws without a response.
async function show(url, options) {
  const answer = await fetch(url, { headers: { Accept: "text/html" }, ...options });
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const results = page.getElementById("results");
  if (!results) throw new Error(`status ${answer.status}`);
  byId("results").replaceWith(document.adoptNode(results));
  addCopyButtons(results);
  document.title = page.title;
  return results;
}

function showError(text) {
  const box = document.createElement("div");
  box.className = "trouble";
  box.setAttribute("role", "alert");
  box.append(Object.assign(document.createElement("p"), { textContent: text }));
  byId("results").replaceChildren(box);
}

// Search as you type: the last question wins, and the address changes to it.
function searchAsYouType(form) {
  let timer, asking;
  const ask = async () => {
    asking?.abort();
    asking = new AbortController();
    const given = [...new FormData(form)].filter(([, value]) => value);
    const url = `${form.getAttribute("action")}?${new URLSearchParams(given)}`;
    byId("results").setAttribute("aria-busy", "true");
    try {
      const results = await show(url, { signal: asking.signal });
      history.replaceState(null, "", url);
      keepInOtherLanguage(given);
      announcement.textContent = results.dataset.announcement ?? "";
    } catch (error) {
      if (error.name === "AbortError") return;
      showError(texts.unreachable);
    }
  };
  form.addEventListener("input", (event) => {
    clearTimeout(timer);
    timer = setTimeout(ask, event.target.type === "search" ? 180 : 0);
  });
}

// The link to the other language asks the same question.
function keepInOtherLanguage(given) {
  const link = document.querySelector("a.language");
  const lang = new URLSearchParams(link.search).get("lang");
  link.search = new URLSearchParams([...given.filter(([name]) => name !== "lang"), ["lang", lang]]);
}

// `/` focuses the search field, the arrows move between it and the results, Escape goes back and then leaves it.
const RESULTS = "#results .hits h2 a, #results .examples a, #results .groups a, #results .area-list a";

function isTyping(element) {
  return element.matches("input, textarea, select, [contenteditable]");
}

function moveBy(step) {
  const links = [...document.querySelectorAll(RESULTS)];
  const at = links.indexOf(document.activeElement);
  if (at < 0 && step < 0) return false;
  const field = document.querySelector("main input[type=search]");
  const target = at + step < 0 ? field : links[at + step];
  target?.focus();
  return Boolean(target);
}

document.addEventListener("keydown", (event) => {
  if (event.isComposing || event.ctrlKey || event.metaKey || event.altKey) return;
  const active = document.activeElement ?? document.body;
  const field = document.querySelector("main input[type=search], .find input[type=search]");
  const isInResults = active.matches(RESULTS);
  if (event.key === "/" && field && !isTyping(active)) {
    event.preventDefault();
    field.focus();
    field.select();
  } else if (event.key === "ArrowDown" && (active === field || isInResults) && moveBy(1)) {
    event.preventDefault();
  } else if (event.key === "ArrowUp" && isInResults && moveBy(-1)) {
    event.preventDefault();
  } else if (event.key === "Escape" && isInResults && field) {
    field.focus();
  } else if (event.key === "Escape" && active === field) {
    event.preventDefault(); // Chromium would clear the field, in some versions without an event
    if (!field.value) return field.blur();
    field.value = "";
    field.dispatchEvent(new Event("input", { bubbles: true }));
  }
});

async function copy(text) {
  try {
    return await navigator.clipboard.writeText(text);
  } catch {
    const area = Object.assign(document.createElement("textarea"), { value: text }); // over plain HTTP
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    if (!isCopied) throw new Error("nothing was copied");
  }
}

// Show for two seconds on the button or link that its text was copied.
async function copyFrom(button, text) {
  await copy(text);
  const label = button.dataset.label ?? button.textContent;
  button.dataset.label = label;
  button.textContent = texts.copied;
  announcement.textContent = texts.copied;
  setTimeout(() => (button.textContent = label), 2000);
}

function addCopyButtons(within) {
  for (const block of within.querySelectorAll("pre")) {
    const text = block.textContent.trimEnd();
    const button = Object.assign(document.createElement("button"), { type: "button", className: "copy", textContent: texts.copy });
    button.lang = document.documentElement.lang;
    button.addEventListener("click", () => copyFrom(button, text));
    block.prepend(button);
  }
}

// A ticket is a page of text. The line of evidence is added in the browser and never sent.
document.addEventListener("click", async (event) => {
  const link = event.target.closest?.("a.ticket");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  try {
    const answer = await fetch(link.href);
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const { evidence } = link.dataset;
    await copyFrom(link, (await answer.text()) + (evidence ? `\n${texts.evidence}: ${evidence}\n` : ""));
  } catch {
    location.assign(link.href);
  }
});

// Diagnose without leaving the page; a dropped log is diagnosed at once.
function diagnoseHere(form) {
  const zone = form.querySelector(".drop");
  const input = form.querySelector("input[type=file]");
  const button = form.querySelector("button");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const size = [...input.files].reduce((sum, file) => sum + file.size, 0);
    if (size > Number(form.dataset.most)) return showError(texts.tooLarge);
    button.disabled = true;
    byId("results").setAttribute("aria-busy", "true");
    announcement.textContent = texts.reading;
    try {
      const results = await show(form.action, { method: "POST", body: new FormData(form) });
      announcement.textContent = texts.done;
      results.focus();
      results.scrollIntoView({ block: "start" });
    } catch {
      showError(texts.unreachable);
    }
    button.disabled = false;
  });
  form.addEventListener("dragover", (event) => {
    event.preventDefault();
    zone.classList.add("over");
  });
  form.addEventListener("dragleave", () => zone.classList.remove("over"));
  form.addEventListener("drop", (event) => {
    event.preventDefault();
    zone.classList.remove("over");
    if (!event.dataTransfer.files.length) return;
    input.files = event.dataTransfer.files;
    form.requestSubmit();
  });
}

addCopyButtons(document);
document.querySelectorAll("form.ask").forEach(searchAsYouType);
document.querySelectorAll("form.log").forEach(diagnoseHere);
