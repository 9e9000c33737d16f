#!/usr/bin/env python3
"""A folder uses only what stands above it in docs/architecture.md: layers_test.py SOURCE_DIR.

The order of the folders is that of the page's table, so page and code cannot drift apart. A public header belongs to the
folder that implements it; cmake/doxygen_filter.py names it where no .cpp file does. Also checked: what is torch-free
includes no torch, what is public includes nothing private, examples include only public headers, and the page names every
file of src and cli.
"""
import fnmatch
import pathlib
import re
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "cmake"))
from doxygen_filter import LAYERS

TORCH = re.compile(r'#include (<(torch|ATen|c10)/|"torch_compat\.hpp")')
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
SOURCES = (".cpp", ".cu", ".hpp", ".cuh")


def read_layers(page):
    """[(group, folder)] in the table's order; the group is 'no torch', 'torch' or 'programs'."""
    layers, group = [], ""
    for line in page.splitlines():
        row = re.match(r"\| *([a-z ]*?) *\| `((?:src/)?[a-z]+)` \|", line)
        if row:
            group = row.group(1) or group
            layers.append((group, row.group(2)))
    return layers


def read_files(page):
    """{folder: the text of its row} of the table of files."""
    table = page.split("## What each file holds")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `([a-z_/0-9]+)` \| (.*) \|$", table, re.MULTILINE))


def folder_of(path):
    return "/".join(path.parts[:2]) if path.parts[0] == "src" else path.parts[0]


class Tree:
    def __init__(self, root, page):
        self.root = root
        self.layers = read_layers(page)
        self.order = {folder: index for index, (_, folder) in enumerate(self.layers)}
        self.torch_free = {folder for group, folder in self.layers if group == "no torch"} | {"cli"}
        self.torch = {folder for group, folder in self.layers if group == "torch"}
        self.files = [each.relative_to(root) for folder in ("src", "cli", "include", "examples")
                      for each in sorted((root / folder).glob("**/*")) if each.suffix in SOURCES]
        self.folder_of_header = {each.stem: folder_of(each) for each in self.files
                                 if each.suffix == ".cpp" and each.parts[0] == "src"}
        self.folder_of_header |= {stem: f"src/{layer}" for stem, layer in LAYERS.items()}
        self.faults = []

    def layer_of(self, path):
        """The folder of the table that a file belongs to; None if nobody says."""
        if path.parts[0] != "include":
            return folder_of(path)
        return self.folder_of_header.get(path.stem)

    def resolve(self, included):
        """The file of lockstep that an include names, or None."""
        for start in ("src", "include", "."):
            path = pathlib.Path(start) / included
            if (self.root / path).is_file():
                return path
        return None

    def check_folders(self):
        found = {f"src/{each.name}" for each in (self.root / "src").iterdir() if each.is_dir()}
        self.faults += [f"docs/architecture.md has no row for {each}" for each in sorted(found - set(self.order))]
        self.faults += [f"docs/architecture.md has a row for {each}, which does not exist"
                        for each in self.order if not (self.root / each).is_dir()]

    def check_includes(self, path):
        text = (self.root / path).read_text()
        layer = self.layer_of(path)
        if layer not in self.order and path != pathlib.Path("src/torch_compat.hpp"):
            self.faults.append(f"{path}: no .cpp file has its name, so cmake/doxygen_filter.py must say where it is implemented")
            return
        is_torch_free = layer in self.torch_free and path.name != "probe.cpp"  # the one program of cli with torch
        if is_torch_free and TORCH.search(text):
            self.faults.append(f"{path} includes a torch header, and {layer} is torch-free")
        for included in INCLUDE.findall(text):
            target = self.resolve(included)
            if target is None or included == "torch_compat.hpp":
                continue
            below = self.layer_of(target)
            is_private = target.parts[0] == "src"
            if path.parts[0] == "include" and is_private:
                self.faults.append(f"{path} is public and includes the private {included}")
            elif path.parts[0] == "examples" and is_private:
                self.faults.append(f"{path} is an example and includes the private {included}")
            elif is_torch_free and below in self.torch:
                self.faults.append(f"{path} includes {included}: {below} needs torch, and {layer} is torch-free")
            elif self.order.get(below, -1) > self.order.get(layer, len(self.order)):
                self.faults.append(f"{path} includes {included}: {below} stands below {layer}")

    def check_page(self, page):
        rows = read_files(page)
        for path in self.files:
            if path.parts[0] not in ("src", "cli") or path.parent == pathlib.Path("src"):
                continue
            parent = path.parent.parent if path.parent.name == "cuda" else path.parent
            row = rows.get(str(parent))
            if row is None:
                self.faults.append(f"docs/architecture.md, 'What each file holds', has no row for {parent}")
                rows[str(parent)] = None
            elif not any(fnmatch.fnmatch(path.stem, name) for name in re.findall(r"`([^`]+)`", row)):
                self.faults.append(f"docs/architecture.md, 'What each file holds': {parent} has no `{path.stem}`")
        for folder, row in rows.items():
            if not (self.root / folder).is_dir():
                self.faults.append(f"docs/architecture.md, 'What each file holds', names {folder}, which does not exist")


def main(root):
    page = (root / "docs/architecture.md").read_text()
    tree = Tree(root, page)
    tree.check_folders()
    for path in tree.files:
        tree.check_includes(path)
    tree.check_page(page)
    faults = sorted(set(tree.faults))
    print("\n".join(faults))
    print(f"{len(faults)} faults, {len(tree.layers)} folders in order, {len(tree.files)} files")
    return 1 if faults or len(tree.layers) < 10 else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
