"""The lessons' live figures. Each is drawn twice, in colours for a light and for a dark page, and has alt text.

A figure function of a chapter computes its numbers, and returns them together with the figure, so that the page's
sentences and its picture come from the same run.
"""

import base64
import html
import io
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure as Canvas

INK = {"light": "#1f2933", "dark": "#d5dbe1"}
FAINT = {"light": "#c5ccd3", "dark": "#4a5560"}
CYCLE = {  # told apart by colour-blind readers too (after Okabe and Ito)
    "light": ["#0072b2", "#d55e00", "#007a5a", "#9c4f86", "#8a6d00"],
    "dark": ["#56b4e9", "#f0a04b", "#3ecfa4", "#e08cc4", "#e8d44d"],
}


def _style(theme: str) -> dict:
    ink = INK[theme]
    return {
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": FAINT[theme],
        "grid.linewidth": 0.6,
        "axes.prop_cycle": matplotlib.cycler(color=CYCLE[theme]),
        "lines.linewidth": 2,
        "font.size": 10.5,
        "axes.titlesize": 11,
        "legend.frameon": False,
        "svg.hashsalt": "course",
        "svg.fonttype": "path",
    }


@dataclass(frozen=True)
class Figure:
    """A picture for a page: one SVG for light pages, one for dark ones, and what it says in words."""

    svg: dict[str, bytes]
    alt: str

    def _repr_html_(self) -> str:
        images = "".join(
            f'<img class="on-{theme}" alt="{html.escape(self.alt, quote=True)}" '
            f'src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}">'
            for theme, svg in self.svg.items()
        )
        return f'<div class="course-figure">{images}</div>'


def draw(paint: Callable[[Canvas], None], alt: str, size: tuple[float, float] = (7.2, 3.2)) -> Figure:
    """Let `paint(canvas)` draw on a matplotlib figure of `size` inches, once for each theme."""
    svg = {}
    for theme in ("light", "dark"):
        with matplotlib.rc_context(_style(theme)):
            canvas = Canvas(figsize=size, layout="constrained")
            paint(canvas)
            file = io.BytesIO()
            canvas.savefig(file, format="svg", transparent=True, metadata={"Date": None})
            svg[theme] = file.getvalue()
    return Figure(svg, alt)
