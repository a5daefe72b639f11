"""`python -m wandistiller COMMAND`."""

from wandistiller.cli.main import command

if __name__ == "__main__":
    command()
