"""The training of a run: its state, transfers, the engine, interrupts."""
