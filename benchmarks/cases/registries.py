"""The implementation tables of this checkout, loaded by path.

asv measures old commits with today's ruler and hands parameters over by index. A table taken from the
installed trainstep would give an old commit's row another row's time, so the tables, and the accounting that
says how much work a case is, come from the checkout the ruler itself stands in.
"""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


@cache
def ruler_module(path: str) -> ModuleType:
    """Load `src/trainstep/<path>` of the ruler's own checkout under a name of its own.

    The file may import the standard library and, inside functions only, the trainstep being measured.
    """
    name = "trainstep_of_the_ruler_" + path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, ROOT / "src" / "trainstep" / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up here
    spec.loader.exec_module(module)
    return module
