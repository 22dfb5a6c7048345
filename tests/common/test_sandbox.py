"""Templates that reach for Python's inside, run for ever, or fill the memory."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError

from common import sandbox
from common.conversations import Message
from common.errors import InvalidRequest
from common.sandbox import TemplateLimitExceeded, bounded, compile_template, run_template
from common.templating import ChatTemplate

MESSAGES: list[Message] = [{"role": "user", "content": "hi", "tool_calls": [{"function": {"name": "f"}}]}]


def rendered(source: str, **variables: Any) -> str:
    text, _ = run_template(compile_template(source), {"messages": MESSAGES, **variables})
    return text


@pytest.fixture
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_VALUE", 6_000_000)
    monkeypatch.setattr(sandbox, "MAX_VALUES", 50_000_000)


def doubled(step: str, start: str, end: str = "{{ ns.x }}") -> str:
    return f"{{% set ns = namespace(x={start}, y={start}) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{end}"


# fmt: off
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "loop that passes over all":
    "{% for a in range(99999) if range(99999) | list | string | length < 0 %}x{% endfor %}",
    "loop in loops": "{% for a in range(99999) recursive %}{{ loop(range(99999)) if loop.depth < 5 }}{% endfor %}",
    "macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "loop into a variable": "{% set x %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endset %}",
    "searches": "{% set x = 'a' * 9999999 %}{% for i in range(99999) %}{% if 'ab' in x %}{% endif %}{% endfor %}",
    "searches without a loop": "{% set x = 'a' * 30000000 %}" + "{% if 'ab' in x %}{% endif %}" * 500,
    "lazy lists": "{{ range(99999) | map('string') | map('list') | sum(start=[]) | length }}",
    "methods without a loop": "{% set x = '1' * 9999999 %}{% set y = [" + "x.isdigit(), " * 999 + "] %}",
    "keys without a loop":
    doubled("{% set ns.x = (ns.x, ns.x) if i < 17 else ns.x %}", "()", "{% set d = {ns.x: 1} %}")
    + "{% set y = [" + "d[ns.x], " * 999 + "] %}",
    # Multiples of it have the same hash, so that each key is compared with all before it.
    "keys of one hash":
    "{{ dict(range(0, (2 ** 61 - 1) * 99999, 2 ** 61 - 1) | batch(2) | list) | length }}",
    "comparisons": "{% set x = range(99999) | list %}" + "{% if x | reject('in', x) | list %}{% endif %}" * 999,
}

HUGE = {
    "times": "{{ 'a' * 10 ** 9 }}",
    "times the other way round": "{{ 10 ** 9 * 'a' }}",
    "list times": "{{ ([0] * 999999999) | length }}",
    "power": "{{ (9 ** 9) ** (9 ** 9) }}",
    "squares": doubled("{% set ns.x = ns.x * ns.x %}", "9"),
    "doubled by ~": doubled("{% set ns.x = ns.x ~ ns.x %}", "'abc'"),
    "doubled by +": doubled("{% set ns.x = ns.x + ns.x %}", "'abc'"),
    "doubled lists": doubled("{% set ns.x = ns.x + ns.x %}", "[1]"),
    "lists of lists": doubled("{% set ns.x = [ns.x, ns.x] %}", "['abc']"),
    "tuples of tuples":
    doubled("{% set ns.x = (ns.x, ns.x) %}{% set ns.y = (ns.y, ns.y) %}", "(1,)", "{{ ns.x == ns.y }}"),
    "mappings of mappings": doubled("{% set ns.x = {'a': ns.x, 'b': ns.x} %}", "{}", "{{ ns.x | tojson }}"),
    "dict()": doubled("{% set ns.x = dict(a=ns.x, b=ns.x) %}", "1", "{{ ns.x | tojson }}"),
    "center": "{{ 'a' | center(999999999) }}",
    "ljust": "{{ 'a'.ljust(999999999) }}",
    "rjust": "{{ 'a'['rjust'](999999999) }}",
    "zfill": "{{ 'a'.zfill(999999999) }}",
    "percent": "{{ '%999999999d' % 1 }}",
    "percent with a width": "{{ '%*d' % (999999999, 1) }}",
    "percent often": "{{ ('%(a)s' * 99999) % {'a': 'a' * 9999999} }}",
    "percent with a key in parentheses": "{{ '%((a)b)999999999d' % {'(a)b': 1} }}",
    "percent after two": "{{ '%%%999999999d' % 1 }}",
    "percent with zeros": "{{ '%000000000000000999999999d' % 1 }}",
    "format filter": "{{ '%0999999999d' | format(1) }}",
    "format": "{{ '{:>999999999}'.format(1) }}",
    "format with zeros": "{{ '{:000000000000000999999999}'.format(1) }}",
    "format with a width": "{{ '{:>{w}}'.format(1, w=999999999) }}",
    "format often": "{{ ('{0}' * 99999).format('a' * 9999999) }}",
    "format_map": "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "replace filter": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "replace filter by name": "{{ ('a' * 99999) | replace(new='b' * 99999, old='a') }}",
    "ljust of escaped text": "{{ ('a' | e).ljust(999999999) }}",
    "replace of escaped text": "{{ (('a' * 99999) | safe).replace('a', 'b' * 99999) }}",
    "tabs of escaped text": "{{ (('\t' * 99999) | safe).expandtabs(tabsize=99999) }}",
    "format of escaped text": "{{ ('{:>999999999}' | safe).format(1) }}",
    "join": "{{ ('a' * 9999999).join('abcdefghij') }}",
    "join filter": "{{ range(99999) | join('a' * 99999) }}",
    "join of the same": "{% set x = 'x' * 999999 %}{{ ([none] * 999) | map('default', x, true) | join }}",
    "indent": "{{ ('\n' * 99999) | indent(99999) }}",
    "indent with text": "{{ ('\n' * 99999) | indent('x' * 99999) }}",
    "tabs": "{{ ('\t' * 99999).expandtabs(99999) }}",
    "split": "{{ ('a ' * 2999999).split() | length }}",
    "list": "{{ ('a' * 5999999) | list | length }}",
    "batch": "{{ [1] | batch(999999999, 0) | list | length }}",
    "slice": "{{ [1] | slice(999999999) | list | length }}",
    "round": "{{ 1 | round(999999999) }}",
    "tojson indent": "{{ [[[[1]]]] | tojson(indent=999999999) }}",
    "tojson separators": "{{ range(9999) | list | tojson(separators=('a' * 9999999, ':')) }}",
    "lipsum": "{{ lipsum(999999999) }}",
    "lipsum of empty ones": "{{ lipsum(999999999, min=-5, max=-1) }}",
    "strftime_now": "{{ strftime_now('%A' * 99999) }}",
    "output": "{% for a in range(99999) %}" + "a" * 9999 + "{% endfor %}",
    "output into a variable": "{% set x %}{% for a in range(99999) %}{{ messages }}" + "a" * 9999
    + "{% endfor %}{% endset %}",
    "parts": "{% set x = 'a' * 5999999 %}" + "".join(f"{{% set x{i} = x[1:] %}}" for i in range(20)),
    "copies": "{% set x = 'a' * 5999999 %}" + "".join(f"{{% set x{i} = x | upper %}}" for i in range(20)),
    "callers": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 18 + "x" * 9999 + "{% endcall %}" * 18,
}
# fmt: on


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
@pytest.mark.usefixtures("little_time")
def test_what_runs_for_ever_is_stopped(source: str) -> None:
    with pytest.raises(TemplateLimitExceeded, match=r"it ran for more than 0\.2 s"):
        rendered(source)


@pytest.mark.parametrize("source", HUGE.values(), ids=HUGE)
@pytest.mark.usefixtures("little_room")
def test_what_grows_without_bounds_is_stopped(source: str) -> None:
    with pytest.raises(TemplateLimitExceeded):
        rendered(source)


SLOW = (
    "{{ TEXT.rfind(NEEDLE) }}",
    "{{ TEXT.rindex(NEEDLE) }}",
    "{{ TEXT.rpartition(NEEDLE) }}",
    "{{ TEXT.rsplit(NEEDLE, 1) }}",
    "{{ TEXT.rsplit(sep=NEEDLE) }}",
    "{{ (TEXT | safe).rsplit(NEEDLE) }}",
    "{{ TEXT.strip(NEEDLE) }}",
    "{{ TEXT.lstrip(NEEDLE) }}",
    "{{ TEXT['rstrip'](NEEDLE) }}",
    "{{ TEXT | trim(NEEDLE) }}",
    "{{ TEXT | trim(chars=NEEDLE) }}",
    "{{ [TEXT] | map('trim', NEEDLE) | list }}",
)


@pytest.mark.parametrize("source", SLOW)
def test_texts_that_take_minutes_to_be_compared_are_not(source: str) -> None:
    """Python would do it in one go, which nothing can stop, and no other thread would run meanwhile."""
    with pytest.raises(TemplateLimitExceeded, match="compared texts"):
        rendered(source, TEXT="a" * 1_000_000, NEEDLE="ab" + "a" * 10_000)


# As published for jinja2 and for the servers that have rendered templates of models.
ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'] }}{{ ''['__class__']['__base__'] }}",
    "{{ (''|attr('__class__')).__mro__ }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ messages[0].content.__class__.__init__.__globals__ }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ '{a.__class__}'.format_map({'a': messages}) }}",
    "{{ ('{0.__class__}'|attr('format'))(messages) }}",
    "{% set f = '{0.__class__}'.format %}{{ f(messages) }}",
    "{{ ['{0.__class__}'.format]|map('list')|list }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__.co_consts }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ self._TemplateReference__context }}",
    "{{ self.__init__.__globals__ }}",
    "{{ (messages|map('upper')).gi_frame.f_globals }}",
    "{% for m in messages %}{{ loop.__class__ }}{{ loop._iterator.__class__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m._environment }}{{ m._func.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages.sort() }}",
    "{{ {}.fromkeys(range(9)) }}",
    "{{ 'a'.encode('utf-16') }}",
    "{{ ('<b>' | e).unescape() }}",
    "{{ ('{0.__class__}' | safe).format(messages) }}",
    "{{ 'a'.translate({97: 'b'}) }}",
    "{{ (1).to_bytes(9) }}",
    "{{ (1).__class__.from_bytes('a') }}",
    "{{ namespace(a=1)._Namespace__attrs }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends '/etc/passwd' %}",
    "{{ config.items() }}",
    "{{ request.application.__globals__ }}",
    "{{ get_flashed_messages.__globals__ }}",
    "{{ url_for.__globals__['__builtins__'] }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_python_cannot_be_reached(source: str) -> None:
    try:
        text = rendered(source)
    except (TemplateError, TypeError, AttributeError):  # SecurityError and UndefinedError are of the first kind
        return
    assert not any(word in text for word in ("class '", "function", "module", "root:")), text


def test_messages_stay_as_they_are() -> None:
    with pytest.raises(SecurityError):
        rendered("{{ messages[0].update({'role': 'x'}) }}")
    assert MESSAGES[0]["role"] == "user"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '**%s** %5.1f%%' % ('a', 2.25) }}", "**a**   2.2%"),
        ("{{ '{0} {b:>3}|{c[0]}'.format(1, b=2, c='xy') }}", "1   2|x"),
        ("{{ '{a}'.format_map({'a': 1}) }}", "1"),
        ("{{ 'a' + 'b' + messages[0].content + ('c' ~ 1) }}", "abhic1"),
        ("{{ '%%%(a(b))2d%%9999999999' % {'a(b)': 1} }} {{ '%5.1f' % 2 }} {{ '{:03}'.format(7) }}",
         "% 1%9999999999   2.0 007"),
        ("{{ dict(messages[0], a=1).a }}{{ dict([('b', 2)]).b }}{{ dict() }}{{ dict(c=3, **{'d': 4}) }}",
         "12{}{'c': 3, 'd': 4}"),
        ("{{ ' a.b ' | trim }}{{ '--a-' | trim('-') }}{{ 'a.b.c'.rsplit('.', 1) }}{{ 'xax'.strip('x') }}"
         "{{ 'a</t>b</t>c'.rpartition('</t>')[2] }}{{ ' a '.rstrip() }}", "a.ba['a.b', 'c']ac a"),
        ("{{ 1 + 2 + 3 }} {{ [1] + [2] + [3] }} {{ 7 % 4 }} {{ 2 * 3 ** 2 }}", "6 [1, 2, 3] 3 18"),
        ("{{ ('<' | e) + '<' }} {{ '<b>' | safe }}", "&lt;&lt; <b>"),
        ("{{ 'a, b'.split(', ') | join('-') }} {{ ' '.join(['x', 'y']) }} {{ ['a', 1, none] | join }}",
         "a-b x y a1None"),
        ("{{ 'a-a-a'.replace('a', 'bb', 2) }} {{ 'aa' | replace('a', 'b', 1) }}", "bb-bb-a ba"),
        ("{{ [{'n': 1}, {'n': 2}] | sum(attribute='n') }} {{ [[1], [2]] | sum(start=[]) }}", "3 [1, 2]"),
        ("{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ ns }}", "2<Namespace>"),
        ("{% for x in [3, 1, 2] if x != 1 %}{{ loop.index }}{{ x }}{{ loop.last }} {% endfor %}", "13False 22True "),
        ("{% for x in [[1, [2]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "12"),
        ("{% macro m(a, b='y') %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ m('x') }}"
         "{% call m(1, b=2) %}z{% endcall %}", "xy12z"),
        ("{% set x %}{% for i in range(3) %}{{ i }}{% endfor %}{% endset %}{{ x | upper }}{{ x[1:] }}", "01212"),
        ("{% set (a, b) = (1, 2) %}{% for k, v in {'x': a}.items() %}{{ k }}{{ v }}{{ b }}{% endfor %}", "x12"),
        ("{{ 'b' in 'abc' }} {{ 'x' not in messages[0] }} {{ messages[0].content == messages[0]['content'] }}",
         "True True True"),
        ("{{ messages[0].missing is defined }}{{ messages[0].missing }}{{ messages[0].items() | list | length }}",
         "False3"),
        ("{{ messages | map(attribute='role') | map('upper') | list }}", "['USER']"),
        ("{{ messages | selectattr('role', 'eq', 'x') | list }}", "[]"),
        ("{{ {'a': {}} | tojson(indent=2) }} {{ 'é' | tojson }}", '{\n  "a": {}\n} "é"'),
        ("{% for m in messages %}{{ loop.previtem is defined }}{{ loop.cycle('a', 'b') }}{% break %}{% endfor %}",
         "Falsea"),
        ("{{ 'a\tb'.expandtabs(2) }}|{{ 'x'.center(3) }}|{{ '7'.zfill(3) }}|{{ 'a\nb' | indent(2) }}",
         "a b| x |007|a\n  b"),
    ],
)  # fmt: skip
def test_ordinary_templates_are_not_disturbed(source: str, text: str) -> None:
    assert rendered(source) == text


def test_all_that_is_rendered_within_shares_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_VALUES", 2_000_000)  # a value is counted when it is made and when it is written
    template = compile_template("{{ 'a' * 300000 }}")
    for _ in range(9):
        run_template(template, {})
    with bounded():
        for _ in range(3):
            run_template(template, {})
        with pytest.raises(TemplateLimitExceeded, match="together"):
            run_template(template, {})


@pytest.mark.parametrize(
    "source",
    [
        "x" * 200_001,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "[" * 5000 + "]" * 5000 + " }}",
        "{{ " + "not " * 40_000 + "1 }}",
        "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
        "{% for x in y %}" * 30 + "{% endfor %}" * 30,
        "{{ 1" + " ~ 1" * 5_000 + " }}{{ 1" + " + 1" * 5_000 + " }}",
        "{{ x" + "|upper" * 5000 + " }}",
        "{{ x" + ".y" * 5000 + " }}",
        "{{ '\ud83d' }}",
        "{{ 9" + "9" * 5000 + " }}",
    ],
    ids=lambda source: source[:16],
)
def test_sources_that_are_too_much_do_not_compile_or_do_no_harm(source: str) -> None:
    with suppress(TemplateError, RecursionError):  # one that does not compile raises an error of the first kind
        rendered(source, x="x", y=[1])


def test_a_source_that_is_too_long_is_refused() -> None:
    with pytest.raises(TemplateSyntaxError, match="200,001 characters; at most 200,000"):
        compile_template("x" * 200_001)


def test_a_template_that_was_stopped_is_named(little_time: None) -> None:
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(
        InvalidRequest, match=r"chat template greedy was stopped: it ran for more than 0\.2 s"
    ) as caught:
        ChatTemplate("greedy", source).render([{"role": "user", "content": "hi"}], path="text")
    assert caught.value.param == "text"


def test_its_traits_are_found_out_on_one_budget(little_time: None) -> None:
    template = ChatTemplate("greedy", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    assert not template.traits.shows_calls


def test_what_a_template_says_of_a_conversation_is_told_in_short() -> None:
    template = ChatTemplate("talker", "{{ raise_exception('x' * 9999999) }}")
    with pytest.raises(InvalidRequest) as caught:
        template.render([{"role": "user", "content": "hi"}])
    assert len(caught.value.message) < 2000
