"""The documents as a site, opened from disk as the README says: they can be searched, and no code is cut off."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from tests.support.browser import browser
from tests.support.programs import REPOSITORY

# By how many pixels the longest line of a block reaches beyond it.
_CUT = "return [...document.querySelectorAll('pre > code')].map((code) => code.scrollWidth - code.clientWidth)"
_LOADED = """
const tags = document.querySelectorAll("script[src], link[rel=stylesheet], img");
const loads = performance.getEntriesByType("resource").map(({ name }) => name);
return [...[...tags].map((tag) => tag.src || tag.href), ...loads];
"""
# How many lines each block of code has, and how many it takes.
_LINES = """
return [...document.querySelectorAll(".language-python pre > code")].map((code) => {
  const style = getComputedStyle(code);
  const height = code.clientHeight - parseFloat(style.paddingTop) - parseFloat(style.paddingBottom);
  return [code.textContent.trimEnd().split("\\n").length, Math.round(height / parseFloat(style.lineHeight))];
});
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` makes."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=REPOSITORY, env=variables, check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    with browser(width=1280) as driver:
        yield driver


def test_the_search_finds_pages(site: Path, driver: Chrome) -> None:
    driver.get((site / "index.html").as_uri())
    driver.find_element(By.CSS_SELECTOR, ".md-search__input").send_keys("stall_warning_s")
    found = WebDriverWait(driver, 30).until(
        lambda driver: [link.text for link in driver.find_elements(By.CSS_SELECTOR, ".md-search-result__link")]
    )
    assert any("Reliability" in text for text in found)
    assert driver.get_log("browser") == []


def test_nothing_is_loaded_from_the_network(site: Path, driver: Chrome) -> None:
    driver.get((site / "quick-start.html").as_uri())
    loaded = driver.execute_script(_LOADED)
    assert any(name.endswith("iframe-worker.js") for name in loaded)
    assert [name for name in loaded if not name.startswith("file:")] == []


@pytest.mark.parametrize("width", [500, pytest.param(1280, marks=pytest.mark.long)])
def test_no_code_is_cut_off(site: Path, driver: Chrome, width: int) -> None:
    driver.set_window_size(width, 1000)
    cut = {}
    for page in sorted(site.glob("*.html")):
        driver.get(page.as_uri())
        cut[page.name] = max(driver.execute_script(_CUT), default=0)
    assert len(cut) > 10
    assert {name: pixels for name, pixels in cut.items() if pixels > 0} == {}


def test_lines_of_the_quick_start_are_not_even_broken(site: Path, driver: Chrome) -> None:
    driver.set_window_size(1280, 1000)
    driver.get((site / "quick-start.html").as_uri())
    lines = driver.execute_script(_LINES)
    assert lines
    assert [taken for _, taken in lines] == [there for there, _ in lines]
