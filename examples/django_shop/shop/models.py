"""The tables of the shop."""

from django.db import models


class Order(models.Model):
    item = models.TextField()
    amount = models.PositiveIntegerField()
    shipped = models.BooleanField(default=False)
