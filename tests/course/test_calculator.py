"""The calculator page counts as `tfmlib.costs` does, in a real browser: with a keyboard, on a phone, light and dark.

The page is built alone, in seconds: the whole site is built by another file's tests, and these need none of it.
"""

import csv
import random
import re
import shutil
import subprocess
import sys

import pytest

from tfmlib import costs
from tfmlib.course import paths
from tfmlib.models.gpt import GPTConfig
from tfmlib.models.llama import LlamaConfig

from ..parity.data import data

TOP = paths.root()
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SIZES = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size", "context_length")
KINDS = {"GPT": GPTConfig, "Llama": LlamaConfig}
RESULTS = ("parameters", "forward", "step", "cache", "scores", "training", "read", "write")
NOTHING = "\u2014"


@pytest.fixture(scope="module")
def browser():
    """A Chromium without a window. Where there is none the tests are skipped."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    with api.sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except api.Error as error:  # for example a stub that only tells how to install the real one
            pytest.skip(f"the browser {path} does not start: {str(error).splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture(scope="module")
def address(browser, tmp_path_factory):
    """Where the built page lies."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "_toc.yml").write_text("format: jb-book\nroot: book/costs\n")
    main = "from jupyter_book.cli.main import main; main()"
    where = ["--toc", str(folder / "_toc.yml"), "--path-output", str(folder)]
    command = [sys.executable, "-W", "ignore", "-c", main, "build", str(TOP), *where]
    ended = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=False)
    built = folder / "_build" / "html" / "book" / "costs.html"
    assert built.is_file(), ended.stdout + ended.stderr
    return built.as_uri()


@pytest.fixture
def opened(browser, address):
    """Opens the page; in the end, nothing was asked of another host, and no error was reported."""
    complaints, asked, contexts = [], [], []

    def open_page(fragment="", **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address + fragment)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


@pytest.fixture
def page(opened):
    return opened()


def shown(page, name) -> str:
    return page.locator(f"#calc-{name}").inner_text()


def whole(page, name) -> int:
    """The exact number in a place of the page."""
    return int(re.match(r"[\d,]+", shown(page, name)).group().replace(",", ""))


# The numbers ----------------------------------------------------------------------------------------------------------

ASK = """(questions) => questions.map(({family, sizes, tied, B, T, S, b, work}) => {
    const config = {family, tied};
    costs.SIZES.forEach((name, i) => { config[name] = BigInt(sizes[i]); });
    const all = {
        parameters: costs.countParameters(config), parts: Object.values(costs.parameterParts(config)),
        flops: costs.forwardFlops(config, B, T), step: costs.forwardFlops(config, B, T, S),
        scores: costs.scoreBytes(config, B, T, b), cache: costs.kvCacheBytes(config, B, T, b),
        plain: costs.trainingBytes(config, B, T, b), kept: costs.trainingBytes(config, B, T, b, true),
        four: costs.trainingBytes(config, B, T).total, seconds: costs.rooflineSeconds(...work),
    };
    return JSON.parse(JSON.stringify(all, (key, x) => typeof x === "bigint" ? String(x) : x));
})"""


def question(config, rng):
    """What the browser is asked about a config, as JSON: whole numbers that may be large are text."""
    B, T = rng.randint(1, 9), rng.randint(1, 3000)
    return {
        "family": next(name for name, kind in KINDS.items() if isinstance(config, kind)),
        "sizes": [str(getattr(config, size)) for size in SIZES],
        "tied": config.tied,
        "B": B,
        "T": T,
        "S": T + rng.randint(0, 500),
        "b": rng.choice([1, 2, 4, 8]),
        "work": [rng.uniform(1, 100) for _ in range(4)],
    }


def expected(config, asked):
    B, T, S, b = (asked[name] for name in "BTSb")
    training = [costs.training_bytes(config, B, T, b, checkpointing) for checkpointing in (False, True)]
    plain, kept = ({name: str(n) for name, n in found.items()} for found in training)
    return {
        "parameters": str(costs.count_parameters(config)),
        "flops": str(costs.forward_flops(config, B, T)),
        "step": str(costs.forward_flops(config, B, T, S)),
        "scores": str(costs.score_bytes(config, B, T, b)),
        "cache": str(costs.kv_cache_bytes(config, B, T, b)),
        "plain": plain,
        "kept": kept,
        "four": str(costs.training_bytes(config, B, T)["total"]),
        "seconds": pytest.approx(costs.roofline_seconds(*asked["work"]), rel=1e-12),
    }


