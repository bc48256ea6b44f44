"""Contact activities with Django: recorded one by one in your transaction, synced in bulk by a worker.

    python -m examples.contact_activity.django_app

The events are rows of a model of your own. Elsewhere settings and migrations would be your project's, and the worker
would run by `busload worker yourproject.busload:bus`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import django
from django.conf import settings
from django.db import connection, models, transaction
from django.db.models.functions import Now
from psycopg.conninfo import conninfo_to_dict

from busload import Group, RateLimit, RetryPolicy, SyncCommandBus, SyncHandlerContext
from examples.contact_activity.client import marketing_service, push
from examples.contact_activity.story import LEADS, tell

bus = SyncCommandBus().open()
dsn = conninfo_to_dict(bus.dsn)
database = {name.upper(): dsn.get(name, "") for name in ("user", "password", "host", "port")}
database |= {"ENGINE": "django.db.backends.postgresql", "NAME": dsn["dbname"]}
settings.configure(DATABASES={"default": database}, USE_TZ=True, DEFAULT_AUTO_FIELD="django.db.models.BigAutoField")
django.setup()


class Lead(models.Model):
    email = models.TextField()
    score = models.IntegerField(default=0)

    class Meta:
        app_label, db_table = "contacts", "lead"


class ContactActivity(models.Model):
    lead = models.ForeignKey(Lead, models.CASCADE)
    kind = models.TextField()
    comment = models.TextField()

    class Meta:
        app_label, db_table = "contacts", "contact_activity"


class ContactActivityEvent(models.Model):
    """An activity that marketing has not heard of. `busload buffer ddl` prints the columns and indexes it needs."""

    activity = models.ForeignKey(ContactActivity, models.CASCADE, db_column="contact_activity_id")
    group_id = models.UUIDField(null=True, db_index=True)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        app_label, db_table = "contacts", "contact_activity_event"
        indexes = (
            models.Index(name="event_waiting", fields=["created_at", "id"], condition=models.Q(group_id__isnull=True)),
        )


MARKETING = RateLimit(20, per=timedelta(seconds=1), burst=5, name="marketing")
events = bus.buffer("contact_activity_events", table="contact_activity_event", size=125)
scores = bus.buffer("lead_scores", merge="keep_last")


@transaction.atomic
def record_activity(lead: int, kind: str, comment: str) -> None:
    """The activity, its event and the lead's score are written by one transaction, or none of them."""
    who = Lead.objects.select_for_update().get(id=lead + 1)
    activity = ContactActivity.objects.create(lead=who, kind=kind, comment=comment)
    ContactActivityEvent.objects.create(activity=activity)
    who.score += 10
    who.save()
    scores.add({"id": who.id, "score": who.score}, key=str(who.id), conn=connection)
    if kind == "fax":
        raise ValueError("nobody sends a fax any more")


@events.handler(retry=RetryPolicy(max_attempts=2, backoff=(0,)), isolate_poison=True, rate_limit=MARKETING)
def sync_activities(group: Group, ctx: SyncHandlerContext) -> None:
    try:
        found = ContactActivityEvent.objects.filter(group_id=group.group_id).select_related("activity__lead")
        activities = {event.id: event.activity for event in found}
    finally:
        connection.close()  # this thread's own: Django closes it after a request, and this is none
    push(group, "activities", [as_record(activities[item.id]) for item in group])


def as_record(activity: ContactActivity) -> dict[str, Any]:
    return {"id": activity.id, "email": activity.lead.email, "kind": activity.kind, "comment": activity.comment}


@scores.handler(rate_limit=MARKETING)
def sync_scores(group: Group, ctx: SyncHandlerContext) -> None:
    push(group, "scores", [item.data for item in group])


def create_tables() -> None:
    tables: list[Any] = [Lead, ContactActivity, ContactActivityEvent]
    with connection.schema_editor() as editor:
        for model in reversed(tables):
            editor.execute(f"DROP TABLE IF EXISTS {model._meta.db_table} CASCADE")
        for model in tables:
            editor.create_model(model)


def main() -> None:
    with bus, marketing_service():
        bus.migrate()
        create_tables()
        Lead.objects.bulk_create(Lead(email=f"lead{n}@example.com") for n in range(LEADS))
        tell(bus, events, scores, record_activity)
        connection.close()


if __name__ == "__main__":
    main()
