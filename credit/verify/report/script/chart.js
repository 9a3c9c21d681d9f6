// The chart: a score by lead time, a line a forecast, intervals shaded, the chosen lead time marked.

/** Draw `curves` (from forecastCurves) into `svg`; return the lead times' places, for reading. */
function drawChart(svg, scores, place, curves) {
  const frame = frameOf(svg, scores, place, curves);
  svg.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
  svg.replaceChildren(...drawAxes(frame, scores, place));
  const layers = [...curves].reverse().sort((one, other) => one.layer - other.layer);
  for (const own of layers) svg.append(...drawCurve(frame, own));
  svg.append(make("line", { class: "cursor", y1: frame.top, y2: frame.bottom }, null, "svg"));
  moveCursor(svg, frame, place.lead);
  return frame;
}

/** Mark the lead time of a number. */
function moveCursor(svg, frame, lead) {
  const line = svg.querySelector(".cursor");
  line.setAttribute("x1", frame.places[lead]);
  line.setAttribute("x2", frame.places[lead]);
}

/** Return the number of the lead time that is nearest to a place of the screen. */
function leadAt(svg, frame, clientX) {
  const box = svg.getBoundingClientRect();
  const x = ((clientX - box.left) * frame.width) / box.width;
  const distances = frame.places.map((place) => Math.abs(place - x));
  return distances.indexOf(Math.min(...distances));
}

/** Return sizes and scales. */
function frameOf(svg, scores, place, curves) {
  const em = parseFloat(getComputedStyle(svg).fontSize);
  const width = Math.max(svg.parentElement.clientWidth, 200);
  const height = Math.round(Math.min(Math.max(0.56 * width, 19 * em), 32 * em));
  const [left, right, top, bottom] = [4.6 * em, width - em, em, height - 3.4 * em];
  const last = scores.leads[scores.leads.length - 1] * 1.02;
  const x = (hours) => left + (hours / last) * (right - left);
  const { least, most, step } = extentOf(curves, place.metric, (bottom - top) / (3.2 * em));
  const y = (value) => bottom - ((value - least) / (most - least)) * (bottom - top);
  return { em, width, height, left, right, top, bottom, last, x, y, least, most, step, places: scores.leads.map(x) };
}

/** Return range and tick distance of the values, what the score's charts mark included. */
function extentOf(curves, metric, ticks) {
  const values = curves.flatMap((own) => [own.curve, own.low, own.high].flatMap((one) => one?.values ?? []));
  const known = values.filter(Number.isFinite).concat(metric.line ?? []);
  let [least, most] = [Math.min(...known), Math.max(...known)];
  if (!(most > least)) [least, most] = known.length ? [least - (Math.abs(least) || 1) / 2, most + (Math.abs(most) || 1) / 2] : [0, 1];
  const margin = 0.04 * (most - least);
  if (least !== metric.line) least -= margin;
  if (most !== metric.line || metric.name !== "acc") most += margin;
  return { least, most, step: niceStep((most - least) / Math.max(ticks, 2)) };
}

/** Return 1, 2 or 5 times a power of ten, at least `rough`. */
function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
}

function ticksOf(least, most, step) {
  const first = Math.ceil(least / step - 1e-9);
  const count = Math.floor(most / step + 1e-9) - first + 1;
  return Array.from({ length: Math.max(count, 0) }, (_, number) => (first + number) * step);
}

function tickText(value, step) {
  if (value === 0) return "0";
  if (Math.abs(value) >= 1e6 || step < 1e-4) return value.toExponential(1).replace("-", "−");
  return value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9))).replace("-", "−");
}

function drawAxes(frame, scores, place) {
  const { em, left, right, top, bottom, x, y } = frame;
  const drawn = [];
  const line = (kind, x1, y1, x2, y2) => drawn.push(make("line", { class: kind, x1, y1, x2, y2 }, null, "svg"));
  const text = (kind, at, down, anchor, words, more = {}) =>
    drawn.push(make("text", { class: kind, x: at, y: down, "text-anchor": anchor, ...more }, words, "svg"));
  for (const value of ticksOf(frame.least, frame.most, frame.step)) {
    line("rule", left, y(value), right, y(value));
    text("tick-y", left - 0.5 * em, y(value) + 0.33 * em, "end", tickText(value, frame.step), { "data-y": y(value) });
  }
  const unit = inDays(scores) ? 24 : 1;
  const step = leadStep(frame.last / unit, (right - left) / (3 * em), unit === 24);
  for (const value of ticksOf(0, frame.last / unit, step)) {
    line("stub", x(value * unit), bottom, x(value * unit), bottom + 0.35 * em);
    text("tick-x", x(value * unit), bottom + 1.4 * em, "middle", String(value));
  }
  const { line: marked } = place.metric;
  if (marked !== null && marked >= frame.least && marked <= frame.most) line("marked", left, y(marked), right, y(marked));
  line("axis", left, bottom, right, bottom);
  text("label", (left + right) / 2, bottom + 2.9 * em, "middle", `Lead time (${unit === 24 ? "days" : "hours"})`);
  const units = metricUnits(place.metric, scores.rows[place.row]);
  const middle = (top + bottom) / 2;
  text("label", 0.9 * em, middle, "middle", units, { transform: `rotate(-90 ${0.9 * em} ${middle})` });
  return drawn;
}

function leadStep(last, most, days) {
  const steps = days ? [1, 2, 5, 10, 20, 50, 100, 200] : [1, 2, 3, 6, 12, 24];
  return steps.find((step) => last / step <= most) ?? steps[steps.length - 1];
}

function drawCurve(frame, own) {
  const drawn = [];
  const name = { "data-forecast": own.name, style: `--own: ${own.colour}` };
  if (own.low && own.high) {
    drawn.push(make("path", { class: "interval", d: bandPath(frame, own.low.values, own.high.values), ...name }, null, "svg"));
  }
  const look = { "stroke-dasharray": own.dash, "stroke-width": own.width };
  drawn.push(make("path", { class: "curve", d: linePath(frame, own.curve.values), ...look, ...name }, null, "svg"));
  own.curve.values.forEach((value, number) => {
    const alone = !Number.isFinite(own.curve.values[number - 1]) && !Number.isFinite(own.curve.values[number + 1]);
    if (!Number.isFinite(value) || !(alone || own.name === "model")) return;
    const at = { cx: round(frame.places[number]), cy: round(frame.y(value)), r: 0.2 * frame.em };
    drawn.push(make("circle", { class: "dot", ...at, ...name }, null, "svg"));
  });
  return drawn;
}

/** Return a line through what is known; it breaks where a value is missing. */
function linePath(frame, values) {
  return runsOf(values)
    .map((run) => `M${run.map((number) => point(frame, number, values[number])).join("L")}`)
    .join("");
}

/** Return the areas between two curves. */
function bandPath(frame, low, high) {
  const both = low.map((value, number) => value + high[number]);
  return runsOf(both)
    .map((run) => {
      const up = run.map((number) => point(frame, number, high[number]));
      const back = [...run].reverse().map((number) => point(frame, number, low[number]));
      return `M${[...up, ...back].join("L")}Z`;
    })
    .join("");
}

/** Return the numbers of the known values, in runs without a gap. */
function runsOf(values) {
  const runs = [];
  values.forEach((value, number) => {
    if (!Number.isFinite(value)) return;
    if (Number.isFinite(values[number - 1])) runs[runs.length - 1].push(number);
    else runs.push([number]);
  });
  return runs;
}

function point(frame, number, value) {
  return `${round(frame.places[number])} ${round(frame.y(value))}`;
}

function round(value) {
  return Math.round(value * 100) / 100;
}
