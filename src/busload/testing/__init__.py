"""What users test their handlers with, and we too: a fresh database in milliseconds."""

from busload.testing.postgres import TestServer

__all__ = ["TestServer"]
