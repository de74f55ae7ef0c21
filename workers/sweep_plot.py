"""A sweep as a picture: tokens a tick and average batch occupancy over the concurrency, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workers.sweep import Sweep

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 50, 50
_LINES: tuple[tuple[str, str], ...] = (("tokens_per_tick", "#1f6fb2"), ("avg_batch_occupancy", "#c2571a"))


def svg(sweep: Sweep) -> str:
    """The picture. Levels stand at equal distances, both lines on one scale that begins at 0; a dashed line marks the
    saturation."""
    levels = [result.concurrency for result in sweep.results]
    highest = max(getattr(result, name) for result in sweep.results for name, _ in _LINES) or 1.0
    step = (WIDTH - LEFT - RIGHT) / max(1, len(levels) - 1)

    def x(index: int) -> float:
        return round(LEFT + index * step, 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - value / highest * (HEIGHT - TOP - BOTTOM), 1)

    at = x(levels.index(sweep.saturation_concurrency))
    marked = f"saturated at {sweep.saturation_concurrency}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_axes(levels, highest, x, y),
        f'<line x1="{at}" y1="{TOP}" x2="{at}" y2="{HEIGHT - BOTTOM}" stroke="#888" stroke-dasharray="4 4"/>',
        _text(min(at, WIDTH - RIGHT - 60), TOP - 8, marked, anchor="middle"),
    ]
    for number, (name, colour) in enumerate(_LINES):
        values = [getattr(result, name) for result in sweep.results]
        points = [(x(index), y(value)) for index, value in enumerate(values)]
        line = " ".join(f"{left},{top}" for left, top in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (left, top), value in zip(points, values, strict=True):
            parts.append(f'<circle cx="{left}" cy="{top}" r="3" fill="{colour}"><title>{value:g}</title></circle>')
        parts.append(_text(LEFT + 180 * number, 20, name.replace("_", " "), colour=colour))
    return "\n".join([*parts, "</svg>", ""])


def _axes(levels: Sequence[int], highest: float, x: Callable[[int], float], y: Callable[[float], float]) -> list[str]:
    parts = []
    for quarter in range(5):
        value = highest * quarter / 4
        top = y(value)
        parts.append(f'<line x1="{LEFT}" y1="{top}" x2="{WIDTH - RIGHT}" y2="{top}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, top + 4, f"{value:.4g}", anchor="end"))
    for index, level in enumerate(levels):
        parts.append(_text(x(index), HEIGHT - BOTTOM + 18, str(level), anchor="middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "sessions at once", anchor="middle"))
    return parts


def _text(left: float, top: float, text: str, *, anchor: str = "start", colour: str = "#333") -> str:
    return f'<text x="{left}" y="{top}" text-anchor="{anchor}" fill="{colour}">{text}</text>'
