"""Commands that wait for a person, and what a person decides about them."""

from busload.commands.command import TroubledDomain
from busload.troubleshooting.causes import CauseGroup, GroupAction, GroupItem

__all__ = ["CauseGroup", "GroupAction", "GroupItem", "TroubledDomain"]
