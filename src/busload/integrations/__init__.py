"""Neighbours: drivers and ORMs whose transactions a call can join, frameworks and tools. One module for each.

A module here is the only one that imports its neighbour, and is imported only for an application that uses it.
"""

from __future__ import annotations

from busload.postgres.callers_connection import AnyConnection, AnySyncConnection

__all__ = ["AnyConnection", "AnySyncConnection"]
