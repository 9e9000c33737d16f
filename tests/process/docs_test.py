"""Keeps the documentation true: README.md and docs/*.md against the tree and the programs.

usage: docs_test.py BIN_FOLDER REPO_FOLDER
"""

import glob
import json
import os
import re
import subprocess
import sys
import unittest

BIN, REPO = "", ""  # set by main

# Made by a build or a run; a page may name them before they exist.
GENERATED = ("build", "reports")


def pages():
    return ["README.md"] + sorted(os.path.relpath(path, REPO) for path in glob.glob(os.path.join(REPO, "docs", "*.md")))


def read(path):
    with open(os.path.join(REPO, path), encoding="utf-8") as file:
        return file.read()


def texts():
    return [(page, read(page)) for page in pages()]


def fenced_blocks(text):
    """(language, body) of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def prose(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text):
    """The anchors that GitHub gives to a page's headings."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE):
        kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
        found.add(kept.replace(" ", "-"))
    return found


def output_of(program, *arguments):
    path = os.path.join(BIN, program)
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True, timeout=120).stdout


def flags_in(text):
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text))


def help_texts():
    """{command: its --help} for `lockstep`, its commands, and the course's programs."""
    texts = {"lockstep": output_of("lockstep", "--help")}
    commands = texts["lockstep"].split("Commands:\n")[1]
    for name in re.findall(r"^  (\w+) ", commands, re.MULTILINE):
        texts[f"lockstep {name}"] = output_of("lockstep", name, "--help")
    for path in glob.glob(os.path.join(BIN, "practical*")) + glob.glob(os.path.join(BIN, "homework*")):
        texts[os.path.basename(path)] = output_of(os.path.basename(path), "--help")
    return texts


def keys_in(value):
    """The names of all fields, at any depth, but not those inside lists of plain values."""
    if isinstance(value, list):
        return set().union(*map(keys_in, value))
    if not isinstance(value, dict):
        return set()
    return set(value).union(*map(keys_in, value.values()))


class Docs(unittest.TestCase):
    def test_every_layer_has_its_page(self):
        names = {"architecture", "base", "device", "parallel", "labs", "building", "performance"}
        self.assertLessEqual({f"docs/{name}.md" for name in names}, set(pages()))

    def test_links_lead_somewhere(self):
        for page, text in texts():
            for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
                if re.match(r"[a-z]+:", target):
                    continue
                path, _, anchor = target.partition("#")
                goal = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
                self.assertTrue(os.path.exists(os.path.join(REPO, goal)), f"{page} links to {target}")
                if anchor:
                    self.assertIn(anchor, anchors(read(goal)), f"{page} links to {target}")

    def test_paths_exist(self):
        top = [name for name in os.listdir(REPO) if name not in GENERATED and name != ".git"]
        for page, text in texts():
            for quoted in re.findall(r"`([^`\n]+)`", prose(text)):
                path = quoted.split()[0]
                if not any(path == name and "." in name or path.startswith(name + "/") for name in top):
                    continue
                self.assertTrue(glob.glob(os.path.join(REPO, path)), f"{page} names {path}")

    def test_codes_are_explained(self):
        known = dict(re.findall(r"^(LS\d{4})  (.+)$", output_of("lockstep", "explain"), re.MULTILINE))
        self.assertTrue(known)
        for page, text in texts():
            for code in set(re.findall(r"LS\d{4}", text)):
                self.assertIn(code, known, page)
        for code, title in known.items():
            self.assertIn(f"| {code} | {title} |", read("docs/base.md"))

    def test_flags_of_the_programs(self):
        real = {flag for text in help_texts().values() for flag in flags_in(text)}
        text = read("docs/labs.md") + read("docs/own_programs.md")
        self.assertEqual(flags_in(text) - real - {"--install"}, set(), "a page names flags that no program has")
        in_tables = flags_in("\n".join(re.findall(r"^\|.*$", text, re.MULTILINE)))
        self.assertEqual(real - in_tables - {"--version"}, set(), "the tables of the pages leave flags out")

    def test_flags_of_the_scripts(self):
        real = {flag for name in ("quickstart", "test", "lint") for flag in flags_in(read(f"scripts/{name}"))}
        for page, text in texts():
            for line in re.findall(r"scripts/(?:quickstart|test|lint)([^`|\n#]*)", text):
                self.assertEqual(flags_in(line) - real, set(), page)

    def test_record_fields(self):
        record = json.loads(output_of("practical5_dp", "--devices", "cpu:2", "--steps", "4", "--batch", "4", "--dim", "4",
                                      "--hidden", "4", "--quiet", "--json", "-"))
        text = read("docs/base.md")
        for key in keys_in(record):
            self.assertIn(f"`{key}`", text, "docs/base.md leaves out a field of the record")
        table = text.split("| field | meaning |")[1].split("\n\n")[0]
        self.assertLessEqual(set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)), set(record))

    def test_quoted_files_are_the_files(self):
        quoted = []
        for page, text in texts():
            for language, body in fenced_blocks(text):
                first, _, rest = body.partition("\n")
                if language != "cpp" or not first.startswith("// file: "):
                    continue
                path = first.removeprefix("// file: ").strip()
                quoted.append(path)
                self.assertEqual(rest, read(path), f"{page} quotes {path}")
        self.assertIn("examples/tutorial_distributed.cpp", quoted)

    def test_commands_exist(self):
        for page, text in texts():
            for _, body in fenced_blocks(text):
                for name in re.findall(r"^\$ build/release/bin/(\S+)", body, re.MULTILINE):
                    self.assertTrue(os.access(os.path.join(BIN, name), os.X_OK), f"{page} runs {name}")
                for path in re.findall(r"^\$ (scripts/\S+)", body, re.MULTILINE):
                    self.assertTrue(os.access(os.path.join(REPO, path), os.X_OK), f"{page} runs {path}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    BIN, REPO = map(os.path.abspath, sys.argv[1:])
    unittest.main(argv=sys.argv[:1])
