"""Utilities used everywhere: argument checks, tree differences, names and sizes."""
