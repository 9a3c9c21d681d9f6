// What is chosen: kept by name, written into the address behind #, so that a view can be sent to someone.

/** Return what the page shows first. */
function startState(scores) {
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

/** Return what an address asks for, as far as the page has it; the rest as in `start`. */
function stateFromHash(scores, start, hash) {
  const asked = new URLSearchParams(hash.replace(/^#/, ""));
  const state = { ...start, hidden: asked.getAll("hide") };
  for (const key of ["variable", "level", "score", "region", "season", "against"]) {
    if (asked.has(key)) state[key] = asked.get(key);
  }
  if (asked.has("lead")) state.lead = Number(asked.get("lead"));
  return repaired(scores, start, state);
}

/** Return the address's part behind #. */
function hashOf(state) {
  const { hidden, ...rest } = state;
  const parts = new URLSearchParams(rest);
  hidden.forEach((name) => parts.append("hide", name));
  return `#${parts}`;
}

/** Return the state with what the page does not have replaced by what it has. */
function repaired(scores, start, state) {
  const known = (list, name, other) => (list.some((own) => own.name === name) ? name : other);
  const variable = scores.rows.some((row) => row.variable === state.variable) ? state.variable : start.variable;
  const levels = levelsOf(scores, variable);
  const level = levels.includes(state.level) ? state.level : nearestLevel(levels, state.level);
  const here = scores.metrics.filter((metric) => isOfRow(metric, rowOf(scores, { variable, level })));
  return {
    variable,
    level,
    score: known(here, state.score, start.score),
    region: known(scores.regions, state.region, start.region),
    season: known(scores.seasons, state.season, start.season),
    against: known(scores.references, state.against, start.against),
    lead: scores.leads.includes(state.lead) ? state.lead : start.lead,
    hidden: state.hidden.filter((name) => scores.forecasts.some((own) => own.name === name)),
  };
}

/** Return the number of the row of a variable and a level. */
function rowOf(scores, { variable, level }) {
  return scores.rows.findIndex((own) => own.variable === variable && own.level === level);
}

/** Return the levels of a variable as texts, "" for none. */
function levelsOf(scores, variable) {
  return scores.rows.filter((row) => row.variable === variable).map((row) => row.level);
}

function nearestLevel(levels, wanted) {
  const distance = (level) => Math.abs(Number(level) - Number(wanted));
  return levels.reduce((best, level) => (distance(level) < distance(best) ? level : best));
}

/** Return the chosen metric and the numbers of row, region, season, reference and lead. */
function placeOf(scores, state) {
  const number = (list, name) => list.findIndex((own) => own.name === name);
  return {
    metric: scores.metrics.find((own) => own.name === state.score),
    row: rowOf(scores, state),
    region: number(scores.regions, state.region),
    season: number(scores.seasons, state.season),
    reference: number(scores.references, state.against),
    lead: scores.leads.indexOf(state.lead),
  };
}
