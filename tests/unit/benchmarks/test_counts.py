"""Counts in the options of measurements and examples."""

from importlib import import_module

import pytest

from dit.errors import EXIT_CONFIG


@pytest.mark.parametrize(
    ("module", "option"),
    [
        *((f"benchmarks.{name}", "--repeats") for name in ("ceilings", "attention", "layers", "host")),
        *(("benchmarks.unets", option) for option in ("--rounds", "--batch")),
        *(
            ("benchmarks.packing", option)
            for option in ("--ranks", "--buffer", "--buffers", "--attention", "--pictures")
        ),
        *(("benchmarks.width_transfer", option) for option in ("--batch", "--steps")),
        *(("benchmarks.device_values", "--jobs"), ("examples.race.__main__", "--seeds")),
        *(("examples.letters.edits", option) for option in ("--variations", "--size")),
    ],
)
def test_zero_is_refused(module: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        import_module(module).main([option, "0"])
    assert ended.value.code == EXIT_CONFIG
    assert f"argument {option}: " in capsys.readouterr().err
