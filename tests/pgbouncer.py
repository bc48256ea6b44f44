"""A PgBouncer that one test has for itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from tests.brokers.server import OwnServer

PGBOUNCER = Path("/usr/sbin/pgbouncer")


class PgBouncer(OwnServer):
    """In transaction mode, with so many connections to the database that the DSN names."""

    def __init__(self, folder: Path, dsn: str, *, pool_size: int = 10) -> None:
        super().__init__(folder)
        parts = conninfo_to_dict(dsn)
        self.url = f"postgresql://{parts['user']}@127.0.0.1:{self.port}/{parts['dbname']}"
        folder.chmod(0o755)
        # It refuses to run as root, and has to enter the folder of the server's socket.
        self._user = Path(str(parts["host"])).stat().st_uid if os.getuid() == 0 else None
        self._settings = folder / "pgbouncer.ini"
        self._settings.write_text(
            "[databases]\n"
            f"{parts['dbname']} = host={parts['host']} port={parts['port']} user={parts['user']}\n"
            "[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\nauth_type = any\n"
            f"pool_mode = transaction\ndefault_pool_size = {pool_size}\nmax_client_conn = 200\n"
            "ignore_startup_parameters = extra_float_digits\n"
        )

    def command(self) -> Sequence[str | Path]:
        return [PGBOUNCER, "-q", self._settings]

    def launch(self) -> None:
        with (self.folder / "said.txt").open("ab") as said:
            self._process = subprocess.Popen(
                [str(part) for part in self.command()],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                user=self._user,
            )
