"""The playground in a real browser."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from live_server import eventually, live
from scripted_engine import ScriptedEngine

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidRequest
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.server.app import create_app
from jaxserve.server.lifecycle import Lifecycle
from jaxserve.server.listen import listen
from jaxserve.server.settings import ServerSettings

CHECKPOINT = Path(__file__).parents[1] / "fixtures" / "gqa"
MARKUP = "<img src=x onerror=\"document.title='owned'\"><b>bold</b> &amp; ünï"


def until(page: Any, expression: str) -> None:
    """Waits for it to be true; the page's own policy forbids playwright's way of doing that."""
    for _ in range(200):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"still false: {expression}")


def ask(page: Any, text: str = "Hi") -> Any:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".turn.assistant")
    return page.locator(".turn.assistant").last


def apart(work: Coroutine[Any, Any, None]) -> None:
    """Runs it in a thread: the browser's driver has the event loop of this one."""
    thread = threading.Thread(target=lambda: asyncio.run(work))
    thread.start()
    thread.join()


@pytest.fixture(scope="module")
def speculating() -> Iterator[int]:
    """Port of a tiny model with NGRAM."""
    config = EngineConfig(
        model=str(CHECKPOINT), page_size=4, num_pages=256, max_running_requests=2, chunked_prefill_size=32,
        prefill_token_buckets=(32,), decode_batch_buckets=(2,), skip_warmup=True, speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=3, speculative_adaptive=False,
    )  # fmt: skip
    engine = AsyncEngine.from_config(config)
    apart(engine.start())
    with live(engine) as port:
        yield port
    apart(engine.stop())


def test_an_answer_streams_and_its_markup_is_text(open_page: Any) -> None:
    engine = ScriptedEngine(script=MARKUP, step_s=0.005)
    with live(engine) as port:
        page = open_page(port)
        assert page.inner_text("#model") == "scripted"
        page.fill("#system", "Be brief")
        answer = ask(page)
        page.wait_for_selector(".meta")
        assert answer.locator(".text").text_content() == MARKUP
        assert answer.locator("img, b").count() == 0 and page.title() == "jaxserve"
        assert "tokens/s" in page.inner_text(".meta") and "first after" in page.inner_text(".meta")
        ask(page, "Again <i>")
        assert page.locator(".turn.user .text").last.text_content() == "Again <i>"
        until(page, "document.querySelectorAll('.meta').length === 2")
        page.click("#clear")
        assert page.locator(".turn").count() == 0 and page.is_visible("#empty")


def test_stop_ends_the_request_on_the_server(open_page: Any) -> None:
    engine = ScriptedEngine(script="word " * 60, step_s=0.02)
    with live(engine) as port:
        page = open_page(port)
        assert page.is_disabled("#stop")
        answer = ask(page)
        page.wait_for_selector(".token >> nth=5")
        page.click("#stop")
        page.wait_for_selector(".meta")
        assert eventually(lambda: len(engine.aborted) == 1) and "stopped" in page.inner_text(".meta")
        assert 5 < len(answer.locator(".text").text_content()) < 300
        assert page.is_disabled("#stop") and page.is_enabled("#send")


def test_log_probabilities_show_on_focus_and_arrows_move_between_tokens(open_page: Any) -> None:
    with live(ScriptedEngine(script="abc")) as port:
        page = open_page(port)
        ask(page)
        page.wait_for_selector(".meta")
        assert page.is_hidden("#tip")
        page.locator(".token").first.focus()
        assert "Token 97" in page.inner_text("#tip") and "60.7 %" in page.inner_text("#tip")
        assert page.locator("#tip tr").count() == 5 and page.locator("#tip .chosen").count() == 1
        page.keyboard.press("ArrowRight")
        assert "Token 98" in page.inner_text("#tip") and page.evaluate("document.activeElement.textContent") == "b"
        assert page.locator(".token[tabindex='0']").count() == 1
        page.keyboard.press("Escape")
        assert page.is_hidden("#tip")
        page.hover(".token >> nth=2")
        assert "Token 99" in page.inner_text("#tip")


