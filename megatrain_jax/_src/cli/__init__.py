"""The command line: plans and fine-tuning, on the library's public names."""
