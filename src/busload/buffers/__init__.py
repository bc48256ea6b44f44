"""Single events in, bulk calls out."""

from busload.buffers.buffer import Buffer
from busload.buffers.declaration import BufferStatus, BufferTable

__all__ = [
    "Buffer",
    "BufferStatus",
    "BufferTable",
]
