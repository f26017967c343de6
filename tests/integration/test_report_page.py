"""The page in a browser, offline: its viewer shows tokens, keys move, both themes can be read."""

import json
import os
import shutil
from pathlib import Path

import pytest

from s3ac_jax.report.page import page, write_page
from s3ac_jax.report.page_data import read_runs
from tests.page_runs import TICKS, lines, trajectory, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
HOSTILE = "</script><img src=x onerror=\"document.title='caught'\">"
LONG = 20_000


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=found, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    pieces = ("+", HOSTILE, "", "\n", "<eos>")
    some = [trajectory(tick, tick % 2 == 1, pieces=pieces) for tick in range(TICKS)]
    folder = write_run(
        tmp_path_factory.mktemp("run"), **{
            "trajectories.jsonl": lines(some),
            "config.json": json.dumps({"name": f"run {HOSTILE}"}),
        },
    )  # fmt: skip
    return write_page([folder])


@pytest.fixture
def opened(browser, path):
    """Returns a function that opens a page, and asserts at the end that nothing went wrong."""
    contexts, wrong = [], []

    def told(message):
        if message.type == "error":
            wrong.append(message.text)

    def asked(request):
        if not request.url.startswith(("file:", "data:")):
            wrong.append(request.url)

    def open_page(file=path, **options):
        context = browser.new_context(offline=True, **{"color_scheme": "light"} | options)
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(10_000)
        tab.on("console", told)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", asked)
        tab.goto(Path(file).resolve().as_uri())
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def token(tab):
    return tab.locator(".token.here")


def value(tab, name):
    return tab.locator(f".detail dt:text-is('{name}') + dd").inner_text()


def paper(tab):
    """Lightness of the page's background, 0 to 255."""
    colour = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    return int(colour.removeprefix("rgb(").split(",")[0])


def test_keys_move_over_tokens_and_responses(opened):
    tab = opened()
    assert [span.inner_text() for span in tab.locator(".token").all()] == [
        "+", HOSTILE, "∅", "⏎\n", "<eos>"
    ]  # fmt: skip
    assert "7+=" in tab.locator(".prompt").inner_text()
    tab.locator(".tokens").focus()
    # The first response is wrong: V falls by 0.2 with every token, from -0.1.
    assert (token(tab).inner_text(), value(tab, "V before it")) == ("+", "−0.100")
    assert (value(tab, "change of V"), value(tab, "advantage")) == ("−0.20", "−0.900")
    tab.keyboard.press("ArrowRight")
    assert (token(tab).inner_text(), value(tab, "V before it")) == (HOSTILE, "−0.300")
    tab.keyboard.press("End")
    assert (token(tab).inner_text(), value(tab, "token id")) == ("<eos>", "4")
    assert value(tab, "change of V, to the reward") == "−0.10"
    tab.keyboard.press("Home")
    assert token(tab).inner_text() == "+"
    tab.keyboard.press("j")
    assert tab.locator(".head strong").inner_text() == "right"
    assert value(tab, "change of V") == "+0.20"
    tab.keyboard.press("ArrowUp")
    assert tab.locator(".head strong").inner_text() == "wrong"
    assert tab.title() == f"run {HOSTILE}"
    assert tab.locator("img").count() == 0


def test_colours_jumps_and_filters(opened):
    tab = opened()
    colour = "getComputedStyle(document.querySelector('.token')).backgroundColor"
    by_value = tab.evaluate(colour)
    tab.get_by_role("button", name="advantage").click()
    assert tab.get_by_role("button", name="advantage").get_attribute("aria-pressed") == "true"
    assert tab.evaluate(colour) != by_value
    assert "worse than expected" in tab.locator(".key").inner_text()
    jump = tab.locator("[data-jump]").first
    jump.click()
    assert token(tab).get_attribute("data-token") == jump.get_attribute("data-jump")
    tab.get_by_label("Outcome").select_option("right")
    options = tab.locator(".list [role=option]")
    assert options.count() == TICKS // 2
    tab.locator("label:has-text('Tick') select").select_option("3")
    assert options.count() == 1
    tab.get_by_label("Outcome").select_option("wrong")
    assert options.count() == 0


def test_tab_reaches_every_control(opened):
    tab = opened()
    reached = set()
    for _ in range(40):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement === document.body"):
            break  # behind the last one
        reached.add(tab.evaluate("""() => {
            const node = document.activeElement;
            return node.getAttribute("aria-label") || node.id || node.textContent;
        }"""))  # fmt: skip
        assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    wanted = {"theme", "Story", "Responses", "Tokens of the response", "value V", "advantage"}
    assert wanted <= reached
    assert sum(name.startswith("token ") for name in reached) == 3


def test_both_themes_and_a_narrow_screen(opened, tmp_path):
    tab = opened()
    assert paper(tab) > 230
    tab.get_by_role("button", name="Dark").click()
    assert paper(tab) < 40
    tab.get_by_role("button", name="Dark").click()
    assert paper(tab) > 230
    dark = opened(color_scheme="dark")
    assert paper(dark) < 40
    ink = dark.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
    assert int(ink.removeprefix("rgb(").split(",")[0]) > 120
    narrow = opened(viewport={"width": 400, "height": 800})
    assert narrow.evaluate("document.documentElement.scrollWidth") == 400
    kept = os.environ.get("S3AC_ARTIFACTS")
    folder = Path(kept or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    for name, one in (("light", tab), ("dark", dark), ("narrow", narrow)):
        shot = folder / f"report_{name}.png"
        one.screenshot(path=shot, full_page=bool(kept))
        assert shot.stat().st_size > 20_000


def test_a_long_response_stays_usable(opened, tmp_path):
    pieces = [f" w{n}" for n in range(LONG)]
    some = lines([trajectory(0, True, pieces=pieces)])
    run = read_runs([write_run(tmp_path, **{"trajectories.jsonl": some})])
    file = tmp_path / "long.html"
    file.write_text(page(run, max_tokens=1))
    tab = opened(file)
    assert tab.locator(".token").count() <= 3_000
    tab.locator(".tokens").focus()
    tab.keyboard.press("End")
    assert token(tab).inner_text() == f" w{LONG - 1}"
    tab.locator(".more").first.click()
    tab.keyboard.press("ArrowLeft")
    assert int(token(tab).get_attribute("data-token")) < LONG - 2_000
    assert tab.locator(".token").count() <= 3_000
    assert len(tab.locator(".trace .path").get_attribute("d")) < 30_000
