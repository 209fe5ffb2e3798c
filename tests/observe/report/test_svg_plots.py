import re

from penstock.observe.report.svg_plots import Curve, bars, curves, number, shares


def points(svg: str) -> list[tuple[float, float]]:
    (found,) = re.findall(r'<polyline points="([^"]*)"', svg)
    return [tuple(map(float, pair.split(","))) for pair in found.split()]  # type: ignore[misc]


def test_a_curve_lies_where_its_values_are() -> None:
    svg = curves("title", [Curve(name="a", x=[0, 1, 2], y=[0.0, 1.0, 0.5])])
    (left, low), (middle, high), (right, half) = points(svg)
    assert left < middle < right
    assert high < half < low
    assert half == (low + high) / 2
    assert "legend" not in svg


def test_bands_legends_and_titles() -> None:
    band = Curve(name="<a>", x=[0, 1], y=[1, 2], low=[0, 1], high=[2, 3])
    svg = curves("<t>", [band, Curve(name="b", x=[1], y=[1], dots=True)])
    assert "<polygon" in svg and "<circle" in svg
    assert "&lt;a&gt;" in svg and "&lt;t&gt;" in svg and "<a>" not in svg
    assert curves("empty", [Curve(name="a", x=[], y=[])]) == ""


def test_shares_fill_their_bar() -> None:
    svg = shares("t", [("trainer", {"work": 0.25, "wait": 0.75})])
    widths = [float(width) for width in re.findall(r'<rect x="[\d.]+" y="4" width="([\d.]+)"', svg)]
    assert widths[1] == 3 * widths[0]
    assert "25%" in svg and "75%" in svg


def test_bars_are_stacked() -> None:
    svg = bars("t", ["0", "1"], {"a": [1.0, 2.0], "b": [1.0, 0.0]})
    heights = [float(height) for height in re.findall(r'height="([\d.]+)" fill="#', svg)][:4]
    assert heights[0] == heights[1]
    assert heights[2] == 2 * heights[0] and heights[3] == 0
    assert bars("t", [], {}) == ""


def test_numbers_are_short() -> None:
    assert [number(value) for value in (0, 0.123456, 12345.6, 1e-5, 2.5e7)] == [
        "0",
        "0.123",
        "12,346",
        "1.0e-05",
        "2.5e+07",
    ]
