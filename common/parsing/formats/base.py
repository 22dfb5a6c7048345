"""The contract of a format: how a model writes calls of tools within an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from common.parsing.pieces import Reading
from common.parsing.scanner import Scanner

if TYPE_CHECKING:
    from common.parsing.grammar import GrammarWriter

Schema: TypeAlias = Mapping[str, Any] | bool  # a JSON schema
NAME_LENGTH = 256  # characters of a tool's name at most; OpenAI allows 64


class Tool(NamedTuple):
    """A function that the model may call.

    Attributes:
        parameters: schema of its arguments; {} allows any.
        strict: the schema is enforced while a call is generated.
        param: path of the request's field that holds the schema, for errors.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False
    param: str = "tools"


class Tools(Mapping[str, Tool]):
    """The declared tools by name, in the order of the request."""

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self._tools = {tool.name: tool for tool in tools}

    def __getitem__(self, name: str) -> Tool:
        return self._tools[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)


class Call(NamedTuple):
    """A call as it is written into a prompt.

    Attributes:
        arguments: JSON of an object, as the model once wrote it.
    """

    name: str
    arguments: str
    id: str | None = None


class ToolFormat(ABC):
    """How a model writes calls.

    Attributes:
        names: values of the setting `tool_format` that mean it; the first one is shown.
        starts: strings with one of which a block of calls begins. `read()` is tried wherever one is found in an answer.
        bare_starts: those of them that are ordinary text elsewhere: only tried where nothing but blanks stands before,
            since the beginning of the answer, or the last thought or call.
        trigger: text with which the model itself begins a block, for grammars; empty where calls begin with nothing of
            their own.
        between: text between one block and the next of parallel calls; None where one block holds all calls.
    """

    names: ClassVar[tuple[str, ...]]
    starts: ClassVar[tuple[str, ...]]
    bare_starts: ClassVar[tuple[str, ...]] = ()
    trigger: ClassVar[str]
    between: ClassVar[str | None] = None

    @abstractmethod
    def read(self, scanner: Scanner, tools: Tools) -> Reading[None]:
        """Read one block of calls; the scanner stands before one of `starts`.

        For each call: a CallBegin as soon as the name is complete and known to be a declared tool's, CallArguments as
        they are generated, a CallEnd. The pieces of arguments joined are valid JSON, typed by the tool's schema. Blanks
        after the block are left to the caller.

        Where the text has ended before the block has: `scanner.missing()` says whether the call may be taken for
        complete.

        Raises:
            NoCall: this is no call, or no more of one. Calls that have ended stay; the text after the last of them, or
                from the beginning of the block, is then content: all of it where a call has begun, else it is read
                again as if no block began here.
        """

    @abstractmethod
    def write(self, calls: Sequence[Call]) -> str:
        """Calls as the model would write them; `read()` gives them back."""

    @cached_property
    def ending(self) -> str:
        """What the model writes after the value of the last argument of its last call."""
        return self.write([Call("name", '{"key": "VALUE"}')]).rpartition("VALUE")[2]

    @abstractmethod
    def block(self, tools: Sequence[Tool], grammar: GrammarWriter, *, many: bool) -> str:
        """A Lark expression for what follows `trigger` in a block with a call of one of the tools.

        Args:
            many: the block may hold several calls; of no meaning where `between` is not None.
        """
