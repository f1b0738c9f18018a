"""Short names of kernels: what a C++ template instance does, without how it is called."""

import re

# Wrappers, containers and types that most kernels have in their arguments; none says what a kernel does.
_COMMON = re.compile(
    r"array|([AB]Un|Bin)aryFunctor|bool|char|const|false|func_wrapper_t|gpu_kernel_impl(_nocast)?|int|lambda|long"
    r"|Load(With|Without)Cast|operator|ReduceOp|Scalar|short|Store(With|Without)Cast|TensorIterator(Base)?|true"
    r"|TrivialOffsetCalculator|unsigned|void"
)
_DTYPE = re.compile(r"float|double|half|B?Float16|bfloat16|Half|(bfloat16|half)_t")
MOST_WORDS = 4


def short_name(name: str) -> str:
    """The kernel's own name with what its template arguments say of the work: functions, functors, dtypes.

    `void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul>
    >(int, ...)` becomes `vectorized_elementwise_kernel<FillFunctor, float>`. Kernels that differ only in what is left
    out (tile sizes, vector widths) share a short name. Names that are no C++ signature stay as they are.
    """
    # cuBLAS tells the stages and alignments of a product between its tile and its end.
    name = re.sub(r"_stage\d\w*?_execute(?=_)|__5x_cublas$", "", name)
    text = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    end = re.search(r"[<(]", text)
    if end is None or " " in text[: end.start()]:  # "Memcpy DtoD (Device -> Device)"
        return name
    own = text[: end.start()].rsplit("::", 1)[-1]
    arguments = _bracketed(text[end.start() :])
    # Parameters say nothing new, except a lambda's: the dtype that it works on.
    previous = None
    while previous != arguments:
        previous, arguments = arguments, re.sub(r"(?<!lambda)\([^()]*\)", "", arguments)
    words = re.findall(r"\b[A-Za-z_]\w*\b(?!::\w)", arguments)  # the last part of each path
    said = [word for word in dict.fromkeys(words) if not _COMMON.fullmatch(word) and word != own]
    said.sort(key=lambda word: _DTYPE.fullmatch(word) is not None)  # the work first, then what it is done on
    if len(said) > MOST_WORDS:
        said[MOST_WORDS:] = ["…"]
    return f"{own}<{', '.join(said)}>" if said else own


def _bracketed(text: str) -> str:
    """What stands between the first "<" of the text, which it begins with, and its partner; "" for none."""
    depth = 0
    for place, letter in enumerate(text if text.startswith("<") else ""):
        # The arrow of "operator->" closes nothing.
        depth += (letter == "<") - (letter == ">" and text[place - 1] != "-")
        if depth == 0:
            return text[1:place]
    return ""
