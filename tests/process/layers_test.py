#!/usr/bin/env python3
"""A folder uses only what stands above it in docs/architecture.md: layers_test.py SOURCE_DIR.

The order of the folders is that of the page's table, so page and code cannot drift apart. Also checked: the torch-free
folders include no torch header, and public headers include no private one.
"""
import pathlib
import re
import sys

TORCH = re.compile(r"#include <(torch|ATen|c10)/")
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def read_layers(page):
    """[(group, folder)] in the table's order; the group is 'no torch', 'torch' or 'programs'."""
    layers, group = [], ""
    for line in page.read_text().splitlines():
        row = re.match(r"\| *([a-z ]*?) *\| `((?:src/)?[a-z]+)` \|", line)
        if row:
            group = row.group(1) or group
            layers.append((group, row.group(2)))
    return layers


def folder_of(path):
    return "/".join(path.parts[:2]) if path.parts[0] == "src" else path.parts[0]


def main(root):
    layers = read_layers(root / "docs/architecture.md")
    order = {folder: index for index, (_, folder) in enumerate(layers)}
    torch_free = {folder for group, folder in layers if group == "no torch"}
    found = {f"src/{each.name}" for each in (root / "src").iterdir() if each.is_dir()}
    faults = [f"docs/architecture.md has no row for {each}" for each in sorted(found - set(order))]
    faults += [f"docs/architecture.md has a row for {each}, which does not exist"
               for each in order if not (root / each).is_dir()]

    for path in sorted(root.glob("**/*")):
        relative = path.relative_to(root)
        if path.suffix not in (".cpp", ".hpp", ".cu", ".cuh") or relative.parts[0] not in ("src", "cli", "include"):
            continue
        text = path.read_text()
        folder = folder_of(relative)
        if folder in torch_free and TORCH.search(text):
            faults.append(f"{relative} includes a torch header, and {folder} is torch-free")
        for included in INCLUDE.findall(text):
            private = root / "src" / included
            if not private.is_file() or included == "torch_compat.hpp":
                continue
            target = folder_of(private.relative_to(root))
            if folder == "include":
                faults.append(f"{relative} is public and includes the private {included}")
            elif folder in order and order.get(target, -1) > order[folder]:
                faults.append(f"{relative} includes {included}: {target} stands below {folder}")
    print("\n".join(faults))
    print(f"{len(faults)} faults, {len(layers)} folders in order")
    return 1 if faults or len(layers) < 10 else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
