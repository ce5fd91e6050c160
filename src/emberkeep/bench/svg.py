"""Charts as SVG, readable in a bright and in a dark surrounding, without a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from math import ceil, floor, log10
from xml.sax.saxutils import escape

from emberkeep.bench.charts import Bars, Chart, Line, Lines, Point
from emberkeep.bench.figures import Series
from emberkeep.bench.report import readable_number, readable_series
from emberkeep.values import dataclass

_WIDTH = 760
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 24, 64, 44
"""Around the lines of a chart."""
_PLOT_HEIGHT = 260
_BAR, _GAP = 16, 10
_LABELS, _VALUES = 230, 170
"""Columns of a chart with bars: what they are called, and what is written behind them."""
_GAP_BETWEEN = 28
_WIDE = 20.0
"""How many times the lowest the highest is where lines are drawn by powers of ten."""
_COLOURS = 6

STYLE = """
.chart text { font: 12px system-ui, sans-serif; fill: #333 }
.chart .title { font-weight: 600; font-size: 13px; fill: #111 }
.chart .faint { fill: #6b6b6b }
.chart .grid { stroke: #ddd; stroke-width: 1 }
.chart .line { fill: none; stroke-width: 2 }
.chart .spread { stroke-width: 1; opacity: .55 }
.c0 { fill: #c2410c; stroke: #c2410c } .c1 { fill: #1d5fa8; stroke: #1d5fa8 }
.c2 { fill: #1f7a4d; stroke: #1f7a4d } .c3 { fill: #8a3fa0; stroke: #8a3fa0 }
.c4 { fill: #8a6d00; stroke: #8a6d00 } .c5 { fill: #5b6470; stroke: #5b6470 }
@media (prefers-color-scheme: dark) {
  .chart text { fill: #d6d6d6 } .chart .title { fill: #f3f3f3 } .chart .faint { fill: #a0a0a0 }
  .chart .grid { stroke: #3a3a3a }
  .c0 { fill: #ff8a4c; stroke: #ff8a4c } .c1 { fill: #6fb1ff; stroke: #6fb1ff }
  .c2 { fill: #5fd39a; stroke: #5fd39a } .c3 { fill: #d69be8; stroke: #d69be8 }
  .c4 { fill: #e0c04a; stroke: #e0c04a } .c5 { fill: #b4bdc8; stroke: #b4bdc8 }
}
""".strip()


def draw(charts: Sequence[Chart]) -> str:
    """All of them, below each other, as one file."""
    parts, height = [], 0.0
    for chart in charts:
        body, tall = _body(chart)
        parts.append(f'<g transform="translate(0 {_n(height)})">{body}</g>')
        height += tall + _GAP_BETWEEN
    return _file("".join(parts), max(height - _GAP_BETWEEN, 1), "; ".join(chart.title for chart in charts))


def draw_one(chart: Chart) -> str:
    """For a page that has `STYLE`."""
    body, height = _body(chart)
    return _open(height, chart.title) + body + "</svg>"


def _file(body: str, height: float, title: str) -> str:
    return f"{_open(height, title)}<style>{escape(STYLE)}</style>{body}</svg>\n"


def _open(height: float, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" width="{_WIDTH}" '
        f'height="{_n(height)}" viewBox="0 0 {_WIDTH} {_n(height)}"><title>{_text(title)}</title>'
    )


def _body(chart: Chart) -> tuple[str, float]:
    parts, height = _lines(chart) if isinstance(chart, Lines) else _bars(chart)
    return "".join([f'<text class="title" x="0" y="16">{_text(chart.title)}</text>', *parts]), height


# ── lines ──


@dataclass(frozen=True, slots=True)
class Scale:
    """From numbers to places."""

    ticks: tuple[float, ...]
    place: Callable[[float], float]


def _lines(chart: Lines) -> tuple[Iterator[str], float]:
    points = [point for line in chart.lines for point in line.points]
    across = _along([point.x for point in points], _LEFT, _WIDTH - _RIGHT)
    values = [edge for point in points for edge in (point.y.low, point.y.high)]
    legend, lower = _legend([line.name for line in chart.lines])
    top = _TOP + lower
    up = scale(min(values), max(values), top + _PLOT_HEIGHT, top)
    return chain(legend, _plot(chart, across, up, top)), top + _PLOT_HEIGHT + _BOTTOM


def _plot(chart: Lines, across: Scale, up: Scale, top: int) -> Iterator[str]:
    bottom = top + _PLOT_HEIGHT
    for tick in up.ticks:
        y = _n(up.place(tick))
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        yield f'<text class="faint" x="{_LEFT - 8}" y="{y}" dy=".35em" text-anchor="end">{_label(tick)}</text>'
    for tick in across.ticks:
        x = _n(across.place(tick))
        yield f'<text class="faint" x="{x}" y="{bottom + 18}" text-anchor="middle">{_label(tick)}</text>'
    yield f'<text class="faint" x="{_LEFT - 8}" y="{top - 14}" text-anchor="end">{_text(chart.unit)}</text>'
    end = _WIDTH - _RIGHT
    yield f'<text class="faint" x="{end}" y="{bottom + 36}" text-anchor="end">{_text(chart.along)}</text>'
    for number, line in enumerate(chart.lines):
        yield from _line(line, number, across, up)


def _line(line: Line, number: int, across: Scale, up: Scale) -> Iterator[str]:
    colour = f"c{number % _COLOURS}"
    places = [(across.place(point.x), up.place(point.y.median)) for point in line.points]
    along = " ".join(f"{_n(x)},{_n(y)}" for x, y in places)
    dashes = f' stroke-dasharray="{6 + 2 * (number // _COLOURS)} 4"' if number >= _COLOURS else ""
    yield f'<polyline class="line {colour}" style="fill:none" points="{along}"{dashes}/>'
    for point, (x, y) in zip(line.points, places, strict=True):
        yield _mark(point, x, y, colour, up)


def _mark(point: Point, x: float, y: float, colour: str, up: Scale) -> str:
    low, high = _n(up.place(point.y.low)), _n(up.place(point.y.high))
    told = f"<title>{_text(f'{point.x:,.0f}: {readable_series(point.y)}')}</title>"
    return (
        f'<line class="spread {colour}" x1="{_n(x)}" x2="{_n(x)}" y1="{low}" y2="{high}"/>'
        f'<circle class="{colour}" cx="{_n(x)}" cy="{_n(y)}" r="3.5">{told}</circle>'
    )


def _legend(names: Sequence[str]) -> tuple[list[str], int]:
    """And by how much everything below is lower, where it takes several lines."""
    parts: list[str] = []
    x, y = float(_LEFT), 28
    for number, name in enumerate(names if names != [""] else ()):
        said = _shortened(name)
        width = 34 + 6.6 * len(said)
        if x > _LEFT and x + width > _WIDTH:
            x, y = float(_LEFT), y + 16
        parts.append(f'<rect class="c{number % _COLOURS}" x="{_n(x)}" y="{y}" width="10" height="10" rx="2"/>')
        parts.append(f'<text x="{_n(x + 15)}" y="{y + 9}">{_text(said)}</text>')
        x += width
    return parts, y - 28


def _along(values: Sequence[float], begin: float, end: float) -> Scale:
    """Marked at every value, if they are few; by powers of two where they grow by them."""
    given = scale(min(values), max(values), begin, end, wide=8.0)
    known = sorted(set(values))
    margin = 0.04 * (end - begin)
    low, high = given.place(known[0]), given.place(known[-1])

    def place(value: float) -> float:
        share = (given.place(value) - low) / (high - low)
        return begin + margin + share * (end - begin - 2 * margin)

    return Scale(tuple(known) if len(known) <= 12 else tuple(t for t in given.ticks if t >= known[0]), place)


def scale(lowest: float, highest: float, begin: float, end: float, wide: float = _WIDE) -> Scale:
    """From 0, or by powers of ten if the highest is many times the lowest."""
    if lowest > 0 and highest / lowest > wide:
        first, last = floor(log10(lowest)), ceil(log10(highest))
        width = max(last - first, 1)
        ticks = tuple(10.0**power for power in range(first, last + 1))
        return Scale(ticks, lambda value: begin + (log10(value) - first) / width * (end - begin))
    ticks = _steps(max(highest, 0.0) or 1.0)
    return Scale(ticks, lambda value: begin + value / ticks[-1] * (end - begin))


def _steps(highest: float) -> tuple[float, ...]:
    """0 and about five round numbers more, the last of them not below `highest`."""
    rough = highest / 5
    power = 10.0 ** floor(log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    return tuple(step * number for number in range(ceil(highest / step - 1e-9) + 1))


# ── bars ──


def _bars(chart: Bars) -> tuple[list[str], float]:
    names = list(dict.fromkeys(bar.name for bar in chart.bars))
    longest = max(*(bar.value.high for bar in chart.bars), 0.0) or 1.0
    room = _WIDTH - _LABELS - _VALUES
    parts, lower = _legend(names)
    y, before = 36.0 if names == [""] else 56.0 + lower, None
    for bar in chart.bars:
        if bar.label != before and before is not None:
            y += _GAP
        middle = y + _BAR / 2
        if bar.label != before:
            said = _shortened(bar.label)
            parts.append(
                f'<text x="{_LABELS - 10}" y="{_n(middle)}" dy=".35em" text-anchor="end">{_text(said)}</text>'
            )
        parts += _bar(bar.value, names.index(bar.name) % _COLOURS, y, room / longest)
        y, before = y + _BAR + 3, bar.label
    return parts, y + 4


def _bar(value: Series, colour: int, y: float, per_unit: float) -> Iterator[str]:
    middle, width = _n(y + _BAR / 2), max(value.median * per_unit, 1.0)
    low, high = (_n(_LABELS + max(edge * per_unit, 0)) for edge in (value.low, value.high))
    yield f'<rect class="c{colour}" x="{_LABELS}" y="{_n(y)}" width="{_n(width)}" height="{_BAR}" rx="2"/>'
    yield f'<line class="spread grid" x1="{low}" x2="{high}" y1="{middle}" y2="{middle}"/>'
    end = _LABELS + max(width, value.high * per_unit) + 8
    yield f'<text x="{_n(end)}" y="{middle}" dy=".35em">{_text(readable_series(value))}</text>'


def _shortened(label: str, most: int = 36) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"


# ── words and numbers ──


def _text(text: str) -> str:
    return escape(text, {'"': "&quot;"})


def _label(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else readable_number(number)


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
