"""The settings of the example project, with a second database that is no PostgreSQL."""

from settings import *  # noqa: F403
from settings import DATABASES as OF_THE_SHOP

DATABASES = OF_THE_SHOP | {"lite": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
