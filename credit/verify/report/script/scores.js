// The scores in the page, as credit/verify/embedded.py packs them, and how single ones are found and written.

/** Return the scores of an element that holds base64 of deflated JSON. */
async function readScores(element) {
  const bytes = Uint8Array.from(atob(element.textContent.trim()), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(unpacked).json();
}

/** Return {values, decimals} of a packed curve; null where there is no curve; NaN where a value is missing. */
function unpack(packed) {
  if (!packed) return null;
  const [power, ...steps] = packed;
  let sum = 0;
  const values = steps.map((step) => (step === null ? NaN : scaled((sum += step), power)));
  return { values, decimals: Math.max(0, -power) };
}

function scaled(whole, power) {
  return power < 0 ? whole / 10 ** -power : whole * 10 ** power;
}

/** Return the curve of a score; `place` has the numbers of season, row and region, `first` is that of the forecast. */
function curveOf(scores, name, first, place) {
  return unpack(scores.curves[name]?.[place.season]?.[first]?.[place.row]?.[place.region]);
}

/** Return the name of an end of a score's interval: rmse_low, brier_low:EVENT. */
function endName(metric, end) {
  return metric.name.replace(/:|$/, (found) => end + found);
}

/** Return what is drawn of each forecast: its number, look, curve and the ends of its interval. */
function forecastCurves(scores, place) {
  const curves = scores.forecasts.map((forecast, number) => ({
    ...forecast,
    curve: curveOf(scores, place.metric.name, number, place),
    low: curveOf(scores, endName(place.metric, "_low"), number, place),
    high: curveOf(scores, endName(place.metric, "_high"), number, place),
  }));
  return curves.filter((own) => own.curve);
}

/** Return a value as text: four digits, or as many decimals as the page has of it. */
function formatValue(value, decimals) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size > 0 && (size < 1e-4 || size >= 1e6)) return value.toExponential(3).replace("-", "−");
  const wanted = size > 0 ? Math.max(0, 3 - Math.floor(Math.log10(size))) : 0;
  return value.toFixed(Math.min(wanted, decimals)).replace("-", "−");
}

/** Return a lead time in words. */
function formatLead(hours) {
  return hours >= 48 && hours % 24 === 0 ? `${hours} h (${hours / 24} d)` : `${hours} h`;
}

/** Return whether axes count lead times in days. */
function inDays(scores) {
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

/** Return whether a row can have a score: those of events and precipitation are of single rows. */
function isOfRow(metric, row) {
  return metric.rows === null || metric.rows.includes(row);
}

/** Return the units of a score of a row, "" for pure numbers. */
function metricUnits(metric, row) {
  return metric.has_units ? row.units : "";
}

/** Return a new element with text and attributes; an SVG element where `space` is "svg". */
function make(tag, attributes = {}, text = null, space = "html") {
  const element = space === "svg" ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}
