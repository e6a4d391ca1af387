"""``Strategy`` with the sections and fields of Paddle's."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

from .. import _strategy
from ..errors import InvalidArgumentError

#: The fields of each section and their defaults. The fields of ``""`` are the strategy's own.
_FIELDS: dict[str, dict[str, Any]] = {
    "": {
        "auto_mode": "semi", "gradient_scale": True, "gradient_scale_using_allreduce_avg": False,
        "use_cache": True, "return_numpy": True, "all_ranks": False, "split_data": True,
        "seed": None, "reinit": False,
    },
    "recompute": {
        "enable": False, "checkpoints": [], "no_recompute_segments": [], "sr": 0,
        "refined_ops_patterns": [], "enable_tuning": False,
    },
    "amp": {
        "enable": False, "dtype": "float16", "level": "o1", "init_loss_scaling": 32768.0,
        "incr_every_n_steps": 1000, "decr_every_n_nan_or_inf": 2, "incr_ratio": 2.0,
        "decr_ratio": 0.8, "use_dynamic_loss_scaling": True, "custom_white_list": [],
        "custom_black_list": [], "custom_black_varnames": [], "use_fp16_guard": False,
        "use_bf16_guard": False, "use_master_grad": False, "use_promote": True,
    },
    "sharding": {
        "enable": False, "stage": 1, "degree": 8, "enable_overlap": False,
        "param_comm_stream_num": 1, "grad_comm_stream_num": 1, "param_bucket_size_numel": 1,
        "grad_bucket_size_numel": 1, "enable_hierarchical_comm": False,
        "partition_algor": "greedy_even", "enable_tuning": False, "tuning_range": [],
        "release_gradients": False, "comm_buffer_size_MB": 256, "enable_tensor_fusion": False,
        "save_unbalanced_param": True,
    },
    "gradient_merge": {"enable": False, "k_steps": 1, "avg": True},
    "pipeline": {
        "enable": False, "schedule_mode": "1F1B", "pp_degree": 1, "vpp_degree": 1,
        "vpp_seg_method": "", "micro_batch_size": 1, "accumulate_steps": 1,
        "generation_batch_size": 1, "enable_send_recv_overlap": False,
        "job_schedule_profiler_start": -1, "job_schedule_profiler_stop": -1,
        "program_runtimes": [61, 72, 71, 34, 3], "memory_limit_times": -1, "split_backward": False,
        "auto_parallel_sync_shared_params": False,
    },
    "qat": {
        "enable": False, "channel_wise_abs_max": True, "weight_bits": 8, "activation_bits": 8,
        "not_quant_pattern": ["skip_quant"], "algo": None, "onnx_format": True,
    },
    "tuning": {
        "enable": False, "profile_start_step": 1, "profile_end_step": 1, "run_after_tuning": True,
        "debug": False,
    },
    "dataset": {"enable": False, "num_shards": 1},
    "fused_passes": {"enable": False, "fused_passes_list": []},
    "fused_linear_promotion": {"enable": False},
    "dp_optimization": {
        "enable": False, "fuse_all_reduce_ops": True, "fuse_grad_size_in_MB": 32,
        "overlap_comm_cacl": True, "gradient_sync_after_accumulate": False,
    },
    "mp_optimization": {
        "allreduce_matmul_grad_overlapping": False, "replace_with_c_embedding": False,
        "replace_with_parallel_cross_entropy": False,
    },
    "sp_optimization": {"enable": True},
}  # fmt: skip

#: The settings that would change the results and are not supported, and what to do instead.
_REFUSED = {
    "amp.enable": "run the layer's forward under paddle.amp.auto_cast",
    "gradient_merge.enable": "with avg, a call with the whole batch makes the same step; to save "
    "memory, train with group_sharded_parallel, which accumulates the gradients of several "
    "backward passes",
    "pipeline.enable": "use a mesh without pipeline stages",
    "qat.enable": "quantise the layer before to_static",
    "gradient_scale": "scale the loss",
}

#: The settings that have an effect.
_USED = ("sharding.enable", "sharding.stage")


class Strategy(_strategy.Strategy):
    """The settings with which a :class:`~zeroshard.paddle.DistModel` is trained.

    It has all sections and fields of Paddle's strategy, and ``sharding.enable`` and
    ``sharding.stage`` have an effect. ``to_static`` raises an error for the other settings that
    would change the results (``amp``, ``gradient_merge``, ``pipeline``, ``qat``,
    ``gradient_scale``), and warns of the rest if they are not the defaults.
    """

    sharding: Any

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """``config``: ``{"sharding": {"enable": True, "stage": 2}}``, for example."""
        super().__init__()
        given = dict(config or {})
        for section, fields in _FIELDS.items():
            if section:
                self._set(SimpleNamespace(), section, given.pop(section, None) or {}, fields)
        self._set(self, "", given, _FIELDS[""])

    def _set(
        self, target: Any, section: str, values: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> None:
        if not isinstance(values, Mapping):
            raise InvalidArgumentError(
                f"the section {section!r} of the strategy's config is {values!r}; it must be a dict"
            )
        unknown = [name for name in values if name not in fields]
        if unknown:
            known = [*fields, *(() if section else filter(None, _FIELDS))]
            raise InvalidArgumentError(
                f"the strategy's config has the unknown keys {unknown}"
                f"{f' in section {section!r}' if section else ''}; use {', '.join(known)}"
            )
        vars(target).update(deepcopy({**fields, **values}))
        if section:
            setattr(self, section, target)

    def check(self) -> None:
        """Warns of settings without an effect. Raises an error for settings that would change the
        results and are not supported."""
        unused = []
        for section, fields in _FIELDS.items():
            own = vars(getattr(self, section) if section else self)
            on = own.get("enable", True)
            for name, default in fields.items():
                path = f"{section}.{name}" if section else name
                if path in _USED or own[name] == default or not on and name != "enable":
                    continue
                if path in _REFUSED:
                    raise InvalidArgumentError(
                        f"{path} of the strategy is {own[name]!r}, which is not supported; "
                        f"{_REFUSED[path]}"
                    )
                unused.append(path)
        if unused:
            warnings.warn(
                f"settings of the strategy without an effect: {', '.join(unused)}", stacklevel=4
            )