def test_an_error_is_shown_as_the_server_said_it_and_the_message_is_kept(open_page: Any) -> None:
    engine = ScriptedEngine(refuse=InvalidRequest("the moon is <b>full</b>"))
    with live(engine) as port:
        page = open_page(port, expect=("400",))
        ask(page, "Howl")
        page.wait_for_selector(".error")
        assert page.text_content(".error") == "the moon is <b>full</b>" and page.input_value("#prompt") == "Howl"
        page.fill("#top_p", "7")
        page.press("#prompt", "Enter")
        until(page, "document.querySelectorAll('.error').length === 2")
        assert "top_p" in page.locator(".error").last.text_content()
    engine = ScriptedEngine(script="abcdef", error_after=3)
    with live(engine) as port:
        page = open_page(port)
        ask(page)
        page.wait_for_selector(".error")
        assert page.text_content(".turn.assistant .text") == "abc" and page.text_content(".error") == "bad step"


def test_a_key_is_asked_for_and_kept_for_the_tab(open_page: Any) -> None:
    with live(ScriptedEngine(), api_keys=("secret",)) as port:
        page = open_page(port, expect=("401",), ready=False)
        page.wait_for_selector("#ask[open]")
        page.fill("#key", "guess")
        page.press("#key", "Enter")
        until(page, "document.getElementById('ask-why').textContent.includes('wrong API key')")
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        page.wait_for_selector("#status[data-state=ready]")
        page.reload()
        page.wait_for_selector("#status[data-state=ready]")
        assert page.evaluate("localStorage.length") == 0


def test_a_loading_server_says_so_and_becomes_ready(open_page: Any) -> None:
    lifecycle, listener = Lifecycle(None), listen("127.0.0.1", 0)
    app = create_app(lifecycle, ServerSettings())
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        page = open_page(listener.getsockname()[1], ready=False)
        page.wait_for_selector("#status[data-state=loading]")
        assert page.inner_text("#status") == "Loading the model" and page.is_disabled("#send")
        lifecycle.serve_with(ScriptedEngine())
        page.wait_for_selector("#status[data-state=ready]")
        assert page.is_enabled("#send")
    finally:
        server.should_exit = True
        thread.join(5)


def test_accepted_drafts_are_marked_and_the_timeline_moves(open_page: Any, speculating: int) -> None:
    page = open_page(speculating)
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "40")
    ask(page, "Hi")
    page.wait_for_selector(".meta")
    ask(page, "Hi")
    until(page, "document.querySelectorAll('.meta').length === 2")
    page.click("#clear")
    ask(page, "Hi")  # as the first time: NGRAM has seen it all
    page.wait_for_selector(".meta .draft")
    assert page.locator(".token.draft").count() > 10
    page.locator(".token.draft").first.focus()
    assert "an accepted draft" in page.inner_text("#tip")
    until(page, "Number(document.getElementById('lanes').dataset.steps) > 10")
    assert "fence " in page.inner_text("#facts") and "executed " in page.inner_text("#facts")
    seen = page.evaluate("document.getElementById('lanes').dataset.steps")
    ask(page, "Hello")
    until(page, f"Number(document.getElementById('lanes').dataset.steps) > {seen}")


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_scrolls_sideways_and_every_control_has_a_name(open_page: Any, width: int, scheme: str) -> None:
    with live(ScriptedEngine(script="long" * 40)) as port:
        page = open_page(port, width=width, color_scheme=scheme, reduced_motion="reduce")
        ask(page, "x" * 200)
        page.wait_for_selector(".meta")
        page.evaluate("document.getElementById('settings').open = true")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        unnamed = page.evaluate(
            """[...document.querySelectorAll("input, textarea, button, summary, canvas, section, dialog")].filter((e) =>
               !(e.labels?.length || e.getAttribute("aria-label") || e.getAttribute("aria-labelledby")
                 || (["BUTTON", "SUMMARY"].includes(e.tagName) && e.textContent.trim()))).map((e) => e.outerHTML)"""
        )
        assert unnamed == []
        assert page.evaluate("document.documentElement.lang") == "en" and page.locator("h1").count() == 1
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
        assert len(ids) == len(set(ids))
        assert page.evaluate(CONTRAST) == []


# Text below 4.5 to 1 against the nearest background behind it (WCAG AA).
CONTRAST = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
  return [...document.querySelectorAll("body *")].filter((e) => e.offsetParent && !e.disabled
      && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())).map((e) => {
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.tagName, e.textContent.slice(0, 30)]; }).filter(([ratio]) => ratio < 4.5);
})()"""
