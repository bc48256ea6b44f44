"""Batches and commands as models, to look at: views of our schema. What changes them are the calls of the bus."""

from __future__ import annotations

from typing import Any

from django.db import models

from busload.batches.batch import BatchStatus
from busload.commands.command import CommandStatus


class DecodedJSON(models.JSONField):
    """A column of type json, which drivers decode by themselves. Columns of Django are of type jsonb."""

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        return value


class Batch(models.Model):
    batch_id = models.UUIDField(primary_key=True)
    domain = models.TextField()
    name = models.TextField(null=True)
    custom_data = models.JSONField(null=True)
    status = models.TextField(choices=[(one.value, one.value) for one in BatchStatus])
    total_count = models.IntegerField("commands")
    completed_count = models.IntegerField("completed")
    failed_count = models.IntegerField("failed")
    canceled_count = models.IntegerField("canceled")
    in_troubleshooting_count = models.IntegerField("in troubleshooting")
    created_at = models.DateTimeField()
    started_at = models.DateTimeField(null=True)
    completed_at = models.DateTimeField(null=True)

    class Meta:
        managed = False
        db_table = 'busload"."command_bus_batch'  # Django knows no schemas, and quotes this as it should be
        verbose_name_plural = "batches"

    def __str__(self) -> str:
        return f"{self.name or self.batch_id}"


class Command(models.Model):
    id = models.BigIntegerField(primary_key=True)
    command_id = models.UUIDField()
    domain = models.TextField()
    command_type = models.TextField("type")
    data = DecodedJSON(null=True)
    status = models.TextField(choices=[(one.value, one.value) for one in CommandStatus])
    attempts = models.IntegerField()
    max_attempts = models.IntegerField(null=True)
    batch_id = models.UUIDField(null=True)
    task_key = models.TextField(null=True)
    priority = models.SmallIntegerField()
    worker = models.TextField(null=True)
    result = DecodedJSON(null=True)
    error = DecodedJSON(null=True)
    created_at = models.DateTimeField()
    run_at = models.DateTimeField(null=True)
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        managed = False
        db_table = 'busload"."command_status'

    def __str__(self) -> str:
        return f"{self.command_type} {self.command_id}"
