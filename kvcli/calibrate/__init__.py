"""Text to recorded samples: where the corpus comes from, and what is kept of each layer."""
