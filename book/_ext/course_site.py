"""What the site needs beyond Jupyter Book: MathJax served from the site itself, and honest launch buttons.

MathJax comes from the package django-static-mathjax, which is nothing but MathJax's files.
"""

import importlib.util
import shutil
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "_static"


def mathjax_file() -> Path:
    """MathJax's one-file component: TeX input, SVG output, no fonts to load."""
    package = importlib.util.find_spec("mathjax")
    if package is None:
        raise ModuleNotFoundError("the site needs MathJax's files: pip install django-static-mathjax")
    return Path(package.origin).parent / "static" / "mathjax" / "es5" / "tex-svg.js"


def copy_assets(app):
    """Put MathJax and the course's own style beside the theme's files."""
    if app.builder.format != "html":
        return
    target = Path(app.outdir) / "_static"
    (target / "mathjax").mkdir(parents=True, exist_ok=True)
    shutil.copy2(mathjax_file(), target / "mathjax" / "tex-svg.js")


def keep_only_working_launch_buttons(app, pagename, templatename, context, doctree):
    """A lesson is a text file, which Colab cannot open: only the learner's notebooks keep their launch buttons."""
    if str(app.env.doc2path(pagename)).endswith(".ipynb"):
        return
    context["header_buttons"] = [b for b in context.get("header_buttons", []) if b.get("label") != "launch-buttons"]


def load_nothing_from_elsewhere(app, pagename, templatename, context, doctree):
    """Jupyter Book's live-code button names another host on every page. The course does not use it."""
    scripts = context.get("script_files", [])
    context["script_files"] = [s for s in scripts if "thebe" not in f"{s} {getattr(s, 'attributes', '')}".lower()]


def load_the_calculator(app, pagename, templatename, context, doctree):
    """The calculator's style and scripts, on its page only."""
    if pagename == "book/costs":
        app.add_css_file("calculator.css")
        app.add_js_file("costs.js", loading_method="defer")
        app.add_js_file("calculator.js", loading_method="defer")


def setup(app):
    app.config.html_static_path.append(str(ASSETS))
    app.connect("builder-inited", copy_assets)
    app.connect("html-page-context", load_the_calculator)
    app.connect("html-page-context", keep_only_working_launch_buttons, priority=900)
    app.connect("html-page-context", load_nothing_from_elsewhere, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
