"""The 2D ConvNeXt U-Net's kernels: the fused ones of the fast path, and those of the ladder's lower rungs."""
