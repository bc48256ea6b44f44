"""Applies our schema, whatever of it this release has, and tells Django of the two views."""

from django.db import migrations, models

from busload.integrations.django_app.models import DecodedJSON
from busload.integrations.django_app.schema import ApplySchema


class Migration(migrations.Migration):
    initial = True
    dependencies = ()
    operations = (
        ApplySchema(),
        migrations.CreateModel(
            name="Batch",
            fields=[
                ("batch_id", models.UUIDField(primary_key=True, serialize=False)),
                ("domain", models.TextField()),
                ("name", models.TextField(null=True)),
                ("custom_data", models.JSONField(null=True)),
                ("status", models.TextField()),
                ("total_count", models.IntegerField()),
                ("completed_count", models.IntegerField()),
                ("failed_count", models.IntegerField()),
                ("canceled_count", models.IntegerField()),
                ("in_troubleshooting_count", models.IntegerField()),
                ("created_at", models.DateTimeField()),
                ("started_at", models.DateTimeField(null=True)),
                ("completed_at", models.DateTimeField(null=True)),
            ],
            options={
                "managed": False,
                "db_table": 'busload"."command_bus_batch',
                "verbose_name_plural": "batches",
            },
        ),
        migrations.CreateModel(
            name="Command",
            fields=[
                ("id", models.BigIntegerField(primary_key=True, serialize=False)),
                ("command_id", models.UUIDField()),
                ("domain", models.TextField()),
                ("command_type", models.TextField()),
                ("data", DecodedJSON(null=True)),
                ("status", models.TextField()),
                ("attempts", models.IntegerField()),
                ("max_attempts", models.IntegerField(null=True)),
                ("batch_id", models.UUIDField(null=True)),
                ("task_key", models.TextField(null=True)),
                ("priority", models.SmallIntegerField()),
                ("worker", models.TextField(null=True)),
                ("result", DecodedJSON(null=True)),
                ("error", DecodedJSON(null=True)),
                ("created_at", models.DateTimeField()),
                ("run_at", models.DateTimeField(null=True)),
                ("started_at", models.DateTimeField(null=True)),
                ("finished_at", models.DateTimeField(null=True)),
            ],
            options={"managed": False, "db_table": 'busload"."command_status'},
        ),
    )
