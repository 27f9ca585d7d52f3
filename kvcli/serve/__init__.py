"""An HTTP server of the OpenAI API on one model, whose contexts are compressed, found again by prefix and kept on disk.

`requests` checks what comes in; `jobs` queues it for the thread that `engine` has chosen: `continuous` with `pages`, or
`sequential` with `prefixes`; `store` is on disk; `sampler` and `grammar` choose tokens; `answers` makes text of them;
`app` is HTTP; `metrics` counts.
"""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine, under which alone requests without a key are answered."""
