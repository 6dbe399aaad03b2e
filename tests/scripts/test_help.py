"""Every program says what it does and which arguments it takes."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path for folder in ("scripts", "scripts/bench") for path in (ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_program_explains_itself(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(program), "--help"])
    monkeypatch.syspath_prepend(str(program.parent))  # as Python does for a program
    with pytest.raises(SystemExit) as exit_code:
        runpy.run_path(str(program), run_name="__main__")

    assert exit_code.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {program.name} ")
