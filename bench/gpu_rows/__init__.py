"""The rows of performance.md that bench/gpu measures, and what they share: bench, mlp, tables."""
