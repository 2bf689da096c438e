"""`python -m voxtune` is the command line."""

from voxtune.cli.main import run

# Processes started side by side import this module again, and must not run the command again.
if __name__ == "__main__":
    run()
