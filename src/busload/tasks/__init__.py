"""Tasks that other queues run: their tracker, and a comparison with the table of another tracker."""
