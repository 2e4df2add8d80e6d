"""A training step's computation without arrays: traced equations, stages and templates."""
