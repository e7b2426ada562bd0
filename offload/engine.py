"""Applies a plan to modules, moves its groups, and undoes it.

`apply_plan` returns a `Placement`. Calls of modules pass through gates; there a group comes in before the call that
needs it and goes when the plan says so. The modules hold the placement; it holds them by weak references only, so that
dropping a model frees its memory at once.
"""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from diffusion_core.errors import PlacementError
from diffusion_core.logging import get_logger

from .calls import Call, Lane, Run, needed
from .gates import CALL, Override, Watcher, remove_override, unwatch, watch
from .groups import LiveGroup, Place, room_beside
from .hoisting import Hoisting, serve
from .homes import Homes
from .order import END, Order
from .plan import Plan, Strategy, Until
from .quantized import apart, put_together, take_apart
from .send import first_device, send
from .structure import check_movable, fingerprint, named_tensors, nbytes, submodules, tensor_names
from .transfer import StreamTransfer, Transfer, has_streams

logger = get_logger(__name__)
_LONGEST_CHAIN = 256
# Modules of one group are called with no more than so many other calls in between, else it goes and comes again.
_NEAR = 8
# Methods of models of `transformers` that compute without a call of the model itself.
_FOREIGN = ("get_image_features", "get_text_features")

Modules = nn.Module | Mapping[str, nn.Module]
# For each module that is placed, and for each of its parts: the placement, and the part's name in it.
_owners: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[Placement], str]] = weakref.WeakKeyDictionary()