def drawn(rng, family, most):
    K = rng.randint(1, 9)
    sizes = {name: rng.randint(1, most) for name in SIZES}
    return KINDS[family](**sizes | {"n_kv_heads": K, "n_heads": K * rng.randint(1, 9)}, tied=rng.random() < 0.5)


def listed(page) -> dict:
    """The models that the page offers: name -> (config, source)."""
    found = page.evaluate("""costs.MODELS.map(({name, source, config}) =>
        [name, source, config.family, config.tied, costs.SIZES.map((size) => Number(config[size]))])""")
    return {
        name: (KINDS[family](**dict(zip(SIZES, sizes, strict=True)), tied=tied), source)
        for name, source, family, tied, sizes in found
    }


def test_the_browser_counts_as_python_does(page):
    rng = random.Random(1)
    configs = [config for config, _ in listed(page).values()]
    assert len(configs) == 17
    configs += [drawn(rng, family, most) for family in KINDS for most in (3, 300, 10**6, 10**12) for _ in range(5)]
    asked = [question(config, rng) for config in configs]
    for config, put, got in zip(configs, asked, page.evaluate(ASK, asked), strict=True):
        assert sum(map(int, got.pop("parts"))) == costs.count_parameters(config), config
        assert got == expected(config, put), config


def test_rates_of_zero_are_refused_as_in_python(page):
    for rates in ("0, 1", "1, 0", "-1, 1", "1, NaN"):
        told = f"() => {{ try {{ costs.rooflineSeconds(1, 1, {rates}) }} catch (error) {{ return error.name }} }}"
        assert page.evaluate(told) == "RangeError"


def test_the_published_models_are_those_that_the_configs_express(page):
    models = listed(page)
    with data("models.csv").open(newline="") as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    assert list(models) == [name for name, r in rows.items() if r["family"] in ("gpt2", "llama", "mistral", "gemma")]
    for name, (config, source) in models.items():
        assert costs.count_parameters(config) == int(rows[name]["params_total"])
        assert source == rows[name]["source"]


# The form -------------------------------------------------------------------------------------------------------------


def fill(page, config, B=1, T=1024, size=4, checkpointing=False):
    family = "GPT" if isinstance(config, GPTConfig) else "Llama"
    page.locator(f"input[value={family}]").check()
    for name in SIZES:
        page.locator(f"#calc-{name}").fill(str(getattr(config, name)))
    page.locator("#calc-tied").set_checked(config.tied)
    page.locator("#calc-B").fill(str(B))
    page.locator("#calc-T").fill(str(T))
    page.locator("#calc-bytes_per_element").select_option(str(size))
    page.locator("#calc-checkpointing").set_checked(checkpointing)


def read(page) -> dict:
    names = ("weights", "gradients", "optimizer", "activations", "training")
    return {name: whole(page, name) for name in ("parameters", "forward", "step", "cache", "scores", *names)}


def counted(config, B, T, size, checkpointing) -> dict:
    training = costs.training_bytes(config, B, T, size, checkpointing)
    return {
        "parameters": costs.count_parameters(config),
        "forward": costs.forward_flops(config, B, T),
        "step": costs.forward_flops(config, B, 1, T),
        "cache": costs.kv_cache_bytes(config, B, T, size),
        "scores": costs.score_bytes(config, B, T, size),
        "training": training.pop("total"),
        **training,
    }


def computed(text: str) -> int:
    """The value of a formula with its numbers put in."""
    text = re.sub(r",(?=\d)", "", text).replace("\u00d7", "*")
    assert re.fullmatch(r"(?:[\d*+(), ]|max)+", text), text
    return eval(text, {"__builtins__": {}, "max": max})


