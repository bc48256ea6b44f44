"""The dashboard: an ASGI application for the people who run a bus. It reads and acts through the bus."""

from busload.dashboard.access import Principal, Role
from busload.dashboard.app import app

__all__ = ["Principal", "Role", "app"]
