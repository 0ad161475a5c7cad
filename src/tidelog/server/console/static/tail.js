// The tail of a topic: events as they come, the newest first. All that they hold is put in as text.
"use strict";

(() => {
  const box = document.getElementById("tail");
  const button = document.getElementById("tail-switch");
  const told = document.getElementById("tail-says");
  const rows = document.getElementById("tail-rows");
  const filter = document.getElementById("tail-filter");
  const table = rows.closest("table");
  const MOST = 300, SHOWN = 240;
  let stream = null, count = 0, waiting = [];

  const unseen = /(?![\n\t])[\p{C}\p{Zl}\p{Zp}]/gu;   // as the server's pages have it
  const visible = (text) => text.replace(unseen, (char) => `\\u{${char.codePointAt(0).toString(16)}}`);
  const hex = (text) => [...atob(text.slice(0, 80))].map((char) => char.charCodeAt(0).toString(16).padStart(2, "0")).join(" ");
  const short = (value) => {
    if (value === null) return "";
    const text = typeof value === "string" ? visible(value.slice(0, 4 * SHOWN)) : hex(value.base64);
    return text.length > SHOWN || value.length > 4 * SHOWN ? `${text.slice(0, SHOWN)}…` : text;
  };
  const cell = (name, label, child, kind) => {
    const made = document.createElement(name);
    if (label) made.dataset.label = label;
    if (kind) { const inner = document.createElement("bdi"); inner.className = kind; inner.textContent = child; made.append(inner); }
    else made.append(child);
    return made;
  };

  const row = (event) => {
    const made = document.createElement("tr");
    made.className = "new";
    const link = document.createElement("a");
    link.href = `${box.dataset.event}/${event.partition}/${event.offset}`;
    link.textContent = `${event.partition}/${event.offset}`;
    const value = event.value === null ? "tombstone" : short(event.value);
    const time = document.createElement("time");
    time.dateTime = event.timestamp;
    time.title = `${event.timestamp} (UTC)`;
    time.textContent = localTime(event.timestamp);
    made.append(cell("th", "", link), cell("td", "time", time), cell("td", "key", short(event.key), "value"), cell("td", "value", value, "value"));
    return made;
  };

  const flush = () => {
    if (waiting.length) {
      rows.prepend(...waiting.reverse().map(row));
      waiting = [];
      while (rows.children.length > MOST) rows.lastElementChild.remove();
      table.hidden = false;
    }
    if (stream?.readyState === EventSource.OPEN) told.textContent = count ? `${count.toLocaleString("en")} events since you began to follow; the newest ${Math.min(MOST, rows.children.length)} are shown.` : "Waiting for events …";
  };

  const start = () => {
    stream = new EventSource(`${box.dataset.from}?from=latest`);
    stream.addEventListener("message", (message) => {
      count += 1;
      const wanted = filter.value.toLowerCase();
      if (wanted && !message.data.toLowerCase().includes(wanted)) return;
      waiting.push(JSON.parse(message.data));
      if (waiting.length > MOST) waiting.shift();
    });
    stream.addEventListener("error", (message) => {
      if (message.data) { const text = JSON.parse(message.data).error.message; stop(); told.textContent = text; }
      else if (stream?.readyState === EventSource.CLOSED) { stop(); told.textContent = "The server has ended the tail: follow again, or load the page again."; }
      else told.textContent = "The server is away; trying again …";
    });
    stream.addEventListener("open", flush);
    button.textContent = "Pause";
    button.setAttribute("aria-pressed", "true");
    told.textContent = "Connecting …";
  };
  const stop = () => {
    stream?.close();
    stream = null;
    button.textContent = "Follow";
    button.setAttribute("aria-pressed", "false");
  };

  button.addEventListener("click", () => { if (stream) { flush(); stop(); } else start(); });
  document.getElementById("tail-clear").addEventListener("click", () => { rows.replaceChildren(); waiting = []; count = 0; table.hidden = true; });
  addEventListener("pagehide", stop);
  setInterval(flush, 250);
})();
