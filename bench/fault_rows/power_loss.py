"""A disk after a power loss, modelled from the system calls of a real process.

What was not flushed is gone: bytes of a file until fsync of the file, names until fsync of their folder. Some file
systems keep names earlier than that, so each moment has two disks: with flushed names only, and with all names.
"""

import os
import re
import shutil
import subprocess

CALLS = ("mkdir,mkdirat,openat,open,creat,write,pwrite64,ftruncate,fsync,fdatasync,"
         "rename,renameat,renameat2,unlink,unlinkat,rmdir")


class Node:
    def __init__(self, is_folder, data=b""):
        self.is_folder = is_folder
        self.data = self.flushed_data = data
        self.names, self.flushed_names = {}, {}


def read_disk(path):
    """Everything below a folder, flushed."""
    if not os.path.isdir(path):
        with open(path, "rb") as file:
            return Node(False, file.read())
    node = Node(True)
    node.names = {name: read_disk(os.path.join(path, name)) for name in os.listdir(path)}
    node.flushed_names = dict(node.names)
    return node


def write_disk(node, path, all_names):
    if not node.is_folder:
        with open(path, "wb") as file:
            file.write(node.flushed_data)
        return
    os.mkdir(path)
    for name, child in (node.names if all_names else node.flushed_names).items():
        write_disk(child, os.path.join(path, name), all_names)


def unescape(text):
    return bytes(int(digits, 16) for digits in re.findall(r"\\x([0-9a-f]{2})", text))


class Disk:
    """Applies calls as strace writes them (-y -xx)."""
    def __init__(self, root):
        self.root = root
        self.tree = read_disk(root)

    def _find(self, path):
        node = self.tree
        for part in os.path.relpath(path, self.root).split("/"):
            if part != ".":
                node = node.names[part]
        return node

    def apply(self, name, arguments):
        """Whether the call changed this disk."""
        paths = [os.fsdecode(unescape(text)) for text in re.findall(r'"((?:\\x[0-9a-f]{2})*)"', arguments)]
        opened = re.match(r"\d+<((?:\\x[0-9a-f]{2})+)", arguments)
        target = os.fsdecode(unescape(
            opened.group(1))) if opened and not name.endswith("at") and name != "renameat2" else (paths or [""])[0]
        if not (target + "/").startswith(self.root + "/"):
            return False
        folder, base = os.path.split(target)
        if name.startswith("mkdir"):
            self._find(folder).names[base] = Node(True)
        elif name in ("openat", "open", "creat"):
            if "O_CREAT" not in arguments or base in self._find(folder).names:
                return False
            self._find(folder).names[base] = Node(False)
        elif name in ("write", "pwrite64"):  # the former always at the end
            node = self._find(target)
            data = unescape(re.search(r'"(.*)"', arguments).group(1))
            at = len(node.data) if name == "write" else int(arguments.rpartition(", ")[2])
            node.data = node.data[:at].ljust(at, b"\0") + data + node.data[at + len(data):]
        elif name == "ftruncate":
            node = self._find(target)
            node.data = node.data[:int(re.search(r", (\d+)", arguments).group(1))]
        elif name in ("fsync", "fdatasync"):
            node = self._find(target)
            node.flushed_data, node.flushed_names = node.data, dict(node.names)
        elif name.startswith("rename"):
            into, new = os.path.split(paths[1])
            self._find(into).names[new] = self._find(folder).names.pop(base)
        else:  # unlink, unlinkat, rmdir
            del self._find(folder).names[base]
        return True


def survivors_of_each_call(command, first, scratch):
    """Runs `command FOLDER 2` on a copy of `first`. Yields a folder for each disk that a power loss may leave."""
    folder, log, survivors = os.path.realpath(scratch.file("") or
                                              ".") + "/live", scratch.file("calls"), scratch.file("survivors")
    shutil.copytree(first, folder)
    disk = Disk(folder)
    subprocess.run([
        "strace", "-f", "-y", "-xx", "-s", "1000000", "-qq", "-e", f"trace={CALLS}", "-e", "status=successful", "-o",
        log, *command, folder, "2"
    ],
                   check=True)
    with open(log) as file:
        calls = [found.groups() for line in file if (found := re.match(r"\d+\s+(\w+)\((.*)\)\s+= \d+", line))]
    for name, arguments in calls:
        if not disk.apply(name, arguments):
            continue
        for all_names in (False, True):
            shutil.rmtree(survivors, ignore_errors=True)
            write_disk(disk.tree, survivors, all_names)
            yield survivors
    if sorted(disk.tree.names) != sorted(os.listdir(folder)):
        raise AssertionError(f"the model of the disk has {sorted(disk.tree.names)}, it has {sorted(os.listdir(folder))}")
