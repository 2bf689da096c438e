"""Pure functions from Sessions to tables."""
