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

LONG = "takes too long"
BIG = "needs too much memory"
GROWN = "builds more text than is allowed"
TOO_MUCH = f"{GROWN}|{BIG}|{LONG}"
REFUSED = "refused these messages"
NO_FILTER = "not valid Jinja: No filter named"

RENDERED: dict[str, tuple[str, str]] = {
    # one step that takes forever: nothing in the sandbox can interrupt it
    "round": ("{{ 5 | round(-40000000) }}", LONG),
    "round_ceil": ("{{ 5 | round(-40000000, 'ceil') }}", f"{LONG}|{REFUSED}"),
    "test_eq": (NESTED + "{{ ns.x is eq(ns.y) }}", LONG),
    "test_ne": (NESTED + "{{ ns.x is ne(ns.y) }}", LONG),
    "test_le": (NESTED + "{{ ns.x is le(ns.y) }}", LONG),
    "test_in": (NESTED + "{{ ns.x is in([ns.y]) }}", LONG),
    "select_eq": (NESTED + "{{ [ns.x] | select('eq', ns.y) | list | length }}", LONG),
    "reject_eq": (NESTED + "{{ [ns.x] | reject('eq', ns.y) | list | length }}", LONG),
    "selectattr_eq": (NESTED + "{{ [{'a': ns.x}] | selectattr('a', 'eq', ns.y) | list | length }}", LONG),
    "dictsort": (NESTED + "{{ {'a': ns.x, 'b': ns.y} | dictsort(by='value') | length }}", LONG),
    "list_index": (NESTED + "{{ [ns.x].index(ns.y) }}", LONG),
    "list_count": (NESTED + "{{ [ns.x].count(ns.y) }}", LONG),
    "loop_changed": (NESTED + "{% for i in [ns.x, ns.y] %}{{ loop.changed(i) }}{% endfor %}", LONG),
    "compare": (NESTED + "{{ ns.x == ns.y }}", LONG),
    "max": (NESTED + "{{ [ns.x, ns.y] | max | length }}", LONG),
    "sort": (NESTED + "{{ [ns.x, ns.y] | sort | length }}", LONG),
    "print_nested": (NESTED + "{{ ns.x }}", LONG),
    "tojson_nested": (NESTED + "{{ ns.x | tojson }}", LONG),
    "hash_nested": (
        looped("(1,)", 40, "{% set ns.x = (ns.x, ns.x) %}") + "{{ {ns.x: 1} | length }}",
        LONG,
    ),
    "hash_collisions": (f"{{{{ {COLLIDING} | unique | list | length }}}}", LONG),
    "rfind": ("{{ ('a' * 3000000).rfind('ab' ~ 'a' * 1000000) }}", LONG),
    "rindex": ("{{ ('a' * 3000000).rindex('ab' ~ 'a' * 1000000) }}", LONG),
    "rsplit": ("{{ ('a' * 3000000).rsplit('ab' ~ 'a' * 1000000) | length }}", LONG),
    "rpartition": ("{{ ('a' * 3000000).rpartition('ab' ~ 'a' * 1000000) | length }}", LONG),
    "strip": ("{{ ('a' * 9000000).strip('b' * 1000000 ~ 'a') | length }}", LONG),
    "trim": ("{{ ('a' * 9000000) | trim('b' * 1000000 ~ 'a') | length }}", LONG),
    "divide_big_numbers": (f"{{{{ ({MANY_BITS}) // (('7' * 4500001) | int(base=8)) > 0 }}}}", LONG),
    "print_big_number": (f"{{{{ {MANY_BITS} }}}}", REFUSED),
    # many short steps
    "loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", LONG),
    "macros": (
        "{% macro f(n) %}{% if n < 40 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}{{ f(0) }}",
        LONG,
    ),
    "recursive_loop": (
        "{% for x in [1] recursive %}{% if loop.depth < 40 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
        LONG,
    ),
    "callers": (
        "{% macro f(n) %}{{ caller() }}{% if n < 40 %}"
        "{% call f(n + 1) %}{% endcall %}{% call f(n + 1) %}{% endcall %}"
        "{% endif %}{% endmacro %}{% call f(0) %}{% endcall %}",
        LONG,
    ),
    "endless_macro": ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(0) }}", f"{REFUSED}|{LONG}"),
    "map_chain": (
        "{% for i in range(9999) %}{{ range(99999) | map('string') | map('length') | map('abs') | list | length }}"
        "{% endfor %}",
        LONG,
    ),
    # deep
    "deep_list": (looped("[1]", 90000, "{% set ns.x = [ns.x] %}") + "{{ ns.x }}", f"{REFUSED}|{LONG}"),
    "deep_json": (
        looped("[1]", 90000, "{% set ns.x = [ns.x] %}") + "{{ ns.x | tojson }}",
        f"{REFUSED}|{LONG}",
    ),
    # memory
    "repeat": ("{{ 'a' * 10 ** 9 }}", GROWN),
    "repeat_list": ("{{ [1] * 10 ** 9 }}", GROWN),
    "power": ("{{ 10 ** 10 ** 8 }}", "very large numbers"),
    "list_of_letters": ("{{ ('ab' * 99000000) | list | length }}", f"{BIG}|{LONG}"),
    "splitlines": ("{{ ('\n' * 99000000).splitlines() | length }}", f"{BIG}|{LONG}"),
    "split": ("{{ ('a ' * 49000000).split() | length }}", f"{BIG}|{LONG}"),
    "escape": ("{{ ('<' * 99000000) | escape | length }}", f"{BIG}|{LONG}"),
    "title": ("{{ ('a-' * 49000000) | title | length }}", f"{BIG}|{LONG}"),
    "wide_letters": ("{{ ('a' * 99000000 ~ '😀') | length }}", f"{BIG}|{LONG}"),
    "slices": (
        "{% set ns = namespace(x=[]) %}{% set a = 'ab' * 4000000 %}"
        "{% for i in range(9999) %}{% set ns.x = [ns.x, a[i:]] %}{% endfor %}",
        f"{BIG}|{LONG}",
    ),
    "kept_lists": (
        "{% set ns = namespace(x=[]) %}"
        "{% for i in range(9999) %}{% set ns.x = [ns.x, range(99999) | list] %}{% endfor %}",
        f"{BIG}|{LONG}",
    ),
    "dict_growth": (
        "{% set ns = namespace(x={}) %}"
        "{% for i in range(99999) %}{% set ns.x = dict(ns.x, **{i | string: i}) %}{% endfor %}",
        LONG,
    ),
    # text that grows
    "double_concat": (grown("ns.x ~ ns.x"), TOO_MUCH),
    "double_add": (grown("ns.x + ns.x"), TOO_MUCH),
    "double_join": (grown("[ns.x, ns.x] | join"), TOO_MUCH),
    "double_join_method": (grown("ns.x.join([ns.x, ns.x])"), TOO_MUCH),
    "double_format": (grown("'{0}{0}'.format(ns.x)"), TOO_MUCH),
    "double_replace": (grown("ns.x | replace('a', 'aa')"), TOO_MUCH),
    "double_set_block": (
        looped("'a'", 64, "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
        TOO_MUCH,
    ),
    "double_macro": (
        "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + grown("f(ns.x)"),
        TOO_MUCH,
    ),
    "replace_all": ("{% set a = 'a' * 1000000 %}{{ a.replace('a', a) }}", GROWN),
    "join_long": ("{% set a = 'a' * 1000000 %}{{ range(99) | join(a * 9) }}", GROWN),
    "indent": ("{{ '\n' * 1000000 | indent(1000000) }}", f"{GROWN}|{REFUSED}"),
    "much_text": ("{{ 'x' * 30000000 }}", GROWN),
    "much_wide_text": ("{% for i in range(30) %}{{ '😀' * 100000 }}{% endfor %}", GROWN),
    # formats
    "percent": ("{{ '%1000000000d' % 1 }}", "not supported"),
    "percent_safe": ("{{ ('%1000000000d' | safe) % 1 }}", "not supported"),
    "format_width": ("{{ '{:1000000000}'.format(1) }}", "more than plain fields"),
    "json_indent": ("{{ [[[1]]] | tojson(indent=1000000000) }}", "indents JSON"),
    "center": ("{{ 'a'.center(10 ** 9) }}", REFUSED),
    "zfill": ("{{ '1'.zfill(10 ** 9) }}", REFUSED),
    "expandtabs": ("{{ '\t'.expandtabs(10 ** 9) }}", REFUSED),
    "translate": ("{{ 'a'.translate({97: 'a' * 99999999}) }}", REFUSED),
    "lipsum": ("{{ lipsum(n=99999999) }}", REFUSED),
}
"""By name: what is done when the messages say so, and what is said about it."""

