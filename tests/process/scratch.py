"""A folder for each test, gone afterwards."""
import os
import pathlib
import tempfile
import unittest


class ScratchTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def path(self, name):
        return os.path.join(self.folder, name)
