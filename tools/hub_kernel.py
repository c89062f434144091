"""Makes the folder of a Hugging Face `kernels` package: the compiled ops alone, in a namespace of their own for every
version.

    python tools/hub_kernel.py OUT           # what kernel-builder builds and uploads
    python tools/hub_kernel.py OUT --build   # and its CPU variant, compiled here: kernels.get_local_kernel(Path("OUT"))

The format is edition 5 of `build.toml` (https://huggingface.co/docs/kernels/builder/writing-kernels). The sources are
copies, with two changes. The ops are registered under the name that the builder gives, so that two versions serve one
process. And kernel-builder compiles each source
once: `update.cpp` becomes a header, and a source of two lines for every update rule.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from kernels import build  # noqa: E402  (the folder, found through the line above; standard library only)
from kernels.toolchain import BuildError, Step, execute, find_cxx, find_torch  # noqa: E402

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME = "fastsam"
STABLE_ABI = "2.10"  # what build.TORCH_FLAGS says in hexadecimal
NVCC_FLAGS = [
    flag for flag in build.NVCC_FLAGS if flag.startswith(("-std", "-O", "-fmad"))
]  # the rest is the builder's
CAPABILITIES = [
    "8.0",
    "9.0",
    "10.0",
    "12.0",
]  # code for all that the oldest of toolchain.CUDA_ARCHS has; the builder makes no PTX of a list
CXX_FLAGS = [flag for flag in build.CXX_FLAGS if flag not in ("-fPIC", "-Wall")]
EXPANDED = "#define EXPANDED(MACRO, ...) MACRO(__VA_ARGS__)  // a macro as an argument of one that makes names\n"

BINDING = """// Makes the library a module that Python imports. The ops register themselves: csrc/ops.cpp.
#include <Python.h>

#define TEXT(name) TEXT_(name)
#define TEXT_(name) #name
#define INIT(name) INIT_(name)
#define INIT_(name) PyInit_##name

PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, TEXT(TORCH_EXTENSION_NAME), nullptr, 0, nullptr};
  return PyModule_Create(&module);
}
"""

PACKAGE = '''"""fastsam's compiled kernels: SAM on flat rows.

