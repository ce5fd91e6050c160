"""`endless`: a conversation many times as long as the context, whose client sends all of it with every turn.

Facts are told in its first tenth and asked for at its end, when they have long left the context. After every turn
the state that it left behind is read back as text: what stands there is what the model has read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import batched

from emberkeep.bench.facts import Fact, made_up_facts
from emberkeep.bench.figures import Series, percentile, series
from emberkeep.bench.report import Result, Row, Table, Value
from emberkeep.bench.stage import Stage
from emberkeep.bench.talking import Said, Talker, over_http, through_library
from emberkeep.errors import EmberkeepError
from emberkeep.types import Eviction

_SYSTEM = "You are a friendly companion on a long walk. Answer in one or two short sentences."
