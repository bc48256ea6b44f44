"""What a worker does when the database notifies it of something, and when it may have missed a notification."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from uuid import UUID

from busload.commands.wake import WAKE
from busload.postgres.listen import CANCEL, HOLD, LIMIT, OUTBOX, PAUSE, SCHEDULE, STOP
from busload.worker.broker_stations import Broker
from busload.worker.claimer import Claimer
from busload.worker.heartbeat import Heartbeat
from busload.worker.loop import Loop
from busload.worker.shared import Shared

log = logging.getLogger("busload")


class Notifications:
    """A notification only makes a worker look sooner: whatever it tells is found without it, too."""

    def __init__(
        self,
        shared: Shared,
        claimer: Claimer,
        heartbeat: Heartbeat,
        broker: Broker | None,
        ask_to_stop: Callable[[Iterable[int]], None],
        hand_on: Callable[[], None],
        *,
        claiming: Loop,
        claiming_newcomers: Loop,
        promoting: Loop,
        firing: Loop,
        watching_pauses: Loop,
    ) -> None:
        self._shared, self._claimer, self._heartbeat, self._broker = shared, claimer, heartbeat, broker
        self._ask_to_stop, self._hand_on = ask_to_stop, hand_on
        self._claiming, self._claiming_newcomers = claiming, claiming_newcomers
        self._promoting, self._firing, self._watching_pauses = promoting, firing, watching_pauses
        self.has_listened = False
        """Whether the worker has begun to listen at least once."""

    def hear(self, channel: str | None, payload: str | None) -> None:
        """Heed a notification of the database. Without a channel, the worker listens from now on, or again."""
        if channel is None:
            self._look_everywhere()
        elif channel == CANCEL and payload is not None:
            self._hear_cancel(payload)
        elif channel == HOLD and payload is not None:
            self._claimer.hear_of_hold(payload)
        elif channel == PAUSE:
            self._watching_pauses.wake()
        elif channel == SCHEDULE:
            self._firing.wake()
        elif channel == LIMIT:
            self._shared.limiter.hear(payload)
        elif channel == STOP and payload == str(self._shared.number):
            self._heartbeat.renew_soon()  # it tells whether that is so
        elif channel == OUTBOX and self._broker is not None:
            self._broker.hear(payload)
        elif payload == "":
            self._promoting.wake()  # something is due soon
        elif payload in self._shared.domains:
            if channel.startswith(WAKE):
                self._claimer.wake_ups.came(payload)
            elif not self._claimer.emptied and self._claimer.wake_ups.is_own(payload):
                return  # it is busy, and knows what it has told the others
            if self._claimer.stopping:
                self._hand_on()
            self._claimer.look_at_queue()
            if self._claimer.emptied:
                self._claiming.wake()
            else:
                self._claimer.newcomers.came()
                self._claiming_newcomers.wake()

    def _hear_cancel(self, payload: str) -> None:
        """A batch was canceled, or a single command, which has a number."""
        try:
            if payload.isdecimal():
                self._ask_to_stop([int(payload)])
            else:
                self._shared.held.cancel(UUID(payload))
        except ValueError:
            log.debug("Ignored a notification of a cancel without an id")

    def _look_everywhere(self) -> None:
        """Look at everything that a notification could be about: some may have been lost."""
        self._claimer.look_at_queue()
        self._claiming.wake()
        self._watching_pauses.wake()
        self._promoting.wake()  # it tells of holds
        self._firing.wake()
        if self._broker is not None:
            self._broker.hear(None)
        self._heartbeat.renew_soon()  # it tells of cancels
        if self.has_listened:
            self._shared.limiter.hear(None)
        self.has_listened = True
