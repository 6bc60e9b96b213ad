// The page of `rl view`. No framework: `h` makes elements, each view fills <main>, the address (#view?key=value) is the
// state. Text of a run reaches the document as text only.
"use strict";

const COLORS = ["#4a78d6", "#dd7a2a", "#2f9e78", "#c2519f", "#8a77e6", "#b8951f", "#3a9fc4", "#d05c5c"];
const POLL_SECONDS = 3, POINTS = 500, TOKENS = 3000;
const CHARTS = [
  ["Reward", "orchestrator:reward/mean"], ["Reward of", /^orchestrator:reward\/(?!mean$)[^/]+\/mean$/],
  ["Evaluation", /^orchestrator:eval\/.*\/avg@\d+$/],
  ["Loss", "trainer:loss/mean"], ["Entropy", "trainer:entropy/all/mean"],
  ["KL, sampler to policy", "trainer:mismatch_kl/all/mean"], ["KL to reference", "trainer:ref_kl/mean"],
  ["Reply length, tokens", "orchestrator:num_output_tokens/mean"], ["Cut off, share", "orchestrator:is_truncated/mean"],
  ["Gradient norm", "trainer:optim/grad_norm"], ["Trained, tokens/s", "trainer:perf/throughput"],
  ["Sampled, tokens/s", "orchestrator:perf/throughput"], ["Step, seconds", "trainer:time/step"],
  ["Off-policy steps", "orchestrator:off_policy/mean"], ["Failed episodes, share", "orchestrator:errors/rate"],
  ["All attempts solved, share", "orchestrator:solved_all"], ["Learning rate", "trainer:optim/lr"],
];
const PARTS = {  // of a step's seconds: label, colour, from the columns of its row
  trainer: [
    ["forward and backward", "#4a78d6", (row) => row["time/forward_backward"]], ["optimizer", "#3a9fc4", (row) => row["time/optimizer"]],
    ["waits for a batch", "#b8bcc4", (row) => Math.max(0, row["time/wait_for_batch"] - row["time/read_batch"])],
    ["reads the batch", "#8a77e6", (row) => row["time/read_batch"]],
      ["weight sync", "#dd7a2a", (row) => row["time/export"] + row["time/logprob_check"]],
    ["checkpoint", "#c2519f", (row) => row["time/save_ckpt"]]],
  orchestrator: [
    ["engines: no episode in flight", "#b8bcc4", (row) => row["time/idle"]],
      ["engines: load weights", "#dd7a2a", (row) => row["time/update_pause"]],
    ["engines sample", "#2f9e78", (row) => Math.max(0, row["time/step"] - row["time/idle"] - row["time/update_pause"])]],
};
const KIND_COLORS = { error: "#d04a40", restart: "#d04a40", warning: "#d69a1e", checkpoint: "#c2519f", start: "#2f9e78", ready: "#2f9e78",
  end: "#8b9099" };
const TITLES = {
  Reward: "mean over the episodes of the batch's groups, also those that a filter leaves out: samples are those that are trained",
  filtered: "the rewards of its group were all equal, or a filter removed it",
  "order in the batch": "as the orchestrator put them into the batch, and as the trainer reads them",
  "All attempts solved, share": "groups of which every attempt has a reward of at least 1",
};

// -- elements and numbers ----------------------------------------------------------------------------------------------

function h(tag, attributes, ...children) {
  const [name, ...classes] = tag.split(".");
  const isSvg = ["svg", "g", "path", "line", "rect", "text", "circle"].includes(name);
  const element = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  if (classes.length) element.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style" && typeof value === "object") for (const one in value) element.style.setProperty(one, value[one]);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}
function number(value, digits = 4) {
  if (value == null || Number.isNaN(value)) return "–";
  const size = Math.abs(value), short = +value.toPrecision(digits);
  const text = size >= 1e7 ? `${short / 1e6} M` : size >= 1000 || Number.isInteger(value) ? Math.round(value).toLocaleString("en")
    : size < 1e-3 ? short.toExponential() : String(short);
  return text.replaceAll("-", "−");
}
const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");
const sum = (values) => values.reduce((one, other) => one + other, 0);

// -- data --------------------------------------------------------------------------------------------------------------

const FILE = JSON.parse(document.getElementById("data")?.textContent || "null");  // of an exported page
const main = document.getElementById("main"), tip = document.getElementById("tip");
let runs = [], drawn = 0, drawnState = "", resized = 0;

async function get(query, params = {}) {
  if (FILE) return fromFile(query, params);
  const entries = Object.entries(params).filter(([, value]) => value !== "" && value != null);
  const response = await fetch(`api/${query}?${new URLSearchParams(entries)}`);
  const data = response.headers.get("content-type")?.includes("json") ? await response.json() : { error: await response.text() };
  if (data.error) throw new Error(data.error);
  return data;
}
function fromFile(query, params) {
  if (query === "runs") return FILE.runs;
  if (query === "series") {
    const every = FILE[`series&run=${params.run}`], [low, high] = [params.low || -Infinity, params.high || Infinity];
    return Object.fromEntries(params.keys.split("|").filter((key) => every[key]).map((key) => {
      const inside = every[key].step.map((step) => step >= low && step <= high);
      const kept = Object.entries(every[key]).map(([name, values]) => [name, values.filter((_, place) => inside[place])]);
      return [key, Object.fromEntries(kept)];
    }));
  }
  const used = { samples: ["step"], sample: ["step", "row"] }[query] || [];
  const key = [query, `run=${params.run}`, ...used.sort().map((name) => `${name}=${params[name]}`)].join("&");
  const data = FILE[key];
  if (data === undefined || data.error) throw new Error(data?.error || "this file does not have it: ask who sent it for the run, or another file");
  return data;
}

function address() {
  const [view, text] = location.hash.slice(1).split("?");
  return { view: VIEWS[view] ? view : "curves", params: Object.fromEntries(new URLSearchParams(text)) };
}
function link(view, params) {
  const entries = Object.entries(params).filter(([, value]) => value !== "" && value != null && value !== false);
  return `#${view}${entries.length ? "?" + new URLSearchParams(entries) : ""}`;
}
function go(changes, view = address().view) {
  location.hash = link(view, { ...(view === address().view ? address().params : {}), ...changes });
}
const hidden = () => new Set((address().params.hide || "").split(",").filter(Boolean).map(Number));
const shownRuns = () =>
  runs.map((run, place) => ({ ...run, place, color: COLORS[place % COLORS.length] })).filter((run) => !hidden().has(run.place));
const current = () => runs[+address().params.run || 0] ? +address().params.run || 0 : 0;

// -- charts ------------------------------------------------------------------------------------------------------------

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough * 0.7);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) {
    found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  }
  return found;
}
function smooth(values, weight) {
  let mean = values[0];
  return weight ? values.map((value) => (mean = weight * mean + (1 - weight) * value)) : values;
}

