"""Communication between ranks: torch's operations, marked and counted."""
