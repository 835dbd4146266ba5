"""The documents as a site, opened from disk: pages can be searched, no code is cut off, the API is complete."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

import lightning_bucketddp
from tests.support.browser import browser
from tests.support.programs import REPOSITORY, run_commands

# Building the site takes half a minute. `make docs` does so, too, and fails on any warning.
pytestmark = pytest.mark.long

# By how many pixels the longest line of a block reaches beyond it, and a page beyond its window.
_CUT = """
const blocks = [...document.querySelectorAll(".highlight pre"), document.documentElement];
return blocks.map((block) => block.scrollWidth - block.clientWidth);
"""
_LOADED = """
const tags = document.querySelectorAll("script[src], link[rel=stylesheet], img");
const loads = performance.getEntriesByType("resource").map(({ name }) => name);
return [...[...tags].map((tag) => tag.src || tag.href), ...loads];
"""
# The signature and the text of everything that the page of the API describes, by name.
_API = """
return Object.fromEntries([...document.querySelectorAll("dt.sig[id]")].map(
  (name) => [name.id, [name.textContent, name.nextElementSibling.textContent.trim()]]));
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build what `make docs` builds."""
    folder = tmp_path_factory.mktemp("site")
    options = f"--quiet --fail-on-warning --keep-going -c {REPOSITORY}/docs -d doctrees"
    run_commands(f"python -m sphinx {options} {REPOSITORY} site", cwd=folder)
    return folder / "site"


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    with browser(width=1280) as driver:
        yield driver


def test_the_search_finds_pages(site: Path, driver: Chrome) -> None:
    """From the page that a reader opens first, which leads to the documents."""
    driver.get((site / "index.html").as_uri())
    WebDriverWait(driver, 30).until(lambda driver: driver.current_url.endswith("docs/index.html"))
    driver.get((site / "search.html").as_uri() + "?q=stall_warning_s")
    # Results come one after the other.
    WebDriverWait(driver, 30).until(
        lambda driver: any(
            "When it fails" in link.text for link in driver.find_elements(By.CSS_SELECTOR, "#search-results li a")
        )
    )
    assert [entry for entry in driver.get_log("browser") if entry["level"] != "INFO"] == []


def test_nothing_is_loaded_from_the_network(site: Path, driver: Chrome) -> None:
    driver.get((site / "docs" / "check.html").as_uri())
    loaded = driver.execute_script(_LOADED)
    assert any("site.css" in name for name in loaded)
    assert [name for name in loaded if not name.startswith("file:")] == []


@pytest.mark.parametrize("width", [500, 1280])
def test_no_code_is_cut_off(site: Path, driver: Chrome, width: int) -> None:
    driver.set_window_size(width, 1000)
    cut = {}
    for page in sorted(site.glob("docs/**/*.html")):
        driver.get(page.as_uri())
        cut[str(page.relative_to(site))] = max(driver.execute_script(_CUT))
    assert len(cut) > 10
    assert {name: pixels for name, pixels in cut.items() if pixels > 0} == {}


def test_the_api_shows_every_public_name(site: Path, driver: Chrome) -> None:
    driver.get((site / "docs" / "api.html").as_uri())
    shown = driver.execute_script(_API)
    names = [name for name in lightning_bucketddp.__all__ if name != "__version__"]
    documented = [name for name in names if shown.get(f"lightning_bucketddp.{name}", ["", ""])[1]]
    assert documented == names
    signature, text = shown["lightning_bucketddp.BucketDDPStrategy"]
    assert "bucket_cap_mb: float" in signature
    assert "Largest size of a gradient bucket" in text
