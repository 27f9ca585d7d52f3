"""Who is served, and what is said to those who are not: wrong keys, hosts, bodies, and what is no HTTP."""

import json
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import openai
import pytest
from byte_tokenizer import CHAT
from served import Served, answered, request, serving

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as made:
        yield made


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    """A server that needs a key."""
    with serving(keys=("sesame", "open-up")) as made:
        yield made


@pytest.mark.parametrize("key", ["sesame", "open-up"])
def test_every_key_opens(key: str, locked: Served) -> None:
    with locked.client(key) as client:
        assert client.completions.create(model="tiny", prompt="Hi", max_tokens=2).usage is not None
        assert client.models.retrieve("tiny").id == "tiny"
    assert locked.ask("/metrics", None, f"Authorization: bearer {key}", host="example.org").status == 200


@pytest.mark.parametrize(
    "header",
    [
        "X-Other: sesame",
        "Authorization: Bearer sesam",
        "Authorization: Bearer sesame!",
        "Authorization: Bearer",
        "Authorization: Bearer  sesame",
        "Authorization: sesame",
        "Authorization: Basic sesame",
        "Authorization: Bearer s\xe9same",
        "Authorization: Bearer \xff\xfe",
        "Authorization: Bearer " + "a" * 5000,
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/v1/contexts", "/metrics", TEXT_PATH, CHAT_PATH])
def test_without_a_key_nothing_is_told(header: str, path: str, locked: Served) -> None:
    body = {"prompt": "Hi"} if path.endswith("completions") else None
    refused = locked.ask(path, body, header)
    assert (refused.status, refused.error()["code"]) == (401, "invalid_api_key")
    assert locked.ask("/health").status == 200


def test_a_wrong_key_is_an_error_of_its_own_to_clients(locked: Served) -> None:
    with locked.client("wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:80", "evil.example:99999", "localhost.evil.example", "127.0.0.1.evil.example"),
        *("127.0.0.1@evil.example", "evil.example:x", "[::1", "a b", "", "127.0.0.2", "[::1]evil"),
    ],
)
def test_pages_of_other_names_do_not_reach_a_server_without_keys(host: str, served: Served) -> None:
    """Their browsers send them here if their name server says so."""
    for path, body in (("/v1/models", None), ("/", None), (TEXT_PATH, {"prompt": "Hi"})):
        refused = served.ask(path, body, host=host)
        assert refused.status == 403, host
        refused.error()


@pytest.mark.parametrize("host", ["localhost", "LocalHost:1", "127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:80"])
def test_names_of_this_machine_need_no_key(host: str, served: Served) -> None:
    assert served.ask("/v1/models", host=host).status == 200


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/page.html", "GET", 404),
        ("/v1/embeddings", "POST", 404),
        ("/v1/../etc/passwd", "GET", 404),
        ("/v1/x?\xff", "GET", 404),
        ("/v1/" + "x" * 3000, "GET", 404),
        ("/v1/completions/", "POST", 404),
        (CHAT_PATH, "GET", 405),
        ("/v1/models", "DELETE", 405),
        ("/metrics", "POST", 405),
    ],
)
def test_what_is_not_there_is_told_in_the_form_of_the_api(path: str, method: str, status: int, served: Served) -> None:
    refused = served.ask(path, None, method=method)
    assert refused.status == status or (refused.status == 400 and "\xff" in path)
    if refused.status == status:
        assert len(refused.error()["message"]) < 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "json"])
def test_a_body_that_a_page_may_send_unasked_is_refused(kind: str, served: Served) -> None:
    refused = served.ask(TEXT_PATH, {"prompt": "Hi"}, f"Content-Type: {kind}")
    assert refused.status == 415
    refused.error()
    assert served.ask(TEXT_PATH, {"prompt": "Hi"}, "Content-Type: Application/JSON; charset=utf-8").status == 200


