"""Write the tables of docs/numerics.md from benchmarks/results/<device>/numerics.json, between the page's two markers.

    python benchmarks/make_numerics_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "numerics.md"
BEGIN, END = "<!-- measured -->", "<!-- end of measured -->"


def number(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.3g}"


def fraction(value: float) -> str:
    """Six digits, and 1 only where it is 1."""
    return "1" if value == 1.0 else f"{min(value, 0.999999):.6f}"


def tables(body: dict[str, Any]) -> list[str]:
    lines = [f"### {body['device']}", "", f"`{body['command']}`, commit {body['commit']}, {body['date']}; {body['note']}", ""]
    rows = body["rows"]
    lines += ["| rollout and learner | tokens | bitwise equal | max \\|d\\| | mean \\|d\\| | k3 | \\|d\\| > ln 2 |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        if row["table"] == "exactness":
            k3 = number(row["k3"]) + (f" +- {number(row['k3_stderr'])}" if row["k3_stderr"] else "")
            lines.append(f"| {row['case']} | {row['tokens']} | {fraction(row['ours'])} | {number(row['max_abs'])} | {number(row['mean_abs'])} | {k3} | {number(row['extreme'])} |")
    replayed = [row for row in rows if row["table"] == "replay"]
    if replayed:
        lines += ["", "| replayed routes | k3 off | k3 on | lower by |", "|---|---|---|---|"]
        for row in replayed:
            lower = f"{1 / row['ratio']:.1f}x" if row["ratio"] else ""
            lines.append(f"| {row['case'].split(': k3 with')[0]} | {number(row['peer_value'])} | {number(row['ours'])} | {lower} |")
    costs = [row for row in rows if row["table"] == "cost"]
    if costs:
        lines += ["", "| cost | deterministic, ms | fast, ms | ratio |", "|---|---|---|---|"]
        lines += [f"| {row['case']} | {row['ours']:.4g} | {row['peer_value']:.4g} | {row['ratio']:.2f}x |" for row in costs]
    return [*lines, ""]


def page(text: str, results: list[dict[str, Any]]) -> str:
    """The text with what stands between its markers replaced. Raises ValueError without markers."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"the page has no {BEGIN} and {END}; restore them")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    made = "\n".join(line for body in results for line in tables(body))
    return f"{head}{BEGIN}\n\n{made}\n{END}{tail}"


def measured() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks" / "results").glob("*/numerics.json"))]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), measured()))
