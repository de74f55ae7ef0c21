"""The scripted engine and its worker: for fault tests only."""
