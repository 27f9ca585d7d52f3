"""`kvcli chat --url`: the same conversation with a server of the OpenAI API."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from kvcli.cli.output import Output
from kvcli.cli.session_options import SamplingOptions
from kvcli.errors import KvcliError, UsageError, error_text


def talk(url: str, system: str | None, options: SamplingOptions, lines: Iterator[str], output: Output) -> None:
    """Sends each line with all messages before it, and writes the reply as it comes; `/exit` ends.

    UsageError: options that are the server's, or no package `openai`; KvcliError: no server answers, it refuses, or
    what it says is not of this API.
    """
    ours = {"url", "system", "max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed"}
    if others := sorted(options.model_fields_set - ours):
        raise UsageError(f"--{others[0].replace('_', '-')} is for the server to know; it does not go with --url")
    try:
        import openai
    except ImportError as error:
        raise UsageError("--url needs the package openai: pip install 'kvcli[serve]'") from error
    client = openai.OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY") or "none", max_retries=0)
    messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
    said = options.model_dump(include=options.model_fields_set & {"top_k", "repetition_penalty"})
    sampling = options.model_dump(include={"temperature", "top_p", "seed"}) | {"max_tokens": options.max_new_tokens}
    usages: list[dict[str, int]] = []
    try:
        model = next((found.id for found in client.models.list()), None)
        if model is None:
            raise KvcliError(f"{url} names no model")
        asked: dict[str, Any] = {"model": model, "messages": messages, "extra_body": said, **sampling}
        output.say(f"{model} at {url}; /exit ends the conversation")
        for line in lines:
            if line.partition(" ")[0] == "/exit":
                break
            messages.append({"role": "user", "content": line})
            pieces = []
            for event in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
                if (usage := event.usage) is not None:
                    cached = usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens
                    counts = {"prompt_tokens": usage.prompt_tokens, "reused_tokens": cached or 0}
                    usages.append(counts | {"new_tokens": usage.completion_tokens})
                for choice in event.choices:
                    pieces.append(choice.delta.content or "")
                    output.write(pieces[-1])
            if not pieces:
                raise KvcliError(f"{url} replied nothing")
            output.write("\n")
            messages.append({"role": "assistant", "content": "".join(pieces)})
    except (KvcliError, OSError):  # of the standard streams
        raise
    except Exception as error:  # of answers, openai checks little
        what = error_text(error)[:250] if isinstance(error, openai.APIError) else "no answer of an OpenAI API"
        raise KvcliError(f"{url}: {what}") from error
    output.result({"url": url, "model": model, "messages": messages, "turns": usages})
