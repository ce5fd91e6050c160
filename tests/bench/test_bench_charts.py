"""Pictures of what was measured: everything is in them, in proportion, and nothing else gets into them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as Xml
from pathlib import Path

import pytest
from typer.testing import CliRunner

from emberkeep.bench.charts import Bars, Lines, charts_of
from emberkeep.bench.figures import Series, series
from emberkeep.bench.report import BenchResult, Row, Table, report_json
from emberkeep.bench.report_page import page, read_reports
from emberkeep.bench.svg import draw, draw_one, scale
from emberkeep.cli.bench import app
from emberkeep.errors import EmberkeepError

HOSTILE = '<script>alert("1")</script>&'


def ms(*samples: float) -> Series:
    return series(samples, "ms")


RESTART = BenchResult(
    "restart",
    (
        Table(
            "time to first token",
            tuple(
                Row(f"{tokens:,} tokens, {state}", {"TTFT": ms(value, 1.2 * value), "reused tokens": tokens})
                for tokens in (512, 2048, 8192)
                for state, value in (("cold", tokens * 2.0), ("disk", tokens / 10), ("hot", 12.0))
            ),
        ),
    ),
)
TURNS = BenchResult(
    "turns",
    (
        Table(
            "three of them",
            (
                *(Row(f"turn {n}", {"TTFT": ms(100.0 * n), "without": ms(200.0 * n)}) for n in (1, 2, 3)),
                Row("turn 3 / turn 2", {"TTFT": series([1.5], "×")}),
            ),
        ),
    ),
)
LOAD = BenchResult(
    "load",
    (
        Table(
            "eight clients",
            (
                Row("streaming", {"server": ms(40.0, 44.0), "bare": ms(20.0), "share": series([0.5], "×")}),
                Row("not streaming", {"server": ms(10.0), "bare": ms(5.0), "share": series([0.5], "×")}),
            ),
        ),
        Table("counts", (Row("all", {"requests": 3, "how": "well"}),)),
    ),
    ("a note",),
)


def parsed(svg: str) -> Xml.Element:
    return Xml.fromstring(svg)


def all_of(root: Xml.Element, tag: str) -> list[Xml.Element]:
    return root.findall(f".//{{http://www.w3.org/2000/svg}}{tag}")


def test_rows_that_tell_a_number_of_the_same_thing_become_lines():
    (chart,) = charts_of([RESTART])
    assert isinstance(chart, Lines)
    assert (chart.unit, chart.along) == ("ms", "tokens")
    assert {line.name: [point.x for point in line.points] for line in chart.lines} == {
        name: [512, 2048, 8192] for name in ("cold", "disk", "hot")
    }


def test_columns_become_lines_and_what_is_only_compared_does_not():
    (chart,) = charts_of([TURNS])
    assert isinstance(chart, Lines)
    assert [(line.name, len(line.points)) for line in chart.lines] == [("TTFT", 3), ("without", 3)]
    assert chart.along == "turn"


def test_other_rows_become_bars_and_tables_without_a_quantity_nothing():
    (chart,) = charts_of([LOAD])
    assert isinstance(chart, Bars)
    assert [(bar.label, bar.name) for bar in chart.bars] == [
        ("streaming", "server"),
        ("streaming", "bare"),
        ("not streaming", "server"),
        ("not streaming", "bare"),
    ]


def test_lines_are_in_proportion():
    (chart,) = charts_of([TURNS])
    lines = [
        [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
        for line in all_of(parsed(draw_one(chart)), "polyline")
    ]
    for line in lines:
        (x1, y1), (x2, y2), (x3, y3) = line
        assert (x2 - x1, y1 - y2) == pytest.approx((x3 - x2, y2 - y3), abs=0.3)
        assert x1 < x2 and y1 > y2
    assert lines[0][1][1] == pytest.approx(lines[1][0][1], abs=0.3)  # 200 ms on both


def test_what_differs_a_hundredfold_is_drawn_by_powers_of_ten():
    values = scale(3.0, 900.0, 0.0, 300.0)
    assert values.ticks == (1, 10, 100, 1000)
    assert [round(values.place(tick)) for tick in values.ticks] == [0, 100, 200, 300]
    plain = scale(3.0, 9.0, 0.0, 300.0)
    assert plain.ticks[0] == 0 and plain.ticks[-1] >= 9 and plain.place(0) == 0


def test_bars_are_in_proportion_and_say_their_value():
    (chart,) = charts_of([LOAD])
    root = parsed(draw_one(chart))
    widths = [float(bar.attrib["width"]) for bar in all_of(root, "rect") if float(bar.attrib["height"]) > 10]
    assert widths[1] / widths[3] == pytest.approx(4, rel=0.02)
    assert widths[0] / widths[2] == pytest.approx(4.2, rel=0.02)
    texts = [text.text for text in all_of(root, "text")]
    assert "42.0 ms (40.0–44.0)" in texts and "not streaming" in texts


def test_several_charts_stand_below_each_other_in_one_file():
    charts = charts_of([RESTART, TURNS, LOAD])
    root = parsed(draw(charts))
    tall = [float(parsed(draw_one(chart)).attrib["height"]) for chart in charts]
    assert float(root.attrib["height"]) > sum(tall)
    assert "prefers-color-scheme: dark" in (all_of(root, "style")[0].text or "")


def test_words_from_outside_stay_words():
    result = BenchResult(HOSTILE, (Table(HOSTILE, (Row(HOSTILE, {HOSTILE: ms(1), "b": ms(2)}),)),), (HOSTILE,))
    root = parsed(draw(charts_of([result])))
    assert not all_of(root, "script")
    assert HOSTILE in [text.text for text in all_of(root, "text")]


def test_nothing_measured_gives_an_empty_picture():
    assert charts_of([]) == []
    parsed(draw([]))


def write(folder: Path, name: str, *results: BenchResult) -> None:
    around = {"emberkeep": "1", "machine": {"cpu": HOSTILE, "cores": 2}, "model": {"file": "a.gguf"}}
    (folder / name).write_text(json.dumps(report_json(results, around)))


def test_a_report_has_what_the_files_have(tmp_path):
    write(tmp_path, "one.json", RESTART, LOAD)
    write(tmp_path, "two.json", TURNS)
    one, two = read_reports(tmp_path)
    assert ([*one.results], [*two.results]) == ([RESTART, LOAD], [TURNS])
    html = page([one, two])
    assert html.count("<svg") == 3 and html.count("<table>") == 4
    assert "<script" not in html and "http" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "a note" in html and "a.gguf" in html and "42.0 ms" in html


def test_the_command_writes_a_page_beside_the_files(tmp_path):
    write(tmp_path, "one.json", LOAD)
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 0
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(tmp_path / "x.html")])
    assert (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", "5", '{"results": [{"name": "a"}]}', '{"results": 3}', '{"results": [3]}', "\udc80"],
)
def test_a_file_that_is_no_report_is_named_in_one_sentence(tmp_path, content):
    (tmp_path / "other.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(EmberkeepError, match=r"other\.json is no report of emberkeep bench: move it away"):
        read_reports(tmp_path)


def test_numbers_that_are_none_are_refused(tmp_path):
    for samples in ("[]", "[NaN]", '["a"]'):
        value = f'{{"samples": {samples}, "unit": "ms"}}'
        (tmp_path / "other.json").write_text(
            f'{{"results": [{{"name": "a", "notes": [], "tables": [{{"title": "t", "rows": '
            f'[{{"label": "l", "c": {value}}}]}}]}}]}}'
        )
        with pytest.raises(EmberkeepError, match="no report"):
            read_reports(tmp_path)


def test_a_folder_without_reports_says_how_to_get_one(tmp_path):
    with pytest.raises(EmberkeepError, match="--json FILE"):
        read_reports(tmp_path)
