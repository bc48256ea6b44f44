"""Single events in, bulk calls out."""

from busload.buffers.buffer import Buffer
from busload.buffers.declaration import BufferTable
from busload.buffers.overview import BufferOverview
from busload.buffers.status import BufferStatus

__all__ = ["Buffer", "BufferOverview", "BufferStatus", "BufferTable"]
