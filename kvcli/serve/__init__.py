"""An HTTP server of the OpenAI API on one model, whose contexts are compressed, found again by prefix and kept on disk.

`requests` checks what comes in; `engine` makes tokens in a thread of its own, from the contexts that `prefixes` keeps;
`answers` makes text of tokens and JSON of text; `app` is HTTP; `metrics` counts.
"""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine, under which alone requests without a key are answered."""
