"""Ready-made callbacks: logs, early stopping, the best checkpoint, profiles, live curves."""
