"""Results of benchmarks as one page that needs nothing but itself: pictures, tables, where they were measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from emberkeep.bench.charts import charts_of
from emberkeep.bench.report import BenchResult, Table, read_report, readable_value
from emberkeep.bench.svg import STYLE, draw_one
from emberkeep.errors import EmberkeepError
from emberkeep.values import dataclass

_PAGE_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2.5rem }
figure { margin: 1.5rem 0; overflow-x: auto } svg { max-width: 100%; height: auto }
.wide { overflow-x: auto }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
caption { text-align: left; font-weight: 600; padding: .3rem 0 }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
tbody tr { border-top: 1px solid #8884 }
.faint { opacity: .75 }
""".strip()


@dataclass(frozen=True, slots=True)
class Report:
    """One file that `--json` has written."""

    name: str
    results: Sequence[BenchResult]
    around: Mapping[str, Any]
    """The machine, the versions, the model and the command."""


def read_reports(folder: Path) -> list[Report]:
    """Of every `*.json` in a folder, by name. Raises EmberkeepError."""
    reports = [_read(path) for path in sorted(folder.glob("*.json"))]
    if not reports:
        raise EmberkeepError(f"There is no report in {folder}: write one with emberkeep bench ... --json FILE.")
    return reports


def _read(path: Path) -> Report:
    try:
        report = json.loads(path.read_text())
        return Report(path.stem, read_report(report), report)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        told = f"{path} is no report of emberkeep bench: move it away, or write it again with --json."
        raise EmberkeepError(told) from error


def page(reports: Sequence[Report]) -> str:
    body = "".join(part for report in reports for part in _report(report))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Emberkeep, measured</title>'
        f"<style>{_PAGE_STYLE}\n{STYLE}</style></head><body><h1>Emberkeep, measured</h1>{body}</body></html>\n"
    )


def _report(report: Report) -> Iterator[str]:
    yield f"<h2>{escape(report.name)}</h2><p class=faint>{escape(_where(report.around))}</p>"
    for result in report.results:
        for chart in charts_of([result]):
            yield f"<figure>{draw_one(chart)}</figure>"
        for table in result.tables:
            yield _table(f"{result.name}: {table.title}", table)
        yield "".join(f"<p>{escape(note)}</p>" for note in result.notes)


def _where(around: Mapping[str, Any]) -> str:
    """In one line; what a report does not say is left out."""
    machine = around.get("machine")
    machine = machine if isinstance(machine, Mapping) else {}
    model = around.get("model")
    told = (
        model.get("file") if isinstance(model, Mapping) else None,
        machine.get("cpu"),
        f"{machine['cores']} cores" if "cores" in machine else None,
        machine.get("platform"),
        f"Emberkeep {around['emberkeep']}" if "emberkeep" in around else None,
        around.get("when"),
    )
    return " · ".join(str(one) for one in told if one)


def _table(title: str, table: Table) -> str:
    head = "".join(f"<th scope=col>{escape(column)}</th>" for column in ("", *table.columns))
    rows = "".join(
        f"<tr><td>{escape(row.label)}</td>"
        + "".join(f"<td>{escape(readable_value(row.values.get(column)))}</td>" for column in table.columns)
        + "</tr>"
        for row in table.rows
    )
    caption = f"<caption>{escape(title)}</caption>"
    return f"<div class=wide><table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
