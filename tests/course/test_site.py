"""The site builds without a warning, works without a network, and shows no solutions."""

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from tfmlib import pieces
from tfmlib.course import notebooks, paths, site

TOP = paths.root()
LOADING = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
}


@pytest.fixture(scope="session")
def built():
    return site.build(TOP).parent


class Page(HTMLParser):
    """What a page loads by itself, what it links to, and its pictures."""

    def __init__(self, path: Path):
        super().__init__()
        self.loads, self.links, self.pictures = [], [], []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag in LOADING and found.get(LOADING[tag]):
            self.loads.append(found[LOADING[tag]])
        if tag == "link" and found.get("rel") not in ("canonical", "next", "prev", "search", "index"):
            self.loads.append(found.get("href", ""))
        if tag == "object":
            self.loads.append(found.get("data", ""))
        if tag == "a":
            self.links.append(found.get("href") or "")
        if tag == "img":
            self.pictures.append(found)


def pages(built):
    return {path.relative_to(built): Page(path) for path in built.rglob("*.html") if "_static" not in path.parts}


def is_elsewhere(address):
    return bool(re.match(r"(https?:)?//", address))


def test_no_page_loads_anything_from_another_host(built):
    found = pages(built)
    assert len(found) >= 8
    for name, page in found.items():
        assert [address for address in page.loads if is_elsewhere(address)] == [], name
        inline = "".join(re.findall(r"<(?:script|style)[^>]*>(.*?)</(?:script|style)>", page.text, re.S))
        assert re.findall(r"(?:fetch|import|url)\(\s*['\"]?(?:https?:)?//[^)]*", inline) == [], name
        assert re.findall(r"unpkg|jsdelivr|cdnjs|cdn\.|googleapis", page.text.lower()) == [], name


def test_no_style_loads_anything_from_another_host(built):
    for path in built.rglob("*.css"):
        text = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8", errors="replace"), flags=re.S)
        assert re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^)]*", text) == [], path


def test_mathjax_is_the_sites_own(built):
    assert (built / "_static" / "mathjax" / "tex-svg.js").stat().st_size > 1_000_000
    page = pages(built)[Path("book/03-attention.html")]
    assert any("mathjax/tex-svg.js" in address for address in page.loads)


def test_what_a_page_loads_is_there(built):
    for name, page in pages(built).items():
        for address in page.loads:
            if address and not address.startswith("data:") and not is_elsewhere(address):
                path = (built / name).parent / address.split("?")[0].split("#")[0]
                assert path.exists(), f"{name}: {address}"


def test_every_picture_has_words(built):
    for name, page in pages(built).items():
        for picture in page.pictures:
            assert picture.get("alt") is not None, f"{name}: {picture}"
            if picture.get("class", "").startswith("on-"):
                assert len(picture["alt"]) > 40, f"{name}: {picture['alt']}"


@pytest.mark.parametrize("lab", paths.labs(TOP))
def test_labs_have_launch_buttons_and_lessons_have_none(built, lab):
    found = pages(built)
    config = yaml.safe_load((TOP / "_config.yml").read_text())["repository"]
    repository = config["url"].removeprefix("https://github.com/")
    want = f"https://colab.research.google.com/github/{repository}/blob/{config['branch']}/notebooks/{lab}/{lab}.ipynb"
    assert want in found[Path(f"notebooks/{lab}/{lab}.html")].links
    assert not any("colab" in link for link in found[Path(f"book/{lab}.html")].links)


@pytest.mark.parametrize("lab", paths.labs(TOP))
def test_lab_pages_show_no_solution(built, lab):
    page = pages(built)[Path(f"notebooks/{lab}/{lab}.html")]
    assert "BEGIN SOLUTION" not in page.text
    text = re.sub(r"<[^>]+>", "", page.text)
    assert "NotImplementedError" in text
    for piece in pieces.chapters()[lab]:
        for body in re.findall(r"### BEGIN SOLUTION\n(.*?)### END", notebooks.solution_source(piece.name), re.S):
            for line in body.splitlines():
                if len(line.strip()) > 30 and not set(line) & set("<>&'\""):
                    assert line.strip() not in text


@pytest.mark.parametrize("lab", paths.labs(TOP))
def test_lab_pages_are_exercise_sheets_not_executed(built, lab):
    page = pages(built)[Path(f"notebooks/{lab}/{lab}.html")]
    assert 'class="cell_output' not in page.text
    assert "not written yet" not in page.text


def test_lessons_hold_no_traceback_and_no_unresolved_number(built):
    for lab in paths.labs(TOP):
        text = pages(built)[Path(f"book/{lab}.html")].text
        for sign in ("Traceback (most recent", "pasted-missing", "<em>None</em>", "system-message"):
            assert sign not in text, f"{lab}: {sign}"


def test_a_change_of_tfmlib_makes_the_figures_anew(tmp_path):
    """Jupyter Book's cache sees changes of a lesson only, so the key must see the rest."""
    for name in ("tfmlib", "book", "tests"):
        shutil.copytree(TOP / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("requirements.lock", "_config.yml"):
        shutil.copy2(TOP / name, tmp_path)
    key = site.execution_key(tmp_path)
    assert site.execution_key(tmp_path) == key
    for name in ("tfmlib/attention.py", "book/figures/attention.py", "tests/same.py", "requirements.lock"):
        path = tmp_path / name
        path.write_text(path.read_text() + "\n# changed\n")
        assert site.execution_key(tmp_path) != key
        key = site.execution_key(tmp_path)
