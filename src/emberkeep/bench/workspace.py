"""What every benchmark gets: a folder on the disk to be measured, and a model with words for prompts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from random import Random

from emberkeep.errors import EmberkeepError
from emberkeep.models.gguf import read_header
from emberkeep.models.profile import profile


class Workspace:
    def __init__(self, folder: Path, say: Callable[[str], None], find_model: Callable[[], Path]) -> None:
        """`say` tells the user who waits what is being done now. `find_model` is called when a benchmark first
        needs a model, and may download it."""
        self.folder, self.say, self._find_model = folder, say, find_model

    @cached_property
    def model(self) -> Path:
        """Raises EmberkeepError where there is none."""
        # Links are kept: the parts of a split model are found by the names that these have.
        return self._find_model().absolute()

    @cached_property
    def words(self) -> Words:
        """Loads the model for a moment. Raises ModelError."""
        from emberkeep.engine.llamacpp.model import LlamaModel

        with closing(LlamaModel(self.model)) as model:
            return Words.of(model.vocab.tokenize)

    def new_data_dir(self) -> Path:
        """Makes an empty store's home."""
        return Path(tempfile.mkdtemp(dir=self.folder))

    def require_context(self, tokens: int) -> None:
        """Raises EmberkeepError when the model was trained for less context than that."""
        trained = profile(read_header(self.model)).context_length
        if tokens > trained:
            raise EmberkeepError(
                f"This would need {tokens:,} tokens of context and this model was trained for {trained:,}: "
                "choose smaller sizes or another --model."
            )


@contextmanager
def open_workspace(
    parent: Path | None, say: Callable[[str], None], find_model: Callable[[], Path]
) -> Iterator[Workspace]:
    """Makes a folder in `parent` (default: the system's place for temporary files) and removes it at the end."""
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="emberkeep-bench-", dir=parent)).resolve()
    try:
        yield Workspace(folder, say, find_model)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ── words ──

_COMMON = """
the of and to in a is that for it was on are as with they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would
other into has more her two like him see time could no make than first been its who now people my made over did
down only way find use may water long little very after words called just where most know get through back much
before go good new write our used me man too any day same right look think also around another came come work three
word must because does part even place well such here take why things help put years different away again off went
old number great tell men say small every found still between name should home big give air line set own under read
last never us left end along while might next sound below saw something thought both few those always looked show
large often together asked house world going want school important until form food keep children feet land side
without boy once animals life enough took sometimes four head above kind began almost live page got earth need far
hand high year mother light parts country father let night following picture being study second eyes soon times
story boys since white days ever paper hard near sentence better best across during today others however sure means
knew try told young miles sun ways thing whole hear example heard several change answer room sea against top turned
learn point city play toward five using himself usually
"""
COMMON = tuple(_COMMON.split())
"""English words, about from the most frequent on."""


class Words:
    """Words with what each costs in a model's tokens, so that lengths can be chosen."""

    def __init__(self, costs: Mapping[str, int]) -> None:
        self._costs = costs
        self._words = list(costs)

    @classmethod
    def of(cls, tokenize: Callable[[str], Sequence[int]]) -> Words:
        return cls({word: len(tokenize(f" {word}")) for word in COMMON})

    def text(self, tokens: int, seed: object) -> str:
        """About `tokens` tokens; equal for equal seeds and different from the first words on for others."""
        chosen, random = list[str](), Random(repr(seed))
        while tokens > 0:
            chosen.append(random.choice(self._words))
            tokens -= self._costs[chosen[-1]]
        return " ".join(chosen)
