#!/usr/bin/env bash
# openai's client has no final response for a stream that ends because the answer had as many tokens as were allowed.
# openai 3.57.0. Source: lib/streaming/responses/_responses.py, which keeps the response of `response.completed` alone.
# /v1/responses ends such a stream with `response.incomplete`, which holds the whole response. The client reads it, but
# get_final_response() says that a `response.completed` never came: text and usage of all such answers are lost to it.
# Output seen: the last is response.incomplete with 'Hello'; RuntimeError: Didn't receive a `response.completed` event.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q openai==3.57.0
"$folder/env/bin/python" - <<'PY'
import json, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from openai import OpenAI

part = {"type": "output_text", "text": "Hello", "annotations": []}
message = {"type": "message", "id": "m", "role": "assistant", "status": "incomplete", "content": [part]}
response = {"id": "r", "object": "response", "created_at": 1, "model": "x", "parallel_tool_calls": True, "tools": [],
            "tool_choice": "auto", "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
begun = {"type": "response.created", "sequence_number": 0, "response": {**response, "output": []}}
ended = {"type": "response.incomplete", "sequence_number": 1, "response": {**response, "output": [message]}}

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = "".join(f"event: {x['type']}\ndata: {json.dumps(x)}\n\n" for x in (begun, ended)).encode()
        head = f"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
        self.wfile.write(head.encode() + body)

server = HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.handle_request, daemon=True).start()
client = OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none")
with client.responses.stream(model="x", input="Hi", max_output_tokens=1) as stream:
    *_, last = stream
    print(f"the last is {last.type} with {last.response.output_text!r}; ", end="")
    try:
        raise SystemExit(f"there is one: {stream.get_final_response().output_text!r}")
    except RuntimeError as error:
        print(f"RuntimeError: {error}")
PY
