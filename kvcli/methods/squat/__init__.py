"""SQuat (2025, arXiv 2503.24358): key quantization errors kept orthogonal to the subspace spanned by the queries."""
