"""Text in, text out, on one cache: prompts, generation, conversations, questions about a document."""
