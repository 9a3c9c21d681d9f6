// Values beside the chart: a legend that reads them at one lead time and switches forecasts off, and a table of all.

/** Fill the legend for the lead time of a number; `toggle` is called with the name of a forecast. */
function drawLegend(table, curves, state, lead, toggle) {
  const rows = curves.map((own) => {
    const shown = !state.hidden.includes(own.name);
    const row = make("tr", { "data-forecast": own.name });
    const button = make("button", { type: "button", class: "toggle", "aria-pressed": String(shown) });
    button.append(swatch(own), make("span", {}, own.label));
    button.addEventListener("click", () => toggle(own.name));
    const name = make("th", { scope: "row" });
    name.append(button);
    row.append(name, make("td", { class: "value" }, formatValue(own.curve.values[lead], own.curve.decimals)));
    row.append(make("td", { class: "range" }, rangeText(own, lead)));
    return row;
  });
  const focused = table.contains(document.activeElement) && document.activeElement.closest("tr")?.dataset.forecast;
  table.querySelector("tbody").replaceChildren(...rows);
  if (focused) rows.find((row) => row.dataset.forecast === focused)?.querySelector("button").focus();
}

/** Return a short piece of a forecast's line. */
function swatch(own) {
  const svg = make("svg", { viewBox: "0 0 30 10", class: "swatch", "aria-hidden": "true" }, null, "svg");
  const look = { "stroke-dasharray": own.dash, "stroke-width": own.width + 0.6, style: `--own: ${own.colour}` };
  svg.append(make("line", { class: "curve", x1: 0, x2: 30, y1: 5, y2: 5, ...look }, null, "svg"));
  return svg;
}

/** Return an interval as text, "" where there is none. */
function rangeText(own, lead) {
  const [low, high] = [own.low?.values[lead], own.high?.values[lead]];
  if (!Number.isFinite(low) || !Number.isFinite(high)) return "";
  return `${formatValue(low, own.low.decimals)} to ${formatValue(high, own.high.decimals)}`;
}

/** Return what the chart says at a lead time, for who hears it. */
function spokenReading(scores, curves, lead) {
  const parts = curves.map((own) => `${own.label} ${formatValue(own.curve.values[lead], own.curve.decimals)}`);
  return `${formatLead(scores.leads[lead])}: ${parts.join(", ")}`;
}

/** Fill the table of all lead times. */
function drawValues(table, scores, curves, caption) {
  const head = make("tr");
  head.append(make("th", { scope: "col" }, "Lead time"));
  curves.forEach((own) => head.append(make("th", { scope: "col" }, own.label)));
  const body = make("tbody");
  scores.leads.forEach((hours, lead) => {
    const row = make("tr");
    row.append(make("th", { scope: "row" }, formatLead(hours)));
    for (const own of curves) {
      const cell = make("td", { "data-forecast": own.name }, formatValue(own.curve.values[lead], own.curve.decimals));
      const range = rangeText(own, lead);
      if (range) cell.append(make("small", {}, range));
      row.append(cell);
    }
    body.append(row);
  });
  const top = make("thead");
  top.append(head);
  table.replaceChildren(make("caption", {}, caption), top, body);
}
