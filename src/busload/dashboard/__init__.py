"""The dashboard: an ASGI application for the people who run a bus. It reads and acts through the bus."""

try:
    from busload.dashboard.access import Principal, Role
    from busload.dashboard.app import app
except ModuleNotFoundError as missing:
    if missing.name not in ("jinja2", "markupsafe", "starlette"):
        raise
    said = f"{missing.name} is not installed. Run: pip install 'busload[dashboard]'"
    raise ModuleNotFoundError(said, name=missing.name) from None

__all__ = ["Principal", "Role", "app"]