What each one computes is specified in fastsam_kernels/reference.py of the package fastsam."""

import torch

from ._ops import add_op_namespace_prefix, ops

__version__ = "{version}"
__all__ = {names}


def _kernel(name):
    """The op as a function. It tells autograd which tensors it wrote: a graph that saved them then raises."""
    op = getattr(ops, name).default
    wrote = [i for i, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    names = [a.name for a in op._schema.arguments]

    def kernel(*operands, **named):
        op(*operands, **named)
        for i in wrote:
            written = operands[i] if i < len(operands) else named.get(names[i])
            if written is not None and not torch.compiler.is_compiling():
                torch.autograd.graph.increment_version(written)

    kernel.__name__, kernel.__doc__ = name, str(op._schema)
    return kernel


{lines}
'''
LINE = """{name} = _kernel("{name}")
torch.library.register_fake(add_op_namespace_prefix("{name}"))(lambda *operands: None)
"""

FLAKE = """{
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs = { self, kernel-builder, ... }: kernel-builder.lib.genKernelFlakeOutputs { inherit self; path = ./.; };
}
"""


def lay_out(out: Path) -> None:
    """Fills `out`, a new or an empty folder."""
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} has files in it; the kernel package is made in a new folder, or an empty one")
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        for name, text in copies(path):
            target = out / "csrc" / path.relative_to(ROOT / "csrc").with_name(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    version = re.search(r'__version__ = "(.+)"', (ROOT / "fastsam" / "__init__.py").read_text())
    names = re.findall(r'"(\w+_)\(', (ROOT / "csrc" / "ops.cpp").read_text())
    assert version and names, "fastsam/__init__.py has a version, and csrc/ops.cpp the ops' schemas"
    package = out / "torch-ext" / NAME
    package.mkdir(parents=True)
    lines = "\n".join(LINE.format(name=name) for name in names).rstrip()
    (package / "__init__.py").write_text(PACKAGE.format(version=version[1], names=json.dumps(names), lines=lines))
    (out / "torch-ext" / "torch_binding.cpp").write_text(BINDING)
    (out / "build.toml").write_text(build_toml(out, version[1]))
    (out / "flake.nix").write_text(FLAKE)
    shutil.copy(ROOT / "LICENSE", out)


def copies(path: Path) -> Iterator[tuple[str, str]]:
    """The files, by name, that a source becomes."""
    text = path.read_text()
    if path.stem == "update" and path.suffix in (".cpp", ".cu"):
        header = f"update_source{'.h' if path.suffix == '.cpp' else '.cuh'}"
        yield header, f"#pragma once\n{text}"
        for rule in build.rules(ROOT / "csrc"):
            yield f"update_{rule}{path.suffix}", f'#define FASTSAM_RULE {rule}\n#include "{header}"\n'
        return
    macro = r"^(STABLE_TORCH_LIBRARY(?:_FRAGMENT|_IMPL)?)\(fastsam, "
    text, count = re.subn(macro, r"EXPANDED(\1, TORCH_EXTENSION_NAME, ", text, flags=re.M)
    yield path.name, EXPANDED + text if count else text


def build_toml(out: Path, version: str) -> str:
    """The build of both backends. The CPU kernels are in the CUDA one too: `ops.cpp`, which has the schemas, registers
    them."""
    files = [path.relative_to(out).as_posix() for path in sorted((out / "csrc").rglob("*.*"))]
    cuda = [name for name in files if name.startswith("csrc/cuda/")]
    cpu = [name for name in files if name.startswith("csrc/cpu/")]
    common = [name for name in files if name not in {*cuda, *cpu}]
    headers = [name for name in common if name.endswith(".h")]
    host: dict[str, Any] = {"depends": ["torch"], "include": ["csrc"], "cxx-flags": CXX_FLAGS}
    sections: dict[str, dict[str, Any]] = {
        "general": {
            "name": NAME, "version": int(version.split(".")[0]), "edition": 5, "license": "MIT",
            "backends": ["cpu", "cuda"],
        },
        "torch": {"src": ["torch-ext/torch_binding.cpp", *common], "include": ["csrc"], "cxx-flags": CXX_FLAGS},
        "torch.stable-abi": {"cpu": STABLE_ABI, "cuda": STABLE_ABI},
        "kernel.cpu": {"backend": "cpu", **host, "src": cpu + headers},
        "kernel.cpu_beside_cuda": {"backend": "cuda", **host, "src": cpu + headers},
        "kernel.cuda": {
            "backend": "cuda", **host, "cuda-flags": NVCC_FLAGS, "cuda-capabilities": CAPABILITIES,
            "src": cuda + headers,
        },
    }  # fmt: skip
    return "\n".join(
        f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        for section, values in sections.items()
    )


# --- the variant of this machine's CPU, for a look at it before kernel-builder makes all of them ---


def compile_cpu(out: Path) -> Path:
    """Compiles what `build.toml` lists for the CPU into a folder of `build/`, with what the builder adds. Raises
    BuildError."""
    wanted = tomllib.loads((out / "build.toml").read_text())
    sources = [
        name
        for part in (wanted["torch"], wanted["kernel"]["cpu"])
        for name in part["src"]
        if name.endswith(".cpp")
    ]  # fmt: skip
    name = f"_{NAME}_cpu_{_digest(out)}"
    variant = out / "build" / f"torch-stable-abi{STABLE_ABI.replace('.', '')}-cpu-{platform.machine()}-linux"
    torch, cxx, work = find_torch(), find_cxx(), out / "build" / "objects"
    flags = [
        *wanted["torch"]["cxx-flags"],
        f"-I{out / 'csrc'}",
        f"-isystem{torch.include}",
        "-fPIC",
        *build.TORCH_FLAGS,
    ]
    flags += [
        f"-DTORCH_EXTENSION_NAME={name}",
        "-DPy_LIMITED_API=0x030A0000",
        f"-isystem{sysconfig.get_path('include')}",
    ]
    steps = []
    for source in sources:
        output = f"{source.replace('/', '_')}.o"
        argv = (*cxx, *flags, "-MD", "-MF", f"{output}.d", "-c", str(out / source), "-o", output)
        steps.append(Step(output, (str(out / source),), argv, f"{output}.d"))
    objects, library = tuple(step.output for step in steps), f"{name}.abi3.so"
    argv = (*cxx, "-shared", *objects, "-o", library, f"-L{torch.lib}", "-ltorch_cpu", "-Wl,--as-needed")
    work.mkdir(parents=True, exist_ok=True)
    execute([*steps, Step(library, objects, argv)], work)
    shutil.copytree(out / "torch-ext" / NAME, variant)
    shutil.move(work / library, variant)
    shutil.rmtree(work)
    (variant / "_ops.py").write_text(
        f"import torch\nfrom . import {name}\nops = torch.ops.{name}\n\n\n"
        f'def add_op_namespace_prefix(op_name):\n    return f"{name}::{{op_name}}"\n'
    )
    (variant / "metadata.json").write_text(json.dumps(_metadata(variant, name, wanted["general"]), indent=1) + "\n")
    return variant


def _digest(out: Path) -> str:
    """Of everything in the folder but what is built from it: the part of the ops' namespace that is the version's
    own."""
    digest = hashlib.sha256()
    for path in sorted(p for p in out.rglob("*") if p.is_file() and "build" not in p.relative_to(out).parts):
        digest.update(f"{path.relative_to(out)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:7]


def _metadata(variant: Path, name: str, general: dict[str, Any]) -> dict[str, Any]:
    digests = {
        path.relative_to(variant).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in sorted(variant.rglob("*"))
        if path.is_file()
    }
    return {
        "name": NAME, "id": name, "version": general["version"], "license": general["license"], "python-depends": [],
        "backend": {"type": "cpu"}, "digest": {"algorithm": "sha256", "files": digests},
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tools/hub_kernel.py", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="a new folder, or an empty one")
    parser.add_argument("--build", action="store_true", help="compile the variant of this machine's CPU, too")
    options = parser.parse_args(argv)
    out = options.out.resolve()
    lay_out(out)
    try:
        made = compile_cpu(out) if options.build else out
    except BuildError as error:
        raise SystemExit(f"the layout is in {out}; its CPU variant could not be compiled: {error}") from error
    print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
