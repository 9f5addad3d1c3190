"""The built site in a real browser, with no network: formulas, widgets, search, links, phone width, dark mode."""

import re
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import browser as site

REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
SLUG = REPOSITORY.removeprefix("https://github.com/")
PAGES = site.pages()
NOTEBOOKS = [name for name in PAGES if name.startswith("notebooks/")]

if not PAGES:
    reason = "the site is not built: run `make book`"
    pytest.fail(reason) if site.required() else pytest.skip(reason, allow_module_level=True)


@pytest.fixture(scope="module")
def chromium():
    try:
        from playwright.sync_api import sync_playwright

        playwright = sync_playwright().start()
        chromium = site.launch(playwright)
    except Exception as error:
        reason = f"no browser could be started ({str(error).splitlines()[0]}): install chromium, or run `playwright install chromium`"
        pytest.fail(reason) if site.required() else pytest.skip(reason)
    yield chromium
    chromium.close()
    playwright.stop()


@pytest.fixture(scope="module")
def address():
    with site.served() as address:
        yield address


class Visit:
    """A page opened with the outside world cut off, and what went wrong while it was open."""

    def __init__(self, chromium, address, name, width=1280, scheme="light"):
        self.context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.errors, self.outside, self.missing = [], [], []
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("response", lambda reply: self.missing.append(reply.url) if reply.status >= 400 else None)

        def gate(route):
            inside = route.request.url.startswith((address, "data:", "blob:"))
            if not inside:
                self.outside.append(route.request.url)
            route.continue_() if inside else route.abort()

        self.context.route("**/*", gate)
        self.page.goto(f"{address}/{name}")
        self.page.wait_for_load_state("networkidle")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()


def sources(name):
    """The text a page was made from."""
    path = ROOT / name.removesuffix(".html")
    if (markdown := path.with_suffix(".md")).exists():
        return markdown.read_text()
    cells = nbformat.read(path.with_suffix(".ipynb"), as_version=4).cells
    return "\n".join(cell.source for cell in cells)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", PAGES)
def test_page_is_whole(chromium, address, name, width, scheme):
    with Visit(chromium, address, name, width, scheme) as visit:
        page = visit.page
        if re.search(r"\$\S", sources(name)):
            page.wait_for_selector("mjx-container", state="attached", timeout=30_000)
            assert page.locator("mjx-merror").count() == 0, "a formula has an error"
            text = page.evaluate("document.querySelector('article').innerText")
            assert "\\(" not in text and "$$" not in text, "raw TeX on the page"
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        # Dark means dark: the colour behind the text, summed over its three parts.
        shade = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)")
        assert (sum(shade) < 380) == (scheme == "dark")
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0, f"the page is {overflow} pixels wider than the window"
        # Sphinx puts the path of a picture where nobody wrote an alternative.
        silent = "img:not([alt]), article img[alt=''], article img[alt*='_images/']"
        assert page.locator(silent).count() == 0, "a picture without a text alternative"
        broken = page.evaluate("[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)")
        assert not broken
        assert not visit.outside, "the page asks for something outside the site"
        assert not visit.missing
        assert not visit.errors


def has_slider(name):
    return "slider" in sources(name)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", [name for name in NOTEBOOKS if has_slider(name)])
def test_sliders_change_their_picture(chromium, address, name, width):
    with Visit(chromium, address, name, width, "dark") as visit:
        page = visit.page
        boxes = page.locator(".gk-slider")
        boxes.first.wait_for(timeout=30_000)
        wanted = len(re.findall(r"slider_over\(", sources(name)))
        assert boxes.count() == wanted, f"{wanted} widgets in the notebook, {boxes.count()} on the page"
        for box in boxes.all():
            box.scroll_into_view_if_needed()
            shown = box.locator("img:visible")
            assert shown.count() == 1
            before, caption = shown.get_attribute("src"), box.locator("p:visible").inner_text()
            inside = shown.bounding_box()
            assert inside["width"] > 200 and inside["x"] + inside["width"] <= width
            handle = box.locator(".noUi-handle, .ui-slider-handle")
            assert handle.count() == 1 and handle.is_visible()
            handle.focus()
            handle.press("ArrowRight")
            page.wait_for_timeout(300)
            shown = box.locator("img:visible")
            assert shown.count() == 1 and shown.get_attribute("src") != before, "the slider moved, the picture did not"
            assert box.locator("p:visible").inner_text() != caption
            handle.press("ArrowLeft")
            page.wait_for_timeout(300)
            assert box.locator("img:visible").get_attribute("src") == before
        # The same with the mouse: a click near the right end shows the last picture.
        boxes.first.scroll_into_view_if_needed()
        track = boxes.first.locator(".noUi-target, .slider").first
        size = track.bounding_box()
        page.mouse.click(size["x"] + size["width"] - 2, size["y"] + size["height"] / 2)
        page.wait_for_timeout(300)
        last = boxes.first.locator("img").last
        assert last.is_visible()
        assert not visit.errors and not visit.outside


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_launch_buttons(chromium, address, name):
    with Visit(chromium, address, name) as visit:
        file = f"{SLUG}/blob/main/{name.removesuffix('.html')}.ipynb"
        links = visit.page.locator(".dropdown-launch-buttons a").evaluate_all("links => links.map(link => link.href)")
        assert links == [
            f"https://colab.research.google.com/github/{file}",
            f"https://kaggle.com/kernels/welcome?src=https://github.com/{file}",
        ]


