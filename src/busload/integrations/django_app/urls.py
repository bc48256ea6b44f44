"""`/healthz` and `/readyz`: path("", include("busload.integrations.django_app.urls"))."""

from __future__ import annotations

from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET

from busload.integrations import probes
from busload.integrations.django_app.conf import configuration, load_bus
from busload.integrations.django_app.inside import worker_thread
from busload.worker import Worker


@never_cache
@require_GET
def healthz(request: HttpRequest) -> JsonResponse:
    bus = load_bus()
    return _answer(probes.alive(bus.pool, bus.settings.health, _worker()))


@never_cache
@require_GET
def readyz(request: HttpRequest) -> JsonResponse:
    return _answer(probes.ready(load_bus().health(timeout=probes.PATIENCE), _worker()))


def _worker() -> Worker | None:
    return worker_thread().worker if configuration().worker else None


def _answer(probe: probes.Probe) -> JsonResponse:
    return JsonResponse(probe.body, status=probe.status)


urlpatterns = [path("healthz", healthz), path("readyz", readyz)]
