"""The ladder: one 2D network from a naive program to one CUDA graph, rung by rung, each rung measured and checked."""
