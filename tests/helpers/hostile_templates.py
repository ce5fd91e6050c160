"""What a stranger's chat template may try: every way we know to take time, memory or the interpreter's lock."""

from __future__ import annotations


def looped(start: str, times: int, step: str) -> str:
    """`ns.x` and `ns.y` begin as `start` and go through `step` so often."""
    return f"{{% set ns = namespace(x={start}, y={start}) %}}{{% for i in range({times}) %}}{step}{{% endfor %}}"


def grown(step: str) -> str:
    return looped("'aaaaaaaa'", 64, "{% set ns.x = " + step + " %}")


NESTED = looped("[1]", 40, "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}")
"""Two lists that are equal, small in memory, and a trillion steps to compare."""
COLLIDING = "range(0, 99999 * 2305843009213693951, 2305843009213693951)"
"""Numbers that all have the same hash."""
MANY_BITS = "('7' * 9000000) | int(base=8)"

STOPPED = (
    "takes too long|needs too much memory|builds more text than is allowed|refused these messages|not valid Jinja"
)
"""What is said of one that was stopped, or failed by itself."""

RENDERED: dict[str, str] = {
    # one step that takes forever: nothing in the sandbox can interrupt it
    "round": "{{ 5 | round(-40000000) }}",
    "test_eq": NESTED + "{{ ns.x is eq(ns.y) }}",
    "test_ne": NESTED + "{{ ns.x is ne(ns.y) }}",
    "test_le": NESTED + "{{ ns.x is le(ns.y) }}",
    "test_in": NESTED + "{{ ns.x is in([ns.y]) }}",
    "select_eq": NESTED + "{{ [ns.x] | select('eq', ns.y) | list | length }}",
    "reject_eq": NESTED + "{{ [ns.x] | reject('eq', ns.y) | list | length }}",
    "selectattr_eq": NESTED + "{{ [{'a': ns.x}] | selectattr('a', 'eq', ns.y) | list | length }}",
    "dictsort": NESTED + "{{ {'a': ns.x, 'b': ns.y} | dictsort(by='value') | length }}",
    "list_index": NESTED + "{{ [ns.x].index(ns.y) }}",
    "list_count": NESTED + "{{ [ns.x].count(ns.y) }}",
    "loop_changed": NESTED + "{% for i in [ns.x, ns.y] %}{{ loop.changed(i) }}{% endfor %}",
    "compare": NESTED + "{{ ns.x == ns.y }}",
    "max": NESTED + "{{ [ns.x, ns.y] | max | length }}",
    "sort": NESTED + "{{ [ns.x, ns.y] | sort | length }}",
    "print_nested": NESTED + "{{ ns.x }}",
    "tojson_nested": NESTED + "{{ ns.x | tojson }}",
    "hash_nested": looped("(1,)", 40, "{% set ns.x = (ns.x, ns.x) %}") + "{{ {ns.x: 1} | length }}",
    "hash_collisions": f"{{{{ {COLLIDING} | unique | list | length }}}}",
    "rfind": "{{ ('a' * 3000000).rfind('ab' ~ 'a' * 1000000) }}",
    "rindex": "{{ ('a' * 3000000).rindex('ab' ~ 'a' * 1000000) }}",
    "rsplit": "{{ ('a' * 3000000).rsplit('ab' ~ 'a' * 1000000) | length }}",
    "rpartition": "{{ ('a' * 3000000).rpartition('ab' ~ 'a' * 1000000) | length }}",
    "strip": "{{ ('a' * 9000000).strip('b' * 1000000 ~ 'a') | length }}",
    "trim": "{{ ('a' * 9000000) | trim('b' * 1000000 ~ 'a') | length }}",
    "divide_big_numbers": f"{{{{ ({MANY_BITS}) // (('7' * 4500001) | int(base=8)) > 0 }}}}",
    "print_big_number": f"{{{{ {MANY_BITS} }}}}",
    # many short steps
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n < 40 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}{{ f(0) }}",
    "recursive_loop": (
        "{% for x in [1] recursive %}{% if loop.depth < 40 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}"
    ),
    "callers": (
        "{% macro f(n) %}{{ caller() }}{% if n < 40 %}"
        "{% call f(n + 1) %}{% endcall %}{% call f(n + 1) %}{% endcall %}"
        "{% endif %}{% endmacro %}{% call f(0) %}{% endcall %}"
    ),
    "endless_macro": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(0) }}",
    "map_chain": (
        "{% for i in range(9999) %}{{ range(99999) | map('string') | map('length') | map('abs') | list | length }}"
        "{% endfor %}"
    ),
    # deep
    "deep_list": looped("[1]", 90000, "{% set ns.x = [ns.x] %}") + "{{ ns.x }}",
    "deep_json": looped("[1]", 90000, "{% set ns.x = [ns.x] %}") + "{{ ns.x | tojson }}",
    # memory
    "repeat": "{{ 'a' * 10 ** 9 }}",
    "repeat_list": "{{ [1] * 10 ** 9 }}",
    "list_of_letters": "{{ ('ab' * 99000000) | list | length }}",
    "splitlines": "{{ ('\n' * 99000000).splitlines() | length }}",
    "split": "{{ ('a ' * 49000000).split() | length }}",
    "escape": "{{ ('<' * 99000000) | escape | length }}",
    "title": "{{ ('a-' * 49000000) | title | length }}",
    "wide_letters": "{{ ('a' * 99000000 ~ '😀') | length }}",
    "slices": (
        "{% set ns = namespace(x=[]) %}{% set a = 'ab' * 4000000 %}"
        "{% for i in range(9999) %}{% set ns.x = [ns.x, a[i:]] %}{% endfor %}"
    ),
    "kept_lists": (
        "{% set ns = namespace(x=[]) %}"
        "{% for i in range(9999) %}{% set ns.x = [ns.x, range(99999) | list] %}{% endfor %}"
    ),
    "dict_growth": (
        "{% set ns = namespace(x={}) %}"
        "{% for i in range(99999) %}{% set ns.x = dict(ns.x, **{i | string: i}) %}{% endfor %}"
    ),
    # text that grows
    "double_concat": grown("ns.x ~ ns.x"),
    "double_add": grown("ns.x + ns.x"),
    "double_join": grown("[ns.x, ns.x] | join"),
    "double_join_method": grown("ns.x.join([ns.x, ns.x])"),
    "double_format": grown("'{0}{0}'.format(ns.x)"),
    "double_replace": grown("ns.x | replace('a', 'aa')"),
    "double_set_block": looped("'a'", 64, "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "double_macro": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + grown("f(ns.x)"),
    "replace_all": "{% set a = 'a' * 1000000 %}{{ a.replace('a', a) }}",
    "join_long": "{% set a = 'a' * 1000000 %}{{ range(99) | join(a * 9) }}",
    "indent": "{{ '\n' * 1000000 | indent(1000000) }}",
    "much_text": "{{ 'x' * 30000000 }}",
    "much_wide_text": "{% for i in range(30) %}{{ '😀' * 100000 }}{% endfor %}",
    # formats
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent_safe": "{{ ('%1000000000d' | safe) % 1 }}",
    "format_width": "{{ '{:1000000000}'.format(1) }}",
    "json_indent": "{{ [[[1]]] | tojson(indent=1000000000) }}",
    "center": "{{ 'a'.center(10 ** 9) }}",
    "zfill": "{{ '1'.zfill(10 ** 9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "translate": "{{ 'a'.translate({97: 'a' * 99999999}) }}",
    "lipsum": "{{ lipsum(n=99999999) }}",
}
"""By name: what is done when the messages say so."""

