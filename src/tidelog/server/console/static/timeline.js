// The timeline of a topic: bars that zoom by dragging, and by keys.
"use strict";

(() => {
  const box = document.getElementById("timeline");
  const told = document.getElementById("timeline-says");
  const look = document.getElementById("timeline-look");
  const play = document.getElementById("timeline-play");
  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 1200, HEIGHT = 150, LOW = 60;   // bars of events, and of bytes below them
  let data = null;       // what was answered last
  let range = null;      // [start, end] that is shown; null: all
  let chosen = null;     // [first bar, last bar]
  let anchor = null;     // where a drag, or a choice by keys, began
  let asked = 0;

  const iso = (ms) => new Date(ms).toISOString();
  const shown = (ms) => localTime(iso(ms));   // as all times of the console
  const many = (n) => n.toLocaleString("en");
  const size = (bytes) => {
    const at = Math.min(4, Math.floor(Math.log2(Math.max(1, bytes)) / 10));
    const amount = bytes / 1024 ** at;
    return `${at && amount < 100 ? amount.toFixed(1) : Math.round(amount)} ${["B", "KiB", "MiB", "GiB", "TiB"][at]}`;
  };
  const unit = (ms) => ms < 1000 ? `${ms} ms` : ms < 60000 ? `${ms / 1000} s` : ms < 3600000 ? `${ms / 60000} min` : ms < 86400000 ? `${ms / 3600000} h` : `${ms / 86400000} d`;
  const make = (name, attributes) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };

  const span = () => chosen && data
    ? [data.start + Math.min(...chosen) * data.width, data.start + (Math.max(...chosen) + 1) * data.width]
    : range || (data && data.first !== null ? [data.first, data.last + 1] : null);

  const tell = () => {
    if (!data) return;
    const sum = (values) => (chosen ? values.slice(Math.min(...chosen), Math.max(...chosen) + 1) : values).reduce((all, each) => all + each, 0);
    const [total, bytes] = [sum(data.counts), sum(data.sizes)];
    const at = span();
    const how = data.exact ? "" : "about ";
    const rest = data.whole ? "" : "; older runs are still being read";
    told.textContent = at
      ? `${how}${many(total)} ${total === 1 ? "event" : "events"} from ${shown(at[0])} to ${shown(at[1])}, bars of ${unit(data.width)}; about ${size(bytes)} before compression${rest}`
      : "There is no event yet.";
    if (at) {
      told.title = `${iso(at[0])} to ${iso(at[1])} (UTC)`;
      const query = new URLSearchParams({ by: "time", start: iso(at[0]), end: iso(at[1]) });
      look.href = `${box.dataset.events}?${query}`;
      if (play) {
        document.getElementById("play-start").value = shown(at[0]);
        document.getElementById("play-end").value = shown(at[1]);
      }
    }
  };

  const bars = (values, height, words) => {
    // One or two large bars would flatten all others: bars beyond 8 times the usual height are cut.
    const usual = values.filter((value) => value).sort((one, other) => one - other);
    const high9 = usual.length > 4 ? usual[Math.min(Math.floor((usual.length - 1) * 0.9), usual.length - 3)] : 1;
    const highest = Math.max(1, ...values);
    const most = usual.length > 4 && highest > 8 * high9 ? 2 * high9 : highest;
    const each = WIDTH / values.length;
    const picture = make("svg", { viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    picture.append(make("rect", { class: "all", x: 0, y: 0, width: WIDTH, height }));
    values.forEach((value, at) => {
      if (!value) return;
      const isCut = value > most;
      const high = isCut ? height - 1 : Math.max(2, value * (height - 8) / most);
      const on = chosen && at >= Math.min(...chosen) && at <= Math.max(...chosen);
      const bar = make("rect", { class: `bar${on ? " on" : ""}${isCut ? " cut" : ""}`, x: (at * each + each * 0.08).toFixed(2), y: (height - high).toFixed(2), width: (each * 0.84).toFixed(2), height: high.toFixed(2) });
      const title = make("title", {});
      title.textContent = `${words(value)} from ${shown(data.start + at * data.width)}`;
      bar.append(title);
      picture.append(bar);
      if (isCut) picture.append(make("rect", { class: "break", x: (at * each).toFixed(2), y: 14, width: each.toFixed(2), height: 4 }));
    });
    if (chosen) {
      const first = Math.min(...chosen), last = Math.max(...chosen) + 1;
      picture.append(make("rect", { class: "chosen", x: first * each, y: 0, width: (last - first) * each, height }));
    }
    const top = document.createElement("p");
    top.className = "most";
    top.textContent = most < highest ? `up to ${words(most)} a bar; the largest has ${words(highest)} and is cut` : `up to ${words(Math.max(0, ...values))} a bar`;
    return [top, picture];
  };

  const draw = () => {
    if (data.first === null && !range) {   // an empty topic has no times to show
      box.replaceChildren();
      tell();
      return;
    }
    const how = data.exact ? "" : "about ";
    const events = bars(data.counts, HEIGHT, (count) => `${how}${many(count)} ${count === 1 ? "event" : "events"}`);
    const bytes = bars(data.sizes, LOW, (value) => `about ${size(value)}`);
    bytes[1].classList.add("low");
    const axis = document.createElement("div");
    axis.className = "axis";
    const labels = innerWidth < 700 ? 2 : 4;
    for (let at = 0; at <= labels; at += 1) {
      const label = document.createElement("span");
      const text = shown(data.start + (data.end - data.start) * at / labels);
      label.textContent = data.end - data.start > 2 * 86400000 ? text.slice(0, 10) : data.width < 1000 ? text.slice(11, 23) : text.slice(5, 19).replace("T", " ");
      axis.append(label);
    }
    box.replaceChildren(...events, ...bytes, axis);
    tell();
  };

  const load = async () => {
    const mine = ++asked;
    const query = range ? `?start=${Math.floor(range[0])}&end=${Math.ceil(range[1])}` : "";
    try {
      const answer = await fetch(box.dataset.from + query, { cache: "no-store" });
      const found = await answer.json();
      if (mine !== asked) return;
      if (!answer.ok) { told.textContent = found.error.message; return; }
      const moved = !data || ["start", "width", "end"].some((each) => found[each] !== data[each]);
      if (!chosen || !moved) { data = found; draw(); }   // what is chosen are the bars that are shown
      if (!found.whole) setTimeout(load, 300);
    } catch { told.textContent = "The server does not answer just now."; }
  };

  const show = (start, end, remember = true) => {
    range = start === null ? null : [Math.max(0, start), Math.max(start + 1, end)];
    chosen = anchor = null;
    if (remember) {
      const query = range ? `?start=${encodeURIComponent(iso(range[0]))}&end=${encodeURIComponent(iso(range[1]))}` : location.pathname;
      history.pushState(null, "", query);
    }
    load();
  };

  const zoomIn = () => { const at = chosen && span(); if (at) show(at[0], at[1]); };
  const zoomOut = () => {
    if (!data) return;
    const middle = (data.start + data.end) / 2, half = data.end - data.start;
    const [first, last] = [data.first ?? middle, (data.last ?? middle) + 1];
    if (middle - half <= first && middle + half >= last) show(null);
    else show(Math.floor(middle - half), Math.ceil(middle + half));
  };

  const barAt = (event) => {
    const where = box.querySelector("svg").getBoundingClientRect();
    const at = Math.floor((event.clientX - where.left) / where.width * data.counts.length);
    return Math.min(data.counts.length - 1, Math.max(0, at));
  };
  box.addEventListener("pointerdown", (event) => {
    if (!data || event.button) return;
    anchor = barAt(event);
    chosen = [anchor, anchor];
    box.setPointerCapture(event.pointerId);
    draw();
  });
  box.addEventListener("pointermove", (event) => {
    if (anchor === null || !data || !box.hasPointerCapture(event.pointerId)) return;
    chosen = [anchor, barAt(event)];
    draw();
  });
  box.addEventListener("pointerup", (event) => {
    if (anchor === null || !data) return;
    const dragged = chosen[0] !== barAt(event);
    chosen = [chosen[0], barAt(event)];
    anchor = null;
    if (dragged) zoomIn(); else draw();   // a click chooses one bar
  });
  box.addEventListener("dblclick", zoomIn);
  box.addEventListener("keydown", (event) => {
    if (!data) return;
    const last = data.counts.length - 1;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };
    if (event.key in moves) {
      event.preventDefault();
      const from = chosen ? chosen[1] : (moves[event.key] > 0 ? -1 : last + 1);
      const to = Math.min(last, Math.max(0, from + moves[event.key]));
      chosen = event.shiftKey && chosen ? [chosen[0], to] : [to, to];
      draw();
    } else if (event.key === "Enter") { event.preventDefault(); zoomIn(); }
    else if (event.key === "-") zoomOut();
    else if (event.key === "Escape") { if (chosen) { chosen = null; draw(); } else show(null); }
  });
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => {
      const how = button.dataset.zoom;
      if (how === "out") zoomOut();
      else if (how === "all") show(null);
      else if (data) show(data.now - Number(how), data.now);
    });
  }
  play?.addEventListener("click", () => {
    const form = document.getElementById("playback");
    form.open = true;
    form.querySelector('[name="target"]').focus();
    tell();
  });
  const fromAddress = () => {
    const query = new URLSearchParams(location.search);
    const [start, end] = [Date.parse(query.get("start")), Date.parse(query.get("end"))];
    if (Number.isFinite(start) && Number.isFinite(end)) show(start, end, false); else show(null, 0, false);
  };
  addEventListener("popstate", fromAddress);
  addEventListener("resize", () => { if (data) draw(); });
  fromAddress();
  setInterval(() => { if (!document.hidden && range === null && chosen === null) load(); }, 5000);
})();
