"""The command on a terminal of 80 columns, in real shells, and its manual pages.

usage: terminal_test.py BIN_FOLDER SHARE_FOLDER
"""

import fcntl
import glob
import os
import pathlib
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
import unicodedata
import unittest

BIN, SHARE = "", ""  # set by main

COURSE = ["practical5_single", "practical5_dp", "practical6_ddp", "practical7_accumulation", "practical7_amp",
          "homework2_combined", "practical10_hybrid"]
SMALL = ["--devices", "cpu:2", "--steps", "40", "--batch", "8", "--dim", "8", "--hidden", "8"]


def program(name):
    return os.path.join(BIN, name)


def output_of(*words):
    result = subprocess.run([program(words[0]), *words[1:]], capture_output=True, text=True, timeout=120)
    return result.stdout


def on_terminal(words, columns=80, term="xterm-256color", **variables):
    """What a program writes to a terminal of that width, standard error included, and its exit code."""
    environment = {**os.environ, "TERM": term, "LC_ALL": "C.UTF-8", **variables}
    environment.pop("COLUMNS", None)
    child, terminal = pty.fork()
    if child == 0:
        os.execve(words[0], words, environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    seen = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:
            break
        if not piece:
            break
        seen += piece
    os.close(terminal)
    return seen.decode(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def plain(text):
    return re.sub(r"\033\[[0-9;?]*[A-Za-z]", "", text)


def width(line):
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


class Help(unittest.TestCase):
    def all_help(self):
        yield "lockstep", output_of("lockstep", "--help")
        for name in re.findall(r"^  ([\w-]+) ", output_of("lockstep", "--help").split("Commands:\n")[1], re.MULTILINE):
            yield f"lockstep {name}", output_of("lockstep", "help", name)
        for name in COURSE:
            yield name, output_of(name, "--help")

    def test_eighty_columns_and_examples_first(self):
        names = []
        for name, text in self.all_help():
            names.append(name)
            with self.subTest(name):
                self.assertTrue(text.startswith("Examples:\n  "), text)
                self.assertEqual([line for line in text.splitlines() if width(line) > 80], [])
        self.assertIn("lockstep slurm-script", names)

    def test_all_ways_to_ask_are_one(self):
        self.assertEqual(output_of("lockstep", "help"), output_of("lockstep", "--help"))
        self.assertEqual(output_of("lockstep", "help", "run"), output_of("lockstep", "run", "--help"))
        self.assertEqual(output_of("lockstep", "help", "lab", "5"), output_of("lockstep", "lab", "5", "--help"))

    def test_a_named_lab_shows_its_own_flags(self):
        five = output_of("lockstep", "lab", "5", "--help")
        self.assertIn("--split-rows", five)
        self.assertNotIn("--micro-batches", five)
        self.assertNotIn("lab 6", five)
        self.assertIn("--micro-batches", output_of("lockstep", "lab", "--help"))

    def test_no_argument_gives_a_short_text(self):
        text = output_of("lockstep")
        self.assertTrue(text.startswith("Examples:\n"))
        self.assertLess(len(text.splitlines()), 16)
        self.assertIn("lockstep help", text)


class Completion(unittest.TestCase):
    def bash(self, line):
        script = f"""
source <("{program('lockstep')}" completion bash)
COMP_LINE={line!r}
read -ra COMP_WORDS < <(sed 's/=/ = /g' <<< "$COMP_LINE")
[[ $COMP_LINE == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
compopt() {{ :; }}
_lockstep
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
        result = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=60)
        self.assertEqual(result.stderr, "")
        return result.stdout.splitlines() if result.stdout.strip() else []

    def test_bash(self):
        self.assertEqual(self.bash("lockstep la"), ["lab"])
        self.assertIn("doctor", self.bash("lockstep "))
        self.assertNotIn("write-share", self.bash("lockstep "))
        self.assertEqual(self.bash("lockstep lab "), ["5", "6", "7", "10", "homework2", "all"])
        self.assertEqual(self.bash("lockstep lab 5 --sp"), ["--split-rows", "--split-devices"])
        self.assertEqual(self.bash("lockstep lab 6 --sp"), [])
        self.assertEqual(self.bash("lockstep lab --quick 5 --split-r"), ["--split-rows"])
        self.assertEqual(self.bash("lockstep run --backend g"), ["gloo"])
        self.assertEqual(self.bash("lockstep run --backend=g"), ["gloo"])
        self.assertEqual(self.bash("lockstep run -n "), ["auto", "cpu", "gpu"])
        self.assertEqual(self.bash("lockstep lab 7 --amp "), ["bf16", "fp16"])
        self.assertEqual(self.bash("lockstep explain LS000"), [f"LS000{i}" for i in range(10)])
        self.assertEqual(self.bash("lockstep completion "), ["bash", "zsh", "fish"])
        self.assertIn("bash", self.bash("lockstep run -n 2 bas"))
        with tempfile.TemporaryDirectory() as folder:
            os.mkdir(os.path.join(folder, "my reports"))
            open(os.path.join(folder, "my file"), "w", encoding="utf-8").close()
            self.assertEqual(self.bash(f"lockstep lab 5 --out {folder}/my"), [f"{folder}/my reports"])

    def shell_screen(self, words, setup, typed, wanted):
        """Types into an interactive shell and gives back what the screen shows."""
        with tempfile.TemporaryDirectory() as home:
            child, terminal = pty.fork()
            if child == 0:
                os.chdir(home)
                os.execvpe(words[0], words, {"PATH": BIN + ":" + os.environ["PATH"], "HOME": home, "ZDOTDIR": home,
                                             "TERM": "xterm", "LC_ALL": "C.UTF-8", "PS1": "READY> "})
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 120, 0, 0))

            def read_until(text, patience=30):
                seen, give_up = "", time.monotonic() + patience
                while time.monotonic() < give_up:
                    if select.select([terminal], [], [], 0.2)[0]:
                        seen += os.read(terminal, 65536).decode(errors="replace")
                    if text in plain(seen):
                        return plain(seen)
                return plain(seen)

            try:
                os.write(terminal, (setup + "; echo SET''UP\n").encode())
                read_until("SETUP\r\n")
                os.write(terminal, typed.encode())
                return read_until(wanted)
            finally:
                os.kill(child, 9)
                os.waitpid(child, 0)
                os.close(terminal)

    def test_bash_with_a_real_tab(self):
        setup = "bind 'set enable-bracketed-paste off'; source <(lockstep completion bash); PS1='READY> '"
        for typed, wanted in {"lockstep la\t": "lockstep lab ", "lockstep lab 5 --split-r\t": "--split-rows "}.items():
            self.assertIn(wanted, self.shell_screen(["bash", "--norc", "-i"], setup, typed, wanted))

    @unittest.skipUnless(shutil.which("zsh"), "zsh is not installed")
    def test_zsh(self):
        setup = "autoload -Uz compinit; compinit -u; source <(lockstep completion zsh); PS1='READY> '"
        for typed, wanted in {"lockstep la\t": "lockstep lab ",
                              "lockstep lab hom\t": "homework2",
                              "lockstep lab 5 --split-r\t": "--split-rows",
                              "lockstep run --backend gl\t": "gloo",
                              "lockstep explain LS003\t\t": "LS0032",
                              "lockstep run -n 2 --dry\t": "--dry-run"}.items():
            with self.subTest(typed):
                self.assertIn(wanted, self.shell_screen(["zsh", "-f", "-i"], setup, typed, wanted))

    @unittest.skipUnless(shutil.which("zsh"), "zsh is not installed")
    def test_zsh_finds_the_installed_file(self):
        setup = f"fpath=({SHARE}/zsh/site-functions $fpath); autoload -Uz compinit; compinit -u; PS1='READY> '"
        self.assertIn("lockstep doctor ", self.shell_screen(["zsh", "-f", "-i"], setup, "lockstep doc\t", "lockstep doctor "))

    @unittest.skipUnless(shutil.which("fish"), "fish is not installed")
    def test_fish(self):
        def complete(line):
            script = f'lockstep completion fish | source; complete -C "{line}"'
            result = subprocess.run(["fish", "--no-config", "-c", script], capture_output=True, text=True, timeout=60,
                                    env={**os.environ, "PATH": BIN + ":" + os.environ["PATH"]})
            self.assertEqual(result.stderr, "")
            return [each.split("\t")[0] for each in result.stdout.splitlines()]
        self.assertEqual(complete("lockstep la"), ["lab"])
        self.assertEqual(sorted(complete("lockstep lab 5 --split")), ["--split-devices", "--split-rows"])
        self.assertEqual(complete("lockstep lab 6 --split"), [])
        self.assertEqual(complete("lockstep run --backend gl"), ["gloo"])


class Manual(unittest.TestCase):
    def pages(self):
        pages = sorted(glob.glob(os.path.join(SHARE, "man", "man1", "*.1")))
        names = {os.path.basename(page) for page in pages}
        self.assertLessEqual({"lockstep.1", "lockstep-run.1", "lockstep-lab.1", "lockstep-top.1", "lockstep-doctor.1"}, names)
        return pages

    @unittest.skipUnless(shutil.which("man"), "man is not installed")
    def test_man_has_nothing_to_complain_about(self):
        for page in self.pages():
            result = subprocess.run(["man", "--warnings", "-l", page], capture_output=True, text=True,
                                    env={**os.environ, "MANWIDTH": "80", "LC_ALL": "C.UTF-8", "PAGER": "cat"})
            self.assertEqual(result.stderr, "", page)
            for section in ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS"):
                self.assertRegex(result.stdout, rf"(?m)^{section}$", page)

    @unittest.skipUnless(shutil.which("mandoc"), "mandoc is not installed")
    def test_mandoc_has_nothing_to_complain_about(self):
        for page in self.pages():
            result = subprocess.run(["mandoc", "-Tlint", "-Wwarning", page], capture_output=True, text=True)
            self.assertEqual(result.stdout + result.stderr, "", page)

    def test_flags_are_those_of_the_help(self):
        for name in ("run", "lab", "top", "doctor"):
            page = pathlib.Path(SHARE, "man", "man1", f"lockstep-{name}.1").read_text().replace("\\-", "-")
            for flag in re.findall(r"^  (?:-\w,)?(--[\w-]+)", output_of("lockstep", name, "--help"), re.MULTILINE):
                self.assertIn(f"\\fB{flag}\\fR", page, f"{name} {flag}")


class Terminal(unittest.TestCase):
    def test_tables_fit_the_window(self):
        for columns in (80, 60):
            seen, code = on_terminal([program("practical5_dp"), *SMALL], columns)
            self.assertEqual(code, 0, seen)
            table = plain(seen).split("\r\n")
            table = table[next(i for i, line in enumerate(table) if "────" in line):]
            self.assertEqual([line for line in table if width(line) > columns], [])

    def test_progress_is_one_line_that_fits(self):
        seen, code = on_terminal([program("practical5_dp"), *SMALL], 60)
        self.assertEqual(code, 0, seen)
        lines = [line for line in seen.split("\r\n") if "step " in plain(line) and " | loss" in line]
        self.assertEqual(len(lines), 1, lines)
        for state in lines[0].split("\r"):
            self.assertLess(width(plain(state)), 60)

    def test_a_dumb_terminal_gets_no_control_sequences(self):
        seen, code = on_terminal([program("practical5_dp"), *SMALL], term="dumb")
        self.assertEqual(code, 0, seen)
        self.assertNotIn("\033", seen)
        self.assertIn("step 40/40", seen)
        self.assertEqual([line for line in seen.split("\r\n") if "\r" in line], [])

    def test_no_color(self):
        seen, _ = on_terminal([program("lockstep"), "lab", "5", "--help"], NO_COLOR="1")
        self.assertNotIn("\033", seen)

    def test_a_pipe_gets_the_whole_table(self):
        text = output_of("practical5_dp", *SMALL)
        self.assertNotIn("\033", text)
        self.assertNotIn("\r", text)


class Files(unittest.TestCase):
    def test_a_folder_that_takes_no_file_is_refused_before_training(self):
        for flag in ("--save", "--json", "--trace"):
            with self.subTest(flag):
                result = subprocess.run([program("practical5_single"), *SMALL, flag, "/proc/lockstep.out"],
                                        capture_output=True, text=True)
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertIn(f"error[LS0007]: {flag} /proc/lockstep.out: no file can be written to /proc", result.stderr)
                self.assertIn("help: name a file in a folder you may write to", result.stderr)
                self.assertEqual(result.stdout, "", "nothing was started")

    def test_a_folder_that_takes_files_is_left_as_it_was(self):
        with tempfile.TemporaryDirectory() as folder:
            result = subprocess.run([program("practical5_single"), *SMALL, "--save", f"{folder}/w.safetensors"],
                                    capture_output=True, text=True)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(os.listdir(folder), ["w.safetensors"])


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    BIN, SHARE = (os.path.abspath(sys.argv.pop(1)) for _ in range(2))
    unittest.main()
