"""The rows of performance.md that bench/gpu measures: a module a row, each with run(bench), and what rows share."""
