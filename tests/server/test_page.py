"""The page at /: what is served, with which policy, and a click-through in a real browser."""

from __future__ import annotations

import itertools
import json
import re
import threading
import urllib.error
import urllib.request

import pytest

from jaxspec import AsyncLLM
from jaxspec.server import page as served
from tests.api.llm.answers import one_shape
from tests.server.running import MODEL, SOON, Running
from tests.support import browser

HOSTILE = "<img src=x onerror=document.title='bad'><script>1</script>"


def got(url: str, method: str = "GET"):
    request = urllib.request.Request(url, method=method)
    try:
        return urllib.request.urlopen(request, timeout=SOON)
    except urllib.error.HTTPError as error:
        return error


def test_the_page_and_its_files_are_served(server):
    """Each file by its type; all that the page loads is in the package."""
    with got(server.url + "/") as answer:
        html = answer.read().decode()
        assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    loaded = re.findall(r'(?:src|href)="([^"]*)"', html)
    for name in served.FILES.keys() - {served.INDEX}:
        with got(f"{server.url}/page/{name}") as answer:
            text = answer.read().decode()
            assert (answer.status, answer.headers["content-type"]) == (200, f"{served.FILES[name]}; charset=utf-8")
            loaded += ["page/" + found for found in re.findall(r'from "\./([^"]*)"', text)]
    assert {name.removeprefix("page/") for name in loaded} == served.FILES.keys() - {served.INDEX}
    assert {path.name for path in served.FOLDER.iterdir()} == served.FILES.keys()
    with got(server.url + "/", "HEAD") as answer:
        assert (answer.status, answer.read()) == (200, b"")


def test_nothing_else_is_served(server, another):
    for path in ("/page/..%2Fapp.py", "/page/nothing.js", "/page/", "/page/%2e%2e/app.py"):
        with got(server.url + path) as answer:
            assert answer.status == 404
            assert json.load(answer)["error"]["type"]
    with got(server.url + "/", "POST") as answer:
        assert answer.status == 405
    without = another(page=False)
    for path in ("/", "/page/page.js"):
        with got(without.url + path) as answer:
            assert answer.status == 404


def test_texts_are_never_set_as_html():
    sources = [path.read_text(encoding="utf-8") for path in served.FOLDER.iterdir()]
    assert not any(
        re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|https?://(?!www\.w3\.org/2000/svg)", s)
        for s in sources
    )


def test_origins_come_with_the_answer(server):
    """Whole and streamed, completions and chats: the texts of the tokens join to the answer's."""
    client = server.client()
    body = {"model": MODEL, "temperature": 0, "max_tokens": 9}
    asked = body | {"extra_body": {"token_origins": True, "ignore_eos": True}}
    messages = [{"role": "user", "content": "dog"}]
    whole = client.completions.create(**asked, prompt="The dog").choices[0]
    assert "".join(origin["text"] for origin in whole.token_origins) == whole.text
    assert set(whole.token_origins[0]) == {"text", "origin", "method", "round", "position", "num_drafts", "num_legal"}
    chat = client.chat.completions.create(**asked, messages=messages).choices[0]
    assert [origin["round"] for origin in chat.token_origins] == list(range(9))
    parts = [event.choices[0] for event in client.chat.completions.create(**asked, messages=messages, stream=True)]
    streamed = [origin for part in parts for origin in getattr(part, "token_origins", [])]
    assert streamed == chat.token_origins
    plain = client.completions.create(**body, prompt="The dog").choices[0]
    assert not hasattr(plain, "token_origins")


@pytest.fixture(scope="module")
def drafting(folder):
    """A server whose model drafts for itself, so that nearly all drafts are accepted."""
    options = {"max_num_seqs": 2, "num_pages": 64, "rounds_per_launch": 4}
    llm = AsyncLLM(
        folder, speculative_config={"model": folder, "num_speculative_tokens": 3, "adaptive": False}, **options
    )
    one_shape(llm.llm)
    running = Running(llm)
    yield running
    running.stop()
    llm.shutdown()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    if browser.FOUND is None:
        pytest.skip("there is no Chromium here")
    with browser.browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


ENDED = "document.getElementById('stop').hidden && document.querySelectorAll('.figures').length"
JOINED = "[...document.querySelectorAll('.turn:last-child .tokens')].map(tokens => tokens.textContent)"


def ask(page, prompt: str, *, ended: bool = True) -> None:
    page.click("#prompt")
    page.type(prompt)
    page.press("Enter", "\r")
    if ended:
        page.until(ENDED)


