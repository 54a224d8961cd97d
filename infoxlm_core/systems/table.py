"""The pre-training systems by their name in `pretraining.system`."""

from infoxlm_core.systems.bert import BERTSystem
from infoxlm_core.systems.infoxlm.system import InfoXLMSystem
from infoxlm_core.systems.system import System
from infoxlm_core.systems.xlm import XLMSystem

SYSTEMS: dict[str, System] = {"infoxlm": InfoXLMSystem(), "xlm": XLMSystem(), "bert": BERTSystem()}
