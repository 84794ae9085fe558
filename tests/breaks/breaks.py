"""A break: an edit that makes the library wrong, and the test that must notice it.

The edits live in table.py. They are exact texts, so a change of the code they name makes
`run.py texts` fail, and the table cannot rot unseen.
"""
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Test:
    """A test program (its CMake target), and the cmocka tests of it that run (a pattern); or a
    command, in which {tree} and {build} stand for the folders, and the targets that it needs."""

    target: str
    filter: str = ""
    command: tuple = ()
    targets: tuple = ()

    def __str__(self):
        program = self.target.replace("_test_", "/test_", 1)
        return f"{program}: {self.filter}" if self.filter else program


@dataclass(frozen=True)
class Edit:
    """Replaces the one place where `find` stands in `file`."""

    file: str
    find: str
    replace: str

    def problem(self, root):
        """Why it cannot be applied, or None."""
        path = Path(root, self.file)
        if not path.is_file():
            return f"{self.file}: there is no such file"
        count = path.read_text().count(self.find)
        return None if count == 1 else f"{self.file}: found {count} times instead of once: {self.find}"

    def apply(self, root):
        path = Path(root, self.file)
        path.write_text(path.read_text().replace(self.find, self.replace))


@dataclass(frozen=True)
class Break:
    name: str
    edits: tuple
    test: Test
    harmless: bool = False  # a control: the test must pass all the same
    may_hang: bool = False  # ctest's time limit is what ends the test then

    def problems(self, root):
        return [problem for edit in self.edits if (problem := edit.problem(root))]


def one(name, file, find, replace, test, **more):
    """A break of one edit."""
    return Break(name, (Edit(file, find, replace),), test, **more)
