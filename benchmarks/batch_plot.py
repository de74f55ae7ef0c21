"""Tokens a second by concurrency, a line for each contestant, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 60, 200, 40, 50
_COLOURS = ("#1f6fb2", "#c2571a", "#2a8a4a", "#8a3fa0", "#b02a4a", "#6b6b1f", "#1f8a8a", "#555555")

#: Concurrency and tokens a second, by concurrency.
Line = Sequence[tuple[int, float]]


def svg(title: str, lines: Mapping[str, Line]) -> str:
    """The picture. Concurrencies stand at equal distances; the scale begins at 0."""
    levels = sorted({level for line in lines.values() for level, _ in line})
    highest = max((value for line in lines.values() for _, value in line), default=0) or 1.0
    step = (WIDTH - LEFT - RIGHT) / max(1, len(levels) - 1)

    def at(level: int, value: float) -> tuple[float, float]:
        height = value / highest * (HEIGHT - TOP - BOTTOM)
        return round(LEFT + levels.index(level) * step, 1), round(HEIGHT - BOTTOM - height, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 22, title),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "sessions at once", anchor="middle"),
        *(_text(at(level, 0)[0], HEIGHT - BOTTOM + 18, str(level), anchor="middle") for level in levels),
    ]
    for quarter in range(5) if levels else ():
        value = highest * quarter / 4
        top = at(levels[0], value)[1]
        parts.append(f'<line x1="{LEFT}" y1="{top}" x2="{WIDTH - RIGHT}" y2="{top}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, top + 4, f"{value:.3g}", anchor="end"))
    for number, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [at(level, value) for level, value in sorted(line)]
        path = " ".join(f"{left},{top}" for left, top in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (left, top), (_, value) in zip(points, sorted(line), strict=True):
            parts.append(f'<circle cx="{left}" cy="{top}" r="3" fill="{colour}"><title>{value:.4g}</title></circle>')
        parts.append(_text(WIDTH - RIGHT + 14, TOP + 10 + 18 * number, name, colour=colour))
    return "\n".join([*parts, "</svg>", ""])


def _text(left: float, top: float, text: str, *, anchor: str = "start", colour: str = "#333") -> str:
    return f'<text x="{left}" y="{top}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
