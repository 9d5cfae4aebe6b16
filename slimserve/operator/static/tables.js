// What changes seldom: settings, doctor, receipts. Everything goes in as text, never as markup.

import { DASH, clock } from "./format.js";

export function make(name, text, className) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value));

export function settings(plan, rows, notes) {
  rows.replaceChildren(...plan.settings.map((row) => {
    const line = make("tr"), key = make("th"), value = make("td"), why = make("td", row.why);
    key.scope = "row";
    key.append(make("code", row.key));
    value.append(make("code", shown(row.value)));
    why.append(make("span", row.evidence, "evidence"));
    line.append(key, value, why);
    line.dataset.text = `${row.key} ${shown(row.value)} ${row.why} ${row.evidence}`.toLowerCase();
    return line;
  }));
  notes.replaceChildren(
    ...plan.not_carried.map((one) => make("p", `Not carried: ${one.what}: ${one.why}`, "note")),
    ...plan.notes.map((one) => make("p", `Note: ${one}`, "note")),
  );
}

export function filter(rows, text, count) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  let visible = 0;
  for (const row of rows.children) {
    row.hidden = !words.every((word) => row.dataset.text.includes(word));
    visible += !row.hidden;
  }
  const all = rows.children.length;
  count.textContent = words.length === 0 ? `${all} settings, each with its reason and evidence`
    : visible ? `${visible} of ${all} settings` : `none of ${all} settings has “${text}” in its key, value, reason or evidence`;
}

export function doctor(data, findings, time) {
  time.textContent = `looked at ${clock(data.checked)}`;
  findings.replaceChildren(...data.findings.map((one) => {
    const box = make("div", undefined, "finding");
    box.append(make("h3", one.what), make("p", `why: ${one.why}`), make("p", `do: ${one.do}`));
    if (one.blocks && one.blocks !== "nothing") box.append(make("p", `blocks: ${one.blocks}`));
    return box;
  }));
  if (!data.findings.length) findings.append(make("p", "Nothing is wrong with this machine, as far as it can be seen.", "empty"));
}

export function receipts(data, list) {
  if (!data.receipts.length) {
    list.replaceChildren(make("p", `The registry holds no receipt of ${data.profile}: nothing that was measured here backs its numbers yet. A setting says what its value rests on instead.`, "empty"));
    return;
  }
  const table = make("table", undefined, "plain"), head = make("tr"), body = make("tbody");
  for (const name of ["Receipt", "Workload", "Outcome", "Recall", "Tokens/s", "Commit", "When"]) head.append(Object.assign(make("th", name), { scope: "col" }));
  for (const receipt of data.receipts) {
    const row = make("tr"), file = make("td");
    file.append(make("code", receipt.file));
    if (receipt.problem) file.append(make("span", receipt.problem, "evidence"));
    const rates = (receipt.points ?? []).map((point) => point.output_tokens_per_s).filter((rate) => typeof rate === "number");
    const cells = [receipt.workload?.name, receipt.outcome, receipt.battery?.verdict, rates.length ? Math.max(...rates).toFixed(1) : null, receipt.commit, receipt.written];
    row.append(file, ...cells.map((value) => make("td", value === undefined || value === null ? DASH : shown(value))));
    body.append(row);
  }
  const top = make("thead");
  top.append(head);
  table.append(top, body);
  list.replaceChildren(table);
}
