"""Follows docs/django.md in a new project, from its migrations to a shipped order; run in the folder of the project."""

from __future__ import annotations

import json
import os
import sys

import django
from django.core.management import call_command

sys.path.insert(0, os.getcwd())  # noqa: PTH109
os.environ["DJANGO_SETTINGS_MODULE"] = "mysite.settings"
django.setup()
call_command("makemigrations", "shop", verbosity=0)
call_command("migrate", verbosity=0)
call_command("check", databases=["default"], fail_level="WARNING", verbosity=0)

from django.test import Client  # noqa: E402
from django.test.utils import setup_test_environment  # noqa: E402

from busload.integrations.django_app.conf import load_bus  # noqa: E402
from busload.integrations.django_app.testing import run_commands  # noqa: E402

setup_test_environment()
client = Client()
accepted = client.post("/orders", {"item": "kettle"})
attempts = run_commands()
shipped = client.get(f"/orders/{accepted.json()['order']}").json()
load_bus().close()
json.dump([accepted.status_code, attempts, shipped, client.get("/healthz").status_code], sys.stdout)
load_bus().close()
