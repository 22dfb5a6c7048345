"""Where chat templates run: jinja2's sandbox, with bounds on what a template may cost.

A template comes with a model, so it is a program of a stranger. jinja2's sandbox keeps it from Python's inside, but not
from running for ever or filling the memory. Three things are bounded here, for each `Budget`:

* time: looked at in every turn of a loop, every call, and whenever a value is made;
* the size of any one value, so that whatever works on a value is done in a moment. A list counts with all that it
  refers to, as often as it does: lists of lists are otherwise small, and endless to compare or to print;
* the size of all values together, whether they are still in use or not.

What could make a large value out of small ones in one step is checked before it does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import reduce, wraps
from itertools import chain, islice
from time import monotonic, thread_time
from types import BuiltinMethodType, GeneratorType, NoneType
from typing import Any, Final, TypeAlias

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, nodes, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.tests import TESTS
from jinja2.utils import Namespace, generate_lorem_ipsum

# Of the processor, so that a busy machine stops no template. Long prompts of the slowest ones take a tenth of it.
MAX_SECONDS: Final = 10.0
MAX_VALUE: Final = 64_000_000  # characters of one value, and of a prompt
MAX_VALUES: Final = 500_000_000  # characters of all values that are made
MAX_SOURCE: Final = 200_000  # characters; the longest of published models have a fifth of it

_MAX_BITS: Final = 100_000  # of a whole number
_MAX_PARTS: Final = 1_000_000  # that a filter is told to make or to fill up
_MAX_INDENT: Final = 64
_MAX_DATE_FORMAT: Final = 1_000  # characters
_MAX_WORDS: Final = 10_000  # of nonsense
_MAX_STEPS: Final = 5_000_000_000  # of what compares each character of a text with each one of another
_ITEM: Final = 32  # characters that an item of a list is taken for, beside its own
_SOME_PIECES: Final = 50
_LOOK_AFTER: Final = 100_000  # characters

Method: TypeAlias = Callable[..., Any]


class TemplateLimitExceeded(Exception):
    """A template was stopped: the message is a clause that says what it did."""


# --- the budget ---------------------------------------------------------------------------------------------------


class Budget:
    """What the templates that run within `bounded()` may still use. Sizes are characters, roughly."""

    def __init__(self) -> None:
        self._started = thread_time()
        self._deadline = monotonic() + MAX_SECONDS
        self._left = MAX_VALUES
        self._next_look = MAX_VALUES - _LOOK_AFTER  # at the clock, when that is left
        # Sizes of lists and mappings, which are kept with them so that no other one gets the same id.
        self._sizes: dict[int, tuple[object, int]] = {}

    def tick(self, output: Sequence[str] = ()) -> bool:
        """To be called now and then by whatever goes on for long, with what it has written so far."""
        if monotonic() > self._deadline:
            # This clock goes on while others have the processor, so it only says when to look at the other one.
            left = self._started + MAX_SECONDS - thread_time()
            if left <= 0:
                raise TemplateLimitExceeded(f"it ran for more than {MAX_SECONDS:g} s")
            self._deadline = monotonic() + left
        if len(output) > _MAX_PARTS:
            raise TemplateLimitExceeded(f"it wrote more than {_MAX_PARTS:,} pieces of text")
        return True

    def expect(self, size: int) -> None:
        """Refuse a value of that size before it is made."""
        if size > MAX_VALUE:
            raise TemplateLimitExceeded(f"it made a value of more than {MAX_VALUE:,} characters")
        if size > self._left:
            raise TemplateLimitExceeded(f"it made values of more than {MAX_VALUES:,} characters together")

    def charge(self, size: int) -> None:
        """For a value of that size."""
        self._left -= size
        if self._left < self._next_look or size > MAX_VALUE:
            self._left += size
            self.expect(size)
            self._left -= size
            self._next_look = max(self._left - _LOOK_AFTER, 0)
            self.tick()

    def size_of(self, value: object) -> int:
        """Of a value and of all that it refers to, as often as it does. Raises where that is too much."""
        if isinstance(value, (str, bytes)):
            return len(value)
        items: Iterable[Any]
        if isinstance(value, _COLLECTIONS):
            items = value
        elif isinstance(value, dict):
            items = chain.from_iterable(value.items())
        else:
            return value.bit_length() // 8 if isinstance(value, int) else _ITEM
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        size = _ITEM
        for item in items:
            size += _ITEM + (len(item) if type(item) is str else self.size_of(item))
            if size > MAX_VALUE:
                self.expect(size)
        self._sizes[id(value)] = (value, size)
        return size

    def made(self, value: Any) -> Any:
        """The value, which a template has just made, charged for."""
        kind = type(value)
        if kind is str:
            self.charge(len(value))
        elif kind is GeneratorType:
            return self._items(value)
        elif kind not in _FREE:
            self.charge(self.size_of(value))
        return value

    def sliced(self, value: Any) -> Any:
        """The same for a part of a value, which needs no look at all that is in it."""
        self.charge(len(value))
        return value

    def _items(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.charge(_ITEM)
            self.tick()
            yield item

    # --- text -----------------------------------------------------------------------------------------------------

    def text(self, value: Any) -> str:
        if type(value) is str:
            return value
        text = str(value)
        self.charge(len(text))
        return text

    def joined(self, texts: Sequence[str], separator: str = "") -> str:
        """The texts as one, which is charged for before it is made."""
        self.charge(sum(map(len, texts)) + len(texts) * len(separator))
        return separator.join(texts)

    def concatenated(self, *values: Any) -> str:
        return self.joined([value if type(value) is str else self.text(value) for value in values])

    # --- operators ------------------------------------------------------------------------------------------------

    def add(self, *values: Any) -> Any:
        """A chain of sums, from the left."""
        size = 0
        for value in values:
            if type(value) is not str:
                return reduce(self._sum, values)
            size += len(value)
        self.charge(size)
        return "".join(values)

    def _sum(self, left: Any, right: Any) -> Any:
        return self.made(left + right)

    def multiply(self, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        elif isinstance(left, int) and not isinstance(right, float):
            self.expect(self.size_of(right) * max(left, 0))
        elif isinstance(right, int) and not isinstance(left, float):
            self.expect(self.size_of(left) * max(right, 0))
        return self.made(left * right)

    def power(self, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 0))
        return self.made(left**right)

    def remainder(self, left: Any, right: Any) -> Any:
        if isinstance(left, str):
            _before_percent(self, left, right)
        return self.made(left % right)


_FREE: Final = frozenset({NoneType, bool, float, Undefined})
_COLLECTIONS: Final[tuple[type[Collection[Any]], ...]] = (
    list,
    tuple,
    set,
    frozenset,
    type({}.items()),
    type({}.keys()),
    type({}.values()),
)
_budget: ContextVar[Budget] = ContextVar("budget")


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateLimitExceeded(f"it computed a number of more than {_MAX_BITS:,} bits")


@contextmanager
def bounded() -> Iterator[None]:
    """Templates within run on one budget: that of the `bounded()` around this one, if there is one."""
    if _budget.get(None) is not None:
        yield
        return
    token = _budget.set(Budget())
    try:
        yield
    finally:
        _budget.reset(token)


# --- rendering ----------------------------------------------------------------------------------------------------


def compile_template(source: str) -> Template:
    """
    Raises:
        jinja2.TemplateSyntaxError: the source is none of a template, or too much of one.
    """
    if len(source) > MAX_SOURCE:
        raise TemplateSyntaxError(f"it has {len(source):,} characters; at most {MAX_SOURCE:,} are compiled", 1)
    try:
        with bounded():
            return _environment().from_string(source)
    except (RecursionError, MemoryError, SyntaxError) as error:  # the last one is Python's, of what jinja2 made of it
        raise TemplateSyntaxError("its blocks or expressions are nested too deeply", 1) from error
    except ValueError as error:
        raise TemplateSyntaxError(f"it holds what is no text or no number: {error}", 1) from error


def run_template(template: Template, variables: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text, and the variables that the template has set at its top.

    Raises:
        TemplateLimitExceeded: the budget is used up.
        Exception: whatever else the template raises.
    """
    with bounded():
        budget = _budget.get()
        budget.tick()
        # What Template.render() does, with the context kept for what the template has set in it.
        context = template.new_context(dict(variables))
        return _written(budget, template.root_render_func(context)), context.get_exported()


