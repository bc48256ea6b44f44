"""Django's migrations of this app. Releases of busload need no new one: see `schema.upgrade`."""
