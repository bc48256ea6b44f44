"""A handle of a command type: it sends commands of it, with arguments that type checkers see, and calls its handler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

from busload.commands.command import BatchCommand, Command, SendOptions, SendResult, new_command, refuse_unknown
from busload.commands.data_type import plain_model
from busload.commands.payload import PayloadRefusedError
from busload.errors import InvalidCommandError
from busload.handlers.calling import AnyContext, Form, form_of
from busload.handlers.registry import HandlerDecorators
from busload.limits.handler_options import HandlerOptions
from busload.postgres.callers_connection import AnyConnection

Given = ParamSpec("Given")
"""What a command of this type is sent with."""
Called = ParamSpec("Called")
"""What the function is called with."""
Returned = TypeVar("Returned")
Wanted = TypeVar("Wanted")


class Sender(Protocol):
    """What a handle needs of its bus."""

    async def send(
        self,
        domain: str,
        command_type: str,
        data: Any = None,
        *,
        conn: AnyConnection | None = None,
        **options: Unpack[SendOptions],
    ) -> SendResult: ...

    async def send_many(
        self, domain: str, commands: Iterable[BatchCommand], *, conn: AnyConnection | None = None
    ) -> list[SendResult]: ...


class CommandHandle(Generic[Given, Called, Returned]):
    """A command type and its handler, as `@bus.command` returns it.

    `await debit.send(...)` sends a command, `debit.command(...)` is one for `create_batch` or `send_many`, and
    `debit(...)` calls the function itself, as if it had no decorator.
    """

    def __init__(
        self,
        bus: Sender,
        domain: str,
        command_type: str,
        function: Callable[Called, Returned],
        form: Form,
        options: SendOptions | None = None,
        conn: AnyConnection | None = None,
    ) -> None:
        self.domain, self.command_type, self.function = domain, command_type, function
        self._bus, self._form, self._options, self._conn = bus, form, options or SendOptions(), conn
        self.__name__ = getattr(function, "__name__", command_type)
        self.__doc__ = function.__doc__

    def __call__(self, *args: Called.args, **kwargs: Called.kwargs) -> Returned:
        """Call the function itself. No command is sent."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.domain}/{self.command_type}>"

    def options(self, *, conn: AnyConnection | None = None, **options: Unpack[SendOptions]) -> Self:
        """The same handle with options for what it sends: `await debit.options(task_key="7", conn=conn).send(...)`.

        The options are those of `bus.send`. They are added to the ones that this handle has already.
        """
        refuse_unknown("options", options, SendOptions)
        joined = SendOptions(**{**self._options, **options})
        form, used = self._form, self._conn if conn is None else conn
        return type(self)(self._bus, self.domain, self.command_type, self.function, form, joined, used)

    def command(self, *args: Given.args, **kwargs: Given.kwargs) -> BatchCommand:
        """A command of this type, for `create_batch`, `send_many` or a stage of a job."""
        command = new_command("command", self.command_type, self._data(args, kwargs), SendOptions(**self._options))
        command.domain = self.domain
        return command

    async def send(self, *args: Given.args, **kwargs: Given.kwargs) -> SendResult:
        """Send a command of this type, with the arguments that its function takes besides the context."""
        data = self._data(args, kwargs)
        return await self._bus.send(self.domain, self.command_type, data, conn=self._conn, **self._options)

    async def send_many(self, commands: Iterable[BatchCommand]) -> list[SendResult]:
        """Send many commands, all or none: `await debit.send_many(debit.command(n, 10) for n in accounts)`."""
        return await self._bus.send_many(self.domain, commands, conn=self._conn)

    def _data(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The data of a command that is sent with these arguments, as JSON where its type is known."""
        fields, name = self._form.fields, f"{self.domain}/{self.command_type}"
        if fields is not None:
            try:
                found: Any = fields.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"A command {name} takes {fields}: {error}.") from None
        elif len(args) != 1 or kwargs:
            raise TypeError(f"A command {name} takes its data as one argument, found {args!r:.80} {kwargs!r:.80}.")
        else:
            found = args[0]
        if self._form.data_type is None:
            return found
        try:
            return plain_model(found)
        except PayloadRefusedError as refused:
            raise InvalidCommandError([refused.problem], listed=False) from None


class HandleVerbs(HandlerDecorators, ABC):
    """The decorator of a bus whose functions are handles."""

    @abstractmethod
    def _sender(self) -> Sender:
        """This bus, as handles use it."""

    def command(self, domain: str, command_type: str, **options: Unpack[HandlerOptions]) -> Decorator:
        """Register the function below as `handler` does, for commands of this `command_type` in the `domain`.

        It returns a typed handle, which sends what the function takes.

        The function takes the data and the context, as any handler. Or it takes the context first, and after that the
        fields of the data, each with its own type: `async def debit(ctx: HandlerContext, account: int, amount: int)`.
        Then `await debit.send(account=1, amount=10)` sends a command, and type checkers know its arguments.
        """
        refuse_unknown("command", options, HandlerOptions)
        return Decorator(self._sender(), domain, command_type, self.handlers.register(domain, command_type, **options))


class Decorator:
    """What `bus.command(...)` returns: called with a function, it makes the handle."""

    def __init__(
        self, bus: Sender, domain: str, command_type: str, register: Callable[[Callable[..., Any]], Any]
    ) -> None:
        self._bus, self._domain, self._type, self._register = bus, domain, command_type, register

    @overload
    def __call__(
        self, function: Callable[[Command[Wanted], AnyContext], Returned]
    ) -> CommandHandle[[Wanted], [Command[Wanted], AnyContext], Returned]: ...

    @overload
    def __call__(
        self, function: Callable[[Wanted, AnyContext], Returned]
    ) -> CommandHandle[[Wanted], [Wanted, AnyContext], Returned]: ...

    @overload
    def __call__(
        self, function: Callable[Concatenate[AnyContext, Given], Returned]
    ) -> CommandHandle[Given, Concatenate[AnyContext, Given], Returned]: ...

    def __call__(self, function: Callable[..., Any]) -> Any:
        self._register(function)
        return CommandHandle(self._bus, self._domain, self._type, function, form_of(function, "command"))
