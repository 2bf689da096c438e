"""The commands `evaluate`, `steps`, `usefulness` and `demo`."""
