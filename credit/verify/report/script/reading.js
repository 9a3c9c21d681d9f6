// Values beside the chart: a legend that reads them at one lead time and switches forecasts off, and a table of all.

/** Fill the legend for the lead time of a number; `toggle` is called with the name of a forecast. */
function drawLegend(table, curves, state, lead, toggle) {
  const rows = curves.map((forecast) => {
    const isShown = !state.hidden.includes(forecast.name);
    const row = makeElement("tr", { "data-forecast": forecast.name });
    const button = makeElement("button", { type: "button", class: "toggle", "aria-pressed": String(isShown) });
    button.append(makeSwatch(forecast), makeElement("span", {}, forecast.label));
    button.addEventListener("click", () => toggle(forecast.name));
    const name = makeElement("th", { scope: "row" });
    name.append(button);
    row.append(name, makeElement("td", { class: "value" }, formatValue(forecast.curve.values[lead], forecast.curve.decimals)));
    row.append(makeElement("td", { class: "range" }, formatInterval(forecast, lead)));
    return row;
  });
  // The rows are replaced, so the focus goes to the new button of the same forecast.
  const focused = table.contains(document.activeElement) && document.activeElement.closest("tr")?.dataset.forecast;
  table.querySelector("tbody").replaceChildren(...rows);
  if (focused) rows.find((row) => row.dataset.forecast === focused)?.querySelector("button").focus();
}

/** Return a short piece of a forecast's line. */
function makeSwatch(forecast) {
  const svg = makeElement("svg", { viewBox: "0 0 30 10", class: "swatch", "aria-hidden": "true" }, null, "svg");
  const style = { "stroke-dasharray": forecast.dash, "stroke-width": forecast.width + 0.6, style: `--curve-colour: ${forecast.colour}` };
  svg.append(makeElement("line", { class: "curve", x1: 0, x2: 30, y1: 5, y2: 5, ...style }, null, "svg"));
  return svg;
}

/** Return an interval as text, "" where there is none. */
function formatInterval(forecast, lead) {
  const [low, high] = [forecast.low?.values[lead], forecast.high?.values[lead]];
  if (!Number.isFinite(low) || !Number.isFinite(high)) return "";
  return `${formatValue(low, forecast.low.decimals)} to ${formatValue(high, forecast.high.decimals)}`;
}

/** Return the values at a lead time as a sentence, for screen readers. */
function describeReading(scores, curves, lead) {
  const readings = curves.map((forecast) => `${forecast.label} ${formatValue(forecast.curve.values[lead], forecast.curve.decimals)}`);
  return `${formatLead(scores.leads[lead])}: ${readings.join(", ")}`;
}

/** Fill the table of all lead times. */
function drawValues(table, scores, curves, caption) {
  const head = makeElement("tr");
  head.append(makeElement("th", { scope: "col" }, "Lead time"));
  curves.forEach((forecast) => head.append(makeElement("th", { scope: "col" }, forecast.label)));
  const body = makeElement("tbody");
  scores.leads.forEach((hours, lead) => {
    const row = makeElement("tr");
    row.append(makeElement("th", { scope: "row" }, formatLead(hours)));
    for (const forecast of curves) {
      const cell = makeElement("td", { "data-forecast": forecast.name }, formatValue(forecast.curve.values[lead], forecast.curve.decimals));
      const range = formatInterval(forecast, lead);
      if (range) cell.append(makeElement("small", {}, range));
      row.append(cell);
    }
    body.append(row);
  });
  const tableHead = makeElement("thead");
  tableHead.append(head);
  table.replaceChildren(makeElement("caption", {}, caption), tableHead, body);
}