@pytest.mark.parametrize("family", KINDS)
def test_what_is_typed_is_counted_and_each_formula_gives_its_number(page, family):
    rng = random.Random(family)
    for checkpointing, most in ((False, 40), (True, 5000)):
        config = drawn(rng, family, most)
        B, T, size = rng.randint(1, 9), rng.randint(1, 99), rng.choice([1, 2, 8])
        fill(page, config, B, T, size, checkpointing)
        assert read(page) == counted(config, B, T, size, checkpointing)
        parts = ["embedding", "positions", "attention", "mlp", "norms", "head"]
        assert sum(whole(page, part) for part in parts) == costs.count_parameters(config)
        for name in [*parts, "forward", "step", "cache", "scores", "weights", "gradients", "optimizer", "activations"]:
            text = shown(page, f"{name}-numbers")
            assert (computed(text) if text else 0) == whole(page, name), name
        shares = [float(shown(page, f"{part}-share").removesuffix(" %")) for part in parts]
        counts = [whole(page, part) for part in parts]
        assert shares == [pytest.approx(100 * n / sum(counts), abs=0.0501) for n in counts]
        for name in ("layer", "end", "matrices"):
            assert f"{computed(shown(page, f'{name}-numbers')):,}" in page.locator("#calc").inner_text()


def test_a_published_model_fills_the_fields_and_shows_its_source(page):
    for name, (config, source) in listed(page).items():
        page.locator("#calc-model").select_option(label=name)
        assert {size: int(page.locator(f"#calc-{size}").input_value()) for size in SIZES} == {
            size: getattr(config, size) for size in SIZES
        }
        assert whole(page, "parameters") == costs.count_parameters(config)
        assert page.locator("#calc-source-link").get_attribute("href") == source
    page.locator("#calc-d_ff").fill("77")
    assert page.locator("#calc-model").input_value() == ""
    assert not page.locator("#calc-source").is_visible()


def test_units_are_named_rightly(page):
    fill(page, GPTConfig(n_layers=12, d_model=768, n_heads=12, vocab_size=50257, context_length=4096), B=8, T=4096)
    assert shown(page, "scores") == "6,442,450,944 bytes"
    assert shown(page, "scores-short") == "6 GiB, 6.44 GB"
    assert shown(page, "parameters-short") == "127 million"


def test_the_roofline_is_the_slower_of_computing_and_moving(page):
    page.locator("#calc-flops_per_second").fill("2e12")
    page.locator("#calc-bytes_per_second").fill("1e11")
    flops, n_bytes = whole(page, "forward"), whole(page, "weights") + whole(page, "cache")
    seconds = costs.roofline_seconds(flops, n_bytes, 2e12, 1e11)
    assert shown(page, "read") == f"{1000 * seconds:.3g} ms"
    assert shown(page, "read-why") == "computing takes longer"
    assert shown(page, "write") == f"{1000 * n_bytes / 1e11:.3g} ms"
    assert shown(page, "write-why") == "moving bytes takes longer"


# Bad input ------------------------------------------------------------------------------------------------------------

BAD = [
    ("d_model", "", "Empty"),
    ("d_model", "0", "Zero"),
    ("n_layers", "-3", "Negative"),
    ("d_ff", "1.5", "Not whole"),
    ("vocab_size", "many", "in digits"),
    ("head_dim", "1e3", "in digits"),
    ("context_length", "9" * 16, "Too large"),
    ("n_kv_heads", "5", "12 heads cannot share 5 key heads"),
    ("B", "", "Empty"),
    ("T", "0", "Zero"),
    ("flops_per_second", "0", "above 0"),
    ("bytes_per_second", "fast", "Give a number"),
    ("bytes_per_second", "", "Empty"),
]


@pytest.fixture(scope="module")
def needs():
    """Which results hang on which field."""
    machine = {"read", "write"}
    return lambda name: machine if "second" in name else set(RESULTS) - {"parameters"} if name in "BT" else set(RESULTS)


def test_bad_input_is_told_beside_the_field_and_leaves_no_old_number(page, needs):
    before = {name: shown(page, name) for name in RESULTS}
    for name, text, told in BAD:
        field, error = page.locator(f"#calc-{name}"), page.locator(f"#calc-{name}-error")
        good = field.input_value()
        field.fill(text)
        assert told in error.inner_text()
        assert field.get_attribute("aria-invalid") == "true"
        assert error.get_attribute("id") in field.get_attribute("aria-describedby")
        for result in RESULTS:
            assert shown(page, result) == (NOTHING if result in needs(name) else before[result]), (name, result)
        field.fill(good)
        assert error.inner_text() == ""
        assert {name: shown(page, name) for name in RESULTS} == before


