"""`python -m voxtune` is the command line."""

from voxtune.cli.main import run

run()
