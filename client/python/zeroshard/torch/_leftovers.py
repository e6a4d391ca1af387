"""Calls of other libraries that a script has kept, and what replaces them."""

from __future__ import annotations

#: By the name of the method of FSDP's modules, or of DeepSpeed's engine.
_REPLACEMENTS = {
    # FSDP
    "unshard": "remove the call, since parameters are fetched when they are used; for all of them "
    "at once, use `with model.summon_full_params():`",
    "reshard": "remove the call, since parameters are freed after their use",
    "set_requires_gradient_sync": "run the forward passes that only accumulate gradients under "
    "`with model.no_sync():`",
    "set_is_last_backward": "run the forward passes that only accumulate gradients under "
    "`with model.no_sync():`",
    "set_reshard_after_forward": "remove the call, since the level of group_sharded_parallel "
    "decides what is on this worker",
    "set_reshard_after_backward": "remove the call, since the level of group_sharded_parallel "
    "decides what is on this worker",
    "set_modules_to_forward_prefetch": "remove the call, since the order of the modules is learned",
    "set_modules_to_backward_prefetch": "remove the call, since the order of the modules is "
    "learned",
    "clip_grad_norm_": "use torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
    # DeepSpeed
    "backward": "call loss.backward()",
    "step": "call optimizer.step(), optimizer.zero_grad() and scheduler.step()",
    "is_gradient_accumulation_boundary": "count the passes in the script, and pass "
    "accumulation_steps to group_sharded_parallel",
    "gradient_accumulation_steps": "pass accumulation_steps to group_sharded_parallel",
    "get_global_grad_norm": "use optimizer.last_report.gradient_norm",
    "save_checkpoint": "use zeroshard.Checkpoints, or torch.save of model.state_dict() and "
    "optimizer.state_dict()",
    "load_checkpoint": "use zeroshard.Checkpoints, or load_state_dict of the model and the "
    "optimizer",
    "save_16bit_model": "use zeroshard.torch.save_group_sharded_model",
}


def missing(wrapper: str, name: str, error: AttributeError) -> AttributeError:
    """The error for an attribute that neither a wrapper nor its module has."""
    replacement = _REPLACEMENTS.get(name)
    if replacement is None:
        return error
    found = AttributeError(
        f"{wrapper} has no {name}(), which is FSDP's or DeepSpeed's; {replacement}"
    )
    found.name = name
    return found