OPENED: dict[str, str] = {
    # filters that are quadratic
    "urlize": "{{ ('<' * 1000000) | urlize }}",
    "wordwrap": "{{ ('<' * 1000000) | wordwrap }}",
    # the compiler
    "many_prints": "{{ 1 }}" * 140_000,
    "many_blocks": "{% if x %}" * 90_000,
    "many_parentheses": "{{ " + "(" * 5000 + " }}",
    "many_nots": "{{ " + "not " * 200_000 + "1 }}",
    "many_additions": "{{ 1" + "+1" * 400_000 + " }}",
    "many_attributes": "{{ x" + ".a" * 400_000 + " }}",
    "many_elifs": "{% if x %}" + "{% elif x %}" * 80_000 + "{% endif %}",
    "long_list": "{{ [" + "1," * 500_000 + "] }}",
    "long_number": "{{ " + "9" * 900_000 + " }}",
    "unended": "{{ '" * 250_000,
    "too_long": "x" * (2 << 20),
    # always, not only when the messages say so
    "at_once_round": "{{ 5 | round(-40000000) }}",
    "at_once_eq": NESTED + "{{ ns.x is eq(ns.y) }}",
    # what is searched in what it writes when it is tried
    "tried_calls": (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}"
        "{% if m.tool_calls %}{{ 'ember7f ' * 60000 }}{% endif %}{{ m.content }} ember7x ember7r{% endfor %}"
    ),
}
"""By name: what is done when it is opened."""


def when_told(source: str) -> str:
    """A template that is harmless until a message says `go`."""
    return "{% if messages[0].content == 'go' %}" + source + "{% endif %}fine"


HOSTILE = {name: when_told(source) for name, source in RENDERED.items()} | OPENED
"""By name: templates that are stopped when they are opened, or when a message says `go`."""
