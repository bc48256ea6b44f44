"""The addresses of the shop: orders, the admin, and probes."""

from django.contrib import admin
from django.urls import include, path
from shop import views

urlpatterns = [
    path("orders", views.create_order),
    path("orders/<uuid:command_id>", views.get_order),
    path("admin/", admin.site.urls),
    path("", include("busload.integrations.django_app.urls")),
]
