"""The programs of the peers, a module each. They run in environments of their own: nothing here imports busload."""
