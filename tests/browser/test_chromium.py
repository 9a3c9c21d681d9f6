"""The browser of the tests records problems and requests, and raises errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.chromium import Chromium, PageError

PAGE = """<!DOCTYPE html><meta charset="utf-8"><title>bad</title>
<script>
document.documentElement.dataset.ready = "true";
console.error("said");
setTimeout(() => { throw new Error("thrown"); });
Promise.reject(new Error("rejected"));
new Image().src = "http://127.0.0.1:9/wanted.png";
</script>"""


def test_problems_and_requests_are_recorded(browser: Chromium, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text(PAGE)
    browser.open(tmp_path / "bad.html")
    browser.evaluate("new Promise((done) => setTimeout(done, 200))")
    for text in ("said", "thrown", "rejected"):
        assert any(text in problem for problem in browser.problems), text
    assert "http://127.0.0.1:9/wanted.png" in browser.requests
    browser.problems.clear()
    browser.requests.clear()


def test_impossible_actions_raise_errors(browser: Chromium, tmp_path: Path) -> None:
    (tmp_path / "empty.html").write_text("<!DOCTYPE html><html data-ready='true'><select id='own'></select></html>")
    browser.open(tmp_path / "empty.html")
    with pytest.raises(PageError, match="#none: is not there"):
        browser.click("#none")
    with pytest.raises(PageError, match="has no option x"):
        browser.choose("#own", "x")
    with pytest.raises(PageError, match="nowhere"):
        browser.evaluate("nowhere.at.all")
    with pytest.raises(PageError, match="No.such"):
        browser.command("No.such")
