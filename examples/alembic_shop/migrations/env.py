"""How Alembic reaches the database, and what it compares. Of busload it knows by `include_name`."""

import os
from typing import Any

import psycopg
from alembic import context
from models import Base
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from busload.integrations.alembic import include_name

options: dict[str, Any] = {"target_metadata": Base.metadata, "include_schemas": True, "include_name": include_name}

if context.is_offline_mode():
    context.configure(dialect_name="postgresql", **options)
    with context.begin_transaction():
        context.run_migrations()
else:
    dsn = os.environ["BUSLOAD_DATABASE_URL"]
    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn), poolclass=NullPool)
    with engine.connect() as connection:
        context.configure(connection=connection, **options)
        with context.begin_transaction():
            context.run_migrations()
