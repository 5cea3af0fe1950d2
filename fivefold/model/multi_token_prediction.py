"""Multi-token prediction."""

from fivefold.bounded_types import Layers, Positive
from fivefold.record import Record


class MTP(Record):
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437 §2.2): ``depth`` modules, each a token further ahead.

    The training loss is that of the next token + ``coefficient`` / ``depth`` · Σ of the losses of the modules.
    """

    depth: Layers = 1  # modules, each of which predicts one token further ahead
    coefficient: Positive = 0.3  # weight of the modules' losses
