"""LoRA: low-rank updates `x A^T B^T scale` beside frozen linears and routed experts (arXiv:2106.09685), one on a model or many at once, merged, read and written.

    adapt(model, LoraConfig(rank=64, targets="all-linear"))     train an adapter on a model
    put_adapter(model, read_peft(directory))                    one that exists
    AdapterBank(model, ...)                                     many over one base, each row of a batch with its own
    merge_lora(model)                                           into the weights
"""

from driftline.models.lora.adapter import Adapter, Scaling, Update
from driftline.models.lora.adapting import Merged, adapt, adapter_of, add_lora, merge_lora, put_adapter
from driftline.models.lora.bank import AdapterBank
from driftline.models.lora.config import ALL_LINEAR, TARGETS, LoraConfig
from driftline.models.lora.experts import LoraExpert, LoraExperts
from driftline.models.lora.linear import LoraLinear

__all__ = ["ALL_LINEAR", "TARGETS", "Adapter", "AdapterBank", "LoraConfig", "LoraExpert", "LoraExperts", "LoraLinear", "Merged", "Scaling", "Update", "adapt", "adapter_of",
           "add_lora", "merge_lora", "put_adapter"]
