"""Turns a run's state into what torch.distributed.checkpoint wants: parameter names, no wrappers.

So a state that DDP saved with 4 members can be restored by FSDP2 with 3.
"""

from __future__ import annotations

import copy
from typing import Any

from shoal.train.errors import TrainError

State = dict[str, Any]


def collect(state: State) -> State:
    """The current values: models and optimizers under torch's own names, other objects through
    their `state_dict`, tensors and plain values as they are."""
    from torch import nn, optim
    from torch.distributed.checkpoint import state_dict as by_name

    collected: State = {}
    for name, value in state.items():
        if isinstance(value, nn.Module):
            collected[name] = by_name.get_model_state_dict(value)
        elif isinstance(value, optim.Optimizer):
            collected[name] = by_name.get_optimizer_state_dict(model_of(value, state, name), value)
        elif hasattr(value, "state_dict"):
            collected[name] = value.state_dict()
        else:
            collected[name] = value
    return collected


def put_back(state: State, collected: State) -> None:
    """The reverse of `collect`: into the same objects; plain values go into the dict itself."""
    from torch import Tensor, nn, optim
    from torch.distributed.checkpoint import state_dict as by_name

    for name, value in state.items():
        if isinstance(value, nn.Module):
            by_name.set_model_state_dict(value, collected[name])
        elif isinstance(value, optim.Optimizer):
            model = model_of(value, state, name)
            by_name.set_optimizer_state_dict(model, value, collected[name])
        elif hasattr(value, "load_state_dict"):
            value.load_state_dict(collected[name])
        elif not isinstance(value, Tensor):  # a tensor is filled in place
            state[name] = collected[name]


def frozen(value: Any) -> Any:
    """Copies plain values now, so that the loop may change them. The stager copies tensors."""
    from torch import Tensor

    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(frozen(item) for item in value)
    return copy.deepcopy(value)


def model_of(optimizer: Any, state: State, name: str) -> Any:
    """The model whose parameters an optimizer changes: the optimizer's state uses their names."""
    from torch import nn

    changed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in state.values():
        if isinstance(model, nn.Module) and any(id(p) in changed for p in model.parameters()):
            return model
    raise TrainError(
        f"state[{name!r}] is an optimizer whose model is not in the state: "
        "save both, as ctx.save({'model': model, 'optimizer': optimizer})"
    )


def check(state: object) -> State:
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise TrainError(
            "the state to save is a dict of names, as {'model': model, 'optimizer': optimizer}, "
            f"not {type(state).__name__}"
        )
    return state
