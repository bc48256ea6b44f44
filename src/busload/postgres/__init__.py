"""Connections, plans and the schema."""