class Placement:
    """A plan that is applied; made by `apply_plan`.

    Attributes:
        plan: the plan as it is applied now.
        modules: the modules by name, those that still exist; a single one is called "".
    """

    def __init__(self, modules: Mapping[str, nn.Module], plan: Plan, strategy: Strategy | None, lane: Lane) -> None:
        self.plan = plan
        self._strategy = strategy
        self._roots = {name: weakref.ref(module) for name, module in modules.items()}
        self._lane = lane
        self._lock = lane.lock
        self._run = Run()
        self._order = Order()
        self._seen: dict[str, None] = {}
        self._homes = Homes(plan.transfers)
        self._groups: list[LiveGroup] = []
        self._groups_of: list[list[LiveGroup]] = []
        self._by_module: dict[str, list[LiveGroup]] = {}
        self._gates: list[tuple[weakref.ref[nn.Module], str]] = []
        self._numbers: dict[tuple[str, str], int] = {}
        self._generation = 0
        self._most_ahead = 0
        self._several_devices = False
        self._running = 0
        self._inside: dict[LiveGroup, None] = {}
        self._ahead: dict[LiveGroup, None] = {}
        self._shape: list[Any] = []
        self._hoistings: list[Hoisting] = []
        self._transfers: dict[torch.device, Transfer] = {}
        self._removed = False

    # ---- what callers use ----

    @property
    def modules(self) -> dict[str, nn.Module]:
        """See the class."""
        found = {name: reference() for name, reference in self._roots.items()}
        return {name: module for name, module in found.items() if module is not None}

    @property
    def execution_device(self) -> torch.device:
        """Where the modules compute."""
        return self.plan.device

    def device_of(self, module: nn.Module) -> torch.device:
        """Where one of the modules, or a part of it, computes."""
        owner = _owners.get(module)
        name = owner[1] if owner is not None and owner[0]() is self else ""
        groups = self._by_module.get(name)
        return groups[0].spec.device if groups else self.plan.device

    @property
    def resident_bytes(self) -> int:
        """Bytes that are on the devices now."""
        return sum(group.size for group in self._groups if group.is_in)

    def keeps_on(self, device: torch.device) -> bool:
        """Whether all tensors are on a device, once what calls have brought in is let go."""
        self.free()
        return all(tensor.device == device for group in self._groups for tensor in group.tensors())

    def free(self) -> None:
        """Let go of all groups that no call is using; resident ones stay."""
        with self._lock:
            for group in [*self._inside]:
                self._let_go(group)
            for group in [*self._lane.groups]:
                if not group.active:
                    group.let_go()

    def remove(self) -> None:
        """Undo the plan: every tensor is back where it was, and no hooks, files or pinned memory are left.

        Raises:
            PlacementError: a call is going on.
        """
        with self._lock:
            self._refuse_during_calls("remove the placement")
            if self._removed:
                return
            self._removed = True
            self._unbind()
            self._homes.restore(self._places())
            for module in self.modules.values():
                self._disown(module)
            self._roots = {}

    def forget(self, name: str) -> None:
        """Undo the plan for one of several modules, for another placement to take it over."""
        with self._lock:
            self._refuse_during_calls(f"move {name!r} to another placement")
            if set(self._roots) <= {name}:
                self.remove()
                return
            self._unbind()
            self._homes.restore({key: places for key, places in self._places().items() if _first(key) == name})
            module = self._roots.pop(name)()
            if module is not None:
                self._disown(module)
            groups = [group for group in self.plan.groups if {_first(tensor) for tensor in group.tensors} != {name}]
            plan = replace(self.plan, groups=tuple(groups))
            self._bind(plan if self._strategy is None else self._strategy(self._as_module(), [*self._seen]))

    # ---- binding a plan to the modules ----

    def bind(self) -> None:
        """Apply the plan; if it fails, undo what was done."""
        with self._lock:
            try:
                self._bind(self.plan)
            except BaseException:
                self.remove()
                raise

    def _bind(self, plan: Plan) -> None:
        root = self._as_module()
        take_apart(root)
        places = self._places()
        plan.check(places, (name for name, _ in submodules(root)))
        self.plan = plan
        self._settle(places)
        sizes = nbytes(root)
        largest = max(
            (sum(sizes[t] for t in g.tensors) for g in plan.groups if g.until is not Until.REMOVED), default=0
        )
        self._several_devices = len(plan.devices) > 1
        for device in plan.devices:
            self._transfers.setdefault(device, self._transfer(device, largest))
        self._most_ahead = plan.transfers.ahead_bytes or (1 << 62)
        self._groups = [
            LiveGroup(group, [places[name] for name in group.tensors], self._transfers[group.device])
            for group in plan.groups
        ]
        self._by_module = {}
        for group in self._groups:
            if group.spec.until is Until.NEXT:
                self._lane.groups.add(group)
            for name in group.spec.modules:
                self._by_module.setdefault(name, []).append(group)
        self._install(root)
        self._hoistings = serve(self)
        self._shape = fingerprint(self.modules.values())
        for group in self._groups:
            if group.spec.until is Until.REMOVED:
                group.bring_in()
                group.wait()

    def _settle(self, places: Mapping[str, list[Place]]) -> None:
        for group in self.plan.groups:
            self._homes.settle({name: places[name] for name in group.tensors}, group.home)

    def _install(self, root: nn.Module) -> None:
        self._groups_of, self._numbers = [], {}
        self._generation += 1
        for name, module in submodules(root):
            _owners[module] = weakref.ref(self), name
            groups = self._by_module.get(name, [])
            if name not in self._roots and not groups:
                continue
            stated = (*getattr(module, "_entry_points", ()), *(_FOREIGN if name in self._roots else ()))
            methods = [method for method in stated if method != "forward" and callable(getattr(module, method, None))]
            for method in dict.fromkeys([CALL, *methods]):
                self._numbers[name, method] = len(self._groups_of)
                self._groups_of.append(groups)
                watch(module, method, Call(self, name, method))
                self._gates.append((weakref.ref(module), method))
        for module in self.modules.values():
            Override(module, "_apply", self._apply)
            for method in ("state_dict", "load_state_dict"):
                Override(module, method, self._at_home)

    def _unbind(self) -> None:
        self.free()
        for group in self._groups:
            group.let_go()
            self._lane.groups.discard(group)
        for hoisting in self._hoistings:
            hoisting.remove()
        for reference, method in self._gates:
            module = reference()
            if module is not None:
                unwatch(module, method, self._is_mine)
        for module in self.modules.values():
            remove_override(module, "_apply", self._apply)
            for method in ("state_dict", "load_state_dict"):
                remove_override(module, method, self._at_home)
        self._groups, self._groups_of, self._gates, self._by_module, self._hoistings = [], [], [], {}, []
        self._transfers.clear()
        self._order = Order()

    def _rebind(self) -> None:
        """The structure or the known order of calls has changed: make the plan anew."""
        root = self._as_module()
        take_apart(root)
        plan = self.plan if self._strategy is None else self._strategy(root, [*self._seen])
        plan.check(tensor_names(root), (name for name, _ in submodules(root)))
        self._unbind()
        self._bind(plan)

    def _is_mine(self, watcher: Watcher) -> bool:
        return isinstance(watcher, Call) and watcher.placement is self

    def _disown(self, module: nn.Module) -> None:
        # What a device map has noted about the module holds no longer.
        module.__dict__.pop("hf_device_map", None)
        for part in module.modules():
            if placement_of(part) is self:
                del _owners[part]
        put_together(module.modules())

    def _as_module(self) -> nn.Module:
        return as_module(self.modules)

    def _places(self) -> dict[str, list[Place]]:
        root = self._as_module()
        found: dict[str, list[Place]] = {}
        for first, names in tensor_names(root).items():
            parts = [name.rpartition(".") for name in names]
            found[first] = [Place(root.get_submodule(path), leaf) for path, _, leaf in parts]
        return found

    def _transfer(self, device: torch.device, largest: int) -> Transfer:
        options = self.plan.transfers
        if not (options.streams and has_streams(device)):
            return Transfer(device, options.non_blocking)
        budget = self._homes.pinned_budget
        return StreamTransfer(device, record_stream=options.record_stream, pinned_budget=budget, largest=largest)

    # ---- calls ----

    def enter(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call begins: bring in what it needs."""
        run = self._run
        with self._lock:
            outermost = not run.callers
            if outermost and not self._running:
                self._keep_up()
            if call.generation != self._generation:
                call.generation = self._generation
                call.number = self._numbers[call.name, call.method]
                call.groups = self._groups_of[call.number]
            self._running += outermost
            run.callers.append(None)
            for group in call.needed:
                group.active += 1
            try:
                self._seen.setdefault(call.name)
                self._order.note(run.before, run.call, call.number)
                run.before, run.call = run.call, call.number
                self._use(call.needed)
                return self._move_inputs(call, run, outermost, args, kwargs)
            except BaseException:
                self.leave(call)
                raise

    def result(self, call: Call, output: Any) -> Any:
        """What a call returns, on the caller's device if the plan says so.

        Now that all its work is launched, fetch what comes next: if the host has to wait for copies, the device has
        something to do meanwhile.
        """
        with self._lock:
            self._fetch_ahead(self._run, call.needed)
        caller = self._run.callers[-1]
        return output if caller is None else send(output, caller)

    def leave(self, call: Call) -> None:
        """A call ends, in whatever way: let go of what is not needed any more."""
        run = self._run
        with self._lock:
            if self._ahead and isinstance(sys.exc_info()[1], torch.OutOfMemoryError):
                self._fetch_less()
            for group in call.needed:
                group.active -= 1
            run.callers.pop()
            if not run.callers:
                self._running -= 1
                self._finish(run)
                return
            for group in call.needed:
                if group.spec.until is Until.USED and not self._is_wanted(group, run):
                    self._let_go(group)

    def _is_wanted(self, group: LiveGroup, run: Run) -> bool:
        """Whether to keep a group after a call: one module's if it is called again at once, several modules' until
        the last of them has been called. Before that is known, these are kept until another such group comes in."""
        if run.call is None:
            return False
        if len(group.spec.modules) == 1:
            following = self._order.after(run.before, run.call)
            return following is not None and following != END and group in self._groups_of[following]
        coming = self._order.chain(run.before, run.call, _NEAR)
        known = self._order.after(run.before, run.call) is not None
        return not known or any(group in self._groups_of[number] for number in coming)

    def _keep_up(self) -> None:
        if fingerprint(self.modules.values()) != self._shape:
            logger.info("the structure of the module has changed; %s is planned anew", self.plan.name)
            self._rebind()

    def _finish(self, run: Run) -> None:
        self._order.note(run.before, run.call, END)
        run.before = run.call = None
        for group in [*self._inside]:
            if group.spec.until is Until.USED:
                self._let_go(group)
        runs = any(len(group.spec.modules) > 1 and group.spec.until is Until.USED for group in self._groups)
        if self._strategy is not None and runs and not self._running:
            plan = self._strategy(self._as_module(), [*self._seen])
            if plan.groups != self.plan.groups:
                self._rebind()

    def _use(self, groups: Iterable[LiveGroup]) -> None:
        for group in groups:
            if group.spec.until is Until.NEXT and not group.is_in:
                for other in [*self._lane.groups]:
                    if other is not group and not other.active:
                        other.let_go()
        large = any(len(group.spec.modules) > 1 and not group.is_in for group in groups)
        for group in [*self._inside]:
            replaced = large or len(group.spec.modules) == 1
            if replaced and group.spec.until is Until.USED and group not in self._ahead:
                self._let_go(group)
        for group in groups:
            self._ahead.pop(group, None)
            if group.moves:
                self._bring_in(group)
            group.wait()

    def _bring_in(self, group: LiveGroup) -> None:
        if group.is_in:
            return
        try:
            group.bring_in()
        except torch.OutOfMemoryError:
            # What is only kept or fetched ahead makes room.
            self.free()
            group.bring_in()
        self._inside[group] = None

    def _let_go(self, group: LiveGroup) -> None:
        if group.active == 0:
            self._inside.pop(group, None)
            self._ahead.pop(group, None)
            group.let_go()

    def _fetch_ahead(self, run: Run, using: Sequence[LiveGroup]) -> None:
        """Start the way of the groups that the next calls need, and drop those that were expected but are not now."""
        options = self.plan.transfers
        if not options.streams or run.call is None:
            return
        wanted: dict[LiveGroup, None] = {}
        size = 0
        room = room_beside(using)
        for number in self._order.chain(run.before, run.call, _LONGEST_CHAIN):
            new = [group for group in needed(self._groups_of[number]) if group not in wanted and self._may_come(group)]
            more = sum(group.size for group in new)
            size += more
            if wanted and (len(wanted) + len(new) > options.ahead or size > self._most_ahead or more > room):
                break
            # What is fetched now is still there when the calls before it compute.
            room = min(room - more, room_beside(needed(self._groups_of[number])))
            wanted.update(dict.fromkeys(new))
        for group in [*self._ahead]:
            if group not in wanted:
                self._let_go(group)
        for group in wanted:
            try:
                group.bring_in()
            except torch.OutOfMemoryError:
                self._fetch_less()
                break
            self._inside[group] = self._ahead[group] = None

    def _may_come(self, group: LiveGroup) -> bool:
        return group.spec.until is Until.USED and not group.active and (not group.is_in or group in self._ahead)

    def _fetch_less(self) -> None:
        """Memory is short, and calls need room too: from now on, fetch half as much ahead."""
        self._most_ahead = sum(group.size for group in self._ahead) // 2
        for group in [*self._ahead]:
            self._let_go(group)

    def _move_inputs(
        self, call: Call, run: Run, outermost: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        inner = self._several_devices and bool(call.groups)
        returns = call.name in self.plan.returns or (outermost and self.plan.return_outputs)
        if not (outermost or inner or returns):
            return args, kwargs
        if returns:
            run.callers[-1] = first_device((args, kwargs))
        device = call.groups[0].spec.device if call.groups else self.plan.device
        kept = {name: value for name, value in kwargs.items() if name in self.plan.exclude_kwargs}
        return send(args, device), {**send(kwargs, device), **kept}

    # ---- changes from outside ----

    def _at_home(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self.free()
            return original(*args, **kwargs)

    def _apply(
        self, original: Callable[..., Any], fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        """`module.to` and its kin: a new dtype is for the masters, a new device is refused."""
        with self._lock:
            if not self._running:
                self.free()
            devices = {tensor.device for group in self._groups for tensor in group.tensors()} or {torch.device("cpu")}
            for device in devices:
                target = fn(torch.empty(0, device=device)).device
                if target != device:
                    raise PlacementError(
                        f"the module is under {self.plan.name}, so it cannot be moved to {target}; "
                        f"call {self.plan.remedy} first"
                    )
            self._refuse_during_calls("convert the module")
            result = original(fn, *args, **kwargs)
            if fingerprint(self.modules.values()) != self._shape:
                self._rebind()
                return result
            self._settle(self._places())
            for group in self._groups:
                group.measure()
            return result

    def _refuse_during_calls(self, what: str) -> None:
        if self._running:
            raise PlacementError(f"cannot {what} while a call is using it; do it before or after the call")


def apply_plan(modules: Modules, plan: Plan | Strategy, *, lane: Lane | None = None) -> Placement:
    """Place the tensors of a module, or of several that work together, as a plan says.

    A plan that a module is under already is taken back first; so is what its parts are under.

    Args:
        modules: a module, or the components of a pipeline by name; the plan's names then begin with theirs.
        plan: the plan, or a strategy that makes it, now and when the module's structure changes.
        lane: shares `Until.NEXT` with other placements.

    Returns:
        the placement; `remove()` undoes it.

    Raises:
        PlacementError: the plan does not fit, a tensor has no values or cannot move, or only a part of a module that
            is placed already would be placed anew. Nothing is changed then.
    """
    named = dict(modules) if isinstance(modules, Mapping) else {"": modules}
    root = as_module(named)
    check_movable(root)
    with apart(root):
        made = plan if isinstance(plan, Plan) else plan(root, ())
        made.check(tensor_names(root), (name for name, _ in submodules(root)))
        before = _replaced(named)
        lanes = [each._lane for each, _ in before if any(g.until is Until.NEXT for g in each.plan.groups)]
        for placement, names in before:
            for name in names:
                placement.forget(name)
        own_lane = lane or (lanes[0] if lanes else Lane())
        placement = Placement(named, made, None if isinstance(plan, Plan) else plan, own_lane)
        placement.bind()
    return placement


def placement_of(module: nn.Module) -> Placement | None:
    """The placement that a module is under, as a whole or as a part."""
    owner = _owners.get(module)
    return None if owner is None else owner[0]()


def execution_device(module: nn.Module) -> torch.device:
    """Where a module computes, wherever its tensors are now: what inputs for it should be made on."""
    placement = placement_of(module)
    if placement is not None:
        return placement.device_of(module)
    device = torch.device("cpu")
    for _, tensor in named_tensors(module):
        device = tensor.device
        if device.type != "meta":
            break
    return device


def execution_dtype(module: nn.Module) -> torch.dtype:
    """The floating dtype that a module computes in: what it says itself, else that of its first such tensor."""
    stated = getattr(module, "dtype", None)
    if isinstance(stated, torch.dtype):
        return stated
    dtypes = (tensor.dtype for _, tensor in named_tensors(module) if tensor.is_floating_point())
    return next(dtypes, torch.get_default_dtype())


def free(module: nn.Module) -> None:
    """Let go of what calls of a module, or of its parts, have left on the device."""
    for placement in _placements(module):
        placement.free()


@contextmanager
def at_home(module: nn.Module) -> Generator[nn.Module]:
    """Context: the module's tensors are the masters, so that edits of any kind stay; for adapters and merges."""
    with contextlib.ExitStack() as stack:
        for placement in _placements(module):
            stack.enter_context(placement._lock)
        free(module)
        for placement in _placements(module):
            # The device may still be reading a home that is about to be edited.
            for device in placement.plan.devices:
                if has_streams(device):
                    torch.get_device_module(device).synchronize(device)
        yield module


def as_module(modules: Mapping[str, nn.Module]) -> nn.Module:
    """A single module itself, or an `nn.ModuleDict` of several."""
    return modules[""] if set(modules) == {""} else nn.ModuleDict(dict(modules))


def _placements(module: nn.Module) -> list[Placement]:
    found = {id(p): p for part in module.modules() if (p := placement_of(part)) is not None}
    return list(found.values())


def _replaced(modules: Mapping[str, nn.Module]) -> list[tuple[Placement, list[str]]]:
    """The placements that give way to a new one, with the names of the modules that they lose."""
    parts = {id(part) for module in modules.values() for part in module.modules()}
    found: dict[int, tuple[Placement, list[str]]] = {}
    for module in modules.values():
        for placement in _placements(module):
            names = [name for name, root in placement.modules.items() if id(root) in parts]
            if not names:
                raise PlacementError(
                    f"{type(module).__name__} is a part of a module that is under {placement.plan.name}; "
                    f"call {placement.plan.remedy} first"
                )
            found[id(placement)] = placement, names
    for placement, _ in found.values():
        placement._refuse_during_calls("replace the placement")
    return list(found.values())


def _first(name: str) -> str:
    return name.partition(".")[0]
