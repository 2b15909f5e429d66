"""`jaxpg completion`: a script with which bash or zsh completes commands, options, tasks and algorithms."""

from __future__ import annotations

import argparse

from jaxpg.experiments.config_file import tasks
from jaxpg.experiments.parts import ALGORITHMS

NAMES = {"train": 2, "compare": 2, "sweep": 2, "show": 2, "plan": 1}
"""The commands that take a task, with 2 also algorithms; all others complete the names of files."""
SCRIPT = """_jaxpg() {
  local words
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="%s"
  else
    case "${COMP_WORDS[1]}" in
%s
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _jaxpg jaxpg"""


def run_completion(arguments: argparse.Namespace) -> int:
    """Print the script; it has the current names, so a shell generates it again when it starts."""
    options = arguments.words()
    names = {0: [], 1: [*tasks()], 2: [*tasks(), *ALGORITHMS]}
    cases = [f'      {c}) words="{" ".join([*names[NAMES.get(c, 0)], *words])}" ;;' for c, words in options.items()]
    if arguments.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    print(SCRIPT % (" ".join(options), "\n".join(cases)))
    return 0
