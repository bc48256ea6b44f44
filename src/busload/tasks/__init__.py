"""The task behind commands: its key, its history, and tasks that other queues run."""
