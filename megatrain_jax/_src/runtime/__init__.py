"""What happens while a run trains: state, transfers, the engine, interrupts."""
