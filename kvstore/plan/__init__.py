"""What to buy: the KV of a model, and the room and bandwidth a workload asks for.

layers.py     a Hugging Face config.json -> which layers keep KV, and for how long
weights.py    ... -> how many weights a token is multiplied by
model.py      both -> bytes per token, per prefix and per rank, and what prefill takes
sizing.py     a workload -> tier sizes for a hit ratio, by replays
hardware.py   those -> drives, bandwidth and cost
endurance.py  ... -> a write budget for fewer drives, and the hits it costs
"""

from kvstore.plan.endurance import Budgeted, within_endurance
from kvstore.plan.hardware import Drive, Needs, Prices, needs_of
from kvstore.plan.model import KV_DTYPES, ModelKV, load_model
from kvstore.plan.sizing import Sizing, Target, size_tiers

__all__ = [
    "KV_DTYPES",
    "Budgeted",
    "Drive",
    "ModelKV",
    "Needs",
    "Prices",
    "Sizing",
    "Target",
    "load_model",
    "needs_of",
    "size_tiers",
    "within_endurance",
]
