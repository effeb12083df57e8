# vLLM is not there where types are checked.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false
# pyright: reportUnknownParameterType=false
"""vLLM's view of a checkpoint: which of its layers firesteel reads, and which methods run them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.distributed import get_pp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import WeightsMapper

from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.integrations.vllm.experts import FiresteelExperts
from firesteel.integrations.vllm.limits import check_draft, check_load_format, draft_of
from firesteel.integrations.vllm.linear import FiresteelHead, FiresteelLinear
from firesteel.integrations.vllm.model import Model, why_not
from firesteel.integrations.vllm.support import METHOD
from firesteel.modules.kernels import host_settings
from firesteel.settings import Settings

__all__ = ["METHOD", "FiresteelConfig"]

# Before the names of modules of a draft model.
_DRAFT = "draft_model."

# vLLM shows what is logged under its own name alone.
log = init_logger("vllm.firesteel.config")


class FiresteelConfig(QuantizationConfig):
    """One model's quantisation, as vLLM asks for it.

    Tensors that firesteel reads are taken out of the engine's stream of weights by name, and read
    when a module's weights are done; all else the engine loads itself.

    Raises
        InvalidArgumentError: of `FIRESTEEL_*` variables.
    """

    def __init__(self) -> None:
        super().__init__()
        self._settings = host_settings()
        self._name: str | None = None
        self._revision: str | None = None
        self._model: Model | None = None
        self._is_checked = False
        self._draft: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For the engine's workers, each of which opens the checkpoint itself."""
        return {**self.__dict__, "_model": None}

    @property
    def model(self) -> Model:
        """The checkpoint."""
        if self._model is None:
            assert self._name is not None, "maybe_update_config was not called"
            self._model = Model.open(self._name, self._revision)
        return self._model

    def get_name(self) -> str:
        """As after `--quantization`."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Of activations."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Ten times the compute capability."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: `config.json` says it all."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FiresteelConfig:
        """The checkpoint's own config is read with its headers, not here."""
        del config
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Claim what the user says firesteel shall load; with FIRESTEEL_VLLM=auto, what it can."""
        if user_quant == METHOD:
            # A wrong value ends here, not when all weights are read.
            host_settings()
            return METHOD
        if user_quant is not None:
            return None
        try:
            claims = Settings.from_env().vllm == "auto"
        except InvalidArgumentError as error:
            # Of no concern to who has not asked for firesteel.
            log.warning("firesteel claims no model: %s", error)
            return None
        if not claims:
            return None
        reason = why_not(
            getattr(hf_config, "name_or_path", ""),
            hf_quant_cfg,
            getattr(hf_config, "model_type", None),
            getattr(hf_config, "_commit_hash", None),
        )
        if reason is not None:
            log.warning("firesteel leaves this model alone: %s", reason)
        return METHOD if reason is None else None

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Where the checkpoint is, before any module is made.

        Raises
            CheckpointError, UnsupportedError: it cannot be read exactly, or lacks a tensor.
            InvalidArgumentError: nothing of it is quantised.
        """
        self._name = model_name
        self._revision = getattr(hf_config, "_commit_hash", None) or revision
        if not self.model.is_quantized:
            raise InvalidArgumentError(
                f"quantization: got {METHOD!r}, must be None: nothing in {model_name} is quantised"
            )
        self.model.check_head(is_tied=bool(getattr(hf_config, "tie_word_embeddings", False)))
        self.model.check_complete()

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """How the engine's modules are called."""
        self.model.rename = hf_to_vllm_mapper.map_name

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """What loads and runs a module; None for the engine's own."""
        self._check_engine()
        # A draft model that is given its target's config comes after it, whatever else it says.
        is_draft = bool(self.model.read) or (
            get_current_vllm_config().model_config.runner_type == "draft"
        )
        method = None
        if not (is_draft and self._draft == "other"):
            method = self._method(layer, prefix.removeprefix(_DRAFT) if is_draft else prefix)
        if method is not None and is_draft:
            raise UnsupportedError(
                f"speculative_config: {prefix} of the draft model is quantised, must be plain: "
                "the engine's loaders of draft models do not let firesteel read"
            )
        return method or (UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None)

    def _check_engine(self) -> None:
        """Refuse options of the engine under which it would not load a model right.

        Once, when the first module is made: no hook before that is given them.
        """
        if self._is_checked:
            return
        config = get_current_vllm_config()
        check_load_format(config.load_config, self.model.checkpoint.path)
        check_draft(config, self.model.after_last)
        self._draft = draft_of(config)
        self._is_checked = True

    def _method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            found = self.model.experts(prefix)
            if found is None:
                return None
            return FiresteelExperts(layer.moe_config, self.model, found, self._settings)
        if not isinstance(layer, LinearBase | ParallelLMHead):
            return None
        sources = self.model.linears(prefix, self.packed_modules_mapping)
        if all(source is None for source in sources):
            return None
        kind = FiresteelLinear if isinstance(layer, LinearBase) else FiresteelHead
        return kind(self.model, sources)

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """Drops what firesteel reads; called when all modules are made, before weights are.

        Raises
            CheckpointError: a quantised matrix that no module took.
            UnsupportedError: weights are loaded a second time, or there is no room beside them.
        """
        if self.model.is_dropped or (self.model.read and self._draft is None):
            raise UnsupportedError(
                "reload_weights: quantised weights are read once; the engine may have dropped its "
                "own, start it again"
            )
        if self.model.read:
            # A draft model's, which vLLM loads after its target and with its config.
            return WeightsMapper()
        self.model.check_room()
        self.model.check_taken(has_head=get_pp_group().is_last_rank)
        # Asked for twice a load.
        log.info_once("firesteel reads %s", self.model.outline)
        scales = self.model.cache_scales
        if scales:
            log.warning_once(
                "%d scales of the KV cache in the checkpoint are not read, first %s",
                len(scales),
                scales[0],
            )
        return WeightsMapper(orig_to_new_regex=dict.fromkeys(self.model.patterns))
