// The scores in the page, as credit.verify.report.page_scores.py packs them: reading single curves, and writing values.

/** Return the scores of an element that holds base64 of deflated JSON. */
async function readScores(element) {
  const bytes = Uint8Array.from(atob(element.textContent.trim()), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(unpacked).json();
}

/** Return {values, decimals} of a packed curve; null where there is no curve; NaN where a value is missing. */
function unpackCurve(packed) {
  if (!packed) return null;
  const [power, ...steps] = packed;
  // Each value is the sum of all steps up to it; a missing one has no step.
  let sum = 0;
  const values = steps.map((step) => (step === null ? NaN : scaleByPower((sum += step), power)));
  return { values, decimals: Math.max(0, -power) };
}

/** Return a whole number times a power of ten; dividing by 10 is more accurate than multiplying by 0.1. */
function scaleByPower(integer, power) {
  return power < 0 ? integer / 10 ** -power : integer * 10 ** power;
}

/** Return the curve of a score; `selection` has the indices of season, row and region, `first` is that of the forecast or reference. */
function readCurve(scores, name, first, selection) {
  return unpackCurve(scores.curves[name]?.[selection.season]?.[first]?.[selection.row]?.[selection.region]);
}

/** Return the name of an end of a score's interval: rmse_low, brier_low:EVENT. */
function intervalEndName(metric, end) {
  return metric.name.replace(/:|$/, (colon) => end + colon);
}

/** Return the forecasts that have the selected score: their names and styles, curve and ends of the interval. */
function readForecastCurves(scores, selection) {
  const curves = scores.forecasts.map((forecast, number) => ({
    ...forecast,
    curve: readCurve(scores, selection.metric.name, number, selection),
    low: readCurve(scores, intervalEndName(selection.metric, "_low"), number, selection),
    high: readCurve(scores, intervalEndName(selection.metric, "_high"), number, selection),
  }));
  return curves.filter((forecast) => forecast.curve);
}

/** Return a value as text: four digits, or as many decimals as the page has of it. */
function formatValue(value, decimals) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size > 0 && (size < 1e-4 || size >= 1e6)) return value.toExponential(3).replace("-", "−");
  const numDecimals = size > 0 ? Math.max(0, 3 - Math.floor(Math.log10(size))) : 0;
  return value.toFixed(Math.min(numDecimals, decimals)).replace("-", "−");
}

/** Return a lead time in words. */
function formatLead(hours) {
  return hours >= 48 && hours % 24 === 0 ? `${hours} h (${hours / 24} d)` : `${hours} h`;
}

/** Return true if axes count lead times in days. */
function usesDays(scores) {
  return scores.leads[scores.leads.length - 1] > 48;
}

/** Return a relative difference in percent, with its sign. */
function formatPercent(value, decimals) {
  const text = Math.abs(value).toFixed(decimals);
  return Number(text) === 0 ? text : (value < 0 ? "−" : "+") + text;
}

/** Return the name of a score for a row: that of a wind vector may differ. */
function metricLabel(metric, row) {
  return (row.wind && metric.wind_label) || metric.label;
}

/** Return true if a row can have a score: those of events and precipitation are of single rows. */
function rowHasMetric(metric, row) {
  return metric.rows === null || metric.rows.includes(row);
}

/** Return the units of a score of a row, "" for pure numbers. */
function metricUnits(metric, row) {
  return metric.has_units ? row.units : "";
}

/** Return a new element with text and attributes; an SVG element where `space` is "svg". */
function makeElement(tag, attributes = {}, text = null, space = "html") {
  const element = space === "svg" ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}
