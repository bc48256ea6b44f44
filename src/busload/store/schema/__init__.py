"""The tables: numbered files, forward only."""
