"""Makes 3D diffusion U-Nets run near the hardware limit, and proves it."""
