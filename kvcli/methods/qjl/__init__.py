"""QJL (2024, https://arxiv.org/abs/2406.03482): keys as signs of a random projection and a norm."""
