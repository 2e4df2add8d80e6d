"""Conversations and plain text as packed batches."""
