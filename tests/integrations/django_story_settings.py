"""The settings of the example project, with a database that is no PostgreSQL, and with other names of its own one."""

from settings import *  # noqa: F403
from settings import DATABASES as OF_THE_SHOP

DATABASES = OF_THE_SHOP | {
    "lite": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
    "second": OF_THE_SHOP["default"].copy(),
    "manual": OF_THE_SHOP["default"] | {"AUTOCOMMIT": False},
}