OPENED: dict[str, tuple[str, str]] = {
    # filters that are quadratic, or wide without a bound
    **{
        name: (f"{{{{ ('<' * 1000000) | {name} }}}}", NO_FILTER)
        for name in (
            "striptags",
            "urlize",
            "wordwrap",
            "center",
            "batch(1)",
            "slice(9)",
            "sum",
            "pprint",
            "format",
        )
    },
    # the compiler
    "many_prints": ("{{ 1 }}" * 140_000, LONG),
    "many_blocks": ("{% if x %}" * 90_000, f"{LONG}|not valid Jinja"),
    "many_parentheses": ("{{ " + "(" * 5000 + " }}", "not valid Jinja"),
    "many_nots": ("{{ " + "not " * 200_000 + "1 }}", f"{LONG}|not valid Jinja"),
    "many_additions": ("{{ 1" + "+1" * 400_000 + " }}", f"{LONG}|{BIG}|not valid Jinja"),
    "many_attributes": ("{{ x" + ".a" * 400_000 + " }}", f"{LONG}|{BIG}|not valid Jinja"),
    "many_elifs": ("{% if x %}" + "{% elif x %}" * 80_000 + "{% endif %}", f"{LONG}|{BIG}|not valid Jinja"),
    "long_list": ("{{ [" + "1," * 500_000 + "] }}", f"{LONG}|{BIG}|not valid Jinja"),
    "long_number": ("{{ " + "9" * 900_000 + " }}", f"{BIG}|not valid Jinja"),
    "unended": ("{{ '" * 250_000, f"{LONG}|not valid Jinja"),
    "too_long": ("x" * (2 << 20), "longer than"),
    # always, not only when the messages say so
    "at_once_round": ("{{ 5 | round(-40000000) }}", LONG),
    "at_once_eq": (NESTED + "{{ ns.x is eq(ns.y) }}", LONG),
    # what is searched in what it writes when it is tried
    "tried_calls": (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}"
        "{% if m.tool_calls %}{{ 'ember7f ' * 60000 }}{% endif %}{{ m.content }} ember7x ember7r{% endfor %}",
        LONG,
    ),
}
"""By name: what is done when it is opened, and what is said about it."""


def when_told(source: str) -> str:
    """A template that is harmless until a message says `go`."""
    return "{% if messages[0].content == 'go' %}" + source + "{% endif %}fine"
