"""Takes the C++ parts of PyTorch out of its wheels: libraries, headers, and the version file that torch-sys looks for.

    python unpack.py --flavour cpu|cuda --version 2.11.0 TARGET WHEEL...

The CPU flavour leaves out the CUDA libraries, nine tenths of the PyPI wheel; the two small NVIDIA libraries that
libtorch_cpu.so itself was linked with come from wheels of their own. Libraries of all wheels go into one lib/:
they look for each other in their own folder first.
"""

import argparse
import fnmatch
import shutil
import zipfile
from pathlib import Path

# pattern of a wheel's member -> folder under the target; the first match counts
CPU = {
    "torch/lib/libtorch_cpu.so": "lib",
    "torch/lib/libtorch.so": "lib",  # only the linker reads it
    "torch/lib/libc10.so": "lib",
    "torch/lib/libgomp*": "lib",
    "torch/include/*": "include",
    "*/lib/libcudart.so.*": "lib",
    "*/lib/libcupti.so.*": "lib",
}
CUDA = {
    "torch/lib/libtorch_python.so": None,
    "torch/lib/*.so*": "lib",
    "torch/include/*": "include",
    "nvidia/*/lib/*.so*": "lib",
    "nvidia/*/include/*": "cuda/include",
}
# Names that linkers and loaders ask for, where the wheels only have versioned ones.
ALIASES = {"libgomp.so": "libgomp*.so*", "libnccl.so": "libnccl.so.2"}


def folder_for(member: str, rules: dict):
    """The folder and the path below it, or None for what is not needed."""
    for pattern, folder in rules.items():
        if fnmatch.fnmatchcase(member, pattern):
            if folder is None:
                return None
            # headers keep the tree below their include/, libraries lie flat
            below = member.split("/include/", 1)[1] if folder.endswith("include") else member.rsplit("/", 1)[1]
            return Path(folder) / below
    return None


def unpack(wheel: Path, target: Path, rules: dict) -> int:
    count = 0
    with zipfile.ZipFile(wheel) as archive:  # reading a member checks its CRC
        for member in archive.infolist():
            place = None if member.is_dir() else folder_for(member.filename, rules)
            if place is None:
                continue
            path = target / place
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            count += 1
    return count


def add_aliases(lib: Path) -> None:
    for alias, pattern in ALIASES.items():
        found = sorted(lib.glob(pattern))
        if found and not (lib / alias).exists():
            (lib / alias).symlink_to(found[0].name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flavour", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--version", required=True)
    parser.add_argument("target", type=Path)
    parser.add_argument("wheels", type=Path, nargs="+")
    args = parser.parse_args()
    for wheel in args.wheels:
        if unpack(wheel, args.target, CPU if args.flavour == "cpu" else CUDA) == 0:
            raise SystemExit(f"{wheel.name} holds nothing that libtorch needs: its layout must have changed")
    add_aliases(args.target / "lib")
    (args.target / "build-version").write_text(f"{args.version}\n")


if __name__ == "__main__":
    main()
