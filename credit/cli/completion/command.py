"""Arguments and output of ``credit completion``."""

from __future__ import annotations

import argparse

HELP = """Print the script with which a shell completes commands, options, config keys and their values (Tab key).

example:
  eval "$(credit completion bash)"                                   # add this line to ~/.bashrc
  eval "$(credit completion zsh)"                                    # to ~/.zshrc, after compinit
  credit completion fish > ~/.config/fish/completions/credit.fish"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the name of the shell."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")


def run_command(arguments: argparse.Namespace) -> int:
    """Print the completion script of the shell and return the exit status 0."""
    import argcomplete

    print(argcomplete.shellcode(["credit"], shell=arguments.shell), end="")
    return 0
