"""Contact activities with SQLAlchemy: recorded one by one in your transaction, synced in bulk by a worker.

    python -m examples.contact_activity.sqlalchemy_app

The events are rows of a model of your own. Elsewhere the worker would run by
`busload worker examples.contact_activity.sqlalchemy_app:bus`.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy import DateTime, ForeignKey, Index, create_engine, func, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, contains_eager, mapped_column, relationship

from busload import Group, RateLimit, RetryPolicy, SyncCommandBus, SyncHandlerContext
from examples.contact_activity.client import marketing_service, push
from examples.contact_activity.story import LEADS, tell

bus = SyncCommandBus()
engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(bus.dsn))


class Base(DeclarativeBase):
    pass


class Lead(Base):
    __tablename__ = "lead"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]
    score: Mapped[int] = mapped_column(default=0)


class ContactActivity(Base):
    __tablename__ = "contact_activity"
    id: Mapped[int] = mapped_column(primary_key=True)
    lead_id: Mapped[int] = mapped_column(ForeignKey("lead.id"))
    kind: Mapped[str]
    comment: Mapped[str]
    lead: Mapped[Lead] = relationship()
    events: Mapped[list[ContactActivityEvent]] = relationship(back_populates="activity")


class ContactActivityEvent(Base):
    """An activity that marketing has not heard of. `busload buffer ddl` prints the columns and indexes it needs."""

    __tablename__ = "contact_activity_event"
    __table_args__ = (
        Index("contact_activity_event_waiting", "created_at", "id", postgresql_where=text("group_id IS NULL")),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    contact_activity_id: Mapped[int] = mapped_column(ForeignKey("contact_activity.id"), index=True)
    group_id: Mapped[UUID | None] = mapped_column(index=True)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
    activity: Mapped[ContactActivity] = relationship(back_populates="events")


MARKETING = RateLimit(20, per=timedelta(seconds=1), burst=5, name="marketing")
events = bus.buffer("contact_activity_events", table="contact_activity_event", size=125)
scores = bus.buffer("lead_scores", merge="keep_last")


def record_activity(session: Session, lead: Lead, kind: str, comment: str) -> None:
    """The activity, its event and the lead's score are written by the session's transaction, or none of them."""
    session.add(ContactActivity(lead=lead, kind=kind, comment=comment, events=[ContactActivityEvent()]))
    lead.score += 10
    session.flush()
    scores.add({"id": lead.id, "score": lead.score}, key=str(lead.id), conn=session)
    if kind == "fax":
        raise ValueError("nobody sends a fax any more")


@events.handler(retry=RetryPolicy(max_attempts=2, backoff=(0,)), isolate_poison=True, rate_limit=MARKETING)
def sync_activities(group: Group, ctx: SyncHandlerContext) -> None:
    wanted = (
        select(ContactActivityEvent)
        .join(ContactActivityEvent.activity)
        .join(ContactActivity.lead)
        .options(contains_eager(ContactActivityEvent.activity).contains_eager(ContactActivity.lead))
        .where(ContactActivityEvent.group_id == group.group_id)
    )
    with Session(engine) as session:
        activities = {event.id: event.activity for event in session.scalars(wanted)}
    push(group, "activities", [as_record(activities[item.id]) for item in group])


def as_record(activity: ContactActivity) -> dict[str, Any]:
    return {"id": activity.id, "email": activity.lead.email, "kind": activity.kind, "comment": activity.comment}


@scores.handler(rate_limit=MARKETING)
def sync_scores(group: Group, ctx: SyncHandlerContext) -> None:
    push(group, "scores", [item.data for item in group])


def record(lead: int, kind: str, comment: str) -> None:
    with Session(engine) as session, session.begin():
        found = session.get_one(Lead, lead + 1, with_for_update=True)
        record_activity(session, found, kind, comment)


def main() -> None:
    with bus, marketing_service():
        bus.migrate()
        Base.metadata.drop_all(engine)
        Base.metadata.create_all(engine)
        with Session(engine) as session, session.begin():
            session.add_all(Lead(email=f"lead{n}@example.com") for n in range(LEADS))
        tell(bus, events, scores, record)
    engine.dispose()


if __name__ == "__main__":
    main()
