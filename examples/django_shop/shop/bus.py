"""The bus of the shop: on the database of DATABASES."""

from busload.integrations.django_app import DjangoCommandBus

bus = DjangoCommandBus()
