"""An HTTP server of the OpenAI API on one model, whose contexts are compressed, found again by prefix and kept on disk.

`requests` checks what comes in; `jobs` queues it for a thread: `engine` with `prefixes`, or `continuous` with `pages`;
`store` is on disk; `answers` and `grammar` make text and JSON of tokens; `app` is HTTP; `metrics` counts.
"""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine, under which alone requests without a key are answered."""
