"""Errors of files, and advice that fits the command that runs."""

from __future__ import annotations

import pickle

import pytest

from voxtune.errors import FileProblems, FilesError, InputError, advice, command_options


def problems_of(*pairs) -> FileProblems:
    problems = FileProblems()
    for file, error in pairs:
        problems.add(file, error)
    return problems


def test_no_problem_raises_nothing():
    problems_of().raise_all()


def test_one_file_gives_its_full_message_on_one_line():
    problems = problems_of(("a.nii", InputError("a.nii: no labels")), ("a.nii", InputError("a.nii: empty")))
    with pytest.raises(FilesError, match=r"^a\.nii: no labels; empty$") as caught:
        problems.raise_all()
    assert caught.value.rows == (("a.nii", "no labels; empty"),)


def test_several_files_give_the_first_problem_and_the_number_of_the_others():
    with pytest.raises(FilesError, match=r"^0\.nii: wrong; and 59 more files with errors$") as caught:
        problems_of(*((f"{i}.nii", f"{i}.nii: wrong") for i in range(60))).raise_all()
    assert caught.value.rows[59] == ("59.nii", "wrong") and len(caught.value.rows) == 60
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.rows) == (str(caught.value), caught.value.rows)


def test_duplicates_are_dropped_and_rows_of_another_error_are_kept():
    inner = FilesError([("b.nii", "torn"), ("c.nii", "torn")])
    with pytest.raises(FilesError) as caught:
        problems_of(("a.nii", inner), ("b.nii", "torn"), ("b.nii", "b.nii: torn")).raise_all()
    assert caught.value.rows == (("b.nii", "torn"), ("c.nii", "torn"))


CURES = ("give them with --labels", "choose a --workload", "renumber the mask")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "renumber the mask"),
        (("--fit",), "renumber the mask"),
        (("--labels",), "give them with --labels"),
        (("--workload", "--labels"), "give them with --labels, or choose a --workload"),
    ],
)
def test_advice_has_only_options_of_the_running_command(options, expected):
    with command_options(options):
        assert advice(*CURES) == expected
    assert advice(*CURES) == "renumber the mask"


def test_a_message_is_one_short_printable_line():
    """Names and values from files are part of messages."""
    message = str(InputError(f"a\x1b[31m.json: \ud800 unknown setting {'x' * 10**6}\n; choose from a, b"))
    assert len(message) == 500 and message.isprintable()
    assert message.startswith(r"a\x1b[31m.json: \ud800 unknown") and message.endswith("choose from a, b")
    assert str(pickle.loads(pickle.dumps(InputError("a: b")))) == "a: b"


def test_the_name_of_a_file_is_recognised_after_it_was_made_printable():
    name = "a\x1b[31m" + "n" * 400
    assert InputError(f"{name}: damaged").names(name) and not InputError("b: damaged").names(name)
    problems = problems_of(("a\nb", InputError("a\nb: empty")))
    assert problems.rows == (("a\nb", "empty"),)
