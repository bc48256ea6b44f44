"""Whether an application has configured OpenTelemetry: asked once, when a bus opens."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from busload.settings import Settings

if TYPE_CHECKING:
    from busload.telemetry.opentelemetry import Telemetry


def find_telemetry(settings: Settings) -> Telemetry | None:
    """Telemetry to the providers of the settings, or to the global ones; None if nobody has configured any.

    Nothing is imported for an application that does not use OpenTelemetry itself.
    """
    given = settings.tracer_provider is not None or settings.meter_provider is not None
    if not given and not any(name in sys.modules for name in ("opentelemetry.trace", "opentelemetry.metrics")):
        return None
    from busload.telemetry.opentelemetry import configured

    return configured(settings.tracer_provider, settings.meter_provider)
