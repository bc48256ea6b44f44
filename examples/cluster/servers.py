"""The clusters of the example, all on loopback: the same that our own tests start, with one server to kill."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.brokers import nats_cluster, rabbitmq_cluster, standby
from tests.brokers.cluster import Node
from tests.servers import Recipe

Nodes = list[Node]


@dataclass(frozen=True, slots=True)
class Cluster:
    """How it is started, what every host is told, and how one server of it dies."""

    recipe: Recipe
    environment: Callable[[Nodes], dict[str, str]]
    kill: Callable[[Nodes], str]


def kill_the_busiest(nodes: Nodes) -> str:
    busiest = max(nodes, key=nats_cluster.connections)
    busiest.kill()
    return f"{busiest.name} is killed, which most were connected to"


def kill_the_first(nodes: Nodes) -> str:
    nodes[0].kill()
    return f"{nodes[0].name} is killed, which all were connected to, and which led the queue"


def kill_the_primary(nodes: Nodes) -> str:
    nodes[0].kill()
    standby.promote(nodes[1])
    return "The primary is killed, and the standby is promoted"


CLUSTERS = {
    "nats": Cluster(
        nats_cluster.run_nats_cluster,
        lambda nodes: {"BUSLOAD_TRANSPORT_URL": nats_cluster.cluster_url(nodes)},
        kill_the_busiest,
    ),
    "rabbitmq": Cluster(
        rabbitmq_cluster.run_rabbitmq_cluster,
        lambda nodes: {"BUSLOAD_TRANSPORT_URL": rabbitmq_cluster.cluster_url(nodes)},
        kill_the_first,
    ),
    "postgres": Cluster(
        standby.run_primary_and_standby,
        lambda nodes: {"BUSLOAD_DATABASE_URL": standby.multi_host_dsn(nodes)},
        kill_the_primary,
    ),
}
