"""Datasets: conversations, preferences and plain text as packed batches."""
