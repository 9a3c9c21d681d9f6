// Puts the page together: reads the scores, fills the choices, draws again when something is chosen.

const findById = (name) => document.getElementById(name);

/** The page: `state` has the names of what is selected, `selection` their indices, `layout` the chart's scales. */
class Page {
  constructor(scores) {
    this.scores = scores;
    this.start = buildInitialState(scores);
    this.state = parseHash(scores, this.start, location.hash);
    this.svg = findById("chart").querySelector("svg");
    this.listen();
  }

  /** Connect the handlers of lists, address, chart and size of the window. */
  listen() {
    for (const key of ["variable", "level", "score", "region", "season", "against"]) {
      findById(`choose-${key}`).addEventListener("change", (event) => this.choose({ [key]: event.target.value }));
    }
    findById("choose-lead").addEventListener("change", (event) => this.choose({ lead: Number(event.target.value) }));
    addEventListener("hashchange", () => this.show(parseHash(this.scores, this.start, location.hash)));
    const chart = findById("chart");
    new ResizeObserver(() => chart.clientWidth !== this.width && this.drawCurves()).observe(chart);
    chart.addEventListener("pointermove", (event) => this.read(findNearestLead(this.svg, this.layout, event.clientX)));
    chart.addEventListener("pointerleave", () => this.read(this.selection.lead));
    chart.addEventListener("click", (event) => this.chooseLead(findNearestLead(this.svg, this.layout, event.clientX)));
    chart.addEventListener("keydown", (event) => this.chooseByKey(event));
  }

  /** Change what is chosen, draw it and write it into the address. */
  choose(change) {
    this.show(repairState(this.scores, this.start, { ...this.state, ...change }));
    history.replaceState(null, "", formatHash(this.state));
  }

  /** Choose the lead time of an index; beyond the ends the nearest one. */
  chooseLead(number) {
    const last = this.scores.leads.length - 1;
    this.choose({ lead: this.scores.leads[Math.min(Math.max(number, 0), last)] });
  }

  /** Choose a lead time by arrow keys, Home and End. */
  chooseByKey(event) {
    const { lead } = this.selection;
    const moves = { ArrowLeft: lead - 1, ArrowRight: lead + 1, Home: 0, End: Infinity };
    if (!(event.key in moves)) return;
    this.chooseLead(moves[event.key]);
    event.preventDefault();
  }

  /** Show the curves of a cell of the scorecard. A cell of RMSE keeps the selected score, unless that has cells too. */
  chooseCell(number, lead) {
    const { row, score } = this.scores.card[number];
    const { variable, level } = this.scores.rows[row];
    const hasOwnCells = this.scores.card.some((entry) => entry.score !== "rmse" && entry.score === this.state.score);
    const change = score !== "rmse" || hasOwnCells ? { score } : {};
    this.choose({ variable, level, lead: this.scores.leads[lead], ...change });
    findById("curves").scrollIntoView({ block: "nearest" });
  }

  /** Hide a forecast, or show it again. */
  toggle(name) {
    const { hidden } = this.state;
    this.choose({ hidden: hidden.includes(name) ? hidden.filter((other) => other !== name) : [...hidden, name] });
  }

  /** Draw the page for a state. */
  show(state) {
    this.state = state;
    this.selection = findSelection(this.scores, state);
    fillChoices(this.scores, state);
    this.explain();
    this.drawCurves();
    this.drawCard();
  }

  /** Write the title, the meaning of the score and where intervals are missing. */
  explain() {
    const { scores, selection } = this;
    const [row, season] = [scores.rows[selection.row], scores.seasons[selection.season]];
    const units = metricUnits(selection.metric, row);
    const scoreOfRow = `${metricLabel(selection.metric, row)} of ${formatRow(scores, row)}${units ? ` (${units})` : ""}`;
    this.title = `${scoreOfRow}, ${scores.regions[selection.region].label}, ${formatSeason(season)}`;
    findById("chart-title").textContent = this.title;
    const { definition: meaning, good, wind } = selection.metric;
    const numWithoutInterval = season.blocks.filter((blocks) => blocks < scores.least_blocks).length;
    const sentences = [meaning, row.wind ? wind : "", good, numWithoutInterval ? describeFewBlocks(scores, numWithoutInterval) : ""];
    findById("meaning").textContent = sentences.filter(Boolean).join(" ");
  }

