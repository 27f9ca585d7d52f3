"""The page of a server, and the list of contexts that it shows."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from browser import dom, framed
from served import Served, serving, serving_together, until

from kvcli.serve import app as app_module

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 3


def listed(served: Served, *headers: str) -> list[dict[str, Any]]:
    answer = json.loads(served.ask("/v1/contexts", None, *headers).body)
    assert answer["object"] == "list"
    return list(answer["data"])


@pytest.mark.parametrize("opened", [serving, serving_together])
def test_contexts_are_listed_the_last_used_first(opened: Any, tmp_path: Path) -> None:
    with opened(store=tmp_path) as served:
        assert listed(served) == []
        for i in range(2):
            served.complete(f"{i}{TEXT}", 2)
            until(lambda count=i + 1: len(listed(served)) == count)
        store = served.engine.contexts.store
        second, first = listed(served)
        assert [first["name"], second["name"]] == [x.name for x in reversed(store.contexts())]
        assert first.keys() == {"name", "tokens", "bytes", "last_used"}
        assert 0 < first["tokens"] < len(TEXT)
        assert first["bytes"] > 0
        assert time.time() - 120 < first["last_used"] <= second["last_used"] <= time.time()
    with opened(store=tmp_path, method="rtn-4") as served:  # for which they are of no use
        assert listed(served) == []


def test_a_client_sees_contexts_of_its_key_only(tmp_path: Path) -> None:
    keys = ("sesame", "open-up")
    with serving(store=tmp_path, keys=keys, per_key=True) as served:
        with served.client(keys[0]) as client:
            client.completions.create(model="tiny", prompt=TEXT, max_tokens=2)
        until(lambda: listed(served, "Authorization: Bearer sesame"))
        assert listed(served, "Authorization: Bearer open-up") == []
        assert served.ask("/v1/contexts").status == 401
    with serving(store=tmp_path) as served:
        assert listed(served) == []


def test_without_a_store_nothing_is_listed() -> None:
    with serving() as served:
        served.complete(TEXT, 2)
        assert listed(served) == []


@pytest.mark.parametrize("keys", [(), ("sesame",)])
def test_the_page_is_served_without_a_key_and_loads_nothing_of_others(keys: tuple[str, ...]) -> None:
    with serving(keys=keys) as served:
        answer = served.ask("/")
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/html")
        policy = dict(x.split(" ", 1) for x in answer.headers["content-security-policy"].split("; "))
        assert policy.pop("connect-src") == "'self'"
        assert all(re.fullmatch(r"'sha256-[\w+/]{43}='", policy.pop(f"{x}-src")) for x in ("script", "style"))
        assert {*policy} == {"default-src", "base-uri", "form-action", "frame-ancestors"}
        assert {*policy.values()} == {"'none'"}
        page = answer.body.decode()
        assert not re.search(r"https?:|src=|href=|innerHTML|tiny|rtn", page)
        assert served.ask("/", host="evil.example").status == (200 if keys else 403)
        assert served.ask("/", method="POST").status == 405


@pytest.mark.parametrize("opened", [serving, serving_together])
def test_a_browser_shows_figures_on_a_phone_and_a_desk_by_day_and_night(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with opened(store=tmp_path / "store") as served:
        url = f"http://127.0.0.1:{served.port}/"
        assert re.search(r"<dt>Answered requests</dt><dd><span>0<", dom(url))
        for _ in range(2):
            served.complete(TEXT, 7)
        until(lambda: listed(served))
        found = served.counted("vllm:prefix_cache_hits_total")
        name, context = f"<b>{'x' * 93}</b>", listed(served)[0]
        monkeypatch.setattr(served.engine.contexts, "listed", lambda identities: [{**context, "name": name}])
        page = dom(url)
    assert re.search(r'<h1 id="model">tiny</h1>\s*<p id="method">rtn-2, \d\.00 bits per value, at most 4,096', page)
    for figure, value in (("Answered requests", 2), ("Tokens of answers", 14), ("Running requests", 0)):
        assert f"<dt>{figure}</dt><dd><span>{value}<" in page
    assert re.search(r"<dt>Time to first token</dt><dd><span>\d+(\.\d+)? s<", page)
    assert f"{found:.0f} prompt tokens" in page
    assert f'<th scope="row">&lt;b&gt;{"x" * 93}&lt;/b&gt;</th><td>{context["tokens"]}</td>' in page
    still = re.sub(r"<script>.*</script>", "", page, flags=re.DOTALL)
    for width in (390, 1280):
        day, night = (framed(still, width, dark, "dd") for dark in (False, True))
        assert (day, night) == ((0, "rgb(29, 33, 41)"), (0, "rgb(228, 230, 234)"))


@pytest.mark.parametrize("key", ["", "wrong", "sesame"])
def test_a_browser_asks_for_a_key_where_one_is_needed(key: str, tmp_path: Path, monkeypatch: Any) -> None:
    """A script at the end of the page's own types it."""
    monkeypatch.chdir(tmp_path)
    own = Path(app_module.__file__).with_name("page.html").read_text()
    typed = f'setTimeout(() => {{ at("key").value = "{key}"; at("ask").requestSubmit(); }}, 1000);\n</script>'
    Path("page.html").write_text(own.replace("</script>", typed))
    monkeypatch.setattr(app_module, "__file__", str(tmp_path / "app.py"))
    with serving(keys=("sesame",)) as served:
        page = dom(f"http://127.0.0.1:{served.port}/")
    said = {"": "The server needs an API key.", "wrong": "The server does not know this API key.", "sesame": ""}[key]
    assert re.search(rf'role="status" class="(bad)?">{said}</p>', page)
    assert ('<form id="ask" hidden="">' in page) == ('<div id="figures">' in page) == (key == "sesame")
    assert ('<h1 id="model">tiny</h1>' in page) == (key == "sesame")
