"""The table of orders, and the schema of busload."""

import sqlalchemy as sa
from alembic import op

from busload.integrations.alembic import BusloadUpgrade

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "shop_order",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("item", sa.String(), nullable=False),
        sa.Column("shipped", sa.Boolean(), nullable=False),
    )
    op.invoke(BusloadUpgrade())  # the same as op.busload_upgrade(), which mypy does not know


def downgrade() -> None:
    op.drop_table("shop_order")
