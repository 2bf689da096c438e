"""Training of the diffusion models."""
