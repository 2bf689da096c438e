"""Models on disk and in memory, sampling, and models that run by a plan."""