def test_a_text_longer_than_the_context_is_noted(page):
    page.locator("#calc-T").fill("1025")
    assert "at most 1,024 tokens" in shown(page, "T-note")
    page.locator("#calc-T").fill("1024")
    assert shown(page, "T-note") == ""


# How it is used -------------------------------------------------------------------------------------------------------


def tab_to(page, name):
    for _ in range(100):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == f"calc-{name}":
            return
    raise AssertionError(f"no way to {name} by the Tab key")


def test_a_keyboard_is_enough(page):
    tab_to(page, "model")
    page.keyboard.press("ArrowDown")
    medium, _ = listed(page)["GPT-2 medium"]
    assert whole(page, "parameters") == costs.count_parameters(medium)
    tab_to(page, "T")
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("512")
    assert whole(page, "forward") == costs.forward_flops(medium, 1, 512)
    tab_to(page, "checkpointing")
    page.keyboard.press("Space")
    assert whole(page, "training") == costs.training_bytes(medium, 1, 512, checkpointing=True)["total"]


def test_every_field_has_a_label_and_every_result_is_announced(page):
    for field in page.locator("#calc input, #calc select").all():
        assert field.evaluate("element => element.labels.length") == 1
    outputs = page.locator("#calc output")
    assert outputs.count() == len(RESULTS)
    assert {output.get_attribute("aria-live") for output in outputs.all()} == {"polite"}


def test_nothing_is_wider_than_a_phone(opened):
    page = opened(viewport={"width": 375, "height": 700})
    wide = "document.documentElement.scrollWidth"
    assert page.evaluate(wide) == 375
    most = 999_999_999_999_999
    fill(page, GPTConfig(**dict.fromkeys(SIZES, most), tied=False), B=most, T=most)
    assert whole(page, "parameters") > 10**40
    assert page.evaluate(wide) == 375
    page.locator("#calc-n_kv_heads").fill("123456789012345")
    page.locator("#calc-d_ff").fill("999999999999999.5")
    assert page.evaluate(wide) == 375


CONTRAST = """() => {
    const parse = (color) => color.match(/[\\d.]+/g).map(Number);
    const light = (color) => {
        const [r, g, b] = color.map((x) => (x /= 255) <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (element) => {
        for (; element; element = element.parentElement) {
            const [r, g, b, a = 1] = parse(getComputedStyle(element).backgroundColor);
            if (a > 0) return [r, g, b];
        }
        return [255, 255, 255];
    };
    const poor = [];
    for (const element of document.querySelectorAll("#calc *")) {
        const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        if (!own && element.tagName !== "INPUT" || !element.checkVisibility() || element.tagName === "OPTION") continue;
        const ink = parse(getComputedStyle(element).color).slice(0, 3);
        const [dim, bright] = [ink, ground(element)].map(light).sort((a, b) => a - b);
        const ratio = (bright + 0.05) / (dim + 0.05);
        if (ratio < 4.5) poor.push(`${element.tagName} ${element.id} ${element.textContent}: ${ratio.toFixed(2)}`);
    }
    return poor;
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_its_ground(opened, theme):
    page = opened(color_scheme=theme)
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    page.locator("#calc-T").fill("2000")
    assert page.evaluate(CONTRAST) == []
    page.locator("#calc-B").fill("0")
    assert page.evaluate(CONTRAST) == []


def test_the_address_holds_the_calculation(opened):
    page = opened()
    page.locator("#calc-model").select_option(label="TinyLlama-1.1B")
    page.locator("#calc-T").fill("2048")
    page.locator("#calc-checkpointing").check()
    before = read(page)
    other = opened("#" + page.url.split("#", 1)[1])
    assert read(other) == before
    assert page.locator("#calc-model").input_value() == other.locator("#calc-model").input_value() != ""


def test_a_strange_address_is_harmless(opened):
    page = opened("#family=BERT&T=<b>x</b>&bytes_per_element=3&tied=maybe&nothing=1&B=7")
    assert "in digits" in shown(page, "T-error")
    assert page.locator("#calc-B").input_value() == "7"
    assert page.locator("input[value=GPT]").is_checked()
    assert shown(page, "forward") == NOTHING
    assert whole(page, "parameters") == 124_439_808


def test_without_javascript_it_says_so(opened):
    page = opened(java_script_enabled=False)
    assert "needs JavaScript" in page.locator("#calc-off").inner_text()
    assert not page.locator("#calc").is_visible()
