"""The loss: traced, cut into stages."""
