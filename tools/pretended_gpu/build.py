"""Makes a stand-in for CUDA's libraries, for a torch that is built for CUDA, on a machine without a GPU.

    python tools/pretended_gpu/build.py
    python tools/pretended_gpu/build.py --into DIR

`libpretended.so`, loaded before all others, answers for libcudart, cuBLAS and NCCL, and `libcuda.so.1` for
the driver (pretended.c, driver.c); names that torch wants beyond these return 0. gcc and nm are needed, and
the headers of CUDA and NCCL that come with torch's wheels. `run.py` builds by itself.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # As a script this knows its own folder only.

from tools.report import make_parser, write_json
from zorselike.errors import ConfigError

HERE = Path(__file__).parent
PRETENDED, DRIVER = "libpretended.so", "libcuda.so.1"
TORCH_CUDA = "libtorch_cuda.so"
USERS = ("libtorch_cuda*.so", "libc10_cuda.so", "libtorch_python.so", "libtorch_nvshmem.so")
"""Libraries of torch that call CUDA's."""
FAMILIES = ("__cuda", "cuda", "cublas", "nccl", "cudnn", "cusparse", "cusolver", "curand", "cufft")
"""How the names begin that are stood in for."""
DRIVER_NAMES = [
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuCtxGetDevice",
    "cuCtxGetLimit",
    "cuCtxSetCurrent",
    "cuCtxSetLimit",
    "cuDriverGetVersion",
    "cuFuncSetAttribute",
    "cuFuncSetCacheConfig",
    "cuGetErrorString",
    "cuLaunchCooperativeKernel",
    "cuLaunchKernel",
    "cuLinkAddData_v2",
    "cuLinkComplete",
    "cuLinkCreate_v2",
    "cuModuleGetFunction",
    "cuModuleLoad",
    "cuModuleLoadData",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuPointerGetAttribute",
    "cuTensorMapEncodeTiled",
]
"""What torch and Triton look up in the driver, beside what driver.c defines."""
EMPTY_HEADERS = ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h")
"""nccl.h includes them, uses nothing of them, and they are C++."""


def find_defined(source: str) -> set[str]:
    """The functions of CUDA's families that C text defines, each at the beginning of a line."""
    return set(re.findall(rf"^\w[\w *]*?\b((?:{'|'.join(FAMILIES)}|cu[A-Z])\w*)\(", source, re.MULTILINE))


def make_stubs(wanted: Collection[str], defined: Collection[str]) -> str:
    """C text of one function that returns 0 for every name that is wanted and not defined."""
    return "".join(f"long {name}(void) {{ return 0; }}\n" for name in sorted({*wanted} - {*defined}))


def find_torch() -> Path:
    """The folder of this interpreter's torch, if that is built for CUDA; else raises `ConfigError`."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise ConfigError(f"{sys.executable} has no torch: install one that is built for CUDA")
    folder = Path(spec.origin).parent
    if not (folder / "lib" / TORCH_CUDA).exists():
        raise ConfigError(
            f"{folder} is a torch without CUDA ({TORCH_CUDA} is missing): use a Python whose torch is built "
            "for CUDA; a GPU is not needed"
        )
    return folder


def default_folder(torch: Path) -> Path:
    """In the user's cache; another one for each torch and for each version of what is built."""
    sources = (*sorted(HERE.glob("*.c")), Path(__file__), torch / "version.py")
    key = hashlib.sha256(b"".join([str(torch).encode(), *(path.read_bytes() for path in sources)]))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "zorselike" / "pretended_gpu" / key.hexdigest()[:12]


def build(torch: Path, into: Path) -> list[Path]:
    """Writes both libraries; raises `ConfigError` that names what is missing for it."""
    for program in ("gcc", "nm"):
        if shutil.which(program) is None:
            raise ConfigError(f"there is no {program}: install gcc and binutils")
    into.mkdir(parents=True, exist_ok=True)
    site = torch.parent
    headers = [
        _find_header("cuda_runtime_api.h", site, "nvidia/*/include"),
        _find_header("nccl.h", site, "nvidia/nccl/include"),
    ]
    # Wheels of CUDA 13 leave crt/ to the compiler's, and Triton brings it. Nothing else is taken from there:
    # it may be of another version.
    crt_of = ("nvidia/*/include", "triton/backends/nvidia/include")
    crt = _find_header("crt/host_defines.h", site, *crt_of) / "crt"
    own = into / "include"
    own.mkdir(exist_ok=True)
    for name in EMPTY_HEADERS:
        (own / name).write_text("")
    shutil.copytree(crt, own / "crt", dirs_exist_ok=True)

    libraries = sorted({path for pattern in USERS for path in (torch / "lib").glob(pattern)})
    defined = find_defined((HERE / "pretended.c").read_text())
    stubs = {
        "driver": make_stubs(DRIVER_NAMES, find_defined((HERE / "driver.c").read_text())),
        "pretended": make_stubs(_list_wanted(libraries), defined),
    }
    made = []
    for name, library in (("driver", DRIVER), ("pretended", PRETENDED)):  # Last what `run.py` looks for.
        text = into / f"{name}_stubs.c"
        text.write_text(stubs[name])
        includes = [f"-I{folder}" for folder in (own, *headers)]
        begun = into / f"{library}.{os.getpid()}"
        command = ["gcc", "-O1", "-w", "-shared", "-fPIC", f"-Wl,-soname,{library}", *includes]
        _run([*command, str(HERE / f"{name}.c"), str(text), "-o", str(begun), "-lpthread"])
        begun.replace(into / library)
        made.append(into / library)
    return made


def _find_header(name: str, site: Path, *patterns: str) -> Path:
    """The folder that has it."""
    for pattern in patterns:
        for folder in sorted(site.glob(pattern)):
            if (folder / name).exists():
                return folder
    raise ConfigError(
        f"{site} has no {name} in {' or '.join(patterns)}: install the wheels that torch asks for"
    )


def _list_wanted(libraries: Sequence[Path]) -> set[str]:
    """Names of CUDA's families that libraries look for in others."""
    lines = _run(["nm", "-D", "--undefined-only", *map(str, libraries)]).splitlines()
    names = {line.split()[-1].partition("@")[0] for line in lines if line.strip()}
    return {name for name in names if name.startswith(FAMILIES)}


def _run(command: Sequence[str]) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise ConfigError(f"{command[0]} failed: {ended.stderr.strip()[-2000:]}")
    return ended.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds; the exit status is 2 if something is missing."""
    parser = make_parser(__doc__)
    parser.add_argument("--into", type=Path, metavar="DIR", help="where to (default: in the user's cache)")
    options = parser.parse_args(arguments)
    try:
        torch = find_torch()
        made = build(torch, options.into or default_folder(torch))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    for path in made:
        print(path)
    write_json(options.json, {"torch": torch, "made": made})
    return 0


if __name__ == "__main__":
    sys.exit(main())
