"""SQuat (2025): key residuals kept orthogonal to the subspace that the queries span."""
