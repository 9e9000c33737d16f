"""Prepares a file for Doxygen, which calls it for each: doxygen_filter.py FILE, in the root of the tree.

A public header is put into the group of its layer: the folder of src in which it is implemented. A page gets
an anchor for each heading, as GitHub gives them, and links that use these anchors. The filtered text has the lines of the
file, so that warnings name the right ones.
"""

import glob
import os
import re
import sys

# Headers without a .cpp of their name in src. tests/process/layers_test.py reads this, too.
LAYERS = {"clock": "base", "version": "base", "gradients": "gradients", "device_event": "device", "memory": "device",
          "optim": "optim", "reduce_op": "base", "schedule": "schedule", "lockstep": "train", "task": "device",
          "tensor_tree": "parallel", "tensor_text": "device", "accumulate": "sharding", "fused_optimizer": "precision",
          "fully_sharded_data_parallel": "sharding", "verify": "verify"}

MAIN_PAGE = "index"  # Doxygen labels it so itself


def layer_of(header):
    name = os.path.basename(header).removesuffix(".hpp")
    found = glob.glob(f"src/**/{name}.cpp", recursive=True)
    return found[0].split(os.sep)[1] if found else LAYERS[name]


def jobs():
    """{layer: its job}, from the table of layers in docs/architecture.md."""
    with open("docs/architecture.md", encoding="utf-8") as file:
        return dict(re.findall(r"^\|[^|\n]*\| `src/(\w+)` \| ([^|\n]*) \|", file.read(), re.MULTILINE))


def filtered_header(path, text):
    layer = layer_of(path)
    job = jobs()[layer]
    text = re.sub(r"^namespace lockstep \{$", f"namespace lockstep {{ /** @addtogroup {layer} */ /** @{{ */", text, count=1,
                  flags=re.MULTILINE)
    text = re.sub(r"^\}  // namespace lockstep$", "/** @} */ }", text, flags=re.MULTILINE)
    return f"/** @defgroup {layer} {layer}: {re.sub('[`*]', '', job)} */ {text}"


def anchor(heading, taken):
    """As GitHub makes it: a heading that occurs again gets a number."""
    name = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
    taken[name] = taken.get(name, -1) + 1
    return f"{name}-{taken[name]}" if taken[name] else name


def label_of(page):
    return page if page == MAIN_PAGE else f"page-{page}"


def filtered_page(path, text):
    page = os.path.basename(path).removesuffix(".md")
    lines, fenced, taken = [], False, {}
    for line in text.split("\n"):
        fenced ^= line.startswith("```")
        heading = re.match(r"#+ (.*)$", line)
        if heading and not fenced:
            first = not taken
            label = f"{page}-{anchor(heading[1], taken)}"
            if not first:
                line += f" {{#{label}}}"
            elif page != MAIN_PAGE:
                line += f" {{#{label_of(page)}}}"
        elif not fenced:
            line = re.sub(r"\]\((?:[\w./]*?(\w+)\.md)?#([\w-]+)\)", lambda m: f"](#{m[1] or page}-{m[2]})", line)
            line = line.replace("](images/", "](")  # Doxygen looks for images by name
            line = re.sub(r"\]\([\w./]*?(\w+)\.md\)", lambda m: f"](#{label_of(m[1])})", line)
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with open(sys.argv[1], encoding="utf-8") as source:
        body = source.read()
    sys.stdout.reconfigure(encoding="utf-8")
    print((filtered_page if sys.argv[1].endswith(".md") else filtered_header)(sys.argv[1], body), end="")
