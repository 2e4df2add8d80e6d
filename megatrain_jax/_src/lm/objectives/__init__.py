"""Losses of preferences, rewards and distillation; each family is one file."""
