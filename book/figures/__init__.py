"""The lessons' live figures. Each is drawn twice, in colours for a light and for a dark page, and has alt text.

A chapter's function returns its figure together with the numbers that the page quotes, as texts, so that sentences and
picture come from the same run. The page says `show(*experiment())`, and then `{glue:text}` with a text's name.
"""

import base64
import contextlib
import html
import io
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure as Canvas
from myst_nb import glue
from torch import Tensor

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


# --- on the page -------------------------------------------------------------------------------------------------


def put(texts: dict[str, str]) -> None:
    """Name the texts that the sentences of the page quote."""
    for name, text in texts.items():
        glue(name, text, display=False)


def show(figure: Figure, texts: dict[str, str]) -> Figure:
    """Name the texts and hand on the figure."""
    put(texts)
    return figure


def claim(holds: bool, sentence: str) -> None:
    """Stop the page rather than let it print a sentence that this run does not support."""
    if not holds:
        raise AssertionError(f"the page says: {sentence}. This run disagrees: change the page or the experiment")


# --- what the chapters' figures share ----------------------------------------------------------------------------


def slope(x: list[float], y: list[float]) -> float:
    """Exponent p of the best y = c * x^p: a straight line through the logarithms."""
    return statistics.linear_regression([math.log(n) for n in x], [math.log(n) for n in y]).slope


def rng(seed: int) -> torch.Generator:
    """A random generator with this seed; every experiment has its own, so that no figure depends on another."""
    return torch.Generator().manual_seed(seed)


@contextlib.contextmanager
def weights_from(seed: int) -> Iterator[None]:
    """What is drawn from torch's own generator in the block, first weights above all, depends on the seed alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Small matrices gain nothing from several threads, and one thread always adds in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def ink() -> str:
    """The text colour of the theme which is being drawn."""
    return matplotlib.rcParams["text.color"]


def colour(i: int) -> str:
    """The i-th line colour of the theme which is being drawn; after the last the first comes again."""
    cycle = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    return cycle[i % len(cycle)]


def cells(
    ax: Axes,
    rows: Tensor,
    title: str,
    x: str,
    y: str,
    texts: list[list[str]] | None = None,
    top: float = 1.0,
    lines: bool = False,
) -> None:
    """Shade a table of numbers from 0 to `top`, row 0 above, with texts or lines; NaN has a colour of its own."""
    rgb, n_rows, n_columns = to_rgb(colour(0)), *rows.shape
    strongest = 0.6 if lines else 0.75  # lines must show on full cells
    shade = LinearSegmentedColormap.from_list("shade", [(*rgb, 0.05), (*rgb, strongest)])
    shade.set_bad((*to_rgb(colour(1)), 0.75))
    ax.imshow(rows.numpy(), cmap=shade, vmin=0, vmax=top)
    for t, row in enumerate(texts or []):
        for s, text in enumerate(row):
            ax.text(s, t, text, ha="center", va="center", fontsize=9)
    ax.set(title=title, xlabel=x, ylabel=y, xticks=range(n_columns), yticks=range(n_rows))
    ax.grid(False)
    if lines:
        ax.set_xticks([s - 0.5 for s in range(n_columns + 1)], minor=True)
        ax.set_yticks([t - 0.5 for t in range(n_rows + 1)], minor=True)
        ax.grid(which="minor", color=(*to_rgb(ink()), 0.3))
    ax.tick_params(which="both", length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
