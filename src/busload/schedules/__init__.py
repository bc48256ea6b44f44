"""Schedules: commands and batches that become due by a clock, each due time exactly once."""

from busload.schedules.planned import DueTime
from busload.schedules.rule import Calendar
from busload.schedules.schedule import CatchUp, Fire, FireType, Schedule, ScheduleMetadata

__all__ = ["Calendar", "CatchUp", "DueTime", "Fire", "FireType", "Schedule", "ScheduleMetadata"]
