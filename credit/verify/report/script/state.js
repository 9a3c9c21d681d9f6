// What is chosen: kept by name, written into the address behind #, so that a view can be sent to someone.

/** Return the state of the page when it opens: names of everything that can be selected. */
function buildInitialState(scores) {
  const row = scores.rows[scores.first_row];
  return {
    variable: row.variable,
    level: row.level,
    score: scores.metrics[0].name,
    region: scores.regions[0].name,
    season: scores.seasons[0].name,
    against: scores.first_reference,
    lead: scores.leads.includes(72) ? 72 : scores.leads[scores.leads.length - 1],
    hidden: [],
  };
}

/** Return the state that an address asks for, as far as the page has it; the rest as in `start`. */
function parseHash(scores, start, hash) {
  const parameters = new URLSearchParams(hash.replace(/^#/, ""));
  const state = { ...start, hidden: parameters.getAll("hide") };
  for (const key of ["variable", "level", "score", "region", "season", "against"]) {
    if (parameters.has(key)) state[key] = parameters.get(key);
  }
  if (parameters.has("lead")) state.lead = Number(parameters.get("lead"));
  return repairState(scores, start, state);
}

/** Return the address's part behind #. */
function formatHash(state) {
  const { hidden, ...rest } = state;
  const parameters = new URLSearchParams(rest);
  hidden.forEach((name) => parameters.append("hide", name));
  return `#${parameters}`;
}

/** Return the state with what the page does not have replaced by what it has. */
function repairState(scores, start, state) {
  const keepIfPresent = (list, name, other) => (list.some((entry) => entry.name === name) ? name : other);
  const variable = scores.rows.some((row) => row.variable === state.variable) ? state.variable : start.variable;
  const levels = listLevels(scores, variable);
  const level = levels.includes(state.level) ? state.level : findNearestLevel(levels, state.level);
  const metricsOfRow = scores.metrics.filter((metric) => rowHasMetric(metric, findRow(scores, { variable, level })));
  return {
    variable,
    level,
    score: keepIfPresent(metricsOfRow, state.score, start.score),
    region: keepIfPresent(scores.regions, state.region, start.region),
    season: keepIfPresent(scores.seasons, state.season, start.season),
    against: keepIfPresent(scores.references, state.against, start.against),
    lead: scores.leads.includes(state.lead) ? state.lead : start.lead,
    hidden: state.hidden.filter((name) => scores.forecasts.some((entry) => entry.name === name)),
  };
}

/** Return the index of the row of a variable and a level. */
function findRow(scores, { variable, level }) {
  return scores.rows.findIndex((entry) => entry.variable === variable && entry.level === level);
}

/** Return the levels of a variable as texts, "" for none. */
function listLevels(scores, variable) {
  return scores.rows.filter((row) => row.variable === variable).map((row) => row.level);
}

/** Return the level that is nearest to one that the variable does not have. */
function findNearestLevel(levels, target) {
  const distance = (level) => Math.abs(Number(level) - Number(target));
  return levels.reduce((best, level) => (distance(level) < distance(best) ? level : best));
}

/** Return the chosen metric and the indices of row, region, season, reference and lead. */
function findSelection(scores, state) {
  const indexOf = (list, name) => list.findIndex((entry) => entry.name === name);
  return {
    metric: scores.metrics.find((entry) => entry.name === state.score),
    row: findRow(scores, state),
    region: indexOf(scores.regions, state.region),
    season: indexOf(scores.seasons, state.season),
    reference: indexOf(scores.references, state.against),
    lead: scores.leads.indexOf(state.lead),
  };
}
