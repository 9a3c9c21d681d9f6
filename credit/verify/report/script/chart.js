// The chart: a score by lead time, a line a forecast, intervals shaded, the chosen lead time marked.

/** Draw `curves` (from readForecastCurves) into `svg`; return the layout, for reading values. */
function drawChart(svg, scores, selection, curves) {
  const layout = computeLayout(svg, scores, selection, curves);
  svg.setAttribute("viewBox", `0 0 ${layout.width} ${layout.height}`);
  svg.replaceChildren(...drawAxes(layout, scores, selection));
  // Forecasts of a higher layer are drawn last, above the others.
  const layers = [...curves].reverse().sort((a, b) => a.layer - b.layer);
  for (const forecast of layers) svg.append(...drawCurve(layout, forecast));
  svg.append(makeElement("line", { class: "cursor", y1: layout.top, y2: layout.bottom }, null, "svg"));
  moveCursor(svg, layout, selection.lead);
  return layout;
}

/** Mark the lead time of an index. */
function moveCursor(svg, layout, lead) {
  const line = svg.querySelector(".cursor");
  line.setAttribute("x1", layout.leadPositions[lead]);
  line.setAttribute("x2", layout.leadPositions[lead]);
}

/** Return the index of the lead time that is nearest to a position on the screen, in pixels. */
function findNearestLead(svg, layout, clientX) {
  const box = svg.getBoundingClientRect();
  const x = ((clientX - box.left) * layout.width) / box.width;
  const distances = layout.leadPositions.map((position) => Math.abs(position - x));
  return distances.indexOf(Math.min(...distances));
}

/** Return the layout of the chart: sizes in pixels, functions from lead time in hours and value to pixels. */
function computeLayout(svg, scores, selection, curves) {
  const em = parseFloat(getComputedStyle(svg).fontSize);
  const width = Math.max(svg.parentElement.clientWidth, 200);
  const height = Math.round(Math.min(Math.max(0.56 * width, 19 * em), 32 * em));
  const [left, right, top, bottom] = [4.6 * em, width - em, em, height - 3.4 * em];
  const last = scores.leads[scores.leads.length - 1] * 1.02;
  const x = (hours) => left + (hours / last) * (right - left);
  const { least, most, step } = computeExtent(curves, selection.metric, (bottom - top) / (3.2 * em));
  const y = (value) => bottom - ((value - least) / (most - least)) * (bottom - top);
  return { em, width, height, left, right, top, bottom, last, x, y, least, most, step, leadPositions: scores.leads.map(x) };
}

/** Return range and tick distance of the values, what the score's charts mark included. */
function computeExtent(curves, metric, ticks) {
  const values = curves.flatMap((forecast) => {
    const drawnCurves = [forecast.curve, forecast.low, forecast.high];
    return drawnCurves.flatMap((curve) => curve?.values ?? []);
  });
  const marks = values.filter(Number.isFinite).concat(metric.line ?? []);
  let [least, most] = [Math.min(...marks), Math.max(...marks)];
  if (!marks.length) [least, most] = [0, 1];
  else if (!(most > least)) {
    // One value alone is drawn in the middle.
    least -= (Math.abs(least) || 1) / 2;
    most += (Math.abs(most) || 1) / 2;
  }
  // A margin, but not beyond a marked end, as 0 of errors and 1 of correlations.
  const margin = 0.04 * (most - least);
  if (least !== metric.line) least -= margin;
  if (most !== metric.line || metric.name !== "acc") most += margin;
  return { least, most, step: chooseTickStep((most - least) / Math.max(ticks, 2)) };
}

/** Return 1, 2 or 5 times a power of ten, at least `rough`. */
function chooseTickStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
}

/** Return the multiples of `step` between two values. */
function listTicks(least, most, step) {
  const first = Math.ceil(least / step - 1e-9);
  const count = Math.floor(most / step + 1e-9) - first + 1;
  return Array.from({ length: Math.max(count, 0) }, (_, number) => (first + number) * step);
}

/** Return the label of a tick, with the decimals that the distance of the ticks needs. */
function formatTick(value, step) {
  if (value === 0) return "0";
  if (Math.abs(value) >= 1e6 || step < 1e-4) return value.toExponential(1).replace("-", "−");
  return value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9))).replace("-", "−");
}

