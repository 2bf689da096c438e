"""One file an operation: why it exists, a reference, the kernel, the entry point."""
