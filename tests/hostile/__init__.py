"""The campaign of damaged and hostile files (docs/development/hostile.md)."""