def test_a_body_that_is_too_large_is_not_read(served: Served) -> None:
    """With its length told, and in chunks without."""
    data = b'{"prompt": "' + b"x" * 2**20 + b'"}'
    refused = served.ask(TEXT_PATH, data)
    assert refused.status == 413
    refused.error()
    start = request(TEXT_PATH, b"", "Transfer-Encoding: chunked")
    with served.open(start) as connection:
        with suppress(ConnectionError):
            for _ in range(17):
                connection.sendall(b"10000\r\n" + b" " * 2**16 + b"\r\n")
        assert answered(connection).status == 413
    chunked = b"6\r\n" + b'{"prom' + b"\r\n7\r\n" + b'pt":""}' + b"\r\n0\r\n\r\n"
    with served.open(start + chunked) as connection:
        assert answered(connection).status == 200


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"prompt": "x" * 5000}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": "Hi", "max_tokens": 5000}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": [1] * 4096}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": "Hi", "model": "other"}, 404, "model", "model_not_found"),
        ({"prompt": [300]}, 400, "prompt", None),
        ({"prompt": ["a", "b"]}, 400, "prompt", None),
        ({"prompt": "Hi", "stop": [""]}, 400, "stop", None),
        (b"{", 400, None, None),
        (b"\xff", 400, None, None),
        (b"", 400, None, None),
        (b"[" * 100_000, 400, None, None),
        (b'{"prompt": "\\ud800"}', 400, None, None),
    ],
)
def test_requests_that_cannot_be_met_say_why(
    body: Any, status: int, param: str | None, code: str | None, served: Served
) -> None:
    refused = served.ask(TEXT_PATH, body)
    error = refused.error()
    assert (refused.status, error["param"], error["code"]) == (status, param, code)
    assert "-" not in error["message"].replace("UTF-8", "")  # numbers below zero


def test_a_prompt_of_all_tokens_but_one_has_an_answer_of_one(served: Served) -> None:
    done = json.loads(served.ask(TEXT_PATH, {"prompt": [5] * 4095}).body)
    assert done["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("template", ["{{ raise_exception('roles alternate') }}", "{{ a.b.c }}", "{% include 'x' %}"])
def test_a_template_that_fails_is_a_request_that_cannot_be_met(template: str) -> None:
    with serving(template=template) as served:
        refused = served.ask(CHAT_PATH, {"messages": [{"role": "user", "content": "Hi"}]})
        message = refused.error()["message"]
        assert (refused.status, refused.error()["param"]) == (400, "messages")
        assert ("alternate" in message) == ("alternate" in template)
        assert not {"Traceback", "File ", ".py"} & {x for x in ("Traceback", "File ", ".py") if x in message}
        assert served.ask(TEXT_PATH, {"prompt": "Hi"}).status == 200


def test_a_model_without_a_template_says_so() -> None:
    with serving(template="") as served:
        refused = served.ask(CHAT_PATH, {"messages": [{"role": "user", "content": "Hi"}]})
        assert refused.status == 400
        assert "no chat template" in refused.error()["message"]


def mutated(data: bytes, numbers: random.Random) -> bytes:
    """A request that was changed in some places, or ends somewhere."""
    out = bytearray(data)
    for _ in range(numbers.randint(1, 8)):
        place = numbers.randrange(len(out) or 1)
        kind = numbers.randrange(5)
        if kind == 0:
            out[place : place + 1] = numbers.randbytes(1)
        elif kind == 1:
            out[place:place] = numbers.choice([b"\r\n", b"\n", b"\0", b":", b" ", b"\xff\xfe", b"x" * 70_000])
        elif kind == 2:
            del out[place : place + numbers.randint(1, 30)]
        elif kind == 3:
            out[place:place] = out[place : place + 40]
        else:
            del out[max(1, place) :]
    return bytes(out)


def test_what_is_no_http_is_refused_and_passed_over(served: Served) -> None:
    """300 requests, none of which may be answered with success or an error of the server."""
    numbers = random.Random(0)
    headers = ["Content-Length: -1", "Transfer-Encoding: x", "Expect: 100-continue", "Upgrade: websocket", "Host: b"]
    found: set[int] = set()
    for i in range(300):
        start = request(TEXT_PATH, {"prompt": 3}, *numbers.sample(headers, numbers.randrange(3)))
        with served.open(b"") as connection:
            try:
                connection.sendall(mutated(start, numbers) if i % 10 else numbers.randbytes(200))
                with suppress(OSError):  # it is closed already
                    connection.shutdown(socket.SHUT_WR)
                data = b""
                while part := connection.recv(2**16):
                    data += part
            except ConnectionError:
                continue
        statuses = [int(x.split()[1]) for x in data.split(b"\r\n") if x.startswith(b"HTTP/1.1 ")]
        found.update(statuses)
        assert [x for x in statuses if not (400 <= x < 500 or x == 100)] == [], data
    assert {400, 415} <= found
    assert served.ask(TEXT_PATH, {"prompt": "Hi"}).status == 200


def test_templates_get_nothing_but_texts_and_tools(served: Served) -> None:
    assert served.loaded.tokenizer.chat_template == CHAT
    body = {"messages": [{"role": "user", "content": "{{ 7 * 7 }}"}], "max_tokens": 1}
    done = json.loads(served.ask(CHAT_PATH, body).body)
    assert done["usage"]["prompt_tokens"] == served.chat("{{ 7 * 8 }}", 1).usage.prompt_tokens
