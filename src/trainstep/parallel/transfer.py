"""Pickling by reference between the process that launches ranks and the ranks.

A function or class travels as its module's name and its own; the module's file travels beside it, so that the
other side can load modules that are not importable by name: test modules, scripts, `__main__`.
"""

import importlib
import importlib.util
import io
import pickle
import sys
import types
from typing import Any

# What `__main__` of the launching process is called in a rank, so that its `if __name__ == "__main__"` does
# not run.
MAIN = "__trainstep_main__"


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.modules: dict[str, str] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Note where functions and classes come from; pickle them as usual."""
        if isinstance(obj, type | types.FunctionType):
            file = getattr(sys.modules.get(obj.__module__), "__file__", None)
            if file is not None:
                self.modules[obj.__module__] = file
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, modules: dict[str, str], main: str | None) -> None:
        super().__init__(stream)
        self.modules = modules
        self.main = main

    def find_class(self, module_name: str, name: str) -> Any:
        """Resolve a reference, loading its module by path where its name alone does not lead there."""
        if module_name == MAIN and MAIN not in sys.modules:
            module_name = "__main__"  # back at home
        elif module_name == "__main__" and "__main__" in self.modules:
            module_name = self.main or MAIN
            _load(module_name, self.modules["__main__"])
        elif module_name in self.modules:
            _load(module_name, self.modules[module_name])
        return super().find_class(module_name, name)


def _load(name: str, file: str) -> None:
    if name in sys.modules:
        return
    if name != MAIN:
        try:
            module = importlib.import_module(name)
        except ImportError:
            pass
        else:
            if getattr(module, "__file__", None) == file:
                return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"no loader for {file}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def dumps(value: Any) -> bytes:
    """Pickle `value` with the files of the modules it refers to.

    Raises:
        ValueError: it holds something that cannot be found by name on the other side (a lambda, a local
            function, an open file, ...).
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"cannot be handed to another process: {error} (functions belong at the top of a module)"
        ) from error
    if "__main__" in pickler.modules and not pickler.modules["__main__"].endswith(".py"):
        raise ValueError(
            "a function of an interactive session cannot be handed to another process; put it in a file"
        )
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    main = spec.name if spec is not None else None  # `python -m package.module`: importable by that name
    return pickle.dumps((pickler.modules, main, stream.getvalue()))


def loads(data: bytes) -> Any:
    """The value that `dumps` was given on the other side."""
    modules, main, payload = pickle.loads(data)
    return _Unpickler(io.BytesIO(payload), modules, main).load()
