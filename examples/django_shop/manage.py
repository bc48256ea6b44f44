"""A shop with Django: an order and the command that ships it are written by one transaction, or neither is.

export BUSLOAD_DATABASE_URL=postgresql://app@localhost/shop    # which settings.py reads
python manage.py migrate            # the tables of the shop and those of busload
python manage.py runserver
python manage.py busload_worker     # in another terminal
"""

import os
import sys

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")
    execute_from_command_line(sys.argv)
