"""Reinforcement learning on a model's own completions: group relative policy optimisation."""
