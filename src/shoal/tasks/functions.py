"""Sends functions and values: by value with cloudpickle, else by name with pickle.

With cloudpickle (`pip install 'shoal[tasks]'`), lambdas, closures and functions of the script
itself can be sent, and a script needs no `if __name__ == "__main__"`. Without it, a function must
have a name. To find a function of the script itself, each worker runs the script again, as
multiprocessing does, so the script needs the guard.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.tasks.errors import Unloadable

# In a worker's environment, if the client's directory was packed: where it was and where it is now.
CLIENT_ROOT = "SHOAL_TASKS_CLIENT_ROOT"
NODE_ROOT = "SHOAL_TASKS_NODE_ROOT"
MAIN = "__shoal_main__"  # the client's script, in a worker
NAMES_SHOWN = 8

# Whether the script is being run again only to find a function in it.
_finding_main = False


def dumper() -> Callable[[Any], bytes]:
    """The function that turns values into bytes. Plain pickle would send a name from the script
    that a worker does not have, without an error."""
    try:
        import cloudpickle
    except ImportError:
        sys.modules.setdefault(MAIN, sys.modules["__main__"])
        return _dump_by_name
    dump: Callable[[Any], bytes] = cloudpickle.dumps
    return dump


def _dump_by_name(value: Any) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def dump_function(function: Callable[..., Any], dump: Callable[[Any], bytes], name: str) -> bytes:
    """Raises TypeError with the fix."""
    if not callable(function):
        raise TypeError(f"{name}: {function!r} is not a function")
    try:
        return dump(function)
    except Exception as error:
        hint = "; pip install 'shoal[tasks]' to send more types" if dump is _dump_by_name else ""
        message = f"{name}: {function!r} cannot be sent to a worker: {error}{hint}"
        raise TypeError(message) from None


# Values that pickle and cloudpickle send alike, and that cannot change.
PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None)})


class Steady:
    """A function whose bytes stay the same for as long as `same` says so, so that it needs to be
    sent only once. A function that is sent by value is sent as it is at that moment, with the
    values of the variables that it uses."""

    def __init__(self, function: types.FunctionType, used: dict[str, Any] | None) -> None:
        """`used`: None if it is sent by name."""
        self.function = function
        self._code = function.__code__
        self._defaults = function.__defaults__
        self._used = used

    def same(self, function: object) -> bool:
        if function is not self.function:
            return False
        if self._used is None:
            return True
        if (self._code, self._defaults) != (self.function.__code__, self.function.__defaults__):
            return False
        now = self.function.__globals__
        return all(now.get(name) is value for name, value in self._used.items())


def steady(function: object, data: bytes) -> Steady | None:
    """`data`: the function, dumped. None: its bytes may change unseen."""
    if type(function) is not types.FunctionType:
        return None
    if b"cloudpickle" not in data:
        return Steady(function, None)
    if function.__closure__ or function.__kwdefaults__ or function.__dict__:
        return None
    if not all(type(value) in PLAIN for value in function.__defaults__ or ()):
        return None
    names = _names(function.__code__)
    used = {name: function.__globals__[name] for name in names if name in function.__globals__}
    return Steady(function, used) if all(map(_unchanging, used.values())) else None


def _names(code: types.CodeType) -> set[str]:
    """All names in a function and in those it defines: its global variables are among them."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _unchanging(value: object) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__spec__ is not None and sys.modules.get(value.__name__) is value
    return type(value) in PLAIN or isinstance(value, types.BuiltinFunctionType)


def main_script() -> str:
    """The path of the running script, where workers look for functions; empty if functions are sent
    by value."""
    if importlib.util.find_spec("cloudpickle") is not None:
        return ""
    path = getattr(sys.modules["__main__"], "__file__", None)
    return os.path.abspath(path) if path else ""


def offer_main(path: str) -> None:
    """In a worker: looks up names of the client's script in a module that is loaded on demand."""
    if path:
        sys.modules["__main__"] = sys.modules[MAIN] = _Main(path)


def refuse_within_main() -> None:
    """Without the guard, workers would start more workers."""
    if _finding_main:
        message = 'the script calls shoal.map or shoal.run outside of `if __name__ == "__main__":`'
        raise Unloadable(f"{message}; put it there, or: pip install 'shoal[tasks]'")


class _Main(types.ModuleType):
    """Runs the script when one of its names is used first, because most maps never use one."""

    def __init__(self, path: str) -> None:
        super().__init__(MAIN)
        self.__dict__["__file__"] = path

    def __getattr__(self, name: str) -> Any:
        global _finding_main
        if name.startswith("__") or "_shoal_begun" in self.__dict__:
            raise AttributeError(name)
        self.__dict__["_shoal_begun"] = True
        path = str(self.__dict__["__file__"])
        _finding_main = True
        try:
            exec(compile(Path(path).read_bytes(), path, "exec"), self.__dict__)
        finally:
            _finding_main = False
        return getattr(self, name)


def moved(place: str, root: str, package: str) -> str:
    """A path on the client, as it is on this node."""
    if root and package and Path(place).is_relative_to(root):
        return str(Path(package) / Path(place).relative_to(root))
    return place


def paths_here(theirs: list[str], root: str) -> list[str]:
    """Packed paths first, then this node's. If nothing was packed, the client's paths are valid
    here too."""
    package = os.environ.get("SHOAL_PACKAGE", "")
    if not root or not package:
        return theirs
    packed = [moved(p, root, package) for p in theirs if p and Path(p).is_relative_to(root)]
    rest = [p for p in theirs if p and not Path(p).is_relative_to(root)]
    return list(dict.fromkeys([*packed, *(p for p in sys.path if p), *rest]))


def from_script(path: str, name: str) -> Callable[[Any], Any]:
    """Loads a function from a file; raises Unloadable with one line of why it cannot."""
    root = os.environ.get(CLIENT_ROOT)
    if root and Path(path).is_relative_to(root):
        path = str(Path(os.environ[NODE_ROOT]) / Path(path).relative_to(root))
    folder = str(Path(path).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module_name = Path(path).stem
    module = sys.modules.get(module_name)
    if module is None or getattr(module, "__file__", None) != path:
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise Unloadable(f"{path}: not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[module_name]
            where = _line_in(error, path)
            raise Unloadable(f"{path}{where}: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        there = sorted(
            key
            for key, value in vars(module).items()
            if isinstance(value, types.FunctionType) and value.__module__ == module_name
        )
        names = ", ".join(there[:NAMES_SHOWN]) or "none"
        raise Unloadable(f"{path}: has no function '{name}'; its functions: {names}")
    found: Callable[[Any], Any] = function
    return found


def _line_in(error: BaseException, path: str) -> str:
    if isinstance(error, SyntaxError):
        return f" line {error.lineno}"
    line, frame = 0, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == path:
            line = frame.tb_lineno
        frame = frame.tb_next
    return f" line {line}" if line else ""
