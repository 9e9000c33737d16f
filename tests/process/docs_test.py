"""Keeps the documentation true: README.md and docs/*.md against the tree and the programs.

usage: docs_test.py BIN_FOLDER REPO_FOLDER
"""

import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

BIN, REPO = "", ""  # set by main

# Made by a build or a run; a page may name them before they exist.
GENERATED = ("build", "reports")

# Pages whose C++ uses private headers.
ABOUT_INTERNALS = ("docs/report.md",)


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


def cpp_blocks():
    """(page, line, body) of every C++ block of the pages; `line` is that of the body's first line."""
    for page, text in texts():
        for block in re.finditer(r"^```cpp\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            yield page, text[:block.start(1)].count("\n") + 1, block[1]


def is_quoted(body):
    return body.startswith(("// file: ", "// from: "))


def steps_of(text):
    """The programs of a page that begins with a complete one and changes it in `diff` blocks, one for each step."""
    programs = []
    for language, body in fenced_blocks(text):
        if language == "cpp" and not programs:
            programs.append(body)
        elif language == "diff":
            program = programs[-1]
            for hunk in body.split("@@\n"):
                lines = hunk.splitlines()
                before = "".join(line[1:] + "\n" for line in lines if line[:1] != "+")
                after = "".join(line[1:] + "\n" for line in lines if line[:1] != "-")
                if program.count(before) != 1:
                    raise AssertionError(f"these lines occur {program.count(before)} times in the step before:\n{before}")
                program = program.replace(before, after)
            programs.append(program)
    return programs


def code_alone(program):
    """A program without comments and layout."""
    return re.sub(r"\s+", " ", re.sub(r"//.*", "", program)).strip()


def in_one_unit(programs, fragments):
    """One translation unit: each program in a namespace of its own, each fragment in a function of its own.

    programs and fragments: (page, line, body); the compiler reports errors by page and line."""
    unit = [f'#include "{os.path.join(REPO, "tests", "process", "docs_prelude.hpp")}"\n']
    for number, (page, line, body) in enumerate(programs):
        body = re.sub(r"^#include", "//", body, flags=re.MULTILINE)
        unit.append(f'namespace program_{number} {{\n#line {line} "{page}"\n{body}}}\n')
    for number, (page, line, body) in enumerate(fragments):
        unit.append(f'void fragment_{number}() {{\n#line {line} "{page}"\n{body}}}\n')
    return "".join(unit)


def compile_command(source):
    """How this build compiles the course's programs, to check another source with; None if the build does not say."""
    path = os.path.join(os.path.dirname(BIN), "compile_commands.json")
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as file:
        known = {os.path.basename(entry["file"]): entry["command"] for entry in json.load(file)}
    words = shlex.split(known["practical6_ddp.cpp"])
    kept = words[:words.index("-o")]
    return kept + ["-w", "-fsyntax-only", "-x", "c++", source]


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
        names = {"index", "architecture", "base", "device", "parallel", "labs", "building", "performance"}
        self.assertLessEqual({f"docs/{name}.md" for name in names}, set(pages()))

    def test_the_index_lists_every_page(self):
        listed = set(re.findall(r"\]\((\w+\.md)\)", read("docs/index.md")))
        self.assertEqual({os.path.basename(page) for page in pages()} - {"README.md", "index.md"} - listed, set())

    def test_rows_have_as_many_cells_as_their_header(self):
        """A bar inside of code divides a cell, too, unless it is written \\|."""
        for page, text in texts():
            wanted = None
            for line in re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).splitlines():
                bars = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else None
                if wanted is not None and bars is not None:
                    self.assertEqual(bars, wanted, f"{page}: {line}")
                wanted = bars

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
        text = read("docs/labs.md") + read("docs/own_programs.md") + read("docs/verify.md")
        others = flags_in(output_of("gpt2", "train", "--help") + output_of("verify_models", "--help"))
        self.assertEqual(flags_in(text) - real - others - {"--install"}, set(), "a page names flags that no program has")
        in_tables = flags_in("\n".join(re.findall(r"^\|.*$", text, re.MULTILINE)))
        self.assertEqual(real - in_tables - {"--version"}, set(), "the tables of the pages leave flags out")

    def test_flags_of_the_scripts(self):
        real = {flag for name in ("quickstart", "test", "lint", "package", "fuzz") for flag in flags_in(read(f"scripts/{name}"))}
        for page, text in texts():
            for line in re.findall(r"scripts/(?:quickstart|test|lint|package|fuzz)([^`|\n#]*)", text):
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
        for page, line, body in cpp_blocks():
            first, _, rest = body.partition("\n")
            if first.startswith("// file: "):
                path = first.removeprefix("// file: ").strip()
                self.assertEqual(rest, read(path), f"{page}:{line} quotes {path}")

    def test_quoted_lines_are_in_their_files(self):
        quoted = set()
        for page, line, body in cpp_blocks():
            first, _, rest = body.partition("\n")
            if first.startswith("// from: "):
                path = first.removeprefix("// from: ").strip()
                quoted.add(path)
                self.assertIn("\n" + rest, "\n" + read(path), f"{page}:{line} quotes {path}")
        self.assertLessEqual({"examples/tutorial_distributed.cpp", "examples/tutorial_training.cpp"}, quoted)

    def test_steps_lead_to_the_tutorial(self):
        steps = steps_of(read("docs/first_program.md"))
        self.assertEqual(len(steps), 4)
        self.assertEqual(code_alone(steps[-1]), code_alone(read("examples/tutorial_distributed.cpp")))

    def test_snippets_compile(self):
        """Every C++ block that is not quoted from a file of the tree, unless an ellipsis leaves something out."""
        programs, fragments = [], []
        for page, line, body in cpp_blocks():
            if is_quoted(body) or "…" in body or "..." in body or page in ABOUT_INTERNALS:
                continue
            (programs if "int main(" in body else fragments).append((page, line, body))
        programs += [("docs/first_program.md", 1, step) for step in steps_of(read("docs/first_program.md"))[1:]]
        self.assertGreater(len(fragments), 20)
        with tempfile.TemporaryDirectory() as folder:
            source = os.path.join(folder, "pages.cpp")
            with open(source, "w", encoding="utf-8") as file:
                file.write(in_one_unit(programs, fragments))
            command = compile_command(source)
            if command is None:
                self.skipTest("this build has no compile_commands.json")
            result = subprocess.run(command, capture_output=True, text=True, cwd=os.path.dirname(BIN), timeout=300)
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_every_header_is_in_the_group_of_a_layer(self):
        for path in glob.glob(os.path.join(REPO, "include", "lockstep", "**", "*.hpp"), recursive=True):
            command = [sys.executable, os.path.join("cmake", "doxygen_filter.py"), path]
            result = subprocess.run(command, capture_output=True, text=True, cwd=REPO)
            self.assertEqual(result.returncode, 0, f"{path}: {result.stderr}")
            self.assertIn("@defgroup", result.stdout)

    def test_doxygen_does_not_warn(self):
        if shutil.which("doxygen") is None:
            self.skipTest("doxygen is not installed")
        with tempfile.TemporaryDirectory() as folder:
            result = subprocess.run(["doxygen", "-"], input=f"@INCLUDE = Doxyfile\nOUTPUT_DIRECTORY = {folder}\n",
                                    capture_output=True, text=True, cwd=REPO, timeout=300)
            self.assertTrue(os.path.exists(os.path.join(folder, "html", "group__parallel.html")))
        self.assertEqual((result.returncode, result.stderr), (0, ""))

    def test_public_types_have_a_brief(self):
        definition = re.compile(r"(.*)\n(?:(?:template|requires).*\n)*(?:struct|class|enum class) (\w+)\b[^;<\n]*\{")
        without = []
        for path in glob.glob(os.path.join(REPO, "include", "lockstep", "**", "*.hpp"), recursive=True):
            path = os.path.relpath(path, REPO)
            without += [f"{path}: {name}" for before, name in definition.findall(read(path)) if not before.startswith("///")]
        self.assertEqual(without, [], "these types have no brief")

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
