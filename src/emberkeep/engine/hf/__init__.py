"""The Hugging Face engine. torch and transformers are imported here and nowhere else."""

from emberkeep.engine.hf.engine import HfEngine
from emberkeep.engine.hf.loading import HfModel, HfSource, load_model
from emberkeep.engine.hf.opening import open_engine
from emberkeep.engine.hf.settings import HfSettings
from emberkeep.engine.hf.whole import HfWholeEngine

__all__ = ["HfEngine", "HfModel", "HfSettings", "HfSource", "HfWholeEngine", "load_model", "open_engine"]
