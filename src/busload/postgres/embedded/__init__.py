"""The PostgreSQL that starts when no DSN is given."""
