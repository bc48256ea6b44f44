"""A batch-native command bus for PostgreSQL. `busload.public` lists the names that `from busload import …` finds."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from busload import schema as schema
    from busload.public import *  # noqa: F403
    from busload.public import __all__ as __all__
else:
    # `busload --help` and tab completion need none of the public names, and importing them takes half a second.

    def __getattr__(name: str) -> object:
        """Import the public names when one of them is asked for the first time."""
        from importlib import import_module
        from importlib.util import find_spec

        if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
            return import_module(f"{__name__}.{name}")
        public = import_module(f"{__name__}.public")
        if name != "__all__" and name not in public.__all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals().update({each: getattr(public, each) for each in [*public.__all__, "__all__"]})
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
