"""The page: self-contained, complete, and working in a real browser where one is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import fp4
from tests.graphs import MLP

BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)
MODEL = fp4.Policy("mine", fp4.recipe("nvfp4").precision)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "explained.html"
    explained = fp4.explain(MLP(), torch.empty(32, 64, requires_grad=True), policy=MODEL)
    assert explained.html(path, ["b"]) == path.read_text()
    return path


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in ("meta", "input", "path", "rect", "polygon"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "path", "polygon"):
            assert self.open.pop() == tag


def test_it_needs_no_other_file_and_its_elements_are_closed(page: Path) -> None:
    text = page.read_text()
    links = _Links()
    links.feed(text)
    assert links.outside == []
    assert links.open == []
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert "url(" not in text


def _dom(page: Path, place: str) -> str:
    """The page's DOM at a place, after its scripts have run. No name resolves: whatever it asked of a network would fail."""
    assert BROWSER is not None
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=6000",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    )
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [BROWSER, *flags, profile, "--dump-dom", f"{page.as_uri()}#{place}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_stages_side_by_side_and_search_in_a_browser(page: Path) -> None:
    dom = _dom(page, "tab=stages&left=tagged&right=rewritten&search=fp4.quantize")
    assert 'data-ready="tagged|rewritten|fp4.quantize"' in dom
    left, right = re.findall(r"<pre id=.(?:left|right)code.>(.*?)</pre>", dom, re.DOTALL)
    assert left == ""  # nothing is quantized yet
    assert right.count("<mark>fp4.quantize</mark>") == right.count('<span class="more">') == 6 * 3
    assert '<span class="count" id="count">18 lines</span>' in dom
    names = re.findall(r"<option[^>]*>(.*?)</option>", dom)
    assert names[:6] == ["captured", "tagged", "rewritten", "forward", "backward", "lowered"]
    assert "b: MLIR, rewritten" in names


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_search_hides_rows_and_dims_the_drawing_in_a_browser(page: Path) -> None:
    dom = _dom(page, "tab=table&search=(32,%2064,%2096)")
    hidden = re.findall(r'<tbody data-name="(\w+)" style="display: none;">', dom)
    assert hidden == ["a", "c"]
    assert re.findall(r'<tbody data-name="(\w+)"', dom) == ["a", "b", "c"]
    drawing = _dom(page, "tab=drawing&search=b")
    dimmed = {name: "dim" in rest for name, rest in re.findall(r'<rect[^>]*data-name="(\w+)"([^>]*)>', drawing)}
    assert dimmed == {"a": True, "b": False, "c": True}
