"""A calibration as a picture: what was measured against what the fit says, one panel a model, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from workers.calibration.results import DECODE, MISS, PREFILL, Calibration, Check

PANEL, GAP, LEFT, TOP, BOTTOM = 300, 60, 70, 70, 60
_PANELS = ((PREFILL, "prefill, seconds"), (DECODE, "decode, tokens/s"), (MISS, "cache miss, seconds"))
FITTED, HELD = "#1f6fb2", "#c2571a"


def svg(model: str, found: Calibration) -> str:
    """The picture. Both axes of a panel are one logarithmic scale, so a point on the diagonal was predicted exactly."""
    panels = [(title, checks) for kind, title in _PANELS if (checks := [c for c in found.checks if c.kind == kind])]
    width = LEFT + len(panels) * (PANEL + GAP)
    height = TOP + PANEL + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(LEFT, 20, model),
        _text(LEFT, 38, "fitted", colour=FITTED),
        _text(LEFT + 60, 38, "held out", colour=HELD),
    ]
    for number, (title, checks) in enumerate(panels):
        parts += _panel(LEFT + number * (PANEL + GAP), title, checks)
    return "\n".join([*parts, "</svg>", ""])


def _panel(left: int, title: str, checks: Sequence[Check]) -> list[str]:
    values = [value for check in checks for value in (check.measured, check.predicted) if value > 0]
    lowest, highest = math.log10(min(values)) - 0.05, math.log10(max(values)) + 0.05

    def along(value: float) -> float:
        return (math.log10(max(value, 10**lowest)) - lowest) / (highest - lowest) * PANEL

    def x(value: float) -> float:
        return round(left + along(value), 1)

    def y(value: float) -> float:
        return round(TOP + PANEL - along(value), 1)

    right, bottom = left + PANEL, TOP + PANEL
    parts = [
        f'<rect x="{left}" y="{TOP}" width="{PANEL}" height="{PANEL}" fill="none" stroke="#ddd"/>',
        f'<line x1="{left}" y1="{bottom}" x2="{right}" y2="{TOP}" stroke="#888" stroke-dasharray="4 4"/>',
        _text(left, TOP - 8, title),
        _text((left + right) / 2, bottom + 40, "measured", anchor="middle"),
        _text(left + 6, TOP + 16, "predicted"),
    ]
    for third in range(4):
        value = 10 ** (lowest + (highest - lowest) * third / 3)
        parts.append(_text(x(value), bottom + 18, f"{value:.3g}", anchor="middle"))
        parts.append(_text(left - 6, y(value) + 4, f"{value:.3g}", anchor="end"))
    for check in checks:
        told = f"{check.what}: {check.measured:.4g} measured, {check.predicted:.4g} predicted ({check.error:+.1%})"
        parts.append(
            f'<circle cx="{x(check.measured)}" cy="{y(check.predicted)}" r="3.5" '
            f'fill="{HELD if check.held_out else FITTED}"><title>{told}</title></circle>'
        )
    return parts


def _text(left: float, top: float, text: str, *, anchor: str = "start", colour: str = "#333") -> str:
    return f'<text x="{left}" y="{top}" text-anchor="{anchor}" fill="{colour}">{text}</text>'
