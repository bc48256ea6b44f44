"""Batches and commands in Django's admin, to look at. Decisions are for the dashboard and the command line.

A table of commands may have millions of rows, and each row of its view asks several tables. So a page of the admin
never counts or sorts them all: it shows the newest thousand, or what an index finds.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.contrib import admin
from django.db import connections
from django.urls import reverse
from django.utils.html import format_html

from busload.integrations.django_app.conf import configuration
from busload.integrations.django_app.models import Batch, Command

MOST = 1000
"""Commands that a list has at most."""

NEWEST = "SELECT id FROM busload.command ORDER BY id DESC LIMIT %(most)s"
WAITS_FOR_A_PERSON = "SELECT command FROM busload.troubleshooting ORDER BY since DESC, command DESC LIMIT %(most)s"
OF_TASK = "SELECT id FROM busload.command WHERE task_key = %(term)s ORDER BY id DESC LIMIT %(most)s"
# The index of ids begins with the domain, so the search goes from each domain to the next.
BY_ID = """
WITH RECURSIVE place (domain) AS (
    SELECT min(domain) FROM busload.command
    UNION ALL
    SELECT (SELECT min(c.domain) FROM busload.command AS c WHERE c.domain > p.domain)
      FROM place AS p WHERE p.domain IS NOT NULL
)
SELECT c.id
  FROM place AS p CROSS JOIN LATERAL (SELECT id FROM busload.command
                                       WHERE domain = p.domain AND command_id = %(term)s::uuid) AS c
UNION ALL
(SELECT c.id   -- of a batch, only the first command of each load is in an index
   FROM busload.command AS first JOIN busload.command AS c ON c.id BETWEEN first.id AND (first.id | 1023)
  WHERE first.batch_id = %(term)s::uuid AND first.id & 1023 = 0
  ORDER BY c.id LIMIT %(most)s)
"""


def _ids(query: str, term: str = "") -> list[int]:
    with connections[configuration().database].cursor() as cursor:
        cursor.execute(query, {"most": MOST, "term": term})
        return [id for (id,) in cursor.fetchall()]


class _ReadOnly(admin.ModelAdmin):
    actions = None
    show_full_result_count = False

    def get_queryset(self, request: Any) -> Any:
        return super().get_queryset(request).using(configuration().database)

    def has_add_permission(self, request: Any) -> bool:
        return False

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: Any, obj: Any = None) -> bool:
        return False


@admin.register(Batch)
class BatchAdmin(_ReadOnly):
    list_display = (
        *("__str__", "domain", "status", "total_count", "completed_count", "failed_count", "canceled_count"),
        *("in_troubleshooting_count", "created_at", "commands"),
    )
    list_filter = ("status",)
    ordering = ("-created_at",)
    readonly_fields = ("commands",)
    search_fields = ("name__icontains", "domain__exact")
    search_help_text = "By its id, or by domain or a part of the name."

    def get_search_results(self, request: Any, queryset: Any, search_term: str) -> tuple[Any, bool]:
        if (batch_id := _uuid(search_term)) is not None:
            return queryset.filter(batch_id=batch_id), False
        found: tuple[Any, bool] = super().get_search_results(request, queryset, search_term)
        return found

    @admin.display(description="commands of it")
    def commands(self, batch: Any) -> str:
        where = reverse(f"{self.admin_site.name}:busload_command_changelist")
        return str(format_html('<a href="{}?{}">Show</a>', where, urlencode({"q": batch.batch_id})))


class _WaitsForAPerson(admin.SimpleListFilter):
    title, parameter_name = "where it is", "waits"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:
        return [("troubleshooting", "In troubleshooting")]

    def queryset(self, request: Any, queryset: Any) -> Any:
        return queryset.filter(id__in=_ids(WAITS_FOR_A_PERSON)) if self.value() == "troubleshooting" else queryset


@admin.register(Command)
class CommandAdmin(_ReadOnly):
    list_display = ("command_id", "domain", "command_type", "status", "attempts", "created_at", "finished_at")
    list_filter = (_WaitsForAPerson,)
    ordering = ("-id",)
    search_fields = ("command_id",)  # Django shows the field of the search only with some
    search_help_text = f"By its id, its batch's id or its task key. Without a search: the newest {MOST:,}."

    def get_search_results(self, request: Any, queryset: Any, search_term: str) -> tuple[Any, bool]:
        term = search_term.strip()
        if not term:
            known = "waits" in request.GET
            return (queryset if known else queryset.filter(id__in=_ids(NEWEST))), False
        uuid = _uuid(term)
        return queryset.filter(id__in=_ids(OF_TASK, term) if uuid is None else _ids(BY_ID, str(uuid))), False


def _uuid(term: str) -> UUID | None:
    try:
        return UUID(term.strip())
    except ValueError:
        return None
