"""The command line: plans, fine-tuning and pre-training, built on the library's public names."""
