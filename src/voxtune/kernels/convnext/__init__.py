"""Kernels of the 2D ConvNeXt U-Net: fused kernels for the upper rungs of the ladder, simple ones for the lower rungs."""
