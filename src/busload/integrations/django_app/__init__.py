"""Django: an app with our schema, checks, an admin and a worker, and a bus for the database that Django has.

INSTALLED_APPS = [..., "busload.integrations.django_app"]
BUSLOAD = {"BUS": "shop.handlers:bus"}

# shop/bus.py
from busload.integrations.django_app import DjangoCommandBus

bus = DjangoCommandBus()
"""

from busload.integrations.django_app.bus import DjangoCommandBus

__all__ = ["DjangoCommandBus"]
