"""Photograph every page of the built site, for a person to look at: light, dark and at phone width."""

import browser
from playwright.sync_api import sync_playwright

FOLDER = browser.ROOT / "_build" / "screenshots"
LOOKS = {"light": (1280, "light"), "dark": (1280, "dark"), "phone": (390, "light"), "phone-dark": (390, "dark")}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, browser.served() as address:
        chromium = browser.launch(playwright)
        for look, (width, scheme) in LOOKS.items():
            for name in browser.pages():
                context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
                page = context.new_page()
                page.goto(f"{address}/{name}", timeout=120_000)
                # Not "networkidle", which under load does not always come.
                page.evaluate("() => Promise.all([document.fonts.ready, window.MathJax?.startup?.promise])")
                page.wait_for_timeout(1000)  # widgets draw themselves after the last request
                page.screenshot(path=FOLDER / f"{name.split('/')[-1].removesuffix('.html')}-{look}.png", full_page=True)
                context.close()
        chromium.close()
    print(f"Screenshots are in {FOLDER.relative_to(browser.ROOT)}")


if __name__ == "__main__":
    main()
