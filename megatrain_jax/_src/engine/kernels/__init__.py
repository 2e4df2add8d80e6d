"""Compiled functions: stages, residuals and updates."""
