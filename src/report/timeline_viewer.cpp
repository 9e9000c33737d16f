#include "report/timeline_viewer.hpp"

#include <nlohmann/json.hpp>

#include "base/utf8.hpp"
#include "report/axis.hpp"
#include "report/canvas.hpp"

namespace lockstep {

std::string timeline_json(const Timeline& timeline) {
  using nlohmann::json;
  json rows = json::array();
  for (const auto& row : timeline.rows) {
    json spans = json::array();
    for (const auto& span : row.spans) {
      const bool drawn =
          is_plottable(span.begin_ms) && is_plottable(span.end_ms) && span.end_ms >= span.begin_ms;
      if (!drawn) continue;
      const auto colour = static_cast<size_t>(std::max(0, span.colour));
      spans.push_back(
          {{"name", clean_text(span.name)},
           {"begin", span.begin_ms},
           {"end", span.end_ms},
           {"colour", palette_index(span.colour)},
           {"kind", colour < timeline.legend.size() ? clean_text(timeline.legend[colour]) : ""}});
    }
    rows.push_back({{"label", clean_text(row.label)}, {"spans", std::move(spans)}});
  }
  std::string text = json{{"rows", std::move(rows)}}.dump();
  std::string escaped;
  for (const char c : text) {
    if (c == '<') {
      escaped += "\\u003c";
    } else {
      escaped += c;
    }
  }
  return escaped;
}

const char* viewer_style() {
  return R"(
.viewer{position:relative}
.viewer .tools{display:flex;flex-wrap:wrap;align-items:center;gap:.3rem .4rem;margin:.2rem 0 .4rem;
font-size:.82rem;color:var(--muted)}
.viewer button{font:inherit;color:var(--ink);background:var(--paper);border:1px solid var(--grid);
border-radius:.3rem;min-width:2rem;padding:.15rem .5rem;cursor:pointer}
.viewer button:hover{border-color:var(--muted)}
.viewer button:focus-visible,.viewer .view:focus-visible{outline:2px solid #0072b2;
outline-offset:1px}
.viewer .range{margin-left:.3rem;font-variant-numeric:tabular-nums}
.viewer .kinds{display:flex;flex-wrap:wrap;gap:.2rem .9rem;margin-left:auto;color:var(--ink)}
.viewer .kinds svg{display:inline-block;width:18px;height:10px;min-width:0}
.viewer .view{display:block;cursor:grab;touch-action:pan-y;border-radius:.2rem;overflow:hidden}
.viewer .view:active{cursor:grabbing}
.viewer .view svg{min-width:0}
.viewer .picked{stroke:var(--ink);stroke-width:2}
.viewer output{display:block;color:var(--muted);min-height:1.6em;font-size:.82rem;margin-top:.2rem;
font-variant-numeric:tabular-nums}
figure.timeline.live .static{display:none}
@media print{.viewer{display:none}figure.timeline.live .static{display:block}}
)";
}

