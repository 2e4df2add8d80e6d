"""The optimizer: traced, cut by group."""
