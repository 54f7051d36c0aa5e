"""The pages in a real browser, as somebody at a keyboard or with a phone meets them.

`pytest -m prove tests/e2e/test_playground.py` draws docs/playground-*.png, with the default target.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from playwright.sync_api import Browser, Page, Request, Route, expect, sync_playwright

from outrider.models.hub import fetch_default
from outrider.protocol.speculation import MAX_DRAFT_WAIT_US
from tests.cluster import ROOT, Cluster, server_info, until

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: apt install chromium"),
]

CHAT = "**/v1/chat/completions"
KINDS = {"accepted", "recovered", "bonus", "plain"}
ANSWER_MS = 60_000
SHOWN_MS = 20_000  # the page asks for the fleet's state every 2 s
READABLE = 4.5  # contrast of text, WCAG 2 AA
NARROW = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=SHOWN_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, address: str, **how: Any) -> Iterator[Page]:
    """A page of its own; in the end nothing may have been complained of, and nobody else been asked for anything."""
    context = browser.new_context(**({"viewport": {"width": 1280, "height": 840}} | how))
    page = context.new_page()
    complaints: list[str] = []
    strangers: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("request", lambda request: strangers.append(request.url) if not _ours(request, address) else None)
    page.goto(address)
    try:
        yield page
        assert not strangers
        # What a test stubs with 401 is told by the browser too: not a complaint of the page.
        assert not [text for text in complaints if "the server responded with a status of 401" not in text]
    finally:
        context.close()


def _ours(request: Request, address: str) -> bool:
    return request.url.startswith("data:") or urlsplit(request.url).netloc == urlsplit(address).netloc


@pytest.fixture
def page(browser: Browser, cluster: Cluster) -> Iterator[Page]:
    with opened(browser, cluster.coordinators[0].web) as page:
        expect(page.locator("#state-text")).to_have_text("ready")
        yield page


def choose(page: Page, **options: str) -> None:
    """Options by their ids, `-` as `_`."""
    page.evaluate(
        "given => Object.entries(given).forEach(([id, value]) => { document.getElementById(id).value = value; })",
        {name.replace("_", "-"): value for name, value in options.items()},
    )


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def endless(page: Page, **speculation: Any) -> None:
    """Answers go on to their last token: a tiny model may say at any time that it is done."""

    def on(route: Route) -> None:
        body = json.loads(route.request.post_data or "")
        body["speculation"] |= speculation
        route.continue_(post_data=json.dumps(body | {"ignore_eos": True}))

    page.route(CHAT, on)


def stop_soon(page: Page, how: str) -> None:
    """Click this button, or press Escape, once the answer has five tokens."""
    # From inside the page: a tiny model may be through before anybody outside has seen its first words.
    page.evaluate(
        """how => new MutationObserver((_, watch) => {
          if (document.querySelectorAll(".answer .token").length < 5) return;
          watch.disconnect();
          if (how === "escape") document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}));
          else document.getElementById(how).click();
        }).observe(document.getElementById("turns"), {childList: true, subtree: true})""",
        how,
    )


def complete(page: Page) -> None:
    expect(page.locator("#send")).to_be_visible(timeout=ANSWER_MS)


def idle(cluster: Cluster) -> None:
    until(lambda: server_info(cluster.address).sessions == 0, 30, "no session left")


# --- asking ----------------------------------------------------------------------------------------------------------


def test_a_question_by_keyboard_alone(page: Page) -> None:
    expect(page.locator("#welcome")).to_be_visible()
    expect(page.locator("#fleet li")).to_have_count(3)
    # The n-gram drafter may find nothing to guess; a cold drafter may join after a hundred tokens.
    endless(page, drafter="model", patience_us=MAX_DRAFT_WAIT_US)
    choose(page, max_tokens="600", gamma="4")
    page.keyboard.type("Say something.")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Say more.")
    page.keyboard.press("Enter")
    expect(page.locator(".mine")).to_have_text("Say something.\nSay more.")
    complete(page)
    expect(page.locator("#welcome")).to_have_count(0)
    classes = page.locator(".answer .token").evaluate_all("all => all.map(one => one.classList[1])")
    assert classes
    assert set(classes) <= KINDS
    assert "accepted" in classes or "recovered" in classes, "some were guessed"
    tally = [int(count) for count in page.locator("#tally dd").all_inner_texts()]
    assert 0 < sum(tally) <= 600
    assert "ms" in page.locator("#numbers").inner_text()
    assert len(page.locator(".plot polyline").nth(1).get_attribute("points") or "") > 10
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator("#news")).to_contain_text("Complete")


def test_the_text_is_what_the_api_says(page: Page, cluster: Cluster) -> None:
    choose(page, seed="77", max_tokens="50")
    with page.expect_request(CHAT) as asked:
        ask(page, "Once upon a time")
    complete(page)
    body = json.loads(asked.value.post_data or "")
    with httpx.Client(base_url=cluster.coordinators[0].web, timeout=60) as web:
        wanted = web.post("/v1/chat/completions", json=body | {"stream": False}).json()
    assert (
        page.locator(".answer .said").evaluate("one => one.textContent") == wanted["choices"][0]["message"]["content"]
    )


@pytest.mark.parametrize("how", ["stop", "escape"])
def test_stopping_frees_the_session(page: Page, cluster: Cluster, how: str) -> None:
    endless(page)
    choose(page, max_tokens="1800")
    stop_soon(page, how)
    ask(page, "Go on for ever")
    expect(page.locator(".answer .token").nth(4)).to_be_attached(timeout=ANSWER_MS)
    complete(page)
    idle(cluster)
    expect(page.locator(".failed")).to_have_count(0)
    expect(page.locator("#news")).to_contain_text("Stopped")


def test_a_new_conversation_hears_nothing_of_the_old(page: Page, cluster: Cluster) -> None:
    endless(page)
    choose(page, max_tokens="1800")
    stop_soon(page, "clear")
    ask(page, "The old one")  # takes the welcome away
    expect(page.locator("#welcome")).to_be_visible(timeout=ANSWER_MS)
    expect(page.locator(".answer")).to_have_count(0)
    idle(cluster)
    choose(page, max_tokens="4")
    with page.expect_request(CHAT) as asked:
        ask(page, "The new one")
    complete(page)
    assert [one["content"] for one in json.loads(asked.value.post_data or "")["messages"]] == ["The new one"]
    with page.expect_request(CHAT) as asked:
        ask(page, "And on")
    complete(page)
    roles = [one["role"] for one in json.loads(asked.value.post_data or "")["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_comparing_shows_one_text_twice_and_a_factor(page: Page) -> None:
    page.check("#compare")
    choose(page, max_tokens="80")
    ask(page, "Tell me twice")
    expect(page.locator(".race .times")).to_have_text(re.compile(r"^\d+\.\d\d ×$"), timeout=ANSWER_MS)
    plain, guessed = page.locator(".answer .said").evaluate_all("all => all.map(one => one.textContent)")
    assert plain == guessed
    expect(page.locator(".race .same")).to_be_visible()
    kinds = page.locator(".answer").first.locator(".token").evaluate_all("all => all.map(one => one.classList[1])")
    assert set(kinds) == {"plain"}


def test_options_by_keyboard(page: Page) -> None:
    page.keyboard.press("Tab")  # Send
    page.keyboard.press("Tab")
    expect(page.locator("#compare")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".options")).to_be_visible()
    page.keyboard.press("Tab")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#temperature-value")).to_have_text("1")
    for text in ("9", "123"):
        page.keyboard.press("Tab")
        page.keyboard.press("Control+A")
        page.keyboard.type(text)
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Tab")
    page.keyboard.type("Be brief.")
    page.keyboard.press("Escape")
    expect(page.locator(".options")).to_be_hidden()
    expect(page.locator("#options summary")).to_be_focused()
    with page.expect_request(CHAT) as asked:
        ask(page, "Now")
    complete(page)
    body = json.loads(asked.value.post_data or "")
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (1, 9, 123)
    assert body["speculation"]["gamma"] == 0
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_missing_key_is_told_and_can_be_given(page: Page) -> None:
    refusal = {
        "error": {"message": "No key came with this", "type": "authentication_error", "param": None, "code": None}
    }

    def guard(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer open sesame":
            route.continue_()
        else:
            route.fulfill(status=401, json=refusal)

    page.route(CHAT, guard)
    page.route("**/fleet", guard)
    choose(page, max_tokens="5")
    ask(page, "Let me in")
    expect(page.get_by_role("alert")).to_have_text("No key came with this. Enter the API key under Options.")
    expect(page.locator("#key")).to_be_focused()
    expect(page.locator("#prompt")).to_have_value("Let me in")
    expect(page.locator("#state-text")).to_have_text("needs an API key")
    page.keyboard.type("open sesame")
    page.keyboard.press("Escape")
    page.press("#prompt", "Enter")
    complete(page)
    expect(page.get_by_role("alert")).to_have_count(1)
    expect(page.locator("#state-text")).to_have_text("ready")


@pytest.mark.parametrize(
    ("stream", "told"),
    [
        (
            'data: {"error": {"message": "The coordinator is leaving."}}\n\ndata: [DONE]\n\n',
            "The coordinator is leaving.",
        ),
        ("data: ", "The stream was interrupted."),
    ],
)
def test_an_answer_that_fails_on_the_way_says_so(page: Page, stream: str, told: str) -> None:
    page.route(CHAT, lambda route: route.fulfill(status=200, content_type="text/event-stream", body=stream))
    ask(page, "Try")
    expect(page.get_by_role("alert")).to_have_text(told)
    complete(page)
    expect(page.locator("#prompt")).to_have_value("Try")


def test_thoughts_are_shown_before_the_answer_and_not_sent_back(page: Page) -> None:
    marks = {"kinds": ["plain", "accepted"], "characters": [1, 2], "plan": "γ 1", "gamma": 1}
    deltas = [{"reasoning_content": "Hm,"}, {"reasoning_content": " so"}, {"content": "Yes"}]
    chunks = [{"index": 0, "delta": delta, "speculation": marks} for delta in deltas]
    body = "".join(f": ping\n\ndata: {json.dumps({'choices': [chunk]})}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route(CHAT, lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body))
    ask(page, "Is it?")
    complete(page)
    expect(page.locator(".answer .said")).to_have_text(["Hm, so", "Yes"])
    expect(page.locator(".answer .thoughts .token.accepted")).to_have_text(["m,", "so"])
    with page.expect_request(CHAT) as asked:
        ask(page, "And on")
    complete(page)
    sent = [one["content"] for one in json.loads(asked.value.post_data or "")["messages"]]
    assert sent == ["Is it?", "Yes", "And on"]


def test_a_server_that_is_not_there_is_told_in_words(browser: Browser, cluster: Cluster) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(cluster.coordinators[0].web)
    for path in (CHAT, "**/fleet"):
        page.route(path, lambda route: route.abort("connectionrefused"))
    ask(page, "Are you there?")
    expect(page.get_by_role("alert")).to_have_text("The server does not answer.")
    expect(page.locator("#state-text")).to_have_text("The server does not answer.")
    expect(page.locator("#prompt")).to_have_value("Are you there?")
    context.close()


def test_an_answer_that_waits_says_so(page: Page) -> None:
    """A browser has six connections to a server, and each of its windows may have a stream without end."""
    page.route(CHAT, lambda route: None)
    ask(page, "Now")
    expect(page.locator(".answer")).to_contain_text("Waiting for the server. Six answers at a time")
    page.keyboard.press("Escape")
    expect(page.locator(".answer")).not_to_contain_text("Waiting")


def test_a_refusal_is_shown_in_the_servers_words(browser: Browser, cluster: Cluster) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(cluster.coordinators[0].web)
    choose(page, max_tokens="4000")
    ask(page, "More than there is room for")
    expect(page.get_by_role("alert")).to_contain_text("max_tokens is 4000, must be at most")
    context.close()


def test_a_refusal_of_a_long_question_is_not_covered_by_it(page: Page) -> None:
    stream = 'data: {"error": {"message": "The prompt is too long."}}\n\ndata: [DONE]\n\n'
    page.route(CHAT, lambda route: route.fulfill(status=200, content_type="text/event-stream", body=stream))
    ask(page, "A long question. " * 400)
    expect(page.locator("#prompt")).to_have_value(re.compile("A long question"))
    seen = """one => { const box = one.getBoundingClientRect();
        return one === document.elementFromPoint(box.left + 5, (box.top + box.bottom) / 2); }"""
    assert page.get_by_role("alert").evaluate(seen)


def test_a_number_that_no_option_has_is_shown(browser: Browser, cluster: Cluster) -> None:
    """Chromium refuses to send the form and cannot point at a field in closed options."""
    with opened(browser, cluster.coordinators[0].web) as page:
        choose(page, seed="-1")
        ask(page, "Nothing happens?")
        expect(page.locator("#seed")).to_be_focused()
        expect(page.locator("#prompt")).to_have_value("Nothing happens?")


def test_a_comparison_stopped_half_way_is_remembered(page: Page) -> None:
    endless(page)
    page.check("#compare")
    choose(page, max_tokens="1800")
    stop_soon(page, "stop")
    ask(page, "Go on for ever")
    expect(page.locator(".answer .token").nth(4)).to_be_attached(timeout=ANSWER_MS)
    complete(page)
    page.uncheck("#compare")
    choose(page, max_tokens="4")
    with page.expect_request(CHAT) as asked:
        ask(page, "And on")
    complete(page)
    assert json.loads(asked.value.post_data or "")["messages"][1]["content"]


def test_options_say_what_is_sent_after_the_way_back(page: Page) -> None:
    page.click("summary")
    page.locator("#temperature").press("ArrowRight")
    page.goto(f"{page.url}docs")
    page.go_back()
    expect(page.locator("#state-text")).to_have_text("ready")
    assert page.input_value("#temperature") == page.locator("#temperature-value").text_content()


def test_a_browser_without_storage(browser: Browser, cluster: Cluster) -> None:
    context = browser.new_context()
    page = context.new_page()
    denied = "Object.defineProperty(window, name, {get() { throw new DOMException('no', 'SecurityError'); }})"
    page.add_init_script(f"for (const name of ['localStorage', 'sessionStorage']) {denied};")
    page.goto(cluster.coordinators[0].web)
    expect(page.locator("#state-text")).to_have_text("ready")
    page.click("#theme")
    context.close()


# --- for every eye, hand and screen ----------------------------------------------------------------------------------

CONTRAST = """
(text) => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const paint = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return [...document.querySelectorAll(text)].filter(one => one.offsetParent && one.textContent.trim()).map(one => {
    const under = [];
    for (let at = one; at; at = at.parentElement) under.unshift(getComputedStyle(at).backgroundColor);
    const back = paint(under);
    const front = paint([...under, getComputedStyle(one).color]);
    const [high, low] = [light(front), light(back)].sort((a, b) => b - a);
    return [one.className || one.id || one.tagName, (high + 0.05) / (low + 0.05)];
  });
}
"""
READ = (
    ".token, .legend dd, #model, #state, h2, h3, dt, dd, figcaption span, .what, button, .check, summary, small, a, p"
)


def unreadable(page: Page) -> list[Any]:
    found = page.evaluate(CONTRAST, READ)
    assert len(found) > 20
    return [(name, round(ratio, 2)) for name, ratio in found if ratio < READABLE]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read(browser: Browser, cluster: Cluster, scheme: str) -> None:
    with opened(browser, cluster.coordinators[0].web, color_scheme=scheme) as page:
        expect(page.locator("#state-text")).to_have_text("ready")
        assert set(page.locator("#welcome .token").evaluate_all("all => all.map(one => one.classList[1])")) == KINDS
        assert not unreadable(page), "before the first question: every kind of token is there"
        page.check("#compare")
        choose(page, max_tokens="40")
        ask(page, "Anything")
        expect(page.locator(".race")).to_be_visible(timeout=ANSWER_MS)
        assert not unreadable(page)


def test_the_theme_is_chosen_and_kept(page: Page) -> None:
    def paper() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    before = paper()
    page.click("#theme")
    chosen = paper()
    assert chosen != before
    page.reload()
    assert paper() == chosen


def test_still_for_those_who_want_it_still(browser: Browser, cluster: Cluster) -> None:
    moving = {}
    for motion in ("reduce", "no-preference"):
        with opened(browser, cluster.coordinators[0].web, reduced_motion=motion) as page:
            page.evaluate("document.querySelector('.sample').classList.add('writing')")
            moving[motion] = page.evaluate(
                "getComputedStyle(document.querySelector('.writing'), '::after').animationName"
            )
    assert moving == {"reduce": "none", "no-preference": "blink"}


def fits(page: Page) -> None:
    wide = page.evaluate("[document.scrollingElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1], "nothing is to be scrolled to the side for"


def test_a_narrow_screen(browser: Browser, cluster: Cluster) -> None:
    with opened(browser, cluster.coordinators[0].web, viewport=NARROW, has_touch=True, is_mobile=True) as page:
        expect(page.locator("#state-text")).to_have_text("ready")
        fits(page)
        page.click("summary")
        fits(page)
        box = page.locator(".options").bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= NARROW["width"]
        page.keyboard.press("Escape")
        page.check("#compare")
        choose(page, max_tokens="120")
        ask(page, "Something longer than the screen is wide, " * 4)
        expect(page.locator(".race")).to_be_visible(timeout=ANSWER_MS)
        fits(page)
        expect(page.locator("#send")).to_be_in_viewport()
        expect(page.locator(".race")).to_be_in_viewport()
        first, second = (one.bounding_box() for one in page.locator(".answer").all())
        assert first is not None
        assert second is not None
        assert second["y"] > first["y"], "below each other"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [{"width": 1280, "height": 840}, NARROW], ids=["wide", "narrow"])
def test_the_api_page(browser: Browser, cluster: Cluster, scheme: str, viewport: dict[str, int]) -> None:
    address = f"{cluster.coordinators[0].web}/docs"
    with opened(browser, address, color_scheme=scheme, viewport=viewport) as page:
        expect(page.locator("section").first).to_be_visible()
        fits(page)
        assert not unreadable(page)
        missing = page.evaluate(
            "[...document.querySelectorAll('a[href^=\"#\"]')].map(a => decodeURIComponent(a.hash.slice(1)))"
            ".filter(id => !document.getElementById(id))"
        )
        assert not missing
        assert "undefined" not in page.locator("body").inner_text()
        assert "[object" not in page.locator("body").inner_text()


# --- pictures for the docs -------------------------------------------------------------------------------------------


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_pictures_for_the_docs(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> None:
    target = fetch_default(print)
    cluster = Cluster(tmp_path_factory.mktemp("default"))
    cluster.add_coordinator()
    cluster.add_verifier(target)
    cluster.add_drafter("suffix+eagle", None, "--target", "default")
    cluster.start()
    try:
        web = cluster.coordinators[0].web
        _picture(browser, web, "idle", lambda page: page.wait_for_timeout(1000))
        _picture(browser, web, "streaming", _half_way)
        _picture(browser, web, "compare", _compared)
        _picture(browser, web, "mobile", _answered, viewport=NARROW, device_scale_factor=2)
        _picture(browser, web, "dark", _answered, color_scheme="dark")
    finally:
        cluster.stop()


def _picture(browser: Browser, web: str, name: str, act: Callable[[Page], None], **how: Any) -> None:
    with opened(browser, web, **how) as page:
        expect(page.locator("#state-text")).to_have_text("ready")
        act(page)
        page.screenshot(path=ROOT / "docs" / f"playground-{name}.png")


def _half_way(page: Page) -> None:
    choose(page, seed="3", temperature="0", max_tokens="200")
    ask(page, "Write down the numbers from one to twenty, then write them down again.")
    expect(page.locator(".answer .token").nth(90)).to_be_attached(timeout=ANSWER_MS)


def _compared(page: Page) -> None:
    page.check("#compare")
    choose(page, seed="3", temperature="0", max_tokens="120")
    ask(page, "Write down the numbers from one to twenty, then write them down again.")
    expect(page.locator(".race")).to_be_visible(timeout=4 * ANSWER_MS)
    page.wait_for_timeout(700)  # the bars have grown


def _answered(page: Page) -> None:
    choose(page, seed="3", temperature="0", max_tokens="120")
    ask(page, "Why is the sky blue?")
    expect(page.locator("#send")).to_be_visible(timeout=4 * ANSWER_MS)
