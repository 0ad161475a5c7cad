// What all pages share: light and dark, figures that keep up, copying, and keys.
"use strict";

const says = (text) => {
  const box = document.getElementById("says");
  box.textContent = text;
  clearTimeout(says.timer);
  says.timer = setTimeout(() => { box.textContent = ""; }, 2500);
};

// Light and dark: as the system has it, until the user chooses.
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  document.cookie = `tidelog_theme=${root.dataset.theme}; path=/; max-age=31536000; samesite=strict`;
});

// Times in the reader's own zone; the time in UTC is the title.
const pad = (number, digits = 2) => String(number).padStart(digits, "0");
const localTime = (iso) => {
  const at = new Date(iso);
  if (Number.isNaN(at.getTime()) || at.getTimezoneOffset() === 0) return iso;
  const away = -at.getTimezoneOffset();
  const zone = `${away < 0 ? "-" : "+"}${pad(Math.floor(Math.abs(away) / 60))}:${pad(Math.abs(away) % 60)}`;
  return `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())} ${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}.${pad(at.getMilliseconds(), 3)} ${zone}`;
};
const showLocalTimes = (root) => {
  for (const each of root.querySelectorAll("time[datetime]:not([data-ago])")) {
    each.title = `${each.dateTime} (UTC)`;
    const text = localTime(each.dateTime);
    each.textContent = each.dataset.part ? text.slice(...each.dataset.part.split(",")).replace("T", " ") : text;
  }
  for (const each of root.querySelectorAll("[data-times]")) {   // times within a text
    const text = each.textContent.replace(/\d{4}-\d\d-\d\dT[\d:.]+Z/g, localTime);
    if (text !== each.textContent) { each.title = each.textContent; each.textContent = text; }
  }
};
showLocalTimes(document);

// Fields for times: in the reader's own zone too, unless the text names another; sent in UTC.
const TIME = /^\s*(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d(?::\d\d(?:\.\d+)?)?))?\s*(Z|[+-]\d\d:\d\d)?\s*$/i;
const utcTime = (text) => {
  const found = TIME.exec(text);
  if (!found) return text;   // such as -15m: the server reads it
  const at = new Date(`${found[1]}T${found[2] || "00:00"}${found[3] || ""}`);
  return Number.isNaN(at.getTime()) ? text : at.toISOString();
};
for (const each of document.querySelectorAll("[data-time]")) {
  if (TIME.test(each.value)) each.value = localTime(utcTime(each.value));
}
for (const each of document.querySelectorAll("[data-zone]")) {
  each.textContent = new Intl.DateTimeFormat().resolvedOptions().timeZone || "your time zone";
}
document.addEventListener("formdata", (event) => {
  for (const each of event.target.querySelectorAll("[data-time]")) event.formData.set(each.name, utcTime(each.value));
});

// Parts of the page that keep up: the same page is asked for again, and they are replaced.
const LIVE_MS = 3000;
const live = [...document.querySelectorAll("[data-live]")].map((part) => part.id);
const keepUp = async () => {
  const held = live.some((id) => document.getElementById(id)?.contains(document.activeElement) && document.activeElement.matches("input, select, textarea, button, summary"));
  const chosen = String(getSelection() || "");
  if (!document.hidden && !held && !chosen) {
    try {
      const answer = await fetch(location.href, { headers: { accept: "text/html" }, cache: "no-store" });
      if (answer.status === 401) { location.reload(); return; }
      if (answer.ok) {
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
        for (const id of live) {
          const now = document.getElementById(id);
          const then = fresh.getElementById(id);
          if (now && then && !now.querySelector("details[open]")) {
            const focused = now.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
            showLocalTimes(then);
            now.replaceChildren(...then.childNodes);
            if (focused) now.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
          }
        }
      }
    } catch { /* the server is away; the next time may do */ }
  }
  setTimeout(keepUp, LIVE_MS);
};
if (live.length && !(document.querySelector("main form input:not([type=hidden])[autofocus]"))) setTimeout(keepUp, LIVE_MS);

// Copying: what an element shows, or what an address gives.
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy], [data-copy-from]");
  if (!button) return;
  try {
    const text = button.dataset.copyFrom
      ? await (await fetch(button.dataset.copyFrom)).text()
      : document.getElementById(button.dataset.copy).textContent;
    await navigator.clipboard.writeText(text);
    says("Copied");
  } catch {
    says("The browser does not let this page copy");
  }
});

// A table as lines of tab-separated values, for spreadsheets. These would run a text that begins like a formula.
const plain = (text) => (/^[=+@-]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text);
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy-table]");
  if (!button) return;
  const rows = [...document.getElementById(button.dataset.copyTable).rows];
  const text = rows.map((row) => [...row.cells].map((cell) => plain(cell.textContent.replaceAll(/[\t\n]/g, " "))).join("\t")).join("\n");
  try { await navigator.clipboard.writeText(text); says("Copied"); } catch { says("The browser does not let this page copy"); }
});

// Ctrl+Enter sends the form of a text.
for (const each of document.querySelectorAll("[data-submit]")) {
  each.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); each.form.requestSubmit(); }
  });
}

// Choices that need no button.
for (const each of document.querySelectorAll("[data-send]")) each.addEventListener("change", () => each.form.requestSubmit());

// Keys: / to the search, n and p through pages, g and a letter to a page.
let before = "";
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  const places = { go: "/", gt: "/console/topics", gc: "/console/consumers", ga: "/console/archives", gj: "/console/jobs", gs: "/console/sql" };
  const place = places[before + event.key];
  before = event.key === "g" ? "g" : "";
  if (place) { location.assign(place); return; }
  if (event.key === "/") {
    const search = document.querySelector('[data-hot="/"]');
    if (search) { event.preventDefault(); search.focus(); search.select(); }
  } else if (event.key === "n") document.querySelector('a[rel="next"]')?.click();
  else if (event.key === "p") document.querySelector('a[rel="prev"]')?.click();
});

// Every link or button that needs the tail of events opens it.
if (location.hash === "#tail") addEventListener("load", () => document.getElementById("tail-switch")?.click());