def _written(budget: Budget, pieces: Iterator[str]) -> str:
    """The pieces of a text as one, looked at as they come."""
    output: list[str] = []
    size = 0
    while some := list(islice(pieces, _SOME_PIECES)):
        size += sum(map(len, some)) + len(some)
        budget.expect(size)
        budget.tick()
        output += some
    return budget.joined(output)


# --- the language -------------------------------------------------------------------------------------------------


class _GenerationBlock(Extension):
    """`{% generation %}` marks an assistant's text for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 # declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _BoundedCode(CodeGenerator):
    """Writes the checks into the code of a template that jinja2 leaves no other place for."""

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline("budget = environment.budget()")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.body.insert(0, nodes.ExprStmt(nodes.Const(None), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(nodes.EnvironmentAttribute("budget().tick()"), node.test)
        super().visit_For(node, frame)

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:
        """That which stands in loops; no tag that there is makes one."""
        self.writeline(f"budget.tick({frame.buffer or ''})", node)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("budget.text(")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self._call("concatenated", node.nodes, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._checked("made", super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._checked("made", super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._checked("made", super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._checked("sliced", super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        chain = [node.right]
        while isinstance(node.left, nodes.Add):
            node = node.left
            chain.append(node.right)
        self._call("add", [node.left, *reversed(chain)], frame)

    def visit_Mul(self, node: nodes.BinExpr, frame: Frame) -> None:
        self._call("multiply", [node.left, node.right], frame)

    def visit_Pow(self, node: nodes.BinExpr, frame: Frame) -> None:
        self._call("power", [node.left, node.right], frame)

    def visit_Mod(self, node: nodes.BinExpr, frame: Frame) -> None:
        self._call("remainder", [node.left, node.right], frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        # To compare with what stands in the template takes no time, unless it is searched for.
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        searches = any(operand.op in ("in", "notin") for operand in node.ops)
        if searches or not any(isinstance(side, nodes.Const) for side in sides):
            self.write("(budget.tick() and ")
            super().visit_Compare(node, frame)
            self.write(")")
        else:
            super().visit_Compare(node, frame)

    def _call(self, name: str, arguments: Sequence[nodes.Expr], frame: Frame) -> None:
        self.write(f"budget.{name}(")
        for argument in arguments:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")

    def _checked(self, check: str, visit: Callable[[Any, Frame], None], node: nodes.Expr, frame: Frame) -> None:
        self.write(f"budget.{check}(")
        visit(node, frame)
        self.write(")")


class _Namespace(Namespace):
    """Can hold itself, or lists that hold it, so it is never printed with what it holds."""

    def __repr__(self) -> str:
        return "<Namespace>"


# What templates may read and call of values. What is left out is of no use to them, or makes large values.
_TEXT_METHODS: Final = {name for name in dir(str) if name[0] != "_"} - {"encode", "maketrans", "translate"}
_METHODS: Final[dict[type, Collection[str]]] = {
    str: _TEXT_METHODS,
    dict: {"copy", "get", "items", "keys", "values"},
    list: {"copy", "count", "index"},
    tuple: {"count", "index"},
    int: {"bit_length", "is_integer"},
    float: {"is_integer"},
    bytes: (),
}
_PLAIN_METHODS: Final = _TEXT_METHODS - {"format", "format_map"}
_OF_DICTS: Final = frozenset(dir(dict))
_OPEN: Final = (LoopContext, _Namespace)  # of which everything may be read that is not private


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    code_generator_class = _BoundedCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})  # which are not computed when a template is compiled
    budget = staticmethod(_budget.get)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        return _budget.get().joined(pieces if isinstance(pieces, list) else list(pieces))

    def getattr(self, obj: Any, attribute: str) -> Any:
        # Most of what a template does. jinja2 is slow at it: for a key of a mapping it raises an error first.
        kind = type(obj)
        if kind is dict:
            if attribute not in _OF_DICTS:
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        elif kind is str:
            if attribute in _PLAIN_METHODS:
                return getattr(obj, attribute)
        elif kind in _OPEN and not attribute.startswith("_") and hasattr(obj, attribute):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(argument) is tuple:  # of which each look-up computes the hash anew
            _budget.get().tick()
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        methods = _METHODS.get(str if isinstance(obj, str) else type(obj))  # escaped text is of another type
        return super().is_safe_attribute(obj, attr, value) if methods is None else attr in methods

    def wrap_str_format(self, value: Any) -> Method | None:
        owner, name = getattr(value, "__self__", None), getattr(value, "__name__", "")
        if not isinstance(owner, str) or name not in ("format", "format_map"):
            return None
        text, formatter = str(owner), _Formatter(self)

        def format(*args: Any, **kwargs: Any) -> str:
            formatted: str = formatter.vformat(text, args, kwargs)
            return formatted

        return format if name == "format" else lambda mapping: format(**mapping)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # as in jinja2
        budget = _budget.get()
        budget.tick()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str) or type(__obj) is BuiltinMethodType:
            # Of a value of Python's own types, got by `getattr()`, so that there is no more to check about it.
            for scope in _SCOPES:
                kwargs.pop(scope, None)
            if (check := _BEFORE_METHODS.get(__obj.__name__)) is not None and isinstance(owner, str):
                args = check(budget, owner, *args, **kwargs) or args
            return budget.made(__obj(*args, **kwargs))
        value = super().call(__context, __obj, *args, **kwargs)
        return value if type(value) is str else budget.made(value)  # macros have been charged for theirs


# Arguments that jinja2 adds to every call, for functions that want the context.
_SCOPES: Final = ("_loop_vars", "_block_vars")


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        budget = _budget.get()
        budget.expect(_widest(format_spec))
        text: str = budget.made(super().format_field(value, format_spec))
        return text


# --- what is checked before it is done ----------------------------------------------------------------------------


def _before_percent(budget: Budget, format: str, values: object) -> None:
    widths = " ".join(_widths(format))
    if "*" in widths:
        raise TemplateLimitExceeded("it formatted text with a width that does not stand in the format")
    budget.expect(len(format) + format.count("%") * (budget.size_of(values) + _widest(widths)))


def _widths(format: str) -> Iterator[str]:
    """Flags, width and precision of each conversion."""
    position = 0
    while (position := format.find("%", position) + 1) > 0:
        if format.startswith("(", position):
            position = _end_of_key(format, position)
        if (flags := _FLAGS.match(format, position)) is not None:
            yield flags[0]
            position = flags.end() + 1  # behind what it converts to, which is a percent sign in "%%"


def _end_of_key(format: str, start: int) -> int:
    """Where the key of a mapping that is opened there is closed. It may hold parentheses, in pairs."""
    depth = 0
    for parenthesis in _PARENTHESIS.finditer(format, start):
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return parenthesis.end()
    return len(format)


def _widest(format: str) -> int:
    """The largest number in a format, or one that is too large."""
    return max(
        (int(digits) if len(digits) <= _MAX_DIGITS else MAX_VALUE + 1 for digits in _DIGITS.findall(format)), default=0
    )


def _before_comparing(budget: Budget, text: str, other: object = None, *_: Any, **__: Any) -> None:
    """What searches from the end, or for one of many characters, has no faster way than the obvious one."""
    if isinstance(other, str) and len(text) * len(other) > _MAX_STEPS:
        raise TemplateLimitExceeded(f"it compared texts in more than {_MAX_STEPS:,} steps")


def _before_padding(budget: Budget, text: str, width: int, *_: Any) -> None:
    budget.expect(width)


def _before_expanding(budget: Budget, text: str, tabsize: int = 8) -> None:
    budget.expect(len(text) + text.count("\t") * max(tabsize, 0))


def _before_replacing(budget: Budget, text: str, old: str, new: str, count: int = -1, /) -> None:
    growth = len(new) - len(old)
    if growth > 0:
        times = text.count(old)
        budget.expect(len(text) + (times if count < 0 else min(count, times)) * growth)


def _before_splitting(budget: Budget, text: str, separator: str | None = None, *_: Any, **__: Any) -> None:
    parts = len(text) // 2 if separator is None else text.count(separator)
    budget.expect(len(text) + parts * _ITEM)


def _before_splitting_backwards(budget: Budget, text: str, sep: str | None = None, *_: Any, **__: Any) -> None:
    _before_comparing(budget, text, sep)
    _before_splitting(budget, text, sep)


def _before_lines(budget: Budget, text: str, keepends: bool = False) -> None:
    _before_splitting(budget, text, "\n" if text.isascii() else None)


def _before_joining(budget: Budget, separator: str, values: Iterable[Any], /) -> tuple[list[Any]]:
    """The arguments, of which an iterator can be read but once."""
    items = list(values)
    budget.expect(sum(map(budget.size_of, items)) + len(separator) * len(items))
    return (items,)


_DIGITS: Final = re.compile(r"\d+")
_MAX_DIGITS: Final = 12
_PARENTHESIS: Final = re.compile("[()]")
_FLAGS: Final = re.compile(r"[-#0 +.*\d]*")
# Of text, by name; some give other arguments.
_BEFORE_METHODS: Final[dict[str, Callable[..., tuple[Any, ...] | None]]] = {
    "center": _before_padding,
    "expandtabs": _before_expanding,
    "join": _before_joining,
    "ljust": _before_padding,
    "lstrip": _before_comparing,
    "replace": _before_replacing,
    "rfind": _before_comparing,
    "rindex": _before_comparing,
    "rjust": _before_padding,
    "rpartition": _before_comparing,
    "rsplit": _before_splitting_backwards,
    "rstrip": _before_comparing,
    "split": _before_splitting,
    "splitlines": _before_lines,
    "strip": _before_comparing,
    "zfill": _before_padding,
}

# --- filters and globals ------------------------------------------------------------------------------------------

# For web pages, or people, and costly on what is not.
_LEFT_OUT: Final = frozenset({"filesizeformat", "pprint", "striptags", "urlencode", "urlize", "wordwrap", "xmlattr"})
# They make nothing.
_CHEAP: Final = frozenset({"attr", "count", "d", "default", "first", "last", "length"})


def _before_filter(name: str, budget: Budget, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What is checked before a filter is applied. Whatever it does not like in its arguments is left to the filter."""
    numbers = [number for number in (*args, *kwargs.values()) if isinstance(number, int)]
    largest = max(map(abs, numbers), default=0)
    match name:
        case "batch" | "slice":
            if largest > _MAX_PARTS:
                raise TemplateLimitExceeded(f"it asked for more than {_MAX_PARTS:,} parts")
        case "center":
            budget.expect(largest)
        case "format":
            _before_percent(budget, str(value), kwargs or args)
        case "indent":
            widths = [largest, *(len(width) for width in (*args, *kwargs.values()) if isinstance(width, str))]
            budget.expect(len(value) + (value.count("\n") + 1) * max(widths) if isinstance(value, str) else 0)
        case "list" | "title" | "wordcount" | "sort" | "unique":
            if isinstance(value, str):
                budget.expect(len(value) * _ITEM // 2)
        case "replace":
            old = args[0] if args else kwargs.get("old", "")
            new = args[1] if len(args) > 1 else kwargs.get("new", "")
            _before_replacing(budget, str(value), str(old), str(new))
        case "trim":
            _before_comparing(budget, str(value), *args, *kwargs.values())
        case "round":
            if largest > _MAX_INDENT:
                raise TemplateLimitExceeded(f"it rounded to more than {_MAX_INDENT} digits")


def _bounded_filter(name: str, apply: Method) -> Method:
    """A filter of jinja2's that keeps to the budget."""
    place = int(hasattr(apply, "jinja_pass_arg"))  # of its value among the arguments

    @wraps(apply)
    def apply_bounded(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.tick()
        if name in _CHECKED:
            _before_filter(name, budget, args[place], args[place + 1 :], kwargs)
        return budget.made(apply(*args, **kwargs))

    return apply_bounded


def _bounded_test(check: Any) -> Method:
    @wraps(check)
    def check_bounded(*args: Any) -> bool:
        _budget.get().tick()
        passed: bool = check(*args)
        return passed

    return check_bounded


_COMPARING: Final = frozenset(
    {"!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lower"}
    | {"lt", "ne", "upper"}
)
_CHECKED: Final = frozenset(
    {"batch", "center", "format", "indent", "list", "replace", "round", "slice", "sort", "title", "trim", "unique"}
    | {"wordcount"}
)


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return _budget.get().joined([item if type(item) is str else str(item) for item in value], str(d))


@pass_environment
def _sum(environment: Environment, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    if attribute is not None:
        iterable = map(make_attrgetter(environment, attribute), iterable)
    budget = _budget.get()
    return reduce(budget.add, iterable, start)


def _dict(items: Mapping[Any, Any] | Iterable[Any] = (), /, **members: Any) -> dict[Any, Any]:
    """One by one, as keys that are made to have the same hash take ever longer."""
    budget, made = _budget.get(), dict[Any, Any]()
    for key, value in items.items() if isinstance(items, Mapping) else items:
        budget.tick()
        made[key] = value
    made.update(members)
    return made


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _lipsum(n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> str:
    if n > _MAX_WORDS or n * max > _MAX_WORDS:
        raise TemplateLimitExceeded(f"it asked for more than {_MAX_WORDS:,} words")
    return generate_lorem_ipsum(n, html, min, max)


def _strftime_now(format: str) -> str:
    if len(format) > _MAX_DATE_FORMAT:
        raise TemplateLimitExceeded(f"it formatted a date with more than {_MAX_DATE_FORMAT:,} characters")
    return datetime.now().strftime(format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Models were trained on what transformers renders, so neither jinja2's HTML escapes nor its key order will do.
    budget = _budget.get()
    longest = max(map(len, separators or ("", "")))
    if longest > _MAX_INDENT or (indent is not None and (not isinstance(indent, int) or indent > _MAX_INDENT)):
        raise TemplateLimitExceeded(f"it wrote JSON with more than {_MAX_INDENT} characters between values")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        budget.expect(budget.size_of(value))
        text: str = budget.made(encoder.encode(value))
        return text
    return _written(budget, encoder.iterencode(value))  # blanks can be most of it


def _environment() -> _BoundedEnvironment:
    environment = _BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    own = {"join": _join, "sum": _sum, "tojson": _tojson}
    environment.filters = {
        name: own.get(name) or (apply if name in _CHEAP else _bounded_filter(name, apply))
        for name, apply in FILTERS.items()
        if name not in _LEFT_OUT
    }
    environment.tests = {name: _bounded_test(check) if name in _COMPARING else check for name, check in TESTS.items()}
    environment.globals |= {
        "dict": _dict,
        "lipsum": _lipsum,
        "namespace": _Namespace,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    return environment
