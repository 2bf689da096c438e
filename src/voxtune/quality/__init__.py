"""Quality metrics on tensors, bootstrap intervals and the non-inferiority table; reads and writes no files."""
