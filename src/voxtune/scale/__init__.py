"""Data sets of many volumes: a manifest of masks, a ledger of what is written, and engines that draw on many devices."""
