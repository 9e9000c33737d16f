"""The rows of bench/faults, in files named by subject. Each injects a real fault into real processes."""
