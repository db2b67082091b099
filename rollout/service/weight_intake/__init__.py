"""The engine's end of every weight transport: `intake` orders the work, `files`, `segments` and their like carry the bytes.

Only this package and the engine host touch the engine.
"""

from rollout.service.weight_intake.files import open_weights_file
from rollout.service.weight_intake.intake import StagedFile, WeightIntake

__all__ = ["StagedFile", "WeightIntake", "open_weights_file"]