def set_option(page, name: str, value) -> None:
    control = f"document.getElementById({name!r})"
    page.value(f"{control}.value = {json.dumps(str(value))}; {control}.dispatchEvent(new Event('change'))")


@pytest.mark.thorough  # compiles an engine of its own
def test_a_click_through(drafting, page):
    """A completion with drafts and one without, side by side; its tokens, figures, table and keys."""
    page.open(drafting.url + "/")
    page.until("document.getElementById('model').textContent === 'tiny'")
    page.click("input[value=complete] + span")
    page.click("#compare")
    set_option(page, "max_tokens", 40)
    ask(page, "dog dog dog dog dog dog")
    texts = page.value(JOINED)
    expected = drafting.client().completions.create(
        model=MODEL, prompt="dog dog dog dog dog dog", temperature=0, max_tokens=40, extra_body={"token_origins": True}
    )
    said = expected.choices[0].text
    assert texts == [said, said]
    drafts = sum(origin["origin"] == "draft" for origin in expected.choices[0].token_origins)
    assert drafts > 0
    assert page.value("document.querySelectorAll('.turn .token.model').length") == drafts
    assert page.value("document.querySelectorAll('.undrafted .model').length") == 0
    figures = page.value("document.querySelector('.figures').textContent")
    assert "Both texts are the same." in figures
    assert f"{drafts} of " in figures
    page.value("document.querySelector('.tokens').focus()")
    page.press("ArrowRight")
    page.press("End")
    note = page.value("document.querySelector('.note').textContent")
    assert re.search(r"round \d+, (draft \d of \d, accepted, by draft_model|the model's own)", note)
    page.value("document.querySelector('.figures details').open = true")
    page.until("document.querySelector('.figures tbody')")
    rounds = len({origin["round"] for origin in expected.choices[0].token_origins})
    assert page.value("document.querySelectorAll('tbody tr').length") == rounds
    assert not page.errors


def test_a_text_that_would_be_html_is_text(server, page):
    """A grammar makes the model write it; the prompt is such a text, too."""
    page.open(server.url + "/")
    page.click("input[value=complete] + span")
    set_option(page, "form", "regex")
    set_option(page, "grammar", re.escape(HOSTILE).replace("\\ ", " ").replace("\\'", "'"))
    ask(page, HOSTILE)
    assert page.value(JOINED) == [HOSTILE]
    assert page.value("document.querySelector('.turn h2').textContent") == HOSTILE
    assert page.value("document.querySelectorAll('.turn img, .turn script').length") == 0
    assert "bad" not in page.value("document.title")
    assert page.value("document.querySelectorAll('.counts .token[data-legal]').length") > 0
    assert not page.errors


def test_errors_are_shown_in_words(server, page):
    page.open(server.url + "/")
    set_option(page, "temperature", -1)
    ask(page, "dog", ended=False)
    page.until("document.querySelector('.turn [role=alert]')")
    assert "temperature=-1" in page.value("document.querySelector('.turn [role=alert]').textContent")
    set_option(page, "temperature", 0)
    set_option(page, "form", "json")
    set_option(page, "grammar", "{")
    ask(page, "dog", ended=False)
    page.until("[...document.querySelectorAll('[role=alert]')].some(e => e.textContent.includes('is not JSON'))")
    page.errors.clear()  # the browser lists the answer 400


def test_stop_aborts_the_request(server, page, monkeypatch):
    """The engine is held in the middle of the answer. The fixture sees that nothing is left in it."""
    engine, stopped, steps = server.llm.llm.engine, threading.Event(), itertools.count()
    step = engine.step

    def held(*args, **options):
        if next(steps) > 1:
            stopped.wait(SOON)
        return step(*args, **options)

    monkeypatch.setattr(engine, "step", held)
    page.open(server.url + "/")
    set_option(page, "form", "regex")
    set_option(page, "grammar", "[a-z]{100,200}")
    ask(page, "dog", ended=False)
    page.until("document.querySelectorAll('.turn .token').length > 0")
    page.press("Escape")
    page.until("document.getElementById('stop').hidden")
    stopped.set()
    assert "Stopped: " in page.value("document.querySelector('.note').textContent")
    assert page.value("document.querySelectorAll('.turn .token').length") < 100


def test_a_server_with_a_key_asks_for_it(another, page):
    page.open(another(api_key="open sesame").url + "/")
    page.until("document.activeElement.id === 'key'")
    assert "the API key is missing or wrong" in page.value("document.getElementById('model').textContent")
    page.type("open sesame")
    page.press("Tab")
    page.until("document.getElementById('model').textContent === 'tiny'")
    page.errors.clear()  # the browser lists the answer 401
