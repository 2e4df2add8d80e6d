"""A run while it trains: state, transfers, the engine, interrupts."""
