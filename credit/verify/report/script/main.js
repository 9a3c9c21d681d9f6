// Puts the page together: reads the scores, fills the choices, draws again when something is chosen.

const find = (name) => document.getElementById(name);

/** Everything that is on the page; `state` is what is chosen, `frame` the chart's scales. */
class Page {
  constructor(scores) {
    this.scores = scores;
    this.start = startState(scores);
    this.state = stateFromHash(scores, this.start, location.hash);
    this.svg = find("chart").querySelector("svg");
    this.listen();
  }

  listen() {
    for (const key of ["variable", "level", "score", "region", "season", "against"]) {
      find(`choose-${key}`).addEventListener("change", (event) => this.choose({ [key]: event.target.value }));
    }
    find("choose-lead").addEventListener("change", (event) => this.choose({ lead: Number(event.target.value) }));
    addEventListener("hashchange", () => this.show(stateFromHash(this.scores, this.start, location.hash)));
    const chart = find("chart");
    new ResizeObserver(() => chart.clientWidth !== this.width && this.drawCurves()).observe(chart);
    chart.addEventListener("pointermove", (event) => this.read(leadAt(this.svg, this.frame, event.clientX)));
    chart.addEventListener("pointerleave", () => this.read(this.place.lead));
    chart.addEventListener("click", (event) => this.chooseLead(leadAt(this.svg, this.frame, event.clientX)));
    chart.addEventListener("keydown", (event) => this.chooseByKey(event));
  }

  /** Change what is chosen, draw it and write it into the address. */
  choose(change) {
    this.show(repaired(this.scores, this.start, { ...this.state, ...change }));
    history.replaceState(null, "", hashOf(this.state));
  }

  chooseLead(number) {
    const last = this.scores.leads.length - 1;
    this.choose({ lead: this.scores.leads[Math.min(Math.max(number, 0), last)] });
  }

  chooseByKey(event) {
    const { lead } = this.place;
    const moves = { ArrowLeft: lead - 1, ArrowRight: lead + 1, Home: 0, End: Infinity };
    if (!(event.key in moves)) return;
    this.chooseLead(moves[event.key]);
    event.preventDefault();
  }

  /** Show what a cell of the scorecard is of; RMSE stands for every score of its row but those with cells of their own. */
  chooseCell(number, lead) {
    const { row, score } = this.scores.card[number];
    const { variable, level } = this.scores.rows[row];
    const owned = this.scores.card.some((own) => own.score !== "rmse" && own.score === this.state.score);
    const change = score !== "rmse" || owned ? { score } : {};
    this.choose({ variable, level, lead: this.scores.leads[lead], ...change });
    find("curves").scrollIntoView({ block: "nearest" });
  }

  toggle(name) {
    const { hidden } = this.state;
    this.choose({ hidden: hidden.includes(name) ? hidden.filter((own) => own !== name) : [...hidden, name] });
  }

  show(state) {
    this.state = state;
    this.place = placeOf(this.scores, state);
    fillChoices(this.scores, state);
    this.explain();
    this.drawCurves();
    this.drawCard();
  }

  /** Say what is shown, what it means and where intervals are missing. */
  explain() {
    const { scores, place } = this;
    const [row, season] = [scores.rows[place.row], scores.seasons[place.season]];
    const units = metricUnits(place.metric, row);
    const what = `${metricLabel(place.metric, row)} of ${rowTitle(scores, row)}${units ? ` (${units})` : ""}`;
    this.title = `${what}, ${scores.regions[place.region].label}, ${seasonLabel(season)}`;
    find("chart-title").textContent = this.title;
    const { definition: meaning, good, wind } = place.metric;
    const few = season.blocks.filter((blocks) => blocks < scores.least_blocks).length;
    const parts = [meaning, row.wind ? wind : "", good, few ? fewBlocks(scores, few) : ""];
    find("meaning").textContent = parts.filter(Boolean).join(" ");
  }

  drawCurves() {
    const { scores, place, state } = this;
    this.curves = forecastCurves(scores, place);
    const shown = this.curves.filter((own) => !state.hidden.includes(own.name));
    this.width = find("chart").clientWidth;
    this.frame = drawChart(this.svg, scores, place, shown);
    find("chart").classList.toggle("empty", !this.curves.length);
    drawValues(find("values"), scores, shown, this.title);
    this.read(place.lead);
  }

  /** Show the values at the lead time of a number. */
  read(lead) {
    moveCursor(this.svg, this.frame, lead);
    find("reading-lead").textContent = `at ${formatLead(this.scores.leads[lead])}`;
    drawLegend(find("legend"), this.curves, this.state, lead, (name) => this.toggle(name));
    const chart = find("chart");
    chart.setAttribute("aria-valuemax", this.scores.leads.length - 1);
    chart.setAttribute("aria-valuenow", lead);
    chart.setAttribute("aria-valuetext", spokenReading(this.scores, this.curves, lead));
  }

  drawCard() {
    const { scores, place } = this;
    const wanted = [place.reference, place.region, place.season].join();
    if (this.drawn !== wanted) {
      const widest = drawScorecard(find("scorecard"), scores, place, (row, lead) => this.chooseCell(row, lead));
      find("card-best").textContent = `−${widest.toFixed(0)} %: better`;
      find("card-worst").textContent = `+${widest.toFixed(0)} %: worse`;
      this.drawn = wanted;
    }
    markCell(find("scorecard"), cardRowOf(scores, place), place.lead);
    find("card-reading").textContent = cardReading(scores, place);
  }
}

function rowTitle(scores, row) {
  return row.level ? `${row.variable} at ${row.level} ${scores.level_units}` : row.variable;
}

function seasonLabel(season) {
  return `${season.name === "all" ? "all seasons" : season.name}, ${season.cases} cases`;
}

function fewBlocks(scores, few) {
  const where = few === scores.leads.length ? "There are no intervals" : `There are no intervals at ${few} lead times`;
  return `${where}: the cases make fewer than ${scores.least_blocks} blocks.`;
}

/** Fill the lists of what can be chosen. */
function fillChoices(scores, state) {
  const variables = [...new Set(scores.rows.map((row) => row.variable))];
  const row = scores.rows.find((own) => own.variable === state.variable);
  fill("variable", variables.map((name) => [name, name]), state.variable);
  fill("level", levelsOf(scores, state.variable).map((level) => [level, level ? `${level} ${scores.level_units}` : "–"]), state.level);
  const here = scores.metrics.filter((metric) => isOfRow(metric, rowOf(scores, state)));
  fill("score", here.map((metric) => [metric.name, metricLabel(metric, row)]), state.score);
  fill("region", scores.regions.map((own) => [own.name, own.label]), state.region);
  fill("season", scores.seasons.map((own) => [own.name, seasonLabel(own)]), state.season);
  fill("lead", scores.leads.map((hours) => [String(hours), formatLead(hours)]), String(state.lead));
  fill("against", scores.references.map((own) => [own.name, own.label]), state.against);
}

function fill(key, options, chosen) {
  const select = find(`choose-${key}`);
  select.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
  select.value = chosen;
  select.disabled = options.length < 2;
}

/** Show the interactive part in place of the plain table, once it works. */
async function main() {
  const page = new Page(await readScores(find("scores")));
  find("interactive").hidden = false;
  page.show(page.state);
  find("plain").hidden = true;
  document.documentElement.dataset.ready = "true";
}
