"""What several packages of language models use."""
