"""The tables of a shop with SQLAlchemy and Alembic, next to busload's in one database.

export BUSLOAD_DATABASE_URL=postgresql://app@localhost/shop    # which env.py reads
alembic upgrade head            # the tables of the shop and those of busload
alembic upgrade head --sql      # the same as SQL, for whoever applies it by other means
alembic revision --autogenerate -m "What the models and busload need next"
"""

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "shop_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]
    shipped: Mapped[bool] = mapped_column(default=False)