// Lines over steps. `lines`: {label, color, step, value, min, max}. Drag zooms, a click or Enter opens that step.
function lineChart(lines, { weight = 0, label = "", onzoom, onpick } = {}) {
  const [width, height, left, right, bottom] = [360, 150, 44, 6, 16];
  const drawn = lines.filter((line) => line.step.length).map((line) => ({ ...line, shown: smooth(line.value, weight) }));
  const svg = h("svg.chart", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": label });
  if (!drawn.length) { svg.append(h("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing yet")); return svg; }
  const all = drawn.flatMap((line) => (weight ? line.shown : [...(line.min || line.value), ...(line.max || line.value)]));
  let [low, high] = [all.reduce((a, b) => Math.min(a, b)), all.reduce((a, b) => Math.max(a, b))];
  const margin = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
  [low, high] = [low >= 0 ? Math.max(0, low - margin) : low - margin, high + margin];
  let [first, last] = [Math.min(...drawn.map((line) => line.step[0])), Math.max(...drawn.map((line) => line.step.at(-1)))];
  if (first === last) [first, last] = [first - 1, last + 1];
  const x = (step) => left + (step - first) / (last - first) * (width - left - right);
  const y = (value) => 6 + (high - value) / (high - low) * (height - 6 - bottom);
  const path = (steps, values) =>
    steps.map((step, place) => `${place ? "L" : "M"}${x(step).toFixed(1)} ${y(values[place]).toFixed(1)}`).join("");
  for (const value of ticks(low, high, 4)) svg.append(h("line.axis", { x1: left, x2: width - right, y1: y(value), y2: y(value) }),
    h("text", { x: left - 5, y: y(value) + 3.5, "text-anchor": "end" }, number(+value.toPrecision(6), 3)));
  for (const step of ticks(first, last, 5).filter(Number.isInteger)) svg.append(h("text",
    { x: x(step), y: height - 3, "text-anchor": x(step) > width - 20 ? "end" : "middle" }, number(step)));
  for (const line of drawn) {
    if (line.min && line.min.some((value, place) => value < line.max[place])) svg.append(h("path",
      { d: `${path(line.step, line.max)}${path([...line.step].reverse(), [...line.min].reverse()).replace("M", "L")}Z`, fill: line.color,
      opacity: weight ? 0.1 : 0.2 }));
    else if (weight) svg.append(h("path", { d: path(line.step, line.value), fill: "none", stroke: line.color, opacity: 0.25 }));
    svg.append(h("path", { d: path(line.step, line.shown), fill: "none", stroke: line.color, "stroke-width": 1.5,
      "stroke-linejoin": "round" }));
    if (line.step.length <= 20) svg.append(...line.step.map((step, place) =>
      h("circle", { cx: x(step), cy: y(line.shown[place]), r: 2.5, fill: line.color })));
  }
  const cross = h("line.cross", { y1: 6, y2: height - bottom, visibility: "hidden" });
  const drag = h("rect.drag", { y: 6, height: height - bottom - 6, visibility: "hidden" });
  svg.append(cross, drag);
  const nearest = (line, step) =>
    line.step.reduce((best, one, place) => (Math.abs(one - step) < Math.abs(line.step[best] - step) ? place : best), 0);
  let at = null, from = null;
  const point = (event) => {
    const box = svg.getBoundingClientRect();
    const where = first + ((event.clientX - box.left) / box.width * width - left) / (width - left - right) * (last - first);
    return Math.min(last, Math.max(first, where));
  };
  const look = (step, clientX, clientY) => {
    at = drawn[0].step[nearest(drawn[0], step)];
    for (const line of drawn) { const own = line.step[nearest(line, step)]; if (Math.abs(own - step) < Math.abs(at - step)) at = own; }
    cross.setAttribute("x1", x(at)); cross.setAttribute("x2", x(at)); cross.setAttribute("visibility", "visible");
    showTip(clientX, clientY, h("span.quiet", null, `step ${number(at)}`), drawn.map((line) => {
      const place = nearest(line, at), range = line.min ? ` (${number(line.min[place], 3)} to ${number(line.max[place], 3)})` : "";
      return h("div", null, h("i", { style: { "--color": line.color } }), line.label, h("b", null, number(line.value[place]) + range));
    }));
  };
  const leave = () => { tip.hidden = true; at = from = null; cross.setAttribute("visibility", "hidden");
    drag.setAttribute("visibility", "hidden"); };
  svg.addEventListener("pointerdown", (event) => { from = point(event); svg.setPointerCapture(event.pointerId); });
  svg.addEventListener("pointermove", (event) => {
    look(point(event), event.clientX, event.clientY);
    if (from == null || !onzoom) return;
    const [one, other] = [x(from), x(point(event))];
    drag.setAttribute("x", Math.min(one, other)); drag.setAttribute("width", Math.abs(one - other));
      drag.setAttribute("visibility", "visible");
  });
  svg.addEventListener("pointerup", (event) => {
    const to = point(event), start = from;
    from = null;
    if (start != null && onzoom && Math.abs(x(start) - x(to)) > 5) onzoom(Math.floor(Math.min(start, to)), Math.ceil(Math.max(start, to)));
    else if (at != null && event.pointerType === "mouse") onpick?.(at);
    leave();
  });
  for (const name of ["pointerleave", "pointercancel", "blur"]) svg.addEventListener(name, leave);
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Enter" && at != null) return onpick?.(at);
    if (event.key === "Escape") return onzoom?.("", "");
    if (!move) return;
    event.preventDefault();
    const steps = drawn[0].step, place = at == null ? (move > 0 ? -1 : steps.length) : nearest(drawn[0], at);
    const step = steps[Math.min(steps.length - 1, Math.max(0, place + move))], box = svg.getBoundingClientRect();
    look(step, box.left + x(step) / width * box.width, box.top + box.height / 3);
  });
  return svg;
}
function showTip(clientX, clientY, ...content) {
  tip.replaceChildren(...content.flat());
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, clientX + 14 + box.width > innerWidth ? clientX - box.width - 14 : clientX + 14)}px`;
  tip.style.top = `${Math.max(4, Math.min(clientY + 14, innerHeight - box.height - 6))}px`;
}

// Stacked bars over steps. `parts`: {label, color, value}, each value an array as long as `step`.
function stackedBars(step, parts) {
  const [width, height, left, bottom] = [wide(), 150, 44, 16], totals = step.map((_, place) => sum(parts.map((part) => part.value[place])));
  const sorted = [...totals].sort((one, other) => one - other);
  const high = Math.min(sorted.at(-1), (sorted[Math.floor(sorted.length / 2)] || 1) * 5) * 1.05 || 1;  // a start-up is cut off
  const bar = (width - left) / step.length, y = (value) => 4 + (1 - Math.min(value, high) / high) * (height - 4 - bottom);
  const svg = h("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "seconds of each step by what took them" });
  for (const value of ticks(0, high, 3)) svg.append(h("line.axis", { x1: left, x2: width, y1: y(value), y2: y(value) }),
    h("text", { x: left - 5, y: y(value) + 3.5, "text-anchor": "end" }, `${number(+value.toPrecision(5), 3)} s`));
  step.forEach((one, place) => {
    let below = 0;
    const column = h("g", { onpointermove: (event) => showTip(event.clientX, event.clientY,
      h("span.quiet", null, `step ${number(one)}: ${number(totals[place], 3)} s`),
      parts.map((part) => h("div", null, h("i", { style: { "--color": part.color } }), part.label,
        h("b", null, `${number(part.value[place], 3)} s`)))), onpointerleave: () => { tip.hidden = true; } },
    h("rect", { x: left + place * bar, y: 4, width: bar, height: height - 4 - bottom, fill: "transparent" }));
    for (const part of parts) {
      const top = y(below + part.value[place]), size = y(below) - top;
      below += part.value[place];
      if (size > 0.05) column.append(h("rect",
        { x: left + place * bar + Math.min(0.5, bar / 8), y: top, width: Math.max(bar - Math.min(1, bar / 4), 0.5), height: size,
        fill: part.color }));
    }
    svg.append(column);
    if (place % Math.ceil(step.length * 80 / width) === 0) svg.append(h("text",
      { x: left + (place + 0.5) * bar, y: height - 3, "text-anchor": "middle" }, number(one)));
  });
  return svg;
}
const wide = () => Math.max(300, main.clientWidth - 66);
const legend = (items) => h("div.legend", null,
  items.map(([label, color, value]) => h("span", null, h("i", { style: { "--color": color } }), label, value && h("b", null, value))));

// -- forms -------------------------------------------------------------------------------------------------------------

const field = (label, control) => h("label", null, label, control);
const range = (label, attributes) => h("span.range", null, `${label} from`, input("low", { label: `${label} from`, ...attributes }), "to",
  input("high", { label: `${label} to`, ...attributes }));
function input(name, { label = name, ...attributes } = {}) {
  return h("input", { type: "number", step: "any", "aria-label": label, value: address().params[name] ?? "",
    onchange: (event) => go({ [name]: event.target.value, offset: "", row: "" }), ...attributes });
}
function choice(name, options, attributes = {}) {
  const value = address().params[name] ?? "";
  if (!options.some(([key]) => String(key) === value)) options = [...options, [value, value]];  // typed into the address
  return h("select", { "aria-label": attributes.label || name,
    onchange: (event) => go({ [name]: event.target.value, offset: "", ...attributes.reset }) },
    options.map(([key, text]) => h("option", { value: key, title: TITLES[key || text], selected: String(key) === value }, text)));
}
function segments(name, options, label) {
  const value = address().params[name] || options[0][0];
  return h("span.segments", { role: "group", "aria-label": label },
    options.map(([key, text]) => h("button",
    { type: "button", "aria-pressed": String(key === value), onclick: () => go({ [name]: key, offset: "" }) }, text)));
}
const runChoice = () => runs.length > 1 && field("run",
  choice("run", runs.map((run, place) => [place || "", run.name]), { label: "run", reset: { row: "", step: "" } }));
const note = (text, kind = "quiet") => h(`p.${kind}`, null, text);
function table(head, rows, numeric = []) {
  return h("div.scroll", null, h("table", null,
    h("thead", null, h("tr", null, head.map((text, place) => h(numeric.includes(place) ? "th.n" : "th", null, text)))),
    h("tbody", null, rows.map((row) => (row instanceof Node ? row
      : h("tr", null, row.map((cell, place) => h(numeric.includes(place) ? "td.n" : "td.text", null, cell))))))));
}

// -- curves ------------------------------------------------------------------------------------------------------------

async function curves(params) {
  const keys = [...new Set(shownRuns().flatMap((run) => run.keys))].sort(), extra = (params.more || "").split("|").filter(Boolean);
  const charts = CHARTS.flatMap(([title, key]) => (key instanceof RegExp
    ? keys.filter((one) => key.test(one)).map((one) => [`${title} ${one.split("/")[1]}`, one]) : keys.includes(key) ? [[title, key]] : []));
  const chosen = new Set(charts.map(([, key]) => key));
  charts.push(...extra.filter((key) => keys.includes(key) && !chosen.has(key)).map((key) => [key.split(":")[1], key]));
  const data = await Promise.all(shownRuns().map(async (run) => [run,
    await get("series", { run: run.place, points: POINTS, low: params.low, high: params.high,
    keys: charts.map(([, key]) => key).filter((key) => run.keys.includes(key)).join("|") })]));
  const weight = +(params.smooth || 0);
  const onpick = (step) => go({ step, run: shownRuns()[0].place || "" }, "rollouts"), onzoom = (low, high) => go({ low, high });
  const bar = h("form.bar", { onsubmit: (event) => event.preventDefault() },
    range("steps", { min: 0 }),
    h("button", { type: "button", disabled: !params.low && !params.high, onclick: () => go({ low: "", high: "" }) }, "All steps"),
    field("smooth", choice("smooth", [["", "no"], ["0.6", "a little"], ["0.9", "much"], ["0.98", "very much"]])),
    h("span.quiet.optional", null, "drag: zoom · click, or ← → and Enter: rollouts of that step"));
  const cards = charts.map(([title, key]) => h("section.card", null,
    h("h2", null, h("span", { title: TITLES[title] || title }, title), h("code", { title: key }, key)),
    lineChart(data.filter(([, series]) => series[key]).map(([run, series]) => ({ label: run.name, color: run.color, ...series[key] })),
      { weight, label: `${title} over steps`, onpick, onzoom })));
  const rest = keys.filter((key) => !chosen.has(key) && !key.endsWith(":time"));
  const boxes = rest.map((key) => h("label", null,
    h("input", { type: "checkbox", checked: extra.includes(key),
    onchange: (event) => go({ more: (event.target.checked ? [...extra, key] : extra.filter((one) => one !== key)).join("|") }) }), key));
  const filter = h("input", { type: "search", placeholder: "part of a name", "aria-label": "filter metrics",
    oninput: (event) => boxes.forEach((box, place) => { box.hidden = !rest[place].includes(event.target.value); box.style.display = box.hidden ? "none" : ""; }) });
  const more = h("details.card", { style: { "margin-top": "10px" }, open: moreOpen,
    ontoggle: (event) => { moreOpen = event.target.open; } }, h("summary", null, `${rest.length} more metrics`), filter,
    h("div.more", null, boxes));
  return [bar, charts.length ? h("div.grid", null, cards) : note("No metrics yet: they come with the first step."), rest.length ? more
    : null];
}
let moreOpen = false;

// -- rollouts ----------------------------------------------------------------------------------------------------------

async function rollouts(params) {
  const run = current(), known = await get("steps", { run }), episodes = params.list === "episodes";
  const step = params.step !== undefined && params.step !== "" ? +params.step : known.steps.at(-1) ?? 0;
  let page = null, problem = null;
  const filters = { run, env: params.env, low: params.low, high: params.high, offset: params.offset };
  try {
    page = episodes ? await get("episodes", { ...filters, outcome: params.outcome, step: params.step })
      : await get("samples", { ...filters, step, sort: params.sort, cut: params.cut, group: params.group, text: params.text });
  } catch (error) { problem = error.message; }
  const envs = page?.envs || [], before = known.steps.filter((one) => one < step).at(-1),
    after = known.steps.find((one) => one > step);
  const turn = (to, text) => h("button", { type: "button", "aria-label": text, disabled: to === undefined,
    onclick: () => go({ step: to, offset: "", row: "", group: "", back: "" }) }, text === "step before" ? "‹" : "›");
  const bar = h("form.bar", { onsubmit: (event) => event.preventDefault() }, runChoice(),
    !FILE && segments("list", [["samples", "Samples of a step"], ["episodes", "Episodes of all steps"]], "list"),
    h("label", null, "step", !episodes && turn(before, "step before"),
      input("step", { value: episodes ? params.step ?? "" : step, min: 0, step: 1 }), !episodes && turn(after, "step after")),
    FILE ? null : [envs.length > 1 && field("environment",
      choice("env", [["", "all"], ...envs.map((env) => [env, env])], { label: "environment" })),
      range("reward"),
      episodes ? field("outcome", choice("outcome",
        [["", "all"], ...(page?.outcomes || []).map((one) => [one, one === "batched" ? "trained" : one])]))
        : [field("sort", choice("sort", [["", "order in the batch"], ["reward", "lowest reward"], ["-reward", "highest reward"],
          ["-length", "longest"], ["length", "shortest"]])),
          input("text", { type: "search", placeholder: "part of the reply", label: "part of the reply, in this case" }),
          h("label", null, h("input", { type: "checkbox", checked: !!params.cut,
            onchange: (event) => go({ cut: event.target.checked ? 1 : "", offset: "" }) }), "cut off only"),
          params.group && h("button", { type: "button", onclick: () => { if (params.back) location.hash = params.back; else go({ group: "" }); } },
            `group ${params.group} ×`)]]);
  if (problem) return [bar, h("section.card", null, note(problem))];
  const offset = +params.offset || 0, more = episodes ? page.more : offset + page.rows.length < page.total;
  const chosen = params.row ?? (episodes ? "" : page.rows[0]?.row ?? "");
  const items = page.rows.map((row) => (episodes ? episodeItem(row, params, run) : sampleItem(row, chosen)));
  const tabbed = items.find((item) => item.getAttribute("aria-current")) || items[0];
  for (const item of items) item.tabIndex = item === tabbed ? 0 : -1;  // arrows choose within the list
  const pages = h("div.foot", null, page.total != null ? `${number(page.total)} of ${number(page.of)} samples`
    : items.length > 0 && `episodes ${offset + 1} to ${offset + items.length}`,
    (offset > 0 || more) && [h("button", { type: "button", disabled: !offset,
      onclick: () => go({ offset: Math.max(0, offset - page.size) || "" }) }, `‹ ${page.size}`),
      h("button", { type: "button", disabled: !more, onclick: () => go({ offset: offset + page.size }) }, `${page.size} ›`)]);
  const list = h("section.card.list", { "aria-label": "samples", onkeydown: (event) => {
    const move = { ArrowUp: -1, ArrowDown: 1, k: -1, j: 1 }[event.key], place = items.indexOf(document.activeElement);
    if (move && items[place + move]) { event.preventDefault(); items[place + move].focus(); if (!episodes) items[place + move].click(); }
  } }, items.length ? items : h("div.foot", null, "None fits these filters."), pages);
  const detail = h("section.card", { "aria-label": "sample" });
  if (episodes && !params.id) detail.append(note("Choose a trained episode to read it. Of the others, the ledger keeps only the outcome."));
  else if (chosen !== "" || params.id) {
    try { detail.append(...sampleView(await get("sample", episodes ? { run, step: params.of, id: params.id } : { run, step, row: chosen }),
      run)); } catch (error) { detail.append(note(error.message)); }
  } else detail.append(note(page.of ? "No sample of this step fits the filters." : known.note));
  return [bar, h("div.reader", null, list, detail)];
}
const rewardCell = (reward) => h("b.n", null, reward == null ? "–" : number(reward, 3));
// The number of its row where a task's id is a hash, which many environments make of its content.
const taskName = (row) => (row.task_index != null && /(^|\/)[0-9a-f]{16,64}(#\d+)?$/.test(row.task_id) ? `task ${row.task_index}` : row.task_id);
function sampleItem(row, chosen) {
  const advantage = h(`span.${row.advantage > 0 ? "good" : row.advantage < 0 ? "bad" : "faint"}`, null,
    `${row.advantage > 0 ? "+" : ""}${number(row.advantage, 3)}`);
  return h("a", { href: link("rollouts", { ...address().params, row: row.row }), "data-key": row.row,
    "aria-current": String(row.row) === String(chosen) ? "true" : null },
    rewardCell(row.reward), h("span", { title: row.task_id }, taskName(row)),
      h("span", null, advantage, h("span.faint", null, `  ${number(row.sampled)} tok`), row.is_truncated && h("span.warn", null, " cut")),
    h("span.wide", null, row.preview || row.sample_id));
}
function episodeItem(row, params, run) {
  const outcome = { batched: "trained", issued: "in flight" }[row.state] || row.reason || row.state;
  const target = row.state === "batched" ? { href: link("rollouts", { ...params, of: row.step, id: row.id }) } : {};
  const versions = row.first == null ? "" : row.first === row.last ? `version ${row.first}` : `versions ${row.first} to ${row.last}`;
  return h("a", { ...target, "data-key": row.id, "aria-current": params.id === row.id ? "true" : null }, rewardCell(row.reward),
    h("span", { title: row.task_id }, taskName(row)),
    h(row.state === "dropped" ? "span.warn" : "span.quiet", { title: TITLES[outcome] }, row.step == null ? outcome : `${outcome}, step ${row.step}`),
    h("span.wide", null, [!row.task_id.startsWith(row.env) && row.env, versions, row.tokens != null && `${number(row.tokens)} tokens`,
      row.detail].filter(Boolean).join(" · ")));
}

function sampleView(sample, run) {
  const versions = sample.policy_versions, fact = (name, value) => h("div", null, h("dt", null, name), h("dd", null, value));
  const facts = h("dl.facts", null, fact("task", [...new Set([taskName(sample), sample.task_id])].join(", ")), fact("environment", sample.env), fact("reward", number(sample.reward)),
    fact("advantage", number(sample.advantage)), fact("tokens", `${number(sum(sample.mask))} trained of ${number(sample.ids.length)}`),
    fact(versions.length > 1 ? "policy versions" : "policy version", versions.length > 1 ? `${versions[0]} to ${versions.at(-1)}` : String(versions[0] ?? "–")),
    fact("step", `${sample.step}${versions.length ? ` (${sample.step - versions[0]} off-policy)` : ""}`),
      fact("temperature", number(sample.temperature)),
    fact("cut off", sample.is_truncated ? h("span.warn", null, "yes") : "no"),
    fact("group", FILE ? sample.group_id : h("a", { href: link("rollouts", { run: run || "", step: sample.step, group: sample.group_id,
      sort: address().params.sort, back: address().params.back || location.hash }) },
      `${sample.group_id}: all attempts`)), fact("sample", sample.sample_id));
  const own = { logprobs: "log-probability", log_ratios: "mismatch to the sampler", entropies: "entropy",
    advantages: "advantage", ref_log_ratio: "log ratio, reference to sampler", rl_weight: "RL weight", ce_weight: "CE weight",
    ref_kl_weight: "reference weight" };
  const streams = Object.keys(own).filter((name) => sample.streams[name]);
  const view = address().params.show || "conversation", by = streams.includes(address().params.by) ? address().params.by : "logprobs";
  const bar = h("div.bar", null, segments("show", [["conversation", "Conversation"], ["tokens", "Tokens"]], "show"),
    view === "tokens" && field("coloured by", choice("by", streams.map((name) => [name, own[name]]), { label: "coloured by" })));
  const missing = !sample.tokenizer && note("No tokenizer.json of this model is on this host: token ids are shown.", "warn");
  return [facts, bar, missing, view === "tokens" ? tokenView(sample, by, own) : sample.messages.map(messageView)].flat().filter(Boolean);
}
function messageView(message) {
  const color = { model: "assistant", developer: "system", ipython: "tool", observation: "tool" }[message.role]
    || message.role.split(" ")[0];
  const parts = message.text.split(/(<think>[\s\S]*?(?:<\/think>|$)|<tool_call>[\s\S]*?(?:<\/tool_call>|$)|<tool_response>[\s\S]*?(?:<\/tool_response>|$))/);
  const body = parts.filter((part) => part.trim()).map((part) => {
    const [, tag, inside] = part.match(/^<(think|tool_call|tool_response)>([\s\S]*?)(?:<\/\1>)?$/) || [];
    if (tag === "think") return h("details", { open: inside.length < 600 },
      h("summary", null, `thinks, ${number(inside.length)} characters`), h("pre", null, inside.trim()));
    if (tag) return h("div.call", null, h("b", null, tag === "tool_call" ? "tool call" : "tool response"), h("pre", null, pretty(inside)));
    return h("pre", null, part.replace(/^\n+|\n+$/g, ""));
  });
  return h("article.message", { style: { "--role": `var(--${color}, var(--soft))` } },
    h("h3", null, message.role, h("span", null,
    `${number(message.end - message.start)} tokens${message.sampled ? ", by the policy" : ""}`)), body);
}
function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 1); } catch { return text.trim(); }
}
function tokenView(sample, by, names) {
  const values = sample.streams[by], most = Math.max(1e-9, ...values.map(Math.abs)), signed = Math.min(...values) < 0;
  const shade = by === "logprobs" ? (value) => `rgba(var(--low), ${Math.min(0.85, -value / 6)})`
    : (value) => `rgba(var(--${value < 0 ? "neg" : "pos"}), ${0.6 * Math.abs(value) / most})`;
  const box = h("div.tokens", { tabindex: 0, role: "group", "aria-label": "tokens: arrows go through them" });
  const append = (start) => {
    const end = Math.min(sample.ids.length, start + TOKENS);
    for (let place = start; place < end; place++) {
      const value = values[place], trained = sample.mask[place] || (by !== "logprobs" && value);
      const off = !sample.mask[place] ? ".off" : "";
      box.append(h(`span${off}`, { "data-place": place, style: trained && value ? { background: shade(value) } : {} },
        sample.texts[place]));
    }
    if (end < sample.ids.length) box.append(h("button", { type: "button", onclick: (event) => { event.target.remove(); append(end); } },
      `show ${number(Math.min(TOKENS, sample.ids.length - end))} more of ${number(sample.ids.length - end)} tokens`));
  };
  append(0);
  const look = (span, clientX, clientY) => {
    const place = span.dataset.place;
    const rows = Object.keys(names).filter((name) => sample.streams[name]).map((name) => h("div", null, names[name],
      h("b", null, number(sample.streams[name][place]))));
    const probability = sample.mask[place] && h("div", null, "probability",
      h("b", null, `${number(100 * Math.exp(sample.streams.logprobs[place]), 2)} %`));
    showTip(clientX, clientY, [h("span.quiet", null,
      `token ${place}, id ${sample.ids[place]}, ${sample.mask[place] ? "trained" : "not trained"}`), probability,
      rows].flat().filter(Boolean));
  };
  box.addEventListener("pointermove", (event) => { if (event.target.dataset.place) look(event.target, event.clientX,
    event.clientY); else tip.hidden = true; });
  let here = sample.mask.indexOf(1) - 1;  // by arrows: the first token of the policy comes first
  box.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key], span = move && box.querySelector(`[data-place="${here + move}"]`);
    if (!span) return;
    event.preventDefault();
    box.querySelector(".here")?.classList.remove("here");
    here += move;
    span.classList.add("here");
    const place = span.getBoundingClientRect();
    look(span, place.left, place.bottom);
  });
  box.addEventListener("blur", () => { tip.hidden = true; });
  box.addEventListener("pointerleave", () => { tip.hidden = true; });
  const scale = by === "logprobs" ? [h("span", null, "likely"),
    h("i.scale", { style: { background: "linear-gradient(90deg, transparent, rgba(var(--low), .85))" } }), "−5 or less"]
    : [number(signed ? -most : 0, 3), h("i.scale", { style: { background:
      `linear-gradient(90deg, ${signed ? "rgba(var(--neg), .6), " : ""}transparent, rgba(var(--pos), .6))` } }), number(most, 3)];
  return [h("div.legend", { style: { margin: "0 0 8px" } }, h("span", null, scale), h("span.faint", null, "grey: not in the loss mask"),
    sample.policy_versions.length > 1 && h("span", null, "which version wrote which token is not recorded")), box];
}

// -- time --------------------------------------------------------------------------------------------------------------

async function time(params) {
  const run = current(), keys = ["time/step", "time/forward_backward", "time/optimizer", "time/wait_for_batch", "time/read_batch",
    "time/export", "time/logprob_check", "time/save_ckpt", "time/idle", "time/update_pause"];
  const need = Object.keys(PARTS).flatMap((process) => ["time", ...keys].map((key) => `${process}:${key}`));
  const [events, series] = await Promise.all([get("events", { run }),
    get("series", { run, points: 120, low: params.low, high: params.high, keys: need.join("|") })]);
  const cards = Object.entries(PARTS).map(([process, parts]) => {
    const steps = series[`${process}:time/step`]?.step || [];
    if (!steps.length) return null;
    const rows = steps.map((_, place) => Object.fromEntries(keys.map((key) => [key, series[`${process}:${key}`]?.value[place] ?? 0])));
    const shown = parts.map(([label, color, value]) => ({ label, color, value: rows.map((row) => value(row) || 0) }));
    const rest = rows.map((row, place) => Math.max(0, row["time/step"] - sum(shown.map((part) => part.value[place]))));
    if (process === "trainer") shown.push({ label: "rest", color: "#7d828b", value: rest });
    return h("section.card", null, h("h2", null, process === "trainer" ? "Trainer, seconds of a step" : "Engines, seconds of a step"),
      stackedBars(steps, shown), legend(shown.map((part) => [part.label, part.color, `${number(sum(part.value) / steps.length, 3)} s`])));
  });
  return [h("form.bar", { onsubmit: (event) => event.preventDefault() }, runChoice(), range("steps", { min: 0 })),
    h("section.card", null, h("h2", null, "Who waits for whom ", h("span.quiet", null, "by rl doctor")),
      h("pre.mono", null, runs[run].doctor)), ...cards,
    events.length ? h("section.card", null, h("h2", null, "Restarts, faults and checkpoints"), timeLine(events, series),
      table(["time", "process", "", ""], [...events].reverse().slice(0, 100).map((event) =>
      h(`tr.event-${event.kind}`, null, h("td.n", null, clock(event.time)), h("td", null, event.process), h("td", null, event.kind),
        h("td.text", null, event.text))))) : null];
}
function timeLine(events, series) {
  const lanes = [...new Set(["trainer", "orchestrator", ...events.map((event) => event.process.split(".")[0])])];
  const times = [...events.map((event) => event.time),
    ...["trainer", "orchestrator"].flatMap((process) => series[`${process}:time`]?.value || [])];
  const [first, last] = [Math.min(...times), Math.max(Math.min(...times) + 1, ...times)], [width, left, lane] = [wide(), 90, 22];
  const x = (time) => left + (time - first) / (last - first) * (width - left - 8), height = lanes.length * lane + 18;
  const svg = h("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "timeline of the processes",
    style: { "margin-bottom": "8px" } });
  lanes.forEach((name, row) => {
    const middle = row * lane + lane / 2;
    svg.append(h("text", { x: 0, y: middle + 4 }, name), h("line.axis", { x1: left, x2: width - 8, y1: middle, y2: middle }));
    (series[`${name}:time`]?.value || []).forEach((time,
      place) => svg.append(h("rect", { x: x(time) - 0.75, y: middle - 5, width: 1.5, height: 10, fill: "#4a78d6", opacity: 0.55 })));
    for (const event of events.filter((one) => one.process.split(".")[0] === name)) svg.append(h("circle",
      { cx: x(event.time), cy: middle, r: 4, fill: KIND_COLORS[event.kind], stroke: "var(--card)",
      onpointermove: (at) => showTip(at.clientX, at.clientY, h("span.quiet", null, `${clock(event.time)} ${event.process}`),
        h("div", null, event.text)), onpointerleave: () => { tip.hidden = true; } }));
  });
  for (const part of [0, 0.25, 0.5, 0.75, 1]) svg.append(h("text",
    { x: x(first + part * (last - first)), y: height - 3, "text-anchor": part === 1 ? "end" : part ? "middle" : "start" },
    clock(first + part * (last - first))));
  const kinds = [...new Set(events.map((event) => event.kind))];
  return [svg, legend([["a step", "#4a78d6"], ...kinds.map((kind) => [kind, KIND_COLORS[kind]])]), h("div", { style: { height: "8px" } })];
}

// -- ledger, evaluations, configuration --------------------------------------------------------------------------------

const texts = (query, title) => Promise.all(shownRuns().map(async (run) => {
  const text = await get(query, { run: run.place }).then((answer) => answer && h("pre.mono", null, answer), (error) => note(error.message));
  return text && h("section.card", null, h("h2", null, run.name, h("span.quiet", null, title)), text);
}));
const ledger = () => texts("ledger", " as rl audit says");

async function evals() {
  const list = shownRuns(), reports = (await texts("evals", " evals/report.json")).filter(Boolean);
  const keys = [...new Set(list.flatMap((run) => run.keys))].filter((key) => /^orchestrator:eval\/.*\/avg@\d+$/.test(key));
  const series = await Promise.all(list.map((run) => get("series",
    { run: run.place, points: POINTS, keys: keys.flatMap((key) => [key,
    `${key}/ci95`]).filter((key) => run.keys.includes(key)).join("|") })));
  const cards = keys.map((key) => h("section.card", null,
    h("h2", null, h("span", null, key.split("/")[1]), h("code", null, `${key.split("/").at(-1)}, mean ± 95 %`)),
    lineChart(list.flatMap((run, place) => {
    const line = series[place][key], width = series[place][`${key}/ci95`];
    if (!line) return [];
    const half = line.step.map((step) => width?.value[width.step.indexOf(step)] ?? 0);
    return [{ label: run.name, color: run.color, ...line, min: line.value.map((value, at) => value - half[at]),
      max: line.value.map((value, at) => value + half[at]) }];
  }), { label: `evaluation of ${key.split("/")[1]}` })));
  if (!cards.length && !reports.length) return [note("No evaluations: neither in the metrics nor in evals/report.json.")];
  return [cards.length && h("div.grid", null, cards), reports];
}

async function config(params) {
  const list = shownRuns(), tables = await Promise.all(list.map((run) => get("config", { run: run.place }).catch(() => ({}))));
  const files = [...new Set(tables.flatMap(Object.keys))], file = files.includes(params.file) ? params.file : files.includes("rl") ? "rl"
    : files[0];
  const several = list.length > 1, only = several && params.all !== "1";
  const keys = [...new Set(tables.flatMap((each) => Object.keys(each[file] || {})))];
  const rows = keys.map((key) => [key, tables.map((each) => each[file]?.[key] ?? "–")]).map(([key, values]) => [key, values,
    new Set(values).size > 1]);
  const shown = rows.filter(([, , differs]) => differs || !only),
    body = shown.map(([key, values, differs]) => h(differs && several ? "tr.differs" : "tr", null, h("td.key.mono", null, key),
    values.map((value) => h("td.text.mono", null, value))));
  const bar = h("form.bar", { onsubmit: (event) => event.preventDefault() },
    field("process", choice("file", files.map((name) => [name === file ? params.file || "" : name, name]), { label: "process" })),
    several && h("label", null, h("input", { type: "checkbox", checked: only,
      onchange: (event) => go({ all: event.target.checked ? "" : 1 }) }), "differences only"),
    h("input", { type: "search", placeholder: "part of a key or value", "aria-label": "filter settings",
      oninput: (event) => body.forEach((row) => { row.style.display = row.textContent.includes(event.target.value) ? "" : "none"; }) }),
    several && h("span.quiet", null, `${rows.filter(([, , differs]) => differs).length} of ${rows.length} settings differ`));
  return [bar, h("section.card", null, body.length ? table(["setting", ...list.map((run) => run.name)], body)
    : note(files.length ? "These runs have equal settings." : "No configs/*.toml here."))];
}

// -- the page ----------------------------------------------------------------------------------------------------------

const VIEWS = { curves: ["Curves", curves], rollouts: ["Rollouts", rollouts], time: ["Time", time], ledger: ["Ledger", ledger],
  evals: ["Evals", evals], config: ["Config", config] };

function frame() {
  const { view, params } = address(), carry = { hide: params.hide, run: params.run };
  document.getElementById("tabs").replaceChildren(...Object.entries(VIEWS).map(([name, [title]]) => h("a",
    { href: link(name, carry), "data-key": name, "aria-current": name === view ? "page" : null }, title)));
  const off = hidden(), bad = ["failed", "stuck"];
  document.getElementById("runs").replaceChildren(...runs.map((run, place) => h("label.run",
    { title: `${run.path}\n${run.sentence}`, style: { "--color": COLORS[place % COLORS.length] } },
    h("input", { type: "checkbox", checked: !off.has(place), "data-key": `run${place}`, "aria-label": `show ${run.name}`,
      onchange: () => { off.has(place) ? off.delete(place) : off.add(place); go({ hide: [...off].join(",") }); } }),
    h("i"), h("b", null, run.name), h(bad.includes(run.state) ? "span.bad" : "span.quiet", null,
      `${run.state}${run.last_step >= 0 ? `, step ${number(run.last_step)}` : ""}`))));
  document.title = `${VIEWS[view][0]} · ${runs.map((run) => run.name).join(", ")}`;
}
async function draw() {
  const mine = ++drawn, { view, params } = address();
  drawnState = runState();
  frame();
  let content;
  try { content = await VIEWS[view][1](params); } catch (error) { content = [note(error.message, "bad")]; }
  if (mine !== drawn) return;  // a later one is on its way
  const active = document.activeElement, key = active?.dataset?.key, label = main.contains(active) && active.getAttribute("aria-label"),
    scrolled = [...main.querySelectorAll(".list")].map((list) => list.scrollTop);
  main.replaceChildren(...content.flat().filter(Boolean));
  main.dataset.view = view;
  main.querySelectorAll(".list").forEach((list, place) => { list.scrollTop = scrolled[place] || 0; });
  const again = (key && document.querySelector(`[data-key="${CSS.escape(key)}"]`))
    || (label && main.querySelector(`[aria-label="${CSS.escape(label)}"]`));
  if (again) again.focus({ preventScroll: true });
}
const runState = () => JSON.stringify(runs.map((run) => [run.pulse, run.state, address().view === "time" && run.sentence]));
async function poll() {
  const live = document.getElementById("live");
  try {
    runs = await get("runs");
    live.textContent = FILE ? "a copy in one file" : runs.some((run) => ["runs", "stuck"].includes(run.state))
      ? `live, ${new Date().toLocaleTimeString("en-GB")}` : "";
    const busy = main.contains(document.activeElement) && document.activeElement.matches("input, select");
    if (drawnState !== runState() && !(busy && drawn) && tip.hidden) await draw();
  } catch (error) {
    live.textContent = drawn ? `no answer: rl view has ended? (${error.message})` : "";
    if (!drawn) main.replaceChildren(note(error.message, "bad"));
  }
  if (!FILE) setTimeout(poll, POLL_SECONDS * 1000);
}
addEventListener("hashchange", () => { tip.hidden = true; draw(); });
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => address().view === "time" && draw(), 200); });
poll();
