// The scorecard: scores of the model against a reference, a row a variable and level or an event, a column a lead time.

const MOST_WIDE_COLUMNS = 14; // with more, cells are narrow and without numbers

/** Fill the table; `choose` is called with the numbers of the card's row and of the lead of a cell that was clicked. */
function drawScorecard(table, scores, place, choose) {
  const dense = scores.leads.length > MOST_WIDE_COLUMNS;
  const card = scores.card.map((_, row) => {
    const own = { ...place, row };
    return {
      difference: curveOf(scores, "difference", place.reference, own)?.values ?? [],
      significant: curveOf(scores, "significant", place.reference, own)?.values ?? [],
    };
  });
  const widest = widestOf(card);
  table.classList.toggle("dense", dense);
  const body = make("tbody");
  scores.card.forEach((row, number) => {
    const line = make("tr");
    line.append(make("th", { scope: "row" }, row.name));
    scores.leads.forEach((_, lead) => line.append(cardCell(scores, card[number], number, lead, widest, dense)));
    body.append(line);
  });
  table.replaceChildren(cardHead(scores, dense), body);
  table.onclick = (event) => chooseCell(event.target.closest("td"), choose);
  table.onkeydown = (event) => moveInCard(table, event, choose);
  return widest;
}

/** Return the difference (%) that has the full colour. */
function widestOf(card) {
  const sizes = card.flatMap((own) => own.difference).filter(Number.isFinite).map(Math.abs);
  return Math.min(Math.max(...sizes, 1), 50);
}

function cardHead(scores, dense) {
  const row = make("tr");
  const unit = inDays(scores) ? 24 : 1;
  row.append(make("th", {}, unit === 24 ? "days" : "hours"));
  const named = dense ? namedLeads(scores, unit) : scores.leads;
  for (const hours of scores.leads) {
    const text = named.includes(hours) ? String(round(hours / unit)) : "";
    row.append(make("th", { scope: "col", title: formatLead(hours) }, text));
  }
  const head = make("thead");
  head.append(row);
  return head;
}

/** Return the lead times that narrow columns name: at most ten, whole days where there are several. */
function namedLeads(scores, unit) {
  const whole = scores.leads.filter((hours) => hours % unit === 0);
  const chosen = whole.length > 1 ? whole : scores.leads;
  const every = Math.ceil(chosen.length / 10);
  return chosen.filter((_, number) => (number + 1) % every === 0);
}

function cardCell(scores, own, row, lead, widest, dense) {
  const value = own.difference[lead];
  const cell = make("td", { tabindex: "-1", "data-row": row, "data-lead": lead });
  const where = `${scores.card[row].name}, ${formatLead(scores.leads[lead])}`;
  if (!Number.isFinite(value)) {
    cell.className = "none";
    cell.setAttribute("aria-label", `${where}: no score`);
    return cell;
  }
  const sure = own.significant[lead] === 1;
  const words = `${where}: ${formatPercent(value, 1)} %${sure ? ", significant" : ""}`;
  cell.setAttribute("aria-label", words);
  cell.title = words;
  if (!dense) cell.textContent = formatPercent(value, Math.abs(value) < 9.95 ? 1 : 0) + (sure ? "*" : "");
  if (sure) cell.classList.add("sure");
  cell.classList.add(value < 0 ? "better" : "worse");
  cell.style.setProperty("--share", Math.min(Math.abs(value) / widest, 1).toFixed(3));
  return cell;
}

function chooseCell(cell, choose) {
  if (cell?.dataset.row) choose(Number(cell.dataset.row), Number(cell.dataset.lead));
}

/** Move between cells by arrow keys; Enter and space choose. */
function moveInCard(table, event, choose) {
  const cell = event.target.closest("td");
  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  if (!cell?.dataset.row) return;
  if (event.key === "Enter" || event.key === " ") chooseCell(cell, choose);
  else if (moves[event.key]) {
    const [down, right] = moves[event.key];
    cellAt(table, Number(cell.dataset.row) + down, Number(cell.dataset.lead) + right)?.focus();
  } else return;
  event.preventDefault();
}

function cellAt(table, row, lead) {
  return table.querySelector(`td[data-row="${row}"][data-lead="${lead}"]`);
}

/** Mark the chosen cell; it is the one that the Tab key reaches. */
function markCell(table, row, lead) {
  for (const old of table.querySelectorAll("td.chosen")) {
    old.classList.remove("chosen");
    old.tabIndex = -1;
  }
  const cell = cellAt(table, row, lead);
  cell?.classList.add("chosen");
  if (cell) cell.tabIndex = 0;
}

/** Return the number of the card's row that belongs to what is chosen: that of the score, else of RMSE. */
function cardRowOf(scores, place) {
  const own = scores.card.findIndex((row) => row.row === place.row && row.score === place.metric.name);
  return own < 0 ? place.row : own;
}

/** Return what the scorecard says of the chosen cell. */
function cardReading(scores, place) {
  const row = cardRowOf(scores, place);
  const own = scores.card[row];
  const value = curveOf(scores, "difference", place.reference, { ...place, row })?.values[place.lead];
  const where = `${own.name}, ${formatLead(scores.leads[place.lead])}, ${scores.regions[place.region].label}`;
  const reference = scores.references[place.reference].label;
  if (!Number.isFinite(value)) return `${where}: no score of ${reference} to compare with.`;
  const blocks = scores.seasons[place.season].blocks[place.lead];
  const sure = curveOf(scores, "significant", place.reference, { ...place, row })?.values[place.lead] === 1;
  const few = blocks < scores.enough_blocks ? `not tested: ${blocks} blocks, ${scores.enough_blocks} are needed` : "not significant";
  return `${where}: ${own.score === "rmse" ? "RMSE " : ""}${formatPercent(value, 1)} % against ${reference} (${sure ? "significant" : few}).`;
}