  /** Draw the chart and fill the table of all lead times. */
  drawCurves() {
    const { scores, selection, state } = this;
    this.curves = readForecastCurves(scores, selection);
    const shownCurves = this.curves.filter((forecast) => !state.hidden.includes(forecast.name));
    this.width = findById("chart").clientWidth;
    this.layout = drawChart(this.svg, scores, selection, shownCurves);
    findById("chart").classList.toggle("empty", !this.curves.length);
    drawValues(findById("values"), scores, shownCurves, this.title);
    this.read(selection.lead);
  }

  /** Show the values at the lead time of an index. */
  read(lead) {
    moveCursor(this.svg, this.layout, lead);
    findById("reading-lead").textContent = `at ${formatLead(this.scores.leads[lead])}`;
    drawLegend(findById("legend"), this.curves, this.state, lead, (name) => this.toggle(name));
    const chart = findById("chart");
    chart.setAttribute("aria-valuemax", this.scores.leads.length - 1);
    chart.setAttribute("aria-valuenow", lead);
    chart.setAttribute("aria-valuetext", describeReading(this.scores, this.curves, lead));
  }

  /** Draw the scorecard, if another one is selected, and mark the selected cell. */
  drawCard() {
    const { scores, selection } = this;
    const drawnSelection = [selection.reference, selection.region, selection.season].join();
    if (this.drawnSelection !== drawnSelection) {
      const largestDifference = drawScorecard(findById("scorecard"), scores, selection, (row, lead) => this.chooseCell(row, lead));
      findById("card-best").textContent = `−${largestDifference.toFixed(0)} %: better`;
      findById("card-worst").textContent = `+${largestDifference.toFixed(0)} %: worse`;
      this.drawnSelection = drawnSelection;
    }
    markCell(findById("scorecard"), findCardRow(scores, selection), selection.lead);
    findById("card-reading").textContent = describeCell(scores, selection);
  }
}

/** Return the variable and the level of a row. */
function formatRow(scores, row) {
  return row.level ? `${row.variable} at ${row.level} ${scores.level_units}` : row.variable;
}

/** Return the name of a season with its number of cases. */
function formatSeason(season) {
  return `${season.name === "all" ? "all seasons" : season.name}, ${season.cases} cases`;
}

/** Return the sentence on lead times without intervals, of which there are `numLeads`. */
function describeFewBlocks(scores, numLeads) {
  const leads = numLeads === scores.leads.length ? "There are no intervals" : `There are no intervals at ${numLeads} lead times`;
  return `${leads}: the cases make fewer than ${scores.least_blocks} blocks.`;
}

/** Fill the lists of variables, levels, scores, ... that can be selected. */
function fillChoices(scores, state) {
  const variables = [...new Set(scores.rows.map((row) => row.variable))];
  const row = scores.rows.find((entry) => entry.variable === state.variable);
  fillSelect("variable", variables.map((name) => [name, name]), state.variable);
  fillSelect("level", listLevels(scores, state.variable).map((level) => [level, level ? `${level} ${scores.level_units}` : "–"]), state.level);
  const metricsOfRow = scores.metrics.filter((metric) => rowHasMetric(metric, findRow(scores, state)));
  fillSelect("score", metricsOfRow.map((metric) => [metric.name, metricLabel(metric, row)]), state.score);
  fillSelect("region", scores.regions.map((entry) => [entry.name, entry.label]), state.region);
  fillSelect("season", scores.seasons.map((season) => [season.name, formatSeason(season)]), state.season);
  fillSelect("lead", scores.leads.map((hours) => [String(hours), formatLead(hours)]), String(state.lead));
  fillSelect("against", scores.references.map((entry) => [entry.name, entry.label]), state.against);
}

/** Fill one list with options [value, text] and select one; a list of one option cannot be used. */
function fillSelect(key, options, chosen) {
  const select = findById(`choose-${key}`);
  select.replaceChildren(...options.map(([value, text]) => makeElement("option", { value }, text)));
  select.value = chosen;
  select.disabled = options.length < 2;
}

/** Show the interactive part in selection of the plain table, once it works. */
async function main() {
  const page = new Page(await readScores(findById("scores")));
  findById("interactive").hidden = false;
  page.show(page.state);
  findById("plain").hidden = true;
  document.documentElement.dataset.ready = "true";
}
