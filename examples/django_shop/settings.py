"""Settings of the shop. Those of busload are INSTALLED_APPS and BUSLOAD."""

import os

from psycopg.conninfo import conninfo_to_dict

place = conninfo_to_dict(os.environ["BUSLOAD_DATABASE_URL"])
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": place["dbname"],
        **{name.upper(): place.get(name, "") for name in ("user", "password", "host", "port")},
        "CONN_MAX_AGE": 60,
    }
}
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "busload.integrations.django_app",
    "shop",
]
BUSLOAD = {
    "BUS": "shop.handlers:bus",
    "WORKER": os.environ.get("SHOP_WORKER") == "1",  # a worker inside `runserver`
}
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
ROOT_URLCONF = "urls"
SECRET_KEY = "only for this example"
DEBUG = True
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # quick, for the tests of this example
