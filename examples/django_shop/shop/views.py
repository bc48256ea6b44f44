"""Orders over HTTP."""

import json
from uuid import UUID

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from shop.bus import bus
from shop.models import Order


class OutOfStockError(Exception):
    pass


@csrf_exempt
@require_POST
def create_order(request: HttpRequest) -> JsonResponse:
    new = json.loads(request.body)
    try:
        with transaction.atomic():
            order = Order.objects.create(item=new["item"], amount=new["amount"])
            sent = bus.send("shop", "ShipOrder", {"order": order.id})
            if order.amount > 100:
                raise OutOfStockError(f"There are not {order.amount} of {order.item}.")
    except OutOfStockError as error:
        return JsonResponse({"error": str(error)}, status=409)  # neither order nor command exists
    return JsonResponse({"order": order.id, "command_id": sent.command_id}, status=202)


def get_order(request: HttpRequest, command_id: UUID) -> JsonResponse:
    command = bus.get_command("shop", command_id)
    if command is None:
        return JsonResponse({"error": "There is no such order."}, status=404)
    return JsonResponse({"status": command.status, "result": command.result})
