"""The projects that docs/building.md prints, for the tests that build them."""

import pathlib
import re


def page_project(repo, which):
    """The CMakeLists.txt on the page, chosen by a word that is in it."""
    page = (pathlib.Path(repo) / "docs" / "building.md").read_text(encoding="utf-8")
    found = [body for body in re.findall(r"^```cmake\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if which in body]
    assert len(found) == 1, f"docs/building.md has {len(found)} CMake blocks with {which}"
    return found[0]