/** Return the elements of both axes: ticks, labels and the value that the score's charts mark. */
function drawAxes(layout, scores, selection) {
  const { em, left, right, top, bottom } = layout;
  const { x: toX, y: toY } = layout;
  const elements = [];
  const line = (kind, x1, y1, x2, y2) => elements.push(makeElement("line", { class: kind, x1, y1, x2, y2 }, null, "svg"));
  const text = (kind, x, y, anchor, words, attributes = {}) =>
    elements.push(makeElement("text", { class: kind, x, y, "text-anchor": anchor, ...attributes }, words, "svg"));
  // Values, with a rule across the chart.
  for (const value of listTicks(layout.least, layout.most, layout.step)) {
    line("rule", left, toY(value), right, toY(value));
    text("tick-y", left - 0.5 * em, toY(value) + 0.33 * em, "end", formatTick(value, layout.step), { "data-y": toY(value) });
  }
  // Lead times, with a short stub below the axis.
  const unit = usesDays(scores) ? 24 : 1;
  const step = chooseLeadStep(layout.last / unit, (right - left) / (3 * em), unit === 24);
  for (const value of listTicks(0, layout.last / unit, step)) {
    line("stub", toX(value * unit), bottom, toX(value * unit), bottom + 0.35 * em);
    text("tick-x", toX(value * unit), bottom + 1.4 * em, "middle", String(value));
  }
  // The value of a good score, then the axis and its labels.
  const { line: markedValue } = selection.metric;
  if (markedValue !== null && markedValue >= layout.least && markedValue <= layout.most) {
    line("marked", left, toY(markedValue), right, toY(markedValue));
  }
  line("axis", left, bottom, right, bottom);
  text("label", (left + right) / 2, bottom + 2.9 * em, "middle", `Lead time (${unit === 24 ? "days" : "hours"})`);
  const units = metricUnits(selection.metric, scores.rows[selection.row]);
  const middle = (top + bottom) / 2;
  text("label", 0.9 * em, middle, "middle", units, { transform: `rotate(-90 ${0.9 * em} ${middle})` });
  return elements;
}

/** Return the distance of the ticks of lead times, in `days` or hours: the smallest with at most `most` ticks. */
function chooseLeadStep(last, most, days) {
  const steps = days ? [1, 2, 5, 10, 20, 50, 100, 200] : [1, 2, 3, 6, 12, 24];
  return steps.find((step) => last / step <= most) ?? steps[steps.length - 1];
}

/** Return the elements of a forecast: interval, curve, and dots of the model and of single values. */
function drawCurve(layout, forecast) {
  const elements = [];
  const name = { "data-forecast": forecast.name, style: `--curve-colour: ${forecast.colour}` };
  if (forecast.low && forecast.high) {
    elements.push(makeElement("path", { class: "interval", d: makeBandPath(layout, forecast.low.values, forecast.high.values), ...name }, null, "svg"));
  }
  const style = { "stroke-dasharray": forecast.dash, "stroke-width": forecast.width };
  elements.push(makeElement("path", { class: "curve", d: makeLinePath(layout, forecast.curve.values), ...style, ...name }, null, "svg"));
  forecast.curve.values.forEach((value, number) => {
    // A value between two missing ones would be a line without length.
    const isAlone = !Number.isFinite(forecast.curve.values[number - 1]) && !Number.isFinite(forecast.curve.values[number + 1]);
    if (!Number.isFinite(value) || !(isAlone || forecast.name === "model")) return;
    const circle = { cx: roundToHundredth(layout.leadPositions[number]), cy: roundToHundredth(layout.y(value)), r: 0.2 * layout.em };
    elements.push(makeElement("circle", { class: "dot", ...circle, ...name }, null, "svg"));
  });
  return elements;
}

/** Return the SVG path of a line through the values; it breaks where a value is missing. */
function makeLinePath(layout, values) {
  return findRuns(values)
    .map((run) => `M${run.map((number) => formatPoint(layout, number, values[number])).join("L")}`)
    .join("");
}

/** Return the SVG path of the areas between two curves. */
function makeBandPath(layout, low, high) {
  const both = low.map((value, number) => value + high[number]);
  return findRuns(both)
    .map((run) => {
      const up = run.map((number) => formatPoint(layout, number, high[number]));
      const back = [...run].reverse().map((number) => formatPoint(layout, number, low[number]));
      return `M${[...up, ...back].join("L")}Z`;
    })
    .join("");
}

/** Return the indices of the values that are not missing, in runs without a gap. */
function findRuns(values) {
  const runs = [];
  values.forEach((value, number) => {
    if (!Number.isFinite(value)) return;
    if (Number.isFinite(values[number - 1])) runs[runs.length - 1].push(number);
    else runs.push([number]);
  });
  return runs;
}

/** Return a point of an SVG path: lead time of an index, and value. */
function formatPoint(layout, number, value) {
  return `${roundToHundredth(layout.leadPositions[number])} ${roundToHundredth(layout.y(value))}`;
}

/** Return a length in pixels with two decimals, which keeps paths short. */
function roundToHundredth(value) {
  return Math.round(value * 100) / 100;
}
