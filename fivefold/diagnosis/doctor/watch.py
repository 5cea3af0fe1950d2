"""Record a step that has no schedule: forward, backward, recompute and update are derived from torch's state.

    in the autograd engine → backward; with gradients on or a module running → recompute; in Optimizer.step → update

The recorder also records the role of each storage, and the calls of modules that might be recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_iter

from fivefold.dry_run.record.recorder import READ_SCALAR, TapeRecorder
from fivefold.dry_run.record.tape import KERNEL, CodeSite, Kernel, Scope, Tape
from fivefold.errors import UserError
from fivefold.trainer.measure.meter import list_tensors

aten = torch.ops.aten
DOCTOR_FOLDER = str(Path(__file__).parent)
SUPPORTED_DEVICES = ("cpu", "meta")
CUDA = "leave the device to the doctor: build the model and its inputs on the default device, as it holds no numbers"
SPLIT_ATTENTION = "aten::_safe_softmax"  # occurs only in unfused scaled_dot_product_attention


class Role(NamedTuple):
    """The known category of a storage, and the name of its parameter, buffer or optimizer state ("" for inputs)."""

    category: str
    name: str


class ForwardCall(NamedTuple):
    """A forward call of a module, from event ``begin`` to ``end`` of the tape."""

    module: str
    tape: Tape
    begin: int
    end: int
    inputs: frozenset[int]  # storage ids
    outputs: frozenset[int]


class ModuleRecorder(TapeRecorder):
    """A recorder of a user's step on one rank. ``roles``: the role of each storage, by its id.

    ``calls``: the calls of followed modules.
    """

    def __init__(self) -> None:
        super().__init__(rank=0, skipped_files=(__file__,))
        self.memo: MutableMapping[Any, Any] | None = None  # memo of fake tensors, cleared while the model is built
        self.roles: dict[int, Role] = {}
        self.calls: list[ForwardCall] = []
        self.remarks: dict[str, None] = {}
        self.updating = False
        self._phase, self._making_inputs, self._micro_batch = "", False, -1

    # Hooks

    @contextmanager
    def install_hooks(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, modules: Iterable[str]
    ) -> Iterator[None]:
        """Install hooks on all modules, gradients and the optimizer; record the calls of ``modules``."""
        parameters = dict(model.named_parameters())
        with ExitStack() as stack:
            stack.enter_context(self.call_sites.install_hooks(model))
            hooks: list[Any] = [register_module_forward_pre_hook(self._on_module)]
            hooks += [
                parameter.register_post_accumulate_grad_hook(self._make_gradient_hook(name))
                for name, parameter in parameters.items()
                if parameter.requires_grad
            ]
            hooks += [
                optimizer.register_step_pre_hook(self._on_update_begin),
                optimizer.register_step_post_hook(self._on_update_end),
            ]
            for path in modules:
                part = model.get_submodule(path)
                starts = list[tuple[int, frozenset[int]]]()
                hooks.append(part.register_forward_pre_hook(self._make_begin_hook(starts), with_kwargs=True))
                hooks.append(part.register_forward_hook(self._make_end_hook(path, starts), with_kwargs=True))
            for hook in hooks:
                stack.callback(hook.remove)
            yield

    def begin(self) -> None:
        """Begin a new step on a new tape."""
        self.finish_tape()
        self._phase, self._making_inputs = "", True

    def note(self, named_tensors: Iterable[tuple[str, Tensor]], category: str) -> None:
        """Set the role of these (name, tensor) pairs; an unknown storage is recorded as allocated now."""
        for name, tensor in named_tensors:
            if tensor.untyped_storage().nbytes():
                if tensor.untyped_storage()._cdata not in self._ids:
                    self.set_category([tensor], category)
                self.roles[self.storage_id(tensor)] = Role(category, name)

    def _on_module(self, _module: nn.Module, _inputs: object) -> None:
        self._making_inputs = False

    def _make_gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        def on_gradient(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self.note([(name, parameter.grad)], "gradients")

        return on_gradient

    def _on_update_begin(self, *_: object) -> None:
        self.updating = True

    def _on_update_end(self, *_: object) -> None:
        self.updating = False

    def _make_begin_hook(self, starts: list[tuple[int, frozenset[int]]]) -> Callable[..., None]:
        def on_begin(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._update_scope()
            starts.append((self.count_events(), self._find_storages((args, kwargs))))

        return on_begin

    def _make_end_hook(self, path: str, starts: list[tuple[int, frozenset[int]]]) -> Callable[..., None]:
        def on_end(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            begin, inputs = starts.pop()
            if self._phase == "forward":
                self.calls.append(
                    ForwardCall(path, self.tape, begin, self.count_events(), inputs, self._find_storages(output))
                )

        return on_end

    def _find_storages(self, tree: Any) -> frozenset[int]:
        addresses = (leaf.untyped_storage()._cdata for leaf in tree_iter(tree) if isinstance(leaf, Tensor))
        return frozenset(self._ids[address] for address in addresses if address in self._ids)

    # Operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the operation in its scope; raises ``UserError`` for a device other than the CPU."""
        device = (kwargs or {}).get("device")
        if device is not None and torch.device(device).type not in SUPPORTED_DEVICES:
            raise UserError(f"{self._find_line()}: a tensor goes to {device}; {CUDA}")
        self._update_scope()
        if func is READ_SCALAR:
            return self._choose_scalar(func, args)
        if func.name() == SPLIT_ATTENTION:
            self._add_remark(
                f"{self._find_line()}: attention runs as separate products (dropout, or a mask that is learnt); "
                "flash attention on a GPU keeps less"
            )
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.memo:  # its weak references would make model.bfloat16() fail
            self.memo.clear()
        return out

    def _update_scope(self) -> None:
        """Enter a new scope if the phase (forward, backward, recompute, update) has changed."""
        phase = "forward"
        if torch._C._current_graph_task_id() != -1:
            phase = "recompute" if torch.is_grad_enabled() or self.call_sites.module else "backward"
        elif self.updating:
            phase = "update"
        if phase != self._phase:
            if phase == "forward":
                self._making_inputs, self._micro_batch = True, self._micro_batch + 1
            self._phase = phase
            self.enter_scope(Scope(phase, -1, self._micro_batch))

    def _choose_scalar(self, func: Any, args: Any) -> Any:
        """Return a value for ``.item()``: 1 in an update, a known constant, else 0 or False with a remark."""
        dtype = args[0].dtype
        if self.updating:
            return 1  # the optimizer's step counter
        try:
            return func(*args)  # a constant that the fake tensor knows
        except DataDependentOutputException:
            pass
        if dtype != torch.bool and not dtype.is_floating_point:
            raise UserError(
                f"{self._find_line()}: reads a number from a tensor (.item(), .tolist()), "
                "but fake tensors hold no data; "
                "compute it from shapes, or leave it out"
            )
        assumed_value = "False, and a branch on it is not taken" if dtype == torch.bool else "0"
        self._add_remark(f"{self._find_line()}: asks a tensor for its value; the doctor assumes {assumed_value}")
        return False if dtype == torch.bool else 0.0

    def _record_kernel(self, func: Any, args: Any, out: Any, outputs: list[Tensor], frame: FrameType) -> None:
        """Record a convolution, whose FLOPs the base class does not count; leave other kernels to it."""
        flops = _count_convolution_flops(func, args, out)
        if not flops:
            if torch.is_autocast_enabled("cuda"):
                self._add_remark(
                    "torch.autocast('cuda') does nothing to tensors on the CPU: write autocast('cpu') here"
                )
            super()._record_kernel(func, args, out, outputs, frame)
            return
        self._flush()
        moved_bytes = sum(tensor.nbytes for tensor in list_tensors(args)) + sum(tensor.nbytes for tensor in outputs)
        site = self.tape.site(self.call_sites.site(func, frame))
        kernel = Kernel("convolution", (), str(outputs[0].dtype).removeprefix("torch."), flops, moved_bytes, 1, site)
        self.tape.add(KERNEL, self.tape.kernel(kernel))

    def _register_storage(self, key: int, size: int, site: CodeSite) -> None:
        if self._making_inputs and self._phase == "forward":
            self.roles[key] = Role("inputs", "")
        super()._register_storage(key, size, site)

    def _add_remark(self, remark: str) -> None:
        self.remarks[remark] = None

    def _find_line(self) -> str:
        frame = self.call_sites.find_frame()
        return f"{shorten_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def shorten_path(file: str) -> str:
    """Shorten a path: from the package name on if in site-packages, else relative to the current folder."""
    package = file.rpartition("site-packages/")[2]
    return package.removeprefix(f"{Path.cwd()}/")


def _count_convolution_flops(func: Any, args: Any, out: Any) -> int:
    """Return 2 FLOPs per weight of a group's filter and output element (input element if transposed), or 0.

    The result is 0 for operations other than convolutions. The backward costs the same for the input and again for the
    weight, each only if its gradient is needed.
    """
    if func is aten.convolution.default:
        x, weight, transposed, gradients, y = args[0], args[1], args[6], 1, out
    elif func is aten.convolution_backward.default:
        y = args[0]
        x = args[1]
        weight = args[2]
        transposed = args[7]
        gradients = sum(args[10][:2])
    else:
        return 0
    pairs = int((x if transposed else y).numel()) * int(weight[0].numel())
    return 2 * gradients * pairs