def test_pages_lead_on(chromium, address):
    """Next, from the first page on, visits every page once; previous leads back."""
    with Visit(chromium, address, "index.html") as visit:
        page, seen = visit.page, []
        page.wait_for_url("**/book/start.html")
        while True:
            seen.append(page.url.removeprefix(f"{address}/"))
            following = page.locator(".prev-next-area a.right-next")
            if not following.count():
                break
            following.click()
            page.wait_for_load_state("domcontentloaded")
        assert sorted(seen) == PAGES
        page.locator(".prev-next-area a.left-prev").click()
        page.wait_for_url(f"{address}/{seen[-2]}")


@pytest.mark.parametrize("width", [1280, 390])
def test_search(chromium, address, width):
    with Visit(chromium, address, "book/start.html", width) as visit:
        page = visit.page
        boxes = page.locator("input[type=search]:visible")
        assert boxes.count() <= 1, "more than one search box"
        if not boxes.count():
            page.locator("button.search-button:visible, button.search-button__button:visible").first.click()
        page.locator("input[type=search]:visible").first.fill("decay")
        page.keyboard.press("Enter")
        page.wait_for_selector("#search-results li a", timeout=30_000)
        assert any("glossary" in link for link in page.locator("#search-results li a").evaluate_all("a => a.map(x => x.href)"))
        page.wait_for_selector("#search-results p.context", timeout=30_000)
        for summary in page.locator("#search-results p.context").all_inner_texts():
            assert "decay" in summary.lower(), "the summary shows where the word stands"
        assert not visit.errors and not visit.outside


@pytest.mark.parametrize("name", [name for name in PAGES if "{cite" in sources(name)])
def test_citations_lead_to_the_list(chromium, address, name):
    with Visit(chromium, address, name) as visit:
        cited = visit.page.locator("article a[href*='references.html#id']") if "references" not in name else None
        if cited is None:
            cited = visit.page.locator("article a.reference.internal[href^='#id']")
        assert cited.count() > 0
        for target in cited.evaluate_all("links => links.map(link => link.href)"):
            anchor = target.split("#")[1]
            assert f'id="{anchor}"' in (site.SITE / "book" / "references.html").read_text()


@pytest.mark.parametrize("name", PAGES)
def test_links_inside_the_site(chromium, address, name):
    with Visit(chromium, address, name) as visit:
        for link in visit.page.locator("a[href]").evaluate_all("links => links.map(link => link.href)"):
            if link.startswith(address):
                path, _, anchor = link.removeprefix(f"{address}/").partition("#")
                target = site.SITE / (path.split("?")[0] or "index.html")
                assert target.exists(), link
                if anchor and target.suffix == ".html":
                    assert f'id="{anchor}"' in target.read_text(), link


def test_phone_menu_opens(chromium, address):
    with Visit(chromium, address, "book/start.html", 390) as visit:
        visit.page.locator("button.primary-toggle:visible").first.click()
        link = visit.page.locator("nav a[href$='notation.html']:visible").first
        link.click()
        visit.page.wait_for_url("**/notation.html")


def test_notebooks_show_results_of_this_run():
    """No page carries an output that failed or a widget without its state."""
    for name in NOTEBOOKS:
        text = (site.SITE / name).read_text()
        assert "output traceback" not in text and "output stderr" not in text, f"{name} shows an error or a warning"
        if has_slider(name):
            assert text.count("application/vnd.jupyter.widget-state+json") == 1
