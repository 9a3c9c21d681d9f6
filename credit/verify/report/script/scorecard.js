// The scorecard: scores of the model against a reference, a row a variable and level or an event, a column a lead time.

const MAX_WIDE_COLUMNS = 14; // with more, cells are narrow and without numbers

/** Fill the table; `choose` is called with the numbers of the card's row and of the lead of a cell that was clicked. */
function drawScorecard(table, scores, selection, choose) {
  const dense = scores.leads.length > MAX_WIDE_COLUMNS;
  const card = scores.card.map((_, row) => {
    const rowSelection = { ...selection, row };
    return {
      difference: readCurve(scores, "difference", selection.reference, rowSelection)?.values ?? [],
      significant: readCurve(scores, "significant", selection.reference, rowSelection)?.values ?? [],
    };
  });
  const largestDifference = findLargestDifference(card);
  table.classList.toggle("dense", dense);
  const body = makeElement("tbody");
  scores.card.forEach((row, number) => {
    const tableRow = makeElement("tr");
    tableRow.append(makeElement("th", { scope: "row" }, row.name));
    scores.leads.forEach((_, lead) => tableRow.append(buildCell(scores, card[number], number, lead, largestDifference, dense)));
    body.append(tableRow);
  });
  table.replaceChildren(buildHead(scores, dense), body);
  table.onclick = (event) => chooseCell(event.target.closest("td"), choose);
  table.onkeydown = (event) => handleCardKey(table, event, choose);
  return largestDifference;
}

/** Return the difference (%) that has the full colour. */
function findLargestDifference(card) {
  const sizes = card.flatMap((row) => row.difference).filter(Number.isFinite).map(Math.abs);
  return Math.min(Math.max(...sizes, 1), 50);
}

/** Return the head of the table, with the lead times. */
function buildHead(scores, dense) {
  const row = makeElement("tr");
  const unit = usesDays(scores) ? 24 : 1;
  row.append(makeElement("th", {}, unit === 24 ? "days" : "hours"));
  const namedHours = dense ? selectNamedLeads(scores, unit) : scores.leads;
  for (const hours of scores.leads) {
    const text = namedHours.includes(hours) ? String(roundToHundredth(hours / unit)) : "";
    row.append(makeElement("th", { scope: "col", title: formatLead(hours) }, text));
  }
  const head = makeElement("thead");
  head.append(row);
  return head;
}

/** Return the lead times that narrow columns name: at most ten, whole days where there are several. */
function selectNamedLeads(scores, unit) {
  const wholeUnits = scores.leads.filter((hours) => hours % unit === 0);
  const candidates = wholeUnits.length > 1 ? wholeUnits : scores.leads;
  const stride = Math.ceil(candidates.length / 10);
  return candidates.filter((_, number) => (number + 1) % stride === 0);
}

/** Return the cell of a row's difference at a lead time; the colour shows its size beside the largest one. */
function buildCell(scores, curves, row, lead, largestDifference, dense) {
  const value = curves.difference[lead];
  const cell = makeElement("td", { tabindex: "-1", "data-row": row, "data-lead": lead });
  const title = `${scores.card[row].name}, ${formatLead(scores.leads[lead])}`;
  if (!Number.isFinite(value)) {
    cell.className = "none";
    cell.setAttribute("aria-label", `${title}: no score`);
    return cell;
  }
  const isSignificant = curves.significant[lead] === 1;
  const description = `${title}: ${formatPercent(value, 1)} %${isSignificant ? ", significant" : ""}`;
  cell.setAttribute("aria-label", description);
  cell.title = description;
  if (!dense) cell.textContent = formatPercent(value, Math.abs(value) < 9.95 ? 1 : 0) + (isSignificant ? "*" : "");
  if (isSignificant) cell.classList.add("sure");
  cell.classList.add(value < 0 ? "better" : "worse");
  cell.style.setProperty("--share", Math.min(Math.abs(value) / largestDifference, 1).toFixed(3));
  return cell;
}

/** Call `choose` for a cell; the head and the names of the rows are no cells of it. */
function chooseCell(cell, choose) {
  if (cell?.dataset.row) choose(Number(cell.dataset.row), Number(cell.dataset.lead));
}

/** Move between cells by arrow keys; Enter and space choose. */
function handleCardKey(table, event, choose) {
  const cell = event.target.closest("td");
  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  if (!cell?.dataset.row) return;
  if (event.key === "Enter" || event.key === " ") chooseCell(cell, choose);
  else if (moves[event.key]) {
    const [down, right] = moves[event.key];
    findCell(table, Number(cell.dataset.row) + down, Number(cell.dataset.lead) + right)?.focus();
  } else return;
  event.preventDefault();
}

/** Return the cell of a row and a lead time by their numbers, null if there is none. */
function findCell(table, row, lead) {
  return table.querySelector(`td[data-row="${row}"][data-lead="${lead}"]`);
}

/** Mark the chosen cell; it is the one that the Tab key reaches. */
function markCell(table, row, lead) {
  for (const old of table.querySelectorAll("td.chosen")) {
    old.classList.remove("chosen");
    old.tabIndex = -1;
  }
  const cell = findCell(table, row, lead);
  cell?.classList.add("chosen");
  if (cell) cell.tabIndex = 0;
}

/** Return the number of the card's row that belongs to what is chosen: that of the score, else of RMSE. */
function findCardRow(scores, selection) {
  const cardRow = scores.card.findIndex((row) => row.row === selection.row && row.score === selection.metric.name);
  return cardRow < 0 ? selection.row : cardRow;
}

/** Return what the scorecard says of the chosen cell. */
function describeCell(scores, selection) {
  const row = findCardRow(scores, selection);
  const { name, score } = scores.card[row];
  const value = readCurve(scores, "difference", selection.reference, { ...selection, row })?.values[selection.lead];
  const title = `${name}, ${formatLead(scores.leads[selection.lead])}, ${scores.regions[selection.region].label}`;
  const reference = scores.references[selection.reference].label;
  const scoreName = score === "rmse" ? "RMSE " : "";
  if (!Number.isFinite(value)) return `${title}: no score of ${reference} to compare with.`;
  const blocks = scores.seasons[selection.season].blocks[selection.lead];
  const isSignificant = readCurve(scores, "significant", selection.reference, { ...selection, row })?.values[selection.lead] === 1;
  const isTested = blocks >= scores.enough_blocks;
  const reason = isTested ? "not significant" : `not tested: ${blocks} blocks, ${scores.enough_blocks} are needed`;
  return `${title}: ${scoreName}${formatPercent(value, 1)} % against ${reference} (${isSignificant ? "significant" : reason}).`;
}