// The script reads the times from the JSON beside each picture. The namespace of SVG comes from the
// picture itself.
const char* viewer_script() {
  return R"js((function () {
"use strict";
const ROW = 24, BAR = 18, AXIS = 22, NARROW = 560, MOST_ZOOM = 5000;

const number = value => String(+value.toPrecision(4));
function time(ms) {
  const size = Math.abs(ms);
  if (size === 0) return "0 ms";
  if (size < 1e-3) return number(ms * 1e6) + " ns";
  if (size < 1) return number(ms * 1e3) + " µs";
  return size < 1000 ? number(ms) + " ms" : number(ms / 1000) + " s";
}
function step(length, wanted) {
  const power = Math.pow(10, Math.floor(Math.log10(length / wanted)));
  return [1, 2, 5, 10].map(factor => factor * power).find(value => length / value <= wanted);
}
function html(parent, tag, attributes, text) {
  const element = document.createElement(tag);
  for (const name in attributes) element.setAttribute(name, attributes[name]);
  if (text) element.textContent = text;
  parent.appendChild(element);
  return element;
}

function view_timeline(figure) {
  const picture = figure.querySelector(".static svg");
  const rows = JSON.parse(figure.querySelector("script").textContent).rows;
  const spans = rows.flatMap((row, index) => row.spans.map(span => ({...span, row: index})));
  if (!spans.length) return;
  spans.sort((a, b) => a.begin - b.begin || a.row - b.row);
  const first = Math.min(...spans.map(span => span.begin));
  const last = Math.max(...spans.map(span => span.end));
  const whole = Math.max(last - first, 1e-9);
  const title = picture.querySelector("title").textContent;
  let from = first, to = first + whole, picked = -1;

  const viewer = html(figure, "div", {class: "viewer"});
  figure.insertBefore(viewer, figure.firstChild);
  html(viewer, "strong", {}, title);
  const tools = html(viewer, "div", {class: "tools", role: "toolbar", "aria-label": "Zoom of " + title});
  const view = html(viewer, "div", {class: "view", tabindex: "0", role: "group", "aria-label": title +
    ". Keys: plus and minus zoom, arrows move, 0 shows everything, N and P go from bar to bar."});
  const detail = html(viewer, "output", {"aria-live": "polite"}, "");
  const hint = "Wheel after a click, or + and −: zoom. Drag or arrows: move. N, P: from bar to bar.";
  function svg(parent, tag, attributes, text) {
    const element = document.createElementNS(picture.namespaceURI, tag);
    for (const name in attributes) element.setAttribute(name, attributes[name]);
    if (text) element.textContent = text;
    parent.appendChild(element);
    return element;
  }

  function describe(span) {
    const kind = span.kind ? ", " + span.kind.replace(/^.*: /, "") : "";
    return rows[span.row].label + ": " + span.name + kind + ", " + time(span.begin) + " to " +
      time(span.end) + " (" + time(span.end - span.begin) + ")";
  }
  function tell(index) {
    detail.textContent = index < 0 ? hint : describe(spans[index]);
  }
  let plot = {left: 0, width: 1};
  function draw() {
    const width = Math.max(200, view.clientWidth), narrow = width < NARROW;
    const row_height = narrow ? ROW + 14 : ROW;
    const labels = narrow ? 0 : Math.min(width * 0.28,
      12 + 7 * Math.max(...rows.map(row => row.label.length)));
    const height = rows.length * row_height + AXIS;
    plot = {left: labels, width: width - labels - 2};
    const x = ms => plot.left + (ms - from) / (to - from) * plot.width;
    view.textContent = "";
    const canvas = svg(view, "svg", {viewBox: "0 0 " + width + " " + height, width: width,
      height: height, "aria-hidden": "true"});
    const grid = step(to - from, Math.max(2, plot.width / 90));
    for (let tick = Math.ceil(from / grid) * grid; tick <= to; tick += grid) {
      svg(canvas, "path", {class: "l s-grid", d: "M" + x(tick) + " 0V" + (height - AXIS)});
      const label = time(Math.abs(tick) < grid / 1e6 ? 0 : tick);
      const at = Math.min(Math.max(x(tick), plot.left + 4 * label.length), width - 4 * label.length);
      svg(canvas, "text", {class: "muted", x: at, y: height - 6, "font-size": 12,
        "text-anchor": "middle"}, label);
    }
    rows.forEach((row, index) => {
      const y = index * row_height + (narrow ? 11 : 16);
      const most = narrow ? 60 : Math.floor((labels - 8) / 6.4);
      const label = row.label.length > most ? row.label.slice(0, most - 1) + "…" : row.label;
      svg(canvas, "text", {class: "ink", x: narrow ? 0 : labels - 8, y: y, "font-size": 12,
        "text-anchor": narrow ? "start" : "end"}, label);
    });
    spans.forEach((span, index) => {
      if (span.end < from || span.begin > to) return;
      const left = Math.max(x(span.begin), plot.left);
      const right = Math.min(Math.max(x(span.end), left + 1), plot.left + plot.width);
      if (right <= left) return;
      const y = span.row * row_height + (narrow ? 16 : 3);
      svg(canvas, "rect", {class: "bar c" + span.colour + (index === picked ? " picked" : ""), x: left,
        y: y, width: Math.max(1, right - left - 0.5), height: BAR, "data-span": index});
      if (right - left > 8 + 7 * span.name.length) {
        svg(canvas, "text", {class: span.colour === 0 ? "light" : "dark", x: (left + right) / 2,
          y: y + 13, "font-size": 11, "text-anchor": "middle", "pointer-events": "none"}, span.name);
      }
    });
    range.textContent = time(from) + " to " + time(to);
    viewer.dataset.from = from;
    viewer.dataset.to = to;
  }
  function show(begin, length) {
    length = Math.min(whole, Math.max(whole / MOST_ZOOM, length));
    from = Math.min(Math.max(first, begin), first + whole - length);
    to = from + length;
    draw();
  }
  function zoom(factor, share) {
    const length = Math.min(whole, Math.max(whole / MOST_ZOOM, (to - from) * factor));
    show(from + share * (to - from - length), length);
  }
  const pan = share => show(from + share * (to - from), to - from);
  function pick(index) {
    picked = Math.min(Math.max(index, 0), spans.length - 1);
    const span = spans[picked];
    if (span.begin < from || span.end > to) show((span.begin + span.end - (to - from)) / 2, to - from);
    else draw();
    tell(picked);
  }

  for (const [label, text, act] of [["Zoom in", "+", () => zoom(0.5, 0.5)],
    ["Zoom out", "−", () => zoom(2, 0.5)], ["Earlier", "←", () => pan(-0.25)],
    ["Later", "→", () => pan(0.25)], ["Show everything", "all", () => show(first, whole)]]) {
    html(tools, "button", {type: "button", "aria-label": label, title: label}, text)
      .addEventListener("click", act);
  }
  const range = html(tools, "span", {class: "range"});
  const kinds = new Map(spans.filter(span => span.kind).map(span => [span.kind, span.colour]));
  const legend = html(tools, "span", {class: "kinds"});
  kinds.forEach((colour, kind) => {
    const entry = html(legend, "span", {});
    svg(svg(entry, "svg", {width: 18, height: 10, "aria-hidden": "true"}), "rect",
      {class: "c" + colour, width: 18, height: 10});
    entry.append(" " + kind);
  });

  const share_at = event =>
    (event.clientX - view.getBoundingClientRect().left - plot.left) / plot.width;
  view.addEventListener("wheel", event => {
    if (document.activeElement !== view && !event.ctrlKey) return;  // the page scrolls
    event.preventDefault();
    zoom(Math.pow(1.0015, event.deltaY), Math.min(1, Math.max(0, share_at(event))));
  }, {passive: false});
  let drag = null;
  view.addEventListener("pointerdown", event => {
    drag = {x: event.clientX, from: from};
    view.setPointerCapture(event.pointerId);
  });
  view.addEventListener("pointermove", event => {
    if (drag) {
      show(drag.from - (event.clientX - drag.x) / plot.width * (to - from), to - from);
    } else if (event.target.dataset.span) {
      tell(+event.target.dataset.span);
    }
  });
  for (const end of ["pointerup", "pointercancel"]) view.addEventListener(end, () => { drag = null; });
  view.addEventListener("pointerleave", () => tell(picked));
  view.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {"+": () => zoom(0.5, 0.5), "=": () => zoom(0.5, 0.5), "-": () => zoom(2, 0.5),
      "0": () => show(first, whole), Home: () => show(first, whole), ArrowLeft: () => pan(-0.25),
      ArrowRight: () => pan(0.25), n: () => pick(picked + 1), p: () => pick(picked - 1)}[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  figure.classList.add("live");
  tell(-1);
  draw();
  let width = view.clientWidth;
  new ResizeObserver(() => {
    if (view.clientWidth === width) return;
    width = view.clientWidth;
    draw();
  }).observe(view);
}

document.querySelectorAll("figure.timeline").forEach(view_timeline);
})();
)js";
}

}  // namespace lockstep
