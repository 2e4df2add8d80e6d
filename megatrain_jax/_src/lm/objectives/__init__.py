"""Losses of preferences, rewards, distillation and reinforcement learning."""
