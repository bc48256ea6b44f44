"""How much came in, ended and waited: per minute and domain, kept in the database."""

from busload.statistics.statistics import Point

__all__ = ["Point"]
