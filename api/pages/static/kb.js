// Enhancements of pages that work without scripts: search as you type, copy buttons, drag and drop of logs.
"use strict";

document.documentElement.classList.add("js");

const byId = (id) => document.getElementById(id);
const announcement = byId("announcement");

// Fetch a page and replace our results by its own. Throws when there is no response.
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

// Search as you type: the last question wins and becomes the address.
function searchAsYouType(form) {
  let timer, asking;
  const ask = async () => {
    asking?.abort();
    asking = new AbortController();
    const given = [...new FormData(form)].filter(([, value]) => value);
    const url = `/?${new URLSearchParams(given)}`;
    byId("results").setAttribute("aria-busy", "true");
    try {
      const results = await show(url, { signal: asking.signal });
      history.replaceState(null, "", url);
      announcement.textContent = results.dataset.announcement ?? "";
    } catch (error) {
      if (error.name === "AbortError") return;
      showError("The service does not answer. Try again in a moment.");
    }
  };
  form.addEventListener("input", (event) => {
    clearTimeout(timer);
    timer = setTimeout(ask, event.target.type === "search" ? 180 : 0);
  });
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = Object.assign(document.createElement("textarea"), { value: text }); // plain http on another machine
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

function addCopyButtons(within) {
  for (const block of within.querySelectorAll("pre")) {
    const text = block.textContent.trimEnd();
    const button = Object.assign(document.createElement("button"), { type: "button", className: "copy", textContent: "Copy", lang: "en" });
    button.addEventListener("click", async () => {
      await copy(text);
      button.textContent = "Copied";
      announcement.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 2000);
    });
    block.prepend(button);
  }
}

// Diagnose without leaving the page; a dropped log is diagnosed at once.
function diagnoseHere(form) {
  const zone = form.querySelector(".drop");
  const input = form.querySelector("input[type=file]");
  const button = form.querySelector("button");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const size = [...input.files].reduce((sum, file) => sum + file.size, 0);
    if (size > Number(form.dataset.most)) return showError("These logs are larger than a page can take. `kb diagnose` reads files of any size.");
    button.disabled = true;
    byId("results").setAttribute("aria-busy", "true");
    announcement.textContent = "Reading the log";
    try {
      const results = await show(form.action, { method: "POST", body: new FormData(form) });
      announcement.textContent = "Done";
      results.focus();
      results.scrollIntoView({ block: "start" });
    } catch {
      showError("The service does not answer. Try again in a moment.");
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
