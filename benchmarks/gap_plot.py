"""Gaps between tokens over time as a picture: one point a token, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

#: (seconds since the prompt's arrival, gap in ms before that token).
Point = tuple[float, float]

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 80, 20, 60, 50
_COLOURS = ("#1f6fb2", "#c2571a", "#3a8f4d")


def svg(title: str, series: Mapping[str, Sequence[Point]]) -> str:
    """The picture. Gaps stand on a logarithmic scale in whole decades; a dashed line marks the prompt's arrival. Raises
    ValueError for series without any point."""
    points = [point for each in series.values() for point in each]
    if not points:
        raise ValueError("no gaps")
    times_s, gaps_ms = [at_s for at_s, _ in points], [gap_ms for _, gap_ms in points]
    first_s, last_s = min(0.0, *times_s), max(times_s)
    lowest, highest = math.floor(math.log10(min(gaps_ms))), math.ceil(math.log10(max(gaps_ms)))
    decades = range(lowest, max(highest, lowest + 1) + 1)

    def x(at_s: float) -> float:
        return round(LEFT + (at_s - first_s) / max(last_s - first_s, 1e-9) * (WIDTH - LEFT - RIGHT), 1)

    def y(gap_ms: float) -> float:
        share = (math.log10(gap_ms) - decades[0]) / (decades[-1] - decades[0])
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 20, title),
    ]
    for decade in decades:
        top = y(10.0**decade)
        parts.append(f'<line x1="{LEFT}" y1="{top}" x2="{WIDTH - RIGHT}" y2="{top}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, top + 4, f"{10.0**decade:g} ms", anchor="end"))
    for at_s in _marks(first_s, last_s):
        parts.append(_text(x(at_s), HEIGHT - BOTTOM + 18, f"{at_s:g}", anchor="middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "seconds since the prompt's arrival", anchor="middle"))
    arrival = x(0)
    parts.append(
        f'<line x1="{arrival}" y1="{TOP}" x2="{arrival}" y2="{HEIGHT - BOTTOM}" stroke="#888" stroke-dasharray="4 4"/>'
    )
    for number, (name, each) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        # Sessions of one batch have their gaps together: one point for all.
        parts += [
            f'<circle cx="{at}" cy="{gap}" r="2.5" fill="{colour}"/>'
            for at, gap in dict.fromkeys((x(at_s), y(gap_ms)) for at_s, gap_ms in each)
        ]
        parts.append(_text(LEFT + 220 * number, 42, name, colour=colour))
    return "\n".join([*parts, "</svg>", ""])


def _marks(first_s: float, last_s: float) -> list[float]:
    """About eight times at even distances, zero among them where it is in the range."""
    step_s = 10.0 ** math.floor(math.log10(max(last_s - first_s, 1e-3) / 2))
    while (last_s - first_s) / step_s > 9:
        step_s *= 2
    return [round(step_s * k, 6) for k in range(math.ceil(first_s / step_s), math.floor(last_s / step_s) + 1)]


def _text(left: float, top: float, text: str, *, anchor: str = "start", colour: str = "#333") -> str:
    return f'<text x="{left}" y="{top}" text-anchor="{anchor}" fill="{colour}">{text}</text>'
