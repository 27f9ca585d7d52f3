"""QJL (2024): keys as signs of a random projection and a norm."""
